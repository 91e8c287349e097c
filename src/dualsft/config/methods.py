"""Registries: methods by axis and name, and the parts that lower rooms use but must not import.

Each method belongs to one axis: which examples to train on (`data`), which parameter entries to
train (`params`), how much each token or example counts (`weights`), and how to process the trained
weights (`after`). A config names one method per axis, so LESS + S²FT is
`method.data=less method.params=s2ft`.

This module defines no methods. `dualsft/__init__.py` registers the built-in tables (`add_part`);
other packages add methods through entry points of the group `dualsft.methods`, each an `Entry`. The
class of a method is given as "module:Class" and imported when a run uses it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from dualsft.config.parse import FieldSpec, convert, did_you_mean, field_docs, field_spec, show
from dualsft.errors import ConfigError

Axis = Literal["data", "params", "weights", "after"]
AXES: tuple[Axis, ...] = ("data", "params", "weights", "after")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a method that has none."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered method."""

    name: str
    axis: Axis
    target: str
    """The class that implements it, as "module:Class"."""
    summary: str
    """One line: what it selects or does."""
    cost: str
    """Passes over the data, and how the cost scales."""
    memory: str
    source: str
    """The paper, and the source that this implementation follows."""
    deviations: str = "none"
    """Differences from the original method, with reasons."""
    needs: tuple[str, ...] = ()
    """Stages whose results it reads: warmup, or scores (which implies all earlier stages)."""
    spared: Callable[[Any], bool] = lambda options: False
    """Whether, with these options, it does not need the stages in `needs`."""
    options: type = NoOptions
    """A dataclass; its fields are the settings `method.<name>.<field>`."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """Option values for `method.preset=paper`: those of the DualSFT paper."""
    lr_ratio: float = 1.0
    """Ratio of its learning rate to plain fine-tuning's (DualSFT paper, Llama-3.2-3B)."""
    auto_ratio: float = 3.0
    """Of a mask, a further ratio for finetune.lr=auto: a twentieth of the entries moves the model
    less. For DualSFT's mask 5 to 7 was measured, and the paper has 1."""
    trains: bool = False
    """Whether selection itself trains the model and so depends on finetune.*."""
    follows_lr: bool = False
    """Whether selection trains something at finetune.lr, and depends on no other finetune.*."""
    uses_budget: bool = True
    """Whether select.data_budget or select.param_budget sets how much it selects."""
    parallel: bool = False
    """Whether its work is distributed over processes; otherwise rank 0 runs it and others wait."""
    lends: bool = False
    """For data methods: whether the selection is independent of the parameter side and fully
    contained in the returned value, so that a run with another parameter side can reuse it
    (`runs/stages/selection.py`)."""
    extra: str | None = None
    """The optional dependency that it requires, if any."""

    def relative_lr(self, auto: bool) -> float:
        """Learning rate relative to finetune.lr, which is `auto` or a number."""
        return self.lr_ratio * (self.auto_ratio if auto and self.uses_budget else 1.0)

    def specs(self) -> Mapping[str, FieldSpec]:
        """Specs of its options by full key."""
        return option_specs(f"method.{self.name}", self.options)

    def docs(self) -> dict[str, str]:
        """Documentation of its options by name."""
        return option_docs(self.options)


ADDED: Mapping[str, bool] = {"added": True}
"""Metadata of an option that a method got later: its default is not part of fingerprints, so runs
made without the option stay valid."""


@functools.cache
def option_specs(prefix: str, options: type) -> Mapping[str, FieldSpec]:
    """Specs of the fields of an options dataclass, by full key."""
    hints = typing.get_type_hints(options, include_extras=True)
    return {
        f"{prefix}.{f.name}": field_spec(f"{prefix}.{f.name}", hints[f.name], f.default)
        for f in dataclasses.fields(options)
    }


@functools.cache
def option_docs(options: type) -> dict[str, str]:
    """Docstrings of the fields of an options dataclass, by name."""
    found = field_docs(inspect.getsource(sys.modules[options.__module__]))
    owners = {one.__name__ for one in options.__mro__}
    return {name: text for (owner, name), text in found.items() if owner in owners}


# --- parts ---------------------------------------------------------------------------------------

Kind = Literal["methods", "stages", "report", "checks", "trackers", "ending"]
"""`methods`: tables of `Entry`; `stages`: stages after fine-tuning; `report`: writes the report;
`checks`: functions from settings to problems, which must not import torch; `trackers`: context
managers around the stages of a run; `ending`: the lines that end `dualsft run`."""
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


# --- the registry of methods ---------------------------------------------------------------------

PLUGINS = "dualsft.methods"
SIDES: dict[str, dict[Axis, str]] = {
    "dual": {"data": "dualsft", "params": "dualsft"},
    "data": {"data": "dualsft", "params": "all"},
    "param": {"data": "all", "params": "dualsft"},
}
"""The data and params methods that `select.variant` stands for."""


@functools.cache
def registry() -> dict[Axis, dict[str, Entry]]:
    """All methods by axis and name, in the order of the tables."""
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
    """Return the method; the error for an unknown name suggests the closest one."""
    known = registry()[axis]
    if name not in known:
        others = [other for other in AXES if name in registry()[other]]
        cure = did_you_mean(name, known, f"there are: {', '.join(known)}")
        if others:
            cure = f"it is a method of method.{others[0]}"
        raise ConfigError(f"method.{axis}: {name!r} is not a method of this axis; {cure}")
    return known[name]


@dataclass(frozen=True)
class Composition:
    """The methods of a run, at most one per axis."""

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
        """Name used in tables, such as less+s2ft."""
        return row_name({axis: entry.name for axis, entry in self.entries.items()})

    @property
    def needs(self) -> set[str]:
        """Stages that any of the methods reads."""
        return {stage for axis in self.entries for stage in self.needs_of(axis)}

    def needs_of(self, axis: Axis) -> tuple[str, ...]:
        """Stages that the method of an axis reads, given its options."""
        entry = self.entries[axis]
        return () if entry.spared(self.options_of(axis)) else entry.needs

    @property
    def parallel(self) -> bool:
        """Whether selection is distributed over processes."""
        return all(self.entries[axis].parallel for axis in ("data", "params"))

    def scored(self, axis: Axis) -> bool:
        """Whether the method of this axis selects by DualSFT's scores."""
        entry = self.entries.get(axis)
        return entry is not None and "scores" in entry.needs

    def options_of(self, axis: Axis) -> Any:
        """Options of the method of an axis: defaults, then the preset, then user settings."""
        entry = self.entries[axis]
        values = dict(entry.paper) if self.preset == "paper" else {}
        prefix = f"{entry.name}."
        values |= {k[len(prefix) :]: v for k, v in self.options.items() if k.startswith(prefix)}
        return entry.options(**values)

    def load(self, axis: Axis) -> Any:
        """Instantiate the method of an axis with its options; None if the axis has no method."""
        entry = self.entries.get(axis)
        if entry is None:
            return None
        return load_target(entry.target)(entry, self.options_of(axis))

    def settings(self, axis: Axis) -> dict[str, Any]:
        """Settings that determine this method's result, for the fingerprint."""
        entry = self.entries.get(axis)
        if entry is None:
            return {}
        options = self.options_of(axis)
        values = {field: getattr(options, field.name) for field in dataclasses.fields(options)}
        shown = {
            f"method.{entry.name}.{field.name}": value
            for field, value in values.items()
            if field.metadata != ADDED or value != field.default
        }
        return {f"method.{axis}": entry.name, **shown}


def names_of(values: Mapping[str, Any]) -> dict[Axis, str]:
    """Method names by axis from flat settings; `select.variant` is the default."""
    sides = SIDES[values.get("select.variant", "dual")]
    chosen: dict[Axis, str] = {}
    for axis in AXES:
        if name := values.get(f"method.{axis}") or sides.get(axis):
            chosen[axis] = name
    return chosen


def compose(values: Mapping[str, Any]) -> Composition:
    """Build the composition from flat, valid settings."""
    entries: dict[Axis, Entry] = {a: find(a, name) for a, name in names_of(values).items()}
    return Composition(entries, values["method.options"], values["method.preset"])


def problems_of(values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Check `method.*`; returns (problems, converted options)."""
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
                f"does not select on this axis; leave select.variant out"
            )
    both = all(e is not None and "scores" in e.needs for e in map(entries.get, AXES[:2]))
    if values.get("select.rounds", 0) > 0 and not both and variant == "dual":
        problems.append(
            f"select.rounds: {values['select.rounds']} is not allowed unless both sides are "
            "dualsft's; give select.rounds=0"
        )
    data = entries.get("data")
    for key, off in (("select.per_source", None), ("select.lengths", "any")):
        given = values.get(key, off)
        if given != off and data is not None and "scores" not in data.needs:
            problems.append(
                f"{key}: {show(given)} is not allowed with method.data={data.name}, which does not "
                f"choose by one score per example; leave {key} out, or use method.data=dualsft"
            )
    score = {"form": "literal", "mode": "one_pass"}
    literal = all(values.get(f"score.{key}") == value for key, value in score.items())
    scored = data is not None and "scores" in data.needs
    if values.get("score.lam_relative") == "scores" and literal and scored:
        problems.append(
            "score.lam_relative: 'scores' is not allowed with score.mode=one_pass, whose pass over "
            "the pool needs the weight of v_prior, while this weight needs G, the result of that "
            "pass; give score.form=calibrated, score.mode=two_pass or select.variant=param"
        )
    problems += _sketch_problems(values, entries)
    options: dict[str, Any] = {}
    specs = {
        key: spec
        for methods in registry().values()
        for entry in methods.values()
        for key, spec in entry.specs().items()
    }
    used = {entry.name for entry in entries.values()}
    for key, value in (values.get("method.options") or {}).items():
        spec, name = specs.get(f"method.{key}"), key.partition(".")[0]
        if spec is None:
            own = [known for known in specs if known.startswith(f"method.{name}.")]
            cure = did_you_mean(f"method.{key}", own or specs, "`dualsft methods` lists them")
            problems.append(f"method.{key}: no such key; {cure}")
            continue
        if name not in used and not problems:
            problems.append(
                f"method.{key}: {show(value)} has no effect: no axis of this run has the method "
                f"{name!r}; name it, as in method.params={name}, or leave the option out"
            )
        try:
            options[key] = convert(spec, value)
        except ConfigError as problem:
            problems += problem.problems
    return problems, options


def _sketch_problems(values: Mapping[str, Any], entries: Mapping[Axis, Entry]) -> list[str]:
    """Sketches of some blocks where the pass over the pool goes through all of them anyway."""
    layers, form = values.get("score.sketch_layers", 1.0), values.get("score.form")
    data = entries.get("data")
    if form != "calibrated" or repr(layers) == "1.0" or data is None or "scores" not in data.needs:
        return []
    readers = [f"method.{a}={e.name}" for a, e in entries.items() if "scores" in e.needs]
    readers.remove(f"method.data={data.name}")
    if values.get("score.keep", "gradients") != "gradients":
        readers.append(f"score.keep={values['score.keep']}")
    return [
        f"score.sketch_layers: {show(layers)} is not allowed with {reader}, which needs the "
        "gradient of all blocks, so that fewer sketched blocks would save nothing; give "
        "method.params=random and leave score.keep out, or leave score.sketch_layers out"
        for reader in readers
    ]


# --- rows of a table -----------------------------------------------------------------------------

ROWS: dict[str, dict[Axis, str]] = {
    "sft": {"data": "all", "params": "all"},
    "dualsft": SIDES["dual"],
    "dualsft-data": SIDES["data"],
    "dualsft-param": SIDES["param"],
}
"""Predefined rows. Other rows are method names joined by +, with `all` on axes not named."""


def row(name: str) -> dict[Axis, str]:
    """Parse a row name: a key of `ROWS`, or methods joined by +, such as less+s2ft.

    A name that exists on several axes (random) goes to the first free axis. A key of `ROWS` sets
    all of its axes, except that dualsft next to another data or params method sets one axis.
    """
    chosen: dict[Axis, str] = {}
    parts = name.split("+")
    sides = {*registry()["data"], *registry()["params"], "dualsft-data", "dualsft-param"} - {
        "dualsft"
    }
    for part in parts:
        if part in ROWS and (part != "dualsft" or sides.isdisjoint(parts)):
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
            cure = did_you_mean(part, every, f"known: {', '.join(sorted(every))}")
            raise ConfigError(f"method {name!r}: {part!r} is not a method; {cure}")
        chosen[free[0]] = part
    return {"data": "all", "params": "all", **chosen}


def row_name(axes: Mapping[Axis, str]) -> str:
    """The shortest name that `row` parses into these axes, else axis=method pairs."""
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
