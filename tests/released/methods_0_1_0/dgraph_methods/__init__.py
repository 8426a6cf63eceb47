"""Three published methods, each in one file: DPad (a region), KLASS (a decoding rule), SparseD (a pass and an op)."""
