"""Training: the SFT loop and the SparseAdamW optimizer."""
