"""The steps of Algorithm 1, one module each, in the order in which `runs/pipeline.py` runs them."""
