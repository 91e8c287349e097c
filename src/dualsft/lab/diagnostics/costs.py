"""Rough time of a diagnostic on a run, from what the run itself measured.

Each diagnostic's work is counted in examples that go through forward and backward, and in steps of
training. The seconds of an example are those of the stage gradients, the seconds of a step those of
the fine-tuning, as their manifests have them; loading the model and drawing are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dualsft.lab.diagnostics import Diagnostic
from dualsft.system.progress import clock

DOUBLE = 3
"""A double backward pass in single ones."""
CURVATURE_PRODUCTS = 300
"""Double backward passes of `boundary` per row, about."""
HESSIAN_SLICES = 16
"""Of `hessian` by default: eight layers, two modules."""


@dataclass(frozen=True)
class Work:
    """Examples of each role, and steps of the fine-tuning."""

    val: int
    anchor: int
    pool: int
    steps: int

    def compared(self, options: Any) -> int:
        """Examples of the pool that an ablation compares."""
        return min(self.pool, options.pool or self.pool)

    def walk(self, wanted: int | None) -> int:
        """Validation rows, and as many anchors."""
        return min(self.val, wanted or self.val) + min(self.anchor, wanted or self.anchor)


Count = Callable[[Any, Work], float]


def _listed(numbers: str | None, otherwise: str = "") -> list[float]:
    return [float(number) for number in (numbers or otherwise).split(",")]


def _trials(options: Any, sizes: Work) -> float:
    """Steps of all trainings of `fidelity`."""
    paper = options.protocol == "paper"
    each = 64 if paper else 24
    horizons = _listed(options.horizons, "1024" if paper else "200")
    trainings = (options.subsets or each) + (options.masks or each)
    return trainings * len(options.checkpoints.split(",")) * max(horizons)


EXAMPLES: dict[str, Count] = {
    "data_statistics": lambda o, n: n.pool / 3 + 4 * min(o.limit, n.pool),
    "local_regret": lambda o, n: 5 * n.pool,
    "coordination_gap": lambda o, n: 3 * n.pool,
    "reselection": lambda o, n: max(_listed(o.rounds)) * n.pool,
    "preservation": lambda o, n: 4 * n.anchor + 4 * n.compared(o),
    "anchor_size": lambda o, n: 2 * n.anchor + len(_listed(o.sizes)) * n.compared(o),
    "components": lambda o, n: n.pool + 4 * n.compared(o),
    "sensitivity": lambda o, n: (
        2 * n.compared(o) + len(_listed(o.taus)) * (n.compared(o) + 2 * n.anchor)
    ),
    "boundary": lambda o, n: 2 * n.pool + CURVATURE_PRODUCTS * DOUBLE * 2 * o.rows,
    "hessian": lambda o, n: 2 * (o.pool_rows + DOUBLE * HESSIAN_SLICES * 2 * o.val_rows),
    "fidelity": lambda o, n: 4 * n.pool,
    "drift": lambda o, n: (o.points + 1) * (n.walk(o.val_rows) + 2 * o.probes),
}
"""Examples through forward and backward. A pass over the anchors counts twice (the teacher)."""
STEPS: dict[str, Count] = {
    "fidelity": _trials,
    "drift": lambda o, n: n.steps,
    "reverse": lambda o, n: (4 + 3 * o.draws) * (o.steps or n.steps),
}


def lacks_vectors(one: Diagnostic, manifests: Mapping[str, Any]) -> bool:
    """Whether it reads G, v_new and v_prior, and the run has none (`recommended`)."""
    files = manifests.get("gradients", {}).get("files", {"grad_sum.safetensors": None})
    return one.vectors and "grad_sum.safetensors" not in files


def seconds(one: Diagnostic, options: Any, manifests: Mapping[str, Any]) -> float | None:
    """Rough seconds of a diagnostic; None if the run did not measure what it needs."""
    counts = manifests["split"]["facts"]["counts"]
    tuned = manifests.get("finetune", {})
    steps = int(tuned.get("facts", {}).get("steps", 0))
    sizes = Work(counts["val"], counts["anchor"], counts["pool"], steps)
    examples, training = EXAMPLES.get(one.name), STEPS.get(one.name)
    passed = sizes.val + 2 * sizes.anchor + sizes.pool
    walked = passed if lacks_vectors(one, manifests) else 0
    if examples is not None:
        if "gradients" not in manifests:
            return None
        walked += examples(options, sizes)
    total = 0.0
    if walked:
        total += walked * manifests["gradients"]["seconds"] / max(1, passed)
    if training is not None:
        if not steps:
            return None
        total += training(options, sizes) * tuned["seconds"] / steps
    return total


def told(one: Diagnostic, options: Any, manifests: Mapping[str, Any]) -> str:
    """The cost of a diagnostic in words, with its rough time on this run."""
    time = None
    with suppress(ArithmeticError, LookupError, TypeError, ValueError):  # reported when it runs
        time = seconds(one, options, manifests)
    cost = one.cost
    if lacks_vectors(one, manifests):
        cost += "; first, once per command, G, v_new and v_prior, which the run does not have: a "
        cost += "pass over validation, anchors and pool"
    if time is None:
        return cost
    return f"{cost}; {'seconds' if time < 10 else f'roughly {clock(time)}'}"
