"""Registry of parts that lower layers use without importing the modules that define them.

`dualsft/__init__.py` registers each part as "module:NAME"; the module is imported on first use.
Kinds: `methods` (tables of `Entry`), `stages` (stages after fine-tuning), `report` (writes the
report of a run), `checks` (functions from settings to problems, which must not import torch).
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import Any, Literal

Kind = Literal["methods", "stages", "report", "checks"]
_TARGETS: dict[Kind, list[str]] = defaultdict(list)


def add_part(kind: Kind, target: str) -> None:
    """Register the part at "module:NAME"; repeated registrations are ignored."""
    if target not in _TARGETS[kind]:
        _TARGETS[kind].append(target)


def parts(kind: Kind) -> list[Any]:
    """All parts of a kind, in order of registration."""
    return [load_target(target) for target in _TARGETS[kind]]


def load_target(target: str) -> Any:
    """Import and return the object at "module:NAME"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
