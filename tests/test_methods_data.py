"""Methods that choose examples: each rule against a plain computation of it (docs/methods.md).

top_loss, davir, less, fishersft, spice: brute force in fp64 on tiny models, and whole runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Runner, small_run
from models import tiny_model, tiny_rows
from places import place
from torch import Tensor

from benchmarks import less as benchmark
from benchmarks.__main__ import parse
from dualsft.config import settings
from dualsft.config.methods import find
from dualsft.data.examples import Example, collate
from dualsft.engine.losses import plain_example_loss
from dualsft.engine.sketch import Sketch
from dualsft.errors import ConfigError, RunError
from dualsft.lab.methods import greedy
from dualsft.lab.methods.greedy import (
    factor,
    features,
    lazy_greedy,
    pooled,
    spice_greedy,
    spice_pairwise,
    spice_windows,
)
from dualsft.lab.methods.less import Less, attach, target_maps
from dualsft.lab.methods.per_example import DavIR, top
from dualsft.lab.methods.table import DavIROptions, LessOptions
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.runs.method import Job
from dualsft.system.progress import Reporter

DATA_ONLY = ("method.params=all", "select.data_budget=10", "warmup.min_steps=4")


def selected(run: Path) -> list[str]:
    return json.loads((run / "5_selection" / "ids.json").read_text())


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "5_selection" / "summary.json").read_text())


def stored_scores(run: Path) -> dict[str, float]:
    table = pq.read_table(run / "5_selection" / "baseline_scores.parquet").to_pydict()
    return dict(zip(table["id"], table["score"], strict=True))


@pytest.fixture
def job_of(make_run: Runner, corpus: Path, model_folder: Callable[[str], Path]) -> Any:
    """A job over a run whose corpus is split, and its D_train in source order."""

    def make(arch: str, *words: str) -> tuple[Job, list[Example]]:
        run = make_run(*words, arch=arch, until="split", out=f"split-{arch}")
        config = settings.load(None, [*small_run(model_folder(arch), corpus), *words])
        ctx = RunContext(config, RunDir(run), Reporter(lambda _: None))
        job = Job(ctx, "data", place(run))
        pool = sorted(job.roles["pool"] + job.roles["warm"], key=lambda e: e.index)
        return job, pool

    return make


def plain_loss(model: Any, example: Example) -> float:
    with torch.no_grad():
        return float(plain_example_loss(model, collate([example], 0)))


def ranks(values: Any) -> np.ndarray:
    return np.argsort(np.argsort(values))


def spearman(a: Any, b: Any) -> float:
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


# --- all of them ----------------------------------------------------------------------------------


PASSES = {"top_loss": (96, 0), "davir": (192, 2 * 96), "fishersft": (96, 0)}
PASSES |= {"spice": (0, 96), "less": (0, 4 * (12 + 12 + 96))}
"""(forward, backward) examples: D_train is 96 rows, of which 12 are D_warm; D_val has 12."""


@pytest.mark.parametrize("arch", ["gpt2", "qwen2"])
@pytest.mark.parametrize("name", PASSES)
def test_what_each_method_counts_and_what_its_seed_changes(
    make_run: Runner, name: str, arch: str
) -> None:
    """The contract of every method (test_methods.py) on two more architectures."""
    words = (*DATA_ONLY, f"method.data={name}", "select.data_budget=30")
    run = make_run(*words, arch=arch, until="selection")
    assert len(set(selected(run))) == 30
    took = json.loads((run / "5_selection/manifest.json").read_text())["facts"]["accounts"]["data"]
    assert (took["forward_examples"], took["backward_examples"]) == PASSES[name]
    if name != "fishersft":  # reads neither the split's chance nor a warmup
        other = make_run(*words, "seed=7", arch=arch, until="selection", out="other")
        assert selected(run) != selected(other)


# --- losses ---------------------------------------------------------------------------------------


def test_top_takes_the_first_of_equals_and_refuses_nan() -> None:
    pool = tiny_rows(5, 1)[::-1]
    assert top(np.array([1.0, 3.0, 3.0, 0.0, 3.0]), pool, 2).tolist() == [4, 2]
    with pytest.raises(RunError, match=pool[3].id):
        top(np.array([1.0, 3.0, 3.0, np.nan, 3.0]), pool, 2)


@pytest.mark.parametrize("at", ["warmup", "base"])
def test_top_loss_is_the_mean_response_loss(make_run: Runner, job_of: Any, at: str) -> None:
    run = make_run(*DATA_ONLY, "method.data=top_loss", f"method.top_loss.at={at}")
    job, pool = job_of("llama")
    assert (run / "2_warmup").is_dir() == (at == "warmup"), "no stage that nobody reads"
    model = job.ctx.load(run / "2_warmup/theta_bar") if at == "warmup" else job.ctx.theta_old()
    expected = {e.id: plain_loss(model, e) for e in pool}
    assert stored_scores(run) == pytest.approx(expected, rel=1e-5)
    assert set(selected(run)) == set(sorted(expected, key=lambda i: -expected[i])[:10])


def test_davirs_reference_is_plain_fine_tuning(make_run: Runner, job_of: Any) -> None:
    """The reference is the model of the run `sft`; the mask's learning-rate ratio plays no part."""
    words = (*DATA_ONLY, "method.lr_ratio=3.0", "method.data=davir")
    run = make_run(*words, until="selection", out="davir")
    plain = make_run(*DATA_ONLY[:1], "method.data=all", until="finetune", out="sft")
    job, pool = job_of("llama")
    models = job.ctx.theta_old(), job.ctx.load(plain / "6_finetune/model")
    base, reference = (np.array([plain_loss(m, e) for e in pool]) for m in models)
    expected = dict(zip([e.id for e in pool], (base - reference) / base, strict=True))
    assert stored_scores(run) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert set(selected(run)) == set(sorted(expected, key=lambda i: -expected[i])[:10])


def test_cross_fitted_references_never_score_what_they_saw(make_run: Runner, job_of: Any) -> None:
    job, pool = job_of("llama")
    folds = DavIR(find("data", "davir"), DavIROptions(cross_fit=True))._folds(job, pool)
    for fit, scored in folds:
        assert not set(fit) & set(scored) and len(fit) + len(scored) == len(pool)
    assert sorted(i for _, scored in folds for i in scored) == list(range(len(pool)))
    words = (*DATA_ONLY, "method.data=davir")
    runs = [
        make_run(*words, *more, until="selection", out=f"cross{len(more)}")
        for more in ((), ("method.davir.cross_fit=true",))
    ]
    own, crossed = (summary(run)["mean_loss_reference"] for run in runs)
    assert own < crossed  # what was seen has been learned better


# --- FisherSFT ------------------------------------------------------------------------------------


def random_factors(count: int = 40, rank: int = 3, width: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(count, 1, 1, generator=generator, dtype=torch.float64) + 0.2
    return scale * torch.randn(count, rank, width, generator=generator, dtype=torch.float64)


def log_det(factors: Tensor, level: float) -> float:
    """log det(λ I + Σ FᵀF), at once."""
    stacked = factors.reshape(-1, factors.shape[-1])
    eye = torch.eye(factors.shape[-1], dtype=torch.float64)
    return float(torch.linalg.slogdet(level * eye + stacked.T @ stacked)[1])


def naive_greedy(factors: Tensor, b: int, level: float) -> list[int]:
    chosen: list[int] = []
    for _ in range(b):
        left = [i for i in range(len(factors)) if i not in chosen]
        chosen.append(max(left, key=lambda i: log_det(factors[[*chosen, i]], level)))
    return chosen


@pytest.mark.parametrize("on_top", [1, 4, 64])
def test_lazy_greedy_is_naive_greedy(on_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "ON_TOP", on_top)
    monkeypatch.setattr(greedy, "REBUILD", 4)
    monkeypatch.setattr(greedy, "CHUNK", 7)
    factors = random_factors()
    chosen, gains = lazy_greedy(factors, 12, level=0.3)
    assert chosen.tolist() == naive_greedy(factors, 12, 0.3)
    total = log_det(factors[torch.from_numpy(chosen)], 0.3) - 7 * np.log(0.3)
    assert gains.sum() == pytest.approx(total, rel=1e-10)
    everything, _ = lazy_greedy(factors, len(factors), level=0.3)
    assert sorted(everything) == list(range(len(factors)))


@pytest.mark.parametrize("tokens", [2, 4, 6, 15])
def test_a_factor_is_the_best_of_its_rank(tokens: int) -> None:
    x = torch.randn(tokens, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = factor(x, 4)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s[4:] = 0.0
    assert f.shape == (4, 9)
    torch.testing.assert_close(f.T @ f, v.T @ torch.diag(s.square()) @ v)
    assert float(torch.linalg.vector_norm(pooled(x))) == pytest.approx(1.0)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_features_are_what_the_head_is_given(arch: str) -> None:
    """Padded in a batch, at the positions before each response token, after the final norm."""
    model, rows = tiny_model(arch), tiny_rows(5, 1)
    seen: list[Tensor] = []
    handle = model.lm_head.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        found = features(model, collate(rows, 0, "left"))
        for example in rows:
            model(input_ids=torch.tensor([example.input_ids]))
    handle.remove()
    assert len(seen) == len(rows)
    for example, got, inputs in zip(rows, found, seen, strict=True):
        at = [t - 1 for t, label in enumerate(example.labels) if label != -100 and t > 0]
        torch.testing.assert_close(got, inputs[0, at], rtol=1e-6, atol=1e-6)


def test_fishersft_through_a_run_is_naive_greedy_over_all_tokens(
    make_run: Runner, job_of: Any
) -> None:
    """No projection (32 features) and few tokens: the run's choice is the criterion's own."""
    words = ("method.data=fishersft", "method.fishersft.rank=40", "select.data_budget=6")
    run = make_run(*DATA_ONLY, *words, until="selection")
    job, pool = job_of("llama")
    model = job.ctx.theta_old()
    with torch.no_grad():
        x = [features(model, collate([e], 0))[0].double() for e in pool]
    padded = torch.stack([torch.nn.functional.pad(t, (0, 0, 0, 40 - len(t))) for t in x])
    level = float(padded.square().sum((1, 2)).mean()) / 32
    assert summary(run)["prior"] == pytest.approx(level, rel=1e-5)
    assert summary(run)["feature_energy_kept"] == pytest.approx(1.0, rel=1e-5)
    assert set(selected(run)) == {pool[i].id for i in naive_greedy(padded, 6, level)}


def test_fishersft_projects_and_says_what_it_keeps(make_run: Runner) -> None:
    words = ("method.data=fishersft", "method.fishersft.dim=8", "method.fishersft.rank=2")
    run = make_run(*DATA_ONLY, *words, until="selection", out="few")
    assert 0.2 < summary(run)["feature_energy_kept"] < 0.999
    mode = "method.fishersft.mode=pooled"
    other = make_run(*DATA_ONLY, *words, mode, until="selection", out="pooled")
    assert selected(run) != selected(other)


# --- SPICE ----------------------------------------------------------------------------------------


def random_rows(count: int = 30, dim: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64)


def direct_spice(rows: Tensor, b: int, alpha: float, conflict: float) -> tuple[list[int], float]:
    """Every gain by a determinant, every conflict by a cosine to the mean."""

    def f(chosen: list[int]) -> float:
        g = rows[chosen]
        return float(torch.linalg.slogdet(torch.eye(rows.shape[1]) + alpha * g.T @ g)[1])

    chosen: list[int] = []
    for _ in range(b):
        best, value = -1, -np.inf
        for i in set(range(len(rows))) - set(chosen):
            cosine = 0.0
            if chosen:
                mean = rows[chosen].mean(0)
                cosine = float(torch.cosine_similarity(rows[i], mean, dim=0))
            this = f([*chosen, i]) - f(chosen) - conflict * max(0.0, -cosine)
            if this > value:
                best, value = i, this
        chosen.append(best)
    return chosen, f(chosen)


@pytest.mark.parametrize(("alpha", "conflict"), [(1.0, 0.1), (0.2, 2.0), (3.0, 0.0)])
def test_rank_one_updates_are_the_direct_rule(alpha: float, conflict: float) -> None:
    rows = random_rows()
    chosen, gains = spice_greedy(rows, 15, alpha, conflict)
    expected, total = direct_spice(rows.double(), 15, alpha, conflict)
    assert chosen.tolist() == expected
    assert gains.sum() == pytest.approx(total, rel=1e-9)


def test_pairwise_counts_every_conflicting_pair() -> None:
    rows = random_rows(12)
    cosine = torch.nn.functional.normalize(rows) @ torch.nn.functional.normalize(rows).T
    utility, chosen = torch.log1p(rows.square().sum(1)), []
    for _ in range(6):
        value = utility - 0.3 * (-cosine[chosen]).clamp_min(0).sum(0)
        value[chosen] = -torch.inf
        chosen.append(int(value.argmax()))
    assert spice_pairwise(rows, 6, 1.0, 0.3).tolist() == chosen
    assert spice_pairwise(rows, 6, 1.0, 0.0).tolist() != chosen


def test_windows_keep_their_share_of_exactly_b() -> None:
    rows, walk = random_rows(50), np.random.default_rng(0).permutation(50)
    chosen = spice_windows(rows, walk, 13, 8, 1.0, 0.1)
    assert len(set(chosen)) == 13
    place = np.argsort(walk)[chosen] // 8
    assert set(np.bincount(place, minlength=7)) <= {0, 1, 2, 3}
    assert np.bincount(place).max() - np.bincount(place)[:6].min() <= 1
    small = 1e-3 * rows  # the released information hardly grows: what is kept is the largest
    first = walk[:8]
    expected = first[np.argsort(-small[first].square().sum(1).numpy())[:2]]
    assert set(spice_windows(small, walk, 13, 8, 1.0, 0.0)[:2]) == set(expected)


def test_spices_variants_and_normalisation_choose_differently(make_run: Runner) -> None:
    found = []
    for number, more in enumerate(
        [
            (),
            ("method.spice.normalize=false",),
            ("method.spice.variant=released_topk",),
            ("method.spice.variant=released_window", "method.spice.window=16"),
            ("method.spice.variant=dualsft_pairwise",),
        ]
    ):
        words = (*DATA_ONLY, "method.data=spice", *more)
        run = make_run(*words, until="selection", out=f"spice{number}")
        found.append(tuple(selected(run)))
        assert len(set(found[-1])) == 10
    assert len(set(found)) == len(found)


def test_spice_without_a_linear_candidate_is_refused(make_run: Runner) -> None:
    with pytest.raises(ConfigError, match="score.candidates"):
        make_run(*DATA_ONLY, "method.data=spice", "score.candidates=*norm*", until="selection")


def test_the_warmup_of_less_follows_the_learning_rate(make_run: Runner) -> None:
    """Its own rate decides only where it is given; the selection is repeated with another."""
    found = []
    for number, more in enumerate(
        [
            ("finetune.lr=1e-3",),
            ("finetune.lr=1e-1",),
            ("finetune.lr=1e-1", "method.less.lr=1e-3"),
        ]
    ):
        words = (*DATA_ONLY, "method.data=less", "method.less.rank=4", "method.less.dim=64", *more)
        run = make_run(*words, until="selection", out=f"less{number}")
        scores = pq.read_table(run / "5_selection/baseline_scores.parquet")["score"]
        found.append(tuple(scores.to_pylist()))
    assert found[0] == found[2] != found[1]


# --- LESS -----------------------------------------------------------------------------------------

FAST = LessOptions(rank=4, alpha=16.0, lr=5e-3, epochs=2, batch_size=4, dim=96)


def less_scores(job: Job, pool: list[Example], options: LessOptions) -> np.ndarray:
    choice = Less(find("data", "less"), options).choose(job, pool, 10)
    assert choice is not None and choice.scores is not None
    assert set(choice.positions) == set(np.argsort(-choice.scores)[:10])
    return choice.scores


def unit(rows: list[Tensor]) -> Tensor:
    stacked = torch.stack(rows)
    return stacked / torch.linalg.vector_norm(stacked, dim=1, keepdim=True)


def stored_features(
    job: Job, pool: list[Example], options: LessOptions
) -> tuple[np.ndarray, list[Any]]:
    """LESS by the book: every example alone by plain autograd, every feature kept."""
    model = job.ctx.theta_old()
    maps = attach(model, target_maps(model)[0], options, job.rng)
    checkpoints = Less(find("data", "less"), options)._warm_up(job, model, maps)
    sketch = Sketch(options.dim, job.ctx.config.seed, "less")
    weights = {name: m.get_parameter("weight") for name, m in maps.items()}

    def feature(example: Example, checkpoint: Any) -> Tensor:
        for p in weights.values():
            p.grad = None
            p.requires_grad_(True)
        plain_example_loss(model, collate([example], 0)).backward()
        total = torch.zeros(options.dim, dtype=torch.float64)
        for name, p in weights.items():
            assert p.grad is not None
            g = p.grad.clone()
            if checkpoint is not None:
                m, v = checkpoint.first[name], checkpoint.second[name]
                under = 0.999 * v + 0.001 * g**2
                root = (under + 1e-8).sqrt() if options.eps_inside else under.sqrt() + 1e-8
                g = (0.9 * m + 0.1 * g) / root
            left, right = sketch.signs(name, "out", g[:, 0]), sketch.signs(name, "in", g)
            total += (left.T @ g @ right).flatten().double()
        return total

    scores = np.zeros(len(pool))
    for c in checkpoints:
        c.load(maps)
        val = unit([feature(e, None) for e in job.roles["val"]])
        train = unit([feature(e, c) for e in pool])
        scores += c.weight * (train @ val.T).mean(1).numpy()
    return scores, checkpoints


@pytest.mark.parametrize("eps_inside", [True, False])
@pytest.mark.parametrize(("arch", "dtype"), [("gpt2", "float64"), ("llama", "float32")])
def test_streamed_scores_are_those_of_stored_features(
    job_of: Any, arch: str, dtype: str, eps_inside: bool
) -> None:
    options = replace(FAST, eps_inside=eps_inside)
    job, pool = job_of(arch, f"model.dtype={dtype}")
    expected, _ = stored_features(job, pool, options)
    scores = less_scores(job, pool, options)
    assert spearman(scores, expected) >= 0.99
    np.testing.assert_allclose(scores, expected, atol=1e-9 if dtype == "float64" else 1e-3)


def test_both_projections_rank_alike(job_of: Any) -> None:
    job, pool = job_of("llama")
    options = LessOptions(rank=4, lr=5e-3, epochs=1, batch_size=4, dim=4096)
    sides = less_scores(job, pool, options)
    dense = less_scores(job, pool, replace(options, projection="dense"))
    assert not np.array_equal(sides, dense) and spearman(sides, dense) > 0.8


def test_checkpoints_are_the_epochs_ends_weighted_by_their_rates(job_of: Any) -> None:
    job, _ = job_of("llama")
    model = job.ctx.theta_old()
    maps = attach(model, target_maps(model)[0], FAST, job.rng)
    for name, m in maps.items():  # at the start B is zero, so the adapter changes nothing
        assert bool((m.get_parameter("weight") == 0).all()) == (".lora_B." in name)
    first, second = Less(find("data", "less"), FAST)._warm_up(job, model, maps)
    assert first.weight + second.weight == pytest.approx(1.0)
    assert first.weight > second.weight > 0  # the rate decays
    for name in maps:
        assert not torch.equal(first.weights[name], second.weights[name])
        assert bool((second.second[name] >= 0).all()) and bool(second.second[name].any())
    assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("arch", "names"),
    [("llama", {"q_proj", "k_proj", "v_proj", "o_proj"}), ("gpt2", {"c_attn", "c_proj"})],
)
def test_the_adapter_is_on_the_attention(arch: str, names: set[str]) -> None:
    found, _ = target_maps(tiny_model(arch))
    assert {path.rpartition(".")[2] for path in found} == names
    assert all("attn" in path for path in found)


def test_blocks_without_attention_get_the_adapter_everywhere() -> None:
    model = tiny_model("llama")
    for block in model.model.layers:
        block.mixer = block.self_attn
        del block.self_attn
    found, where = target_maps(model)
    assert len(found) == 14 and "since no name" in where


@pytest.mark.parametrize("name", ["less", "spice", "fishersft"])
def test_half_precision(make_run: Runner, name: str) -> None:
    """The same choice as in fp32, but for what rounding decides."""
    words = (*DATA_ONLY, f"method.data={name}", "select.data_budget=40")
    wide, half = (
        set(selected(make_run(*words, f"model.dtype={dtype}", until="selection", out=dtype)))
        for dtype in ("float32", "bfloat16")
    )
    assert len(wide) == len(half) == 40
    assert len(wide & half) >= 28  # 17 of 96 by chance


@pytest.mark.slow
def test_the_benchmark_compares_scores_that_agree() -> None:
    options = parse(["--quick", "--device", "cpu"])[0]
    section = benchmark.run(options)
    error = section.rows[benchmark.OURS]["figures"]["largest difference"]
    assert error <= benchmark.TOLERANCE[torch.float32]
    assert benchmark.BERGSON in {*section.rows, *section.skipped}


def test_d_warm_can_be_left_out(make_run: Runner) -> None:
    words = (*DATA_ONLY, "method.data=less", "method.less.dim=64", "method.less.epochs=1")
    whole = make_run(*words, until="selection", out="whole")
    less = make_run(*words, "method.less.exclude_warmup=true", until="selection", out="less")
    assert (len(stored_scores(whole)), len(stored_scores(less))) == (96, 84)
