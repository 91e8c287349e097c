"""Options of the benchmarks, with the defaults of the device filled in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command-line options. `quick` minimises all sizes, to test the benchmarks themselves."""

    device: torch.device
    model: str
    """A shape of `workload.SHAPES`, or a real model by name or folder."""
    real_model: str
    """The trained model of the fidelity and microscope benchmarks (default smollm2-135m)."""
    data: Path | None
    """JSONL rows of those benchmarks; None is the built-in corpus."""
    fields: tuple[str, str] | None
    """Field names of prompt and response in `data`; None detects them from the rows."""
    rows: int
    rounds: int
    batch_tokens: int
    match: str
    """Measure only contenders with this in their name, and the references."""
    quick: bool

    def wanted(self, name: str, *references: str) -> bool:
        """Whether to measure a contender."""
        return self.match in name or name.startswith(references)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"
