"""One process of a world in which one process has a fault (started by torchrun).

    torchrun --nproc-per-node 2 faulty.py MODEL OUT

Writes OUT/<rank>.json: what each fault came to in this process, and what the sums were without one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from worlds import short_training

from dualsft.data.examples import Example
from dualsft.distributed.world import joined, settled, world
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.errors import DualsftError
from dualsft.memory import placement
from dualsft.memory.placement import blank
from dualsft.model.load import find_candidates, load_model, text_parameters
from dualsft.model.sharded import load_sharded, local_rows
from dualsft.system.progress import Reporter
from dualsft.train.loop import Hooks, mean_loss, train
from dualsft.train.optimizer import make_optimizer

EXAMPLES = [
    Example(f"id{i}", i, list(range(3, 8 + i % 7)), list(range(3, 8 + i % 7))) for i in range(13)
]
PLAN = short_training()


def out_of_memory(_: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (made up)")


def trained(model: Any, fault: Callable[[Any], Any] | None) -> dict[str, Any]:
    """A short training, in which one process has a fault at its first large enough batch."""
    said: list[str] = []
    before = {name: local_rows(p).clone() for name, p in model.named_parameters()}

    def objective(model: Any, batch: Any, rows: Any, scale: float) -> Any:
        total, losses = mean_loss(model, batch, rows, scale)
        if world().rank == 1 and fault is not None and len(rows) > 1:
            losses = fault(losses)
        return total, losses

    result: dict[str, Any] = {"error": None}
    with make_optimizer(model, text_parameters(model), None, lr=1e-3) as optimizer:
        try:
            hooks = Hooks(objective=objective)
            train(model, EXAMPLES, optimizer, PLAN, Reporter(said.append), "training", hooks=hooks)
        except DualsftError as problem:
            result["error"] = str(problem)
    result["said"] = [line for line in said if "memory" in line]
    result["moved"] = any(
        not torch.equal(before[name], local_rows(p)) for name, p in model.named_parameters()
    )
    result["norm"] = sum(
        float(local_rows(p).double().square().sum()) for _, p in model.named_parameters()
    )
    return result


def walked(
    model: Any, fault: Callable[[int], None] | None, ranks: tuple[int, ...] = (1,)
) -> dict[str, Any]:
    """A walk over the examples, in which some processes have a fault at a batch of several."""
    said: list[str] = []
    candidates = find_candidates(model, "block_linear")
    engine, plain = GhostEngine(model, candidates), loss_objective(model)

    def objective(batch: Any, observer: Any) -> Any:
        if world().rank in ranks and fault is not None and len(batch.input_ids) > 1:
            fault(len(batch.input_ids))
        return plain(batch, observer)

    sums = blank(candidates, candidates.dtype)
    settings = PassSettings(batch_tokens=24, pad_id=0, padding_side="right")
    reporter = Reporter(said.append)
    values = walk(engine, EXAMPLES, objective, settings, reporter, "walk", sums=sums).values
    return {
        "said": [line for line in said if "memory" in line],
        "norm": sums.norm(),
        "values": values.tolist(),
    }


def displaced(model: Any) -> dict[str, Any]:
    """A walk in which one process has no room for G at first."""
    true, tries = placement.move, []

    def move(*given: Any) -> None:
        tries.append(1)
        if world().rank == 1 and len(tries) == 1:
            out_of_memory(0)
        true(*given)

    placement.move = move
    try:
        return walked(model, None)
    finally:
        placement.move = true


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    cpu = torch.device("cpu")
    found: dict[str, Any] = {}
    with joined(use_cuda=False):
        with settled(sharded=False, offload=False):
            model = load_model(folder, torch.float64, cpu)
            found["nan"] = trained(model, lambda losses: losses * torch.nan)
            found["walk"] = walked(model, None)
            found["walk, no room"] = walked(model, out_of_memory)
            found["walk, no room anywhere"] = walked(model, out_of_memory, ranks=(0, 1))
            found["walk, no place"] = displaced(model)
            found["no room"] = trained(model, lambda _: out_of_memory(0))
        with settled(sharded=True, offload=False):
            model = load_sharded(folder, torch.float64, cpu)
            found["nan, sharded"] = trained(model, lambda losses: losses * torch.nan)
        (out / f"{world().rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
