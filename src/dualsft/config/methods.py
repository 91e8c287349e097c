"""The registry of methods: every method by axis and name, and what a run is composed of.

A method answers one question on one axis: which examples (`data`), which entries (`params`), how
much each token or example counts (`weights`), what is done to the trained weights (`after`). A
config names one method per axis, so LESS + S²FT is `method.data=less method.params=s2ft`.

This module knows no method. The tables are handed down by `dualsft/__init__.py` (`parts.py`), and
other packages add theirs through entry points of the group `dualsft.methods`, each an `Entry`. The
class of a method is named as "module:Class" and imported when a run uses it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from dualsft.config.parse import FieldSpec, convert, field_docs, field_spec, show
from dualsft.config.parts import load_target, parts
from dualsft.errors import ConfigError

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


# --- the registry --------------------------------------------------------------------------------

PLUGINS = "dualsft.methods"
SIDES: dict[str, dict[Axis, str]] = {
    "dual": {"data": "dualsft", "params": "dualsft"},
    "data": {"data": "dualsft", "params": "all"},
    "param": {"data": "all", "params": "dualsft"},
}
"""What `select.variant` names on the two axes of selection."""


@functools.cache
def registry() -> dict[Axis, dict[str, Entry]]:
    """Every method by axis and name, in the order of the tables."""
    found: dict[Axis, dict[str, Entry]] = {axis: {} for axis in AXES}
    tables = [entry for table in parts("methods") for entry in table]
    plugins = [point.load() for point in entry_points(group=PLUGINS)]
    for entry in (*tables, *plugins):
        if not isinstance(entry, Entry):
            raise ConfigError(f"entry point {PLUGINS}: {entry!r} is not a {Entry.__module__}.Entry")
        if entry.name in found[entry.axis]:
            raise ConfigError(
                f"two methods are called {entry.name!r} on the axis {entry.axis}; rename one"
            )
        found[entry.axis][entry.name] = entry
    return found


def find(axis: Axis, name: str) -> Entry:
    """The method of this name; a miss says what is near."""
    known = registry()[axis]
    if name not in known:
        others = [other for other in AXES if name in registry()[other]]
        close = difflib.get_close_matches(name, known, n=1)
        cure = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
        if others:
            cure = f"it is a method of method.{others[0]}"
        raise ConfigError(f"method.{axis}: {name!r} is no method of this axis; {cure}")
    return known[name]


@dataclass(frozen=True)
class Composition:
    """The methods of a run, one an axis; None where an axis has none."""

    entries: Mapping[Axis, Entry]
    options: Mapping[str, Any]
    preset: str

    def __getitem__(self, axis: Axis) -> Entry | None:
        return self.entries.get(axis)

    def name(self, axis: Axis) -> str | None:
        entry = self.entries.get(axis)
        return None if entry is None else entry.name

    @property
    def title(self) -> str:
        """How a table names it: less + s2ft."""
        return row_name({axis: entry.name for axis, entry in self.entries.items()})

    @property
    def needs(self) -> set[str]:
        """Stages that some method reads."""
        return {stage for axis in self.entries for stage in self.needs_of(axis)}

    def needs_of(self, axis: Axis) -> tuple[str, ...]:
        """Stages that the method on an axis reads, with the options it has."""
        entry = self.entries[axis]
        return () if entry.spared(self.options_of(axis)) else entry.needs

    @property
    def parallel(self) -> bool:
        """Whether several processes share the choosing."""
        return all(self.entries[axis].parallel for axis in ("data", "params"))

    def scored(self, axis: Axis) -> bool:
        """Whether this axis is chosen by DualSFT's scores."""
        entry = self.entries.get(axis)
        return entry is not None and "scores" in entry.needs

    def options_of(self, axis: Axis) -> Any:
        """The options of the method on an axis: defaults, the preset, what the user set."""
        entry = self.entries[axis]
        values = dict(entry.paper) if self.preset == "paper" else {}
        prefix = f"{entry.name}."
        values |= {k[len(prefix) :]: v for k, v in self.options.items() if k.startswith(prefix)}
        return entry.options(**values)

    def load(self, axis: Axis) -> Any:
        """The method itself, made with its options; None where there is none."""
        entry = self.entries.get(axis)
        if entry is None:
            return None
        return load_target(entry.target)(entry, self.options_of(axis))

    def settings(self, axis: Axis) -> dict[str, Any]:
        """What decides this method's result, for a fingerprint."""
        entry = self.entries.get(axis)
        if entry is None:
            return {}
        options = self.options_of(axis)
        fields = {name: getattr(options, name) for name in options.__dataclass_fields__}
        shown = {f"method.{entry.name}.{key}": value for key, value in fields.items()}
        return {f"method.{axis}": entry.name, **shown}


def names_of(values: Mapping[str, Any]) -> dict[Axis, str]:
    """The method of each axis that flat settings name; `select.variant` where they do not."""
    sides = SIDES[values.get("select.variant", "dual")]
    chosen: dict[Axis, str] = {}
    for axis in AXES:
        if name := values.get(f"method.{axis}") or sides.get(axis):
            chosen[axis] = name
    return chosen


def compose(values: Mapping[str, Any]) -> Composition:
    """The methods that flat, valid settings name."""
    entries: dict[Axis, Entry] = {}
    for axis, name in names_of(values).items():
        entries[axis] = find(axis, name)
    return Composition(entries, values["method.options"], values["method.preset"])


def problems_of(values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """(what is wrong with `method.*`, the options converted by their methods' own types)."""
    problems: list[str] = []
    entries: dict[Axis, Entry] = {}
    for axis, name in names_of(values).items():
        try:
            entries[axis] = find(axis, name)
        except ConfigError as problem:
            problems += problem.problems
    variant = values.get("select.variant", "dual")
    sides: tuple[tuple[Axis, str], ...] = (("data", "param"), ("params", "data"))
    for axis, side in sides:
        given = values.get(f"method.{axis}")
        if given is not None and variant == side:
            problems.append(
                f"method.{axis}: {given!r} is not allowed with select.variant={variant}, which "
                f"leaves this side whole; leave select.variant out"
            )
    both = all(e is not None and "scores" in e.needs for e in map(entries.get, AXES[:2]))
    if values.get("select.rounds", 0) > 0 and not both and variant == "dual":
        problems.append(
            f"select.rounds: {values['select.rounds']} is not allowed unless both sides are "
            "dualsft's; give select.rounds=0"
        )
    options: dict[str, Any] = {}
    specs = {
        key: spec
        for methods in registry().values()
        for entry in methods.values()
        for key, spec in entry.specs().items()
    }
    used = {entry.name for entry in entries.values()}
    for key, value in (values.get("method.options") or {}).items():
        spec = specs.get(f"method.{key}")
        if spec is None:
            problems.append(_unknown_option(key, list(specs)))
            continue
        if key.partition(".")[0] not in used and not problems:
            problems.append(
                f"method.{key}: {show(value)} has no effect: no axis of this run has the method "
                f"{key.partition('.')[0]!r}; name it, as in method.params="
                f"{key.partition('.')[0]}, or leave the option out"
            )
        try:
            options[key] = convert(spec, value)
        except ConfigError as problem:
            problems += problem.problems
    return problems, options


def _unknown_option(key: str, known: list[str]) -> str:
    name = key.partition(".")[0]
    own = [k for k in known if k.startswith(f"method.{name}.")]
    close = difflib.get_close_matches(f"method.{key}", own or known, n=1)
    cure = f"did you mean {close[0]!r}?" if close else "`dualsft methods` lists them"
    return f"method.{key}: no such key; {cure}"


# --- rows of a table -----------------------------------------------------------------------------

ROWS: dict[str, dict[Axis, str]] = {
    "sft": {"data": "all", "params": "all"},
    "dualsft": SIDES["dual"],
    "dualsft-data": SIDES["data"],
    "dualsft-param": SIDES["param"],
}
"""Names of whole rows; others are methods joined by +, what is not named being all."""


def row(name: str) -> dict[Axis, str]:
    """The axes of a table's row: a name of `ROWS`, or methods joined by +, such as less+s2ft.

    A name that several axes have (random) is the first of them that is not taken yet; a name of
    `ROWS` has all of its axes, but for dualsft beside a method that takes one of the two.
    """
    chosen: dict[Axis, str] = {}
    parts = name.split("+")
    for part in parts:
        if part in ROWS and (part != "dualsft" or not _takes_a_side(parts)):
            own: dict[Axis, str] = {
                a: method for a, method in ROWS[part].items() if method != "all"
            }
            if twice := sorted(own.keys() & chosen.keys()):
                raise ConfigError(f"method {name!r}: {part!r} names the axis {twice[0]} twice")
            chosen |= own
            continue
        axes: list[Axis] = [axis for axis in AXES if part in registry()[axis]]
        free: list[Axis] = [axis for axis in axes if axis not in chosen]
        if not free:
            if axes:
                raise ConfigError(f"method {name!r}: {part!r} names the axis {axes[0]} twice")
            every = {n for methods in registry().values() for n in methods} | set(ROWS)
            close = difflib.get_close_matches(part, every, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(every))}"
            raise ConfigError(f"method {name!r}: {part!r} is no method; {cure}")
        chosen[free[0]] = part
    return {"data": "all", "params": "all", **chosen}


def _takes_a_side(parts: list[str]) -> bool:
    """Whether another method than dualsft chooses the examples or the parameters."""
    sides = {*registry()["data"], *registry()["params"], "dualsft-data", "dualsft-param"}
    return any(part in sides for part in parts if part != "dualsft")


def row_name(axes: Mapping[Axis, str]) -> str:
    """The shortest name that `row` turns into these axes, or axis=method for each."""
    for name, known in ROWS.items():
        if known == dict(axes):
            return name
    parts = [axes[axis] for axis in AXES if axis in axes and axes[axis] != "all"]
    sides = {axis: method for axis, method in axes.items() if axis in ("data", "params")}
    whole = [name for name, known in ROWS.items() if known == sides]
    rest = [axes[axis] for axis in AXES if axis in axes and axis not in sides]
    for name in ("+".join(parts), "+".join([*whole, *rest])):
        with suppress(ConfigError):
            if row(name) == dict(axes):
                return name
    return ",".join(f"{axis}={axes[axis]}" for axis in AXES if axis in axes)
