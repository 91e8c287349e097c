"""Before anything heavy is imported: the stages, and whether what the settings name is there.

A wrong path, a wrong stage or a folder that is no run folder is answered in a fraction of a second,
all misses in one message, before torch is imported and before anything is written.
"""

from __future__ import annotations

from pathlib import Path

from dualsft.config import Config
from dualsft.corpus import BUILTIN, builtin_names
from dualsft.errors import ConfigError
from dualsft.pretrained import SHORT_NAMES, find_model

FOLDERS = {
    "split": "1_split",
    "warmup": "2_warmup",
    "gradients": "3_gradients",
    "scores": "4_scores",
    "selection": "5_selection",
    "finetune": "6_finetune",
    "evaluation": "7_evaluation",
}
"""Each stage's folder in the run folder, in the order of Algorithm 1."""

STAGE_NAMES: tuple[str, ...] = (*FOLDERS, "report")


def check_stage(until: str | None) -> str:
    """The last stage to run; None is all of them."""
    last = until or STAGE_NAMES[-1]
    if last not in STAGE_NAMES:
        raise ConfigError(f"--until: {last!r} is not a stage; use one of {', '.join(STAGE_NAMES)}")
    return last


def check_paths(config: Config) -> None:
    """Everything the settings name must be there before any work begins; all misses at once."""
    problems: list[str] = []
    if config.model.path not in SHORT_NAMES:
        try:
            find_model(config.model.path)
        except ConfigError as problem:
            problems += problem.problems
    files = {"data.path": config.data.path, "data.val_path": config.data.val_path}
    files |= {f"evaluation.files: {name}": path for name, path in config.evaluation.files.items()}
    for key, path in files.items():
        if path is None:
            continue
        if path.startswith(BUILTIN):
            if path not in builtin_names():
                known = ", ".join(builtin_names())
                problems.append(f"{key}: {path!r} is no built-in file; there are: {known}")
        elif not _is_file(path):
            problems.append(f"{key}: {path!r} is not a file; give a .jsonl or .jsonl.gz file")
    if problems:
        raise ConfigError(problems)


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except OSError:  # a name too long for the file system, a loop of links
        return False


def check_run_folder(folder: Path) -> None:
    """A stage command without settings of its own needs a folder that a run has made."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder}: not a run folder (it has no config.yaml); make one with `dualsft run "
            f"RECIPE --out {folder} key=value …`"
        )
