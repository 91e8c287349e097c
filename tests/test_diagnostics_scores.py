"""The diagnostics of the scores against brute force: every gradient written out, in float64.

One tiny run; the oracle holds the whole [examples, entries] matrix of gradients at θ̄ and at θ_old,
from tests/oracle.py alone, and every definition of the paper is a line of numpy on it. RMSNorm
computes in float32 (see models.exact_norms), so numbers agree to about 1e-6; sets agree exactly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow.parquet as pq
import pytest
import torch
from conftest import small_run
from models import exact_norms
from oracle_run import Run, candidate_names, load_run
from transformers import AutoModelForCausalLM

from dualsft.config import settings
from dualsft.lab.diagnostics import Wanted, registry
from dualsft.lab.diagnostics.ablations import anchor_sizes
from dualsft.lab.diagnostics.costs import seconds
from dualsft.lab.diagnostics.job import DiagnosticJob, diagnose, others
from dualsft.lab.diagnostics.ranking import (
    jaccard,
    mask_overlap,
    sampled,
    spearman,
)
from dualsft.model.load import locate
from dualsft.runs import pipeline
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.runs.preflight import read_manifests
from dualsft.storage.vectors import ParamVector
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter

NEAR = 2e-5
MODULES = ("coordination", "chosen_statistics", "ablations", "boundary")
SCALE = 2000.0  # of the curvature, so that the second-order term can be seen


class Lab:
    """The run, and everything of it by brute force."""

    def __init__(self, run: Run) -> None:
        self.run, self.bar, self.old = run, load(run, "bar"), load(run, "old")
        self.names = candidate_names(self.bar, "block_linear", None)
        self.pool = sorted(run.role("pool"), key=lambda e: e.index)
        self.eta = run.config["finetune"]["lr"] / len(self.pool)
        self.curvature = self.flat(run.vectors["curvature"])
        sizes = [run.vectors["curvature"][name].numel() for name in self.names]
        self.spans = {
            n: slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i, n in enumerate(self.names)
        }
        self.k, self.b = int(0.05 * len(self.curvature)), int(0.1 * len(run.examples))
        self.at: dict[str, dict[str, np.ndarray]] = {}
        """g, v_new, v_prior, u of both checkpoints (u with its factor eta)."""
        for name, model in (("init", self.old), ("warmup", self.bar)):
            new = self.gradients(model, run.role("val")).mean(0)
            prior = self.cwsd(run.role("anchor")) if name == "warmup" else 0 * new
            self.at[name] = {"g": self.gradients(model, self.pool), "new": new, "prior": prior}
            self.at[name]["u"] = self.u(name)
        self.own = Own(self, "warmup")

    def flat(self, vector: Any) -> np.ndarray:
        return torch.cat([vector[n].reshape(-1).double() for n in self.names]).detach().numpy()

    def gradients(self, model: Any, examples: list[Any]) -> np.ndarray:
        """One row per example."""
        found = [
            oracle.example_gradient(model, e.input_ids, e.labels, self.names) for e in examples
        ]
        return np.stack([self.flat(gradient) for gradient in found])

    def cwsd(self, anchors: list[Any], tau: float = 1.0) -> np.ndarray:
        return self.flat(oracle.cwsd_gradient(self.old, self.bar, anchors, tau, self.names))

    def u(self, where: str, **other: Any) -> np.ndarray:
        """Eq. (u) with anything replaced: prior, lam, scale."""
        mine = self.at[where]
        v_val = mine["new"] + other.get("lam", 0.8) * other.get("prior", mine["prior"])
        second = self.eta**2 / 2 * other.get("scale", SCALE) * self.curvature * mine["g"].sum(0)
        return self.eta * v_val - second

    def check_variant(
        self, row: dict[str, Any], u: np.ndarray, g: np.ndarray | None = None
    ) -> None:
        """How u (and the gradients g at another θ) selects, compared with the run's own u."""
        own, g = self.own, self.own.g if g is None else g
        overlap = shared(top(u * g.sum(0), self.k), own.mask)
        assert row["jaccard_params"] == pytest.approx(overlap, abs=3 / self.k)
        overlap = shared(top(g @ u, self.b), own.chosen)
        assert row["jaccard_examples"] == pytest.approx(overlap)
        if "cosine_u" in row:
            assert row["cosine_u"] == pytest.approx(cosine(u, own.u), rel=1e-5)

    def diagnose(self, name: str, *words: str) -> Any:
        files = diagnose(self.run.folder, Wanted.of([name], list(words)), Reporter(lambda _: None))
        assert {f.suffix for f in files} == {".json", ".svg", ".png"}
        assert all(f.location.stat().st_size > 5000 for f in files[1:])
        stored = json.loads(files[0].read_text())
        assert stored["name"] == name
        return stored["result"]

    def job(self) -> DiagnosticJob:
        config = settings.load_yaml(self.run.folder / "config.yaml")
        context = RunContext(config, RunDir(self.run.folder), Reporter(lambda _: None))
        return DiagnosticJob(context, None)


def load(run: Run, which: str) -> Any:
    path = run.folder / "2_warmup/theta_bar" if which == "bar" else run.config["model"]["path"]
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


class Own:
    """One-shot scores and selections at a checkpoint."""

    def __init__(self, lab: Lab, where: str) -> None:
        parts = lab.at[where]
        self.g, self.u, self.total = parts["g"], parts["u"], parts["g"].sum(0)
        self.scores, self.example_scores = self.u * self.total, self.g @ self.u
        self.mask, self.chosen = top(self.scores, lab.k), top(self.example_scores, lab.b)
        self.v = parts["new"] + 0.8 * parts["prior"]


def near(row: dict[str, Any], rel: float = NEAR, **expected: Any) -> None:
    for key, value in expected.items():
        assert row[key] == (None if value is None else pytest.approx(value, rel=rel)), key


def top(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the largest; ties in their order."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


def shared(a: np.ndarray, b: np.ndarray) -> float:
    return len(set(a.tolist()) & set(b.tolist())) / len(set(a.tolist()) | set(b.tolist()))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Without regard to ties (the corpus has two duplicates, which may tie)."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def lab(
    corpus: Path, model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    words = ["model.dtype=float64", "warmup.epochs=3", f"score.curvature_scale={SCALE}"]
    config = settings.load(None, [*small_run(model_folder("llama"), corpus), *words])
    out = tmp_path_factory.mktemp("diagnosed") / "run"
    pipeline.run(config, out, None, Reporter(lambda _: None))
    before = stage_hashes(out)
    yield Lab(load_run(out))
    assert stage_hashes(out) == before, "a diagnostic changed a stage"


def stage_hashes(run: Path) -> dict[str, str]:
    files = [p for p in sorted(run.glob("[0-9]_*/**/*")) if p.is_file()]
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_local_regret(lab: Lab) -> None:
    result = lab.diagnose("local_regret")
    rows = {(r["side"], r["checkpoint"]): r for r in result["rows"]}
    assert (result["k"], result["b"]) == (lab.k, lab.b)
    assert set(rows) == {(side, where) for side in ("examples", "params") for where in lab.at}
    for where in lab.at:
        own = Own(lab, where)
        aware = own.g[:, own.mask] @ own.u[own.mask]
        best = top(aware, lab.b)
        ratio, row = aware[own.chosen].sum() / aware[best].sum(), rows["examples", where]
        near(row, jaccard=shared(best, own.chosen), ratio=ratio)
        assert row["regret_percent"] == pytest.approx(100 * (1 - ratio), abs=1e-3)
        aware = own.u * own.g[own.chosen].sum(0)
        best = top(aware, lab.k)
        ratio = aware[own.mask].sum() / aware[best].sum()
        row = rows["params", where]
        near(row, jaccard=shared(best, own.mask), ratio=ratio, utility_aware=aware[best].sum())
    assert rows["params", "init"]["ratio"] != pytest.approx(rows["params", "warmup"]["ratio"])


def test_coordination_gap(lab: Lab) -> None:
    """Proposition coord_gap from its right-hand sides: frozen entries, examples left out."""
    result, own = lab.diagnose("coordination_gap"), lab.own
    frozen = np.setdiff1d(np.arange(len(own.v)), own.mask)
    left_out = np.setdiff1d(np.arange(len(own.g)), own.chosen)
    gaps = {
        "examples": (own.g[:, frozen] @ own.v[frozen], own.g @ own.v),
        "params": (own.v * own.g[left_out].sum(0), own.v * own.total),
    }
    for side, (gap, iso) in gaps.items():
        mine, gap, iso = result[side], lab.eta * gap, lab.eta * iso
        near(
            mine,
            gap_rms=np.sqrt((gap**2).mean()),
            relative_gap=np.linalg.norm(gap) / np.linalg.norm(iso),
            largest_gap=np.abs(gap).max(),
            cosine=cosine(iso, iso - gap),
        )
        assert mine["spearman"] == pytest.approx(rank_correlation(iso, iso - gap), abs=1e-4)
        changed = (np.sign(iso) != np.sign(iso - gap)).mean()
        assert mine["sign_changes"] == pytest.approx(changed, abs=1e-3)
        count = lab.b if side == "examples" else lab.k
        overlap = shared(top(iso, count), top(iso - gap, count))
        assert mine["jaccard"] == pytest.approx(overlap, abs=3 / lab.k)
    assert result["params"]["ranked"] == len(own.v) and 0 < result["params"]["jaccard"] < 1


def test_reselection(lab: Lab) -> None:
    result, own = lab.diagnose("reselection"), lab.own
    g, u, mask0, chosen0 = own.g, own.u, own.mask, own.chosen
    for order, first in (("data_to_param", 1), ("param_to_data", 0)):
        mask, chosen, seen = mask0, chosen0, [(mask0, chosen0)]
        for number in range(1, 6):
            if number % 2 == first:
                mask = top(u * g[chosen].sum(0), lab.k)
            else:
                chosen = top(g[:, mask] @ u[mask], lab.b)
            seen.append((mask, chosen))
        rows = result["orders"][order]
        assert [r["rounds"] for r in rows] == [0, 1, 2, 3, 5]
        for row in rows:
            mask, chosen = seen[row["rounds"]]
            utility = float((g[chosen][:, mask] @ u[mask]).sum())
            near(row, jaccard_params=shared(mask, mask0), utility=utility)
            near(row, jaccard_examples=shared(chosen, chosen0))
        assert rows[1]["moved"] == ("params" if first else "examples")
        gained = [r["utility"] for r in rows]
        assert all(b >= a * (1 - 1e-9) for a, b in zip(gained, gained[1:], strict=False))
        spent = [r["relative_selection"] for r in rows]
        assert spent[0] == 1 and spent == sorted(spent) and spent[1] > 1
        assert 1 < rows[-1]["relative_end_to_end"] < spent[-1]
    again = {"params": u * g[chosen0].sum(0), "examples": g[:, mask0] @ u[mask0]}
    _check_scatter(result["scatter"]["params"], own.scores, again["params"], 1000)
    _check_scatter(result["scatter"]["examples"], own.example_scores, again["examples"], len(g))


def _check_scatter(facts: Any, one_shot: np.ndarray, again: np.ndarray, count: int) -> None:
    assert len(facts["one_shot"]) == len(facts["rescored"]) == count
    assert facts["ranked"] == len(one_shot)
    assert facts["spearman"] == pytest.approx(rank_correlation(one_shot, again), abs=1e-4)
    for x, y in zip(facts["one_shot"][:50], facts["rescored"][:50], strict=True):
        where = np.abs(one_shot - x).argmin()
        assert one_shot[where] == pytest.approx(x, rel=1e-3, abs=1e-10)
        assert again[where] == pytest.approx(y, rel=1e-2, abs=1e-9)


def test_data_statistics(lab: Lab) -> None:
    groups = lab.diagnose("data_statistics")["groups"]
    own, pool = lab.own, lab.pool
    with torch.no_grad():
        losses = np.array(
            [float(oracle.example_loss(lab.bar, e.input_ids, e.labels)) for e in pool]
        )
        hidden = [
            lab.old.model(input_ids=torch.tensor([e.input_ids])).last_hidden_state[0].mean(0)
            for e in pool
        ]
    ids = set(json.loads((lab.run.folder / "5_selection/ids.json").read_text()))
    members = {
        "selected": np.array([i for i, e in enumerate(pool) if e.id in ids]),
        "top_loss": top(losses, lab.b),
        "pool": np.arange(len(pool)),
    }
    phi = torch.stack(hidden).numpy()
    for name, rows in members.items():
        mine = groups[name]
        assert mine["examples"] == len(rows) == mine["alignment_examples"]
        pairs = [1 - cosine(phi[i], phi[j]) for i in rows for j in rows if i < j]
        aligned = np.mean([cosine(own.g[i], own.v) for i in rows])
        near(mine, alignment=aligned, loss=losses[rows].mean(), diversity=np.mean(pairs))
    assert groups["random"]["examples"] == lab.b
    assert groups["selected"]["alignment"] > groups["pool"]["alignment"]


def test_param_statistics(lab: Lab) -> None:
    result, whole = lab.diagnose("param_statistics"), np.ones(len(lab.own.u), bool)
    selected = np.isin(np.arange(len(whole)), lab.own.mask)
    assert (result["selected"], result["candidates"]) == (lab.k, len(whole))

    def check(mine: Any, word: str, frame: str = "") -> None:
        def count(of: np.ndarray, part: str) -> int:
            return sum(int(of[span].sum()) for name, span in lab.spans.items() if part in name)

        chosen, pool = (count(of, word) / count(of, frame) for of in (selected, whole))
        near(mine, selected=chosen, pool=pool, enrichment=chosen / pool)

    groups = result["groups"]
    check(groups["attention"], "attn")
    check(groups["FFN"], "mlp")
    check(groups["down_proj within FFN"], "down_proj", frame="mlp")
    check(groups["early layers (L0–L0)"], ".layers.0.")
    check(result["layers"]["1"], ".layers.1.")
    check(result["modules"]["self_attn.v_proj"], "v_proj")
    assert groups["top 2 layers"]["selected"] == pytest.approx(1.0)


def test_heatmap(lab: Lab) -> None:
    result = lab.diagnose("heatmap")
    selected = np.isin(np.arange(len(lab.own.scores)), lab.own.mask)
    for name, span in lab.spans.items():
        layer, module = locate(name)
        row, column = result["layers"].index(layer), result["modules"].index(module)
        mean = np.abs(lab.own.scores[span]).mean()
        assert result["mean_abs_score"][row][column] == pytest.approx(mean, rel=NEAR)
        assert result["selected_share"][row][column] == pytest.approx(selected[span].mean())
    assert len(lab.names) == len(result["layers"]) * len(result["modules"])


def test_histograms(lab: Lab) -> None:
    result, own = lab.diagnose("histograms"), lab.own
    sides = {"params": (own.scores, lab.k), "examples": (own.example_scores, lab.b)}
    for side, (scores, budget) in sides.items():
        mine = result[side]
        assert (mine["total"], mine["selected"]) == (len(scores), budget)
        assert sum(mine["counts"]) == len(scores)
        assert mine["negative"] == int((scores < 0).sum())
        assert mine["cutoff"] == pytest.approx(np.sort(scores)[-budget], rel=1e-4)
        edges = np.array(mine["edges"])
        assert (np.diff(edges) > 0).all()
        moved = np.abs(np.histogram(scores, edges)[0] - mine["counts"]).sum()
        assert moved <= 0.01 * len(scores) + 4  # what lies within rounding of an edge
        inside = (scores >= edges[len(edges) // 2]).sum()
        assert abs(sum(mine["counts"][len(edges) // 2 :]) - inside) <= 3


LITERAL, CALIBRATED = "predicted loss decrease (nats)", "calibrated score"


@pytest.mark.parametrize(
    ("words", "unit", "data", "params"),
    [
        (["method.params=random"], LITERAL, None, "method.params=random"),
        (["method.data=random"], LITERAL, "method.data=random", None),
        (["select.lengths=balanced"], LITERAL, "select.lengths", None),
        (["select.duplicates=exact", "score.mode=two_pass"], LITERAL, None, None),
        (["score.form=calibrated", "score.sketch_dim=64"], CALIBRATED, None, None),
    ],
)
def test_a_cut_off_is_that_of_the_run(
    words: list[str],
    unit: str,
    data: str | None,
    params: str | None,
    make_run: Callable[..., Path],
) -> None:
    run = make_run(*words)
    files = diagnose(run, Wanted.of(["histograms", "heatmap"], []), Reporter(lambda _: None))
    found = {f.stem: json.loads(f.read_text())["result"] for f in files if f.suffix == ".json"}
    picture = (run / "diagnostics/histograms.svg").read_text()
    for side, rule in (("examples", data), ("params", params)):
        facts = found["histograms"][side]
        assert facts["chosen_by"] == rule and (facts["cutoff"] is None) == (rule is not None)
        assert rule is None or f"the run selected by {rule}," in picture
    assert picture.count("<!-- cut-off: ") == (data is None) + (params is None)
    assert f"<!-- {unit} -->" in picture
    if data is None:
        table = pq.read_table(run / "4_scores/examples.parquet").to_pydict()
        scores = dict(zip(table["id"], table["score"], strict=True))
        again = pq.read_table(run / "5_selection/rescored.parquet").to_pydict()
        scores |= dict(zip(again["id"], again["score"], strict=True))
        chosen = json.loads((run / "5_selection/ids.json").read_text())
        facts = found["histograms"]["examples"]
        assert facts["cutoff"] == min(scores[name] for name in chosen)
    assert found["heatmap"]["chosen_by"] == params
    picture = (run / "diagnostics/heatmap.svg").read_text()
    assert (f"<!-- selected by {params}," in picture) == (params is not None)


def test_a_run_without_vectors_computes_them_once_and_only_on_request(
    make_run: Callable[..., Path],
) -> None:
    words = ("score.form=calibrated", "score.sketch_dim=64", "method.params=random")
    run, said = make_run(*words), list[str]()
    cheap = Wanted.of([], [])
    files = diagnose(run, cheap, Reporter(said.append))
    assert {f.stem for f in files} == {"param_statistics"}
    assert not any("computing them" in line for line in said)
    lines = dict(line.split(maxsplit=1) for line in [*others(run, cheap)][1:])
    words = "first, once per command, G, v_new and v_prior, which the run does not have"
    assert all(words in lines[name] for name in ("data_statistics", "heatmap", "histograms"))
    diagnose(run, Wanted.of(["heatmap", "histograms"], []), Reporter(said.append))
    assert sum("computing them" in line for line in said) == 1
    assert sum("started: " in line and words in line for line in said) == 2
    manifests, one = read_manifests(RunPath(run))[0], registry()["heatmap"]
    assert seconds(one, one.options(), manifests) == manifests["gradients"]["seconds"]


def test_preservation(lab: Lab) -> None:
    result, parts, anchors = lab.diagnose("preservation"), lab.at["warmup"], lab.run.role("anchor")
    priors = {
        "none": 0 * parts["new"],
        "l2": lab.flat(oracle.l2_gradient(lab.old, lab.bar, lab.names)),
        "fisher": lab.flat(oracle.fisher_gradient(lab.old, lab.bar, anchors, lab.names)),
        "cwsd": parts["prior"],
    }
    size = np.linalg.norm(parts["new"])
    assert len(result["rows"]) == 8 and result["examples_compared"] == len(lab.pool)
    for row in result["rows"]:
        prior, lam = priors[row["preservation"]], 0.8
        length = np.linalg.norm(prior)
        if row["lam_relative"]:
            lam = lam * size / length if length else 0.0
        angle = cosine(prior, parts["new"]) if length else None
        near(row, 1e-4, norm=length, share=lam * length / size, cosine_val_grad=angle)
        lab.check_variant(row, lab.u("warmup", prior=prior, lam=lam))
    itself = [r for r in result["rows"] if r["preservation"] == "cwsd" and not r["lam_relative"]]
    assert itself[0]["jaccard_params"] == itself[0]["jaccard_examples"] == 1.0
    assert min(r["jaccard_params"] for r in result["rows"]) < 0.9


def test_anchor_size(lab: Lab) -> None:
    words = ["diagnose.anchor_size.sizes=3,5,9,500"]
    result, parts = lab.diagnose("anchor_size", *words), lab.at["warmup"]
    anchors = sorted(lab.run.role("anchor"), key=lambda e: e.index)
    order = lab.job().rng("anchors").permutation(len(anchors))
    assert [r["anchors"] for r in result["rows"]] == [3, 5, 9, len(anchors)]
    for row in result["rows"]:
        prior = lab.cwsd([anchors[i] for i in order[: row["anchors"]]])
        near(row, 1e-4, cosine=cosine(prior, parts["prior"]))
        lab.check_variant(row, lab.u("warmup", prior=prior))
    assert result["rows"][0]["cosine"] < result["rows"][-1]["cosine"]


def test_anchor_sizes_take_what_there_is() -> None:
    assert anchor_sizes([256, 512, 1024, 2048, 4096], 2048) == [256, 512, 1024, 2048]
    assert anchor_sizes([256, 512], 64) == [4, 8, 16, 32, 64]
    assert anchor_sizes([256, 512, 1024], 3) == [1, 3]


def test_components(lab: Lab) -> None:
    result, own, start = lab.diagnose("components"), lab.own, lab.at["init"]
    variants = {
        "preservation": (lab.u("warmup", lam=0.0), own.g),
        "second order": (lab.u("warmup", scale=0.0), own.g),
        "warmup": (start["u"], start["g"]),
    }
    assert {r["without"] for r in result["rows"]} == set(variants)
    for row in result["rows"]:
        u, g = variants[row["without"]]
        lab.check_variant(row, u, g)
        rank = rank_correlation(u * g.sum(0), own.scores)
        assert row["spearman_params"] == pytest.approx(rank, abs=1e-5)
        rank = rank_correlation(g @ u, own.example_scores)
        assert row["spearman_examples"] == pytest.approx(rank, abs=1e-4)
    second = lab.eta / 2 * SCALE * lab.curvature * own.total
    share = np.linalg.norm(second) / np.linalg.norm(own.v)
    assert result["curvature_share"] == pytest.approx(share, rel=NEAR) and share > 0.01


def test_sensitivity(lab: Lab) -> None:
    words = ["diagnose.sensitivity.lambdas=0,0.8,8", "diagnose.sensitivity.taus=1.0,3.0"]
    result = lab.diagnose("sensitivity", *words)
    example_scores, scores = lab.own.example_scores, lab.own.scores
    assert len(result["data_budgets"]) >= 3 and len(result["param_budgets"]) >= 3
    for row in result["data_budgets"]:
        b = max(1, int(row["share"] * len(lab.run.examples)))
        best = top(example_scores, b)
        assert row["b"] == b
        gained = example_scores[best].sum() / example_scores[example_scores > 0].sum()
        assert row["utility_share"] == pytest.approx(gained, rel=1e-2)  # one-pass scores
        assert row["nonpositive"] == pytest.approx((example_scores[best] <= 0).mean())
    for row in result["param_budgets"]:
        k = int(row["share"] * len(scores))
        best = np.sort(scores)[-k:]
        assert row["k"] == k and row["cutoff"] == pytest.approx(best[0], rel=1e-4)
        near(row, utility_share=best.sum() / scores[scores > 0].sum())
    variants = [(r, lab.u("warmup", lam=r["lam"])) for r in result["lambdas"]]
    for row in result["taus"]:
        prior = lab.cwsd(lab.run.role("anchor"), row["tau"])
        assert row["norm"] == pytest.approx(np.linalg.norm(prior), rel=1e-4)
        variants.append((row, lab.u("warmup", prior=prior)))
    assert len(variants) == 5
    for row, u in variants:
        lab.check_variant(row, u)
    assert result["lambdas"][1]["jaccard_params"] == 1.0 > result["lambdas"][2]["jaccard_params"]


def test_compared_sample_keeps_the_share(lab: Lab) -> None:
    result = lab.diagnose("components", "diagnose.components.pool=40")
    assert result["examples_compared"] == 40
    assert result["b_compared"] == lab.b * 40 // len(lab.pool)


def test_boundary(lab: Lab) -> None:
    """H by differences of the oracle's gradients, on a model whose norms are float64."""
    words = ["diagnose.boundary.rows=3", "diagnose.boundary.iterations=3"]
    result, own = lab.diagnose("boundary", *words), lab.own
    g, total = own.g, own.total
    rows = {}
    for role in ("val", "anchor"):
        some = sorted(lab.run.role(role), key=lambda e: e.index)
        chosen = np.sort(lab.job().rng(f"hessian {role}").permutation(len(some))[:3])
        rows[role] = [some[i] for i in chosen]
    old = load(lab.run, "old")
    exact_norms(old)

    def slope(shift: np.ndarray) -> np.ndarray:
        model = load(lab.run, "bar")
        exact_norms(model)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, span in lab.spans.items():
                parameters[name].add_(torch.from_numpy(shift[span]).view_as(parameters[name]))
        new = lab.gradients(model, rows["val"]).mean(0)
        prior = oracle.cwsd_gradient(old, model, rows["anchor"], 1.0, lab.names)
        return new + 0.8 * lab.flat(prior)

    def product(v: np.ndarray) -> np.ndarray:
        hessian = (slope(1e-5 * v) - slope(-1e-5 * v)) / 2e-5
        return hessian - SCALE * lab.curvature * v

    v, norms, first = total / np.linalg.norm(total), [], None
    for _ in range(3):
        w = product(v)
        first = w * np.linalg.norm(total) if first is None else first
        norms.append(np.linalg.norm(w))
        v = w / norms[-1]
    assert first is not None
    assert result["operator_norm"] == pytest.approx(norms[-1], rel=1e-4)
    assert result["iterations"] == result["rows"] == result["anchors"] == 3
    mine, errors = result["params"], lab.eta**2 / 2 * first * total
    bound = lab.eta**2 * norms[-1] * (total @ total)
    near(mine, 1e-3, largest_error=np.abs(errors).max(), bound=bound)
    overlap = shared(own.mask, top(own.scores - errors, lab.k))
    assert mine["jaccard_full"] == pytest.approx(overlap, abs=3 / lab.k)
    ordered = np.sort(own.scores)[::-1]
    assert mine["gap"] == pytest.approx(ordered[lab.k - 1] - ordered[lab.k], rel=1e-2)
    assert mine["same_selection"] == (mine["jaccard_full"] == 1.0)
    mine, errors = result["examples"], lab.eta**2 / 2 * (g @ first)
    bound = lab.eta**2 * norms[-1] * np.linalg.norm(total) * mine["gradient_bound"]
    near(mine, 1e-3, largest_error=np.abs(errors).max(), bound=bound)
    near(mine, jaccard_full=shared(own.chosen, top(own.example_scores - errors, lab.b)))
    largest = np.linalg.norm(g, axis=1).max()
    assert largest <= mine["gradient_bound"] < 20 * largest
    assert mine["bound"] >= 2 * mine["largest_error"]
    for facts in (mine, result["params"]):
        assert facts["certified_by_corollary"] == (facts["gap"] > facts["bound"])
        assert facts["certified_by_error"] == (facts["gap"] > facts["twice_largest_error"])


def test_without_names_only_the_cheap_ones_run_and_the_others_have_a_price(lab: Lab) -> None:
    cheap, known = Wanted.of([], []), registry()
    names = {one.name for one in cheap.diagnostics}
    assert names == {"data_statistics", "param_statistics", "heatmap", "histograms"}
    assert Wanted.of(["all"], []).diagnostics == list(known.values())
    folder = lab.run.folder
    lines = dict(line.split(maxsplit=1) for line in [*others(folder, cheap)][1:])
    assert lines.keys() == known.keys() - names
    assert all(re.search(r"; (seconds|roughly [\d:]+)$", line) for line in lines.values())
    assert list(others(folder, Wanted.of(["all"], []))) == []
    manifests, one = read_manifests(RunPath(folder))[0], known["reverse"]
    step = manifests["finetune"]["seconds"] / manifests["finetune"]["facts"]["steps"]
    found = seconds(one, one.options(draws=2, steps=100), manifests)
    assert found == pytest.approx((4 + 3 * 2) * 100 * step)
    del manifests["finetune"]
    assert seconds(one, one.options(), manifests) is None


def test_a_damaged_result_is_computed_again(lab: Lab) -> None:
    folder, said = lab.run.folder, list[str]()
    expected = lab.diagnose("heatmap")
    path = folder / "diagnostics/heatmap.json"
    path.write_text(path.read_text()[:40])
    diagnose(folder, Wanted.of(["heatmap"], []), Reporter(said.append))
    assert any("cannot be read; it is computed again" in line for line in said)
    assert json.loads(path.read_text())["result"] == expected


def test_second_call_reuses_and_a_stop_loses_no_finished_walk(lab: Lab, tmp_path: Path) -> None:
    folder, said = lab.run.folder, list[str]()
    expected = lab.diagnose("coordination_gap")
    diagnose(folder, Wanted.of(["coordination_gap"], []), Reporter(said.append))
    assert any("reused" in line for line in said)
    (folder / "diagnostics/coordination_gap.json").unlink()

    class Stop(Exception):
        pass

    def stop(line: str) -> None:
        if "mask-aware" in line:
            raise Stop

    with pytest.raises(Stop):
        diagnose(folder, Wanted.of(["coordination_gap"], []), Reporter(stop))
    said.clear()
    diagnose(folder, Wanted.of(["coordination_gap"], []), Reporter(said.append))
    assert any("mask-aware" in line for line in said)
    assert not any("isolated scores" in line for line in said), "a finished walk was walked again"
    stored = json.loads((folder / "diagnostics/coordination_gap.json").read_text())
    assert stored["result"] == expected
    assert not (folder / "diagnostics/coordination_gap.work").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "param", "cold", "adam", "no_anchors"])
def test_other_runs(name: str, make_run: Callable[..., Path]) -> None:
    """Each variant has what there is: no mask, no subset, no warmup, Adam's step, fp32."""
    names = [name for name, one in registry().items() if one.module in MODULES]
    assert len(names) == 12
    words = ["diagnose.boundary.rows=2", "diagnose.boundary.iterations=2"]
    overrides = {
        "data": ["select.variant=data", "score.preservation=l2", "score.mode=two_pass"],
        "param": ["select.variant=param", "score.preservation=fisher", "score.lam_relative=true"],
        "cold": ["warmup.epochs=0"],
        "adam": ["score.step=adam", "select.rounds=1"],
        "no_anchors": ["split.anchor=0", "score.preservation=none"],
    }
    run = make_run(*overrides[name], out=name)
    diagnose(run, Wanted.of(names, words), Reporter(lambda _: None))
    found = {n: json.loads((run / f"diagnostics/{n}.json").read_text()) for n in names}
    noted = {n for n, content in found.items() if "note" in content["result"]}
    absent = {"data": "param_statistics", "param": "data_statistics", "cold": "anchor_size"}
    absent["no_anchors"] = "anchor_size"
    assert noted == ({absent[name]} if name in absent else set())
    bound = found["boundary"]["result"]["params"]["bound"]
    assert (bound is None) == (name == "adam")


def test_lambda_by_scores_is_a_third_form(make_run: Callable[..., Path]) -> None:
    """The run's own row is itself: the diagnostic chooses the same factor as the run."""
    words = ["score.lam_relative=scores", "score.mode=two_pass", "score.step=adam"]
    run = make_run(*words, out="scores")
    diagnose(run, Wanted.of(["preservation"], []), Reporter(lambda _: None))
    rows = json.loads((run / "diagnostics/preservation.json").read_text())["result"]["rows"]
    (own,) = [r for r in rows if r["preservation"] == "cwsd" and r["lam_relative"] == "scores"]
    assert len(rows) == 12 and own["jaccard_params"] == own["jaccard_examples"] == 1.0
    summary = json.loads((run / "4_scores/summary.json").read_text())
    assert own["lam_effective"] == summary["lam_effective"]


def test_ranking() -> None:
    """Ties share the mean of their ranks; a sample holds the same places of every vector."""
    a, b = np.array([1.0, 2, 2, 5, 5, 5]), np.array([3.0, 1, 2, 6, 4, 4])
    ranks = [np.array([(x > v).sum() + ((x == v).sum() + 1) / 2 for x in v]) for v in (a, b)]
    assert spearman(a, b) == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])
    assert spearman(a, np.ones(6)) is None
    assert jaccard(np.array([1, 2, 3]), np.array([3, 4])) == pytest.approx(1 / 4)
    masks = [{"w": torch.tensor([0, 4]), "x": torch.tensor([1])}, {"w": torch.tensor([4, 5])}]
    assert mask_overlap(*masks) == pytest.approx(1 / 4)
    first = ParamVector({"w": torch.arange(6.0).view(2, 3), "x": torch.arange(6.0, 50)})
    for count in (3, 30, 80):
        (values, twice), places = sampled(
            [first, first.scaled(2.0)], count, np.random.default_rng(0)
        )
        assert len(values) == min(count, 50) == len(set(places.tolist()))
        assert (values == places).all() and (twice == 2 * values).all()
