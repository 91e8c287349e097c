"""The retention term of fine-tuning: CWSD on anchor rows in every step (ours; Algorithm 1 line 12).

With `finetune.retention` above 0 a step minimises the mean loss of its examples plus that weight
times the mean CWSD loss (Eq. cwsd, as in line 6) of a few anchors. The teacher is θ_old, in eval
mode and without gradients; the student is the model in training. So the model is held to its old
outputs on the anchors while it learns, whatever entries are trained. The anchors of a step depend
only on (seed, step): nothing is saved to resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example, training_order
from dualsft.engine.losses import distillation_objective


@dataclass(kw_only=True)
class Retention:
    """The term: its weight, the teacher, and the anchors that steps draw from."""

    weight: float
    teacher: PreTrainedModel
    tau: float
    anchors: Sequence[Example]
    batch_size: int
    """Anchors per step."""
    seed: int
    _orders: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Order of the anchors in the passes that the latest step drew from."""

    def rows(self, step: int) -> list[Example]:
        """The anchors of a step: the next `batch_size` of shuffled passes over all of them."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        at = [divmod(place, len(self.anchors)) for place in places]
        self._orders = {
            epoch: self._orders.get(epoch) or training_order(self.anchors, self.seed, epoch)
            for epoch in {epoch for epoch, _ in at}
        }
        return [self.anchors[self._orders[epoch][i]] for epoch, i in at]

    def facts(self) -> dict[str, float]:
        """The term in numbers, for a summary file."""
        return {
            "weight": self.weight,
            "tau": self.tau,
            "anchors": len(self.anchors),
            "anchors_per_step": self.batch_size,
        }

    def objective(
        self, model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
    ) -> tuple[Tensor, Tensor]:
        """(Σ_n weight · scale · CWSD_n to differentiate, CWSD_n of each anchor)."""
        total, divergence, omega = distillation_objective(
            self.teacher, model, batch, self.tau, self.weight * scale
        )
        return total, divergence * omega
