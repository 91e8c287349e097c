"""What the reports tell about a run: formatted numbers, rows of tables, and warnings.

report.md, report.html and the model card share these. A warning has a finding, its meaning and its
cure. Some come from the numbers of the stages: a curvature below rounding, preservation that
dominates, scores at or below zero among the selected, a drift of lengths, a loss that rose. Others
come from the codes of the warnings that the stages logged: a short warmup, few steps, memory that
ran out, a small corpus. A warning without a code is shown as it is. Not part of Algorithm 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from dualsft.system.progress import NOTE

LOSS_NOTE = (
    "The loss is a mean over examples; the perplexity is the exponential of the mean over all "
    "response tokens, so one can rise while the other falls."
)
Facts = Mapping[str, Any]
"""The summaries of a run, from `load_summaries`."""
SHOWN_SOURCES = 50
Rows = list[list[str]]


# --- numbers ------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 4) -> str:
    """Format a number: integers with separators, others with `digits` digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def peak_gib(manifest: Mapping[str, Any]) -> float:
    """Peak memory of a stage: of the GPU if one was used, otherwise resident host memory."""
    memory = manifest["peak_memory"]
    return (memory["cuda_bytes"] or memory["rss_bytes"] or 0) / 2**30


def leaf(value: Any) -> str:
    """Format a JSON value that has no nested values. Long lists are truncated."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list):
        shown = ", ".join(leaf(v) for v in value[:40])
        return shown + (f", … ({len(value):,} in all)" if len(value) > 40 else "")
    return str(value)


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings and lists of them as dotted keys and their values."""
    inner: Iterable[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping) and value:
        inner = value.items()
    elif isinstance(value, list) and any(isinstance(v, Mapping | list) for v in value):
        inner = enumerate(value, 1)
    if inner is None:
        yield prefix, value
        return
    for key, one in inner:
        yield from flat(one, f"{prefix}.{key}" if prefix else str(key))


def methods_of(facts: Facts) -> dict[str, str]:
    """The method of each axis, from fine-tuning if it has run, otherwise from the selection.

    Runs that share a selection may train differently, so fine-tuning comes first. Empty for old
    runs, which do not record methods.
    """
    for stage in ("finetune", "selection"):
        if named := facts.get(stage, {}).get("methods"):
            return named
    return {}


def competitors(chosen: Mapping[str, Any]) -> str:
    """What the share of selected weight entries is a share of."""
    names = {"all": "parameters", "eligible": "eligible entries"}
    return names.get(chosen.get("denominator_of", ""), "candidate parameters")


def served_text(tuned: Mapping[str, Any]) -> str:
    """What is left of the changes in each dtype; empty where it was not counted."""
    counts: Mapping[str, int] = tuned.get("survival") or {}
    total = max(1, tuned.get("changed_entries") or 0)
    shares = [
        f"{number(counts[dtype])} ({percent(counts[dtype] / total)}) in {dtype}"
        for dtype in ("float64", "float32", "bfloat16", "float16")
        if dtype in counts
    ]
    return f"entries that differ from the base: {', '.join(shares)}" if shares else ""


def has_adapter(facts: Facts) -> bool:
    """Whether fine-tuning trained an adapter (LoRA) in place of entries of the model."""
    files = facts["manifests"].get("finetune", {}).get("files", {})
    return any(name.startswith("adapter/") for name in files)


def training_values(facts: Facts) -> dict[str, str]:
    """What fine-tuning trained, how long and how fast; empty before it."""
    tuned = facts.get("finetune")
    if tuned is None:
        return {}
    trained, changed = tuned.get("trained_entries"), tuned.get("changed_entries")
    total = tuned.get("num_parameters")

    def of_model(count: int | None) -> str:
        return f"{number(count)} ({percent(count / total, 2)})" if count and total else "–"

    what, how = of_model(trained), "not counted"
    if has_adapter(facts):
        what, how = f"{what} in an adapter", "all of the adapted layers"
    return {
        "trained parameters": what,
        "changed entries": how if changed is None else of_model(changed),
        "steps": number(tuned.get("steps")),
        "peak learning rate": number(tuned.get("lr")),
    }


# --- rows of tables -----------------------------------------------------------------------------


def loss_rows(results: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """Header and rows of the table of evaluation files."""
    rows = []
    for name, r in results["files"].items():
        before, after = r["before"], r["after"]
        losses = [f"{before['loss']:.4f}", f"{after['loss']:.4f}"]
        odds = [number(before["perplexity"]), number(after["perplexity"])]
        rows.append([name, number(r["examples"]), *losses, *odds, f"{after['kl_to_base']:.4f}"])
    head = ["file", "examples", "loss before", "after", "perplexity before", "after", "KL to base"]
    return head, rows


def benchmark_rows(results: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """Header and rows of the table of benchmarks."""
    rows = []
    for name, task in results["tasks"].items():
        cells = [name, task["metric"], number(task["after"]["items"])]
        for side in ("before", "after"):
            low, high = task[side]["interval"]
            cells.append(f"{percent(task[side]['score'])} ({100 * low:.1f} – {100 * high:.1f})")
        errors = [task[side]["format_errors"] for side in ("before", "after")]
        cells.append(" → ".join(number(e) for e in errors))
        rows.append(cells)
    for key in ("plasticity", "stability", "overall"):
        sides = [percent(results["summary"][side][key]) for side in ("before", "after")]
        rows.append([key, "mean" if key != "plasticity" else "", "", *sides, ""])
    head = ["task", "metric", "items", "before (95 %)", "after (95 %)", "format errors"]
    return head, rows


def prompt_rows(results: Mapping[str, Any]) -> Rows:
    """One prompt and what both models answered."""
    prompt = results["prompt"]
    return [["asked", prompt["prompt"]], *([side, prompt[side]] for side in ("before", "after"))]


def score_rows(facts: Facts) -> Rows:
    """Norms, cosines and self-checks of the scores, and the certificate of the selection."""
    s, chosen = facts["scores"], facts.get("selection", {})
    checks, rows = s["checks"], []
    if "norms" in s:  # absent if nothing needed u
        norms, cosines = s["norms"], s["cosines"]
        rows += [
            ["‖v_new‖, gradient of the validation loss", number(norms["val_grad"])],
            ["‖v_prior‖, gradient of the preservation loss", number(norms["prior_grad"])],
            ["λ as applied to v_prior", number(s["lam_effective"])],
            ["‖G/N‖, mean gradient of the pool", number(norms["grad_mean"])],
            ["curvature share ‖second‖/‖first‖", number(s["curvature_share"])],
            ["cos(v_new, G)", number(cosines["val_grad_grad_sum"])],
            ["cos(v_new, v_prior)", number(cosines["val_grad_prior_grad"])],
        ]
    if "rms_param_scores" in s:  # absent in runs made before
        rms = s["rms_param_scores"]
        ratio = number(rms["prior"] / rms["new"]) if rms["new"] > 0 else "not defined"
        rows.append(["preservation in s_θ: RMS of its term over that of v_new", ratio])
    if "relative_error" in checks:
        rows.append(["self-check: Σ scores against ⟨u, G⟩", f"{checks['relative_error']:.1e}"])
    if s.get("form") == "calibrated":
        sketched = max(row["error"] for row in checks["sketched_alone"])
        flat = s["rho_flat"] and " to ".join(map(number, s["rho_flat"]))
        part = s.get("sketch_layers")
        rows += [
            ["example scores", f"calibrated, {number(s['sketch_dim'])} numbers per example"],
            *([["blocks sketched, from the last", str(part)]] if part is not None else []),
            ["ρ, damping", number(s["rho"]) + (f" (as good: {flat})" if flat else "")],
            [
                f"self-check: Σ sketches against {'that of G' if 'norms' in s else 'their sum'}",
                f"{checks['sketch_sum_error']:.1e}",
            ],
            ["self-check: sketches by autograd", f"{sketched:.1e}"],
            ["residual of the solve", f"{s['residual']:.1e}"],
        ]
        if s.get("target_share") is not None:
            share, error = 100 * s["target_share"], 100 * s["target_share_error"]
            rows.append(
                ["pool that scores like the validation rows", f"{share:.0f} ± {error:.0f} %"]
            )
    if "alone" in checks:  # absent without u
        worst = max((row["error"] for row in checks["alone"]), default=0.0)
        rows.append([f"self-check: ⟨u, g⟩ of {len(checks['alone'])} by autograd", f"{worst:.1e}"])
    labels = {
        "boundary_gap": "gap between the last selected and the first rejected",
        "rounding_slack": "rounding slack of a score",
        "near_ties": "examples within the slack of the boundary",
        "rescored": "examples scored exactly for this budget",
    }
    return rows + [[label, number(chosen[key])] for key, label in labels.items() if key in chosen]


Bars = list[tuple[str, list[tuple[float, str]]]]
"""Rows of a table with a bar behind each number: (name, [(value, text), ...])."""


def texts(bars: Bars) -> Rows:
    """The texts of these rows, without the values."""
    return [[name, *(text for _, text in cells)] for name, cells in bars]


def mask_rows(chosen: Mapping[str, Any]) -> list[tuple[str, Bars]]:
    """Selected weight entries by module, by layer and by expert."""
    total = max(1, chosen["k"])

    def rows(counts: Mapping[str, int]) -> Bars:
        return [(n, [(c, number(c)), (c, percent(c / total))]) for n, c in counts.items()]

    tables = [("module", rows(chosen["per_module"])), ("layer", rows(chosen["per_layer"]))]
    if experts := chosen.get("per_expert"):
        tables.append((f"expert, of {sum(map(len, experts.values())):,}", rows(_extremes(experts))))
    return tables


def _extremes(experts: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The fewest, the median and the most selected entries of an expert."""
    every = sorted((n, of, i) for of, counts in experts.items() for i, n in enumerate(counts))
    return {
        f"{what} ({of}, {i})": n
        for what, (n, of, i) in (
            ("fewest", every[0]),
            ("median", every[len(every) // 2]),
            ("most", every[-1]),
        )
    }


def source_rows(chosen: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """Header and rows of the table of sources, the largest first; those beyond 50 together."""
    sources = sorted(chosen["sources"].items(), key=lambda item: (-item[1]["pool"], item[0]))
    totals = {key: max(1, sum(s[key] for _, s in sources)) for key in ("pool", "selected")}

    def counts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
        own = {key: sum(row[key] for row in rows) for key in totals}
        shares = {key: percent(own[key] / totals[key]) for key in totals}
        return [number(own["pool"]), shares["pool"], number(own["selected"]), shares["selected"]]

    def length(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f}"

    rows = []
    for name, s in sources[:SHOWN_SOURCES]:
        lengths = [length(s[f"response_tokens_{key}"]) for key in ("selected", "pool")]
        rows.append([name, *counts([s]), " / ".join(lengths)])
    if rest := [s for _, s in sources[SHOWN_SOURCES:]]:
        rows.append([f"{len(rest):,} others", *counts(rest), ""])
    head = ["source", "pool", "share", "selected", "share", "response tokens, selected / pool"]
    return head, rows


def cost_rows(facts: Facts) -> Bars:
    """Time and peak memory per stage."""
    return [
        (stage, [(m["seconds"], duration(m["seconds"])), (peak_gib(m), f"{peak_gib(m):.2f}")])
        for stage, m in facts["manifests"].items()
    ]


# --- warnings -----------------------------------------------------------------------------------

DRIFT = 1.5
"""Warn if the mean response length of the selected differs from the pool's by more than this
factor, in either direction."""
DOMINATES = 2.0
"""Warn if λ‖v_prior‖ exceeds ‖v_new‖ by more than this factor."""


@dataclass(frozen=True)
class Concern:
    """One warning of the report."""

    title: str
    found: str
    meaning: str
    cure: str


COUNTED = ("nonpositive_scores", "preservation_dominates")
"""Codes whose concerns are computed from the numbers of the summaries instead."""


@cache
def known_warnings() -> dict[str, dict[str, str]]:
    """Title, meaning and cure of each code that a stage's warning may have, in order of weight."""
    file = resources.files("dualsft.lab.report") / "pages/warnings.yaml"
    return yaml.safe_load(file.read_text("utf-8"))


def concerns(facts: Facts) -> list[Concern]:
    """All warnings of a run: known warnings of stages, computed ones, a small corpus, others."""
    logged = _of_stages(facts)
    few, notes = logged.pop("small_corpus", []), logged.pop(NOTE, [])
    found = [one for code in known_warnings() for one in logged.get(code, [])]
    if facts["outdated"]:
        found.append(
            Concern(
                "Stages out of date",
                f"Left out of this report: {', '.join(facts['outdated'])}.",
                "They were made before the settings changed and describe another selection.",
                "Run `dualsft run` on this folder again.",
            )
        )
    if "scores" in facts:
        found += _of_scores(facts["scores"])
    if "selection" in facts:
        read = facts.get("manifests", {}).get("gradients", {})
        dtype = read.get("fingerprint", {}).get("settings", {}).get("dtype", "")
        found += _of_selection(facts["selection"], dtype in ("bfloat16", "float16"))
    if "evaluation" in facts:
        found += _of_evaluation(facts["evaluation"])
    return [*found, *few, *notes]


def _of_stages(facts: Facts) -> dict[str, list[Concern]]:
    """The warnings that the stages logged, by code. Unknown codes count as NOTE."""
    found: dict[str, list[Concern]] = defaultdict(list)
    for stage, texts in facts["warnings"].items():
        codes = facts["warning_codes"].get(stage) or [NOTE] * len(texts)  # runs made before codes
        for text, code in dict(zip(texts, codes, strict=False)).items():
            if code in known_warnings():
                found[code].append(Concern(found=f"{stage}: {text}", **known_warnings()[code]))
            elif code not in COUNTED:
                meaning = "The stage continued, and its result is as the message describes."
                cure = "Nothing needs to be done unless the message surprises you."
                found[NOTE].append(Concern(f"Note of the stage {stage}", text, meaning, cure))
    return found


def _of_scores(scores: Mapping[str, Any]) -> Iterator[Concern]:
    if "norms" not in scores:  # nothing needed u
        return
    share, probes = scores["curvature_share"], scores["checks"]["alone"]
    rounding = max((row.get("rounding", row["error"]) for row in probes), default=0.0)
    if share is not None and 0 < share < rounding:
        yield Concern(
            "Curvature share below rounding",
            f"The second-order part of u is {share:.2g} of the first-order part; rounding moves a "
            f"score by up to {rounding:.2g} of ‖u‖‖g‖.",
            "The curvature decides nothing here: the selection is the first-order one. That is "
            "usual where η is small, and no reason to distrust the first-order scores.",
            "Raise score.curvature_scale or finetune.lr if the second order should count, or set "
            "score.curvature=none and save the work.",
        )
    pull = scores["lam_effective"] * scores["norms"]["prior_grad"]
    learn = scores["norms"]["val_grad"]
    if pull > DOMINATES * learn and scores.get("lam_relative") != "scores":
        chosen = "entries are" if scores.get("form") == "calibrated" else "examples and entries are"
        yield Concern(
            "Preservation dominates",
            f"λ‖v_prior‖ = {pull:.3g} is {_times(pull, learn)} ‖v_new‖ = {learn:.3g}.",
            "The direction that scores are measured by is mostly that of keeping the old "
            f"behaviour; {chosen} chosen for not hurting rather than for teaching.",
            "Lower score.lam, or set score.lam_relative=true, which makes λ scale-free.",
        )


def _times(a: float, b: float) -> str:
    return f"{a / b:.1f} times" if b > 0 else "far above"


def _of_selection(chosen: Mapping[str, Any], half: bool) -> Iterator[Concern]:
    for key, budget, what, total in (
        ("num_nonpositive_examples", "select.data_budget", "examples", chosen.get("b")),
        ("num_nonpositive_params", "select.param_budget", "entries", chosen.get("k")),
    ):
        if chosen.get(key):
            yield Concern(
                f"Negative scores among the selected {what}",
                f"{chosen[key]:,} of the {total:,} selected {what} have a score ≤ 0.",
                "The budget is larger than what the scores recommend: by the run's own estimate "
                "these are not expected to help.",
                f"Lower {budget}.",
            )
    if chosen.get("near_ties"):
        yield Concern(
            "Ties at the boundary",
            f"{chosen['near_ties']:,} examples lie within rounding of the cut-off.",
            "Which of them are in and which are out is chance; the rest of the selection is not "
            "touched by it.",
            "Nothing, unless they are many; then score with model.dtype=float32."
            if half
            else "Nothing needs to be done.",
        )
    if "response_tokens_pool" not in chosen:
        return
    selected, pool = chosen["response_tokens_selected"], chosen["response_tokens_pool"]
    if pool > 0 and not 1 / DRIFT <= selected / pool <= DRIFT:
        longer = selected > pool
        yield Concern(
            "Length drift",
            f"Selected responses have {selected:.1f} tokens on average, the pool {pool:.1f}.",
            f"The selection prefers {'long' if longer else 'short'} responses. The loss is a mean "
            "over tokens, and short rows tend to have larger gradients; the choice may be one of "
            "length rather than of content, and the model may learn to answer at that length.",
            "Look at the selected rows below; set select.lengths=balanced, or filter the shortest "
            "or longest rows, and compare with method.data=random.",
        )


def _of_evaluation(results: Mapping[str, Any]) -> Iterator[Concern]:
    for name, r in results["files"].items():
        before, after = r["before"]["loss"], r["after"]["loss"]
        if name == "validation" and after > before:
            yield Concern(
                "Validation loss rose",
                f"From {before:.4f} to {after:.4f} on the split that scoring used.",
                "The model got worse on the very rows that the selection was aimed at.",
                "Lower finetune.lr or finetune.epochs; look at the training loss in metrics.jsonl.",
            )
