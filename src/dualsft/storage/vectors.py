"""Vectors over the candidate parameters.

G, v_new, v_prior, ĉ, u and s_θ (Algorithm 1 lines 3 to 8) are vectors over the same candidate
parameters, in `named_parameters` order: one fp32 tensor per parameter (fp64 if the model is fp64).
Reductions use fp64. Files are safetensors under the parameters' names and shapes, so that any
program can read them alongside the model.

A `ParamVector` holds its tensors in memory. A `LazyVector` reads its entries from a file of the run
folder, or computes them from other vectors, on access. All operations are elementwise, so a flat
chunk of a result depends only on the same chunk of its inputs: vectors of tens of gigabytes are
combined, reduced and written with a few chunks of `CHUNK` entries in memory. `held` materializes a
vector, in the required dtype.

With several processes (`distributed/world.py`) each reduces the rows it owns, and the totals are
summed. A `ShardedVector` holds only these rows; rank 0 writes it to a file and receives the rows of
the others in chunks.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from dualsft.distributed.world import world
from dualsft.errors import CheckError, RunError
from dualsft.storage.tensor_files import CHUNK as CHUNK
from dualsft.storage.tensor_files import Form, TensorFile, file_order, write_tensors
from dualsft.system.paths import Place

Seen = dict[int, Tensor]
"""Cache of one chunk by id of the vector, so that a shared input is computed only once."""


def accumulation_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """dtype of G and all other vectors: fp64 for an fp64 model, else fp32."""
    return torch.float64 if model_dtype == torch.float64 else torch.float32


def reduction_dtype(device: torch.device) -> torch.dtype:
    """dtype of sums over layers, tokens and examples: fp64, or fp32 on `mps`, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def host_double(x: Tensor) -> Tensor:
    """Convert to fp64, on the tensor's device if it supports fp64, else on the CPU."""
    return (x if reduction_dtype(x.device) == torch.float64 else x.cpu()).double()


class Vector(Mapping[str, Tensor]):
    """An ordered mapping from parameter name to tensor, with the operations of one long vector.

    Results of operations are lazy: they reflect later changes of the input tensors.
    """

    forms: Mapping[str, Form]
    """dtype and shape of each parameter's tensor, in order."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the entries on access."""

    @abstractmethod
    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        """Flat entries of a parameter from start to stop. Read-only: may be a view."""

    def __getitem__(self, name: str) -> Tensor:
        form = self.forms[name]
        return self.piece(name, 0, form.num_entries).view(form.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    def __contains__(self, name: object) -> bool:
        return name in self.forms  # Mapping.__contains__ would compute the tensor

    @property
    def num_entries(self) -> int:
        return sum(form.num_entries for form in self.forms.values())

    @property
    def num_bytes(self) -> int:
        """Memory that `held` needs if dtypes are kept."""
        return sum(form.num_bytes for form in self.forms.values())

    def combine(self, function: Callable[..., Tensor], *others: Vector) -> LazyVector:
        """Elementwise `function` of this and other vectors, with this vector's dtype and device."""

        def compute(name: str, start: int, stop: int, seen: Seen) -> Tensor:
            own = self.piece(name, start, stop, seen)
            return function(own, *(o.piece(name, start, stop, seen).to(own.device) for o in others))

        return LazyVector(self.forms, self.device, compute)

    def scaled(self, factor: float) -> LazyVector:
        return self.combine(lambda t: t * factor)

    def plus(self, other: Vector, factor: float = 1.0) -> LazyVector:
        """self + factor · other."""
        return self.combine(lambda a, b: torch.add(a, b, alpha=factor), other)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> LazyVector:
        forms = {n: Form(dtype or form.dtype, form.shape) for n, form in self.forms.items()}

        def compute(name: str, start: int, stop: int, seen: Seen) -> Tensor:
            return self.piece(name, start, stop, seen).to(device, forms[name].dtype)

        return LazyVector(forms, torch.device(device), compute)

    def restricted(self, indices: Mapping[str, Tensor]) -> LazyVector:
        """m ⊙ self: the entries at the sorted flat `indices`, zero elsewhere."""

        def compute(name: str, start: int, stop: int, seen: Seen) -> Tensor:
            entries = self.piece(name, start, stop, seen)
            chosen = torch.zeros_like(entries)
            if name in indices:
                index = indices[name]
                first, last = torch.searchsorted(index, torch.tensor([start, stop]).to(index))
                where = (index[first:last] - start).to(entries.device)
                chosen[where] = entries[where]
            return chosen

        return LazyVector(self.forms, self.device, compute)

    def held(
        self,
        device: torch.device | str | None = None,
        dtype_of: Callable[[str], torch.dtype] | None = None,
    ) -> ParamVector:
        """Materialize the vector; `dtype_of` maps a parameter name to its dtype."""
        tensors = {}
        for name, form in self.forms.items():
            dtype = form.dtype if dtype_of is None else dtype_of(name)
            block = torch.empty(form.num_entries, dtype=dtype, device=device or self.device)
            for start, stop in form.chunks():
                block[start:stop] = self.piece(name, start, stop)
            tensors[name] = block.view(form.shape)
        return ParamVector(tensors)

    def dot(self, other: Mapping[str, Tensor]) -> float:
        """⟨self, other⟩, with products and sums in fp64."""
        second = other if isinstance(other, Vector) else ParamVector(other)
        return Products({"a": self, "b": second}, [("a", "b")]).dot("a", "b")

    def norm(self) -> float:
        return Products({"a": self}, [("a", "a")]).norm("a")

    def block_norms(self) -> dict[str, float]:
        """‖·‖_F of each parameter's tensor."""
        return Products({"a": self}, [("a", "a")]).block_norms("a")

    def cosine(self, other: Vector) -> float | None:
        """Cosine of the angle, or None if either vector is zero."""
        pairs = [("a", "a"), ("b", "b"), ("a", "b")]
        return Products({"a": self, "b": other}, pairs).cosine("a", "b")

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter with a NaN or an infinity, or None."""
        # Each process checks its own rows; the smallest index over all processes is the result.
        names = list(self.forms)
        found = next(filter(self._is_nonfinite, names), None)
        numbers = world().gather(len(names) if found is None else names.index(found))
        return names[min(numbers)] if min(numbers) < len(names) else None

    def _is_nonfinite(self, name: str) -> bool:
        return not all(
            bool(torch.isfinite(self.piece(name, start, stop)).all())
            for start, stop in world().own_chunks(self.forms[name].shape)
        )

    def save(self, path: Place, **metadata: object) -> None:
        """Write a safetensors file under the parameters' names, with metadata in the header."""

        def look(name: str, entries: Tensor) -> None:
            if not bool(torch.isfinite(entries).all()):
                raise CheckError(f"{path.name}: {name} holds a non-finite number; nothing written")

        header = {key: json.dumps(value) for key, value in metadata.items()}
        self.write(path, header, look)

    def write(
        self,
        path: Place,
        header: Mapping[str, str],
        look: Callable[[str, Tensor], None] = lambda name, entries: None,
    ) -> None:
        """Write all entries to a file on rank 0; `look` sees every chunk first and may raise."""
        if not world().main:
            for name in file_order(self.forms):
                for _ in self.collected(name):
                    raise AssertionError("only rank 0 receives entries")
            return

        def pieces(name: str) -> Iterator[Tensor]:
            for entries in self.collected(name):
                look(name, entries)
                yield entries

        write_tensors(path, self.forms, pieces, header)

    def share(self, name: str, rank: int) -> tuple[int, int]:
        """Flat range of a parameter that a process holds if vectors are sharded."""
        return world().own(self.forms[name].shape, rank)

    def collected(self, name: str) -> Iterator[Tensor]:
        """Yield a parameter's entries in chunks, in order, on rank 0; other ranks only send."""
        present, form = world(), self.forms[name]
        owners = range(present.size) if present.sharded else (0,)
        for owner in owners:
            first, last = self.share(name, owner) if present.sharded else (0, form.num_entries)
            for start in range(first, last, CHUNK):
                stop = min(start + CHUNK, last)
                like = torch.empty(stop - start if present.main else 0, dtype=form.dtype)
                make = partial(self.piece, name, start, stop)
                entries = present.at_main(owner, make, like)
                if entries is not None:
                    yield entries


class ParamVector(Vector):
    """A vector in memory, one tensor per parameter."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors)
        self.forms = {name: Form(t.dtype, t.shape) for name, t in self.tensors.items()}

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        return self.tensors[name].reshape(-1)[start:stop]

    def held(
        self,
        device: torch.device | str | None = None,
        dtype_of: Callable[[str], torch.dtype] | None = None,
    ) -> ParamVector:
        """As `Vector.held`; tensors already in the right dtype and device are not copied."""
        return ParamVector(
            {
                name: t.to(device or t.device, t.dtype if dtype_of is None else dtype_of(name))
                for name, t in self.tensors.items()
            }
        )

    @classmethod
    def zeros(cls, like: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> ParamVector:
        """Zeros with the shapes of `like`; by default in the accumulation dtype."""
        return cls(
            {
                name: torch.zeros(
                    p.shape, dtype=dtype or accumulation_dtype(p.dtype), device=p.device
                )
                for name, p in like.items()
            }
        )

    @classmethod
    def load(cls, path: Place, names: list[str], device: torch.device | str = "cpu") -> ParamVector:
        """Load the vector over exactly `names`, in that order."""
        return LazyVector.open(path, names, device).held()


class ShardedVector(ParamVector):
    """A vector of which this process holds its own rows, one tensor per parameter."""

    def __init__(self, tensors: Mapping[str, Tensor], forms: Mapping[str, Form]) -> None:
        self.tensors = dict(tensors)
        self.forms = forms

    @classmethod
    def blank(cls, forms: Mapping[str, Form]) -> ShardedVector:
        """Zeros that take no memory until they are copied (expanded scalars)."""
        tensors = {}
        for name, form in forms.items():
            first, last = world().own(form.shape)
            shape = (max(0, last - first) // max(1, form.shape[1:].numel()), *form.shape[1:])
            tensors[name] = torch.zeros((), dtype=form.dtype).expand(shape)
        return cls(tensors, forms)

    def __getitem__(self, name: str) -> Tensor:
        raise AssertionError(f"{name}: no process holds all of a sharded vector")

    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        first, last = world().own(self.forms[name].shape)
        assert first <= start and stop <= max(first, last), f"{name}: not this process's rows"
        return self.tensors[name].reshape(-1)[start - first : stop - first]


class PartedVector(ParamVector):
    """1-D tensors (indices, values) of which each process holds a consecutive part."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        counts = world().gather({name: t.numel() for name, t in tensors.items()})
        self._counts = {name: [found[name] for found in counts] for name in tensors}
        self.forms = {
            name: Form(t.dtype, torch.Size([sum(self._counts[name])]))
            for name, t in self.tensors.items()
        }

    def share(self, name: str, rank: int) -> tuple[int, int]:
        counts = self._counts[name]
        return sum(counts[:rank]), sum(counts[: rank + 1])

    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        first, _ = self.share(name, world().rank)
        return self.tensors[name][start - first : stop - first]


def of_all(tensors: Mapping[str, Tensor]) -> ParamVector:
    """Wrap 1-D tensors as a vector; in a sharded world each process passes its own part."""
    return PartedVector(tensors) if world().sharded else ParamVector(tensors)


class LazyVector(Vector):
    """A vector whose entries are computed on access and not stored."""

    def __init__(
        self,
        forms: Mapping[str, Form],
        device: torch.device,
        compute: Callable[[str, int, int, Seen], Tensor],
    ) -> None:
        self.forms = forms
        self._device = device
        self._compute = compute

    @property
    def device(self) -> torch.device:
        return self._device

    @classmethod
    def open(cls, path: Place, names: list[str], device: torch.device | str = "cpu") -> LazyVector:
        """Open a stored vector over exactly `names`, in that order."""
        file, where = TensorFile(path), torch.device(device)
        if file.forms.keys() != set(names):
            odd = sorted(file.forms.keys() ^ set(names))[:3]
            raise RunError(
                f"{path}: its parameters are not the model's candidates ({odd} …); remove its "
                "folder and run the same command again"
            )

        def compute(name: str, start: int, stop: int, seen: Seen) -> Tensor:
            return file.piece(name, start, stop, where)

        return cls({name: file.forms[name] for name in names}, where, compute)

    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        seen = {} if seen is None else seen
        if id(self) not in seen:
            seen[id(self)] = self._compute(name, start, stop, seen)
        return seen[id(self)]


class Products:
    """⟨a, b⟩ for the given pairs of vectors, per parameter, in fp64.

    Every entry is read once, regardless of the number of pairs, by the process that owns it.
    """

    def __init__(self, vectors: Mapping[str, Vector], pairs: Sequence[tuple[str, str]]) -> None:
        forms = next(iter(vectors.values())).forms
        self._names, self._pairs = list(forms), list(pairs)
        self._sums: list[Tensor] = []
        for name, form in forms.items():
            total: Tensor | None = None
            for start, stop in world().own_chunks(form.shape):
                wide = _doubles(vectors, name, start, stop)
                here = torch.stack([torch.dot(wide[a], wide[b]) for a, b in pairs])
                total = here if total is None else total + here
            assert total is not None, "own_chunks yields at least one chunk"
            self._sums.append(total)
        if world().size > 1:
            _ = self._blocks  # a collective: run it on every process, whichever reads the result

    @cached_property
    def _blocks(self) -> dict[tuple[str, str], dict[str, float]]:
        """Products by pair and parameter; synchronizes with the device once."""
        sums = torch.stack([total.to(self._sums[0].device) for total in self._sums]).cpu()
        columns = world().sum_array(sums.numpy()).T.tolist()
        return {
            pair: dict(zip(self._names, column, strict=True))
            for pair, column in zip(self._pairs, columns, strict=True)
        }

    def dot(self, a: str, b: str) -> float:
        return float(sum(self._blocks[a, b].values()))

    def norm(self, a: str) -> float:
        return float(sum(v * v for v in self.block_norms(a).values()) ** 0.5)

    def block_norms(self, a: str) -> dict[str, float]:
        """‖·‖_F of each parameter's tensor; needs the pair (a, a)."""
        return {name: total**0.5 for name, total in self._blocks[a, a].items()}

    def cosine(self, a: str, b: str) -> float | None:
        """Cosine of the angle, or None if either vector is zero."""
        norms = self.norm(a) * self.norm(b)
        return self.dot(a, b) / norms if norms > 0 else None


def _doubles(vectors: Mapping[str, Vector], name: str, start: int, stop: int) -> dict[str, Tensor]:
    """The same chunk of every vector in fp64, on the device of the first."""
    seen: Seen = {}
    made: dict[int, Tensor] = {}
    device: torch.device | None = None
    for vector in vectors.values():
        if id(vector) not in made:
            wide = host_double(vector.piece(name, start, stop, seen))
            device = device or wide.device
            made[id(vector)] = wide.to(device)
    return {label: made[id(vector)] for label, vector in vectors.items()}


def save_tensors(path: Place, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file whose bytes depend only on its content.

    A lazy vector is written in chunks, without materializing it.
    """
    vector = tensors if isinstance(tensors, Vector) else ParamVector(tensors)
    vector.write(path, header)
