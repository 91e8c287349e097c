"""Resolve `data.path` to data files.

`data.path` is a file, a glob, a folder, a Hugging Face hub id, or a list of these. A folder is one
that `datasets` saved (`save_to_disk`), one with LLaMA-Factory's `dataset_info.json`, or one of
plain files. A hub dataset is loaded once with `datasets` (extra `data`) and cached as JSON Lines.
No code that comes with data is run: loading scripts are refused by name.

Reads only file names and small JSON files; `make_reader` opens the data. Does not import torch, so
that a wrong path is reported immediately. Not part of Algorithm 1.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from dualsft.data.formats import Layout
from dualsft.data.hub_datasets import HubDataset, cached, materialise
from dualsft.data.llamafactory import read_entry
from dualsft.data.readers import CsvReader, Limits, LinesReader, Reader, TsvReader, json_reader
from dualsft.errors import ConfigError
from dualsft.storage.manifest import sha256_file

if TYPE_CHECKING:
    from dualsft.config.settings import DataConfig

SUFFIXES = (
    ".jsonl",
    ".ndjson",
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".feather",
)
KINDS = ", ".join(f"*{suffix}" for suffix in SUFFIXES) + ", each also with .gz"
MAX_INFO_BYTES = 16 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SPLIT_WORD = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")
_NOT_DATA = frozenset(
    {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One data file, and its settings from a dataset_info.json."""

    path: Path
    layout: Layout | None = None
    num_samples: int | None = None


def make_reader(file: SourceFile, limits: Limits) -> Reader:
    """The reader for a file, chosen by its suffix."""
    suffix = _suffix(file.path)
    if suffix in (".parquet", ".arrow", ".feather"):
        from dualsft.data import tables

        table = tables.ParquetReader if suffix == ".parquet" else tables.ArrowReader
        return table(file.path, limits)
    readers: dict[str, Callable[[Path, Limits], Reader]] = {
        ".json": json_reader,
        ".csv": CsvReader,
        ".tsv": TsvReader,
    }
    return readers.get(suffix, LinesReader)(file.path, limits)


def _suffix(path: Path) -> str:
    """The supported suffix of a path, without .gz; empty if there is none."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix) and name != suffix), "")


def find_files(
    path: str, config: DataConfig | None = None, key: str = "data.path", fetch: bool = True
) -> list[SourceFile]:
    """The files that a path names, in order; raises one error with all problems.

    With `fetch=False` a hub dataset is not loaded and gives no file, which is enough to check the
    settings.
    """
    from dualsft.config.settings import DataConfig as Settings

    finder = _Finder(config or Settings(path=path), key, fetch)
    files: list[SourceFile] = []
    problems: list[str] = []
    for item in split_paths(path):
        try:
            files += finder.find(item)
        except ConfigError as problem:
            problems += problem.problems
    for path_found, times in Counter(file.path for file in files).items():
        if times > 1:
            problems.append(f"{key}: {str(path_found)!r} is named twice; name it once")
    if problems:
        raise ConfigError(problems)
    return files


def split_paths(text: str) -> list[str]:
    """The items of a comma-separated list; an existing path that contains commas is one item."""
    pieces = text.split(",")
    items: list[str] = []
    while pieces:
        longest = next((n for n in range(len(pieces), 1, -1) if _exists(",".join(pieces[:n]))), 1)
        items.append(",".join(pieces[:longest]).strip())
        pieces = pieces[longest:]
    return [item for item in items if item] or [text]


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # an invalid file name, or an unknown user
        return False


def source_hash(path: str, config: DataConfig, key: str = "data.path") -> str:
    """One hash over the content of all files that a path names, and over how they are read."""
    digest = hashlib.sha256()
    for file in find_files(path, config, key):
        how = f"{_suffix(file.path)} {file.layout} {file.num_samples}"
        digest.update(f"{sha256_file(file.path)} {how}\n".encode())
    return digest.hexdigest()


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


class _Finder:
    """Finds the files of each item under the same settings."""

    def __init__(self, config: DataConfig, key: str, fetch: bool) -> None:
        self.config, self.key, self.fetch = config, key, fetch

    def find(self, item: str) -> list[SourceFile]:
        try:
            path = Path(item).expanduser()
        except RuntimeError:
            return self._refuse(item, "names an unknown user", "write the full path")
        if _exists(item):
            if path.is_dir():
                return self._folder(path)
            if path.name == "dataset_info.json":
                return self._llamafactory(path)
            return [self._file(path)]
        if glob.has_magic(item):
            found = sorted(glob.glob(str(path), recursive=True))
            files = [self._file(Path(name)) for name in found if Path(name).is_file()]
            return files or self._refuse(item, "matches no file", "give a pattern that matches")
        if _HUB_ID.fullmatch(item) and not _suffix(path):
            config = self.config
            hub = HubDataset(item, config.subset, config.split or "train", config.revision)
            return self._hub(hub)
        if not _suffix(path):
            return self._unknown_kind(path)
        return self._refuse(item, "does not exist", "give the path of the corpus")

    def _refuse(self, item: object, what: str, cure: str) -> Any:
        raise ConfigError(f"{self.key}: {str(item)!r} {what}; {cure}")

    def _unknown_kind(self, path: Path) -> Any:
        return self._refuse(path, "is not a supported kind of file", f"supported: {KINDS}")

    def _file(self, path: Path) -> SourceFile:
        if not _suffix(path):
            return self._unknown_kind(path)
        if not path.is_file():
            return self._refuse(path, "is not a regular file", "give the path of the corpus")
        return SourceFile(path)

    # --- folders -------------------------------------------------------------------------------

    def _folder(self, folder: Path) -> list[SourceFile]:
        if (folder / "dataset_dict.json").is_file():
            return self._saved_dict(folder)
        if (folder / "state.json").is_file():
            return self._saved(folder)
        if (folder / "dataset_info.json").is_file():
            return self._llamafactory(folder / "dataset_info.json")
        return self._plain(folder)

    def _saved_dict(self, folder: Path) -> list[SourceFile]:
        splits = self._json(folder / "dataset_dict.json").get("splits")
        names = [name for name in splits if isinstance(name, str)] if _is_list(splits) else []
        wanted = self.config.split or "train"
        if not names:
            what = f"names no split {wanted!r} in its 'splits'"
            return self._refuse(folder / "dataset_dict.json", what, "save it again")
        if wanted not in names or not (folder / wanted / "state.json").is_file():
            return self._refuse(
                folder, f"has no split {wanted!r}", f"set data.split to one of {', '.join(names)}"
            )
        return self._saved(folder / wanted)

    def _saved(self, folder: Path) -> list[SourceFile]:
        """A folder written by `Dataset.save_to_disk`: Arrow files in the order of state.json."""
        state = self._json(folder / "state.json")
        if state.get("_indices_data_files"):
            return self._refuse(
                folder, "has an indices mapping", "save it again after flatten_indices()"
            )
        files: list[SourceFile] = []
        entries = state.get("_data_files")
        for entry in entries if _is_list(entries) else []:
            name = entry.get("filename") if isinstance(entry, dict) else None
            files.append(SourceFile(self._inside(folder, name, "state.json")))
        if not files:
            return self._refuse(folder, "names no data file in state.json", "save it again")
        return files

    def _plain(self, folder: Path) -> list[SourceFile]:
        """All data files below a folder, of one kind; if names contain splits, only data.split."""
        found: dict[Path, str] = {}
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            hidden = any(part.startswith((".", "_")) for part in inside.parts)
            if not hidden and path.name not in _NOT_DATA and _suffix(path) and path.is_file():
                word = _SPLIT_WORD.search(str(inside).lower())
                found[path] = word[1] if word else ""
        wanted = self.config.split or "train"
        words = {"validation", "valid", "val", "dev"} if wanted == "validation" else {wanted}
        if any(found.values()):
            chosen = [path for path, word in found.items() if word in words]
            if not chosen:
                splits = ", ".join(sorted(set(found.values()) - {""}))
                return self._refuse(
                    folder, f"has no file of the split {wanted!r}", f"set data.split ({splits})"
                )
        else:
            chosen = list(found)
        if not chosen:
            return self._refuse(folder, "holds no data file", f"supported: {KINDS}")
        if len(kinds := {_suffix(path) for path in chosen}) > 1:
            return self._refuse(
                folder, f"holds files of several kinds ({', '.join(sorted(kinds))})", "give a glob"
            )
        return [SourceFile(path) for path in chosen]

    def _inside(self, folder: Path, name: object, where: str) -> Path:
        """A file inside this folder; a name that leads outside is refused."""
        if (
            not isinstance(name, str)
            or not name
            or Path(name).is_absolute()
            or ".." in Path(name).parts
        ):
            return self._refuse(
                folder / where,
                f"names {str(name)[:60]!r}, which is outside its folder",
                "repair it",
            )
        if not (folder / name).exists():
            return self._refuse(folder / where, f"names {name!r}, which does not exist", "add it")
        return folder / name

    def _json(self, path: Path) -> dict[str, Any]:
        if path.stat().st_size > MAX_INFO_BYTES:
            return self._refuse(path, f"is larger than {MAX_INFO_BYTES:,} bytes", "shorten it")
        try:
            value = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError, OSError) as problem:
            return self._refuse(path, f"is not valid JSON ({str(problem)[:80]})", "repair it")
        if not isinstance(value, dict):
            return self._refuse(path, "is not a JSON object", "repair it")
        return value

    # --- LLaMA-Factory -------------------------------------------------------------------------

    def _llamafactory(self, path: Path) -> list[SourceFile]:
        """The files of the dataset_info.json entries that data.dataset names."""
        entries = self._json(path)
        wanted = [name.strip() for name in (self.config.dataset or "").split(",") if name.strip()]
        if not wanted:
            known = ", ".join(list(entries)[:20])
            return self._refuse(path, "holds several datasets", f"set data.dataset ({known})")
        files: list[SourceFile] = []
        for name in wanted:
            entry = read_entry(path, name, entries, self.key)
            if isinstance(entry.source, HubDataset):
                found = self._hub(entry.source)
            else:
                place = self._inside(path.parent, entry.source, path.name)
                found = self._plain(place) if place.is_dir() else [self._file(place)]
            files += [SourceFile(file.path, entry.layout, entry.num_samples) for file in found]
        return files

    # --- the hub -------------------------------------------------------------------------------

    def _hub(self, hub: HubDataset) -> list[SourceFile]:
        target = cached(hub)
        if target.is_file():
            return [SourceFile(target)]
        if importlib.util.find_spec("datasets") is None:
            return self._refuse(
                hub.name,
                "is not a local file or folder; to load it from the Hugging Face hub, the package "
                "'datasets' is needed",
                "install dualsft[data], or give the path of the corpus",
            )
        return [SourceFile(materialise(hub, target, self.key))] if self.fetch else []
