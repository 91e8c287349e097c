"""Settings of a run: field definitions, parsing and checks."""
