"""On a CUDA device: the methods that choose entries, against the CPU and against a kill.

Run there with `python -m pytest tests/gpu -m gpu`; `make test` leaves these out.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from conftest import Runner
from test_methods_params import MOVING, OPTIONS, Killed, choosing, summary

from dualsft.runs.stages.selection import read_mask
from dualsft.storage.resume import Pieces

pytestmark = pytest.mark.gpu

CARD = ("model.device=cuda", "model.deterministic=true")


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_float64_selection_equals_the_cpu_s(make_run: Runner, name: str, arch: str) -> None:
    """A randomised factorisation draws otherwise on each device, so lift has the full one."""
    more = ["model.dtype=float64", *(["method.lift.svd=exact"] if name == "lift" else [])]
    here = make_run(*choosing(name, *more), arch=arch, out="cpu", until="selection")
    there = make_run(*choosing(name, *more, *CARD), arch=arch, out="card", until="finetune")
    ours, theirs = (read_mask(folder / "5_selection") for folder in (here, there))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert summary(there, "6_finetune")["trained_entries"] == summary(here)["k"]


@pytest.mark.parametrize("name", MOVING)
def test_a_killed_run_with_a_moving_mask_resumes_to_the_same_bits(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nine steps, masks at 0, 3 and 6, killed behind the first move."""
    more = ("model.dtype=bfloat16", "finetune.epochs=3", "resume.every=0", "finetune.lr=1e-2")
    words = choosing(name, *more, *CARD)
    wanted = make_run(*words, out="whole", until="finetune")
    plain, seen = Pieces.tick, 0

    def tick(self: Pieces, label: str, *rest: Any) -> None:
        nonlocal seen
        plain(self, label, *rest)
        seen += label == "fine-tuning"
        if seen == 5:
            raise Killed

    monkeypatch.setattr(Pieces, "tick", tick)
    with pytest.raises(Killed):
        make_run(*words, out="cut", until="finetune")
    monkeypatch.setattr(Pieces, "tick", plain)
    folder = make_run(*words, out="cut", until="finetune")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert [facts["resumed_at"] for facts in logged if "resumed_at" in facts] == [5]
    ours, theirs = (f / "6_finetune/model/model.safetensors" for f in (folder, wanted))
    assert ours.read_bytes() == theirs.read_bytes()
