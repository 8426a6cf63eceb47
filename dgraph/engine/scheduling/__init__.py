"""Scheduling on the host: the requests that take part in a step, without tensors."""
