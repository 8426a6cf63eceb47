"""Many requests in one packed step: which of them take part is decided here, on the host, without tensors.

`jobs` has the values that pass between the engine and its scheduler, `scheduler` the queue and the running requests,
`policies` who is admitted and in which order rows are given out, `costs` how long a step takes, `load` traces and
arrivals, `served` what was measured of requests, and `simulate` drives all of it with a virtual clock.
"""
