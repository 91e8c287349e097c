"""Where G and the direction are kept while a walk runs, and what fits."""
