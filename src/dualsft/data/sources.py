"""Resolve `data.path` to data files.

`data.path` is a file, a glob, a folder, a Hugging Face hub id, or a list of these. A folder is one
that `datasets` saved (`save_to_disk`), one with LLaMA-Factory's `dataset_info.json`, or one of
plain files. A hub dataset is loaded once with `datasets` (extra `data`) and cached as JSON Lines in
`datasets` under `$DUALSFT_CACHE`, one file per subset, split and revision; delete the file to load
it again. No code that comes with data is run: loading scripts are refused by name.

Reads only file names and small JSON files; `make_reader` opens the data. Does not import torch, so
that a wrong path is reported immediately. Not part of Algorithm 1.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from dualsft.config.parse import did_you_mean
from dualsft.data.layouts import Layout, Tags
from dualsft.data.readers import CsvReader, Limits, LinesReader, Reader, TsvReader, json_reader
from dualsft.errors import ConfigError, DataError
from dualsft.storage.manifest import sha256_file
from dualsft.system.bounds import MAX_FOLDERS, RAISE, TIMES, blocks_of, data_bytes, hollow
from dualsft.system.usage import cache_root

if TYPE_CHECKING:
    from dualsft.config.settings import DataConfig

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
KINDS = ", ".join(f"*{suffix}" for suffix in SUFFIXES) + ", each also with .gz"
MAX_INFO_BYTES = 16 << 20
OUTSIDE = "if you want what is outside the folder to be read, set data.outside=true"
MAX_NAMES = TIMES * 1000
"""Most names in a comma-separated list of paths."""
LONGEST_SOURCE = 200
"""Characters of the name of a source."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PART = re.compile(r"-\d{3,}(-of-\d{3,})?$")
_SPLIT_WORD = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One data file, and its settings from a dataset_info.json."""

    path: Path
    layout: Layout | None = None
    num_samples: int | None = None
    source: str = ""
    """Name of the source that its rows have if there are several (`data.source_field`)."""


class HubDataset(NamedTuple):
    """A dataset on the Hugging Face hub."""

    name: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    data_dir: str | None = None


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
    for item in split_paths(path, key):
        try:
            files += finder.find(item)
        except ConfigError as problem:
            problems += problem.problems
    for found, times in Counter(file.path for file in files).items():
        if times > 1:
            problems.append(f"{key}: {str(found)!r} is named twice; name it once")
    for file in files:
        state = file.path.stat()
        if hollow([(state, blocks_of(state))]):
            with file.path.open("rb") as opened:
                if why := hollow([(state, data_bytes(opened.fileno()))]):
                    problems.append(f"{key}: {str(file.path)!r} has {why}; copy the file again")
    if problems:
        raise ConfigError(problems)
    return _named(files)


def _named(files: list[SourceFile]) -> list[SourceFile]:
    """The files with a source each: an entry or a dataset has its own name, a plain file its stem.

    Numbered parts (train-00000-of-00002) are one source. Files of one stem in several folders are
    told apart by their folders, as far as needed.
    """
    stems = {file.path: _PART.sub("", _stem(file.path)) for file in files if not file.source}
    alike: dict[str, set[Path]] = defaultdict(set)
    for path, stem in stems.items():
        alike[stem].add(path.parent)

    @cache
    def tails(stem: str, depth: int) -> Counter[tuple[str, ...]]:
        return Counter(_tail(folder, depth) for folder in alike[stem])

    def name(path: Path) -> str:
        depth = 0
        while tails(stems[path], depth)[_tail(path.parent, depth)] > 1:
            depth += 1
        return "/".join((*_tail(path.parent, depth), stems[path]))

    return [replace(file, source=_printable(file.source or name(file.path))) for file in files]


def _tail(folder: Path, depth: int) -> tuple[str, ...]:
    return folder.parts[max(0, len(folder.parts) - depth) :]


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)[:LONGEST_SOURCE]


def _stem(path: Path) -> str:
    return path.name[: path.name.lower().rindex(_suffix(path))]


def split_paths(text: str, key: str = "data.path") -> list[str]:
    """The items of a comma-separated list; an existing path that contains commas is one item."""
    pieces = text.split(",")
    if len(pieces) > MAX_NAMES:
        raise ConfigError(
            f"{key}: a list of {len(pieces):,} names, over {MAX_NAMES:,} (MAX_NAMES); give a "
            f"folder or a glob, or {RAISE}"
        )
    items: list[str] = []
    while pieces:
        longest, whole = 1, pieces[0]
        for n, piece in enumerate(pieces[1:], 2):
            whole += f",{piece}"
            folder, name = os.path.split(whole)
            if len(name) > 255 or (folder and not _exists(folder)):
                break  # nor does any longer name exist
            longest = n if _exists(whole) else longest
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


class _Finder:
    """Finds the files of each item under the same settings."""

    def __init__(self, config: DataConfig, key: str, fetch: bool) -> None:
        self.config, self.key, self.fetch = config, key, fetch

    def find(self, item: str) -> list[SourceFile]:
        try:
            path = Path(item).expanduser()
        except RuntimeError:
            self._refuse(item, "names an unknown user", "write the full path")
        if _exists(item):
            if path.is_dir():
                return self._folder(path)
            if path.name == "dataset_info.json":
                return self._llamafactory(path)
            return [self._file(path)]
        if glob.has_magic(item):
            self._check_extent(str(path))
            found = sorted(glob.glob(str(path), recursive=True))
            files = [self._file(Path(name)) for name in found if Path(name).is_file()]
            if not files:
                self._refuse(item, "matches no file", "give a pattern that matches")
            return files
        if _suffix(path):
            self._refuse(item, "does not exist", "give the path of the corpus")
        if _HUB_ID.fullmatch(item):
            config = self.config
            return self._hub(
                HubDataset(item, config.subset, config.split or "train", config.revision)
            )
        self._refuse(path, "is not a supported kind of file", f"supported: {KINDS}")

    def _refuse(self, item: object, what: str, cure: str) -> NoReturn:
        raise ConfigError(f"{self.key}: {str(item)!r} {what}; {cure}")

    def _check_extent(self, pattern: str) -> None:
        """Refuse a pattern that searches too many folders, before it is expanded."""
        parts = Path(pattern).parts
        for end in range(1, len(parts)):
            folders = str(Path(*parts[:end]))
            if glob.has_magic(folders):
                for number, _ in enumerate(glob.iglob(f"{folders}/", recursive=True)):
                    if number >= MAX_FOLDERS:
                        what = f"searches more than {MAX_FOLDERS:,} folders (MAX_FOLDERS)"
                        self._refuse(pattern, what, f"give a narrower pattern, or {RAISE}")

    def _file(self, path: Path) -> SourceFile:
        if not _suffix(path):
            self._refuse(path, "is not a supported kind of file", f"supported: {KINDS}")
        if not path.is_file():
            self._refuse(path, "is not a regular file", "give the path of the corpus")
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
        names = (
            [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        )
        wanted = self.config.split or "train"
        if not names:
            what = f"names no split {wanted!r} in its 'splits'"
            self._refuse(folder / "dataset_dict.json", what, "save it again")
        if wanted not in names or not (folder / wanted / "state.json").is_file():
            cure = f"set data.split to one of {', '.join(names)}"
            self._refuse(folder, f"has no split {wanted!r}", cure)
        return [
            replace(file, source=folder.resolve().name) for file in self._saved(folder / wanted)
        ]

    def _saved(self, folder: Path) -> list[SourceFile]:
        """A folder written by `Dataset.save_to_disk`: Arrow files in the order of state.json."""
        state = self._json(folder / "state.json")
        if state.get("_indices_data_files"):
            self._refuse(folder, "has an indices mapping", "save it again after flatten_indices()")
        files: list[SourceFile] = []
        entries = state.get("_data_files")
        for entry in entries if isinstance(entries, list) else []:
            name = entry.get("filename") if isinstance(entry, dict) else None
            path = self._inside(folder, name, "state.json")
            files.append(SourceFile(path, source=folder.resolve().name))
        self._check_links(folder, [file.path for file in files])
        if not files:
            self._refuse(folder, "names no data file in state.json", "save it again")
        return files

    def _plain(self, folder: Path) -> list[SourceFile]:
        """All data files below a folder, of one kind; if names contain splits, only data.split."""
        found: dict[Path, str] = {}
        self._check_extent(f"{glob.escape(str(folder))}/**/*")
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            hidden = any(part.startswith((".", "_")) for part in inside.parts)
            if not hidden and path.name not in _NOT_DATA and _suffix(path) and path.is_file():
                word = _SPLIT_WORD.search(str(inside).lower())
                found[path] = word[1] if word else ""
        if not found:
            self._refuse(folder, "holds no data file", f"supported: {KINDS}")
        chosen = list(found)
        if any(found.values()):
            wanted = self.config.split or "train"
            words = {"validation", "valid", "val", "dev"} if wanted == "validation" else {wanted}
            chosen = [path for path, word in found.items() if word in words]
            if not chosen:
                splits = ", ".join(sorted(set(found.values()) - {""}))
                what = f"has no file of the split {wanted!r}"
                self._refuse(folder, what, f"set data.split ({splits})")
        if len(kinds := sorted({_suffix(path) for path in chosen})) > 1:
            self._refuse(
                folder, f"holds files of several kinds ({', '.join(kinds)})", "give a glob"
            )
        return [SourceFile(path) for path in chosen]

    def _inside(self, folder: Path, name: object, where: str) -> Path:
        """A file inside this folder; a name that leads outside is refused."""
        path = Path(name) if isinstance(name, str) and name else None
        if path is None or path.is_absolute() or ".." in path.parts:
            what = f"names {str(name)[:60]!r}, which is outside its folder"
            self._refuse(folder / where, what, "repair it")
        if not (folder / path).exists():
            self._refuse(folder / where, f"names {name!r}, which does not exist", "add it")
        return folder / path

    def _check_links(self, folder: Path, files: list[Path]) -> None:
        """Refuse files named by a file of this folder that are links out of it, unless allowed."""
        root = folder.resolve()
        roots = [root]
        if root.parent.name == "snapshots":  # the hub's cache links into its blobs
            roots.append(root.parent.parent / "blobs")
        for path in [] if self.config.outside else files:
            if not any((target := path.resolve()).is_relative_to(r) for r in roots):
                self._refuse(
                    path, f"is a link to {str(target)!r}, outside {str(folder)!r}", OUTSIDE
                )

    def _check_hub(self, info: Path, name: str, hub: HubDataset) -> None:
        """Refuse an entry that names a local path, and one of the hub, unless allowed."""
        what = f"names {hub.name!r} in hf_hub_url of {name!r}"
        if not _HUB_ID.fullmatch(hub.name) or Path(hub.name).exists():
            self._refuse(info, f"{what}, which is not a hub id (org/name)", "repair it")
        place = Path(hub.data_dir or "")
        if place.is_absolute() or ".." in place.parts:
            self._refuse(info, f"names {hub.data_dir!r} in folder of {name!r}", "repair it")
        if not self.config.outside:
            self._refuse(info, f"{what}, a dataset of the hub", OUTSIDE)

    def _json(self, path: Path) -> dict[str, Any]:
        if path.stat().st_size > MAX_INFO_BYTES:
            self._refuse(path, f"is larger than {MAX_INFO_BYTES:,} bytes", "shorten it")
        try:
            value = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError, OSError) as problem:
            self._refuse(path, f"is not valid JSON ({str(problem)[:80]})", "repair it")
        if not isinstance(value, dict):
            self._refuse(path, "is not a JSON object", "repair it")
        return value

    # --- LLaMA-Factory -------------------------------------------------------------------------

    def _llamafactory(self, path: Path) -> list[SourceFile]:
        """The files of the dataset_info.json entries that data.dataset names."""
        entries = self._json(path)
        wanted = [name.strip() for name in (self.config.dataset or "").split(",") if name.strip()]
        if not wanted:
            known = ", ".join(list(entries)[:20])
            count = "several datasets" if len(entries) > 1 else "one dataset" if entries else "none"
            self._refuse(path, f"holds {count}", f"set data.dataset ({known})")
        files: list[SourceFile] = []
        for name in wanted:
            if name not in entries:
                hint = did_you_mean(name, entries, f"it has {', '.join(entries)[:300]}")
                raise ConfigError(f"data.dataset: {path} has no dataset {name!r}; {hint}")
            try:
                source, layout, num_samples = _read_entry(entries[name])
            except ValueError as problem:
                raise ConfigError(f"{self.key}: {path}, dataset {name!r}: {problem}") from None
            if isinstance(source, HubDataset):
                self._check_hub(path, name, source)
                found = self._hub(source)
            else:
                place = self._inside(path.parent, source, path.name)
                found = self._plain(place) if place.is_dir() else [self._file(place)]
                self._check_links(path.parent, [file.path for file in found])
            files += [SourceFile(file.path, layout, num_samples, name) for file in found]
        return files

    # --- the hub -------------------------------------------------------------------------------

    def _hub(self, hub: HubDataset) -> list[SourceFile]:
        """The cached file of a hub dataset, which is loaded first if it is missing."""
        digest = hashlib.sha256(json.dumps(hub).encode()).hexdigest()[:12]
        name = f"{hub.name.replace('/', '--')}-{hub.split}-{digest}.jsonl"
        target = cache_root() / "datasets" / re.sub(r"[^\w.-]", "_", name)
        if target.is_file():
            return [SourceFile(target, source=hub.name)]
        if importlib.util.find_spec("datasets") is None:
            self._refuse(
                hub.name,
                "is not a local file or folder; to load it from the Hugging Face hub, the package "
                "'datasets' is needed",
                "install dualsft[data], or give the path of the corpus",
            )
        if not self.fetch:
            return []
        _download(hub, target, self.key)
        return [SourceFile(target, source=hub.name)]


def _download(hub: HubDataset, target: Path, key: str) -> None:
    """Load a hub dataset and write it atomically as JSON Lines."""
    import datasets  # pyright: ignore[reportMissingImports]
    from huggingface_hub import constants

    from dualsft.data.tables import to_json

    logger.info("loading %s (%s) from the Hugging Face hub, once", hub.name, hub.split)
    offline, unreached = constants.HF_HUB_OFFLINE, _unreached(hub)
    constants.HF_HUB_OFFLINE = offline or bool(unreached)  # else it is tried again for long
    try:
        rows = datasets.load_dataset(
            hub.name, name=hub.subset, data_dir=hub.data_dir, split=hub.split, revision=hub.revision
        )
    except Exception as problem:  # network, hub or parser errors of any type
        reason = " ".join(f"{problem}{unreached}".split())[:500]
        raise ConfigError(
            f"{key}: {hub.name!r} (subset {hub.subset}, split {hub.split}) is not a local file or "
            f"folder and cannot be loaded from the Hugging Face hub ({type(problem).__name__}: "
            f"{reason}); check the name, data.subset and data.split, or give a path"
        ) from problem
    finally:
        constants.HF_HUB_OFFLINE = offline
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            for row in rows:
                out.write(to_json(dict(row)) + b"\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, target)
    except TypeError as problem:
        raise DataError(f"{hub.name}: {problem}; give a text dataset") from problem
    finally:
        part.unlink(missing_ok=True)


def _unreached(hub: HubDataset) -> str:
    """What to add to an error where the hub cannot be reached; empty if it can."""
    from huggingface_hub import HfApi, constants, errors

    try:
        HfApi().dataset_info(hub.name, revision=hub.revision, timeout=10)
    except errors.HfHubHTTPError:
        return ""  # loading it says what is wrong
    except Exception as problem:  # of the HTTP library, which depends on the hub's version
        if not constants.HF_HUB_OFFLINE:
            return f"; the hub at {constants.ENDPOINT} cannot be reached: {problem}"
        return "; HF_HUB_OFFLINE is set"
    return ""


# --- entries of LLaMA-Factory's dataset_info.json ------------------------------------------------

_REFUSED = {
    "script_url": "is a loading script, which would run code; convert the data to JSON Lines",
    "cloud_file_name": "is in a cloud bucket; download the file and name it with file_name",
    "ms_hub_url": "is on another hub; download it and name the file with file_name",
    "om_hub_url": "is on another hub; download it and name the file with file_name",
}
_KEYS = {"hf_hub_url", "file_name", "formatting", "ranking", "subset", "split", "folder"}
_KEYS |= {"num_samples", "columns", "tags", *_REFUSED}
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_COLUMNS = {*_ALPACA, "history", "messages", "system", "tools"}
_TAGS = {f"{field.name}_tag" for field in fields(Tags)}
_OPENAI = Tags("role", "content", "user", "assistant", "tool", "function_call", "system")


def _read_entry(entry: Any) -> tuple[str | HubDataset, Layout, int | None]:
    """Where the rows of an entry are, their layout and num_samples; ValueError if unusable."""
    if not isinstance(entry, dict):
        raise ValueError("the entry must be a JSON object; repair it")
    if unknown := sorted(entry.keys() - _KEYS):
        raise ValueError(f"the key {unknown[0][:60]!r} is not known; remove it")
    for key, why in _REFUSED.items():
        # an entry may name other hubs besides hf_hub_url, but never a script
        if key in entry and (key == "script_url" or "hf_hub_url" not in entry):
            raise ValueError(f"{key} {str(entry[key])[:60]!r} {why}")
    if entry.get("ranking"):
        raise ValueError(
            "ranking: true is preference data; give a dataset of prompts and responses"
        )
    source = entry.get("hf_hub_url") or entry.get("file_name")
    if not isinstance(source, str) or not source:
        raise ValueError("it needs file_name or hf_hub_url, as text; add one")
    for key in ("subset", "split", "folder"):
        if not isinstance(entry.get(key) or "", str):
            raise ValueError(f"{key} must be text; repair it")
    split = entry.get("split", "train")
    if "hf_hub_url" in entry:
        source = HubDataset(source, entry.get("subset"), split, None, entry.get("folder"))
    elif split != "train":
        raise ValueError(f"split {split!r} needs a hub dataset; a file has no splits: remove it")
    samples = entry.get("num_samples")
    if samples is not None and (type(samples) is not int or samples < 1):
        raise ValueError(f"num_samples {samples!r} must be an integer of 1 or more; write a count")
    return source, _entry_layout(entry), samples


def _entry_layout(entry: dict[str, Any]) -> Layout:
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise ValueError(f"formatting {formatting!r} is not known; use alpaca, sharegpt or openai")
    columns, tags = _names(entry, "columns", _COLUMNS), _names(entry, "tags", _TAGS)
    if formatting == "alpaca":
        names = _ALPACA if columns is None else columns
        prompt, response = names.get("prompt"), names.get("response")
        if prompt and not response:
            return Layout("text", text=prompt)
        if not prompt or not response:
            raise ValueError("columns of alpaca need prompt and response; add them")
        return Layout(
            "alpaca",
            prompt,
            response,
            query=names.get("query", ""),
            history=names.get("history", ""),
            system=names.get("system", ""),
        )
    default = "messages" if formatting == "openai" and columns is None else "conversations"
    own = {tag.removesuffix("_tag"): word for tag, word in (tags or {}).items()}
    chosen = replace(_OPENAI if formatting == "openai" else Tags(), **own)
    roles = [chosen.user, chosen.assistant, chosen.observation, chosen.function, chosen.system]
    if twice := [word for word in roles if roles.count(word) > 1]:
        raise ValueError(f"tags use {twice[0]!r} for two roles; give each role its own name")
    names = columns or {}
    return Layout(
        "messages" if formatting == "openai" and chosen == _OPENAI else "sharegpt",
        messages=names.get("messages", default),
        system=names.get("system", ""),
        tools=names.get("tools", ""),
        tags=chosen,
    )


def _names(entry: dict[str, Any], what: str, known: set[str]) -> dict[str, str] | None:
    """The `columns` or `tags` of an entry; None if it has none."""
    given = entry.get(what)
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
        raise ValueError(f"{what} must be an object with string values; repair it")
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{what}: {unknown[0]!r} cannot be used here; remove it")
    return given
