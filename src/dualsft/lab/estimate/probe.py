"""Memory and time per batch at a model's full depth, measured on copies with one and two layers.

A decoder repeats the same block, so the bytes and seconds of a batch are linear in the number of
layers L and in the tokens of the batch: fixed + c · tokens + L · (a + b · tokens). Two depths and
two batch sizes determine all four coefficients. This needs neither the weights nor more memory than
two layers, and takes a few seconds on the run's device. Used by `dualsft estimate`, before
Algorithm 1.

On CUDA, memory is read from the allocator, with batches as large as the run's. On other devices no
allocator statistics exist, so the memory is the sum of the tensors that autograd saves, the logits
of the loss, and the largest gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.calibration import sketch_with
from dualsft.algorithm.split import resolve_budget
from dualsft.data.examples import Batch, Example
from dualsft.engine.fused import HALF_DTYPES, checkpointed, fused_blocks
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.losses import CHUNK_BYTES, example_objective
from dualsft.engine.passes import Collected, measure, peaks, widened
from dualsft.engine.sketch import Sketch
from dualsft.engine.walk import cwsd_objective, loss_objective
from dualsft.errors import ConfigError, RunError
from dualsft.lab.estimate.workload import Workload
from dualsft.memory.placement import Scratch
from dualsft.memory.plans import Activations, LinearFit
from dualsft.model.load import find_candidates, shallow_model, text_parameters
from dualsft.runs.context import RunContext
from dualsft.runs.stages.gradients import some_layers, vectors_wanted
from dualsft.system.usage import PeakMemory, give_back, is_out_of_memory
from dualsft.train.optimizer import SparseAdamW

DEPTHS = (1, 2)
ROUNDS = 2
"""Timed calls per measurement; the fastest counts."""
CPU_TOKENS = 256
"""Tokens of the smaller timed batch on a CPU."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a batch with activations kept and with activations recomputed. None: out of memory
    or not measured."""

    kept: Activations | None
    recomputed: Activations | None


@dataclass(frozen=True)
class Walks:
    """The ghost walk with weights of one dtype. `seconds` is per batch, by tokens."""

    loss: Memory
    """With G, direction and bounds, but without the memory of these vectors; with sketches alone
    where the run's walks collect nothing else."""
    cwsd: Memory
    seconds: LinearFit


@dataclass(frozen=True, kw_only=True)
class Probe:
    """All measurements of a model. Bytes and seconds are per batch, by tokens."""

    warmup: Memory
    """Training step on every parameter, without gradients and optimizer state."""
    finetune: Memory
    """The same if only the candidates have gradients."""
    walks: Walks
    wide: Walks
    """With fp32 weights, which some walks of a half-precision run use (`engine/passes.py`)."""
    forward: LinearFit
    """Bytes of a forward pass with the loss, without gradients."""
    step_seconds: LinearFit
    forward_seconds: LinearFit
    update_seconds: float
    """Seconds per entry of an optimizer update."""


def probe(ctx: RunContext, work: Workload) -> Probe:
    """Measure copies of the model with one and two layers and extrapolate to its depth."""
    depth = int(ctx.model_config.num_hidden_layers)
    found: list[Probe] = []
    for layers in DEPTHS:
        model = shallow_model(
            ctx.model_folder, layers, ctx.dtype, ctx.device, ctx.config.model.attention, ctx.trusted
        )
        try:
            found.append(_Measurement(ctx, work, model).probe())
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
            raise RunError(
                f"out of memory with {layers} of the model's {depth} layers ({problem}); lower "
                "data.max_length or score.batch_tokens, or use a machine with more memory"
            ) from None
        finally:
            del model
            give_back(ctx.device)
    one, two = found
    whole, layers = deeper(one, two, depth), ctx.config.score.sketch_layers
    if vectors_wanted(ctx) or not some_layers(ctx):
        return whole
    # the blocks below the sketched ones run forward only, and keep nothing
    part = deeper(one, two, min(depth, resolve_budget(layers, depth, "score.sketch_layers")))
    rest = LinearFit(
        whole.forward_seconds.fixed - part.forward_seconds.fixed,
        whole.forward_seconds.slope - part.forward_seconds.slope,
    )
    return replace(whole, walks=_after(rest, part.walks), wide=_after(rest, part.wide))


def _after(rest: LinearFit, walks: Walks) -> Walks:
    """Walks with the seconds of a forward pass through more blocks."""
    fixed, slope = walks.seconds.fixed + rest.fixed, walks.seconds.slope + rest.slope
    return replace(walks, seconds=LinearFit(fixed, slope))


def deeper(one: Any, two: Any, depth: int) -> Any:
    """Extrapolate measurements of one and two layers, of the same type, to `depth` layers.

    More layers never cost less. A number (seconds per entry) does not depend on the depth.
    """
    if one is None or two is None:
        return None
    if isinstance(one, float):
        return min(one, two)
    if isinstance(one, LinearFit):
        fixed, slope = max(0.0, two.fixed - one.fixed), max(0.0, two.slope - one.slope)
        return LinearFit(one.fixed + (depth - 1) * fixed, one.slope + (depth - 1) * slope)
    names = [field.name for field in fields(one)]
    return type(one)(**{n: deeper(getattr(one, n), getattr(two, n), depth) for n in names})


class _Measurement:
    """Measurements of one shallow model."""

    def __init__(self, ctx: RunContext, work: Workload, model: PreTrainedModel) -> None:
        self.ctx, self.model, self.device = ctx, model, ctx.device
        self.typical, self.longest = work.typical, work.longest
        self.worst = replace(work.longest, labels=list(work.longest.input_ids))
        """The longest example with a label on every token: the worst case for the loss."""
        self.everything = [name for name, _ in text_parameters(model)]
        self.on_cuda = ctx.device.type == "cuda"

    def probe(self) -> Probe:
        model = self.model
        try:
            candidates = find_candidates(model, self.ctx.config.score.candidates)
        except ConfigError:  # patterns that name a deep layer match nothing in a shallow model
            candidates = find_candidates(model, "block_linear")
        engine = GhostEngine(model, candidates)
        walks = wide = self._walks(engine)
        if any(p.dtype in HALF_DTYPES for p in model.parameters()):
            with widened(model, tensor_cores=True) as (wide_model,):
                wide = self._walks(engine.on(wide_model))
        if self.on_cuda:
            warmup = _both(lambda again: self._step_peaks(self.everything, again))
            finetune = _both(lambda again: self._step_peaks(engine.candidates.names, again))
            forward = self._forward_peaks()
        else:
            warmup = finetune = self._counted()
            width = int(model.config.get_text_config().hidden_size)
            forward = LinearFit(self._logits(), 8.0 * width * 4)

        def step(batch: Batch) -> None:
            with _gradients_of(model, self.everything):
                example_objective(model, batch)[0].backward()

        with fused_blocks(model):
            step_seconds = self._seconds(step)
        with torch.no_grad():
            forward_seconds = self._seconds(lambda batch: example_objective(model, batch))
        return Probe(
            warmup=warmup,
            finetune=finetune,
            walks=walks,
            wide=wide,
            forward=forward,
            step_seconds=step_seconds,
            forward_seconds=forward_seconds,
            update_seconds=self._update_seconds(),
        )

    def _batch(self, example: Example, count: int) -> Batch:
        return self.ctx.collate([example] * count)

    # --- bytes ----------------------------------------------------------------------------------

    def _walks(self, engine: GhostEngine) -> Walks:
        """Bytes and seconds of the walk in the current dtype of the weights."""
        if self.on_cuda:
            loss = _both(lambda again: self._walk_peaks(engine, again))
            cwsd = _both(lambda again: self._walk_peaks(engine, again, teacher=True))
        else:
            loss = cwsd = self._counted()
        # one batch of the pool pass, with a scratch vector as G and direction
        scratch = Scratch(engine.candidates, engine.candidates.dtype, engine.device)
        objective = loss_objective(engine.model)
        collected: dict[str, Any] = {"placement": scratch, "bounds": True}
        if (sketch := self._sketch(engine)) is not None:
            collected = {"sketch": sketch, "only": engine.observed_for(sketch)}
        with engine.tapped(**collected) as taps:

            def walk(batch: Batch) -> None:
                taps.begin(len(batch.input_ids))
                objective(batch, engine.head_observer(taps))[0].backward()
                taps.outputs()["dots"].cpu()

            return Walks(loss, cwsd, self._seconds(walk))

    def _sketch(self, engine: GhostEngine) -> Sketch | None:
        """The sketch of all blocks, if the walks of this run collect nothing else."""
        score, seed = self.ctx.config.score, self.ctx.config.seed
        if vectors_wanted(self.ctx):
            return None
        return sketch_with(engine, score.sketch_dim, seed, score.candidates)

    def _sizes(self) -> Iterator[int]:
        """Sizes to try for the smaller batch: half of a full batch, then half of that, etc."""
        count = max(1, self.ctx.batch_tokens // (2 * self.longest.num_tokens))
        while count:
            yield count
            count //= 2

    def _walk_peaks(
        self, engine: GhostEngine, checkpointing: bool, teacher: bool = False
    ) -> Activations | None:
        """Memory of a walk, measured as a walk does it (`passes.measure`), at half and full batch
        size."""
        model, tau = engine.model, self.ctx.config.score.tau
        objective = cwsd_objective(model, model, tau) if teacher else loss_objective(model)
        collected = Collected(sums=True, direction=not teacher, bounds=not teacher)
        if not teacher and (sketch := self._sketch(engine)) is not None:
            only = engine.observed_for(sketch)
            collected = Collected(
                sums=False, direction=False, bounds=False, sketch=sketch, only=only
            )
        for size in self._sizes():

            def batch_of(count: int, _: int, size: int = size) -> Batch:
                return self._batch(self.worst, count * size)

            found = measure(engine, objective, collected, batch_of, checkpointing)
            if found is not None:
                return found
        return None

    def _step_peaks(self, names: Sequence[str], checkpointing: bool) -> Activations | None:
        """Memory of a training step whose gradients are freed as they are computed."""
        model = self.model
        for size in self._sizes():
            with (
                suppress(torch.OutOfMemoryError),
                _gradients_of(model, names),
                fused_blocks(model),
                checkpointed(model, checkpointing),
            ):
                # the first batch is not counted: it allocates what later ones reuse
                batches = [self._batch(self.worst, count * size) for count in (1, 1, 2)]
                _, few, many = [peaks(loss_objective(model), batch) for batch in batches]
                tokens, more = (batch.input_ids.numel() for batch in batches[1:])
                lines = zip(few, many, strict=True)
                return Activations(*(LinearFit.through((tokens, a), (more, b)) for a, b in lines))
            give_back(self.device)
        return None

    def _forward_peaks(self) -> LinearFit:
        size, points = next(self._sizes()), list[tuple[int, int]]()
        for count in (size, size, 2 * size):
            before, batch = torch.cuda.memory_allocated(), self._batch(self.worst, count)
            with PeakMemory() as peak, torch.no_grad():
                example_objective(self.model, batch)
            points.append((batch.input_ids.numel(), (peak.cuda_bytes or 0) - before))
        return LinearFit.through(points[1], points[2])

    def _counted(self) -> Memory:
        """Memory without allocator statistics: saved tensors, a chunk of logits, the largest
        gradient. Recomputed activations are not measured."""
        with _gradients_of(self.model, self.everything):
            batches = [self._batch(self.worst, count) for count in (1, 2)]
            points = [(b.input_ids.numel(), saved_bytes(self.model, b)) for b in batches]
        line = LinearFit.through(*points)
        largest = max(p.numel() * p.element_size() for p in self.model.parameters())
        kept = Activations(
            replace(line, fixed=line.fixed + self._logits()),
            replace(line, fixed=line.fixed + largest),
        )
        return Memory(kept, None)

    def _logits(self) -> float:
        """Bytes of a chunk of fp32 logits and its gradient."""
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        return 2.0 * min(CHUNK_BYTES["cpu"], 4 * self.ctx.batch_tokens * vocabulary)

    # --- seconds --------------------------------------------------------------------------------

    def _seconds(self, call: Callable[[Batch], object]) -> LinearFit:
        """Seconds per batch as a function of its tokens, with examples of median length."""
        length, half = self.typical.num_tokens, self.ctx.batch_tokens // 2
        few = max(1, (half if self.on_cuda else min(CPU_TOKENS, half)) // length)
        points = []
        for count in (few, 2 * few):
            batch = self._batch(self.typical, count)
            call(batch)  # warm up, untimed
            seconds = min(self._timed(lambda b=batch: call(b)) for _ in range(ROUNDS))
            points.append((count * length, seconds))
        line = LinearFit.through(*points)
        return replace(line, fixed=max(0.0, line.fixed))

    def _timed(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def _update_seconds(self) -> float:
        """Seconds per entry of one update of every parameter."""
        batch, seconds = self._batch(self.typical, 1), 0.0
        parameters = text_parameters(self.model)
        with SparseAdamW(parameters, None, lr=0.0, free_gradients=True) as optimizer:
            for _ in range(ROUNDS):  # only the last counts: the first allocates the moments
                example_objective(self.model, batch)[0].backward()
                seconds = self._timed(optimizer.step)
                optimizer.zero_grad()
            return seconds / max(1, optimizer.num_selected)


def _both(peaks: Callable[[bool], Activations | None]) -> Memory:
    return Memory(peaks(False), peaks(True))


@contextmanager
def _gradients_of(model: PreTrainedModel, names: Sequence[str]) -> Iterator[None]:
    """Training mode with gradients for these parameters only, each freed as soon as it is
    accumulated."""
    wanted, before = set(names), {p: p.requires_grad for p in model.parameters()}
    handles = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
        if name in wanted:
            handles.append(parameter.register_post_accumulate_grad_hook(_free))
    model.train()
    try:
        yield
    finally:
        model.eval()
        for handle in handles:
            handle.remove()
        for parameter, wants in before.items():
            parameter.requires_grad_(wants)


def _free(parameter: Tensor) -> None:
    parameter.grad = None


def saved_bytes(model: PreTrainedModel, batch: Batch) -> int:
    """Bytes that autograd saves between forward and backward, without the weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        objective, _ = example_objective(model, batch)
    del objective
    return sum(saved.values())
