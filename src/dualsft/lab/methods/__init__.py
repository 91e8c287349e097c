"""The registry: every method by axis and name, and what a run is composed of.

A config names one method an axis (`method.data`, `method.params`, `method.weights`,
`method.after`), so LESS + S²FT is `method.data=less method.params=s2ft`. Other packages add methods
by an entry point of the group `dualsft.methods` that is an `Entry`. Nothing heavy is imported until
a method is used; a name that is not there is answered with the nearest one.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from dualsft.config.parse import convert, show
from dualsft.errors import ConfigError
from dualsft.lab.methods.data_table import DATA
from dualsft.lab.methods.params_table import PARAMS
from dualsft.lab.methods.training_table import AFTER, WEIGHTS
from dualsft.runs.entry import AXES, Axis, Entry

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
    plugins = [point.load() for point in entry_points(group=PLUGINS)]
    for entry in (*DATA, *PARAMS, *WEIGHTS, *AFTER, *plugins):
        if not isinstance(entry, Entry):
            raise ConfigError(f"entry point {PLUGINS}: {entry!r} is not a dualsft.runs.entry.Entry")
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
        module, _, name = entry.target.partition(":")
        return getattr(importlib.import_module(module), name)(entry, self.options_of(axis))

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
