"""What a benchmark is told: the command's options, with the defaults of the device filled in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. `quick` makes everything as small as it can be: a test of the benchmark."""

    device: torch.device
    model: str
    """A shape of `workload.SHAPES`, or a real model by name or folder."""
    real_model: str
    """The trained model of the fidelity benchmark."""
    data: Path | None
    """JSONL rows of the fidelity benchmark; None is the built-in corpus."""
    fields: tuple[str, str] | None
    """Names of the prompt and the response in `data`; None looks at the rows."""
    rows: int
    rounds: int
    batch_tokens: int
    match: str
    """Only what has this in its name is measured, and the references."""
    quick: bool

    def wanted(self, name: str, *references: str) -> bool:
        """Whether a contender takes part."""
        return self.match in name or name.startswith(references)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"
