"""The cache of compiled artifacts: content-addressed entries, stored for later processes.

Stored are captured graphs, compiled regions, and for a GPU compiled kernels and the tilings that were chosen for them.
The modules know files and keys, not graphs.

- `artifact`: the format of an entry.
- `key`: everything that an entry depends on.
- `place`: the folder of the cache, and the check that it is safe.
- `store`: finds and puts entries.
- `upkeep`: lists, checks and carries entries.
"""
