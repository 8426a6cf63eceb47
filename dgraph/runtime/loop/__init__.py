"""The decode loop: sessions, batches, the transition between steps, and reports to the host."""
