"""One process of a world that counts the bytes of its collectives (started by torchrun).

Prints, from the first process, one JSON line: what was counted and what `docs/scaling_formulas.py`
says, for one turn of a walk and one step of restricted fine-tuning, replicated and sharded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import short_training

from docs.scaling_formulas import ModelShape, step_traffic, walk_traffic
from dualsft.data.examples import Example
from dualsft.distributed.world import joined, settled, world
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.memory.placement import blank
from dualsft.model.load import find_candidates, load_model, text_parameters
from dualsft.model.sharded import load_sharded, weights_vector
from dualsft.system.progress import Reporter
from dualsft.train.loop import train
from dualsft.train.optimizer import ShardedAdamW, make_optimizer

SMALL = 1024
"""Words between the processes (flags, counts) are smaller than this and not counted."""


def nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes, value))
    return 0


class Counted(TorchDispatchMode):
    """Bytes that ring algorithms send for the collectives of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0
        self.kinds: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        name, size = str(func), world().size
        if name.startswith("c10d."):
            kind = name.split(".")[1]
            whole = {
                "_allgather_base_": lambda: nbytes(args[0]),
                "_reduce_scatter_base_": lambda: nbytes(args[1]),
                "allreduce_": lambda: 2 * nbytes(args[0]),
            }.get(kind)
            assert whole is not None or nbytes(args) <= 8 * SMALL, f"{name}: not counted"
            if whole is not None and whole() > SMALL:
                self.sent += whole() * (size - 1) / size
                self.kinds[kind] = self.kinds.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], object]) -> tuple[float, dict[str, int]]:
    with Counted() as found:
        work()
    return found.sent, found.kinds


def measure(folder: Path, sharded: bool) -> list[dict[str, Any]]:
    load = load_sharded if sharded else load_model
    model = load(folder, torch.float32, torch.device("cpu"))
    candidates = find_candidates(model, "block_linear")
    engine, shape = GhostEngine(model, candidates), ModelShape.of(model, candidates)
    examples = [
        Example(str(i), i, list(range(3, 12 + i)), list(range(3, 12 + i)))
        for i in range(world().size)
    ]
    settings = PassSettings(batch_tokens=1, pad_id=0, padding_side="right")
    silent, found = Reporter(lambda _: None), []

    def walked() -> None:
        walk(
            engine,
            examples,
            loss_objective(model),
            settings,
            silent,
            "counted",
            sums=blank(candidates, candidates.dtype),
            direction=weights_vector(model, candidates),
        )

    sent, kinds = counted(walked)
    said = sum(walk_traffic(shape, world().size, sharded))
    found.append({"what": "walk", "sharded": sharded, "sent": sent, "said": said, "kinds": kinds})

    indices = {n: torch.arange(0, p.numel(), 7) for n, p in candidates.items()}
    plan = short_training(batch_size=len(examples), micro_batch_size=1)
    with make_optimizer(model, text_parameters(model), indices, lr=1e-3) as optimizer:
        shares = (
            list(optimizer.shares.values())
            if isinstance(optimizer, ShardedAdamW)
            else [[index.numel()] for index in indices.values()]
        )
        sent, kinds = counted(lambda: train(model, examples, optimizer, plan, silent, "counted"))
    said = step_traffic(shape, world().size, sharded, shares)
    found.append({"what": "step", "sharded": sharded, "sent": sent, "said": said, "kinds": kinds})
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    with joined(use_cuda=False):
        found = []
        for sharded in (False, True):
            with settled(sharded=sharded, offload=False):
                found += measure(folder, sharded)
        if world().main:
            print("TRAFFIC " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
