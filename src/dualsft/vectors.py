"""ParamVector: the one type for every candidate-sized thing.

G, v_new, v_prior, ĉ, u and s_θ of ALGORITHM.md §1 are all vectors over the same candidate
parameters, in `named_parameters` order. They are held as one fp32 tensor a parameter (fp64 when the
model is fp64), reduced in fp64, and stored as safetensors under the parameters' own names and
shapes, so that any program can read them beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualsft.errors import RunError

CHUNK = 1 << 22  # entries handled at a time where a temporary copy is needed


def accumulation_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """fp32 for every model, fp64 for an fp64 model: the dtype of G and everything beside it."""
    return torch.float64 if model_dtype == torch.float64 else torch.float32


def reduction_dtype(device: torch.device) -> torch.dtype:
    """What sums over layers, tokens and examples are kept in on a device: `mps` has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def host_double(x: Tensor) -> Tensor:
    """In fp64, on the tensor's own device when that has it, otherwise in the host's memory."""
    return (x if reduction_dtype(x.device) == torch.float64 else x.cpu()).double()


class ParamVector(Mapping[str, Tensor]):
    """An ordered mapping parameter name → tensor, with the algebra of one long vector."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @classmethod
    def zeros(cls, like: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> ParamVector:
        """A zero vector over the parameters of `like`; by default in their accumulation dtype."""
        return cls(
            {
                name: torch.zeros(
                    p.shape, dtype=dtype or accumulation_dtype(p.dtype), device=p.device
                )
                for name, p in like.items()
            }
        )

    @property
    def num_entries(self) -> int:
        return sum(t.numel() for t in self.tensors.values())

    def combine(self, function: Callable[..., Tensor], *others: ParamVector) -> ParamVector:
        """`function` applied parameter by parameter to this vector and the others."""
        return ParamVector(
            {name: function(t, *(o[name] for o in others)) for name, t in self.tensors.items()}
        )

    def scaled(self, factor: float) -> ParamVector:
        return self.combine(lambda t: t * factor)

    def plus(self, other: ParamVector, factor: float = 1.0) -> ParamVector:
        """self + factor · other."""
        return self.combine(lambda a, b: torch.add(a, b, alpha=factor), other)

    def dot(self, other: Mapping[str, Tensor]) -> float:
        """⟨self, other⟩, every product and sum in fp64."""
        return float(sum(_dot64(t, other[name]) for name, t in self.tensors.items()))

    def norm(self) -> float:
        return float(sum(v * v for v in self.block_norms().values()) ** 0.5)

    def block_norms(self) -> dict[str, float]:
        """‖·‖_F of each parameter's block."""
        return {name: _dot64(t, t) ** 0.5 for name, t in self.tensors.items()}

    def cosine(self, other: ParamVector) -> float | None:
        """Cosine of the angle, or None when either vector is zero."""
        norms = self.norm() * other.norm()
        return self.dot(other) / norms if norms > 0 else None

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter that holds a NaN or an infinity, if any."""
        for name, t in self.tensors.items():
            if not bool(torch.isfinite(t).all()):
                return name
        return None

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ParamVector:
        return self.combine(lambda t: t.to(device=device, dtype=dtype or t.dtype))

    def save(self, path: Path, **metadata: object) -> None:
        """Write safetensors under the parameters' names; metadata goes to the header."""
        nonfinite = self.first_nonfinite()
        if nonfinite is not None:
            raise RunError(f"{path.name}: {nonfinite} holds a non-finite number; nothing written")
        header = {key: json.dumps(value) for key, value in metadata.items()}
        save_tensors(path, {name: t.contiguous() for name, t in self.tensors.items()}, header)

    @classmethod
    def load(cls, path: Path, names: list[str], device: torch.device | str = "cpu") -> ParamVector:
        """Read the vector over exactly `names`, in that order."""
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            stored = set(file.keys())
            if stored != set(names):
                odd = sorted(stored ^ set(names))[:3]
                raise RunError(f"{path}: its parameters are not the model's candidates ({odd} …)")
            return cls({name: file.get_tensor(name) for name in names})


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """A safetensors file whose bytes depend on its content alone.

    The library writes the header's metadata in random order; it is put in order afterwards, in
    place, since the length does not change.
    """
    save_file(dict(tensors), str(path), metadata={"format": "pt", **header})
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        stored = json.loads(file.read(size))
        stored["__metadata__"] = dict(sorted(stored["__metadata__"].items()))
        ordered = json.dumps(stored, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(ordered) <= size, "the ordered header is longer than the one written"
        file.seek(8)
        file.write(ordered.ljust(size))


def _dot64(a: Tensor, b: Tensor) -> float:
    total = 0.0
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), CHUNK):
        x = host_double(a[start : start + CHUNK])
        total += float(torch.dot(x, host_double(b[start : start + CHUNK]).to(x.device)))
    return total
