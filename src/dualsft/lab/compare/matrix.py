"""The matrix file of a comparison: methods × models × data × budgets × seeds, and the tables.

A matrix file gives a base (a recipe, a config file, or nothing), the axes that vary, a grid of
values that each method is tuned over (`tune`), and the tables to make. All problems of the file and
of the settings of every cell are reported together, before anything runs. Not part of Algorithm 1.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib.resources
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dualsft.config import methods, settings
from dualsft.config.methods import Axis
from dualsft.config.parse import Text, show
from dualsft.config.settings import Config
from dualsft.errors import ConfigError

SEEDS = (42, 123, 2026)
KEYS = (
    *("name", "base", "settings", "methods", "models"),
    *("data", "budgets", "seeds", "tune", "tables", "keep"),
)
TABLE_KEYS = ("title", "kind", "groups", "mark", "reference", "within")
ALLOWED = {
    "kind": ("results", "resources", "forgetting", "frontier"),
    "mark": ("1", "2", "3"),
    "within": ("group", "table"),
}
"""Allowed values of the keys of a table that have a choice."""


@dataclass(frozen=True)
class Choice:
    """One value of an axis: its name in tables, and its settings as key=value words."""

    name: str
    words: tuple[str, ...] = ()
    rates: tuple[tuple[str, str], ...] = ()
    """(`method.params`, its `method.lr_ratio`) pairs specific to this model or data."""


@dataclass(frozen=True)
class Table:
    """A table of the comparison."""

    title: str
    kind: str = "results"
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Group name to methods. If empty, all methods in order."""
    mark: int = 2
    """How many ranks are marked: best, second, third."""
    reference: tuple[str, ...] = ()
    """Methods that are shown first and are not ranked."""
    within: str = "group"
    """`group` ranks the rows of each group, `table` those of the whole table."""


@dataclass(frozen=True)
class Tune:
    """A grid of settings that every cell is run with, and the evaluation file that decides."""

    on: str
    grid: tuple[Choice, ...]


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    model: Choice
    data: Choice
    budget: Choice
    method: Choice
    seed: int
    value: Choice = Choice("")
    """Its value of the grid of `tune`, if there is one."""

    @property
    def path(self) -> Path:
        parts = [self.model.name, self.data.name, self.budget.name, self.method.name]
        parts += [self.value.name] if self.value.name else []
        return Path("cells", *(_folder(p) for p in parts), f"seed-{self.seed}")

    @property
    def title(self) -> str:
        return " · ".join((*self.path.parts[1:-1], f"seed {self.seed}"))

    def words(self) -> list[str]:
        """Settings of the cell as key=value words."""
        chosen = (self.model, self.data, self.budget, self.method)
        words = [word for one in chosen for word in one.words]
        given = dict(word.split("=", 1) for word in self.method.words)
        rates = dict((*self.model.rates, *self.data.rates))
        trained = given.get("method.params")
        if trained in rates and "method.lr_ratio" not in given:
            words.append(f"method.lr_ratio={rates[trained]}")
        return [*words, *self.value.words, f"seed={self.seed}"]


@dataclass(frozen=True)
class Matrix:
    """A parsed matrix file."""

    name: str
    base: str | None
    words: tuple[str, ...]
    """Settings that all cells share. The settings of a cell's choices override them."""
    overrides: tuple[str, ...]
    """Settings from the command line. They override all others."""
    methods: tuple[Choice, ...]
    models: tuple[Choice, ...]
    data: tuple[Choice, ...]
    budgets: tuple[Choice, ...]
    seeds: tuple[int, ...]
    tables: tuple[Table, ...]
    tune: Tune | None = None
    keep: str = "all"
    """`all`, or `results`: remove the weights and vectors of finished cells."""

    def cells(self, only: str | None = None) -> list[Cell]:
        """All cells, grouped by model, data and seed. `only` is a glob pattern for their titles."""
        found = [
            Cell(model, data, budget, method, seed, value)
            for model in self.models
            for data in self.data
            for seed in self.seeds
            for budget in self.budgets
            for method in self.methods
            for value in (self.tune.grid if self.tune else (Choice(""),))
        ]
        return [c for c in found if only is None or fnmatch.fnmatch(c.title, f"*{only}*")]

    def config(self, cell: Cell) -> Config:
        """Settings of a cell: the base, shared settings, the cell's choices, overrides."""
        config = settings.load(self.base, [*self.words, *cell.words(), *self.overrides])
        if config.log.report_to is None:
            return config
        project, name = config.log.project or self.name, config.log.run_name or cell.title
        return replace(config, log=replace(config.log, project=project, run_name=name))


# --- the file -------------------------------------------------------------------------------------


def load_matrix(source: str | Path, overrides: Sequence[str] = ()) -> Matrix:
    """Load a matrix from a YAML file or a packaged recipe. Reports all problems together.

    `overrides` are settings for every cell, or replace a list of the matrix, as in `seeds=42` or
    `methods=dualsft,random`.
    """
    mapping, problems = settings.read_source(_recipe(source))
    own = [w for w in overrides if w.partition("=")[0] in KEYS]
    for word in own:
        key, _, value = word.partition("=")
        mapping[key] = [Text(v.strip()) for v in value.split(",")] if "," in value else Text(value)
    problems += [
        f"{key}: not a key of a matrix file; the keys are {', '.join(KEYS)}"
        for key in mapping
        if key not in KEYS
    ]
    parser = _Parser(problems)
    matrix = Matrix(
        name=parser.text("name", mapping.get("name", Path(str(source)).stem)),
        base=parser.base(mapping.get("base"), source),
        words=parser.words("settings", mapping.get("settings") or {}),
        overrides=tuple(w for w in overrides if w not in own),
        methods=parser.methods(mapping.get("methods")),
        models=parser.choices("models", mapping.get("models"), "model.path"),
        data=parser.choices("data", mapping.get("data"), "data.path"),
        budgets=parser.budgets(mapping.get("budgets")),
        seeds=parser.seeds(mapping.get("seeds")),
        tables=parser.tables(mapping.get("tables")),
        tune=parser.tune(mapping.get("tune")),
        keep=str(mapping.get("keep") or "all"),
    )
    if matrix.keep not in ("all", "results"):
        problems.append(f"keep: {matrix.keep!r} is not allowed; give all or results")
    problems += _varied(matrix)
    if matrix.tune is None and any(table.kind == "frontier" for table in matrix.tables):
        problems.append("tables: a table of kind frontier needs `tune`")
    known = {choice.name for choice in matrix.methods}
    for table in matrix.tables:
        for group, rows in {**table.groups, "reference": table.reference}.items():
            problems += [
                f"tables: {table.title!r}, group {group!r} names {row!r}, which `methods` does not"
                for row in rows
                if row not in known and not any(word.startswith("methods=") for word in own)
            ]
    if not problems:
        problems += _config_problems(matrix)
    if problems:
        raise ConfigError(problems)
    return matrix


def comparison_names() -> list[str]:
    """Names of the packaged comparisons."""
    folder = importlib.resources.files("dualsft") / "recipes" / "compare"
    return sorted(e.name.removesuffix(".yaml") for e in folder.iterdir())


def _recipe(source: str | Path) -> Path:
    """Path of a matrix file or of the packaged comparison with this name."""
    if str(source) in comparison_names():
        return Path(str(importlib.resources.files("dualsft"))) / f"recipes/compare/{source}.yaml"
    if not Path(source).is_file():
        close = difflib.get_close_matches(str(source), comparison_names(), n=1)
        cure = (
            f"did you mean {close[0]!r}?"
            if close
            else f"there are: {', '.join(comparison_names())}"
        )
        raise ConfigError(f"{source}: no such file or comparison; {cure}")
    return Path(source)


def _varied(matrix: Matrix) -> list[str]:
    """Refuse overrides of settings that the matrix varies: all cells would get the same value."""
    owner = {"seed": "seeds"}
    for axis in ("models", "data", "budgets", "methods"):
        owner |= {w.partition("=")[0]: axis for one in getattr(matrix, axis) for w in one.words}
    grid = [
        w.partition("=")[0] for one in (matrix.tune.grid if matrix.tune else ()) for w in one.words
    ]
    owner |= dict.fromkeys(grid, "tune")
    fixed = ("model.path", "data.path", "select.data_budget", "select.param_budget", "seed")
    problems = []
    for word in matrix.overrides:
        key = word.partition("=")[0]
        varied = key in (*fixed, *grid) or key.startswith("method.") and key != "method.lr_ratio"
        if key in owner and varied:
            problems.append(
                f"{word}: `{owner[key]}` of the comparison sets {key}; give "
                f"{owner[key]}=… instead, or change the file"
            )
    return problems


def _config_problems(matrix: Matrix) -> list[str]:
    """Problems with the settings of any cell, each reported once."""
    found: dict[str, list[str]] = {}
    for cell in matrix.cells():
        if cell.seed != matrix.seeds[0]:
            continue
        try:
            files = matrix.config(cell).evaluation.files
            if matrix.tune is not None and matrix.tune.on not in files:
                raise ConfigError(
                    f"tune: on={matrix.tune.on!r} is not in evaluation.files "
                    f"({', '.join(files) or 'empty'}); add a file of rows that nothing else uses"
                )
        except ConfigError as problem:
            for text in problem.problems:
                found.setdefault(text, []).append(cell.title)
    return [
        f"{text} (in {cells[0]}{f' and {len(cells) - 1} more' if len(cells) > 1 else ''})"
        for text, cells in found.items()
    ]


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


class _Parser:
    """Parses the values of a matrix file and collects all problems."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems

    def refuse(self, key: str, value: Any, allowed: str) -> None:
        self.problems.append(f"{key}: {show(value)} is not allowed; give {allowed}")

    def text(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            self.refuse(key, value, "a word")
            return "?"
        return str(value)

    def base(self, value: Any, source: str | Path) -> str | None:
        if value is None or isinstance(value, str) and not value.strip():
            return None
        name = self.text("base", value)
        beside = Path(str(source)).parent / name
        return str(beside) if name not in settings.recipe_names() and beside.is_file() else name

    def words(self, key: str, value: Any) -> tuple[str, ...]:
        """Settings as key=value words, from a mapping with dotted or nested keys."""
        if not isinstance(value, Mapping):
            self.refuse(key, value, "settings as a mapping")
            return ()
        words = tuple(_flat_words(value))
        given = {word.partition("=")[0]: word for word in words}
        self.problems += [
            settings.stored_consent(name, f"{given[name]} under {key}")
            for name in settings.CONSENTS
            if name in given
        ]
        return words

    def choices(self, key: str, value: Any, setting: str) -> tuple[Choice, ...]:
        """name -> path, or name -> {path: …, settings: {…}, lr_ratios: {…}}.

        Items of a list of paths are named by their stems.
        """
        if value is None:
            return (Choice("default"),)
        if isinstance(value, str):
            value = [value]
        if isinstance(value, Sequence):
            names = [_short_name(str(v)) for v in value]
            self.problems += [
                f"{key}: two are called {name!r}; give name -> path" for name in _repeated(names)
            ]
            value = dict(zip(names, value, strict=True))
        if not isinstance(value, Mapping) or not value:
            self.refuse(key, value, "name -> path")
            return ()
        found = []
        for name, one in value.items():
            place = f"{key}.{name}"
            one = {"path": one} if isinstance(one, str) else one
            if not isinstance(one, Mapping) or set(one) - {"path", "settings", "lr_ratios"}:
                self.refuse(place, one, "a path, or path, settings and lr_ratios")
                continue
            words = [f"{setting}={one['path']}"] if "path" in one else []
            words += self.words(f"{place}.settings", one.get("settings") or {})
            rates: Any = one.get("lr_ratios") or {}
            if not isinstance(rates, Mapping):
                self.refuse(f"{place}.lr_ratios", rates, "method -> ratio")
                rates = {}
            known = methods.registry()["params"]
            self.problems += [
                f"{place}.lr_ratios: {method!r} is not a `params` method"
                for method in rates
                if method not in known
            ]
            pairs = tuple((str(method), str(ratio)) for method, ratio in rates.items())
            found.append(Choice(str(name), tuple(words), pairs))
        self.problems += [
            f"{key}: two have the folder name {name!r}; rename one"
            for name in _repeated(_folder(choice.name) for choice in found)
        ]
        return tuple(found)

    def methods(self, value: Any) -> tuple[Choice, ...]:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, Sequence) or not value:
            self.problems.append("methods: missing; give a list such as [dualsft, less+s2ft]")
            return ()
        found: list[Choice] = []
        for item in value:
            one: Mapping[str, Any] = {"name": item} if isinstance(item, str) else item
            if not isinstance(one, Mapping):
                self.refuse("methods", item, "a name")
                continue
            if rest := [k for k in one if k not in ("name", "settings", *methods.AXES)]:
                self.problems.append(f"methods: {show(item)} has {', '.join(map(str, rest))}")
            axes: dict[Axis, str] = {a: str(one[a]) for a in methods.AXES if a in one}
            try:
                name = str(one.get("name") or methods.row_name(axes))
                axes = {"data": "all", "params": "all", **axes} if axes else methods.row(name)
            except ConfigError as problem:
                self.problems += [f"methods: {text}" for text in problem.problems]
                continue
            words = [f"method.{axis}={method}" for axis, method in axes.items()]
            words += self.words(f"methods.{name}.settings", one.get("settings") or {})
            found.append(Choice(name, tuple(words)))
        self.problems += [
            f"methods: {name!r} is given twice (by folder name); give one another `name`"
            for name in _repeated(_folder(choice.name) for choice in found)
        ]
        return tuple(found)

    def budgets(self, value: Any) -> tuple[Choice, ...]:
        if value is None:
            return (Choice("default"),)
        allowed = "a list of {data: 0.1, params: 0.05}"
        if not value:
            self.refuse("budgets", value, allowed)
        value = value if isinstance(value, Sequence) else [value]
        keys = {"data": "select.data_budget", "params": "select.param_budget"}
        found = []
        for one in value:
            if not isinstance(one, Mapping) or not one or set(one) - set(keys):
                self.refuse("budgets", one, allowed)
                continue
            words = tuple(f"{keys[axis]}={budget}" for axis, budget in one.items())
            found.append(Choice("-".join(f"{axis}{v}" for axis, v in one.items()), words))
        names = _repeated(choice.name for choice in found)
        self.problems += [f"budgets: {name} is given twice; leave one out" for name in names]
        return tuple(found)

    def seeds(self, value: Any) -> tuple[int, ...]:
        value = SEEDS if value is None else value
        value = [value] if isinstance(value, str | int) else value
        found: tuple[int, ...] = ()
        with suppress(TypeError, ValueError):
            found = tuple(dict.fromkeys(int(v) for v in value))
        if not found:
            self.refuse("seeds", value, "whole numbers")
        return found

    def tune(self, value: Any) -> Tune | None:
        """on: an evaluation file, and settings, each with a list of values."""
        if value is None:
            return None
        allowed = "`on: FILE` and settings with lists of values, such as method.lr_ratio: [0.5, 1]"
        if not isinstance(value, Mapping) or not isinstance(value.get("on"), str) or len(value) < 2:
            self.refuse("tune", value, allowed)
            return None
        lists: list[list[str]] = []
        for key, values in value.items():
            if key == "on":
                continue
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                self.refuse(f"tune.{key}", values, "a list of values")
                continue
            lists.append([f"{key}={one}" for one in values])
            self.problems += [f"tune.{key}: {w} is given twice" for w in _repeated(lists[-1])]
        grid = [Choice(",".join(words), words) for words in itertools.product(*lists)]
        return Tune(str(value["on"]), tuple(grid))

    def tables(self, value: Any) -> tuple[Table, ...]:
        if value is None:
            return (Table("Results"), Table("Resources", "resources"))
        found = []
        for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if not isinstance(one, Mapping) or set(one) - set(TABLE_KEYS):
                self.refuse("tables", one, ", ".join(TABLE_KEYS))
                continue
            for key, allowed in ALLOWED.items():
                if key in one and str(one[key]) not in allowed:
                    self.refuse(f"tables: {key}", one[key], ", ".join(allowed))
            groups = one.get("groups") or {}
            if not isinstance(groups, Mapping):
                self.refuse("tables: groups", groups, "name -> methods")
                groups = {}
            kind, mark = str(one.get("kind", "results")), str(one.get("mark", 2))
            table = Table(
                title=str(one.get("title", kind)),
                kind=kind,
                groups={str(group): tuple(map(str, rows)) for group, rows in groups.items()},
                mark=int(mark) if mark in ALLOWED["mark"] else 2,
                reference=tuple(map(str, one.get("reference") or ())),
                within=str(one.get("within", "group")),
            )
            found.append(table)
        return tuple(found)


def _flat_words(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Settings with dotted or nested keys as key=value words."""
    known = settings.keys()
    for key, value in mapping.items():
        key = f"{prefix}{key}"
        if isinstance(value, Mapping) and key not in known:
            yield from _flat_words(value, f"{key}.")
        elif isinstance(value, Mapping):
            yield f"{key}=" + ",".join(f"{name}:{path}" for name, path in value.items())
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield f"{key}=" + ",".join(map(str, value))
        else:
            yield f"{key}={value}"


def effective_rate(config: Config) -> float | str:
    """Learning rate of fine-tuning: finetune.lr times the ratio of the method, or auto."""
    given = config.method.lr_ratio
    entries = methods.compose(settings.to_flat(config)).entries
    ratio, lr = entries["params"].lr_ratio if given is None else given, config.finetune.lr
    if lr == "auto":
        return "auto" if ratio == 1 else f"auto x {ratio:g}"
    return lr * ratio


def _short_name(path: str) -> str:
    """Name for a path or hub id: its last component without data file suffixes."""
    name = Path(path).name
    for suffix in (".gz", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gguf"):
        name = name.removesuffix(suffix)
    return name or path


def _folder(name: str) -> str:
    """A name as a folder name, with unsafe characters replaced."""
    plain = re.sub(r"[^A-Za-z0-9._+=,-]", "_", name) or "_"
    return plain if plain.strip(".") else plain.replace(".", "_")  # `.` and `..` are special
