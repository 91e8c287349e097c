"""Benchmarks of DualSFT's cost and accuracy, as ratios to a reference measured in the same run.

See `python -m benchmarks --help` for usage and docs/performance.md for the figures.
"""
