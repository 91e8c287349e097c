"""Files of a run: manifests, tensor files, vectors over the candidates, saved progress."""
