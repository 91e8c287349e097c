"""Ghost engine: G, per-example dot products and norm bounds in one backward pass per batch."""
