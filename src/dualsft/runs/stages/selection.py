"""Selection: Algorithm 1 lines 9 to 11, m_θ ← TopK(s_θ, k) and D_sel ← TopB(s_D, b).

`run` calls the run's methods (`runs/method.py`), examples first, checks their budgets and writes
the files. A mask is stored as sorted flat indices by parameter name, a subset as the lines of the
source file, byte for byte. Reads 1_split to 4_scores and the source file; writes mask.safetensors,
selected.jsonl, ids.json, rescored.parquet, baseline_scores.parquet, summary.json, and round_<t>/
for each round of fixed-side re-selection.

Runs that differ only on the parameter side (LESS, LESS + S²FT, LESS + NanoAdam) select the same
examples, and that selection may cost more than the rest of the run. The manifest therefore stores
a fingerprint of the inputs of the example selection (`data_choice`), and a selection with the same
fingerprint reuses the examples, scores, warnings and cost accounts of a cached run or of the
selection that it replaces. DualSFT's own methods do not need this: they read the scores, a stage
that is reused as a whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dualsft.algorithm.quotas import make_strata
from dualsft.algorithm.selection import (
    mask_jaccard,
    per_expert,
    reselect_entries,
    reselect_examples,
)
from dualsft.algorithm.split import full_size, resolve_budget
from dualsft.config.methods import Entry
from dualsft.data.examples import Example
from dualsft.data.rows import source_lines
from dualsft.distributed.world import world
from dualsft.errors import ConfigError, RunError
from dualsft.model.load import locate
from dualsft.runs.context import RunContext, Settings, pass_settings
from dualsft.runs.method import (
    Accounts,
    DataChoice,
    DataMethod,
    Job,
    ParamMethod,
    Scoring,
    describe_entries,
)
from dualsft.runs.preflight import FOLDERS, reading
from dualsft.storage.manifest import Fingerprint, read_stage_manifest
from dualsft.storage.tensor_files import TensorFile
from dualsft.storage.vectors import of_all
from dualsft.system.paths import Place, RunPath
from dualsft.system.progress import NOTE

SHOWN_SOURCES = 12
"""Sources in the log; summary.json has all."""
IDS, SCORES = "ids.json", "baseline_scores.parquet"


def settings(ctx: RunContext) -> Settings:
    chosen, methods = ctx.pick("select.*"), ctx.methods
    if not methods.entries["data"].uses_budget:
        del chosen["select.data_budget"]
    if methods.entries["params"].uses_budget:
        chosen |= ctx.pick("method.denominator")
    else:
        del chosen["select.param_budget"]
    if not ctx.config.select.rounds:
        del chosen["select.order"]
    if ctx.config.select.duplicates == "keep":
        del chosen["select.duplicates"]
    if ctx.config.select.per_source is None:
        del chosen["select.per_source"]
    if ctx.config.select.lengths == "any":
        del chosen["select.lengths"]
    chosen |= methods.settings("data") | methods.settings("params")
    return chosen | _own_passes(ctx, methods.entries.values())


def _own_passes(ctx: RunContext, entries: Iterable[Entry]) -> Settings:
    """Settings of methods that run the model themselves.

    DualSFT's own methods read the scores instead, a stage whose fingerprint covers these settings.
    """
    others = [entry for entry in entries if "scores" not in entry.needs and entry.name != "all"]
    chosen: Settings = {}
    if others:
        chosen |= ctx.weight_hashes() | ctx.training_settings()
        chosen |= ctx.pick("score.candidates", "seed")
    if any(entry.trains for entry in others):
        chosen |= ctx.pick("finetune.*")
        for key in ("checkpointing", "retention", "retention_batch"):  # of fine-tuning itself
            del chosen[f"finetune.{key}"]
    elif any(entry.follows_lr for entry in others):
        chosen["finetune.lr"] = ctx.base_lr()
    return chosen


def run(ctx: RunContext, part: RunPath) -> dict[str, Any]:
    """Select examples and entries with the run's methods; write both to `part`."""
    common: dict[str, Any] = {}
    data, params = Job(ctx, "data", part, common=common), Job(ctx, "params", part, common=common)
    summary: dict[str, Any] = {
        "variant": ctx.config.select.variant,
        "methods": {axis: ctx.methods.entries[axis].name for axis in ("data", "params")},
        "final": ".",
    }
    params.examples, positions, noted = _choose_data(data, summary)
    _choose_params(params, summary)
    if ctx.config.select.rounds:
        assert positions is not None
        summary |= _reselect(Scoring.shared(params), part, positions)
    (part / "summary.json").write_json(summary)
    facts = {key: summary[key] for key in ("k", "b", "rescored") if key in summary}
    # timings vary between runs, so they go to the manifest, not to summary.json
    accounts = {"data": data.accounts.as_dict(), "params": params.accounts.as_dict()}
    return facts | {"accounts": accounts} | noted


def _choose_data(
    job: Job, summary: dict[str, Any]
) -> tuple[list[Example], np.ndarray | None, dict[str, Any]]:
    """(training examples, their positions in the pool, manifest facts).

    The positions are None if the method chose everything.
    """
    ctx = job.ctx
    method: DataMethod = ctx.methods.load("data")
    counts = {role: len(rows) for role, rows in job.roles.items()}
    num_full = full_size(counts, ctx.config.data)
    pool = [e for role in method.pool_roles for e in job.roles[role]]
    pool.sort(key=lambda e: e.index)
    b = data_budget(ctx, num_full, len(pool)) if method.entry.uses_budget else len(pool)
    identity = _choice_identity(ctx)
    num_warnings = len(ctx.reporter.warnings)
    if (cached := _find_choice(ctx, identity, pool, b)) is not None:
        ctx.reporter.say(f"the examples of {method.entry.name} are reused from {cached.folder}")
        choice, job.accounts = cached.choice, cached.accounts
        for warning, code in cached.warnings.items():
            ctx.reporter.warn(warning, code)
    else:
        with job.measured():
            choice = method.choose(job, pool, b)
    if choice is None:
        summary |= _describe_sources(ctx, pool, np.arange(len(pool)))
        return pool, None, {}
    positions = np.sort(np.asarray(choice.positions))
    if len(np.unique(positions)) != b or not 0 <= positions[0] <= positions[-1] < len(pool):
        raise RunError(
            f"method.data={method.entry.name} chose {len(np.unique(positions)):,} distinct "
            f"examples instead of {b:,} of {len(pool):,}: this is a bug in the method"
        )
    lengths = np.array([e.num_response_tokens for e in pool])
    summary |= {
        "b": b,
        "num_full": num_full,
        "data_share": b / num_full,
        "response_tokens_selected": float(lengths[positions].mean()),
        "response_tokens_pool": float(lengths.mean()),
        "response_quantiles_selected": _quantiles(lengths[positions]),
        "response_quantiles_pool": _quantiles(lengths),
        **choice.facts,
    }
    rows = [pool[i] for i in positions]
    _write_selected(ctx, job.part, rows)
    if choice.scores is not None:
        scores = {"id": [e.id for e in pool], "score": np.asarray(choice.scores, np.float64)}
        (job.part / SCORES).write_table(pa.table(scores))
    if not ctx.methods.scored("data"):
        ctx.reporter.say(
            f"examples: {b:,} of {num_full:,} rows ({100 * b / num_full:.2f} %) by "
            f"{method.entry.name}"
        )
    summary |= _describe_sources(ctx, pool, positions)
    if identity is None:
        return rows, positions, {}
    warnings = ctx.reporter.warnings[num_warnings:]
    noted: dict[str, Any] = {
        "data_choice": {
            "fingerprint": identity,
            "facts": dict(choice.facts),
            "warnings": warnings,
            "codes": [ctx.reporter.codes[text] for text in warnings],
            "scored": choice.scores is not None,
        }
    }
    if cached is not None:
        cost = job.accounts.as_dict()
        noted["taken_over"] = {key: cost[key] for key in ("seconds", "peak_bytes")}
    return rows, positions, noted


def _quantiles(lengths: np.ndarray) -> dict[str, int]:
    """Three quantiles of response lengths in tokens, each the length of a response."""
    found = np.quantile(lengths, (0.1, 0.5, 0.9), method="inverted_cdf")
    return dict(zip(("p10", "median", "p90"), map(int, found), strict=True))


def _describe_sources(
    ctx: RunContext, pool: Sequence[Example], positions: np.ndarray
) -> dict[str, Any]:
    """Pool and selected examples of each source, with mean response lengths; logs one line.

    Empty if the corpus has no sources.
    """
    sources = np.array([e.source for e in pool])
    if not sources.any():
        return {}
    lengths, chosen = np.array([e.num_response_tokens for e in pool]), np.zeros(len(pool), bool)
    chosen[positions] = True
    found: dict[str, Any] = {}
    for name in np.unique(sources).tolist():
        own = sources == name
        taken = own & chosen
        found[name] = {
            "pool": int(own.sum()),
            "selected": int(taken.sum()),
            "response_tokens_pool": float(lengths[own].mean()),
            "response_tokens_selected": float(lengths[taken].mean()) if taken.any() else None,
        }
    largest = sorted(found, key=lambda name: -found[name]["pool"])
    shown = [
        f"{name} {found[name]['selected']:,} of {found[name]['pool']:,}"
        for name in largest[:SHOWN_SOURCES]
    ]
    more = len(largest) - len(shown)
    shown += [f"{more:,} more"] if more else []
    ctx.reporter.say(f"selected of each source: {', '.join(shown)}")
    return {"sources": found}


def _choose_params(job: Job, summary: dict[str, Any]) -> None:
    ctx = job.ctx
    method: ParamMethod = ctx.methods.load("params")
    eligible = method.eligible(job)
    k = param_budget(ctx, eligible) if method.entry.uses_budget else 0
    with job.measured():
        choice = method.choose(job, k)
    if choice is None:
        return
    count = sum(index.numel() for index in choice.indices.values())
    if method.entry.uses_budget and count > k and not choice.literal:
        raise RunError(
            f"method.params={method.entry.name} chose {count:,} entries, more than the budget of "
            f"{k:,}: this is a bug in the method"
        )
    summary |= _write_mask(ctx, job.part, choice.indices, denominator(ctx, eligible))
    asked = None if choice.literal else k or None
    summary |= {"budget_entries": asked, **choice.facts}


def _reselect(scoring: Scoring, part: RunPath, positions: np.ndarray) -> dict[str, Any]:
    """Fixed-side re-selection: each round re-selects one side given the latest other side.

    The paper's Data → Param (`reselect_entries`) and Param → Data (`reselect_examples`);
    `select.order` sets which side is first. Each round_<t>/ holds the complete pair after that
    round, `part` itself the one-shot selection, and `final` in summary.json names the round that
    fine-tuning uses.
    """
    ctx, engine, pool, scored, mask = (
        scoring.ctx,
        scoring.engine,
        scoring.pool,
        scoring.scored,
        scoring.mask,
    )
    assert mask is not None
    passes, history = pass_settings(ctx), []
    for number in range(1, ctx.config.select.rounds + 1):
        moves_mask = (ctx.config.select.order == "data_to_param") == (number % 2 == 1)
        side = "parameters" if moves_mask else "examples"
        label = f"round {number} ({side})"
        if moves_mask:
            rows, k = [pool[i] for i in positions], mask.num_selected
            new_mask = reselect_entries(engine, rows, scored, k, passes, ctx.reporter, label)
            overlap = mask_jaccard(mask, new_mask)
            mask = new_mask
        else:
            b = len(positions)
            chosen = reselect_examples(engine, pool, scored, mask, b, passes, ctx.reporter, label)
            shared = len(np.intersect1d(positions, chosen))
            overlap = shared / (len(positions) + len(chosen) - shared)
            positions = chosen
        folder = part / f"round_{number}"
        folder.mkdir()
        history.append({"round": number, "moved": side, "jaccard": overlap})
        facts = history[-1] | _write_mask(ctx, folder, mask.indices, mask.num_total)
        facts |= describe_entries(ctx, mask)
        _write_selected(ctx, folder, [pool[i] for i in positions])
        (folder / "summary.json").write_json(facts)
    return {"rounds": history, "final": f"round_{len(history)}"}


# --- budgets -------------------------------------------------------------------------------------


def data_budget(ctx: RunContext, num_full: int, num_pool: int) -> int:
    """b, from a share of |D_full|; raises if it exceeds the pool."""
    budget = ctx.config.select.data_budget
    b = resolve_budget(budget, num_full, "select.data_budget")
    if b > num_pool:
        raise ConfigError(
            f"select.data_budget: {budget!r} of {num_full:,} rows is {b:,} examples, but the "
            f"scoring pool has {num_pool:,}; lower it, or split.val, split.anchor, split.warm"
        )
    return b


def num_trained(ctx: RunContext) -> int:
    """Number of rows that fine-tuning uses: b, or all of D_train."""
    data: DataMethod = ctx.methods.load("data")
    counts = ctx.counts
    num_pool = sum(counts[role] for role in data.pool_roles)
    if not data.entry.uses_budget:
        return num_pool
    return data_budget(ctx, full_size(counts, ctx.config.data), num_pool)


def denominator(ctx: RunContext, eligible: Mapping[str, torch.Size]) -> int:
    """Number of entries that a fractional select.param_budget refers to (`method.denominator`)."""
    counts = {
        "candidates": ctx.num_candidates,
        "all": ctx.num_parameters,
        "eligible": sum(shape.numel() for shape in eligible.values()),
    }
    return counts[ctx.config.method.denominator]


def param_budget(ctx: RunContext, eligible: Mapping[str, torch.Size]) -> int:
    """k, from a share of the denominator; raises if it exceeds the eligible entries."""
    budget, total = ctx.config.select.param_budget, denominator(ctx, eligible)
    most = sum(shape.numel() for shape in eligible.values())
    k = resolve_budget(budget, total, "select.param_budget")
    if k > most:
        what = "candidate entries" if ctx.methods.scored("params") else "entries it chooses from"
        raise ConfigError(
            f"select.param_budget: {budget!r} is {k:,} entries, more than the {most:,} {what} "
            f"(score.candidates={ctx.config.score.candidates}); lower it"
        )
    return k


def check_budgets(ctx: RunContext) -> None:
    """Raise if b exceeds the pool, a quota its source, or k the candidates.

    Called after the split, before scoring.
    """
    roles = ctx.roles()
    data: DataMethod = ctx.methods.load("data")
    if data.entry.uses_budget:
        pool = [example for role in data.pool_roles for example in roles[role]]
        make_strata(num_trained(ctx), pool, ctx.config.select.per_source, ctx.config.select.lengths)
    params: ParamMethod = ctx.methods.load("params")
    job = Job(ctx, "params", ctx.folder("selection"))
    params.check(job)
    if params.entry.uses_budget:
        param_budget(ctx, params.eligible(job))


# --- files ---------------------------------------------------------------------------------------


def _write_mask(
    ctx: RunContext, folder: RunPath, indices: Mapping[str, Tensor], denominator: int
) -> dict[str, Any]:
    """Write mask.safetensors; returns the number of selected entries per layer and module."""
    every = of_all(_own_part(indices, ctx.parameter_shapes))
    every.write(folder / "mask.safetensors", {})
    counts = {name: form.num_entries for name, form in every.forms.items()}
    layers: dict[str, int] = defaultdict(int)
    modules: dict[str, int] = defaultdict(int)
    for name, entries in counts.items():
        layer, module = locate(name)
        layers["other" if layer is None else str(layer)] += entries
        modules[module] += entries
    count, of = sum(counts.values()), ctx.config.method.denominator
    share = count / denominator
    named = {"candidates": "candidates", "all": "parameters", "eligible": "eligible entries"}[of]
    ctx.reporter.say(f"parameters: {count:,} of {denominator:,} {named} ({100 * share:.2f} %)")
    experts = per_expert(indices, ctx.parameter_shapes)
    return {
        "k": count,
        "denominator": denominator,
        "denominator_of": of,
        "share": share,
        "per_layer": dict(layers),
        "per_module": dict(modules),
        **({"per_expert": experts} if experts else {}),
    }


def _write_selected(ctx: RunContext, folder: RunPath, chosen: list[Example]) -> None:
    """Write selected.jsonl and ids.json, in source order.

    JSON lines are copied byte for byte; rows of other formats are written as compact JSON.
    """
    rows = sorted(chosen, key=lambda e: e.index)
    data = ctx.config.data
    lines = source_lines(ctx.data_path(data.path), {e.index: e.id for e in rows}, data)
    with (folder / "selected.jsonl").open("wb") as out:
        for row in rows:
            out.write(lines[row.index] + b"\n")
    (folder / IDS).write_text(json.dumps([row.id for row in rows]) + "\n")


def read_mask(
    folder: Place, shapes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """Selected flat indices by parameter name; parameters without selected entries are omitted.

    Given the parameters' shapes, each process of a sharded world keeps the indices in its rows.
    """
    with reading(folder / "mask.safetensors"):
        stored = TensorFile(folder / "mask.safetensors").tensors().items()
        found = {name: index for name, index in stored if index.numel()}
        if not found:
            raise ValueError("it selects no entry")
        for name, index in found.items():
            check_indices(name, index, None if shapes is None else shapes[name])
    return found if shapes is None else _own_part(found, shapes)


def check_indices(name: str, index: Tensor, shape: Sequence[int] | None) -> None:
    """Raise unless these are sorted positions, and inside the parameter if its shape is known."""
    flat = index.dtype == torch.int64 and index.dim() == 1
    if not flat or int(index[0]) < 0 or bool((index[1:] <= index[:-1]).any()):
        raise ValueError(f"the indices of {name} are not sorted int64 positions")
    if shape is not None and int(index[-1]) >= math.prod(shape):
        raise ValueError(f"index {int(index[-1])} is outside {name}")


def final_folder(selection: RunPath) -> RunPath:
    """Folder of the selection that fine-tuning uses: the last round, or 5_selection itself."""
    with reading(selection / "summary.json"):
        return selection / (selection / "summary.json").read_json()["final"]


def _own_part(
    indices: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """The indices in this process's rows of each parameter."""
    found = {}
    for name, index in indices.items():
        borders = torch.tensor(world().held(shapes[name])).to(index)
        first, last = torch.searchsorted(index, borders).tolist()
        found[name] = index[first:last]
    return found


# --- reuse of an example selection ---------------------------------------------------------------


@dataclass(frozen=True)
class _CachedChoice:
    """A reusable example selection: choice, cost, warnings and folder."""

    choice: DataChoice
    accounts: Accounts
    warnings: Mapping[str, str]
    """Warning code by message."""
    folder: RunPath


def _choice_identity(ctx: RunContext) -> str | None:
    """Hash of everything that the example selection depends on; None if it is not reusable."""
    entry = ctx.methods.entries["data"]
    if not entry.lends or entry.parallel:
        return None
    reads: dict[str, str] = {}
    for name in ("split", *ctx.methods.needs_of("data")):
        manifest, wrong = read_stage_manifest(ctx.folder(name))
        if wrong:
            return None
        reads[name] = manifest["fingerprint"]["hash"]
    chosen = ctx.pick("select.data_budget") | ctx.methods.settings("data")
    return Fingerprint(chosen | _own_passes(ctx, [entry]), reads).hash


def _find_choice(
    ctx: RunContext, identity: str | None, pool: Sequence[Example], b: int
) -> _CachedChoice | None:
    """Find the same example selection, intact, in this run or a cached run; None if not found."""
    for run in (ctx.rundir.path, *ctx.lenders) if identity is not None else ():
        folder = run / FOLDERS["selection"]
        if not folder.is_dir():
            continue
        manifest, wrong = read_stage_manifest(folder)
        try:
            if wrong:
                raise ValueError(wrong)
            facts = manifest["facts"]
            noted = facts.get("data_choice") or {}
            if noted.get("fingerprint") == identity:
                choice = _read_choice(folder, manifest["files"], pool, b, noted)
                accounts = Accounts(**facts["accounts"]["data"])
                codes = noted.get("codes") or [NOTE] * len(noted["warnings"])
                warnings = dict(zip(noted["warnings"], codes, strict=True))
                return _CachedChoice(choice, accounts, warnings, folder)
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RunError) as problem:
            why = f"{type(problem).__name__}: {problem}"  # written by another version, or damaged
            ctx.reporter.say(f"{folder}: its selection of examples cannot be reused ({why})")
    return None


def _read_choice(
    folder: RunPath,
    files: Mapping[str, Any],
    pool: Sequence[Example],
    b: int,
    noted: Mapping[str, Any],
) -> DataChoice:
    """The stored choice as positions in `pool`, each file verified against the manifest."""

    def verified(name: str) -> bytes:
        content = (folder / name).read_bytes(limit=files[name]["size"])
        if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
            raise ValueError(f"{name} has a different SHA-256 than when it was written")
        return content

    place = {example.id: i for i, example in enumerate(pool)}
    chosen = json.loads(verified(IDS))
    positions = np.sort(np.array([place[one] for one in chosen], np.int64))
    if len(set(chosen)) != b:
        raise ValueError(f"{len(set(chosen))} examples instead of {b}")
    scores = None
    if noted["scored"]:
        table = pq.read_table(pa.BufferReader(verified(SCORES)))
        of = dict(zip(table["id"].to_pylist(), table["score"].to_numpy(), strict=True))
        scores = np.array([of[example.id] for example in pool])
    return DataChoice(positions, noted["facts"], scores)
