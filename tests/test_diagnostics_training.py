"""Fidelity, Hessian, drift and reverse selection against the oracle, on a tiny float64 run."""

from __future__ import annotations

import copy
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import oracle
import pytest
import torch
from conftest import Runner, small_run
from oracle_run import load_run, recompute
from test_diagnostics_scores import stage_hashes
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from dualsft.config import settings
from dualsft.data.examples import Example, training_order
from dualsft.errors import ConfigError, RunError
from dualsft.lab.diagnostics import Wanted, registry
from dualsft.lab.diagnostics import fidelity as fidelity_module
from dualsft.lab.diagnostics import hessian as hessian_module
from dualsft.lab.diagnostics import job as job_module
from dualsft.lab.diagnostics.job import DiagnosticJob, diagnose
from dualsft.lab.diagnostics.ranking import (
    Bootstrap,
    pair_agreement,
    sample,
    spearman,
    stratified_mask,
    top_overlap,
)
from dualsft.lab.diagnostics.retraining import Sides, choose_probes
from dualsft.lab.plots import panels, short_names, signed_axis
from dualsft.runs import pipeline
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter
from dualsft.system.signals import Interrupted
from dualsft.train.loop import train

CLOSE = 1e-5  # transformers' norms compute in float32: two correct ways differ by 1e-7 or so
SMALL = {
    "fidelity": ["subsets=3", "masks=3", "subset_size=6", "horizons=1,3", "bootstrap=50"],
    "hessian": ["slice_size=9", "pool_rows=10", "val_rows=5", "layers=0,1"],
    "drift": ["points=2", "probes=6"],
    "reverse": ["steps=null", "draws=2"],
}


@pytest.fixture(scope="module")
def run(
    corpus: Path, model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """One finished run, read by every test."""
    out = tmp_path_factory.mktemp("diagnosed") / "run"
    words = [*small_run(model_folder("llama"), corpus), "model.dtype=float64"]
    config = settings.load(None, [*words, f"evaluation.files=other:{corpus}", "evaluation.limit=9"])
    pipeline.run(config, out, None, Reporter(lambda _: None))
    before = stage_hashes(out)
    yield out
    assert stage_hashes(out) == before, "a diagnostic changed a stage"


def asked(name: str, *words: str) -> Wanted:
    return Wanted.of([name], [f"diagnose.{name}.{word}" for word in (*SMALL[name], *words)])


def results(run: Path, name: str, *words: str) -> dict[str, Any]:
    diagnose(run, asked(name, *words), Reporter(lambda _: None))
    return json.loads((run / "diagnostics" / f"{name}.json").read_text())["result"]


def job_of(run: Path, name: str, *words: str) -> DiagnosticJob:
    config = settings.load_yaml(run / "config.yaml")
    ctx = RunContext(config, RunDir(run), Reporter(lambda _: None))
    options = registry()[name].options(**asked(name, *words).options[name])
    return DiagnosticJob(ctx, options)


class Truth:
    """The run's two models and vectors by the oracle."""

    def __init__(self, run: Path) -> None:
        self.run = load_run(run)
        base = self.run.config["model"]["path"]
        self.models = {"init": load(base), "warmup": load(run / "2_warmup/theta_bar")}
        stored, order = self.run.vectors["grad_sum"], self.models["init"].named_parameters()
        self.names = [name for name, _ in order if name in stored]
        self.curvature = self.run.vectors["curvature"]
        self.score, self.lr = self.run.config["score"], self.run.config["finetune"]["lr"]
        self.at: dict[str, dict[str, oracle.Vector]] = {}
        for name, model in self.models.items():
            found = recompute(self.run, self.models["init"], model, self.names)
            if name == "init":
                found["prior_grad"] = oracle.scale(found["prior_grad"], 0.0)
            self.at[name] = found

    def u(self, where: str, eta: float, curvature: Any, lam: float, *more: Any) -> oracle.Vector:
        """Eq. (u): `more` is whether λ is relative, the scale of the curvature, the step."""
        at, relative = self.at[where], more[0] if more else False
        terms = at["val_grad"], at["prior_grad"], at["grad_sum"], curvature
        return oracle.projection(*terms, lam, relative, eta, *more[1:])

    def gradient(self, model: Any, example: Any) -> oracle.Vector:
        return oracle.example_gradient(model, example.input_ids, example.labels, self.names)

    def losses(self, model: Any, rows: Sequence[Any]) -> np.ndarray:
        with torch.no_grad():
            return np.array(
                [float(oracle.example_loss(model, e.input_ids, e.labels)) for e in rows]
            )

    def prior(self, model: Any, anchors: Sequence[Any]) -> float:
        with torch.no_grad():
            found = oracle.cwsd_loss(self.models["init"], model, anchors, self.score["tau"])
        return float(found)


def load(path: str | Path, attention: str | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation=attention
    )
    return model.eval()


@pytest.fixture(scope="module")
def truth(run: Path) -> Truth:
    return Truth(run)


# ---------------------------------------------------------------- agreement


def test_pair_agreement_counts_pairs_and_ties_half() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 12).astype(float), rng.normal(size=12)
    score, total = 0.0, 0
    for i in range(12):
        for j in range(i):
            total += 1
            product = (x[i] - x[j]) * (y[i] - y[j])
            score += 1.0 if product > 0 else 0.5 if product == 0 else 0.0
    assert pair_agreement(x, y) == pytest.approx(100 * score / total)
    assert pair_agreement(y, y) == 100.0 and pair_agreement(y, -y) == 0.0


def test_bootstrap_ranks_each_resample_as_if_written_out() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=8), rng.normal(size=8)
    draws = Bootstrap.of(8, 20, rng)
    assert (draws.weights.sum(1) == 8).all()
    rhos, pairs = draws.spearman(x, y), draws.pairs(x, y)
    for weights, rho, pair in zip(draws.weights, rhos, pairs, strict=True):
        rows = np.repeat(np.arange(8), weights.astype(int))
        assert rho == pytest.approx(spearman(x[rows], y[rows]), abs=1e-12)
        found = [
            np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) / 2 + 0.5
            for at, i in enumerate(rows)
            for j in rows[:at]
            if i != j
        ]
        assert pair == pytest.approx(100 * np.mean(found))


def test_what_cannot_be_ranked_is_none() -> None:
    flat = np.ones(5)
    assert np.isnan(Bootstrap(np.ones((1, 5))).spearman(flat, np.arange(5.0))).all()
    assert pair_agreement(np.ones(1), np.ones(1)) is None
    assert top_overlap(np.arange(40.0), np.arange(40.0)[::-1].copy(), 0.05) == 0.0
    assert top_overlap(np.arange(40.0), np.arange(40.0), 0.05) == 100.0


# ---------------------------------------------------------------- masks and slices


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("k", [1, 17, 60, 111])
def test_stratified_mask_has_k_entries_in_their_blocks(varied: bool, k: int) -> None:
    sizes = {"a": 60, "b": 1, "c": 50}
    mask = stratified_mask(np.random.default_rng(k), sizes, k, varied)
    assert sum(len(index) for index in mask.values()) == k
    for name, size in sizes.items():
        index = mask.get(name, torch.empty(0))
        assert len(index.unique()) == len(index)
        assert not len(index) or (index.min() >= 0 and index.max() < size)
        if not varied:
            assert abs(len(index) - k * size / 111) < 1
    again = stratified_mask(np.random.default_rng(k), sizes, k, varied)
    assert mask.keys() == again.keys()
    assert all(torch.equal(mask[name], again[name]) for name in mask)


def test_slice_takes_a_third_of_each_third() -> None:
    scores = torch.randn(300, generator=torch.Generator().manual_seed(0))
    chosen = hessian_module.stratified_slice(np.random.default_rng(0), scores, 30)
    ranks = scores.argsort().argsort()[chosen]
    assert len(chosen.unique()) == 30
    assert [int(((ranks // 100) == third).sum()) for third in range(3)] == [10, 10, 10]


# ---------------------------------------------------------------- fidelity


def trained(truth: Truth, start: Any, rows: Sequence[Any], steps: int, masks: Any) -> Any:
    """K steps of AdamW at a constant rate by the oracle, in the run's own order of examples."""
    size, clip = truth.run.config["finetune"]["batch_size"], 1.0
    per_epoch = -(-len(rows) // size)
    batches: list[list[Any]] = []
    for epoch in range(-(-steps // per_epoch)):
        order = training_order(rows, truth.run.config["seed"], epoch)
        batches += [[rows[i] for i in order[n : n + size]] for n in range(0, len(rows), size)]
    assert all(len(batch) == size for batch in batches[:steps])  # the oracle cuts evenly
    flat = [example for batch in batches[:steps] for example in batch]
    weights, _, _ = oracle.restricted_adamw(
        start, flat, [truth.lr] * steps, size, masks, max_grad_norm=clip
    )
    model = copy.deepcopy(start)
    model.load_state_dict(weights, strict=False)
    return model


@pytest.mark.slow
def test_fidelity_predicts_and_measures_as_the_oracle(run: Path, truth: Truth) -> None:
    words = ("subset_size=8",)
    result, job = results(run, "fidelity", *words), job_of(run, "fidelity", *words)
    pool, val, anchors = (job.roles[role] for role in ("pool", "val", "anchor"))
    for name, start in truth.models.items():
        at = truth.at[name]
        base = truth.losses(start, val), truth.prior(start, anchors)
        assert result["sets"][f"{name}/start"]["new"] == pytest.approx(base[0].mean(), rel=CLOSE)
        eta = truth.lr / len(pool)
        curvatures = {"first": None, "diagonal": truth.curvature}
        u = {order: truth.u(name, eta, c, truth.score["lam"]) for order, c in curvatures.items()}
        guesses, queries, drops = [], [], []
        gains: dict[str, list[list[float]]] = {"new": [], "prior": []}
        for number in range(3):
            rng = job.rng(f"fidelity data {number}")
            rows = [pool[i] for i in rng.choice(len(pool), 8, replace=False)]
            total = oracle.grad_sum(start, rows, truth.names)
            guesses.append({order: oracle.dot(v, total) for order, v in u.items()})
            queries.append([oracle.dot(total, truth.gradient(start, e)) for e in val])
            masks = {n: torch.ones_like(at["grad_sum"][n], dtype=torch.bool) for n in truth.names}
            after = {k: trained(truth, start, rows, k, masks) for k in (1, 3)}
            found = {k: truth.losses(model, val) for k, model in after.items()}
            drops.append({k: base[0] - v for k, v in found.items()})
            gains["new"].append([float(d.mean()) for d in drops[-1].values()])
            gains["prior"].append([base[1] - truth.prior(m, anchors) for m in after.values()])
        stored = result["sets"][f"{name}/data"]
        for order in u:
            got = np.array(stored["predicted"][f"{order}/absolute/sgd"]) * eta
            assert got == pytest.approx([g[order] for g in guesses], rel=CLOSE)
        for at_, _ in enumerate((1, 3)):
            new, prior = ([g[at_] for g in gains[key]] for key in ("new", "prior"))
            assert stored["gain_new"][at_] == pytest.approx(new, rel=1e-4)
            assert stored["gain_prior"][at_] == pytest.approx(prior, rel=1e-3)
        ranks = [
            spearman(np.array(queries)[:, z], np.array([d[1][z] for d in drops]))
            for z in range(len(val))
        ]
        told = [r for r in result["lds"] if (r["checkpoint"], r["step"]) == (name, "sgd")]
        assert told[0]["K"] == 1 and told[0]["queries"] == len(val)
        assert told[0]["lds"] == pytest.approx(np.mean([r for r in ranks if r is not None]))


@pytest.mark.slow
def test_fidelity_masks_train_only_their_entries(run: Path, truth: Truth) -> None:
    result, job = results(run, "fidelity"), job_of(run, "fidelity")
    pool, val = job.roles["pool"], job.roles["val"]
    sizes = {n: truth.at["warmup"]["grad_sum"][n].numel() for n in truth.names}
    k = int(truth.run.config["select"]["param_budget"] * sum(sizes.values()))
    at, start = truth.at["warmup"], truth.models["warmup"]
    base, found, guesses = truth.losses(start, val).mean(), [], []
    for number in range(3):
        rng = job.rng(f"fidelity param {number}")
        mask = stratified_mask(rng, sizes, k, False)
        dense = {n: torch.zeros(sizes[n], dtype=torch.bool) for n in truth.names}
        for name, index in mask.items():
            dense[name][index] = True
        shaped = {n: dense[n].view_as(at["grad_sum"][n]) for n in truth.names}
        guesses.append(
            sum(float((at["projection"][n] * at["grad_sum"][n])[shaped[n]].sum()) for n in shaped)
        )
        model = trained(truth, start, pool, 3, shaped)
        found.append(float(base - truth.losses(model, val).mean()))
    stored = result["sets"]["warmup/param"]
    assert stored["gain_new"][1] == pytest.approx(found, rel=1e-4)
    got = np.array(stored["predicted"]["diagonal/absolute/sgd"]) * truth.lr / len(pool)
    assert got == pytest.approx(guesses, rel=CLOSE)
    (row,) = (
        r
        for r in result["rows"]
        if r["paper_row"] == "Warmup + Diag-Second-Order"
        and (r["side"], r["objective"], r["K"]) == ("param", "new", 3)
    )
    assert row["rho"] == pytest.approx(spearman(np.array(guesses), np.array(found)))
    assert row["pair"] == pytest.approx(pair_agreement(np.array(guesses), np.array(found)))


def test_every_form_of_u_is_the_oracles(run: Path, truth: Truth) -> None:
    job = job_of(run, "fidelity")
    scoring = job.scoring
    at, eta = truth.at["warmup"], truth.lr / len(job.roles["pool"])
    curvature = job.ctx.curvature(scoring.engine.candidates)
    scored, score = scoring.scored, job.ctx.config.score
    forms, lams = fidelity_module.forms_of_u(
        scored.terms, scored.prior_grad, curvature, scored.grad_sum, score, [0.5], 0.0
    )
    assert {f.order for f in forms} == {"first", "diagonal", "diagonal 0.5"}
    assert len(forms) == 3 * 3 * 2
    for form, ours in forms.items():
        lam = 0.0 if form.lam == "none" else truth.score["lam"]
        factor = {"first": 0.0, "diagonal": 1.0}.get(form.order)
        if factor is None:  # the second-order term is half as large as the first
            v = oracle.add([at["val_grad"], oracle.scale(at["prior_grad"], lams[form.lam])])
            second = {n: eta / 2 * truth.curvature[n] * at["grad_sum"][n] for n in truth.names}
            factor = 0.5 * oracle.norm(v) / oracle.norm(second)
        relative = form.lam == "relative"
        true = truth.u("warmup", eta, truth.curvature, lam, relative, factor, form.step)
        got = {name: ours[name] * eta for name in truth.names}
        apart = oracle.norm(oracle.add([got, oracle.scale(true, -1.0)]))
        assert apart <= CLOSE * oracle.norm(true), form


@pytest.mark.parametrize(("lr", "harm"), [("1e-4", False), ("1e4", True)])
def test_steps_that_do_harm_are_told(run: Path, lr: str, harm: bool) -> None:
    said: list[str] = []
    diagnose(run, asked("fidelity", f"lr={lr}", "horizons=3"), Reporter(said.append))
    told = [line for line in said if "diagnose.fidelity.lr lower" in line]
    sets = json.loads((run / "diagnostics/fidelity.json").read_text())["result"]["sets"]
    worse = [k for k in sets if "gain_new" in sets[k] and np.mean(sets[k]["gain_new"][0]) < 0]
    assert len(told) == len(worse) and bool(worse) is harm


# ---------------------------------------------------------------- diagonal against full Hessian


@pytest.mark.parametrize(
    "words", [["score.lam_relative=true"], ["score.lam_relative=scores", "score.mode=two_pass"]]
)
def test_both_checkpoints_are_judged_by_one_objective(words: list[str], make_run: Runner) -> None:
    """With a relative λ, whose factor only θ̄ has: v_prior is zero at θ_old."""
    run = make_run(*words, "score.curvature_scale=3", out="relative")
    small = ("subsets=3", "masks=3", "horizons=2", "subset_size=8", "bootstrap=5")
    result = results(run, "fidelity", *small)
    own = json.loads((run / "4_scores/summary.json").read_text())["lam_effective"]
    papers = {r["paper_row"]: r for r in result["rows"] if r["paper_row"]}
    assert {name.split(" + ")[0] for name in papers} == {"Init", "Warmup"}
    assert {r["lam_effective"] for r in papers.values()} == {own}
    assert any(r["order"] == "diagonal times 3" for r in result["rows"])


def objective(
    truth: Truth, model: Any, job: DiagnosticJob
) -> Callable[[dict[str, Tensor]], Tensor]:
    """L_val over the diagnostic's own rows as a function of the weights."""
    roles, options = job.roles, job.options
    val = sample(job.rng("hessian validation"), roles["val"], options.val_rows)
    anchors = sample(job.rng("hessian anchors"), roles["anchor"], options.val_rows)
    lam = job.scoring.scored.terms.lam_effective

    class Called:
        """A model whose weights are given."""

        def __init__(self, weights: dict[str, Tensor]) -> None:
            self.weights = weights

        def eval(self) -> None:
            model.eval()

        def __call__(self, **given: Tensor) -> Any:
            return functional_call(model, self.weights, (), given)

    def value(weights: dict[str, Tensor]) -> Tensor:
        student = Called(weights)
        new = torch.stack([oracle.example_loss(student, e.input_ids, e.labels) for e in val])
        prior = oracle.cwsd_loss(truth.models["init"], student, anchors, truth.score["tau"])
        return new.mean() + lam * prior

    return value


def at_slices(job: DiagnosticJob, name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """The diagnostic at a checkpoint, and the gradients of its examples at the slices."""
    at = hessian_module._Checkpoint(job, name, hessian_module.choose_slices(job))
    return at, at.gradients(at.model, at.pool, "gradients")


@pytest.mark.parametrize("name", ["init", "warmup"])
def test_hessian_products_are_those_of_the_whole_matrix(run: Path, truth: Truth, name: str) -> None:
    job = job_of(run, "hessian")
    at, each = at_slices(job, name)
    slices = at.slices
    assert {s.module for s in slices} == {"self_attn.o_proj", "mlp.down_proj"} and len(slices) == 4
    base = truth.run.config["model"]["path"]
    model = load(base if name == "init" else run / "2_warmup/theta_bar", "eager")
    total = oracle.grad_sum(model, at.pool, truth.names)
    sums = at.second_order(each, ParamVector(total))
    value = objective(truth, model, job)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for one in slices[:2]:
        key, index = one.parameter, one.coordinates
        for row, example in zip(each[key], at.pool, strict=True):
            true = oracle.example_gradient(model, example.input_ids, example.labels, [key])[key]
            assert row == pytest.approx(true.reshape(-1)[index].numpy(), rel=CLOSE, abs=1e-9)

        def at_slice(entries: Tensor, key: str = key, index: Tensor = index) -> Tensor:
            block = weights[key].reshape(-1).index_put((index,), entries).view_as(weights[key])
            return value({**weights, key: block})

        here = weights[key].reshape(-1)[index]
        matrix: Any = torch.autograd.functional.hessian(at_slice, here)
        first = torch.autograd.functional.jacobian(at_slice, here)
        own = total[key].reshape(-1)[index]
        size = float((matrix @ own).abs().max())
        gradient, in_slice, _ = sums[key]
        assert gradient == pytest.approx(first.numpy(), rel=1e-4, abs=1e-6)
        assert in_slice == pytest.approx((matrix @ own).numpy(), rel=1e-3, abs=1e-4 * size)
    # H G by a difference of gradients along G
    step = 1e-4 / oracle.norm(total)
    ends = []
    for sign in (1.0, -1.0):
        moved = {
            n: (w + sign * step * total[n] if n in total else w).requires_grad_()
            for n, w in weights.items()
        }
        keys = [s.parameter for s in slices]
        found = torch.autograd.grad(value(moved), [moved[k] for k in keys])
        ends.append(dict(zip(keys, found, strict=True)))
    for one in slices:
        key = one.parameter
        true = ((ends[0][key] - ends[1][key]) / (2 * step)).reshape(-1)[one.coordinates].numpy()
        size = float(np.abs(true).max())
        assert sums[key][2] == pytest.approx(true, rel=1e-2, abs=1e-2 * size)


def test_hessian_products_in_smaller_batches(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lack of memory, however late in a batch, changes nothing but the batches."""
    at, each = at_slices(job_of(run, "hessian"), "warmup")
    total = ParamVector({n: torch.ones_like(p) for n, p in at.engine.candidates.items()})
    plain = at.second_order(each, total)
    sizes: list[int] = []
    collate, products = RunContext.collate, at.products

    def counted(ctx: RunContext, rows: list[Example]) -> Any:
        sizes.append(len(rows))
        return collate(ctx, rows)

    def short(*given: Any) -> Any:
        found = products(*given)
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(RunContext, "collate", counted)
    monkeypatch.setattr(at, "products", short)
    again = at.second_order(each, total)
    assert max(sizes) > 2 and 0 < sizes[-1] <= 2
    for name, parts in plain.items():
        for values, other in zip(parts, again[name], strict=True):
            size = float(np.abs(values).max())  # the run is in fp32
            assert other == pytest.approx(values, rel=1e-4, abs=1e-5 * size)


def test_hessian_scores_are_the_papers(run: Path) -> None:
    rng = np.random.default_rng(0)
    v, full, each = rng.normal(size=7), rng.normal(size=7), rng.normal(size=(9, 7))
    c, eta = rng.random(7), 0.3
    told = hessian_module.compared(v, full, c, each, eta)
    g = each.sum(0)
    u = eta * v - eta**2 / 2 * full, eta * v - eta**2 / 2 * c * g
    data = [np.array([sum(u_[d] * row[d] for d in range(7)) for row in each]) for u_ in u]
    assert told["data"]["rho"] == pytest.approx(spearman(*data))
    assert told["data"]["pair"] == pytest.approx(pair_agreement(*data))
    assert told["data"]["top"] == (100.0 if data[0].argmax() == data[1].argmax() else 0.0)
    entries = [u_ * g for u_ in u]
    assert told["param"]["rho"] == pytest.approx(spearman(*entries))
    assert told["second"]["rho"] == pytest.approx(spearman(full, c * g))
    share = eta / 2 * np.linalg.norm(c * g) / np.linalg.norm(v)
    assert told["second"]["share_diag"] == pytest.approx(share)
    result = results(run, "hessian")
    assert len(result["rows"]) == 2 * 2 * 4  # checkpoints, references, slices
    means, rows = (
        [r for r in result[key] if (r["checkpoint"], r["reference"]) == ("warmup", "slice")]
        for key in ("means", "rows")
    )
    (whole,) = (m for m in means if m["region"] == "all")
    mine = [r["second"]["cosine"] for r in rows]
    assert whole["slices"] == 4 and whole["second"]["cosine"] == pytest.approx(np.mean(mine))


@pytest.mark.parametrize("kind", ["l2", "fisher"])
def test_hessian_of_quadratic_preservation(make_run: Runner, kind: str) -> None:
    run = make_run("model.dtype=float64", f"score.preservation={kind}", until="selection")
    truth = Truth(run)
    total = truth.at["warmup"]["grad_sum"]
    at, each = at_slices(job_of(run, "hessian", "val_rows=1000"), "warmup")
    got = at.second_order(each, ParamVector(total))
    at.preservation = "none"
    plain = at.second_order(each, ParamVector(total))
    prior = truth.at["warmup"]["prior_grad"]
    moved = oracle.l2_gradient(truth.models["init"], truth.models["warmup"], truth.names)
    for one in at.slices:
        key, index = one.parameter, one.coordinates
        true = [v[key].reshape(-1)[index].numpy() for v in (prior, moved, total)]
        curved = true[0] / true[1]  # ones, or the Fisher diagonal
        lam = truth.score["lam"]
        wanted = [true[0], curved * each[key].sum(0), curved * true[2]]
        for ours, without, more in zip(got[key], plain[key], wanted, strict=True):
            size = np.abs(ours).max()
            assert ours - without == pytest.approx(lam * more, rel=1e-3, abs=1e-9 * size)


@pytest.mark.parametrize(
    ("arch", "modules"),
    [("gpt2", {"attn.c_proj", "mlp.c_proj"}), ("qwen3", {"self_attn.o_proj", "mlp.down_proj"})],
)
def test_hessian_finds_the_last_matrices(arch: str, modules: set[str], make_run: Runner) -> None:
    run = make_run(arch=arch, out=arch, until="selection")
    assert {s.module for s in hessian_module.choose_slices(job_of(run, "hessian"))} == modules
    short = short_names(sorted(modules))
    assert len(set(short.values())) == 2
    assert short.get("attn.c_proj", "attn.c_proj") == "attn.c_proj"


def test_reverse_refuses_a_reversed_selection(make_run: Runner) -> None:
    """Its own sets are the bottom: they are not called the top."""
    words = ["method.data=dualsft_reversed", "finetune.epochs=1"]
    both = make_run(*words, "method.params=dualsft_reversed", out="both")
    with pytest.raises(RunError, match="neither the highest-scored examples nor entries"):
        results(both, "reverse", "steps=1", "draws=1")
    one = results(make_run(*words, out="one"), "reverse", "steps=1", "draws=1")
    assert {arm["data"] for arm in one["arms"]} == {"as run"}


def test_options_of_what_is_not_run_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"diagnose\.fidelity\.protocol: fidelity is not run"):
        Wanted.of(["heatmap"], ["diagnose.fidelity.protocol=paper"])


def test_ticks_stand_where_their_labels_say() -> None:
    figure, (axes,) = panels(1, 1)
    signed_axis(axes, "x", [-3.7e-5, 2.47e-5], 1.3e-6)
    labels = [float(t.get_text()) for t in axes.get_xticklabels()]
    assert labels == pytest.approx(list(axes.get_xticks())) and 0.0 in labels
    plt.close(figure)


def test_hessian_says_what_is_missing(run: Path, make_run: Runner) -> None:
    with pytest.raises(ConfigError, match=r"diagnose\.hessian\.modules.*self_attn\.o_proj"):
        results(run, "hessian", "modules=nothing")
    cold = results(make_run("warmup.epochs=0", out="cold", until="selection"), "hessian")
    assert {row["checkpoint"] for row in cold["rows"]} == {"warmup"}
    second = cold["rows"][0]["second"]
    assert second["norm_ratio"] == 0 and second["rho"] is None and second["share_full"] > 0


# ---------------------------------------------------------------- drift


def test_drift_follows_the_runs_own_fine_tuning_and_stays_under_its_bound(
    run: Path, truth: Truth
) -> None:
    result, job = results(run, "drift"), job_of(run, "drift")
    bar, star = truth.models["warmup"], load(run / "6_finetune/model")
    points = result["points"]
    assert [p["step"] for p in points] == [0, result["steps"] // 2, result["steps"]]

    def distance(model: Any) -> float:
        pairs = zip(model.parameters(), bar.parameters(), strict=True)
        return float(sum((a - b).detach().square().sum() for a, b in pairs) ** 0.5)

    assert points[0]["distance"] == pytest.approx(distance(truth.models["init"]), rel=1e-9)
    assert points[-1]["distance"] == pytest.approx(distance(star), rel=1e-9)
    probes = choose_probes(job)
    assert sum(e.id in (job.selected_ids or ()) for e in probes) == 3 and len(probes) == 6
    lam = job.scoring.scored.terms.lam_effective
    eta, scores = truth.lr / len(job.roles["pool"]), {}
    for name, model in (("bar", bar), ("star", star)):
        v = oracle.val_grad(model, job.roles["val"], truth.names)
        prior = oracle.cwsd_gradient(
            truth.models["init"], model, job.roles["anchor"], truth.score["tau"], truth.names
        )
        v = oracle.add([v, oracle.scale(prior, lam)])
        scores[name] = np.array([eta * oracle.dot(v, truth.gradient(model, e)) for e in probes])
    assert result["spread"]["scores"] == pytest.approx(scores["bar"], rel=1e-4, abs=1e-12)
    moved = np.abs(scores["star"] - scores["bar"])
    assert points[-1]["data"]["max_drift"] == pytest.approx(moved.max(), rel=1e-3)
    assert points[-1]["data"]["median_drift"] == pytest.approx(np.median(moved), rel=1e-3)
    assert points[-1]["data"]["rho"] == pytest.approx(spearman(scores["bar"], scores["star"]))
    c = result["constants"]["data"]
    for point in points:
        whole = eta * (c["B_v"] * c["L_g"] + c["B_g"] * c["L_v"]) * point["distance"]
        assert point["data"]["bound"] == pytest.approx(whole)
        for side in ("data", "param"):
            assert 0 < point[side]["max_drift"] <= point[side]["bound"]


# ---------------------------------------------------------------- reverse selection


def test_reverse_takes_the_bottom_and_dual_is_the_run_itself(run: Path, truth: Truth) -> None:
    job = job_of(run, "reverse")
    sides, at = Sides(job), truth.at["warmup"]
    pool = job.roles["pool"]
    scores = oracle.example_scores(truth.models["warmup"], pool, at["projection"])
    worst = {pool[int(i)].id for i in scores.argsort()[: sides.b]}
    assert {e.id for e in sides.examples("reverse", "0")} == worst
    flat = torch.cat([at["param_scores"][n].reshape(-1) for n in truth.names])
    assert sides.k is not None
    low = flat.sort().values[sides.k - 1]
    offset, chosen = 0, []
    entries = sides.entries("reverse", "0")
    assert entries is not None and sum(len(i) for i in entries.values()) == sides.k
    for n in truth.names:
        if n in entries:
            chosen.append(flat[offset + entries[n]])
        offset += at["param_scores"][n].numel()
    assert float(torch.cat(chosen).max()) <= float(low) + CLOSE * float(flat.abs().max())
    draws = [{e.id for e in sides.examples("random", n)} for n in "01"]
    assert all(len(one) == sides.b for one in draws) and draws[0] != draws[1]

    result = results(run, "reverse")
    own = json.loads((run / "7_evaluation/results.json").read_text())["files"]
    arms = {(arm["data"], arm["params"]): arm["files"] for arm in result["arms"]}
    assert len(arms) == 7 and "validation" in own
    for name, facts in own.items():
        assert arms["dual", "dual"][name]["loss"] == pytest.approx(facts["after"]["loss"])
        assert arms["dual", "dual"][name]["kl"] == pytest.approx(facts["after"]["kl_to_base"])
    random = arms["random", "random"]["validation"]
    assert len(random["losses"]) == 2 and random["loss"] == pytest.approx(np.mean(random["losses"]))
    contrast = {(c["arm"], c["control"]): c for c in result["contrasts"]}
    both = contrast["reverse/reverse", "random/random"]
    difference = arms["reverse", "reverse"]["validation"]["loss"] - random["loss"]
    assert both["difference"] == pytest.approx(difference)
    assert both["low"] <= both["difference"] <= both["high"]
    assert ("reverse/dual", "random/dual") in contrast and ("dual/dual", "random/dual") in contrast


def test_reverse_of_a_run_that_restricts_one_side(make_run: Runner) -> None:
    run = make_run("select.variant=data", "finetune.epochs=1")
    result = results(run, "reverse", "steps=2", "draws=1")
    assert [(a["data"], a["params"]) for a in result["arms"]] == [
        ("dual", "as run"),
        ("random", "as run"),
        ("reverse", "as run"),
    ]
    assert result["k"] is None
    assert [(c["arm"], c["control"]) for c in result["contrasts"]] == [
        ("dual/as run", "random/as run"),
        ("reverse/as run", "random/as run"),
    ]


def test_training_that_is_more_than_a_mask_is_refused(make_run: Runner) -> None:
    run = make_run("method.params=lift", "finetune.epochs=1", until="finetune")
    with pytest.raises(RunError, match="more than a fixed mask"):
        results(run, "reverse")


# ---------------------------------------------------------------- all of them


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fidelity", "drift", "reverse"])
def test_a_killed_diagnostic_goes_on_to_the_same_numbers(
    run: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = results(run, name)
    twin = tmp_path / "twin"
    shutil.copytree(run, twin)
    shutil.rmtree(twin / "diagnostics")
    left = {"fidelity": 8, "drift": 4, "reverse": 5}[name]
    calls = {"n": 0}
    owner: Any = sys.modules[train.__module__]._Loop if name == "drift" else job_module.Trials
    work = "fitting_step" if name == "drift" else "run"
    own = getattr(owner, work)

    def until_killed(*given: Any, **named: Any) -> Any:
        calls["n"] += 1
        if calls["n"] > left:
            raise Interrupted(signal.SIGTERM)
        return own(*given, **named)

    monkeypatch.setattr(owner, work, until_killed)
    with pytest.raises(Interrupted) as stopped:
        results(twin, name)
    assert stopped.value.saved
    done = calls["n"]
    calls["n"] = -1000
    assert results(twin, name) == whole
    total = {"fidelity": 12, "reverse": 10}.get(name)
    if total is not None:
        assert calls["n"] + 1000 == total - (done - 1)


@pytest.mark.parametrize(
    "word", ["horizons=a", "horizons=1.5", "horizons=0,5", "shares=x", "protocol=large"]
)
def test_wrong_options_are_named(run: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"diagnose\.fidelity\.{word.partition('=')[0]}"):
        results(run, "fidelity", word)


def test_protocols(run: Path) -> None:
    ctx, kind = job_of(run, "fidelity").ctx, registry()["fidelity"].options
    small = fidelity_module.Protocol.of(DiagnosticJob(ctx, kind()))
    paper = fidelity_module.Protocol.of(DiagnosticJob(ctx, kind(protocol="paper", masks=5)))
    assert (small.subsets, small.masks, small.horizons) == (24, 24, [10, 50, 200])
    assert (paper.subsets, paper.masks, paper.horizons) == (64, 5, [10, 50, 200, 500, 1000])
    assert small.val_rows == 256 and small.subset_size == 42  # half of the pool of 84
    assert any("half" in line for line in ctx.reporter.warnings)
