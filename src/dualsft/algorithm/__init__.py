"""The steps of Algorithm 1 as functions on in-memory values; no run folder."""
