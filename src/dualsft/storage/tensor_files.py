"""Chunked reading and writing of safetensors files, without loading a whole file into memory.

Used for all vectors over the candidates (under the parameters' names and shapes), masks, deltas and
saved progress. The bytes of a file depend only on its content. They match those of the safetensors
library (tensors sorted by decreasing alignment of their dtype, then by name; header padded to eight
bytes), except that the metadata is sorted, which the library writes in random order. Not part of
Algorithm 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualsft.config.parse import show
from dualsft.distributed.world import CHUNK
from dualsft.errors import RunError
from dualsft.system.bounds import check_json
from dualsft.system.paths import Place, RunPath, note_read

MAX_HEADER_BYTES = 100_000_000  # limit of the format
MAPPED_BYTES = 1 << 30  # tensors of more bytes are mapped when a file is loaded

_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""dtype codes by increasing alignment, in the library's order; files store the last first."""
_RANKS = {dtype: rank for rank, dtype in enumerate(_CODES)}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class Form:
    """dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_entries(self) -> int:
        return self.shape.numel()

    @property
    def num_bytes(self) -> int:
        return self.num_entries * self.dtype.itemsize

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[int, int]]:
        """Bounds of flat chunks; a single empty chunk if there are no entries."""
        for start in range(0, max(1, self.num_entries), size):
            yield start, min(start + size, self.num_entries)


def file_order(forms: Mapping[str, Form]) -> list[str]:
    """Tensor names in the order of a file."""
    return sorted(forms, key=lambda name: (-_RANKS[forms[name].dtype], name))


def write_tensors(
    path: Place,
    forms: Mapping[str, Form],
    pieces: Callable[[str], Iterable[Tensor]],
    header: Mapping[str, str],
) -> None:
    """Write a file; `pieces` yields the flat entries of a tensor in consecutive chunks.

    On any error the incomplete file is removed.
    """
    order = file_order(forms)
    stored: dict[str, object] = {"__metadata__": dict(sorted({"format": "pt", **header}.items()))}
    offset = 0
    for name in order:
        form = forms[name]
        borders = [offset, offset := offset + form.num_bytes]
        code, shape = _CODES[form.dtype], list(form.shape)
        stored[name] = {"dtype": code, "shape": shape, "data_offsets": borders}
    text = json.dumps(stored, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for name in order:
                count = 0
                for piece in pieces(name):
                    entries = piece.detach().cpu().contiguous()
                    assert entries.dtype == forms[name].dtype
                    count += len(entries)
                    file.write(entries.view(torch.uint8).numpy().data)
                assert count == forms[name].num_entries, f"{name}: {count} entries"
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


CURE = "copy it again, or remove its folder and run the same command again"


class TensorFile:
    """Tensors of a file, read in flat chunks; the file is not kept open."""

    def __init__(self, path: Place, cure: str = CURE) -> None:
        self.path, self.cure = path, cure
        self.forms: dict[str, Form] = {}
        self.metadata: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        self._staging: Tensor | None = None
        spans: list[tuple[int, int]] = []
        if isinstance(path, RunPath):
            note_read(path)
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > MAX_HEADER_BYTES:
                    raise ValueError(f"its header claims {size:,} bytes")
                stored = json.loads(check_json(file.read(size)))
                room = file.seek(0, os.SEEK_END) - 8 - size
            self.metadata = dict(stored.pop("__metadata__", {}))
            for name, value in self.metadata.items():
                if not isinstance(value, str):
                    raise ValueError(f"{show(name)} in its header is {show(value)}, not text")
            for name, entry in stored.items():
                form = Form(_DTYPES[entry["dtype"]], torch.Size(entry["shape"]))
                begin, end = entry["data_offsets"]
                if not isinstance(begin, int) or not isinstance(end, int):
                    raise ValueError(f"data_offsets of {show(name)} are no whole numbers")
                if end - begin != form.num_bytes:
                    raise ValueError(f"{show(name)} has {end - begin} bytes, not {form.num_bytes}")
                if not 0 <= begin <= end <= room:
                    raise ValueError(f"{show(name)} lies outside the file")
                spans.append((begin, end))
                self.forms[name], self._offsets[name] = form, 8 + size + begin
            spans.sort()  # the format requires tensors to cover the data without gaps or overlaps
            ends = [0, *(end for _, end in spans)]
            if [begin for begin, _ in spans] != ends[:-1] or ends[-1] != room:
                raise ValueError("its tensors overlap, or leave bytes of the file unused")
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise RunError(f"{path}: cannot be read as safetensors: {why}; {cure}") from problem

    def piece(self, name: str, start: int, stop: int, device: torch.device) -> Tensor:
        """Read the flat entries from start to stop onto a device."""
        if device.type != "cuda":
            entries = torch.empty(stop - start, dtype=self.forms[name].dtype)
            self._read(name, start, entries)
            return entries.to(device)
        entries = torch.empty(stop - start, dtype=self.forms[name].dtype, device=device)
        for begin in range(start, stop, CHUNK):
            end = min(begin + CHUNK, stop)
            staging = self._pinned(entries.dtype)[: end - begin]
            self._read(name, begin, staging)
            entries[begin - start : end - start].copy_(staging)  # blocks, so staging can be reused
        return entries

    def tensors(self) -> dict[str, Tensor]:
        """All tensors on the CPU; large ones are mapped from the file, not read."""
        cpu = torch.device("cpu")
        return {
            name: self._mapped(name)
            if form.num_bytes > MAPPED_BYTES
            else self.piece(name, 0, form.num_entries, cpu).view(form.shape)
            for name, form in self.forms.items()
        }

    def _mapped(self, name: str) -> Tensor:
        form = self.forms[name]
        with self.path.open("rb") as file:  # changes stay in memory ("c")
            entries = np.memmap(file, np.uint8, "c", self._offsets[name], (form.num_bytes,))
        return torch.from_numpy(entries).view(form.dtype).view(form.shape)

    def _pinned(self, dtype: torch.dtype) -> Tensor:
        """A pinned staging buffer, which speeds up copies to the GPU; reused between reads."""
        if self._staging is None or self._staging.dtype != dtype:
            self._staging = torch.empty(CHUNK, dtype=dtype, pin_memory=True)
        return self._staging

    def _read(self, name: str, start: int, entries: Tensor) -> None:
        if not entries.numel():
            return
        wanted = entries.view(torch.uint8).numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._offsets[name] + start * entries.element_size())
            done = 0
            while done < len(wanted):
                count = file.readinto(wanted[done:])
                if not count:
                    raise RunError(
                        f"{self.path}: ends within {name}: the file is damaged; {self.cure}"
                    )
                done += count
