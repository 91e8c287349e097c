"""Reuse the selected examples (Algorithm 1 line 11) of a cached run.

Runs that differ only on the parameter side (LESS, LESS + S²FT, LESS + NanoAdam) select the same
examples, and that selection may cost more than the rest of the run. A selection therefore stores a
fingerprint of the inputs of its example selection in its manifest (`data_choice`). A selection
with the same fingerprint reuses the examples, scores, warnings and cost accounts of a cached run
(`pipeline.run`) or of the selection that it replaces. DualSFT's own methods do not need this: they
read the scores, a stage that is reused as a whole. Reads 5_selection of cached runs; writes
nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualsft.data.examples import Example
from dualsft.distributed.world import world
from dualsft.errors import RunError
from dualsft.runs.context import RunContext
from dualsft.runs.fingerprints import data_choice_settings
from dualsft.runs.method import Accounts, DataChoice
from dualsft.runs.preflight import FOLDERS
from dualsft.storage.manifest import Fingerprint, read_stage_manifest
from dualsft.system.paths import RunPath
from dualsft.system.progress import NOTE

IDS, SCORES = "ids.json", "baseline_scores.parquet"


@dataclass(frozen=True)
class Lent:
    """A reusable example selection of a cached run: choice, cost, warnings and folder."""

    choice: DataChoice
    accounts: Accounts
    warnings: Mapping[str, str]
    """Warning code by message."""
    folder: RunPath


def identity(ctx: RunContext) -> str | None:
    """Hash of everything that the example selection depends on.

    None if it must not be reused: the method does not allow it, an input stage is missing, or
    there is more than one process.
    """
    if not ctx.methods.entries["data"].lends or world().size > 1:
        return None
    reads: dict[str, str] = {}
    for name in ("split", *ctx.methods.needs_of("data")):
        manifest, wrong = read_stage_manifest(ctx.folder(name))
        if wrong:
            return None
        reads[name] = manifest["fingerprint"]["hash"]
    return Fingerprint(data_choice_settings(ctx), reads).hash


def note(
    asked: str | None, choice: DataChoice, warnings: Mapping[str, str], lent: Lent | None
) -> dict[str, Any]:
    """Facts about the example selection for the manifest."""
    if asked is None:
        return {}
    noted = {"fingerprint": asked, "facts": dict(choice.facts), "warnings": list(warnings)}
    noted["codes"] = list(warnings.values())
    noted["scored"] = choice.scores is not None
    if lent is None:
        return {"data_choice": noted}
    cost = {"seconds": lent.accounts.seconds, "peak_bytes": lent.accounts.peak_bytes}
    return {"data_choice": noted, "taken_over": cost}


def find(ctx: RunContext, asked: str | None, pool: Sequence[Example], b: int) -> Lent | None:
    """Find the same example selection, intact, in this run or a cached run; None if not found."""
    for run in (ctx.rundir.path, *ctx.lenders) if asked is not None else ():
        folder = run / FOLDERS["selection"]
        manifest, wrong = read_stage_manifest(folder)
        if wrong:
            continue
        try:
            facts = manifest["facts"]
            noted = facts.get("data_choice") or {}
            if noted.get("fingerprint") == asked:
                choice = _read(folder, manifest["files"], pool, b, noted)
                accounts = Accounts(**facts["accounts"]["data"])
                codes = noted.get("codes") or [NOTE] * len(noted["warnings"])
                warnings = dict(zip(noted["warnings"], codes, strict=True))
                return Lent(choice, accounts, warnings, folder)
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RunError) as problem:
            why = f"{type(problem).__name__}: {problem}"  # written by another version, or damaged
            ctx.reporter.say(f"{folder}: its selection of examples cannot be reused ({why})")
    return None


def _read(
    folder: RunPath,
    files: Mapping[str, Any],
    pool: Sequence[Example],
    b: int,
    noted: Mapping[str, Any],
) -> DataChoice:
    place = {example.id: i for i, example in enumerate(pool)}
    chosen = json.loads(_verified(folder, files, IDS))
    positions = np.sort(np.array([place[one] for one in chosen], np.int64))
    if len(set(chosen)) != b:
        raise ValueError(f"{len(set(chosen))} examples instead of {b}")
    scores = None
    if noted["scored"]:
        table = pq.read_table(pa.BufferReader(_verified(folder, files, SCORES)))
        of = dict(zip(table["id"].to_pylist(), table["score"].to_numpy(), strict=True))
        scores = np.array([of[example.id] for example in pool])
    return DataChoice(positions, noted["facts"], scores)


def _verified(folder: RunPath, files: Mapping[str, Any], name: str) -> bytes:
    """Content of a file, verified against the hash in the manifest."""
    content = (folder / name).read_bytes(limit=files[name]["size"])
    if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
        raise ValueError(f"{name} has a different SHA-256 than when it was written")
    return content
