"""One line of the table of methods: what a method is, before any of its code is imported.

A method answers one question on one axis: which examples (`data`), which entries (`params`), how
much each token or example counts (`weights`), what is done to the trained weights (`after`). The
class that answers it is named as "module:Class" and imported when a run uses it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dualsft.config.parse import FieldSpec, field_docs, field_spec

Axis = Literal["data", "params", "weights", "after"]
AXES: tuple[Axis, ...] = ("data", "params", "weights", "after")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """A method without settings of its own."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered method."""

    name: str
    axis: Axis
    target: str
    """Where its class is, as "module:Class"."""
    summary: str
    """What it selects or does, in one line."""
    cost: str
    """Passes over the data, and what grows with what."""
    memory: str
    source: str
    """Paper, and what our version was written from."""
    deviations: str = "none"
    """Where ours differs from the original, and why."""
    needs: tuple[str, ...] = ()
    """Stages whose results it reads: warmup, scores (which is all of them)."""
    spared: Callable[[Any], bool] = lambda options: False
    """Whether these options make it do without the stages of `needs`."""
    options: type = NoOptions
    """A dataclass; its fields are the settings `method.<name>.<field>`."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """What `method.preset=paper` sets the options to: the DualSFT paper's own values."""
    lr_ratio: float = 1.0
    """Its learning rate over plain fine-tuning's (the DualSFT paper's tables, Llama-3.2-3B)."""
    trains: bool = False
    """Whether it trains while it chooses, and so depends on finetune.*."""
    uses_budget: bool = True
    """Whether select.data_budget or select.param_budget says how much it takes."""
    parallel: bool = False
    """Whether several processes share its work; otherwise the first does it while others wait."""
    lends: bool = False
    """Data: whether its choice depends on nothing of the parameter side and is all in what it
    returns, so that a run with another parameter side may take it over (`runs/stages/reuse.py`)."""
    extra: str | None = None
    """The optional package that it needs."""

    def specs(self) -> dict[str, FieldSpec]:
        """Its settings by full key."""
        return option_specs(f"method.{self.name}", self.options)

    def docs(self) -> dict[str, str]:
        """The documentation of each option."""
        return option_docs(self.options)


def option_specs(prefix: str, options: type) -> dict[str, FieldSpec]:
    """The fields of a dataclass of options as settings, by full key."""
    hints = typing.get_type_hints(options, include_extras=True)
    return {
        f"{prefix}.{f.name}": field_spec(f"{prefix}.{f.name}", hints[f.name], f.default)
        for f in dataclasses.fields(options)
    }


@functools.cache
def option_docs(options: type) -> dict[str, str]:
    """The string under each field of a dataclass of options."""
    found = field_docs(inspect.getsource(sys.modules[options.__module__]))
    return {name: text for (owner, name), text in found.items() if owner == options.__name__}
