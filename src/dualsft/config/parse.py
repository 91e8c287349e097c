"""Convert text to the values of fields. Independent of the settings themselves.

Used by `config/settings.py`, which reads files and splits `key=value` (`_override`). A plain YAML
scalar and the right side of a `key=value` flag are both `Text`; the field decides the type, so
`1e-4` is a number for
`finetune.lr` and `no` stays a word for `data.prompt_field`. YAML is only composed, never
constructed: tags cannot create objects, and aliases are refused. Reads no files and imports nothing
heavier than PyYAML.
"""

from __future__ import annotations

import ast
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

import yaml

from dualsft.errors import ConfigError

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
TRUE_WORDS = frozenset({"true", "yes", "on"})
FALSE_WORDS = frozenset({"false", "no", "off"})
INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
MAX_YAML_DEPTH = 8
SYNONYMS = {
    "gpu": "cuda",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "half": "float16",
}
"""Common synonyms of choices, for better "did you mean" suggestions."""
STANDARD_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge", "value")
)


class Text(str):
    """An unquoted value as the user typed it; the field decides its type."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Allowed interval of a number; used inside `Annotated`."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def admit(self, value: float) -> bool:
        """Whether the value lies in the interval."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        signs = ((">=", self.least), (">", self.above), ("<=", self.most), ("<", self.below))
        return " and ".join(f"{sign} {limit}" for sign, limit in signs if limit is not None)


@dataclass(frozen=True, slots=True)
class Names:
    """A comma-separated list inside one string; used inside `Annotated`."""

    allowed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """Accepted values of one setting, derived from its annotation."""

    key: str
    kind: str
    optional: bool = False
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """Words that are accepted besides a number, such as auto."""
    bounds: Bounds = Bounds()
    names: Names = Names()
    default: Any = MISSING

    @property
    def allowed(self) -> str:
        """Description of the accepted values, for messages and the documentation."""
        text = {
            "str": "text",
            "paths": "a path, or a list of paths",
            "choice": f"one of {', '.join(self.choices)}",
            "bool": ", or ".join(["true or false", *self.choices]),
            "int": f"an integer {self.bounds}".strip(),
            "float": f"a number {self.bounds}".strip(),
            "budget": f"a count (integer >= {1 if self.bounds.least is None else 0}) or a fraction "
            "(decimal point, in (0, 1])",
            "names": f"a comma-separated list of {', '.join(self.names.allowed) or 'patterns'}",
            "options": "a mapping NAME.OPTION -> value",
            "quotas": "even, proportional, or a mapping source -> share in (0, 1] or count "
            "(source:0.5,source2:100)",
            "files": "a mapping name -> path, a list of paths, or name:path,name2:path2",
        }[self.kind]
        return ", or ".join([text, *self.words, *(["null"] if self.optional else [])])


def field_spec(key: str, annotation: Any, default: Any) -> FieldSpec:
    """Derive kind, bounds and choices from a dataclass annotation (see `config/fields.py`).

    `Annotated` adds `Bounds` or `Names`, or the name of a kind that the type does not determine.
    """
    optional, words = False, ()
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        given = typing.get_args(annotation)
        rest = [arg for arg in given if arg is not type(None)]
        if rest[0] is bool and len(rest) == 2:  # a switch with more positions
            words = typing.get_args(rest[1])
            return FieldSpec(key=key, kind="bool", choices=words, default=default)
        optional = len(rest) < len(given)
        if len(rest) == 2 and typing.get_origin(rest[1]) is typing.Literal:  # a number, or a word
            words = typing.get_args(rest.pop())
        annotation = rest[0] if len(rest) == 1 else annotation
    extra: Any = None
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, extra = typing.get_args(annotation)
    common: dict[str, Any] = {"key": key, "optional": optional, "words": words, "default": default}
    if isinstance(extra, Names):
        return FieldSpec(kind="names", names=extra, **common)
    if isinstance(extra, str):
        return FieldSpec(kind=extra, **common)
    if typing.get_origin(annotation) is typing.Literal:
        return FieldSpec(kind="choice", choices=typing.get_args(annotation), **common)
    kinds = {str: "str", bool: "bool", int: "int", float: "float", int | float: "budget"}
    kind = kinds.get(annotation, "files")
    return FieldSpec(kind=kind, bounds=extra or Bounds(), **common)


def field_docs(source: str) -> dict[tuple[str, str], str]:
    """Docstrings of annotated fields in a module's source, by (class name, field name)."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[node.name, field.target.id] = " ".join(str(below.value.value).split())
    return docs


class _Rejected(Exception):
    """The value is not accepted; the text, if any, replaces the general cure."""


def convert(spec: FieldSpec, value: Any) -> Any:
    """Convert a value; a `ConfigError` names key, value, what is allowed and the cure."""
    try:
        if _is_null(spec, value):
            if not spec.optional and spec.kind not in ("files", "options"):
                raise _Rejected
            return None if spec.optional else {}
        if isinstance(value, str) and value.strip() in spec.words:
            return str(value.strip())
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise _Rejected("it is not UTF-8; rename the file, or write the text as UTF-8")
        return _CONVERTERS[spec.kind](spec, value)
    except (_Rejected, ValueError, OverflowError) as error:
        cure = str(error) if isinstance(error, _Rejected) else ""
        if not cure and spec.default is not MISSING:
            cure = f"leave it out for the default {show(spec.default)}"
        problem = f"{spec.key}: {show(value)} is not allowed; give {spec.allowed}"
        raise ConfigError(f"{problem}; {cure}" if cure else problem) from None


def _is_null(spec: FieldSpec, value: Any) -> bool:
    if not isinstance(value, Text):
        return value is None
    word = value.strip(" \t\n")
    # "none" is a possible name or choice elsewhere, such as score.curvature=none.
    numeric = spec.optional and spec.kind in ("int", "float", "budget")
    return word in NULLS or (numeric and word.lower() == "none")


def _as_str(spec: FieldSpec, value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        raise _Rejected
    return str(value)


def _as_paths(spec: FieldSpec, value: Any) -> str:
    if not isinstance(value, list | tuple):
        return _as_str(spec, value)
    if not value:
        raise _Rejected("name at least one")
    return ",".join(_as_str(spec, item) for item in value)


def _as_choice(spec: FieldSpec, value: Any) -> str:
    if not isinstance(value, str):
        raise _Rejected
    if value.strip() in spec.choices:
        return str(value.strip())
    word = SYNONYMS.get(value.strip().lower(), value.strip().lower())
    raise _Rejected(did_you_mean(word, spec.choices))


def _as_bool(spec: FieldSpec, value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip() in spec.choices:
        return str(value.strip())
    if isinstance(value, Text) and value.strip().lower() in TRUE_WORDS | FALSE_WORDS:
        return value.strip().lower() in TRUE_WORDS
    raise _Rejected


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _as_int(spec: FieldSpec, value: Any) -> int:
    number: Any = value
    if isinstance(value, Text) and INTEGER.fullmatch(value.strip()):
        number = int(value)
    if not _is_number(number, Integral):
        raise _Rejected(_unquote(value))
    if not spec.bounds.admit(number):
        raise _Rejected
    return int(number)


def _as_float(spec: FieldSpec, value: Any) -> float:
    if not isinstance(value, Text) and not _is_number(value, Real):
        raise _Rejected(_unquote(value))
    number = float(value)
    if not math.isfinite(number) or not spec.bounds.admit(number):
        raise _Rejected
    return number


def _as_budget(spec: FieldSpec, value: Any) -> int | float:
    if isinstance(value, Text):
        if value.strip().endswith("%"):
            raise _Rejected(f"write {float(value.strip()[:-1]) / 100!r}")
        value = int(value) if INTEGER.fullmatch(value.strip()) else float(value)
    if not _is_number(value, Real):
        raise _Rejected(_unquote(value))
    if isinstance(value, Integral):
        count = int(value)
        if not spec.bounds.admit(count):
            raise _Rejected("write 100 for a hundred rows or entries, 0.1 for a tenth of them")
        return count
    number = float(value)
    if not (math.isfinite(number) and 0 < number <= 1):
        is_count = number > 1 and number.is_integer()
        raise _Rejected(
            f"for a count write {int(number)}, without a decimal point" if is_count else ""
        )
    return number


def _unquote(value: Any) -> str:
    """The cure for a number inside quotes."""
    quoted = isinstance(value, str) and not isinstance(value, Text) and show(Text(value)) == value
    return f"write {value} without quotes" if quoted else ""


def _as_names(spec: FieldSpec, value: Any) -> str:
    pieces = value.split(",") if isinstance(value, str) else value
    if not isinstance(pieces, list | tuple) or not all(isinstance(piece, str) for piece in pieces):
        raise _Rejected
    stripped = [piece.strip() for piece in pieces]
    if not all(piece.lstrip("!") for piece in stripped):
        raise _Rejected("remove the empty item")
    unknown = [
        piece for piece in stripped if spec.names.allowed and piece not in spec.names.allowed
    ]
    if unknown:
        raise _Rejected(did_you_mean(unknown[0], spec.names.allowed))
    return ",".join(stripped)


def _as_files(spec: FieldSpec, value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pieces = value.split(",") if isinstance(value, Text) else value
        if isinstance(pieces, str | bytes) or not isinstance(pieces, Iterable):
            raise _Rejected
        pairs = [_file_pair(piece, isinstance(value, Text)) for piece in pieces]
    files: dict[str, str] = {}
    for name, path in pairs:
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise _Rejected("each file needs a name and a path")
        if name in files:
            raise _Rejected(f"the name '{name}' is used twice; write name:path with another name")
        files[str(name)] = str(path)
    return files


def _file_pair(piece: Any, flag: bool) -> tuple[Any, Any]:
    """(name, path) of one item; the default name is the file name without .gz and one suffix."""
    if flag and ":" in piece:
        name, _, path = piece.strip().partition(":")
        return name, path
    if not isinstance(piece, str | os.PathLike):
        raise _Rejected
    path = os.fspath(piece).strip()
    return PurePath(path.removesuffix(".gz")).stem, path


def _as_quotas(spec: FieldSpec, value: Any) -> str | dict[str, int | float]:
    words = ("even", "proportional")
    if isinstance(value, str) and value.strip() in words:
        return str(value.strip())
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, Text) and ":" in value:
        pieces = [piece.strip().rpartition(":") for piece in value.split(",")]
        pairs = [(name.strip(), Text(quota)) for name, _, quota in pieces]
    else:
        raise _Rejected(did_you_mean(value.strip(), words) if isinstance(value, str) else "")
    quotas: dict[str, int | float] = {}
    for name, quota in pairs:
        if not isinstance(name, str) or not name:
            raise _Rejected("each quota needs the name of a source")
        if name in quotas:
            raise _Rejected(f"the source '{name}' is named twice; name it once")
        quotas[str(name)] = _as_budget(spec, quota)
    if not quotas:
        raise _Rejected("name at least one source, or leave it out")
    return quotas


def _as_options(spec: FieldSpec, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _Rejected
    return {str(name): inner for name, inner in value.items()}


_CONVERTERS = {
    "str": _as_str,
    "paths": _as_paths,
    "choice": _as_choice,
    "bool": _as_bool,
    "int": _as_int,
    "float": _as_float,
    "budget": _as_budget,
    "names": _as_names,
    "files": _as_files,
    "quotas": _as_quotas,
    "options": _as_options,
}


def show(value: Any) -> str:
    """Format a value for a message: as typed, words in quotes, at most 60 characters."""
    if value is None or (isinstance(value, Text) and value.strip(" \t\n") in NULLS):
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = repr(value)
        with suppress(ValueError):
            if isinstance(value, Text):
                float(value)  # a number is shown without quotes
                text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The cure for an unknown word: the closest known one, or `otherwise` if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def unknown_key(key: str, keys: Iterable[str]) -> str:
    """The message for an unknown key, with the closest known keys."""
    keys = list(keys)
    wanted, leaf = key.lower().replace("-", "_"), key.lower().replace("-", "_").rpartition(".")[2]
    leaves = {known.rpartition(".")[2] for known in keys}
    near = [known for known in keys if known.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(wanted, keys, n=1, cutoff=0.7)
    if not near and (close := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)):
        near = [known for known in keys if known.rpartition(".")[2] == close[0]]
    if near:
        return f"{key}: no such key; did you mean {' or '.join(repr(known) for known in near)}?"
    section = wanted.partition(".")[0] + "."
    inside = [known for known in keys if known.startswith(section)]
    sections = sorted({known.partition(".")[0] for known in keys})
    allowed = (
        f"{section}* has {', '.join(inside)}" if inside else f"sections: {', '.join(sections)}"
    )
    return f"{key}: no such key; remove it ({allowed})"


def parse_yaml(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """Parse YAML into nested dicts of `Text` and str; returns them and the problems found."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply for a config file; remove levels") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or " ".join(str(error).split())
        hint = "indent by spaces, not tabs, and quote a value that starts with one of * & ! % @ `"
        raise ConfigError(f"{where}{line}: not valid YAML: {what}; {hint}") from None
    if root is None:
        return {}, []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{where}: a config file is a mapping of sections, such as 'seed: 42'")
    problems: list[str] = []
    return _from_node(root, where, problems, set(), 0), problems


def _from_node(node: yaml.Node, where: str, problems: list[str], seen: set[int], depth: int) -> Any:
    line = f"{where}:{node.start_mark.line + 1}"
    if id(node) in seen or depth > MAX_YAML_DEPTH:
        what = "aliases (&name, *name)" if id(node) in seen else f"more than {depth - 1} levels"
        problems.append(f"{line}: {what} cannot be used in a config file; write the value out")
        return {}
    seen.add(id(node))
    if node.tag not in STANDARD_TAGS:
        problems.append(f"{line}: the tag {node.tag} is not allowed; quote a value that starts '!'")
        return {}
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                problems.append(f"{line}: a key must be a plain word")
                continue
            key, at = str(key_node.value), key_node.start_mark.line + 1
            if key in mapping:
                problems.append(
                    f"{where}:{at}: '{key}' is already given on line {lines[key]}; keep one of them"
                )
            mapping[key] = _from_node(value_node, where, problems, seen, depth + 1)
            lines[key] = at
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_from_node(item, where, problems, seen, depth + 1) for item in node.value]
    assert isinstance(node, yaml.ScalarNode)
    return Text(node.value) if node.style is None else str(node.value)


class _Dumper(yaml.SafeDumper):
    """Escapes characters that PyYAML would not read back unchanged, such as U+0085."""


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """Write nested dicts as YAML that `parse_yaml` and other YAML readers read back unchanged."""
    return yaml.dump(
        dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6
    )
