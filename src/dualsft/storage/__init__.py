"""Files of a run: manifests, tensors, vectors over the candidates, saved progress."""
