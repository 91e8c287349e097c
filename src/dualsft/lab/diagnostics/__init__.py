"""Registry of diagnostics, which check the scores and the selection of a finished run.

Each diagnostic computes numbers from a run folder (the paper's diagnostic section and the
appendices from `local_regret` on) and writes them as JSON. Its figure is drawn from the JSON only.
The implementation of a diagnostic is imported when it runs. Not part of Algorithm 1.
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
    """A diagnostic, as listed by `dualsft diagnose --list`."""

    name: str
    target: str
    """Function that computes it, "module:function": takes a job, returns a JSON dictionary."""
    figure: str | None
    """Function that draws it, "module:function": takes (the dictionary, a path without suffix),
    returns the files."""
    summary: str
    paper: str
    """The table, figure or equation of the paper that it reproduces."""
    cost: str
    needs: tuple[str, ...] = ("selection",)
    """Stages of the run that it reads; earlier stages are then available too."""
    tells: tuple[str, ...] = ()
    """Later stages whose numbers it reports if they exist."""
    options: type = NoOptions
    default: bool = True
    """Whether `dualsft diagnose RUN` without names runs it."""

    def specs(self) -> dict[str, FieldSpec]:
        """Its options by full key, diagnose.<name>.<field>."""
        return option_specs(f"diagnose.{self.name}", self.options)

    def docs(self) -> dict[str, str]:
        return option_docs(self.options)


def registry() -> dict[str, Diagnostic]:
    """All diagnostics by name, in report order."""
    return {one["name"]: Diagnostic(**one) for one in (*SCORES, *TRAINING)}


def find(names: list[str]) -> list[Diagnostic]:
    """The diagnostics with these names; the default ones if the list is empty."""
    known = registry()
    if not names:
        return [one for one in known.values() if one.default]
    problems = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {close[0]!r}?" if close else f"available: {', '.join(known)}"
            problems.append(f"{name}: no such diagnostic; {cure}")
    if problems:
        raise ConfigError(problems)
    return [known[name] for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class Wanted:
    """The diagnostics to run and the options that the user set for them."""

    diagnostics: list[Diagnostic]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: list[str], words: list[str]) -> Wanted:
        """Parse names and `diagnose.NAME.OPTION=value` words; reports all problems at once."""
        chosen, problems = find(names), []
        specs = {key: spec for one in registry().values() for key, spec in one.specs().items()}
        options: dict[str, dict[str, Any]] = {}
        for word in words:
            key, _, value = word.partition("=")
            if key not in specs:
                close = difflib.get_close_matches(key, specs, n=1)
                cure = f"did you mean {close[0]!r}?" if close else "see `dualsft diagnose --list`"
                problems.append(f"{key}: no diagnostic has this option; {cure}")
                continue
            _, name, option = key.split(".", 2)
            if name not in [one.name for one in chosen]:
                problems.append(f"{key}: {name} is not run; name it too, or remove the option")
                continue
            try:
                options.setdefault(name, {})[option] = convert(specs[key], Text(value))
            except ConfigError as problem:
                problems += problem.problems
        if problems:
            raise ConfigError(problems)
        return cls(chosen, options)
