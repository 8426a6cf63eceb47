"""Slow, plain-PyTorch oracles written from the papers. They share no code with the package under test."""
