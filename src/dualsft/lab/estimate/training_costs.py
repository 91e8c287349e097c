"""Memory and time of a training stage: the part of `dualsft estimate` for SparseAdamW.

Covers Algorithm 1, lines 1 (Warmup) and 12 (MaskedFT). Bytes per entry are exact
(`train/optimizer.py`): 2 for the index if only some entries are trained, 2 for the low half of the
bf16 master weight, 8, 4 or 2 for the moments, and the weight's size for the gradient, or 4 once a
second micro-batch is added. Micro-batches were measured (`lab/estimate/probe.py`). If a stage does
not fit, the loop recomputes activations and then halves micro-batches (`train/loop.py`), and so
does this estimate. Settings beyond that are only suggested; the user has to set them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualsft.config.settings import Config
from dualsft.lab.estimate.probe import Memory, Probe
from dualsft.lab.estimate.workload import Lengths, cut
from dualsft.memory.plans import GIB, HEADROOM
from dualsft.train.compact import BYTES, Moments
from dualsft.train.loop import TrainingPlan
from dualsft.train.step import PART

OFFLOAD_PARTS = 3
"""Parts of an offloaded optimizer state that are on the device at a time."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of the machine, and the memory that every stage uses."""

    on_cpu: bool
    device_bytes: int
    """GPU bytes that the run may use; unused on a CPU."""
    host_bytes: int
    base: int
    """Host memory of the process itself and the tokenised corpus."""
    model_bytes: int
    dtype: torch.dtype

    @property
    def usable(self) -> float:
        """Bytes available for weights, vectors and batches."""
        if self.on_cpu:
            return self.host_bytes - self.base
        return self.device_bytes * (1 - HEADROOM)

    def hosted(self, device: int, host: int) -> int:
        """Host memory: everything on a CPU; with a GPU, models pass through it while loading."""
        return self.base + host + (device if self.on_cpu else self.model_bytes)

    def fits(self, device: int, host: int = 0) -> bool:
        return device <= self.usable and self.hosted(device, host) <= self.host_bytes

    def larger(self, device: int, host: int) -> str:
        """The machine that is needed if no setting helps."""
        if self.on_cpu or device <= self.usable:
            where = "memory" if self.on_cpu else "host memory"
            return f"use a machine with {self.hosted(device, host) / GIB:.1f} GiB of {where}"
        smaller = "set model.dtype=bfloat16, or " if self.dtype == torch.float32 else ""
        return f"{smaller}use a GPU with {device / (1 - HEADROOM) / GIB:.1f} GiB"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training stage with given settings."""

    num_entries: int
    whole: bool
    """Whether whole parameters are trained, which needs no index."""
    moments: Moments
    offload: bool
    memory: Memory
    plan: TrainingPlan
    num_examples: int
    lengths: Lengths

    def peak(self, room: Room) -> tuple[int, int, str]:
        """(bytes on the device, bytes on the host, note on how it trains)."""
        asked = self.plan.checkpointing
        device, host, tokens = self._peak(room, bool(asked), shrink=asked is not None)
        if asked is None and not room.fits(device, host):
            asked = True
            device, host, tokens = self._peak(room, True, shrink=True)
        note = f"{tokens:,} tokens per micro-batch"
        return device, host, note + (", activations recomputed" if asked else "")

    def _peak(self, room: Room, checkpointing: bool, shrink: bool) -> tuple[int, int, int]:
        """(bytes on the device, bytes on the host, tokens per micro-batch)."""
        itemsize = room.dtype.itemsize
        low = {torch.bfloat16: 2, torch.float16: 4}.get(room.dtype, 0)
        an_entry = low + (BYTES[self.moments] if itemsize < 8 else 16)
        away = self.offload and not room.on_cpu
        state = (OFFLOAD_PARTS * PART if away else self.num_entries) * an_entry
        state += 0 if self.whole else 2 * self.num_entries
        activations = self.memory.at(checkpointing) or self.memory.kept or self.memory.recomputed
        assert activations is not None, "the probe has measured two layers"
        num_micro, _ = self._micro()
        several = num_micro > 1
        grads = self.num_entries * (max(4, itemsize) if several else itemsize)
        held = room.model_bytes + state + (grads if several else 0)
        longest, tokens = self.lengths.longest, self._largest()
        if shrink and activations.at(tokens) > room.usable - held:
            most = activations.most_tokens(max(0.0, room.usable - held))
            tokens = max(longest, min(tokens, most))
        # With one micro-batch, gradients appear while activations are freed, so the peak is at the
        # start or at the end of the backward pass. With several, gradients are held throughout.
        last = 0.0 if several else grads + activations.at(0)
        device = int(held + max(activations.at(tokens), last))
        return device, self.num_entries * an_entry if away else 0, tokens

    def _micro(self) -> tuple[int, int]:
        """(micro-batches, padded tokens) of a typical optimizer step."""
        lengths, size = self._lengths(), self.plan.micro_batch_size
        if size is None:
            return cut(lengths, self.plan.batch_tokens)
        parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        return len(parts), int(sum(part.max() * len(part) for part in parts))

    def _lengths(self) -> Any:
        return self.lengths.spread(min(self.plan.batch_size, self.num_examples))

    def _largest(self) -> int:
        """Tokens of the largest micro-batch."""
        longest, lengths = self.lengths.longest, self._lengths()
        size = self.plan.micro_batch_size
        if size is not None:
            return min(len(lengths), size) * longest
        if self.num_examples <= self.plan.batch_size:  # every step uses all examples
            num_micro, padded = cut(lengths, self.plan.batch_tokens)
            return max(longest, padded if num_micro == 1 else self.plan.batch_tokens)
        return max(longest, min(self.plan.batch_tokens, len(lengths) * longest))

    def seconds(self, probe: Probe) -> float:
        num_micro, tokens = self._micro()
        line = probe.step_seconds
        update = self.num_entries * probe.update_seconds
        steps = self.plan.num_steps(self.num_examples)
        return steps * (num_micro * line.fixed + tokens * line.slope + update)


def warmup_cures(config: Config) -> Iterator[tuple[str, Config]]:
    """Settings to try for the warmup, cumulatively. Those that change no result come first."""
    yield from _cures(
        config,
        ("finetune", "checkpointing", True),
        ("warmup", "offload", True),
        ("warmup", "moments", "bfloat16"),
        ("warmup", "moments", "int8"),
        ("warmup", "trainable", "candidates"),
    )


def finetune_cures(config: Config) -> Iterator[tuple[str, Config]]:
    """Settings to try for fine-tuning, in the same way."""
    yield from _cures(
        config,
        ("finetune", "checkpointing", True),
        ("finetune", "moments", "bfloat16"),
        ("finetune", "moments", "int8"),
    )


def _cures(config: Config, *changes: tuple[str, str, Any]) -> Iterator[tuple[str, Config]]:
    made: dict[str, Any] = {}
    for section, field, value in changes:
        part = getattr(config, section)
        if getattr(part, field) == value:
            continue
        config = replace(config, **{section: replace(part, **{field: value})})
        made[f"{section}.{field}"] = "true" if value is True else value
        yield " ".join(f"{key}={v}" for key, v in made.items()), config
