"""Parts that the top of the package hands down, so that lower layers need not know where they are.

`dualsft/__init__.py` names them as "module:NAME"; the module is imported when a part is first used.
Kinds: `methods` (tables of `Entry`), `stages` (what follows fine-tuning), `report` (writes a run's
report), `checks` (settings to problems, before anything heavy is imported).
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import Any, Literal

Kind = Literal["methods", "stages", "report", "checks"]
_TARGETS: dict[Kind, list[str]] = defaultdict(list)


def add_part(kind: Kind, target: str) -> None:
    """Hand down what "module:NAME" is."""
    if target not in _TARGETS[kind]:
        _TARGETS[kind].append(target)


def parts(kind: Kind) -> list[Any]:
    """Everything of this kind, in the order in which it was added."""
    return [load_target(target) for target in _TARGETS[kind]]


def load_target(target: str) -> Any:
    """What "module:NAME" is."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
