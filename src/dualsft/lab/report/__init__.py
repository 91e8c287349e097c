"""report.html, report.md and the model card of a run."""
