"""The LM head in chunks, reduced to tokens and confidences."""
