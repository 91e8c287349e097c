"""The evaluation stage: losses, benchmarks, and the sandbox for generated programs."""
