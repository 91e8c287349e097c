"""Blocks of a vector that is elsewhere: the right numbers, wherever they are and come from."""

from __future__ import annotations

import random

import pytest
import torch

from dualsft.memory.placement import (
    BlockStream,
)
from dualsft.memory.plans import NUM_SLOTS

CPU = torch.device("cpu")
SHAPES = [(3, 4), (4,), (2, 2), (5, 1), (1, 6), (3,), (2, 7), (4, 4)]


def vector(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}


@pytest.mark.parametrize("seed", range(6))
def test_streamed_sums_are_the_plain_sums(seed: int) -> None:
    """In an order that repeats, as of batches, and in one that does not."""
    rng = random.Random(seed)
    home, plain = vector(), vector()
    streamed = BlockStream(home, CPU)
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


def test_the_next_block_is_brought_in_before_it_is_asked_for() -> None:
    home = {f"p{i}": torch.full((2, 2), float(i)) for i in range(7)}
    streamed = BlockStream(home, CPU)
    brought: list[str] = []
    real = streamed._copy_in
    streamed._copy_in = lambda name: (brought.append(name), real(name))[1]  # pyright: ignore
    for name in home:
        with streamed.changed(name):
            pass
    assert brought == list(home), "the first time nothing is known of the order"
    brought.clear()
    for number, name in enumerate(list(home)[:5]):
        with streamed.changed(name):
            assert brought == list(home)[: number + 2], "this one, and the one behind it"


def test_last_factors_stay_valid_together() -> None:
    home = {f"p{i}": torch.full((2, 2), float(i)) for i in range(3 * NUM_SLOTS)}
    streamed = BlockStream(home, CPU)
    names = list(home)
    for _ in range(3):
        for i in range(0, len(names), 3):
            three = [streamed.read(name, torch.float32) for name in names[i : i + 3]]
            for block, name in zip(three, names[i : i + 3], strict=True):
                assert torch.equal(block, home[name])
