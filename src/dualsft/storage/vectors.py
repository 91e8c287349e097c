"""Vectors over the candidate parameters: the one kind of every candidate-sized thing.

G, v_new, v_prior, ĉ, u and s_θ of ALGORITHM.md §1 (Algorithm 1 lines 3 to 8) are all vectors over
the same candidate parameters, in `named_parameters` order: one fp32 tensor a parameter (fp64 when
the model is fp64), reduced in fp64, stored as safetensors under the parameters' own names and
shapes, so that any program can read them beside the model.

A `ParamVector` holds its tensors. A `LazyVector` holds nothing: its entries are read from a file of
the run folder, or computed from other vectors, when they are asked for. All algebra is elementwise,
so any flat piece of a result is made from the same pieces of its parts: vectors of tens of
gigabytes are combined, reduced and written with a few chunks of `CHUNK` entries alive at a time.
`held` computes a whole vector, in the dtype that is needed of it.

Of many processes (`distributed/world.py`) each reduces the rows that are its own, and the totals
meet. A `ShardedVector` holds no others; it is written by the first process, to which the others
send theirs a chunk at a time.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor

from dualsft.distributed.world import world
from dualsft.errors import RunError
from dualsft.storage.tensor_files import CHUNK as CHUNK
from dualsft.storage.tensor_files import Form, TensorFile, file_order, write_tensors
from dualsft.system.paths import Place

Seen = dict[int, Tensor]
"""The pieces of one place that are computed already, by their vector: no part is read twice."""


def accumulation_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """fp32 for every model, fp64 for an fp64 model: the dtype of G and everything beside it."""
    return torch.float64 if model_dtype == torch.float64 else torch.float32


def reduction_dtype(device: torch.device) -> torch.dtype:
    """What sums over layers, tokens and examples are kept in on a device: `mps` has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def host_double(x: Tensor) -> Tensor:
    """In fp64, on the tensor's own device when that has it, otherwise in the host's memory."""
    return (x if reduction_dtype(x.device) == torch.float64 else x.cpu()).double()


class Vector(Mapping[str, Tensor]):
    """An ordered mapping parameter name → tensor, with the algebra of one long vector.

    What the algebra gives is lazy: it sees later changes of the tensors it is made from.
    """

    forms: Mapping[str, Form]
    """dtype and shape of each parameter's block, in order."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its entries are when they are asked for."""

    @abstractmethod
    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        """The flat entries from start to stop of a parameter's block, not to be written to."""

    def __getitem__(self, name: str) -> Tensor:
        form = self.forms[name]
        return self.piece(name, 0, form.num_entries).view(form.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    def __contains__(self, name: object) -> bool:
        return name in self.forms  # a mapping's own would compute the block

    @property
    def num_entries(self) -> int:
        return sum(form.num_entries for form in self.forms.values())

    @property
    def num_bytes(self) -> int:
        """What `held` takes when it keeps the dtypes."""
        return sum(form.num_bytes for form in self.forms.values())

    def factor(self, name: str, dtype: torch.dtype) -> Tensor:
        """This parameter's block on the device that computes, in the dtype of a product."""
        return self[name].to(dtype)

    def combine(self, function: Callable[..., Tensor], *others: Vector) -> LazyVector:
        """An elementwise `function` of this vector and the others, in its dtype, on its device."""

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
        """The entries at these sorted flat indices, zero elsewhere: m ⊙ self."""

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
        """Computed as a whole, each parameter in the dtype that `dtype_of` its name says."""
        tensors = {}
        for name, form in self.forms.items():
            dtype = form.dtype if dtype_of is None else dtype_of(name)
            block = torch.empty(form.num_entries, dtype=dtype, device=device or self.device)
            for start, stop in form.chunks():
                block[start:stop] = self.piece(name, start, stop)
            tensors[name] = block.view(form.shape)
        return ParamVector(tensors)

    def dot(self, other: Mapping[str, Tensor]) -> float:
        """⟨self, other⟩, every product and sum in fp64."""
        second = other if isinstance(other, Vector) else ParamVector(other)
        return Products({"a": self, "b": second}, [("a", "b")]).dot("a", "b")

    def norm(self) -> float:
        return Products({"a": self}, [("a", "a")]).norm("a")

    def block_norms(self) -> dict[str, float]:
        """‖·‖_F of each parameter's block."""
        return Products({"a": self}, [("a", "a")]).block_norms("a")

    def cosine(self, other: Vector) -> float | None:
        """Cosine of the angle, or None when either vector is zero."""
        pairs = [("a", "a"), ("b", "b"), ("a", "b")]
        return Products({"a": self, "b": other}, pairs).cosine("a", "b")

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter that holds a NaN or an infinity, if any."""
        names = list(self.forms)
        found = next(filter(self._is_nonfinite, names), None)
        numbers = world().answers(len(names) if found is None else names.index(found))
        return names[min(numbers)] if min(numbers) < len(names) else None

    def _is_nonfinite(self, name: str) -> bool:
        return not all(
            bool(torch.isfinite(self.piece(name, start, stop)).all())
            for start, stop in world().own_chunks(self.forms[name].shape)
        )

    def save(self, path: Place, **metadata: object) -> None:
        """Write safetensors under the parameters' names; metadata goes to the header."""

        def look(name: str, entries: Tensor) -> None:
            if not bool(torch.isfinite(entries).all()):
                raise RunError(f"{path.name}: {name} holds a non-finite number; nothing written")

        header = {key: json.dumps(value) for key, value in metadata.items()}
        self.write(path, header, look)

    def write(
        self,
        path: Place,
        header: Mapping[str, str],
        look: Callable[[str, Tensor], None] = lambda name, entries: None,
    ) -> None:
        """A file of all entries, written by the first process; `look` may refuse them."""
        if not world().main:
            for name in file_order(self.forms):
                for _ in self.collected(name):
                    raise AssertionError("only the first process is given entries")
            return

        def pieces(name: str) -> Iterator[Tensor]:
            for entries in self.collected(name):
                look(name, entries)
                yield entries

        write_tensors(path, self.forms, pieces, header)

    def share(self, name: str, rank: int) -> tuple[int, int]:
        """The flat range of a parameter's block that a process has when vectors are sharded."""
        return world().own(self.forms[name].shape, rank)

    def collected(self, name: str) -> Iterator[Tensor]:
        """A parameter's entries in order, chunk by chunk, in the first process; the others send."""
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
    """A vector that is in memory, one tensor a parameter."""

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
        """As every vector's; blocks that are right already are shared, not copied."""
        return ParamVector(
            {
                name: t.to(device or t.device, t.dtype if dtype_of is None else dtype_of(name))
                for name, t in self.tensors.items()
            }
        )

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

    @contextmanager
    def lent(self, name: str) -> Iterator[Tensor]:
        """This parameter's block on the device that computes, to be added to."""
        yield self.tensors[name]

    @classmethod
    def load(cls, path: Place, names: list[str], device: torch.device | str = "cpu") -> ParamVector:
        """Read the vector over exactly `names`, in that order."""
        return LazyVector.open(path, names, device).held()


class ShardedVector(ParamVector):
    """A vector of which this process has its own rows in memory, one tensor a parameter."""

    def __init__(self, tensors: Mapping[str, Tensor], forms: Mapping[str, Form]) -> None:
        self.tensors = dict(tensors)
        self.forms = forms

    @classmethod
    def blank(cls, forms: Mapping[str, Form]) -> ShardedVector:
        """Zeros that take no memory until they are moved."""
        tensors = {}
        for name, form in forms.items():
            first, last = world().own(form.shape)
            shape = (max(0, last - first) // max(1, form.shape[1:].numel()), *form.shape[1:])
            tensors[name] = torch.zeros((), dtype=form.dtype).expand(shape)
        return cls(tensors, forms)

    def __getitem__(self, name: str) -> Tensor:
        raise AssertionError(f"{name}: no process has all of a sharded vector")

    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        first, last = world().own(self.forms[name].shape)
        assert first <= start and stop <= max(first, last), f"{name}: not this process's rows"
        return self.tensors[name].reshape(-1)[start - first : stop - first]


class PartedVector(ParamVector):
    """1-D tensors of which each process has a part, one behind the other: indices, and values."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        counts = world().answers({name: t.numel() for name, t in tensors.items()})
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
    """1-D tensors, of which a process of a sharded world gives its own part, as one vector."""
    return PartedVector(tensors) if world().sharded else ParamVector(tensors)


class LazyVector(Vector):
    """A vector whose entries are computed when they are asked for, and kept by nobody."""

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
        """The stored vector over exactly `names`, in that order."""
        file, where = TensorFile(path), torch.device(device)
        if file.forms.keys() != set(names):
            odd = sorted(file.forms.keys() ^ set(names))[:3]
            raise RunError(f"{path}: its parameters are not the model's candidates ({odd} …)")

        def compute(name: str, start: int, stop: int, seen: Seen) -> Tensor:
            return file.piece(name, start, stop, where)

        return cls({name: file.forms[name] for name in names}, where, compute)

    def piece(self, name: str, start: int, stop: int, seen: Seen | None = None) -> Tensor:
        seen = {} if seen is None else seen
        if id(self) not in seen:
            seen[id(self)] = self._compute(name, start, stop, seen)
        return seen[id(self)]


class Products:
    """⟨a, b⟩ of the wanted pairs of several vectors, by parameter, in fp64.

    Every entry is read once, however many products it enters, and by the process that owns it.
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
            assert total is not None, "there is a chunk, if an empty one"
            self._sums.append(total)
        if world().size > 1:
            _ = self._blocks  # every process takes part here, whoever reads the numbers

    @cached_property
    def _blocks(self) -> dict[tuple[str, str], dict[str, float]]:
        """By pair and parameter; the device is waited for here, once."""
        sums = torch.stack([total.to(self._sums[0].device) for total in self._sums]).cpu()
        columns = world().total(sums.numpy()).T.tolist()
        return {
            pair: dict(zip(self._names, column, strict=True))
            for pair, column in zip(self._pairs, columns, strict=True)
        }

    def dot(self, a: str, b: str) -> float:
        return float(sum(self._blocks[a, b].values()))

    def norm(self, a: str) -> float:
        return float(sum(v * v for v in self.block_norms(a).values()) ** 0.5)

    def block_norms(self, a: str) -> dict[str, float]:
        """‖·‖_F of each parameter's block; needs the pair (a, a)."""
        return {name: total**0.5 for name, total in self._blocks[a, a].items()}

    def cosine(self, a: str, b: str) -> float | None:
        """Cosine of the angle, or None when either vector is zero."""
        norms = self.norm(a) * self.norm(b)
        return self.dot(a, b) / norms if norms > 0 else None


def _doubles(vectors: Mapping[str, Vector], name: str, start: int, stop: int) -> dict[str, Tensor]:
    """The same piece of every vector in fp64, on the first one's device."""
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
    """A safetensors file of tensors, whose bytes depend on its content alone.

    A lazy vector is written piece by piece and never whole in memory.
    """
    vector = tensors if isinstance(tensors, Vector) else ParamVector(tensors)
    vector.write(path, header)
