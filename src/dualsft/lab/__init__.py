"""What reproduces and judges: methods, diagnostics, evaluation, comparisons, reports."""
