"""The training loop and SparseAdamW."""
