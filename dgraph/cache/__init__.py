"""The cache of compiled artifacts: content-addressed entries, stored for later processes.

Stored are captured graphs, compiled regions, and for a GPU compiled kernels and the tilings that were chosen for them.

`artifact` is the format of an entry, `key` says what an entry depends on, `place` where the folder is and whether it is
safe, `store` finds and puts entries, `upkeep` lists, checks and carries them. It knows files and keys, not graphs.
"""
