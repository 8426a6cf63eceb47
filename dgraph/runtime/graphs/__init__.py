"""CUDA graphs, pinned memory that a device writes, and uploads that do not block the host."""
