"""A run: the pipeline of stages over a run folder."""
