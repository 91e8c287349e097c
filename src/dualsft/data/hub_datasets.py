"""Load datasets from the Hugging Face hub with `datasets`, and cache them as JSON Lines.

Requires the extra `data`. The file is in the cache (`datasets` under `$DUALSFT_CACHE`) and is
written atomically; later runs read it like any other file, without the hub. Delete it to load the
dataset again. Each `data.revision` has its own file. Not part of Algorithm 1.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dualsft.errors import ConfigError, DataError
from dualsft.system.usage import cache_root

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset on the Hugging Face hub."""

    name: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    data_dir: str | None = None


def cached(hub: HubDataset) -> Path:
    """The cache path of a hub dataset; each subset, split and revision has its own file."""
    parts = json.dumps([hub.name, hub.subset, hub.split, hub.revision, hub.data_dir])
    digest = hashlib.sha256(parts.encode()).hexdigest()[:12]
    name = f"{hub.name.replace('/', '--')}-{hub.split}-{digest}.jsonl"
    return cache_root() / "datasets" / re.sub(r"[^\w.-]", "_", name)


def materialise(hub: HubDataset, target: Path, key: str) -> Path:
    """Load a hub dataset and write it atomically as JSON Lines."""
    import datasets  # pyright: ignore[reportMissingImports]

    from dualsft.data.tables import to_json

    logger.info("loading %s (%s) from the Hugging Face hub, once", hub.name, hub.split)
    try:
        rows = datasets.load_dataset(
            hub.name,
            name=hub.subset,
            data_dir=hub.data_dir,
            split=hub.split,
            revision=hub.revision,
        )
    except Exception as problem:  # network, hub or parser errors of any type
        reason = " ".join(str(problem).split())[:300]
        raise ConfigError(
            f"{key}: {hub.name!r} (subset {hub.subset}, split {hub.split}) is not a local file or "
            f"folder and cannot be loaded from the Hugging Face hub ({type(problem).__name__}: "
            f"{reason}); check the name, data.subset and data.split, or give a path"
        ) from problem
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
    return target
