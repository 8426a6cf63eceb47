"""Kernels for CPUs, in C++, which are compiled where they first run."""
