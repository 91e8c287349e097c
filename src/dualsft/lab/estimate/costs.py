"""Memory of the machine, and memory and time of a training stage, for `dualsft estimate`.

Training is Algorithm 1, lines 1 and 12. Bytes per entry are exact (`train/optimizer.py`): 2 for the
index if only some entries are trained, 2 for the low half of the bf16 master weight, 8, 4 or 2 for
the moments, and the weight's size for the gradient, or 4 once a second micro-batch is added.
Micro-batches were measured (`lab/estimate/probe.py`). If memory is short, the loop recomputes
activations and then halves micro-batches (`train/loop.py`), and so does this estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dualsft.engine.precision import MOST_OF_FREE
from dualsft.lab.estimate.probe import Memory, Probe
from dualsft.lab.estimate.workload import Lengths, batch_sizes
from dualsft.memory.plans import GIB, HEADROOM
from dualsft.train.compact import BYTES, Moments
from dualsft.train.loop import TrainingPlan
from dualsft.train.step import PART

OFFLOAD_PARTS = 3
"""Parts of an offloaded optimizer state that are on the device at a time."""


@dataclass(frozen=True, kw_only=True)
class Machine:
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

    def widens(self, num_models: int) -> bool:
        """Whether `precision.precise` would widen this number of half-precision models to fp32."""
        half = num_models * self.model_bytes
        have = self.host_bytes - self.base if self.on_cpu else self.device_bytes
        return half <= MOST_OF_FREE * (have - half)

    def larger(self, device: int, host: int) -> str:
        """The machine that a stage needs without other settings."""
        if self.on_cpu or device <= self.usable:
            where = "memory" if self.on_cpu else "host memory"
            return f"use a machine with {self.hosted(device, host) / GIB:.1f} GiB of {where}"
        smaller = "set model.dtype=bfloat16, or " if self.dtype == torch.float32 else ""
        return f"{smaller}use a GPU with {device / (1 - HEADROOM) / GIB:.1f} GiB"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training stage."""

    num_entries: int
    whole: bool
    """Whether whole parameters are trained, which needs no index."""
    moments: Moments
    offload: bool
    memory: Memory
    plan: TrainingPlan
    num_examples: int
    lengths: Lengths

    def peak(self, machine: Machine) -> tuple[int, int, str]:
        """(bytes on the device, bytes on the host, note on how it trains)."""
        recompute = self.plan.checkpointing
        device, host, tokens = self._peak(machine, bool(recompute), shrink=recompute is not None)
        if recompute is None and not machine.fits(device, host):
            recompute = True
            device, host, tokens = self._peak(machine, True, shrink=True)
        note = f"{tokens:,} tokens per micro-batch"
        return device, host, note + (", activations recomputed" if recompute else "")

    def _peak(self, machine: Machine, checkpointing: bool, shrink: bool) -> tuple[int, int, int]:
        """(bytes on the device, bytes on the host, tokens per micro-batch)."""
        itemsize = machine.dtype.itemsize
        low = {torch.bfloat16: 2, torch.float16: 4}.get(machine.dtype, 0)
        per_entry = low + (BYTES[self.moments] if itemsize < 8 else 16)
        offloaded = self.offload and not machine.on_cpu
        state = (OFFLOAD_PARTS * PART if offloaded else self.num_entries) * per_entry
        state += 0 if self.whole else 2 * self.num_entries
        memory = self.memory
        activations = memory.recomputed if checkpointing else memory.kept
        activations = activations or memory.kept or memory.recomputed
        assert activations is not None, "the probe has measured two layers"
        several = len(self._micro_batches()) > 1
        grads = self.num_entries * (max(4, itemsize) if several else itemsize)
        held = machine.model_bytes + state + (grads if several else 0)
        tokens = self._largest()
        if shrink and activations.at(tokens) > machine.usable - held:
            most = activations.most_tokens(max(0.0, machine.usable - held))
            tokens = max(self.lengths.longest, min(tokens, most))
        # With one micro-batch, gradients appear while activations are freed, so the peak is at the
        # start or at the end of the backward pass. With several, gradients are held throughout.
        last = 0.0 if several else grads + activations.at(0)
        device = int(held + max(activations.at(tokens), last))
        return device, self.num_entries * per_entry if offloaded else 0, tokens

    def _micro_batches(self) -> list[int]:
        """Padded tokens of the micro-batches of a typical optimizer step."""
        lengths = self.lengths.spread(min(self.plan.batch_size, self.num_examples))
        if (size := self.plan.micro_batch_size) is None:
            return batch_sizes(lengths, self.plan.batch_tokens)
        parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        return [int(part.max()) * len(part) for part in parts]

    def _largest(self) -> int:
        """Tokens of the largest micro-batch."""
        plan, longest = self.plan, self.lengths.longest
        count = min(plan.batch_size, self.num_examples)
        if plan.micro_batch_size is not None:
            return min(count, plan.micro_batch_size) * longest
        if self.num_examples <= plan.batch_size:  # every step uses all examples
            sizes = self._micro_batches()
            return max(longest, sizes[0] if len(sizes) == 1 else plan.batch_tokens)
        return max(longest, min(plan.batch_tokens, count * longest))

    def seconds(self, probe: Probe) -> float:
        step = sum(map(probe.step_seconds.at, self._micro_batches()))
        update = self.num_entries * probe.update_seconds
        return self.plan.num_steps(self.num_examples) * (step + update)
