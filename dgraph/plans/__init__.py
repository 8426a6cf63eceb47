"""Parts of recipes beside passes, as plain values: rows, keys and values, budgets, calibration."""
