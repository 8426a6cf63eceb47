"""What recipes are made of beside passes, as plain values: rows, keys and values, budgets, calibration."""
