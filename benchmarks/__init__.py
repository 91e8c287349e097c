"""What DualSFT costs and how exact it is, each figure a ratio to a reference of the same run.

`python -m benchmarks --help` tells how to run them; docs/performance.md explains the figures.
"""
