"""The steps of Algorithm 1, one module each, in the order in which `pipeline.py` runs them."""
