"""Read the manifests, settings and stage summaries of a run folder.

Reads the JSON files that the stages wrote and checks them against the manifests. Also works on a
run that stopped early. Not part of Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dualsft.errors import RunError
from dualsft.runs.preflight import FOLDERS
from dualsft.storage.manifest import MANIFEST, damage, read_stage_manifest
from dualsft.system.paths import RunPath

SUMMARIES = {
    "split": "1_split/summary.json",
    "scores": "4_scores/summary.json",
    "selection": "5_selection/summary.json",
    "finetune": "6_finetune/summary.json",
    "evaluation": "7_evaluation/results.json",
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
        reported = Path(SUMMARIES.get(stage, MANIFEST)).name
        reasons = [wrong] if wrong else damage(run / folder, manifest, only={reported})[0]
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


def read_settings(run: RunPath) -> tuple[str, Mapping[str, Any]]:
    """config.yaml of a run, as text and parsed; both empty if the file does not exist."""
    path = run / "config.yaml"
    try:
        text = path.read_text() if path.is_file() else ""
        config = yaml.safe_load(text) or {}
        if not isinstance(config, Mapping):
            raise ValueError("not a mapping")
        for part in ("model", "data", "finetune"):
            if not isinstance(config.get(part, {}), Mapping):
                raise ValueError(f"{part} is not a mapping")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        reason = " ".join(str(problem).split())
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
        "warnings": {stage: m["facts"]["warnings"] for stage, m in current.items()},
        "warning_codes": {s: m["facts"].get("warning_codes", []) for s, m in current.items()},
        "outdated": old,
    }
    for stage, file in SUMMARIES.items():
        if stage in found["manifests"]:
            found[stage] = (run / file).read_json()
    return found
