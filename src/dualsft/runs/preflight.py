"""Checks before torch is imported: stage names, and the files and folders named in the settings.

A wrong path, a wrong stage name or a folder that is not a run folder is reported within a fraction
of a second, all problems in one message, before anything is written. Not part of Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualsft.config import settings
from dualsft.config.fields import missing_consent
from dualsft.config.methods import parts
from dualsft.config.settings import Config, DataConfig
from dualsft.data.corpus import BUILTIN, builtin_names
from dualsft.data.sources import find_files, split_paths
from dualsft.errors import ConfigError
from dualsft.model.resolve import check_model
from dualsft.system.paths import Place, RunPath

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
    """`config.load` and the path checks; raises one error with the problems of both."""
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
    if (model := values.get("model.path")) is not None:
        revision, trusted = values.get("model.revision"), values.get("model.trust_remote_code")
        try:
            check_model(model, revision, bool(trusted))
        except ConfigError as problem:
            problems += problem.problems
    names = [field.name for field in dataclasses.fields(DataConfig)]
    given = {name: values[f"data.{name}"] for name in names if f"data.{name}" in values}
    data = DataConfig(**{"path": "", **given})
    files = {"data.path": values.get("data.path"), "data.val_path": values.get("data.val_path")}
    more: Mapping[str, str] = values.get("evaluation.files") or {}
    files |= {f"evaluation.files: {name}": path for name, path in more.items()}
    for key, path in files.items():
        for item in [] if path is None else split_paths(path):
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
