"""Serve many requests in one packed step: the host decides, without tensors, which of them take part.

- `jobs`: the values that pass between the engine and its scheduler.
- `scheduler`: the queue and the running requests.
- `policies`: the schedulers by name, which say which requests are admitted, and in which order rows are given out.
- `costs`: how long a step takes.
- `load`: traces and arrivals.
- `served`: what was measured of requests.
- `simulate`: a simulation that drives all of it with a virtual clock.
"""
