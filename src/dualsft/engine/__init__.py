"""Gradients of many examples in one backward pass: G, per-example dot products, bounds."""
