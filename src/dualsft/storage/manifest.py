"""Stage manifests: fingerprint of a finished stage, and hashes that detect changed files.

The manifest is written to the stage folder last. It holds the fingerprint (settings and hashes of
the inputs), and the size and SHA-256 of each file. This module creates, reads and checks manifests
and writes files atomically; `runs/folder.py` moves the folders. Nothing is unpickled and no symlink
is followed. Not part of Algorithm 1; it allows finished stages to be reused.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualsft.errors import RunError
from dualsft.system.paths import Place, RunPath, is_full, run_path

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_REASONS = 20


def _canonical(value: Any) -> str:
    """Canonical JSON: independent of key order; 1 and 1.0 differ."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_file(path: Place) -> str:
    """SHA-256 of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def atomic_write_bytes(path: Place | str, content: bytes) -> None:
    """Replace a file atomically: readers and crashes see the old or the new content."""
    if not isinstance(path, RunPath):
        path = RunPath(Path(path).parent, Path(path).name)
    path.replace_bytes(content)


def atomic_write_text(path: Place | str, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8"))


def jsonable(value: Any) -> Any:
    """Convert a value for JSON: array scalars to numbers, nan and inf to their names."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner) for inner in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, str | bool | int):
        return value
    return jsonable(value.item()) if hasattr(value, "item") else str(value)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python, dualsft, torch and transformers, without importing them."""
    found = {"python": platform.python_version()}
    for name in ("dualsft", "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Inputs that determine the content of a stage: settings, and a hash of each input it reads."""

    settings: Mapping[str, Any]
    reads: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        return {"hash": self.hash, "settings": dict(self.settings), "reads": dict(self.reads)}

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of settings and reads."""
        return sha256_text(_canonical({"settings": self.settings, "reads": self.reads}))

    def explain(self, old_manifest: Mapping[str, Any]) -> list[str]:
        """Reasons why a stored stage does not match this fingerprint; empty if it matches."""
        old = old_manifest["fingerprint"]
        if old.get("hash") == self.hash:
            return []
        reasons: list[str] = []
        for key in [*self.settings, *(k for k in old["settings"] if k not in self.settings)]:
            parts = [part for part in (old["settings"], self.settings) if key in part]
            if len(parts) < 2 or _canonical(parts[0][key]) != _canonical(parts[1][key]):
                before, now = (_show(part, key) for part in (old["settings"], self.settings))
                reasons.append(f"{key}: {before} -> {now}")
        for name in [*self.reads, *(k for k in old["reads"] if k not in self.reads)]:
            if name not in old["reads"]:
                reasons.append(f"now reads {name}")
            elif name not in self.reads:
                reasons.append(f"no longer reads {name}")
            elif old["reads"][name] != self.reads[name]:
                reasons.append(f"reads {name}, which changed")
        return first(reasons)


def first(reasons: Sequence[str]) -> list[str]:
    """The first reasons, shortened, and how many follow: a manifest may state any number."""
    shown = [text if len(text) <= 500 else f"{text[:500]}…" for text in reasons[:MAX_REASONS]]
    return [*shown, *([f"{len(reasons) - MAX_REASONS:,} more"] * (len(reasons) > MAX_REASONS))]


def _show(settings: Mapping[str, Any], key: str) -> str:
    """Format a setting for a message; long values (hashes) are truncated."""
    if key not in settings:
        return "not set"
    value = settings[key]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:16]}…"


def render_manifest(body: Mapping[str, Any]) -> str:
    """Text of a manifest; `seal` is a hash of the rest, which detects damage to the file."""
    sealed = {**body, "seal": sha256_text(_canonical(body))}
    return json.dumps(sealed, indent=1, allow_nan=False) + "\n"


def read_manifest(path: RunPath) -> tuple[dict[str, Any], str]:
    """Return (manifest, problem or ""); a newer format raises a `RunError`."""
    try:
        text = path.read_bytes(MAX_MANIFEST_BYTES).decode("ascii")
        manifest = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return {}, f"{path.name} is missing"
    except (OSError, ValueError, RecursionError, RunError) as error:
        if is_full(error):
            raise
        return {}, f"{path.name} is damaged: {error}"
    body = dict(manifest) if isinstance(manifest, dict) else {}
    version = body.get("format_version")
    stated = body.pop("seal", None)
    # `sealed` ignores formatting, which a newer version may change; `intact` compares every byte.
    try:
        sealed, intact = stated == sha256_text(_canonical(body)), render_manifest(body) == text
    except (ValueError, RecursionError):
        sealed = intact = False
    if sealed and isinstance(version, int) and version > FORMAT_VERSION:
        raise RunError(
            f"{path}: format_version {version} is newer than {FORMAT_VERSION}, the newest that this"
            f" dualsft ({versions()['dualsft']}) reads; upgrade dualsft, or give another --out"
        )
    if intact and version == FORMAT_VERSION:
        return manifest, ""
    return {}, f"{path.name} is damaged: its seal does not match"


def read_stage_manifest(folder: Place) -> tuple[dict[str, Any], str]:
    """`read_manifest` of a stage folder; also reports a manifest that does not describe a stage."""
    manifest, wrong = read_manifest(run_path(folder) / MANIFEST)
    fingerprint, files = manifest.get("fingerprint"), manifest.get("files")
    described = (
        isinstance(fingerprint, dict)
        and isinstance(fingerprint.get("hash"), str)
        and isinstance(fingerprint.get("settings"), dict)
        and isinstance(fingerprint.get("reads"), dict)
        and isinstance(files, dict)
        and all(
            isinstance(entry, dict) and {"size", "sha256"} <= set(entry) for entry in files.values()
        )
        and {"stage", "seconds", "peak_memory", "finished"} <= set(manifest)
        and isinstance(facts := manifest.get("facts"), dict)
        and isinstance(manifest.get("versions", {}), dict)
        and _is_number(manifest["seconds"])
        and isinstance(peak := manifest["peak_memory"], dict)
        and {"rss_bytes", "cuda_bytes"} <= set(peak)
        and all(value is None or _is_number(value) for value in peak.values())
        and all(_is_texts(facts.get(name, [])) for name in ("warnings", "warning_codes"))
    )
    if not wrong and not described:
        return {}, f"{MANIFEST} does not describe a stage"
    return manifest, wrong


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e18


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def seal(part: RunPath, body: Mapping[str, Any]) -> None:
    """Flush all files of a stage to disk, then write the manifest, which completes the stage."""
    files, refused = part.tree()
    if refused:
        raise RunError(f"{part}: cannot become a stage: {'; '.join(refused)}; write plain files")
    assert MANIFEST not in files, f"{part}: {MANIFEST} is written here, not by the stage"
    entries: dict[str, Any] = {}
    for name, path in files.items():
        path.share()
        path.fsync()
        entries[name] = {"size": path.size, "sha256": sha256_file(path)}
    for folder in {path.parent for path in files.values()}:
        folder.fsync()
    atomic_write_text(part / MANIFEST, render_manifest({**body, "files": entries}))


def damage(
    folder: Place, manifest: Mapping[str, Any], only: Collection[str] | None = None
) -> tuple[list[str], list[str]]:
    """Return (problems with the files of a stage, files that its manifest does not list).

    `only` limits the check to the given files.
    """
    present, reasons = run_path(folder).tree()
    present.pop(MANIFEST, None)
    if reasons:
        return first(reasons), []  # nothing is hashed: it may be sparse, or one file many times
    for name, entry in manifest["files"].items():
        if only is not None and name not in only:
            continue
        try:
            if name not in present:
                reasons.append(f"{name} is missing")
            elif (size := present[name].size) != entry["size"]:
                reasons.append(f"{name} has {size} bytes, not {entry['size']}")
            elif sha256_file(present[name]) != entry["sha256"]:
                reasons.append(f"{name} has a different SHA-256 than when it was written")
        except (OSError, RunError) as error:
            if is_full(error):
                raise
            reasons.append(f"{name} cannot be read: {error}")
    return first(reasons), [name for name in present if name not in manifest["files"]]


def is_whole(folder: RunPath) -> bool:
    """Whether a folder is a finished stage: manifest intact and all hashes match."""
    manifest, wrong = read_stage_manifest(folder)
    return not wrong and not damage(folder, manifest)[0]
