"""Other methods, diagnostics, evaluation, comparisons, reports and estimates around Algorithm 1."""
