"""Reports of a run: report.html, report.md and model_card.md."""
