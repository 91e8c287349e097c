"""Every setting of a run, defined once: fields, parsing, checks."""
