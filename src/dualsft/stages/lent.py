"""A choice of examples that another run of a comparison has made: Algorithm 1 line 11, once.

Rows of a table that differ on the parameter side alone (LESS, LESS + S²FT, LESS + NanoAdam) have
the same question on the data side, and its answer may cost more than all the rest. A selection
therefore notes in its manifest what its choice of examples depends on (`data_choice`), and one that
finds the same note in a lender (`pipeline.run`) takes the examples, the scores and the accounts
from there. DualSFT's own choice reads the scores, a stage that is shared as a whole.
Reads the lenders' 5_selection; writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dualsft.context import RunContext
from dualsft.data import Example
from dualsft.distributed import world
from dualsft.manifest import Fingerprint, damage, read_stage_manifest
from dualsft.method import Accounts, DataChoice
from dualsft.preflight import FOLDERS
from dualsft.stage_settings import data_choice_settings

IDS, SCORES = "ids.json", "baseline_scores.parquet"


@dataclass(frozen=True)
class Lent:
    """What another run chose, what it took there, and where that is."""

    choice: DataChoice
    accounts: Accounts
    folder: Path


def identity(ctx: RunContext) -> str | None:
    """A hash of everything that the choice of examples depends on.

    None where nothing is gained by asking: all examples, DualSFT's scores, several processes at it.
    """
    entry = ctx.methods.entries["data"]
    if not entry.uses_budget or "scores" in entry.needs or world().size > 1:
        return None
    read = ["split", *(name for name in entry.needs if ctx.folder(name).is_dir())]
    reads = {name: _fingerprint(ctx.folder(name)) for name in read}
    return Fingerprint(data_choice_settings(ctx), reads).hash


def _fingerprint(folder: Path) -> str:
    manifest, wrong = read_stage_manifest(folder)
    assert not wrong, wrong
    return manifest["fingerprint"]["hash"]


def note(asked: str | None, facts: Mapping[str, Any], lent: Lent | None) -> dict[str, Any]:
    """What a selection's manifest says of its choice of examples."""
    if asked is None:
        return {}
    noted: dict[str, Any] = {"fingerprint": asked, "facts": dict(facts)}
    if lent is not None:  # time and memory that this stage's own do not hold
        accounts = lent.accounts
        noted["taken_over"] = {"seconds": accounts.seconds, "peak_bytes": accounts.peak_bytes}
    return {"data_choice": noted}


def find(ctx: RunContext, asked: str | None, pool: Sequence[Example]) -> Lent | None:
    """The same choice in a lender, whole; None where there is none."""
    for run in ctx.lenders if asked is not None else ():
        folder = run / FOLDERS["selection"]
        if folder.absolute() == ctx.rundir.stage_path(FOLDERS["selection"]).absolute():
            continue
        manifest, wrong = read_stage_manifest(folder)
        noted = {} if wrong else manifest["facts"].get("data_choice") or {}
        if noted.get("fingerprint") == asked and not damage(folder, manifest, {IDS, SCORES})[0]:
            accounts = Accounts(**manifest["facts"]["accounts"]["data"])
            return Lent(_read(folder, manifest, pool, noted["facts"]), accounts, folder)
    return None


def _read(
    folder: Path, manifest: Mapping[str, Any], pool: Sequence[Example], facts: Mapping[str, Any]
) -> DataChoice:
    place = {example.id: i for i, example in enumerate(pool)}
    chosen = json.loads((folder / IDS).read_text())
    positions = np.sort(np.array([place[one] for one in chosen]))
    scores = None
    if SCORES in manifest["files"]:
        table = pq.read_table(folder / SCORES)
        of = dict(zip(table["id"].to_pylist(), table["score"].to_numpy(), strict=True))
        scores = np.array([of[example.id] for example in pool])
    return DataChoice(positions, facts, scores)
