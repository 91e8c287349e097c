"""The `Config` of a run, shared by the Python API, YAML files and `key=value` flags.

Holds the inputs of Algorithm 1. The sections are defined in `config/fields.py`. All problems are
collected before torch is imported and raised as one `ConfigError`; the constructor validates, so
every `Config` is valid. Reads a YAML file or a packaged recipe; `to_yaml` writes a file that
reproduces the config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml

from dualsft.config import fields as config_fields
from dualsft.config import methods
from dualsft.config.fields import (
    DataConfig,
    EvaluationConfig,
    FinetuneConfig,
    LogConfig,
    MethodConfig,
    ModelConfig,
    ParallelConfig,
    ResumeConfig,
    ScoreConfig,
    SelectConfig,
    SplitConfig,
    WarmupConfig,
    contradictions,
    idle_options,
)
from dualsft.config.parse import (
    NULLS,
    Bounds,
    FieldSpec,
    Text,
    convert,
    did_you_mean,
    dump_yaml,
    field_docs,
    field_spec,
    parse_yaml,
    show,
    unknown_key,
)
from dualsft.errors import ConfigError, RunError
from dualsft.system.paths import Place, RunPath
from dualsft.system.usage import cache_root

METHOD = "method."
MAX_CONFIG_BYTES = 100_000
"""A config file has a few kilobytes; parsing YAML takes seconds per megabyte."""
MAX_UNKNOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of a run. The constructor raises one `ConfigError` with all problems."""

    seed: Annotated[int, Bounds(least=0, most=2**32 - 1)] = 42
    """Seed of the split, the order of examples and dropout."""
    model: ModelConfig
    data: DataConfig
    split: SplitConfig = dataclasses.field(default_factory=SplitConfig)
    warmup: WarmupConfig = dataclasses.field(default_factory=WarmupConfig)
    score: ScoreConfig = dataclasses.field(default_factory=ScoreConfig)
    select: SelectConfig = dataclasses.field(default_factory=SelectConfig)
    method: MethodConfig = dataclasses.field(default_factory=MethodConfig)
    finetune: FinetuneConfig = dataclasses.field(default_factory=FinetuneConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    resume: ResumeConfig = dataclasses.field(default_factory=ResumeConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {show(getattr(self, name))} is not allowed; give a {section.__name__}"
            for name, section in _sections().items()
            if not isinstance(getattr(self, name), section)
        ]
        if problems:
            raise ConfigError(problems)
        # Store the converted values, such as 1 -> 1.0; __setattr__ is blocked by frozen=True.
        for name, part in _build(_resolve(to_flat(self), [])).items():
            object.__setattr__(self, name, part)


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """Documentation of one setting; `default` is "required" if it has no default."""

    key: str
    type_text: str
    default: str
    doc: str


@functools.cache
def _sections() -> dict[str, type]:
    hints = typing.get_type_hints(Config)
    return {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


@functools.cache
def _specs() -> dict[str, FieldSpec]:
    """All settings by full key, in order of definition."""
    specs: dict[str, FieldSpec] = {}
    for prefix, owner in {"": Config, **_sections()}.items():
        hints = typing.get_type_hints(owner, include_extras=True)
        for field in dataclasses.fields(owner):
            if field.name in _sections() and not prefix:
                continue
            key = f"{prefix}.{field.name}".lstrip(".")
            factory = field.default_factory
            default = field.default if factory is MISSING else factory()
            specs[key] = field_spec(key, hints[field.name], default)
    return specs


def specs() -> dict[str, FieldSpec]:
    """All settings by full key, in order of definition."""
    return dict(_specs())


def keys() -> list[str]:
    """All keys, in order of definition."""
    return list(_specs())


def describe() -> list[FieldDoc]:
    """Key, type, default and documentation of every setting."""
    docs = field_docs(inspect.getsource(config_fields))
    docs |= field_docs(inspect.getsource(sys.modules[__name__]))
    described = []
    for key, spec in _specs().items():
        section, _, name = key.rpartition(".")
        owner = _sections()[section].__name__ if section else "Config"
        default = "required"
        if spec.default is not MISSING:
            written = yaml.safe_dump(spec.default, default_flow_style=True)
            default = written.removesuffix("\n...\n").strip()
        described.append(FieldDoc(key, spec.allowed, default, docs.get((owner, name), "")))
    return described


# --- from mappings and flags to a Config ---------------------------------------------------------


def _flatten(mapping: Mapping[Any, Any], problems: list[str]) -> dict[str, Any]:
    """Flatten `{section: {key: value}}` to `{section.key: value}`; dotted keys are kept."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        nested = isinstance(value, Mapping) and name not in _specs()
        if nested and (value or name in _sections()):
            pairs = [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif name in _sections():
            empty = value is None or (isinstance(value, Text) and value.strip(" \t\n") in NULLS)
            pairs = []
            if not empty:
                problems.append(_not_a_section(name, value))
        else:
            pairs = [(str(name), value)]
        for key, inner in pairs:
            if key in flat:
                problems.append(f"{key}: given twice, nested and dotted; keep one of them")
            flat[key] = inner
    return flat


def _not_a_section(name: str, value: Any) -> str:
    example = next(key for key in _specs() if key.startswith(f"{name}."))
    return (
        f"{name}: {show(value)} is not allowed; it is a section: give its keys, such as {example}"
    )


def _override(flat: dict[str, Any], overrides: Iterable[str], problems: list[str]) -> None:
    """Set `key=value` flags in flat values; the last one wins."""
    for override in overrides:
        key, equals, value = override.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(f"{override!r}: not a setting; write key=value, as in score.lam=0.5")
        elif key in _sections():
            problems.append(_not_a_section(key, Text(value)))
        else:
            flat.pop(key, None)  # to the end, after a nested form of the same option
            flat[key] = Text(value)


def _gather_options(flat: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Move `method.NAME.OPTION`, dotted or nested, into the mapping `method.options`."""
    rest: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in flat.items():
        name = key.removeprefix(METHOD)
        if not key.startswith(METHOD) or key in _specs():
            rest[key] = value
        elif isinstance(value, Mapping):
            options |= {f"{name}.{inner}": v for inner, v in value.items()}
        elif "." in name:
            options[name] = value
        else:
            rest[key] = value
    whole = rest.get("method.options") or {}
    if not options or not isinstance(whole, Mapping):
        return rest
    problems += [
        f"method.{name}: given twice, by itself and in method.options; keep one of them"
        for name in options
        if name in whole
    ]
    return rest | {"method.options": {**whole, **options}}


def _resolve(flat: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the value of every key; raise with `problems` and all problems found here."""
    flat = _gather_options(flat, problems)
    unknown = [key for key in flat if key not in _specs()]
    problems += [unknown_key(key, _specs()) for key in unknown[:MAX_UNKNOWN]]
    if len(unknown) > MAX_UNKNOWN:
        problems.append(f"{len(unknown) - MAX_UNKNOWN:,} more keys are not settings; remove them")
    values: dict[str, Any] = {}
    for key, spec in _specs().items():
        value = flat.get(key, spec.default)
        if value is MISSING:
            problems.append(f"{key}: missing; it is required: give {spec.allowed}, as in {key}=...")
            continue
        try:
            values[key] = convert(spec, value)
        except ConfigError as error:
            problems += error.problems
    problems += contradictions(values)
    if "method.options" in values:
        wrong, values["method.options"] = methods.problems_of(values)
        problems += wrong
    if problems:
        error = ConfigError(problems)
        error.usable = values
        raise error
    return values


def _build(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `Config` from flat values."""
    parts: dict[str, Any] = {"seed": values["seed"]}
    for name, section in _sections().items():
        fields = [field.name for field in dataclasses.fields(section)]
        parts[name] = section(**{field: values[f"{name}.{field}"] for field in fields})
    return parts


def from_mapping(mapping: Mapping[Any, Any], overrides: Iterable[str] = ()) -> Config:
    """Build a config from nested dicts such as `{"score": {"lam": 0.5}}` and `key=value` flags."""
    problems: list[str] = []
    flat = _flatten(mapping, problems)
    _override(flat, overrides, problems)
    return Config(**_build(_resolve(flat, problems)))


def validate(config: Config) -> None:
    """Check a config again, in case it was modified after construction."""
    if not isinstance(config, Config):
        raise ConfigError(f"config: {show(config)} is not allowed; give a dualsft.Config")
    dataclasses.replace(config)


# --- files ---------------------------------------------------------------------------------------


def _recipe_folder() -> Any:
    return importlib.resources.files("dualsft") / "recipes"


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    folder = _recipe_folder()
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(e.name.removesuffix(".yaml") for e in entries if e.name.endswith(".yaml"))


def read_source(source: str | Place | None) -> tuple[dict[str, Any], list[str]]:
    """Read a recipe (by name) or a YAML file; returns nested dicts and the problems found."""
    return parse_yaml(*_read(source)) if source is not None else ({}, [])


def _read(source: str | Place) -> tuple[str, str]:
    """(text, what to call it in messages) of a recipe or a file. A damaged seal is refused."""
    if isinstance(source, str) and source in recipe_names():
        text = (_recipe_folder() / f"{source}.yaml").read_text(encoding="utf-8")
        return text, f"recipe {source}"
    path = source if isinstance(source, RunPath) else _named_by_user(source)
    if not (source if isinstance(source, RunPath) else Path(source)).exists():
        names = recipe_names()
        cure = did_you_mean(str(source), names, "give a YAML file or a recipe's name")
        raise ConfigError(f"{source}: no such file or recipe; recipes: {', '.join(names)}; {cure}")
    try:
        if path.size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{source}: over {MAX_CONFIG_BYTES} bytes; give a YAML config file")
        text = path.read_bytes(MAX_CONFIG_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}; give a UTF-8 YAML file") from None
    except RunError as error:
        raise ConfigError(str(error)) from None
    seal, _, rest = text.partition("\n")
    if path.name == "config.yaml" and seal.startswith(SEAL_LINE) and sealed_text(rest) != text:
        raise ConfigError(
            f"{source}: changed or damaged since the run wrote it; give the settings as "
            "key=value instead, or, if the change is yours, delete the file's first line"
        )
    return text, str(source)


def _named_by_user(source: str | Path) -> RunPath:
    """A file that the user named: it may be a link to a regular file."""
    real = Path(source).resolve()
    return RunPath(real.parent, real.name)


SEAL_LINE = "# written by dualsft; sha256 of the lines below: "


def sealed_text(text: str) -> str:
    """Prepend a comment line that holds the hash of the text."""
    return f"{SEAL_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


CONSENTS = (
    "model.trust_remote_code",
    "evaluation.allow_code_execution",
    "evaluation.allow_weak_sandbox",
)
"""Settings that allow code to run. They are accepted only from the command line or from Python.
They are never read from a file or stored in a run folder, since files may come from others."""
OUTSIDE = (
    *("model.path", "data.path", "data.val_path", "data.anchor_path", "data.template_file"),
    *("evaluation.files", "evaluation.data_dir"),
    *("model.revision", "data.revision", "data.dataset", "data.subset", "data.outside"),
)
"""Settings that name files outside a run folder, or choose among them. Those of a run folder's own
config.yaml are used only if this user wrote that file: a received folder could name the user's
private files, whose content would then be in the outputs."""
READS_BUILTIN = ("data.path", "data.val_path", "data.anchor_path", "evaluation.files")
"""Those of them that may name `builtin:` files, which the package makes."""
NO = (None, False, "false", "False", "no", "off", "null", "~", "")


def load(source: str | Place | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load a config from a recipe (by name), a YAML file or defaults, then apply `overrides`."""
    text, name = ("", "") if source is None else _read(source)
    mapping, problems = parse_yaml(text, name) if source is not None else ({}, [])
    flat = _flatten(mapping, problems)
    given = {word.partition("=")[0].strip() for word in overrides}
    for key in CONSENTS:
        if (stored := flat.pop(key, None)) not in NO and key not in given:
            problems.append(stored_consent(key, f"{show(stored)} in {source}"))
    if source is not None and _is_of_a_run(source, text) and not _own_config(text).is_file():
        problems += _foreign_paths(flat, given, name)
        flat.pop("log.report_to", None)  # whoever made the folder does not decide what is sent
    if "select.variant" in given:  # says who selects on both axes: instead of the source's methods
        flat = {k: v for k, v in flat.items() if k not in ("method.data", "method.params")}
    _override(flat, overrides, problems)
    return Config(**_build(_resolve(flat, problems)))


_STAGE = re.compile(r"[1-7]_(split|warmup|gradients|scores|selection|finetune|evaluation)\b.*")
"""Folders of a run, finished or not."""


def _is_of_a_run(source: str | Place, text: str) -> bool:
    """Whether a run folder brings these settings, also if the user named the file."""
    if isinstance(source, RunPath) or source in recipe_names():
        return isinstance(source, RunPath)
    given, real = Path(source), Path(source).resolve()  # it may be a link
    sealed = "config.yaml" in (given.name, real.name) and text.startswith(SEAL_LINE)
    beside = {name for place in (given, real) for name in RunPath(place.parent).names()}
    written = {"manifest.json", "metrics.jsonl"} if given.name == "config.yaml" else set[str]()
    return sealed or any(map(_STAGE.fullmatch, beside)) or bool(beside & written)


def _packaged(key: str, value: Any) -> bool:
    """Whether a setting names only files that come with the package."""
    if not isinstance(value, Mapping | list):
        value = str(value).split(",")
        if key == "evaluation.files":  # NAME:PATH
            value = [part.partition(":")[2] for part in value]
    parts = value.values() if isinstance(value, Mapping) else value
    files = [file.strip() for part in parts for file in str(part).split(",")]
    return key in READS_BUILTIN and all(file.startswith("builtin:") for file in files)


def _foreign_paths(flat: Mapping[str, Any], given: set[str], source: str) -> list[str]:
    """A problem for each path outside the run folder that the command line does not repeat."""
    named = {key: flat.get(key) for key in OUTSIDE if key not in given}
    return [
        f"{key}: {show(path)} comes from {source}, which this user did not write here (the folder "
        f"was received or copied, or the cache is another one); if it is what you want, give it on "
        f"this command line: {key}=..."
        for key, path in named.items()
        if path not in (*NO, {}) and not _packaged(key, path)
    ]


def _own_config(text: str) -> Path:
    """A file in the cache that exists if this user wrote a config.yaml with this text."""
    return cache_root() / "own_configs" / hashlib.sha256(text.encode()).hexdigest()


def note_own_config(text: str) -> None:
    """Remember that this user wrote a run folder's config.yaml with this text."""
    with contextlib.suppress(OSError):  # without a cache, the paths must be given again
        path = _own_config(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def load_yaml(path: str | Place) -> Config:
    """Load a config from a YAML file."""
    return load(path)


def stored_consent(key: str, found: str) -> str:
    """The message for a file that contains consent to run code."""
    return (
        f"{key}: {found} is not accepted as consent to run code, which must be given on the command"
        f" line: give {key}=true there if you trust its source, or {key}=false to run without it"
    )


def consent_of(config: Config) -> list[str]:
    """The `key=true` flags that pass consent to run code on to a child process."""
    flat = to_flat(config)
    return [f"{key}=true" for key in CONSENTS if flat[key]]


def to_flat(config: Config) -> dict[str, Any]:
    """All values by full key, such as `score.lam`."""
    flat: dict[str, Any] = {}
    for key in _specs():
        section, _, name = key.rpartition(".")
        flat[key] = getattr(getattr(config, section) if section else config, name)
    return flat


def to_mapping(config: Config) -> dict[str, Any]:
    """Convert to nested dicts; the inverse of `from_mapping`."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """Write all values as YAML, except consent to run code (`CONSENTS`)."""
    mapping = to_mapping(config)
    for key in CONSENTS:
        section, _, name = key.partition(".")
        del mapping[section][name]
    return dump_yaml(mapping)


def warnings(config: Config) -> list[str]:
    """Settings that differ from the default but have no effect in this combination."""
    return idle_options(to_flat(config), {key: spec.default for key, spec in _specs().items()})
