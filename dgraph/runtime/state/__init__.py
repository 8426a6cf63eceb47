"""Decoding state of sequences, as tensors on the device, by the way in which a model is denoised."""
