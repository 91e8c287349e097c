"""Completion of a word on the command line: recipes, `key=`, and the values of a setting.

For the shell completion of `cli.py`. Imports nothing heavy, since it runs at each press of TAB.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from dualsft.config.methods import registry
from dualsft.config.parse import FieldSpec
from dualsft.config.settings import recipe_names, specs


def complete_word(
    word: str, names: Iterable[str] = (), more: Mapping[str, FieldSpec] | None = None
) -> list[str]:
    """What `word` may become: one of the names, a key with its `=`, or a whole setting."""
    known = specs() | dict(more or {})
    key, equals, begun = _split(word)
    if not equals:
        found = [*names, *(f"{key}=" for key in known)]
        return [one for one in found if one.startswith(word)]
    before = "" if key not in word else f"{key}="
    pieces, comma, last = begun.rpartition(",")
    values = _values(key, known.get(key))
    return [f"{before}{pieces}{comma}{value}" for value in values if value.startswith(last)]


def _split(word: str) -> tuple[str, str, str]:
    """(key, "=", begun value); bash splits words at "=" and gives the last part only."""
    words = os.environ.get("COMP_WORDS", "").split()[: int(os.environ.get("COMP_CWORD") or 0) + 1]
    if word == "=" and len(words) > 1:
        return words[-2], "=", ""
    at = len(words) - (2 if word and words and words[-1] == word else 1)
    if "=" not in word and at > 0 and words[at] == "=":
        return words[at - 1], "=", word
    return word.partition("=")


def _values(key: str, spec: FieldSpec | None) -> list[str]:
    """The values of a setting, as far as they can be listed."""
    axis = key.removeprefix("method.")
    if axis in registry():
        return list(registry()[axis])
    if spec is None:
        return []
    bools = ("true", "false") if spec.kind == "bool" else ()
    return [*spec.choices, *spec.words, *spec.names.allowed, *bools]


def complete_setting(incomplete: str) -> list[str]:
    """A recipe or a setting of a run."""
    return complete_word(incomplete, recipe_names())
