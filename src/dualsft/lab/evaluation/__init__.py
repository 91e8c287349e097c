"""The evaluation stage: losses, benchmarks, the sandbox for generated programs."""
