"""The reports of a run folder: what was chosen, what it cost, what changed.

Reads the JSON that the stages wrote, computes nothing new, and writes `report.md`, `report.html`
(`lab/report/html.py`) and `model_card.md` (`lab/report/model_card.py`) at the top of the run
folder. Works on a run that stopped early: it tells of the stages that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dualsft.errors import RunError
from dualsft.lab.report.html import benchmark_rows, write_html
from dualsft.lab.report.model_card import write_card
from dualsft.lab.report.parts import LOSS_NOTE, methods_of, peak_gib
from dualsft.runs.folder import atomic_write_text
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
    """(manifest of every stage that is there and whole, in the order of the flow; the damage)."""
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
    """Stages made from an earlier version of what they read: they tell of another selection."""
    old: list[str] = []
    for stage, manifest in manifests.items():
        for name, read in manifest["fingerprint"]["reads"].items():
            now = manifests.get(name)
            if now is None or name in old or now["fingerprint"]["hash"] != read:
                old.append(stage)
                break
    return old


def read_settings(run: RunPath) -> tuple[str, Mapping[str, Any]]:
    """config.yaml of a run, as text and as what it says; both empty when there is none."""
    path = run / "config.yaml"
    try:
        text = path.read_text() if path.is_file() else ""
        config = yaml.safe_load(text) or {}
        if not isinstance(config, Mapping):
            raise ValueError("it is no mapping")
        for part in ("model", "data", "finetune"):
            if not isinstance(config.get(part, {}), Mapping):
                raise ValueError(f"{part} is no mapping")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        reason = " ".join(str(problem).split())
        raise RunError(
            f"{path}: not the settings of a run ({reason}); put back the file as `dualsft run` "
            "wrote it, or move it away: the report does without it"
        ) from problem
    return text, config


def load_summaries(run: RunPath) -> dict[str, Any]:
    """The settings, the summaries of the finished stages, and their manifests and warnings."""
    manifests, problems = read_manifests(run)
    if problems:
        cure = f"`dualsft run {run}/config.yaml --out {run}` makes what is damaged again"
        raise RunError("\n".join([*problems, cure]))
    old = outdated(manifests)
    current = {stage: m for stage, m in manifests.items() if stage not in old}
    if "selection" in current:  # what another method's run left in the folder is not of this one
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
        "outdated": old,
    }
    for stage, file in SUMMARIES.items():
        if stage in found["manifests"]:
            found[stage] = (run / file).read_json()
    return found


def write_report(run: RunPath, out: RunPath | None = None) -> RunPath:
    """Write report.md, report.html and model_card.md into `out`, the run folder unless told
    otherwise; returns the path of the first."""
    facts = load_summaries(run)
    out = out or run
    write_html(run, facts, out)
    write_card(facts, out)
    sections = [
        f"# DualSFT run `{run.name}`",
        _summary(facts),
        _outdated(facts),
        _evaluation(facts),
        _selection(facts),
        _scores(facts),
        _cost(facts),
        _warnings(facts),
        f"Settings: `config.yaml`; replay with `dualsft run {run}/config.yaml --out NEW_FOLDER`.",
    ]
    path = out / "report.md"
    atomic_write_text(path, "\n\n".join(s for s in sections if s) + "\n")
    return path


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; numbers are already text. Pipes in cells are escaped."""
    clean = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in clean])


def _summary(facts: dict[str, Any]) -> str:
    chosen = facts.get("selection")
    if chosen is None:
        done = ", ".join(facts["manifests"]) or "nothing"
        return f"Finished so far: {done}."
    lines = []
    if "k" in chosen:
        lines.append(
            f"- **{chosen['k']:,}** of {chosen['denominator']:,} candidate parameters "
            f"({100 * chosen['share']:.2f} %)"
        )
    if "b" in chosen:
        lines.append(
            f"- **{chosen['b']:,}** of {chosen['num_full']:,} examples "
            f"({100 * chosen['data_share']:.2f} %)"
        )
    return "\n".join(lines)


def _outdated(facts: dict[str, Any]) -> str:
    if not facts["outdated"]:
        return ""
    return (
        f"**Out of date, and left out of this report: {', '.join(facts['outdated'])}.** They were "
        "made before the settings changed; run `dualsft run` on this folder again."
    )


def _evaluation(facts: dict[str, Any]) -> str:
    results = facts.get("evaluation")
    if results is None:
        return ""
    rows = []
    for name, r in results["files"].items():
        before, after = r["before"], r["after"]
        rows.append(
            [
                name,
                f"{r['examples']:,}",
                f"{before['loss']:.4f}",
                f"{after['loss']:.4f}",
                _number(before["perplexity"]),
                _number(after["perplexity"]),
                f"{after['kl_to_base']:.4f}",
            ]
        )
    head = ["file", "examples", "loss before", "after", "perplexity before", "after", "KL to base"]
    text = "## Before and after\n\n" + table(head, rows)
    text += (
        "\n\n`validation` is the split that scoring used; files given as `evaluation.files` are "
        f"the ones to judge by. {LOSS_NOTE}"
    )
    if "tasks" in results:
        text += "\n\n### Benchmarks\n\n" + table(*benchmark_rows(results))
        text += "".join(f"\n\n{note}." for note in results["summary"]["notes"])
    if "prompt" in results:
        p = results["prompt"]
        asked = [["asked", p["prompt"]], ["before", p["before"]], ["after", p["after"]]]
        text += "\n\n" + table(["", "text"], asked)
    return text


def _selection(facts: dict[str, Any]) -> str:
    chosen = facts.get("selection")
    if chosen is None:
        return ""
    parts = ["## Selection"]
    if methods := ", ".join(f"{axis}: {name}" for axis, name in methods_of(facts).items()):
        parts.append(f"Methods: {methods}.")
    if "b" in chosen:
        parts.append(
            f"Response length: selected {chosen['response_tokens_selected']:.1f}, pool "
            f"{chosen['response_tokens_pool']:.1f} tokens."
        )
    if "boundary_gap" in chosen:
        gap = chosen["boundary_gap"]
        gap_text = f"{gap:.3g}" if gap is not None else "none (all selected)"
        parts.append(
            f"Certificate: {chosen['certified_in']:,} in, {chosen['certified_out']:,} out, "
            f"{chosen['rescored']:,} scored exactly. Boundary gap {gap_text}; rounding slack "
            f"{chosen['rounding_slack']:.3g}, {chosen['near_ties']:,} examples lie within it of "
            "the boundary."
        )
    if "per_module" in chosen:
        total = max(1, chosen["k"])
        for title, counts in (("module", "per_module"), ("layer", "per_layer")):
            rows = [[k, f"{v:,}", f"{100 * v / total:.1f} %"] for k, v in chosen[counts].items()]
            parts.append(table([title, "selected entries", "share"], rows))
    for r in chosen.get("rounds", []):
        parts.append(f"Round {r['round']} re-selected {r['moved']}: Jaccard {r['jaccard']:.3f}.")
    return "\n\n".join(parts)


def _scores(facts: dict[str, Any]) -> str:
    s = facts.get("scores")
    if s is None:
        return ""
    norms, cosines = s["norms"], s["cosines"]
    rows = [
        ["‖v_new‖", f"{norms['val_grad']:.4g}"],
        ["‖v_prior‖", f"{norms['prior_grad']:.4g}"],
        ["λ as applied to v_prior", f"{s['lam_effective']:.4g}"],
        ["‖G/N‖", f"{norms['grad_mean']:.4g}"],
        ["curvature share ‖second‖/‖first‖", _number(s["curvature_share"])],
        ["cos(v_new, G)", _number(cosines["val_grad_grad_sum"])],
        ["cos(v_new, v_prior)", _number(cosines["val_grad_prior_grad"])],
    ]
    text = "## Scores\n\n" + table(["quantity", "value"], rows)
    checks = s["checks"]
    worst = max((row["error"] for row in checks["alone"]), default=0.0)
    text += "\n\nSelf-check passed: "
    if "relative_error" in checks:
        text += f"Σ scores against ⟨u, G⟩ to {checks['relative_error']:.1e}, "
    return text + (
        f"{len(checks['alone'])} examples scored alone to {worst:.1e} of ‖u‖‖g‖ "
        f"(tolerance {checks['tolerance']:g})."
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _cost(facts: dict[str, Any]) -> str:
    rows = [
        [stage, f"{m['seconds']:.1f}", f"{peak_gib(m):.2f}"]
        for stage, m in facts["manifests"].items()
    ]
    return "## Cost\n\n" + table(["stage", "seconds", "peak memory, GiB"], rows) if rows else ""


def _warnings(facts: dict[str, Any]) -> str:
    lines = [f"- {stage}: {text}" for stage, many in facts["warnings"].items() for text in many]
    return "## Warnings\n\n" + "\n".join(lines) if lines else ""
