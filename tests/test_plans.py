"""Memory plans: which is chosen, that each gives the same numbers, and what follows a failure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Runner
from faults import cut_off
from models import ARCHITECTURES, assert_equal, tiny_model
from places import place
from test_ghost import engine_of, examples_for, random_direction

from dualsft.data.examples import Batch
from dualsft.engine.rules import LinearRule
from dualsft.engine.sketch import Sketch
from dualsft.engine.walk import (
    PassSettings,
    WalkState,
    loss_objective,
    remaining_batches,
    walk,
)
from dualsft.errors import RunError
from dualsft.memory.placement import BlockStream, blank
from dualsft.memory.plans import (
    AMPLE_BATCH,
    AMPLE_BYTES,
    GIB,
    HEADROOM,
    SMALL_BATCH,
    Activations,
    Demand,
    LinearFit,
    Plan,
    Wishes,
    choose,
    cut,
    unmeasured,
)
from dualsft.storage.manifest import read_manifest
from dualsft.storage.resume import Pieces
from dualsft.system.progress import Reporter
from dualsft.system.usage import is_out_of_memory

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
PLANS: list[tuple[Any, bool]] = [
    (p, c) for p in ("device", "host", "blocks") for c in (False, True)
]

# --- the choice ---------------------------------------------------------------------------------

# Llama-3.2-3B: 28 layers, bf16, block linear candidates
LAYER = {
    "q_proj": (3072, 3072),
    "k_proj": (1024, 3072),
    "v_proj": (1024, 3072),
    "o_proj": (3072, 3072),
    "gate_proj": (8192, 3072),
    "up_proj": (8192, 3072),
    "down_proj": (3072, 8192),
}
SHAPES = {f"model.layers.{i}.{n}.weight": s for i in range(28) for n, s in LAYER.items()}
DEMAND = Demand(
    shapes=SHAPES,
    held=int(6.0 * GIB),
    sum_itemsize=4,
    direction_itemsize=2,
    longest=2000,
    kept=Activations(LinearFit(1.0 * GIB, 3.2e6), LinearFit(0.5 * GIB, 3.4e6)),
    recomputed=Activations(LinearFit(1.0 * GIB, 0.3e6), LinearFit(0.4 * GIB, 0.4e6)),
)
WHOLE = DEMAND.vectors("device")


def chosen(memory: float, wishes: Wishes | None = None, **changes: Any) -> list[Plan]:
    host = changes.pop("host", 200)
    tokens = changes.pop("batch_tokens", 16384)
    demand = replace(DEMAND, **changes)
    wishes = wishes or Wishes(exact_batch=True)
    return choose(demand, int(memory * GIB), int(host * GIB), tokens, wishes)


def kind(plan: Plan) -> tuple[str, bool, int]:
    return plan.placement, plan.checkpointing, plan.num_groups


@pytest.mark.parametrize(
    ("memory", "expected", "whole"),
    [
        (139, ("device", False, 1), True),
        (80, ("device", False, 1), True),
        (40, ("device", False, 1), False),
        (33, ("device", False, 1), False),
        (30, ("device", True, 1), False),
        (24, ("host", False, 1), False),
        (16, ("host", False, 1), False),
        (13, ("host", True, 1), False),
        (9, ("host", True, 1), False),
    ],
)
def test_the_fastest_plan_that_fits(memory: float, expected: tuple, whole: bool) -> None:
    plan = chosen(memory)[0]
    assert kind(plan) == expected
    assert (plan.batch_tokens == 16384) is whole and plan.batch_tokens >= SMALL_BATCH
    assert plan.peak is not None and plan.peak <= memory * GIB * (1 - HEADROOM) + 1
    assert f" of {memory} GiB" in plan.describe(int(memory * GIB))


@pytest.mark.parametrize("memory", [139, 80, 40, 30, 24, 16, 13, 10, 8])
def test_every_fallback_is_smaller_than_the_one_before(memory: float) -> None:
    chain = chosen(memory)

    def least(plan: Plan) -> float:
        activations = DEMAND.activations(plan.checkpointing)
        assert activations is not None
        vectors = DEMAND.vectors(plan.placement, plan.num_groups)
        return vectors + activations.at(DEMAND.longest)

    sizes = [least(plan) for plan in chain]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert kind(chain[-1]) == ("host", True, 1), "blocks of a layer take more than streaming does"
    assert all(plan.batch_tokens >= min(DEMAND.longest, 16384) for plan in chain)


def test_a_larger_batch_never_fits_where_it_was_not_chosen() -> None:
    plan = chosen(40)[0]
    assert DEMAND.kept is not None
    base = DEMAND.held + WHOLE
    assert base + DEMAND.kept.at(plan.batch_tokens) <= 40 * GIB * (1 - HEADROOM)
    assert base + DEMAND.kept.at(plan.batch_tokens + 2) > 40 * GIB * (1 - HEADROOM)


def test_a_wished_plan_that_fits_only_with_small_batches_is_still_the_first() -> None:
    """Between 24 and 25 GiB the device plan has room for a small batch, recomputed."""
    wished = Wishes(placement="device", exact_batch=True)
    demand: dict[str, Any] = {"longest": 500}
    seen = set()
    for memory in (24.4, 24.6, 24.8):
        plan = chosen(memory, wished, **demand)[0]
        assert plan.placement == "device"
        assert plan.peak is not None, "it begins with a plan that is predicted to fit"
        seen.add(plan.batch_tokens < SMALL_BATCH)
    assert True in seen


def test_batches_stop_where_they_are_ample() -> None:
    """Unless a size is set: 12 GiB of activations, but 4,096 tokens and the longest example."""
    light = Activations(LinearFit(1.0 * GIB, 2e6), LinearFit(0.5 * GIB, 2e6))
    plan = chosen(139, Wishes(), kept=light)[0]
    assert kind(plan) == ("device", False, 1)
    assert light.at(plan.batch_tokens) <= AMPLE_BYTES < light.at(plan.batch_tokens + 2)
    assert AMPLE_BATCH < plan.batch_tokens < chosen(139, kept=light)[0].batch_tokens
    heavy = Activations(LinearFit(0.0, 9e6), LinearFit(0.0, 9e6))
    assert chosen(139, Wishes(), kept=heavy)[0].batch_tokens == AMPLE_BATCH
    assert chosen(139, Wishes(), kept=heavy, longest=5000)[0].batch_tokens == 5000
    streamed = chosen(139, Wishes(placement="host"))[0]
    assert streamed.batch_tokens == 16384, "more tokens hide the transfers"


def test_a_small_batch_gives_way_to_a_smaller_plan_with_a_larger_one() -> None:
    """Room for 1,500 tokens with activations kept, for far more when they are recomputed."""
    assert DEMAND.kept is not None
    memory = (DEMAND.held + WHOLE + DEMAND.kept.at(1500)) / (1 - HEADROOM) / GIB
    plan = chosen(memory, longest=500)[0]
    assert kind(plan) == ("device", True, 1) and plan.batch_tokens > SMALL_BATCH
    alone = chosen(
        memory, longest=500, recomputed=Activations(LinearFit(9e12, 1.0), LinearFit(9e12, 1.0))
    )[0]
    assert kind(alone) == ("host", False, 1)


@pytest.mark.parametrize(
    ("wishes", "memory", "first"),
    [
        (Wishes(placement="host"), 139, ("host", False, 1)),
        (Wishes(placement="blocks"), 139, ("blocks", False, 2)),
        (Wishes(placement="blocks", checkpointing=True), 139, ("blocks", True, 2)),
        (Wishes(placement="device"), 10, ("device", False, 1)),
        (Wishes(placement="device"), 30, ("device", True, 1)),
        (Wishes(placement="device", checkpointing=False), 24, ("device", False, 1)),
        (Wishes(checkpointing=True), 139, ("device", True, 1)),
        (Wishes(checkpointing=False), 24, ("host", False, 1)),
        (Wishes(placement="blocks"), 11, ("blocks", True, 8)),
    ],
)
def test_what_is_wished_comes_first(wishes: Wishes, memory: float, first: tuple) -> None:
    chain = chosen(memory, wishes)
    assert kind(chain[0]) == first
    assert memory > 50 or len(chain) > 1 or chain[0].num_groups > 4, "there is a way back"


def test_the_host_is_never_overdrawn() -> None:
    assert kind(chosen(24, host=200)[0]) == ("host", False, 1)
    assert chosen(24, host=14)[0].placement == "blocks"
    wished = chosen(139, Wishes(placement="host"), host=14)
    assert wished[0].placement == "blocks"


def test_without_memory_of_the_host_the_candidates_are_walked_in_blocks() -> None:
    """G itself still has to be somewhere: 10.5 GiB."""
    assert [kind(plan) for plan in chosen(22, host=14)] == [
        ("blocks", True, count) for count in (2, 4, 8, 16, 32)
    ]
    assert [kind(plan)[0] for plan in chosen(22, host=10)] == ["device"]


def test_a_trial_that_did_not_fit_rules_its_plans_out() -> None:
    assert kind(chosen(139, kept=None)[0]) == ("device", True, 1)
    last = chosen(139, kept=None, recomputed=None)
    assert [kind(plan) for plan in last] == [("host", True, 1)], "the smallest there is"


def test_an_example_longer_than_the_budget_of_a_batch() -> None:
    plan = chosen(139, longest=20000)[0]
    assert plan.batch_tokens == 16384 and plan.peak is not None
    assert DEMAND.kept is not None and plan.peak >= DEMAND.kept.at(20000)


def test_without_vectors_there_is_nothing_to_place() -> None:
    chain = chosen(139, sum_itemsize=0, direction_itemsize=0)
    assert [kind(plan) for plan in chain] == [("device", False, 1), ("device", True, 1)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 28, 64])
def test_groups_are_whole_layers_of_about_equal_size(count: int) -> None:
    shapes = {"model.embed_tokens.weight": (128256, 3072), **SHAPES, "model.norm.weight": (3072,)}
    for candidates in (SHAPES, shapes):
        groups = cut(candidates, count)
        assert sorted(name for group in groups for name in group) == sorted(candidates)
        layers = [{name.split(".")[2] for name in group if "layers" in name} for group in groups]
        assert sum(map(len, layers)) == 28, "no layer is in two groups"
        assert len(groups) <= count
    sizes = [sum(np.prod(SHAPES[n]) for n in group) for group in cut(SHAPES, count)]
    one = sum(map(np.prod, LAYER.values()))
    assert max(sizes) - min(sizes) <= one and len(sizes) == min(count, 28)
    outside = next(g for g in cut(shapes, count) if "model.embed_tokens.weight" in g)
    assert "model.norm.weight" in outside, "a head may use both"


# --- every plan, the same numbers ---------------------------------------------------------------


def walked(
    model: Any,
    spec: str,
    wishes: Wishes,
    said: list[str] | None = None,
    spoil: Callable[[Any], Any] = lambda objective: objective,
    sketch: Sketch | None = None,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """G, values, products, bounds and sketches of a walk, by name."""
    engine = engine_of(model, spec)
    sums = blank(engine.candidates, engine.candidates.dtype)
    settings = PassSettings(
        batch_tokens=60, pad_id=0, padding_side="right", wishes=wishes, **changes
    )
    reporter = Reporter((said if said is not None else []).append)
    objective = spoil(loss_objective(model))
    rows, lazy = examples_for(model, 13, 3), random_direction(engine).scaled(1.0)
    options: dict[str, Any] = {"direction": lazy, "bounds": True, "sketch": sketch}
    found = walk(engine, rows, objective, settings, reporter, "pool", sums=sums, **options)
    arrays = {n: getattr(found, n) for n in ("values", "dots", "inner_sums")}
    arrays |= found.sketches.arrays if found.sketches is not None else {}
    blocks = {name: block.clone() for name, block in sums.items()}
    return blocks | {name: torch.from_numpy(array) for name, array in arrays.items()}


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, block in expected.items():
        scale = float(block.abs().max())
        assert scale > 0, name
        assert float((got[name] - block).abs().max()) <= 1e-12 * scale, name


@pytest.mark.parametrize("spec", ["block_linear", "all"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_plan_gives_the_same_numbers(arch: str, spec: str) -> None:
    model = tiny_model(arch)
    expected = walked(model, spec, Wishes())
    for placement, checkpointing in PLANS[1:]:
        wishes = Wishes(placement=placement, checkpointing=checkpointing)
        assert_close(walked(model, spec, wishes), expected)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_in_host_memory_and_recomputed_to_the_same_bits(arch: str) -> None:
    model = tiny_model(arch, torch.float32)
    expected = walked(model, "all", Wishes())
    plans: list[tuple[Any, bool]] = [("device", True), ("host", False), ("host", True)]
    for placement, checkpointing in plans:
        wishes = Wishes(placement=placement, checkpointing=checkpointing)
        assert_equal(walked(model, "all", wishes), expected)


@pytest.mark.parametrize("seed", range(6))
def test_streamed_sums_are_the_plain_sums(seed: int) -> None:
    """In an order that repeats, as of batches, and in one that does not."""
    rng = random.Random(seed)
    shapes = [(3, 4), (4,), (2, 2), (5, 1), (1, 6), (3,), (2, 7), (4, 4)]
    home = {f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    plain = {name: block.clone() for name, block in home.items()}
    streamed = BlockStream(home, torch.device("cpu"))
    order = rng.sample(list(home), len(home))
    for turn in range(5):
        if turn == 3:
            rng.shuffle(order)
        for name in order:
            for _ in range(rng.choice([1, 1, 3])):  # the chunks of a head
                with streamed.changed(name) as block:
                    assert torch.equal(block, plain[name])
                    block.add_(turn + 1.0)
                plain[name].add_(turn + 1.0)
        if rng.random() < 0.5:
            streamed.flush()
            assert all(torch.equal(home[name], plain[name]) for name in home)
    streamed.flush()
    assert all(torch.equal(home[name], plain[name]) for name in home)


# --- out of memory: the next smaller plan -------------------------------------------------------


def failing(when: Callable[[Batch, int], bool]) -> Callable[[Any], Any]:
    """An objective that runs out of memory, depending on the batch and on what is recomputed."""

    def spoil(objective: Any) -> Any:
        def call(batch: Batch, observer: Any) -> Any:
            calls[0] += 1
            if when(batch, calls[0]):
                raise FULL
            return objective(batch, observer)

        calls = [0]
        return call

    return spoil


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (FULL, True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(problem: Exception, expected: bool) -> None:
    assert is_out_of_memory(problem) is expected


@pytest.mark.parametrize("most", [40, 16])
def test_a_walk_goes_on_in_smaller_batches(most: int) -> None:
    model, said = tiny_model("llama"), list[str]()
    too_large = failing(lambda batch, _: batch.input_ids.numel() > most)
    expected = walked(model, "all", Wishes())
    assert_close(walked(model, "all", Wishes(), said, too_large), expected)
    warnings = [line for line in said if "out of memory" in line]
    assert warnings and all("score.batch_tokens=" in line for line in warnings)


def test_a_batch_that_fails_half_way_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory runs out in the middle of a backward, when part of it is in the sums already."""
    model = tiny_model("llama")
    expected = walked(model, "block_linear", Wishes())
    real, calls = LinearRule.observe, [0]

    def observe(self: LinearRule, *args: Any) -> None:
        calls[0] += 1
        if calls[0] in (8, 60):
            raise FULL
        real(self, *args)

    monkeypatch.setattr(LinearRule, "observe", observe)
    for pieces in (Pieces(), Pieces(tmp_path / "s.work", "abc", every=0)):
        calls[0], said = 0, list[str]()
        found = walked(model, "block_linear", Wishes(), said, pieces=pieces)
        assert_close(found, expected)
        assert sum("out of memory" in line for line in said) == 2


def test_the_chain_of_an_unmeasured_device() -> None:
    assert [kind(p) for p in unmeasured(1024, Wishes(), 40)] == [
        ("device", False, 1),
        ("device", True, 1),
    ]
    host = [kind(p) for p in unmeasured(1024, Wishes(placement="host"), 5)]
    assert host == [
        ("host", False, 1),
        ("host", True, 1),
        ("blocks", True, 2),
        ("blocks", True, 4),
    ]
    assert kind(unmeasured(1024, Wishes(placement="blocks"), 5)[0]) == ("blocks", False, 2)
    plain = [kind(p) for p in unmeasured(1024, Wishes(checkpointing=False), 5)]
    assert plain == [("device", False, 1), ("device", True, 1)]


def test_out_of_memory_takes_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """First the batch is halved; plans follow when that is at its end, each said aloud."""
    model, said = tiny_model("llama"), list[str]()
    expected = walked(model, "all", Wishes())
    placed: list[str] = []
    real = WalkState.regroup

    def regroup(self: WalkState, plan: Plan) -> None:
        placed.append(f"{plan.num_groups}")
        real(self, plan)

    monkeypatch.setattr(WalkState, "regroup", regroup)
    until_groups = failing(lambda batch, call: placed[-1] == "1")
    assert_close(walked(model, "all", Wishes(placement="host"), said, until_groups), expected)
    warnings = [line for line in said if "out of memory" in line]
    halved = [line for line in warnings if "the same sums in smaller pieces" in line]
    fell = [line for line in warnings if "the same sums in another order" in line]
    assert halved and len(fell) == 2 and len(warnings) == len(halved) + len(fell)
    assert "score.plan=host score.checkpointing=true score.batch_tokens=60" in fell[0]
    assert "score.plan=blocks score.checkpointing=true" in fell[1] and "2 groups" in fell[1]


def test_one_example_that_fits_no_plan_is_the_users_to_cure() -> None:
    said: list[str] = []
    with pytest.raises(RunError, match=r"single example of \d+ tokens .*lower data.max_length"):
        walked(tiny_model("llama"), "all", Wishes(placement="host"), said, failing(lambda *_: True))
    assert sum("another order" in line for line in said) >= 3, "every plan was tried"


def test_no_room_for_the_vectors_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = tiny_model("llama"), list[str]()
    expected = walked(model, "all", Wishes())

    def full(*_: Any) -> Any:
        raise FULL

    monkeypatch.setattr("dualsft.memory.placement.in_host_memory", full)
    assert_close(walked(model, "all", Wishes(placement="host"), said), expected)
    assert sum("another order" in line for line in said) == 2
    monkeypatch.setattr("dualsft.memory.placement.move", full)
    with pytest.raises(RunError, match="out of memory before the first batch"):
        walked(model, "all", Wishes())


# --- resume under each plan ---------------------------------------------------------------------


@pytest.mark.parametrize(("placement", "checkpointing"), PLANS)
def test_a_killed_walk_gives_the_same_bits(
    placement: Any, checkpointing: bool, tmp_path: Path
) -> None:
    """Killed after every batch; with sketches where there is one walk over all candidates."""
    model = tiny_model("gemma3", torch.float32)
    wishes = Wishes(placement=placement, checkpointing=checkpointing)
    sketch = Sketch(16, seed=0, purpose="test") if placement != "blocks" else None

    def scored(pieces: Pieces) -> dict[str, torch.Tensor]:
        return walked(model, "all", wishes, sketch=sketch, pieces=pieces)

    expected = scored(Pieces())
    batches = len(remaining_batches(examples_for(model, 13, 3), 60, 0))
    count = batches * (2 if placement == "blocks" else 1)
    assert count >= 3
    for kill_at in range(1, count + 1):
        second = cut_off(scored, tmp_path / f"{kill_at}.work", kill_at)
        assert_equal(scored(second), expected)
        assert second.ticks == count - kill_at, "only the rest is computed"


@pytest.mark.parametrize("kill_at", [1, 3])
@pytest.mark.parametrize(
    ("before", "after"),
    [("device", "blocks"), ("host", "blocks"), ("blocks", "device"), ("blocks", "host")],
)
def test_a_killed_walk_goes_on_under_another_plan(
    before: Any, after: Any, kill_at: int, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    expected = walked(model, "all", Wishes())
    count = len(remaining_batches(examples_for(model, 13, 3), 60, 0))
    done = min(kill_at, count)
    again = cut_off(
        lambda pieces: walked(model, "all", Wishes(placement=before), pieces=pieces),
        tmp_path / "s.work",
        done,
    )
    assert_close(walked(model, "all", Wishes(placement=after), pieces=again), expected)
    left = 2 * (count - done) if after == "blocks" else 2 * count - done
    assert again.ticks == left, "what was done is not done again"


def test_a_walk_killed_after_it_fell_back_gives_the_same_bits(tmp_path: Path) -> None:
    """Two groups did not fit, four did: a resume does not go back to two."""
    model = tiny_model("llama", torch.float32)
    wishes = Wishes(placement="blocks", checkpointing=True)

    def spoil(objective: Any) -> Any:
        def call(batch: Batch, observer: Any) -> Any:
            if not any("4 groups" in line for line in said):
                raise FULL
            return objective(batch, observer)

        return call

    said: list[str] = []
    expected = walked(model, "all", wishes, said, spoil)
    for kill_at in (2, 5):
        said.clear()
        second = cut_off(
            lambda pieces: walked(model, "all", wishes, said, spoil, pieces=pieces),
            tmp_path / f"{kill_at}.work",
            kill_at,
        )
        assert_equal(walked(model, "all", wishes, pieces=second), expected)


# --- in a run -----------------------------------------------------------------------------------


def test_a_run_under_another_plan_selects_the_same_and_redoes_nothing(make_run: Runner) -> None:
    options = ("select.data_budget=12", "resume.every=0")
    plain = make_run(*options, out="plain")
    for number, changes in enumerate(
        (("score.plan=host", "score.checkpointing=true"), ("score.plan=blocks", "model.memory=3"))
    ):
        run = make_run(*options, *changes, out=f"run{number}")
        for file in ("5_selection/selected.jsonl", "5_selection/summary.json"):
            assert (run / file).is_file()
        name = "5_selection/selected.jsonl"
        assert (run / name).read_bytes() == (plain / name).read_bytes()
        manifest, _ = read_manifest(place(run / "3_gradients/manifest.json"))
        facts = manifest["facts"]["plans"]
        assert facts["pool (G and f)"]["placement"] == changes[0].split("=")[1]
        said: list[str] = []
        make_run(*options, *changes, out="plain", said=said)
        assert any(line.startswith("[gradients] reused") for line in said), said
        assert not any("again" in line or "started" in line for line in said), said
