"""Algorithm 1 of the paper, line by line, as functions of values."""
