"""A model: finding, checking, loading, saving; its candidates; the sparse delta."""
