"""Methods that choose entries (docs/methods.md): oracles, budgets, moving masks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Runner
from faults import Killed, stopped_at
from models import ARCHITECTURES
from places import place
from safetensors.torch import load_file
from torch import Tensor, nn

from dualsft.config import settings
from dualsft.config.methods import registry
from dualsft.data.examples import Example, collate, training_order
from dualsft.engine.losses import last_hidden, plain_example_loss
from dualsft.errors import ConfigError
from dualsft.lab.methods.magnitudes import NanoAdam, smallest
from dualsft.lab.methods.matrices import (
    WeightMatrix,
    matrices,
    shares,
)
from dualsft.model.load import text_parameters
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.runs.method import Job, ParamChoice
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.runs.stages.selection import read_mask
from dualsft.system.progress import Reporter
from dualsft.train.loop import scheduled_rate
from dualsft.train.optimizer import SparseAdamW

OPTIONS = {
    "s2ft": [],
    "smt": ["method.smt.steps=3", "method.smt.block=12"],
    "lift": ["method.lift.rank=4", "method.lift.interval=3"],
    "nanoadam": ["method.nanoadam.interval=3", "method.nanoadam.chunk=700"],
    "model_shapley": [],
}
EXACT = ("lift", "nanoadam")
MOVING = ("lift", "nanoadam")


def choosing(name: str, *more: str) -> list[str]:
    return [f"method.params={name}", "method.data=random", *OPTIONS[name], *more]


JobMaker = Callable[..., tuple[Any, Job]]


@pytest.fixture
def make_job(make_run: Runner, tmp_path: Path) -> JobMaker:
    """A method and its job behind a real split; ten examples to train on."""

    def make(name: str, *more: str, arch: str = "llama", out: str = "job") -> tuple[Any, Job]:
        folder = make_run(*choosing(name, *more), arch=arch, out=out, until="split")
        config = settings.load(folder / "config.yaml")
        ctx = RunContext(config, RunDir(folder), Reporter(lambda _: None))
        part = tmp_path / f"{out}.part"
        part.mkdir(exist_ok=True)
        return ctx.methods.load("params"), Job(ctx, "params", place(part), ctx.roles()["pool"][:10])

    return make


def chosen(method: Any, job: Job, k: int) -> ParamChoice:
    choice = method.choose(job, k)
    assert choice is not None
    return choice


def count(indices: Mapping[str, Tensor]) -> int:
    return sum(index.numel() for index in indices.values())


def as_masks(indices: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    found = {}
    for name, index in indices.items():
        assert torch.equal(index, index.unique()), "sorted, each once"
        mask = torch.zeros(shapes[name].numel(), dtype=torch.bool)
        mask[index] = True
        found[name] = mask.view(shapes[name])
    return found


def summary(folder: Path, stage: str = "5_selection") -> dict[str, Any]:
    return json.loads((folder / stage / "summary.json").read_text())


def trained(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "6_finetune/model/model.safetensors")


# --- every method ------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", OPTIONS)
def test_chooses_on_every_architecture_and_by_the_seed_alone(
    make_job: JobMaker, name: str, arch: str
) -> None:
    method, job = make_job(name, arch=arch)
    k = 700
    first = chosen(method, job, k).indices
    assert 0 < count(first) <= k and (name not in EXACT or count(first) == k)
    assert set(first) <= set(method.eligible(job))
    # rounding depends on how a batch is cut, so methods that use gradients keep their batches
    more = [] if name in ("smt", "model_shapley") else ["score.batch_tokens=64"]
    method, job = make_job(name, *more, arch=arch, out="again")
    job.examples.reverse()
    again = chosen(method, job, k).indices
    assert first.keys() == again.keys()
    assert all(torch.equal(first[n], again[n]) for n in first)


@pytest.mark.parametrize("name", OPTIONS)
def test_paper_preset_is_literal(make_run: Runner, name: str) -> None:
    words = ["method.preset=paper", "method.data=random", f"method.params={name}"]
    words += ["method.smt.steps=2"] if name == "smt" else []
    folder = make_run(*words, until="finetune")
    facts = summary(folder)
    down, hidden, neurons = 2 * 40, 32, 2 * (32 + 16 + 16 + 32 + 40 + 40 + 32)
    expected = {
        # int(layers x channels x .03) columns of hidden entries
        "s2ft": {"k": int(down * 0.03) * hidden},
        # one block a matrix: a quarter of six, a tenth of six
        "smt": {"attention_blocks": 1, "blocks": 1},
        # (rows + columns) x 64 exceeds every one of these matrices: q, k, v, o whole
        "lift": {"k": 2 * (1024 + 512 + 512 + 1024)},
        "nanoadam": {"k": facts["budget_entries"]},
        "model_shapley": {"neurons": int(neurons * 0.1)},
    }[name]
    assert expected.items() <= facts.items()
    if name == "nanoadam":
        assert "budget" not in facts
    else:
        assert facts["budget"].startswith("literal: ") and facts["budget_entries"] is None
    entry = registry()["params"][name]
    ratios = {"s2ft": 5e-5, "smt": 4e-5, "lift": 4e-5, "nanoadam": 3e-5, "model_shapley": 2e-5}
    assert entry.lr_ratio == pytest.approx(ratios[name] / 2e-5)
    assert summary(folder, "6_finetune")["lr"] == pytest.approx(1e-3 * entry.lr_ratio)


# --- units and shares --------------------------------------------------------------------------


def test_shares_are_exact_and_in_proportion() -> None:
    assert shares([10, 10, 10], 4) == [2, 1, 1]
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(1, 1000, 7).tolist()
        k = int(rng.integers(0, sum(sizes) + 1))
        found = shares(sizes, k)
        assert sum(found) == k
        for share, size in zip(found, sizes, strict=True):
            assert abs(share - k * size / sum(sizes)) < 1 and share <= size


@pytest.mark.parametrize("transposed", [False, True])
def test_lines_of_a_matrix(transposed: bool) -> None:
    stored = torch.Size([3, 4])
    matrix = WeightMatrix("m", "down", stored, transposed)
    picked = torch.tensor([0, 2])
    plain = torch.zeros(4, 3) if transposed else torch.zeros(3, 4)  # [out, in]
    plain[:, picked] = 1.0
    mask = plain.T if transposed else plain
    assert matrix.lines("in", picked).tolist() == mask.reshape(-1).nonzero().view(-1).tolist()
    plain.zero_()[picked] = 1.0
    mask = plain.T if transposed else plain
    assert matrix.lines("out", picked).tolist() == mask.reshape(-1).nonzero().view(-1).tolist()


def test_roles_of_matrices(make_job: JobMaker) -> None:
    _, job = make_job("s2ft")
    roles = [m.role for m in matrices(job)]
    assert roles == ["q", "k", "v", "o", "gate", "up", "down"] * 2
    _, job = make_job("s2ft", arch="gpt2", out="gpt2")
    assert [(m.role, m.transposed) for m in matrices(job)] == [
        (role, True) for role in ("qkv", "o", "up", "down")
    ] * 2


# --- S2FT --------------------------------------------------------------------------------------


def test_s2ft_takes_whole_columns_over_all_layers(make_job: JobMaker) -> None:
    method, job = make_job("s2ft", "method.s2ft.d_ratio=0.3")
    masks = as_masks(chosen(method, job, 1).indices, method.eligible(job))
    assert all("down_proj" in name for name in masks) and len(masks) == 2
    columns = [mask.all(0) for mask in masks.values()]
    for mask, column in zip(masks.values(), columns, strict=True):
        assert torch.equal(mask, column.expand_as(mask)), "a column is whole or not at all"
    assert sum(int(c.sum()) for c in columns) == int(2 * 40 * 0.3)
    other, job = make_job("s2ft", "method.s2ft.d_ratio=0.3", "seed=7", out="other")
    again = as_masks(chosen(other, job, 1).indices, method.eligible(job))
    assert any(not torch.equal(masks[n], again[n]) for n in masks), "the seed draws"


def test_s2ft_heads_under_grouped_queries(make_job: JobMaker) -> None:
    """Four heads of queries, two of keys and values, eight wide, in two layers."""
    more = ("method.s2ft.v_ratio=0.5", "method.s2ft.o_ratio=0.25", "method.s2ft.u_ratio=0.1")
    method, job = make_job("s2ft", *more)
    choice = chosen(method, job, 3000)
    masks = as_masks(choice.indices, method.eligible(job))
    heads = {"v_proj": 0, "o_proj": 0}
    for name, mask in masks.items():
        if "v_proj" in name:
            whole = mask.view(2, 8 * 32).all(1)
            assert torch.equal(mask.view(2, -1), whole[:, None].expand(2, 8 * 32))
            heads["v_proj"] += int(whole.sum())
        if "o_proj" in name:
            whole = mask.view(32, 4, 8).all(2).all(0)
            assert torch.equal(mask.view(32, 4, 8), whole[None, :, None].expand(32, 4, 8))
            heads["o_proj"] += int(whole.sum())
        if "up_proj" in name:
            assert torch.equal(mask, mask.all(1)[:, None].expand_as(mask))
    assert heads == {"v_proj": 2, "o_proj": 2}
    assert choice.facts["up_units"] == 8
    spent = 2 * 8 * 32 + 2 * 8 * 32 + 8 * 32
    assert count(choice.indices) == spent + (3000 - spent) // 32 * 32
    with pytest.raises(ConfigError, match="u_ratio, o_ratio and v_ratio take"):
        method.choose(job, spent - 1)


def test_s2ft_refuses_fused_values_and_empty_budgets(make_job: JobMaker) -> None:
    method, job = make_job("s2ft", "method.s2ft.v_ratio=0.5", arch="gpt2")
    with pytest.raises(ConfigError, match="v_ratio.*no v projection"):
        method.choose(job, 1000)
    method, job = make_job("s2ft", out="small")
    with pytest.raises(ConfigError, match="not one channel fits"):
        method.choose(job, 31)
    method, job = make_job("s2ft", "score.candidates=*q_proj*", out="narrow")
    with pytest.raises(ConfigError, match="candidates of llama have none"):
        method.eligible(job)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("score", ["weight", "activation", "product"])
def test_s2ft_scores_by_brute_force(make_job: JobMaker, score: str, arch: str) -> None:
    more = ("model.dtype=float64", f"method.s2ft.score={score}", "score.batch_tokens=64")
    method, job = make_job("s2ft", *more, arch=arch)
    model = job.ctx.theta_old()
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    everything: list[Tensor] = []
    for m in (m for m in matrices(job) if m.role == "down"):
        weight = parameters[m.name].detach().T if m.transposed else parameters[m.name].detach()
        seen: list[Tensor] = []

        def look(_: Any, inputs: Any, seen: list[Tensor] = seen) -> None:
            seen.append(inputs[0][0])

        handle = modules[m.name.removesuffix(".weight")].register_forward_pre_hook(look)
        for example in job.examples:
            with torch.no_grad():
                last_hidden(model, collate([example], job.ctx.pad_id))
        handle.remove()
        activity = torch.cat(seen).norm(dim=0)
        norms = weight.norm(dim=0)
        everything.append(
            {"weight": norms, "activation": activity, "product": norms * activity}[score]
        )
    scores = torch.cat(everything)
    best = scores.argsort(descending=True)[: 640 // 32].sort().values
    masks = as_masks(chosen(method, job, 640).indices, method.eligible(job))
    dim = 1 if arch == "gpt2" else 0
    found = torch.cat([mask.all(dim) for mask in masks.values()]).nonzero().view(-1)
    assert torch.equal(found, best)
    smallest_end, job = make_job("s2ft", *more, "method.s2ft.end=smallest", arch=arch, out="end")
    masks = as_masks(chosen(smallest_end, job, 640).indices, method.eligible(job))
    found = torch.cat([mask.all(dim) for mask in masks.values()]).nonzero().view(-1)
    assert torch.equal(found, scores.argsort()[: 640 // 32].sort().values)


# --- SMT ---------------------------------------------------------------------------------------


def warm_start_by_hand(job: Job, steps: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """torch.optim.AdamW on every parameter; the summed, unclipped gradients."""
    ctx, rows = job.ctx, job.examples
    model: Any = ctx.theta_old()
    plan = replace(finetune_plan(ctx, 1), lr=2e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.0)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    per_epoch = math.ceil(len(rows) / plan.batch_size)
    model.train()
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        order = training_order(rows, plan.seed, epoch)
        batch = [rows[i] for i in order[within * plan.batch_size :][: plan.batch_size]]
        optimizer.param_groups[0]["lr"] = scheduled_rate(step, steps, plan.lr, plan.warmup_ratio)
        optimizer.zero_grad()
        loss = sum(plain_example_loss(model, collate([e], ctx.pad_id)) for e in batch) / len(batch)
        assert isinstance(loss, Tensor)
        loss.backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.max_grad_norm)
        optimizer.step()
    return model, sums


@pytest.mark.parametrize("strategy", ["mean_abs", "abs_mean", "l1", "l2"])
def test_smt_score_and_warm_start_by_brute_force(make_job: JobMaker, strategy: str) -> None:
    """Summed gradients of four dense steps, ragged blocks scored as full ones, each family within
    its share of the budget, and the weights it goes on from."""
    size, steps, k = 12, 4, 2000
    more = ("model.dtype=float64", f"method.smt.strategy={strategy}", f"method.smt.steps={steps}")
    method, job = make_job("smt", *more, "finetune.epochs=3", "method.smt.dense_lr=2e-3")
    choice = chosen(method, job, k)
    model, sums = warm_start_by_hand(job, steps)
    units: dict[bool, list[tuple[float, int, str, Tensor]]] = {True: [], False: []}
    number = 0
    members = [m for m in matrices(job) if m.role != "o"]
    for m in members:
        total, where = sums[m.name], torch.arange(m.shape.numel()).view(m.shape)
        for i in range(0, m.shape[0], size):
            for j in range(0, m.shape[1], size):
                block = total[i : i + size, j : j + size]
                share = block.numel() / size**2  # of a full block
                score = {
                    "mean_abs": block.mean().abs() * share**0.5,
                    "abs_mean": block.abs().mean(),
                    "l1": block.abs().sum() / share,
                    "l2": block.norm() / share**0.5,
                }[strategy]
                inside = where[i : i + size, j : j + size].reshape(-1)
                units[m.role in "qkv"].append((-score.item(), number, m.name, inside))
                number += 1
    expected: dict[str, list[Tensor]] = {name: [] for name in choice.indices}
    attention = sum(m.shape.numel() for m in members if m.role in "qkv")
    left = spent = 0
    for family in (True, False):
        left = k * attention // sum(m.shape.numel() for m in members) if family else k - spent
        for _, _, name, inside in sorted(units[family], key=lambda u: u[:2]):
            if len(inside) <= left:
                expected[name].append(inside)
                left, spent = left - len(inside), spent + len(inside)
    for name, parts in expected.items():
        want = torch.cat([*parts, torch.empty(0, dtype=torch.int64)]).sort().values
        assert torch.equal(choice.indices[name], want), name
    assert job.accounts.backward_examples == 10 + 4, "batches of 4, 4, 2, then 4"
    start = dict(job.ctx.load((job.part / "start").location).named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(start[name], p, rtol=1e-5, atol=1e-7)


def test_smt_restart_from_base_is_a_mask_on_theta_old(
    make_run: Runner, model_folder: Callable[[str], Path]
) -> None:
    folder = make_run(*choosing("smt", "method.smt.restart_from_base=true"), until="finetune")
    assert not (folder / "5_selection/start").exists()
    kept = make_run(*choosing("smt"), out="kept", until="finetune")
    indices = read_mask(folder / "5_selection")
    other = read_mask(kept / "5_selection")
    assert indices.keys() == other.keys()
    assert all(torch.equal(indices[n], other[n]) for n in indices), "the same blocks either way"
    before = load_file(model_folder("llama") / "model.safetensors")
    for name, after in trained(folder).items():
        moved = (after != before[name]).view(-1).nonzero().view(-1)
        assert set(moved.tolist()) <= set(indices.get(name, torch.empty(0)).tolist())
    assert (folder / "6_finetune/delta.safetensors").is_file()
    assert not (kept / "6_finetune/delta.safetensors").exists(), "everything moved: no sparse delta"


def test_smt_counts_its_dense_steps(make_run: Runner) -> None:
    """Dense and sparse steps together are what every other method has; at its own rate."""
    words = choosing("smt", "method.smt.steps=100", "finetune.epochs=3")
    run = make_run(*words, until="finetune")
    dense = json.loads((run / "5_selection/summary.json").read_text())["warm_steps"]
    sparse = json.loads((run / "6_finetune/summary.json").read_text())["steps"]
    plain = make_run("method.params=all", "finetune.epochs=3", out="plain", until="finetune")
    every = json.loads((plain / "6_finetune/summary.json").read_text())["steps"]
    assert dense == every // 2 < 100 and dense + sparse == every
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lr" in line]
    rates = {s: max(x["lr"] for x in steps if x["stage"] == s) for s in ("smt", "finetune")}
    assert rates["finetune"] == pytest.approx(2 * rates["smt"], rel=0.2), "entry.lr_ratio is 2"


def test_smt_ratios(make_job: JobMaker) -> None:
    """Shares of a family, and of all matrices of the model as the released code has it."""
    more = ("method.smt.attention_ratio=0.25", "method.smt.mlp_ratio=0.1", "method.smt.block=8")
    method, job = make_job("smt", *more)
    facts = chosen(method, job, 1).facts
    attention, mlp = 2 * (16 + 8 + 8), 2 * 3 * 20
    assert (facts["attention_blocks"], facts["blocks"] - facts["attention_blocks"]) == (
        int(0.25 * attention),
        int(0.1 * mlp),
    )
    method, job = make_job("smt", *more, "method.smt.ratio_of=model", out="model")
    facts = chosen(method, job, 1).facts
    every = sum(s.numel() for s in job.ctx.parameter_shapes.values() if len(s) == 2) / 64
    assert int(0.25 * every) > attention, "its quota exceeds the family"
    assert facts["attention_blocks"] == attention
    assert facts["blocks"] - attention == int(0.1 * every)
    method, job = make_job("smt", "method.smt.attention_ratio=0.25", out="only")
    assert all("_proj" in n and ".mlp." not in n for n in method.eligible(job))


# --- LIFT --------------------------------------------------------------------------------------


@pytest.mark.parametrize("svd", ["exact", "lowrank"])
def test_lift_takes_the_largest_of_the_reconstruction(make_job: JobMaker, svd: str) -> None:
    method, job = make_job("lift", "model.dtype=float64", f"method.lift.svd={svd}")
    parameters = dict(job.ctx.theta_old().named_parameters())
    k = 1000
    indices = chosen(method, job, k).indices
    sizes = [m.shape.numel() for m in matrices(job)]
    overlap = 0
    for m, quota in zip(matrices(job), shares(sizes, k), strict=True):
        u, s, v = torch.linalg.svd(parameters[m.name].detach(), full_matrices=False)
        low = ((u[:, :4] * s[:4]) @ v[:4]).abs().view(-1)
        best = low.topk(quota).indices.sort().values
        assert len(indices[m.name]) == quota
        overlap += len(set(best.tolist()) & set(indices[m.name].tolist()))
        if svd == "exact":
            assert torch.equal(indices[m.name], best)
            rest = torch.ones_like(low, dtype=torch.bool)
            rest[indices[m.name]] = False
            assert low[indices[m.name]].min() >= low[rest].max(), "the largest, not the smallest"
    assert overlap > 0.8 * k, "random matrices have no low rank, and yet it comes close"


def test_lift_tiles_and_quotas(make_job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    method, job = make_job("lift", "method.lift.lora_rank=3", "method.lift.freeze=gate,up,down")
    choice = chosen(method, job, 1)
    assert choice.literal and all("self_attn" in n for n in choice.indices)
    for m in (m for m in matrices(job) if m.role in "qkvo"):
        assert len(choice.indices[m.name]) == 3 * sum(m.shape)
    monkeypatch.setattr("dualsft.lab.methods.magnitudes.TILE", 70)
    tiled = chosen(method, job, 1).indices
    assert all(torch.equal(tiled[n], choice.indices[n]) for n in tiled)


def test_lift_refuses_to_freeze_a_part_of_a_fused_matrix(make_job: JobMaker) -> None:
    method, job = make_job("lift", "method.lift.freeze=q", arch="gpt2")
    with pytest.raises(ConfigError, match="holds q, k, v in one"):
        method.eligible(job)
    method, job = make_job("lift", "method.lift.freeze=q,k,v,o,gate,up,down", out="all")
    with pytest.raises(ConfigError, match="leaves no matrix"):
        method.eligible(job)


# --- NanoAdam ----------------------------------------------------------------------------------


def test_nanoadam_takes_the_smallest_of_each_chunk(make_job: JobMaker) -> None:
    method, job = make_job("nanoadam", "model.dtype=bfloat16")
    k = 900
    indices = chosen(method, job, k).indices
    chunks: list[tuple[str, int, Tensor]] = []
    for name, p in job.ctx.theta_old().named_parameters():
        if name in job.shapes():
            flat = p.detach().abs().view(-1).double()
            chunks += [(name, s, flat[s : s + 700]) for s in range(0, len(flat), 700)]
    quotas = shares([len(values) for _, _, values in chunks], k)
    for (name, start, values), quota in zip(chunks, quotas, strict=True):
        order = sorted(range(len(values)), key=lambda i: (values[i].item(), i))[:quota]
        index = indices[name]
        inside = index[(index >= start) & (index < start + len(values))] - start
        assert inside.tolist() == sorted(order), "ties go to the smaller index"


def test_smallest_breaks_ties_by_index() -> None:
    values = torch.tensor([2.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    assert smallest(values, 3).tolist() == [1, 2, 5]
    assert smallest(values, 4).tolist() == [1, 2, 3, 5]
    assert smallest(values, 0).tolist() == [] and smallest(values, 6).tolist() == [*range(6)]


@pytest.mark.parametrize("interval", [2, 3, 100])
def test_the_mask_moves_at_every_interval(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    """Six steps: at 0, m, 2m, and never when there are fewer steps; never after the last."""
    asked: list[int] = []
    plain = NanoAdam.refresh

    def spy(self: Any, job: Job, model: Any, k: int, step: int) -> Mapping[str, Tensor]:
        asked.append(step)
        found = plain(self, job, model, k, step)
        weights = dict(model.named_parameters())
        inside = torch.cat([weights[n].detach().view(-1)[i].abs() for n, i in found.items()])
        assert inside.max() < 0.1, "chosen from the present weights"
        return found

    monkeypatch.setattr(NanoAdam, "refresh", spy)
    said: list[str] = []
    more = (f"method.nanoadam.interval={interval}",)
    folder = make_run(*choosing("nanoadam", *more), until="finetune", said=said)
    assert asked == {2: [0, 2, 4], 3: [0, 3], 100: [0]}[interval]
    facts, tuned = summary(folder), summary(folder, "6_finetune")
    if interval == 100:
        assert any("never moves" in line for line in said)
        assert tuned["changed_entries"] <= facts["k"]
    else:
        assert not any("never moves" in line for line in said)
        assert tuned["changed_entries"] > facts["k"] == tuned["trained_entries"]
        assert any(f"{tuned['changed_entries']:,} in total" in line for line in said)


def test_set_indices_without_carry_keeps_masters_alone() -> None:
    p = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    optimizer = SparseAdamW([("p", p)], {"p": torch.tensor([0, 2, 4])}, lr=1e-4)
    (p * 3.0).sum().backward()
    optimizer.step()
    old = optimizer.masters["p"].clone()
    assert (old != 1).all() and (p == 1).all(), "only the master holds the step"
    for index, kept in (([2, 3, 4], [1, None, 2]), ([2, 3, 4], [1, None, 2])):
        optimizer.set_indices({"p": torch.tensor(index)}, carry=False)
        want = [1.0 if at is None else old[at].item() for at in kept]
        assert optimizer.masters["p"].tolist() == want
        state = optimizer.state[p]
        assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()


def test_nanoadam_moments_option_changes_the_result(make_run: Runner) -> None:
    weights = []
    for moments in ("carry", "reset"):
        more = (f"method.nanoadam.moments={moments}", "finetune.epochs=3")
        weights.append(
            trained(make_run(*choosing("nanoadam", *more), out=moments, until="finetune"))
        )
    assert any(not torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


# --- moving masks and kills --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "moments", "kills"),
    [
        ("float32", "float32", (3, 5)),
        pytest.param("bfloat16", "float32", (2, 3, 5, 6, 8), marks=pytest.mark.slow),
        pytest.param("bfloat16", "int8", (3, 4, 7), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", MOVING)
def test_a_killed_run_with_a_moving_mask_resumes_to_the_same_bits(
    make_run: Runner, name: str, dtype: str, moments: str, kills: tuple[int, ...]
) -> None:
    """Nine steps, masks at 0, 3 and 6; killed before, at and behind a move."""
    more = (f"model.dtype={dtype}", "finetune.epochs=3", "resume.every=0", "finetune.lr=1e-2")
    more += (f"finetune.moments={moments}",)
    wanted = make_run(*choosing(name, *more), out="whole", until="finetune")
    assert summary(wanted, "6_finetune")["changed_entries"] > summary(wanted)["k"]
    for kill_at in kills:
        with stopped_at(kill_at, "fine-tuning", Killed()):
            make_run(*choosing(name, *more), out=f"cut{kill_at}", until="finetune")
        said: list[str] = []
        folder = make_run(*choosing(name, *more), out=f"cut{kill_at}", until="finetune", said=said)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line) for line in lines]
        assert [f["resumed_at"] for f in logged if "resumed_at" in f] == [kill_at]
        for file in ("model/model.safetensors", "delta.safetensors"):
            ours, theirs = (f / "6_finetune" / file for f in (folder, wanted))
            assert ours.read_bytes() == theirs.read_bytes(), f"{file} after a kill at {kill_at}"


# --- Model Shapley -----------------------------------------------------------------------------


def one_gradient(model: Any, example: Example, pad_id: int) -> dict[str, Tensor]:
    model.zero_grad()
    plain_example_loss(model, collate([example], pad_id)).backward()
    return {n: p.grad.clone() for n, p in text_parameters(model) if p.grad is not None}


@pytest.mark.parametrize("where", ["train", "val"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "llama_tied_bias"])
def test_model_shapley_by_brute_force(make_job: JobMaker, arch: str, where: str) -> None:
    """φ = −gθ + ½ θ (Fθ) entry by entry, F written out for every row; moving averages by hand."""
    decay, size = 0.7, 4
    more = ("model.dtype=float64", f"method.model_shapley.decay={decay}", "score.batch_tokens=64")
    more += (f"method.model_shapley.batch_size={size}", f"method.model_shapley.examples={where}")
    method, job = make_job("model_shapley", *more, arch=arch)
    model: Any = job.ctx.theta_old()
    members = matrices(job)
    got = method.scores(job, job.ctx.theta_old(), members)
    rows = job.examples if where == "train" else job.roles["val"]
    assert job.accounts.backward_examples == len(rows) > 2 * size

    order = training_order(rows, job.ctx.config.seed, 0)
    batches = [order[s : s + size] for s in range(0, len(rows), size)]
    weights = np.array([decay ** (len(batches) - 1 - t) for t in range(len(batches))])
    weights /= weights.sum()
    gradients = [one_gradient(model, e, job.ctx.pad_id) for e in rows]
    parameters = dict(model.named_parameters())
    for m in members:
        theta = parameters[m.name].detach()
        theta = theta.T if m.transposed else theta
        each = [g[m.name].T if m.transposed else g[m.name] for g in gradients]
        phi = torch.zeros_like(theta)
        for weight, batch in zip(weights, batches, strict=True):
            g = sum(each[i] for i in batch) / len(batch)
            fisher = sum(torch.einsum("ri,rj->rij", each[i], each[i]) for i in batch) / len(batch)
            phi += weight * (-g * theta + 0.5 * theta * torch.einsum("rij,rj->ri", fisher, theta))
        torch.testing.assert_close(got[m.name], phi.sum(1), rtol=1e-5, atol=1e-9)


def test_model_shapley_takes_the_best_rows_that_fit(make_job: JobMaker) -> None:
    method, job = make_job("model_shapley", "model.dtype=float64")
    k = 1000
    choice = chosen(method, job, k)
    scores = method.scores(replace(job), job.ctx.theta_old(), matrices(job))
    ranked = sorted(
        (
            (value, -number, -row)
            for number, m in enumerate(matrices(job))
            for row, value in enumerate(scores[m.name].tolist())
        ),
        reverse=True,
    )
    left, expected = k, 0
    masks = as_masks(choice.indices, method.eligible(job))
    for _, number, row in ranked:
        m = matrices(job)[-number]
        line = masks[m.name][-row]
        fits = m.size("in") <= left
        assert bool(line.all()) == bool(line.any()) == fits
        left -= m.size("in") * fits
        expected += m.size("in") * fits
    assert count(choice.indices) == expected > k - 40
