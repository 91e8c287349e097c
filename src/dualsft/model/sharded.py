"""A model held by rows: FSDP2's `fully_shard`, and what the rest needs to know of it.

Each process has its rows of every parameter (DTensors). FSDP2 gathers a block's weights before its
forward and its backward pass and frees them after it. Losses (Algorithm 1 lines 1, 3, 5, 6, 8 and
12) are computed `through` the model, so that its outer weights are gathered too; gradients arrive
at the `gathered_parameters`. G and the direction by rows are in `memory/sharded_placement.py`,
training in `train/sharded.py`.

FSDP2's own reduction of gradients is never used: it averages, in the parameters' dtype, and sends
everything. It finds no gradient to reduce, because each is taken as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from dualsft.distributed.world import world
from dualsft.errors import ConfigError
from dualsft.model import attention as attention_kernels
from dualsft.model.load import decoder_blocks, load_model, meta_model
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import ParamVector, ShardedVector

R = TypeVar("R")

_GATHERED = "_dualsft_gathered"
_SOURCE = "_dualsft_source"


def is_sharded(model: nn.Module) -> bool:
    return _GATHERED in vars(model)


def load_sharded(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    remote: bool = False,
    through_dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """A model in eval mode of which every process has its rows, rounded to `through_dtype` first.

    The first process reads the files, into the host's memory, and deals the rows out one parameter
    at a time; the others never have more than one parameter whole.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    attention_kernels.install(device)
    present = world()
    host = torch.device("cpu")
    whole = load_model(folder, dtype, host, attention, remote) if present.main else None
    present.barrier()
    model = meta_model(folder, dtype, attention, remote)
    if whole is not None:
        _refuse_renamed(folder, model, whole)
    mesh = init_device_mesh(device.type, (present.size,))
    pinned = device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if present.offload else OffloadPolicy()
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": policy}
    for block in decoder_blocks(model)[1]:
        fully_shard(block, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)
    model.to_empty(device=host if present.offload else device)
    source = dict(whole.named_parameters()) if whole is not None else {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            full = torch.empty(p.shape, dtype=p.dtype, device=device)
            if name in source:
                full.copy_(source[name].to(through_dtype or p.dtype))
            rows = distribute_tensor(full, mesh, [Shard(0)])
            local_rows(p).copy_(rows.to_local())
        given = dict(whole.named_buffers()) if whole is not None else {}
        for name, buffer in list(model.named_buffers()):  # they are not gathered: none waits
            value = present.decided(partial(_on_host, given, name)).to(device, buffer.dtype)
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, value)
    _remember_gathered(model)
    vars(model)[_SOURCE] = (folder, device, attention, remote)
    return model.eval()


def wide_copy(model: nn.Module) -> PreTrainedModel:
    """A sharded model with fp32 weights of the same numbers, read again from its files."""
    folder, device, *more = vars(model)[_SOURCE]
    stored = next(iter(model.parameters())).dtype
    wide = load_sharded(folder, torch.float32, device, *more, through_dtype=stored)
    for buffer in wide.get_input_embeddings().buffers():
        if buffer.is_floating_point():  # Gemma rounds its scale to the weights' dtype
            buffer.copy_(buffer.to(stored))
    return wide


def _on_host(tensors: dict[str, Tensor], name: str) -> Tensor:
    return tensors[name].cpu()


def _refuse_renamed(folder: Path, model: nn.Module, whole: nn.Module) -> None:
    """A sharded model is saved under the names that it has in memory."""
    ours, own = ({n for n, _ in m.named_parameters()} for m in (model, whole))
    kind = str(getattr(model.config, "model_type", ""))
    if ours != own or get_checkpoint_conversion_mapping(kind):
        raise ConfigError(
            f"model.path: {folder.name!r} ({kind}) has other names in its files than in memory, "
            "where a sharded model is saved from; use parallel.mode=replicate"
        )


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes: its parameters' device, but of rows that wait in host memory the
    GPU that they are gathered on."""
    if is_sharded(model):
        return vars(model)[_SOURCE][1]
    return next(model.parameters()).device


def local_rows(p: Tensor) -> Tensor:
    """This process's rows of a parameter; all of them when it is not sharded."""
    kept: Any = p.detach()
    return kept.to_local() if hasattr(kept, "to_local") else kept


def _remember_gathered(model: nn.Module) -> None:
    """Keep the parameters that autograd sees: what a module has while its weights are gathered."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        module.unshard()
        owner: Any = module
        for name, p in owner.named_parameters(prefix):
            if not hasattr(p, "to_local"):
                found[name] = p
        module.reshard()
    vars(model)[_GATHERED] = {name: found[name] for name, _ in model.named_parameters()}


def gathered_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters on which autograd leaves gradients, by name; a model's own unless sharded."""
    return vars(model)[_GATHERED] if is_sharded(model) else dict(model.named_parameters())


def set_requires_grad(model: nn.Module, name: str, on: bool) -> None:
    """Of a parameter, in both of its forms."""
    model.get_parameter(name).requires_grad_(on)
    gathered_parameters(model)[name].requires_grad_(on)


def through(model: nn.Module, work: Callable[[], R]) -> R:
    """`work` with the model's outer weights (embeddings, last norm, head) at hand.

    What is computed on a sharded model happens inside the root's forward call, so that its hooks
    gather them before, and know of what comes out for the backward pass.
    """
    if not is_sharded(model):
        return work()
    assert "forward" not in vars(model), "a model's work is not nested in itself"
    model.forward = lambda _: work()  # FSDP of torch < 2.12 wants an argument to move
    try:
        result = model(None)
    finally:
        del model.forward
    if not torch.is_grad_enabled():
        release(model)  # no backward pass will
    return result


def release(model: nn.Module) -> None:
    """Free a sharded model's outer weights after a call of it without a backward pass."""
    if is_sharded(model):
        root: Any = model
        root.reshard()


def entries_of(p: Tensor, index: Tensor) -> Tensor:
    """A parameter's values at sorted flat indices, in the host's memory; when it is sharded the
    indices are in this process's rows."""
    rows = local_rows(p).reshape(-1)
    first, _ = world().held(p.shape)
    return rows[index.to(rows.device) - first].cpu()


def weights_vector(model: nn.Module, names: Iterable[str]) -> ParamVector:
    """A model's own parameters as a vector, however the model is held."""
    parameters = {name: model.get_parameter(name) for name in names}
    rows = {name: local_rows(p) for name, p in parameters.items()}
    if not is_sharded(model):
        return ParamVector(rows)
    return ShardedVector(rows, {name: Form(p.dtype, p.shape) for name, p in parameters.items()})
