"""The stages of Algorithm 1, one module each; `runs/pipeline.py` runs them in order."""
