"""Memory plans: where G and the direction are stored during a walk, and what fits."""
