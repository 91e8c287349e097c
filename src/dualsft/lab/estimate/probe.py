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
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example, collate
from dualsft.engine.checkpointing import checkpointed
from dualsft.engine.fused import HALF_DTYPES, fused_blocks
from dualsft.engine.ghost import GhostEngine, widened
from dualsft.engine.losses import CHUNK_BYTES, example_objective
from dualsft.engine.trial import measure
from dualsft.engine.walk import cwsd_objective, loss_objective
from dualsft.errors import ConfigError, RunError
from dualsft.memory.placement import Scratch
from dualsft.memory.plans import Activations, LinearFit
from dualsft.model.load import find_candidates, text_parameters
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

    def at(self, checkpointing: bool) -> Activations | None:
        return self.recomputed if checkpointing else self.kept


@dataclass(frozen=True)
class Walks:
    """The ghost walk with weights of one dtype. `seconds` is per batch, by tokens."""

    loss: Memory
    """With G, direction and bounds, but without the memory of these vectors."""
    cwsd: Memory
    seconds: LinearFit


@dataclass(frozen=True, kw_only=True)
class Probe:
    """All measurements at the model's full depth. Bytes and seconds are per batch, by tokens."""

    warmup: Memory
    """Training step on every parameter, without gradients and optimizer state."""
    finetune: Memory
    """The same if only the candidates have gradients."""
    walks: Walks
    wide: Walks
    """With fp32 weights, which some walks of a half-precision run use (`engine/precision.py`)."""
    forward: LinearFit
    """Bytes of a forward pass with the loss, without gradients."""
    step_seconds: LinearFit
    forward_seconds: LinearFit
    update_seconds: float
    """Seconds per entry of an optimizer update."""


@dataclass(frozen=True)
class Trial:
    """Examples and settings for the batches to measure."""

    longest: Example
    typical: Example
    batch_tokens: int
    pad_id: int
    padding_side: str
    candidates: str
    tau: float

    def batches(self, example: Example, device: torch.device) -> Callable[[int], Batch]:
        return lambda count: collate([example] * count, self.pad_id, self.padding_side, device)


def probe(
    build: Callable[[int], PreTrainedModel], depth: int, trial: Trial, device: torch.device
) -> Probe:
    """Measure models with one and two layers, made by `build`, and extrapolate to `depth`."""
    found = []
    for layers in DEPTHS:
        model = build(layers)
        try:
            found.append(_measured(model, trial, device))
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
            raise RunError(
                f"out of memory with {layers} of the model's {depth} layers ({problem}); lower "
                "data.max_length or score.batch_tokens, or use a machine with more memory"
            ) from None
        finally:
            del model
            give_back(device)
    one, two = found

    def line(name: str) -> LinearFit:
        return deeper(getattr(one, name), getattr(two, name), depth)

    def memory(name: str) -> Memory:
        return _deeper_memory(getattr(one, name), getattr(two, name), depth)

    def walks(name: str) -> Walks:
        few, more = getattr(one, name), getattr(two, name)
        return Walks(
            _deeper_memory(few.loss, more.loss, depth),
            _deeper_memory(few.cwsd, more.cwsd, depth),
            deeper(few.seconds, more.seconds, depth),
        )

    return Probe(
        warmup=memory("warmup"),
        finetune=memory("finetune"),
        walks=walks("walks"),
        wide=walks("wide"),
        forward=line("forward"),
        step_seconds=line("step_seconds"),
        forward_seconds=line("forward_seconds"),
        update_seconds=min(one.update_seconds, two.update_seconds),
    )


def deeper(one: LinearFit, two: LinearFit, depth: int) -> LinearFit:
    """Extrapolate a line to `depth` layers from one and two. More layers never cost less."""
    fixed, slope = (max(0.0, b - a) for a, b in ((one.fixed, two.fixed), (one.slope, two.slope)))
    return LinearFit(one.fixed + (depth - 1) * fixed, one.slope + (depth - 1) * slope)


def _deeper_memory(one: Memory, two: Memory, depth: int) -> Memory:
    def both(a: Activations | None, b: Activations | None) -> Activations | None:
        if a is None or b is None:
            return None
        return Activations(
            deeper(a.forward, b.forward, depth), deeper(a.backward, b.backward, depth)
        )

    return Memory(both(one.kept, two.kept), both(one.recomputed, two.recomputed))


def _measured(model: PreTrainedModel, trial: Trial, device: torch.device) -> Probe:
    """All measurements of one shallow model."""
    engine = _engine(model, trial.candidates)
    everything = [name for name, _ in text_parameters(model)]
    walks = wide = _walks(engine, trial)
    if any(p.dtype in HALF_DTYPES for p in model.parameters()):
        with widened(model, tensor_cores=True) as (widely,):
            wide = _walks(engine.on(widely), trial)
    if device.type == "cuda":
        names = engine.candidates.names
        warmup = _both(lambda again: _step_peaks(model, everything, trial, again))
        finetune = _both(lambda again: _step_peaks(model, names, trial, again))
        forward = _forward_peaks(model, trial)
    else:
        warmup = finetune = _counted(model, trial)
        forward = LinearFit(_logits(model, trial), 8.0 * _width(model) * 4)
    with fused_blocks(model):
        step_seconds = _seconds(_training(model), trial, device)
    return Probe(
        warmup=warmup,
        finetune=finetune,
        walks=walks,
        wide=wide,
        forward=forward,
        step_seconds=step_seconds,
        forward_seconds=_seconds(_looking(model), trial, device),
        update_seconds=_update_seconds(model, trial, device),
    )


def _walks(engine: GhostEngine, trial: Trial) -> Walks:
    """Bytes and seconds of the walk in the current dtype of the weights."""
    if engine.device.type == "cuda":
        loss = _both(lambda again: _walk_peaks(engine, trial, again))
        cwsd = _both(lambda again: _walk_peaks(engine, trial, again, teacher=True))
    else:
        loss = cwsd = _counted(engine.model, trial)
    with _walking(engine) as walk:
        return Walks(loss, cwsd, _seconds(walk, trial, engine.device))


def _engine(model: PreTrainedModel, candidates: str) -> GhostEngine:
    """Engine for a shallow model.

    Patterns that name a deep layer match nothing here; `block_linear` is measured instead.
    """
    try:
        found = find_candidates(model, candidates)
    except ConfigError:
        found = find_candidates(model, "block_linear")
    return GhostEngine(model, found)


def _width(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().hidden_size)


# --- bytes --------------------------------------------------------------------------------------


def _both(peaks: Callable[[bool], Activations | None]) -> Memory:
    return Memory(peaks(False), peaks(True))


def _walk_peaks(
    engine: GhostEngine, trial: Trial, checkpointing: bool, teacher: bool = False
) -> Activations | None:
    """Memory of a walk, measured as a walk does it (`trial.measure`), at half and full batch
    size."""
    model = engine.model
    objective = cwsd_objective(model, model, trial.tau) if teacher else loss_objective(model)
    batch = trial.batches(_labelled(trial.longest), engine.device)
    for at_once in _sizes(trial):
        found = measure(
            engine,
            objective,
            lambda count, _, many=at_once: batch(count * many),
            sums=True,
            direction=not teacher,
            bounds=not teacher,
            checkpointing=checkpointing,
        )
        if found is not None:
            return found
    return None


def _step_peaks(
    model: PreTrainedModel, names: Sequence[str], trial: Trial, checkpointing: bool
) -> Activations | None:
    """Memory of a training step whose gradients are freed as they are computed."""
    device = next(model.parameters()).device
    batch = trial.batches(_labelled(trial.longest), device)
    for at_once in _sizes(trial):
        with (
            suppress(torch.OutOfMemoryError),
            _gradients_of(model, names),
            fused_blocks(model),
            checkpointed(model, checkpointing),
        ):
            points = [_peaks(model, batch(count * at_once)) for count in (1, 1, 2)][1:]
            (tokens, ahead, back), (more, ahead_more, back_more) = points
            return Activations(
                LinearFit.through((tokens, ahead), (more, ahead_more)),
                LinearFit.through((tokens, back), (more, back_more)),
            )
        give_back(device)
    return None


def _sizes(trial: Trial) -> Iterator[int]:
    """Sizes to try for the smaller batch: half of a full batch, then half of that, and so on."""
    count = max(1, trial.batch_tokens // (2 * trial.longest.num_tokens))
    while count:
        yield count
        count //= 2


def _labelled(example: Example) -> Example:
    """The example with a label on every token: the worst case for the loss."""
    return replace(example, labels=list(example.input_ids))


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


def _peaks(model: PreTrainedModel, batch: Batch) -> tuple[int, int, int]:
    """(tokens, peak bytes of the forward pass, of the backward pass), above the memory in use."""
    before = torch.cuda.memory_allocated()
    with PeakMemory() as ahead:
        objective, _ = example_objective(model, batch)
    with PeakMemory() as back:
        objective.backward()
    peaks = [(peak.cuda_bytes or 0) - before for peak in (ahead, back)]
    return batch.input_ids.numel(), peaks[0], peaks[1]


def _forward_peaks(model: PreTrainedModel, trial: Trial) -> LinearFit:
    device = next(model.parameters()).device
    batch = trial.batches(_labelled(trial.longest), device)
    count, points = next(_sizes(trial)), []
    for many in (count, count, 2 * count):
        before, inputs = torch.cuda.memory_allocated(), batch(many)
        with PeakMemory() as peak, torch.no_grad():
            example_objective(model, inputs)
        points.append((inputs.input_ids.numel(), (peak.cuda_bytes or 0) - before))
    return LinearFit.through(points[1], points[2])


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


def _counted(model: PreTrainedModel, trial: Trial) -> Memory:
    """Memory without allocator statistics: saved tensors, a chunk of logits, the largest gradient.

    Recomputed activations are not measured.
    """
    device, names = next(model.parameters()).device, [name for name, _ in text_parameters(model)]
    batch = trial.batches(_labelled(trial.longest), device)
    with _gradients_of(model, names):
        few, many = batch(1), batch(2)
        line = LinearFit.through(
            (few.input_ids.numel(), saved_bytes(model, few)),
            (many.input_ids.numel(), saved_bytes(model, many)),
        )
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    kept = Activations(
        replace(line, fixed=line.fixed + _logits(model, trial)),
        replace(line, fixed=line.fixed + largest),
    )
    return Memory(kept, None)


def _logits(model: PreTrainedModel, trial: Trial) -> float:
    """Bytes of a chunk of fp32 logits and its gradient."""
    whole = 4 * trial.batch_tokens * int(model.config.get_text_config().vocab_size)
    return 2.0 * min(CHUNK_BYTES["cpu"], whole)


# --- seconds ------------------------------------------------------------------------------------


def _training(model: PreTrainedModel) -> Callable[[Batch], None]:
    names = [name for name, _ in text_parameters(model)]

    def step(batch: Batch) -> None:
        with _gradients_of(model, names):
            example_objective(model, batch)[0].backward()

    return step


def _looking(model: PreTrainedModel) -> Callable[[Batch], None]:
    def look(batch: Batch) -> None:
        with torch.no_grad():
            example_objective(model, batch)

    return look


@contextmanager
def _walking(engine: GhostEngine) -> Iterator[Callable[[Batch], None]]:
    """Function that runs one batch of the pool pass, with a scratch vector as G and direction."""
    scratch = Scratch(engine.candidates, engine.candidates.dtype, engine.device)
    objective = loss_objective(engine.model)
    with engine.tapped(sums=scratch, direction=scratch, bounds=True) as taps:

        def walk(batch: Batch) -> None:
            taps.begin(len(batch.input_ids))
            objective(batch, engine.head_observer(taps))[0].backward()
            taps.dots.cpu()

        yield walk


def _seconds(call: Callable[[Batch], None], trial: Trial, device: torch.device) -> LinearFit:
    """Seconds per batch as a function of its tokens, with examples of median length."""
    length = trial.typical.num_tokens
    tokens = trial.batch_tokens // 2 if device.type == "cuda" else CPU_TOKENS
    few = max(1, min(tokens, trial.batch_tokens // 2) // length)
    batch = trial.batches(trial.typical, device)
    points = []
    for count in (few, 2 * few):
        inputs = batch(count)
        call(inputs)  # warm up, untimed
        points.append((count * length, min(_timed(call, inputs, device) for _ in range(ROUNDS))))
    (less, quick), (more, slow) = points
    slope = max(0.0, (slow - quick) / (more - less))
    return LinearFit(max(0.0, quick - slope * less), slope)


def _timed(call: Callable[[Batch], None], batch: Batch, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call(batch)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _update_seconds(model: PreTrainedModel, trial: Trial, device: torch.device) -> float:
    """Seconds per entry of one update of every parameter."""
    batch = trial.batches(trial.typical, device)(1)
    with SparseAdamW(text_parameters(model), None, lr=0.0, free_gradients=True) as optimizer:
        found = []
        for _ in range(ROUNDS):  # only the last counts: the first allocates the moments
            example_objective(model, batch)[0].backward()
            _wait(device)
            start = time.perf_counter()
            optimizer.step()
            _wait(device)
            found.append(time.perf_counter() - start)
            optimizer.zero_grad()
        return found[-1] / max(1, optimizer.num_selected)
