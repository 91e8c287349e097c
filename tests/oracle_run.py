"""Recompute a finished run folder with the oracle, from files alone.

Reads the layout of docs/run_folder.md with pyarrow, safetensors, yaml and json, loads theta_old and
theta_bar in float64, and compares G, v_new, v_prior, u, both scores, mask and selection.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml
from oracle import (
    Vector,
    apply_mask,
    cwsd_gradient,
    dot,
    example_gradient,
    fisher_gradient,
    grad_sum,
    l2_gradient,
    norm,
    param_scores,
    projection,
    rms_of_scores,
    scale,
    top_b,
    top_k_signed,
    val_grad,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Report = dict[str, float | bool]


@dataclass(frozen=True)
class RunExample:
    """A row of 1_split: tokens.parquet joined with the row's place in the source."""

    id: str
    role: str
    index: int
    input_ids: Sequence[int]
    labels: Sequence[int]


@dataclass(frozen=True)
class Run:
    """What a finished run folder says; absent files are None or missing keys."""

    folder: Path
    config: dict[str, Any]
    examples: list[RunExample]
    vectors: dict[str, Vector]
    example_rows: dict[str, dict[str, Any]]
    rescored: dict[str, float]
    summary: dict[str, Any]
    selected_lines: list[str] | None

    def role(self, name: str) -> list[RunExample]:
        return [example for example in self.examples if example.role == name]


ROUNDING = 1e-12  # in float64, of sums whose terms cancel
VECTOR_FILES = {
    "curvature": "2_warmup/curvature.safetensors",
    "grad_sum": "3_gradients/grad_sum.safetensors",
    "val_grad": "3_gradients/val_grad.safetensors",
    "prior_grad": "3_gradients/prior_grad.safetensors",
    "projection": "4_scores/projection.safetensors",
    "param_scores": "4_scores/params.safetensors",
    "mask": "5_selection/mask.safetensors",
}


def load_run(folder: str | Path) -> Run:
    """Read a run folder's artefacts with pyarrow, safetensors and yaml alone."""
    root = Path(folder)
    places = {row["id"]: row["index"] for row in _rows(root / "1_split/split.parquet")}
    examples = [
        RunExample(row["id"], row["role"], places[row["id"]], row["input_ids"], row["labels"])
        for row in _rows(root / "1_split/tokens.parquet")
    ]
    vectors = {k: load_file(root / p) for k, p in VECTOR_FILES.items() if (root / p).exists()}
    selected, summary = root / "5_selection/selected.jsonl", root / "4_scores/summary.json"
    return Run(
        folder=root,
        config=yaml.safe_load((root / "config.yaml").read_text()),
        examples=examples,
        vectors=vectors,
        example_rows={row["id"]: row for row in _rows(root / "4_scores/examples.parquet")},
        rescored={r["id"]: r["score"] for r in _rows(root / "5_selection/rescored.parquet")},
        summary=json.loads(summary.read_text()) if summary.exists() else {},
        selected_lines=read_lines(selected) if selected.exists() else None,
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist() if path.exists() else []


def read_lines(path: str | Path) -> list[str]:
    """Lines of a text file, gzipped or not, without their line ends."""
    raw = Path(path).read_bytes()
    text = (gzip.decompress(raw) if str(path).endswith(".gz") else raw).decode()
    return [line.rstrip("\r") for line in text.split("\n")][: -1 if text.endswith("\n") else None]


def candidate_names(model: Any, candidates: Any, stored: Vector | None) -> list[str]:
    """Candidates in the model's order; for patterns, those that the run itself wrote down."""
    parameters = dict(model.named_parameters())
    if candidates == "all":
        return list(parameters)
    if candidates == "block_linear":
        inside = re.compile(r"(^|\.)(layers|h)\.\d+\..*\.weight$")
        return [name for name, p in parameters.items() if p.ndim == 2 and inside.search(name)]
    return [name for name in parameters if name in (stored or {})]


def budget(value: int | float, total: int) -> int:
    """An integer is a count, a fraction (as the decimal written) is rounded down, at least 1."""
    return value if isinstance(value, int) else max(1, math.floor(Fraction(str(value)) * total))


def relative_error(got: Vector, true: Vector, beside: Vector) -> float:
    """Largest over the tensors of |got - true| / |true| (norms).

    Where true is zero but for rounding, as v_prior is at θ̄ = θ_old, it has no size to compare with:
    below ROUNDING of the same tensor of `beside` it is compared with that.
    """
    errors = [0.0]
    for name, reference in true.items():
        size, other = float(reference.norm()), float(beside[name].norm())
        size = size if size > ROUNDING * other else other or 1.0
        errors.append(float((got[name].double() - reference).norm()) / size)
    return max(errors)


def recompute(run: Run, old: Any, bar: Any, names: Sequence[str]) -> dict[str, Vector]:
    """G, v_new, v_prior, u and s_theta of a run from its splits and its two models."""
    score, pool, anchors = run.config["score"], run.role("pool"), run.role("anchor")
    kind = score["preservation"]
    if kind == "cwsd":
        prior = cwsd_gradient(old, bar, anchors, score["tau"], names)
    elif kind == "fisher":
        prior = fisher_gradient(old, bar, anchors, names)
    else:
        prior = scale(l2_gradient(old, bar, names), 1.0 if kind == "l2" else 0.0)
    c = run.vectors.get("curvature") if score["curvature"] != "none" else None
    total, new = grad_sum(bar, pool, names), val_grad(bar, run.role("val"), names)
    u = projection(
        new,
        prior,
        total,
        c and {name: tensor.double() for name, tensor in c.items()},
        score["lam"],
        score["lam_relative"],
        run.config["finetune"]["lr"] / len(pool),
        score["curvature_scale"],
        score["step"],
    )
    scores = param_scores(u, total)
    return {
        "grad_sum": total,
        "val_grad": new,
        "prior_grad": prior,
        "projection": u,
        "param_scores": scores,
    }


def check_run(
    folder: str | Path,
    model_path_theta_old: str | Path,
    tolerance: float,
    source: str | Path | None = None,
) -> Report:
    """Recompute a one-shot run in float64 and compare whatever its folder holds.

    Floats are relative errors (per tensor, by norm); `*_exact` says that a set is the oracle's own,
    `mask` and `selection` that it is a true top set of some scores within `tolerance` of the
    oracle's; `ok` that all is within tolerance. Keys whose files are absent are absent: assert
    the keys you expect. `source` is the corpus, by default the run's data.path.
    """
    run = load_run(folder)
    if run.config["select"].get("rounds"):
        raise ValueError("check_run recomputes one-shot runs; this one has select.rounds > 0")
    old, bar = _load(model_path_theta_old), _load(run.folder / "2_warmup/theta_bar")
    names = candidate_names(bar, run.config["score"]["candidates"], run.vectors.get("grad_sum"))
    true = recompute(run, old, bar, names)
    report: Report = {}
    for key in true.keys() & run.vectors.keys():
        report[f"{key}_names"] = set(run.vectors[key]) == set(names)
        if report[f"{key}_names"]:
            beside = true["val_grad" if key == "prior_grad" else key]
            report[key] = relative_error(run.vectors[key], true[key], beside)
    report |= _check_summary(run, true)
    if "mask" in run.vectors:
        report |= _check_mask(run, true, tolerance)
    if any(row["score"] is not None for row in run.example_rows.values()):
        report |= _check_examples(run, bar, true["projection"], tolerance, source)
    inexact = {key: value for key, value in report.items() if not key.endswith("_exact")}
    report["ok"] = all(v if isinstance(v, bool) else v <= tolerance for v in inexact.values())
    return report


def _load(path: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def _is_top(chosen: Tensor, scores: Tensor, slack: Tensor) -> bool:
    """Whether errors of at most `slack` in `scores` can make the `chosen` (bool) a top set."""
    if chosen.all() or not chosen.any():
        return True
    return bool((scores + slack)[chosen].min() >= (scores - slack)[~chosen].max())


def _check_summary(run: Run, true: dict[str, Vector]) -> Report:
    u, total, num_pool = true["projection"], true["grad_sum"], len(run.role("pool"))
    report: Report = {}
    if "u_dot_G" in run.summary:
        size = norm(u) * norm(total)
        report["u_dot_G"] = abs(run.summary["u_dot_G"] - dot(u, total)) / size if size else 0.0
    if "n_sc" in run.summary:
        report["n_sc"] = run.summary["n_sc"] == num_pool
    if "eta_sc" in run.summary:
        report["eta_sc"] = abs(run.summary["eta_sc"] * num_pool / run.config["finetune"]["lr"] - 1)
    if "rms_param_scores" in run.summary:
        report |= _check_terms(run, true)
    return report


def _check_terms(run: Run, true: dict[str, Vector]) -> Report:
    """The RMS of both terms of s_theta, and the factor of v_prior."""
    score, total = run.config["score"], true["grad_sum"]
    c = run.vectors.get("curvature") if score["step"] == "adam" else None
    divided = c and {name: tensor.double() for name, tensor in c.items()}
    new, prior = (rms_of_scores(true[v], total, divided) for v in ("val_grad", "prior_grad"))
    size, lam = norm(true["prior_grad"]), score["lam"]
    if size <= ROUNDING * norm(true["val_grad"]):
        lam = prior = 0.0
    elif score["lam_relative"] == "scores":
        lam = lam * new / prior
    elif score["lam_relative"]:
        lam = lam * norm(true["val_grad"]) / size
    eta_sc = run.config["finetune"]["lr"] / len(run.role("pool"))
    got = run.summary["rms_param_scores"]
    return {
        "rms_new": abs(got["new"] / (eta_sc * new) - 1),
        "rms_prior": abs(got["prior"] - eta_sc * lam * prior) / (eta_sc * new),
        "lam_effective": abs(run.summary["lam_effective"] - lam) / max(lam, 1.0) if prior else 0.0,
    }


def _check_mask(run: Run, true: dict[str, Vector], tolerance: float) -> Report:
    scores, u, total = true["param_scores"], true["projection"], true["grad_sum"]
    k = budget(run.config["select"]["param_budget"], sum(s.numel() for s in scores.values()))
    best, mask = top_k_signed(scores, k), run.vectors["mask"]
    stored = {name: mask.get(name, torch.empty(0, dtype=torch.int64)) for name in scores}
    slack = {n: u[n].abs().max() * g.abs() + u[n].abs() * g.abs().max() for n, g in total.items()}
    chosen = apply_mask({n: torch.ones_like(s) for n, s in scores.items()}, stored)
    flat = [torch.cat([v[n].reshape(-1) for n in scores]) for v in (chosen, scores, slack)]
    count = sum(len(indices) for indices in mask.values())
    return {
        "mask_exact": all(torch.equal(best[n], stored[n]) for n in scores),
        "mask": count == k and _is_top(flat[0] > 0, flat[1], tolerance * flat[2]),
    }


def _check_examples(
    run: Run, bar: Any, u: Vector, tolerance: float, source: str | Path | None
) -> Report:
    pool = sorted(run.role("pool"), key=lambda example: example.index)
    scores, slack, excess = [], [], []
    for e in pool:
        gradient = example_gradient(bar, e.input_ids, e.labels, list(u))
        scores.append(dot(u, gradient))
        slack.append(sum(float(u[n].norm() * gradient[n].norm()) for n in u))
        row = run.example_rows[e.id]
        gap = abs(row["score"] - scores[-1]) - (0.0 if row["exact"] else row["bound"])
        excess += [max(gap, 0.0), abs(run.rescored.get(e.id, scores[-1]) - scores[-1])]
    s = torch.tensor(scores, dtype=torch.float64)
    report: Report = {
        "example_scores": float(torch.tensor(excess, dtype=torch.float64).norm() / s.norm())
    }
    if run.selected_lines is None or run.config["select"]["variant"] == "param":
        return report
    lines = read_lines(source or run.config["data"]["path"])
    num_full = sum(not e.id.startswith("anchor-") for e in run.examples)  # not data.anchor_path
    b = min(len(pool), budget(run.config["select"]["data_budget"], num_full))
    best = [lines[index] for index in top_b(s, [e.index for e in pool], b)]
    report["selection_exact"] = best == run.selected_lines
    waiting, chosen = list(run.selected_lines), torch.zeros(len(pool), dtype=torch.bool)
    for place, e in enumerate(pool):
        if waiting and lines[e.index] == waiting[0]:
            chosen[place] = bool(waiting.pop(0))
    top = _is_top(chosen, s, tolerance * torch.tensor(slack, dtype=torch.float64))
    report["selection"] = not waiting and len(run.selected_lines) == b and top
    return report
