"""A path of a test as the package takes a place in a run folder."""

from __future__ import annotations

from pathlib import Path

from dualsft.system.paths import RunPath


def place(path: Path) -> RunPath:
    """A folder or a file, opened as everything in a run folder is."""
    return RunPath(path.parent, path.name)
