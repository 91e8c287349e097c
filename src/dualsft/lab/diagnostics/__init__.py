"""The registry of diagnostics: does a run's selection mean anything, and can it be believed?

Each diagnostic computes numbers from a finished run folder (the paper's diagnostic section and the
appendices from `local_regret` on) and writes them as JSON; its figure is drawn from that alone.
Nothing heavy is imported until one is used.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from dualsft.config.methods import NoOptions, option_docs, option_specs
from dualsft.config.parse import FieldSpec, Text, convert
from dualsft.errors import ConfigError
from dualsft.lab.diagnostics.table_scores import SCORES
from dualsft.lab.diagnostics.table_training import TRAINING


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One line of `dualsft diagnose --list`."""

    name: str
    target: str
    """Its computation, "module:function": a job to a dictionary that JSON can hold."""
    figure: str | None
    """What draws it, "module:function": (the dictionary, a path without suffix) to the files."""
    summary: str
    paper: str
    """The paper's table or figure that it answers to."""
    cost: str
    needs: tuple[str, ...] = ("selection",)
    """Stages of the run that it reads; all before them are there too."""
    tells: tuple[str, ...] = ()
    """Stages after those whose numbers it tells when they are there."""
    options: type = NoOptions
    default: bool = True
    """Whether `dualsft diagnose RUN` without names runs it."""

    def specs(self) -> dict[str, FieldSpec]:
        """Its settings by full key, diagnose.<name>.<field>."""
        return option_specs(f"diagnose.{self.name}", self.options)

    def docs(self) -> dict[str, str]:
        return option_docs(self.options)


def registry() -> dict[str, Diagnostic]:
    """Every diagnostic by name, in the order of the report."""
    return {one["name"]: Diagnostic(**one) for one in (*SCORES, *TRAINING)}


def find(names: list[str]) -> list[Diagnostic]:
    """The diagnostics of these names; without any, the default ones."""
    known = registry()
    if not names:
        return [one for one in known.values() if one.default]
    problems = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
            problems.append(f"{name}: no such diagnostic; {cure}")
    if problems:
        raise ConfigError(problems)
    return [known[name] for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class Wanted:
    """Diagnostics and what the user set of their options."""

    diagnostics: list[Diagnostic]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: list[str], words: list[str]) -> Wanted:
        """From names and `diagnose.NAME.OPTION=value` words; all problems at once."""
        chosen, problems = find(names), []
        specs = {key: spec for one in registry().values() for key, spec in one.specs().items()}
        options: dict[str, dict[str, Any]] = {}
        for word in words:
            key, _, value = word.partition("=")
            if key not in specs:
                close = difflib.get_close_matches(key, specs, n=1)
                cure = f"did you mean {close[0]!r}?" if close else "see `dualsft diagnose --list`"
                problems.append(f"{key}: no such option of a diagnostic; {cure}")
                continue
            _, name, option = key.split(".", 2)
            if name not in [one.name for one in chosen]:
                problems.append(f"{key}: {name} is not run; name it too, or leave the option out")
                continue
            try:
                options.setdefault(name, {})[option] = convert(specs[key], Text(value))
            except ConfigError as problem:
                problems += problem.problems
        if problems:
            raise ConfigError(problems)
        return cls(chosen, options)
