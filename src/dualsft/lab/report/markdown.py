"""Reports of a run folder: what was selected, what it cost, what changed.

Reads the JSON files of the stages, computes nothing new, and writes `report.md`, `report.html`
(`lab/report/html.py`) and `model_card.md` (`lab/report/model_card.py`) at the top of the run
folder. For an incomplete run, the reports cover the finished stages. Not part of Algorithm 1.
"""

from __future__ import annotations

from typing import Any

from dualsft.lab.report.html import benchmark_rows, write_html
from dualsft.lab.report.model_card import write_card
from dualsft.lab.report.parts import LOSS_NOTE, methods_of, peak_gib
from dualsft.runs.folder import atomic_write_text
from dualsft.runs.preflight import load_summaries
from dualsft.system.paths import RunPath


def write_report(run: RunPath, out: RunPath | None = None) -> RunPath:
    """Write report.md, report.html and model_card.md into `out` (default: the run folder).

    Returns the path of report.md.
    """
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
    """A Markdown table of formatted cells. Escapes pipes and replaces newlines."""
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
        f"**Out of date, not in this report: {', '.join(facts['outdated'])}.** The settings "
        "changed after these stages ran; run `dualsft run` on this folder again."
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
        "\n\nScoring used the `validation` split, so judge the run by the files in "
        f"`evaluation.files`. {LOSS_NOTE}"
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
            f"{chosen['rounding_slack']:.3g}; {chosen['near_ties']:,} examples are that close to "
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
        f"{len(checks['alone'])} examples against autograd to {worst:.1e} of ‖u‖‖g‖ "
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
