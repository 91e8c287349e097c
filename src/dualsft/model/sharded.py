"""A model sharded by rows with FSDP2's `fully_shard`.

Each process holds its rows of every parameter (DTensors). FSDP2 gathers a block's weights before
its forward and its backward pass and frees them afterwards. Losses (Algorithm 1 lines 1, 3, 5, 6, 8
and 12) are computed inside `through`, so that the weights outside the blocks are gathered too.
Autograd stores gradients on the `gathered_parameters`. The sharded G and direction are in
`memory/placement.py`, the optimizer is `ShardedAdamW` in `train/optimizer.py`.

FSDP2's gradient reduction is not used: it averages, in the parameters' dtype, and sends all
entries. It finds no gradient to reduce, because each one is taken as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from dualsft.distributed.world import world
from dualsft.errors import ConfigError
from dualsft.model.load import decoder_blocks, empty_model, install_attention, load_model
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
    """Load a model in eval mode; each process holds its rows, rounded to `through_dtype` first.

    Rank 0 reads the files into host memory and distributes the rows one parameter at a time. The
    other processes never hold more than one full parameter.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    install_attention(device)
    present, host = world(), torch.device("cpu")
    whole = load_model(folder, dtype, host, attention, remote) if present.main else None
    present.barrier()
    model = empty_model(folder, remote, dtype, attention)
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
        for name, buffer in list(model.named_buffers()):  # FSDP2 does not shard buffers
            value = present.on_main(lambda name=name: given[name].cpu())
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, value.to(device, buffer.dtype))
    vars(model)[_GATHERED] = _find_gathered(model)
    vars(model)[_SOURCE] = (folder, device, attention, remote)
    return model.eval()


def wide_copy(model: nn.Module) -> PreTrainedModel:
    """An fp32 copy of a sharded model with the same values, read again from its files."""
    folder, device, *more = vars(model)[_SOURCE]
    stored = next(iter(model.parameters())).dtype
    wide = load_sharded(folder, torch.float32, device, *more, through_dtype=stored)
    for buffer in wide.get_input_embeddings().buffers():
        if buffer.is_floating_point():  # Gemma rounds its embedding scale to the weights' dtype
            buffer.copy_(buffer.to(stored))
    return wide


def _refuse_renamed(folder: Path, model: nn.Module, whole: nn.Module) -> None:
    """Refuse a model whose checkpoint names differ from its parameter names, under which a sharded
    model is saved."""
    ours, own = ({n for n, _ in m.named_parameters()} for m in (model, whole))
    kind = str(getattr(model.config, "model_type", ""))
    if ours != own or get_checkpoint_conversion_mapping(kind):
        raise ConfigError(
            f"model.path: {folder.name!r} ({kind}) has other parameter names in its files than in "
            "memory, so a sharded model cannot be saved; use parallel.mode=replicate"
        )


def _find_gathered(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that autograd sees: those of each module while it is unsharded."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            owner: Any = module
            found |= {n: p for n, p in owner.named_parameters(prefix) if not hasattr(p, "to_local")}
            module.reshard()
    return {name: found[name] for name, _ in model.named_parameters()}


def device_of(model: nn.Module) -> torch.device:
    """The device that the model computes on; offloaded rows are gathered on it."""
    return vars(model)[_SOURCE][1] if is_sharded(model) else next(model.parameters()).device


def local_rows(p: Tensor) -> Tensor:
    """This process's rows of a parameter; the full parameter if it is not sharded."""
    kept: Any = p.detach()
    return kept.to_local() if hasattr(kept, "to_local") else kept


def gathered_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that receive gradients, by name; the model's own if it is not sharded."""
    return vars(model)[_GATHERED] if is_sharded(model) else dict(model.named_parameters())


def set_requires_grad(model: nn.Module, name: str, on: bool) -> None:
    """Set requires_grad on a parameter and on its gathered form."""
    model.get_parameter(name).requires_grad_(on)
    gathered_parameters(model)[name].requires_grad_(on)


def through(model: nn.Module, work: Callable[[], R]) -> R:
    """Run `work` with the weights outside the blocks (embeddings, last norm, head) gathered.

    For a sharded model, `work` runs inside the root module's forward call. The root's FSDP hooks
    then gather these weights first and register the output for the backward pass.
    """
    if not is_sharded(model):
        return work()
    assert "forward" not in vars(model), "through() must not be nested on one model"
    model.forward = lambda _: work()  # FSDP of torch < 2.12 requires an argument to move
    try:
        result = model(None)
    finally:
        del model.forward
    if not torch.is_grad_enabled():
        release(model)  # there is no backward pass that would reshard them
    return result


def release(model: nn.Module) -> None:
    """Free a sharded model's weights outside the blocks after a call without a backward pass."""
    if is_sharded(model):
        root: Any = model
        root.reshard()


def entries_of(p: Tensor, index: Tensor) -> Tensor:
    """A parameter's values at flat indices, which lie in this process's rows, in host memory."""
    rows = local_rows(p).reshape(-1)
    first, _ = world().held(p.shape)
    return rows[index.to(rows.device) - first].cpu()


def weights_vector(model: nn.Module, names: Iterable[str]) -> ParamVector:
    """The model's own parameters as a vector, sharded if the model is."""
    parameters = {name: model.get_parameter(name) for name in names}
    rows = {name: local_rows(p) for name, p in parameters.items()}
    if not is_sharded(model):
        return ParamVector(rows)
    return ShardedVector(rows, {name: Form(p.dtype, p.shape) for name, p in parameters.items()})


def saved_weights(model: nn.Module) -> ShardedVector:
    """The parameters and the persistent buffers of a sharded model, as one vector."""
    saved = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    rows = {name: local_rows(p) for name, p in model.named_parameters()}
    for name, buffer in buffers.items():  # every process holds all of it
        rows[name] = buffer.reshape(-1)[slice(*world().own(buffer.shape))]
    every = {**dict(model.named_parameters()), **buffers}
    return ShardedVector(rows, {name: Form(t.dtype, t.shape) for name, t in every.items()})
