"""Checks and readers that need no torch: stage names, settings, manifests and summaries of a run.

A wrong path, a wrong stage name or a folder that is not a run folder is reported within a fraction
of a second, all problems in one message, before anything is written. The summaries are the JSON
files that the stages wrote, checked against the manifests. Not part of Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dualsft.config import settings
from dualsft.config.fields import missing_consent
from dualsft.config.methods import parts
from dualsft.config.settings import Config, DataConfig
from dualsft.data.corpus import BUILTIN, builtin_names
from dualsft.data.sources import find_files, split_paths
from dualsft.errors import ConfigError, DualsftError, RunError
from dualsft.model.resolve import check_model
from dualsft.storage.manifest import damage, read_stage_manifest
from dualsft.system import bounds
from dualsft.system.paths import Place, RunPath, files_read, num_reads

FOLDERS = {
    "split": "1_split",
    "warmup": "2_warmup",
    "gradients": "3_gradients",
    "scores": "4_scores",
    "selection": "5_selection",
    "finetune": "6_finetune",
    "evaluation": "7_evaluation",
}
"""Folder of each stage inside the run folder, in the order of Algorithm 1."""

STAGE_NAMES: tuple[str, ...] = (*FOLDERS, "report")


def check_stage(until: str | None) -> str:
    """Validate the last stage to run; None means all stages."""
    last = STAGE_NAMES[-1] if until is None else until
    if last not in STAGE_NAMES:
        raise ConfigError(f"--until: {last!r} is not a stage; use one of {', '.join(STAGE_NAMES)}")
    return last


def load_checked(
    source: str | Place | None, overrides: Sequence[str], until: str | None = None
) -> Config:
    """`settings.load` and the path checks; raises one error with the problems of both."""
    try:
        config = settings.load(source, overrides)
    except ConfigError as error:
        more = path_problems(error.usable)
        raise ConfigError([*error.problems, *more]) from None
    check_consent(config, until)
    check_paths(config)
    return config


def check_consent(config: Config, until: str | None) -> None:
    """Raise if a run up to `until` would execute generated code without the user's consent."""
    evaluated = STAGE_NAMES.index(check_stage(until)) >= STAGE_NAMES.index("evaluation")
    if evaluated and (problems := missing_consent(settings.to_flat(config))):
        raise ConfigError(problems)


def check_paths(config: Config) -> None:
    """Raise if a file or folder named in the settings is missing; reports all of them at once."""
    if problems := path_problems(settings.to_flat(config)):
        raise ConfigError(problems)


def path_problems(values: Mapping[str, Any]) -> list[str]:
    """Problems with the files and folders named in these settings, which may be incomplete."""
    problems: list[str] = []
    if not bounds.TIMES_VALID:
        problems.append(
            f"DUALSFT_LIMITS: {bounds.TIMES_GIVEN!r} in the environment is not a whole number from "
            "1 to 1000; give one, or unset it"
        )
    if (model := values.get("model.path")) is not None:
        revision, trusted = values.get("model.revision"), values.get("model.trust_remote_code")
        try:
            check_model(model, revision, bool(trusted))
        except ConfigError as problem:
            problems += problem.problems
    names = [field.name for field in dataclasses.fields(DataConfig)]
    given = {name: values[f"data.{name}"] for name in names if f"data.{name}" in values}
    data = DataConfig(**{"path": "", **given})
    sources = ("data.path", "data.val_path", "data.anchor_path")
    files = {key: values.get(key) for key in sources}
    more: Mapping[str, str] = values.get("evaluation.files") or {}
    files |= {f"evaluation.files: {name}": path for name, path in more.items()}
    for key, path in files.items():
        try:
            items = [] if path is None else split_paths(path, key)
        except ConfigError as problem:
            problems += problem.problems
            continue
        for item in items:
            if item in builtin_names():
                continue
            if item.startswith(BUILTIN):
                known = ", ".join(builtin_names())
                problems.append(f"{key}: {item!r} is not a built-in file; use one of {known}")
                continue
            try:
                find_files(item, data, key, fetch=False)
            except ConfigError as problem:
                problems += problem.problems
    template = data.template_file
    if template is not None and not _is_file(template):
        problems.append(f"data.template_file: {template!r} is not a file; give a Jinja file")
    return problems + [problem for check in parts("checks") for problem in check(values)]


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except OSError:  # name too long for the file system, or a symlink loop
        return False


def check_run_folder(folder: RunPath) -> None:
    """Raise unless this is a run folder; a stage command reads its settings from there."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder}: not a run folder (it has no config.yaml); make one with `dualsft run "
            f"RECIPE --out {folder} key=value …`"
        )


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Raise `RunError` for content of a run folder that no run writes.

    Hashes cannot detect this, because whoever made the folder can write a valid manifest.
    """
    before = num_reads()
    try:
        yield
    except DualsftError:
        raise
    except _MALFORMED as problem:
        why = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
        read = files_read(before)
        among = "" if not read or str(place) in map(str, read) else f" in {shown_files(read)}"
        raise RunError(
            f"{place}: its content is not what a run writes{among} ({why}); remove the stage "
            "folder that it belongs to and run the same `dualsft run` again"
        ) from problem


def shown_files(paths: Sequence[RunPath]) -> str:
    """Files of a run folder as a list of names, for messages."""
    return ", ".join("/".join(path.parts) for path in paths)


_MALFORMED = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError),
    *(NotImplementedError, RecursionError),
)


# --- reading a run -------------------------------------------------------------------------------

SUMMARIES = {
    **dict[str, str].fromkeys(("split", "scores", "selection", "finetune"), "summary.json"),
    "evaluation": "results.json",
}


def read_manifests(run: RunPath) -> tuple[dict[str, Any], list[str]]:
    """(manifests of all intact stages, in pipeline order; descriptions of damaged stages)."""
    found: dict[str, Any] = {}
    problems: list[str] = []
    for stage, folder in FOLDERS.items():
        try:
            if not (run / folder).is_dir():
                continue
        except RunError as problem:
            problems.append(str(problem))
            continue
        manifest, wrong = read_stage_manifest(run / folder)
        reported = {SUMMARIES[stage]} if stage in SUMMARIES else set[str]()
        reasons = [wrong] if wrong else damage(run / folder, manifest, only=reported)[0]
        problems += [f"{run / folder}: {reason}" for reason in reasons]
        if not reasons:
            found[stage] = manifest
    return found, problems


def outdated(manifests: dict[str, Any]) -> list[str]:
    """Stages whose inputs have been recomputed since: they describe another selection."""
    old: list[str] = []
    for stage, manifest in manifests.items():
        for name, read in manifest["fingerprint"]["reads"].items():
            now = manifests.get(name)
            if now is None or name in old or now["fingerprint"]["hash"] != read:
                old.append(stage)
                break
    return old


class _NoAliases(yaml.SafeLoader):
    """Refuses aliases: a few lines of them stand for any number of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases (&name, *name)")
        return super().compose_node(parent, index)


def read_settings(run: RunPath) -> tuple[str, Mapping[str, Any]]:
    """config.yaml of a run, as text and parsed; both empty if the file does not exist."""
    path = run / "config.yaml"
    try:
        content = path.read_bytes(settings.MAX_CONFIG_BYTES) if path.is_file() else b""
        text = content.decode("utf-8")
        config = yaml.load(text, Loader=_NoAliases) or {}
        if not isinstance(config, Mapping):
            raise ValueError("not a mapping")
        for part in ("model", "data", "finetune"):
            if not isinstance(config.get(part, {}), Mapping):
                raise ValueError(f"{part} is not a mapping")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        reason = " ".join(str(problem).split())[:300]
        raise RunError(
            f"{path}: not the settings of a run ({reason}); restore the file that `dualsft run` "
            "wrote, or move it away: the report works without it"
        ) from problem
    return text, config


def load_summaries(run: RunPath) -> dict[str, Any]:
    """The settings, the summaries of the finished stages, and their manifests and warnings."""
    manifests, problems = read_manifests(run)
    if problems:
        cure = f"run `dualsft run {run}/config.yaml --out {run}` again: it replaces what is damaged"
        raise RunError("\n".join([*problems, cure]))
    old = outdated(manifests)
    current = {stage: m for stage, m in manifests.items() if stage not in old}
    if "selection" in current:  # ignore stages that an earlier run with another method left
        read = current["selection"]["fingerprint"]["reads"]
        for stage in ("warmup", "gradients", "scores"):
            if stage not in read:
                current.pop(stage, None)
    text, config = read_settings(run)
    found: dict[str, Any] = {
        "config_text": text,
        "config": config,
        "manifests": current,
        "warnings": {s: m["facts"].get("warnings", []) for s, m in current.items()},
        "warning_codes": {s: m["facts"].get("warning_codes", []) for s, m in current.items()},
        "outdated": old,
    }
    for stage, file in SUMMARIES.items():
        if stage in current:
            found[stage] = (run / FOLDERS[stage] / file).read_json()
    return found
