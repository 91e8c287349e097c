"""Runs: the pipeline of stages and the run folder."""
