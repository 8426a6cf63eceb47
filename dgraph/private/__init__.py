"""Everything that reaches into the inside of torch or triton: one file for each."""
