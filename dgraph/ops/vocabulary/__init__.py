"""Embeddings, and LM heads whose logits are mixed back into embeddings."""
