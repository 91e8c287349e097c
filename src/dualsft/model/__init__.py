"""Resolve, check, load and save a model; list its candidate parameters; apply the sparse delta."""
