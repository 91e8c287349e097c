"""A second signal, which does not wait: nothing half-done is kept as a state.

The first Ctrl-C waits for the end of a batch or step, is saved there and ends the run. A second one
comes at once, anywhere; what is rescued then must be a state that the computation really had.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from test_ghost import QUIET, examples_for
from worlds import short_training

import dualsft
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.memory.placement import HostPlacement, blank
from dualsft.memory.plans import Wishes
from dualsft.model.load import find_candidates
from dualsft.storage.resume import Pieces
from dualsft.system.signals import Interrupted
from dualsft.train.loop import train
from dualsft.train.optimizer import SparseAdamW
from dualsft.train.step import Part

PLAN = short_training(
    lr=1e-2, epochs=2, batch_size=3, max_grad_norm=0.0, micro_batch_size=None, batch_tokens=256
)


class Counted(Pieces):
    """Counts steps or batches; saves the state after the first, later ones are in memory alone."""

    done = 0

    def tick(self, name: str, snapshot: Any, where: str) -> None:
        self.done += 1
        self.every = 0.0 if self.done == 1 else 1e9
        super().tick(name, snapshot, where)


def interrupted(
    compute: Callable[[Pieces], dict[str, torch.Tensor]], folder: Path, done: int
) -> None:
    """A second signal after `done` whole steps or batches, rescued as the pipeline does it.

    The state after the first is on the disk and stays; the one in memory has half a step in it.
    """
    pieces = Counted(folder, "fingerprint")
    with pytest.raises(Interrupted):
        compute(pieces)
    assert pieces.done == done
    assert pieces.rescue() == "", "half a step is no state"
    assert len(list(folder.iterdir())) == min(done, 1)


def resumed(compute: Callable[[Pieces], dict[str, torch.Tensor]], folder: Path) -> None:
    """Begun again behind the state that was saved, if one was, and to the same bits."""
    saved = len(list(folder.iterdir()))
    whole, rest = Counted(), Counted(folder, "fingerprint")
    expected, again = compute(whole), compute(rest)
    assert rest.done == whole.done - saved, "what was saved is not done again"
    assert expected and all(torch.equal(expected[name], again[name]) for name in expected)


@pytest.mark.parametrize(("update", "done"), [(1, 0), (40, 1), (75, 3)])
def test_inside_the_optimizer_s_step(
    update: int, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step updates 21 tensors."""

    def trained(pieces: Pieces) -> dict[str, torch.Tensor]:
        model = tiny_model("llama", torch.float32)
        with SparseAdamW(model.named_parameters(), None, lr=1e-2, free_gradients=True) as optimizer:
            train(model, examples_for(model), optimizer, PLAN, QUIET, "warmup", pieces=pieces)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    real, calls = Part.run, [0]

    def stopped(self: Part, *given: object, **named: object) -> object:
        calls[0] += 1
        if calls[0] == update:
            raise Interrupted(2)
        return real(self, *given, **named)  # pyright: ignore

    with monkeypatch.context() as patch:
        patch.setattr(Part, "run", stopped)
        interrupted(trained, tmp_path, done)
    resumed(trained, tmp_path)


def test_before_streamed_sums_are_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32).eval()
    engine = GhostEngine(model, find_candidates(model, "all"))

    def summed(pieces: Pieces) -> dict[str, torch.Tensor]:
        sums = blank(engine.candidates, torch.float32)
        settings = PassSettings(
            batch_tokens=60,
            pad_id=0,
            padding_side="right",
            pieces=pieces,
            wishes=Wishes(placement="host"),
        )
        objective = loss_objective(model)
        walk(engine, examples_for(model), objective, settings, QUIET, "pool", sums=sums)
        return {name: block.clone() for name, block in sums.items()}

    real, calls = HostPlacement.flush, [0]

    def stopped(self: HostPlacement) -> None:
        """The first time for the state that is saved, the second at the end of the walk."""
        calls[0] += 1
        if calls[0] == 2:
            raise Interrupted(2)
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(HostPlacement, "flush", stopped)
        interrupted(summed, tmp_path, 2)
    resumed(summed, tmp_path)


ENDING = """
import atexit, sys, time
from dualsft import cli
atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
sys.argv = ["dualsft", "--version"]
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_python_ends(number: int) -> None:
    """No traceback of a process that has nothing more to do."""
    source = str(Path(dualsft.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", ENDING],
        env=os.environ | {"PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "ending\n":
            assert process.poll() is None
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == -number and not said, said
