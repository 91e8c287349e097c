"""Figures."""
def fidelity(result, path): return []
def drift(result, path): return []
def reverse(result, path): return []
