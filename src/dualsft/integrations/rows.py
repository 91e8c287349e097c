"""`dualsft export data`: the rows of a run as data for other tools.

`parquet` and `datasets` have every row that the run could select, with its score and rank; `trl`
and `llamafactory` have the selected rows as those trainers read them, so that they make the labels
that the run made, or an error where they cannot. The texts come from `data.path`, whose rows are
compared with the run by their content hashes; 1_split, 4_scores and 5_selection are read from the
run folder. Not part of Algorithm 1.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from dualsft.config import settings
from dualsft.config.settings import Config
from dualsft.data.formats import Turn
from dualsft.data.rows import Row, read_rows
from dualsft.data.templates import request_text
from dualsft.errors import ConfigError, DataError, RunError
from dualsft.runs.context import RunContext
from dualsft.runs.decisions import ranks_of, scores_of, states_of
from dualsft.runs.folder import RunDir
from dualsft.runs.preflight import FOLDERS, check_run_folder, load_summaries, reading
from dualsft.storage.manifest import damage
from dualsft.system.paths import Place, run_path
from dualsft.system.progress import Reporter

Rows = list[dict[str, Any]]
NAME = "dualsft_selected"
"""The entry of dataset_info.json."""


@dataclass(frozen=True)
class Decided:
    """The rows that a run could select, in source order, and what it decided."""

    rows: list[Row]
    sources: list[str | None]
    scores: np.ndarray
    """nan for a row without a score."""
    ranks: np.ndarray
    """From 1; 0 without a score."""
    chosen: np.ndarray

    @property
    def selected(self) -> list[Row]:
        return [row for row, chosen in zip(self.rows, self.chosen, strict=True) if chosen]

    def table(self) -> pa.Table:
        """One row per row. `row` is the source's own, as JSON; prompt and response are its texts
        (of several turns the last ones), null for a row that has none."""
        scored = self.ranks == 0
        return pa.table(
            {
                "id": [row.id for row in self.rows],
                "index": pa.array([row.index for row in self.rows], pa.int64()),
                "source": pa.array(self.sources, pa.string()),
                "prompt": pa.array([row.prompt or None for row in self.rows], pa.string()),
                "response": pa.array([row.response or None for row in self.rows], pa.string()),
                "score": pa.array(self.scores, pa.float64(), mask=scored),
                "rank": pa.array(self.ranks, pa.int64(), mask=scored),
                "selected": pa.array(self.chosen, pa.bool_()),
                "row": pa.array([row.raw.decode() for row in self.rows], pa.string()),
            }
        )


def export_data(run: str | Place, out: Path, kind: str, consent: Sequence[str] = ()) -> list[str]:
    """Write the rows of a run to `out` as `kind` (a key of `KINDS`); returns lines to show.

    `consent` has settings that a received run folder cannot give, such as `data.path=...`.
    """
    if kind not in KINDS:
        raise ConfigError(f"--format: {kind!r} is not known; use one of {', '.join(KINDS)}")
    if os.path.lexists(out):
        raise ConfigError(f"{out}: exists; give the name of a new file or folder")
    folder = run_path(run)
    check_run_folder(folder)
    config = settings.load(folder / "config.yaml", consent)
    facts = load_summaries(folder)
    decided = read_decided(RunContext(config, RunDir(folder), Reporter(lambda _: None)), facts)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        lines = KINDS[kind](decided, part, config, facts)
        part.rename(out)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)
    return [f"{out}: {lines[0]}", *lines[1:]]


def read_decided(ctx: RunContext, facts: Mapping[str, Any]) -> Decided:
    """The rows that a run could select, from its folder and from data.path; checks both."""
    run, data = ctx.rundir.path, ctx.config.data
    if "selection" not in facts["manifests"]:
        raise RunError(
            f"{run}: has no finished, up-to-date stage selection; run `dualsft select {run}` first"
        )
    with reading(run):
        final = facts["selection"]["final"]
        ids_file = "ids.json" if final == "." else f"{final}/ids.json"
        files = {"split": {"split.parquet"}, "scores": {"examples.parquet"}}
        files["selection"] = {ids_file, "rescored.parquet", "baseline_scores.parquet"}
        for stage in files.keys() & facts["manifests"].keys():
            reasons, _ = damage(run / FOLDERS[stage], facts["manifests"][stage], only=files[stage])
            if reasons:
                why = "\n".join(f"{run / FOLDERS[stage]}: {reason}" for reason in reasons)
                raise RunError(f"{why}\nrun the same `dualsft run` again: it repairs the stage")
        split = (run / "1_split/split.parquet").read_table()
        ids, roles = split["id"].to_pylist(), split["role"].to_pylist()
        named = split["source"].to_pylist() if "source" in split.column_names else [None] * len(ids)
        state = np.array(states_of(run, facts, ids, roles))
        chosen = state == "selected"
        offered = chosen | (state == "rejected")
        scores = scores_of(run, facts, ids)[0]
        ranks = ranks_of(scores, chosen, offered)[0]
    rows = {row.id: row for row in read_rows(ctx.data_path(data.path), data)[0]}
    at = np.flatnonzero(offered)
    if absent := [ids[i] for i in at if ids[i] not in rows]:
        raise DataError(
            f"{data.path}: has {len(at) - len(absent):,} of the {len(at):,} rows that the run read "
            f"(the first that it lacks was number {absent[0].rpartition('-')[2]}, counted from 0): "
            "the data has changed; restore it, or name it with data.path=..."
        )
    return Decided(
        [rows[ids[i]] for i in at], [named[i] for i in at], scores[at], ranks[at], chosen[at]
    )


# --- formats ------------------------------------------------------------------------------------


def _parquet(decided: Decided, out: Path, *_: Any) -> list[str]:
    pq.write_table(decided.table(), out, compression="zstd")
    return [f"{len(decided.rows):,} rows, {len(decided.selected):,} of them selected"]


def _datasets(decided: Decided, out: Path, *_: Any) -> list[str]:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            "--format datasets: needs the package 'datasets'; install dualsft[data], or give "
            "--format parquet"
        )
    import datasets

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    datasets.Dataset(decided.table()).save_to_disk(out)
    if bars:
        datasets.enable_progress_bars()
    count = len(decided.selected)
    return [f"{len(decided.rows):,} rows, {count:,} selected; datasets.load_from_disk reads it"]


def _trl(decided: Decided, out: Path, config: Config, _: Any) -> list[str]:
    rows, cure = trl_rows(decided.selected, config.data.template)
    out.write_text(_json_lines(rows), encoding="utf-8")
    return [f"{len(rows):,} rows with {', '.join(rows[0])}", f"SFTTrainer: {cure}"]


def _llamafactory(decided: Decided, out: Path, config: Config, facts: Any) -> list[str]:
    rows, entry, training = llamafactory_rows(decided.selected)
    training = _training(config, facts, len(rows)) | training
    out.mkdir()
    (out / "selected.jsonl").write_text(_json_lines(rows), encoding="utf-8")
    (out / "dataset_info.json").write_text(json.dumps({NAME: entry}, indent=2) + "\n")
    (out / "train.yaml").write_text(yaml.safe_dump(training, sort_keys=False))
    lines = [
        f"{len(rows):,} rows, dataset_info.json, train.yaml",
        "in this folder: llamafactory-cli train train.yaml (it trains all weights: the mask of the "
        "run is not in it)",
    ]
    if config.data.template != "chat" and training["stage"] == "sft":
        lines.append(
            f"the run used data.template={config.data.template}; set template in train.yaml, or it "
            "is the tokenizer's chat template"
        )
    return lines


Writer = Callable[[Decided, Path, Config, Any], list[str]]
KINDS: dict[str, Writer] = {
    "parquet": _parquet,
    "datasets": _datasets,
    "trl": _trl,
    "llamafactory": _llamafactory,
}


def _json_lines(rows: Rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# --- rows for trainers ----------------------------------------------------------------------------


def _kind(rows: Sequence[Row], tool: str, allowed: Sequence[str]) -> str:
    """turns, text, tokens or segments: what all rows are."""

    def of(row: Row) -> str:
        own = "tokens" if row.tokens is not None else "segments" if row.pieces else "text"
        return own if row.whole else "turns"

    places = {of(row): row.place for row in rows}
    if len(places) > 1:
        found = "; ".join(f"{kind} as in {place}" for kind, place in places.items())
        raise ConfigError(
            f"--format {tool}: the selected rows are of several kinds, which one dataset of {tool} "
            f"cannot hold ({found}); give --format parquet"
        )
    [kind] = places
    if kind not in allowed:
        raise ConfigError(f"--format {tool}: {tool} has no rows of {kind}; give --format parquet")
    return kind


def _turns(row: Row) -> tuple[Turn, ...]:
    pair = {"role": "user", "content": row.prompt}, {"role": "assistant", "content": row.response}
    return row.turns or pair


def _trained(rows: Sequence[Row], tool: str) -> tuple[bool, bool]:
    """Whether in every row the last answer alone is trained on, and whether all answers are."""
    last, every = {}, {}
    for row in rows:
        turns = _turns(row)
        answers = [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]
        on = [k for k in answers if k >= row.trained_from and turns[k].get("weight") != 0]
        last[row.place], every[row.place] = on == [len(turns) - 1], on == answers
    if not (all(last.values()) or all(every.values())):
        places = [next(p for p, fits in found.items() if not fits) for found in (last, every)]
        raise ConfigError(
            f"--format {tool}: {tool} trains on every answer of a row or on its last one, the same "
            f"for all rows; {places[0]} needs the first, {places[1]} the second: give --format "
            "parquet"
        )
    return all(last.values()), all(every.values())


def trl_rows(rows: Sequence[Row], template: str) -> tuple[Rows, str]:
    """The rows in one schema of TRL, and how SFTTrainer makes their labels from it."""
    kind = _kind(rows, "trl", ("turns", "text", "tokens"))
    if kind == "text":
        return [{"text": row.response} for row in rows], "no setting is needed"
    if kind == "tokens":
        tokens = [row.tokens for row in rows if row.tokens is not None]
        return [{"input_ids": t.ids, "labels": t.labels} for t in tokens], "no setting is needed"
    completion = "completion_only_loss=True, its default for these rows"
    if template != "chat":
        return [_text_pair(row, template) for row in rows], completion
    last, _ = _trained(rows, "trl")
    tools = any(row.tools for row in rows)
    made: Rows = []
    for row in rows:
        turns = [{k: v for k, v in turn.items() if k != "weight"} for turn in _turns(row)]
        one = {"prompt": turns[:-1], "completion": turns[-1:]} if last else {"messages": turns}
        schemas = {"tools": json.dumps(row.tools) if row.tools else None} if tools else {}
        made.append(one | schemas)
    return made, completion if last else "set assistant_only_loss=True"


def _text_pair(row: Row, template: str) -> dict[str, Any]:
    """A row of one round under a text template, as prompt and completion."""
    turns = list(_turns(row))
    system = turns.pop(0)["content"] if turns[0]["role"] in ("system", "developer") else ""
    if len(turns) != 2:
        raise ConfigError(
            f"--format trl: {row.place} has several rounds, which data.template={template} writes "
            "as text and trl cannot; give --format parquet"
        )
    prompt = request_text(template, turns[0]["content"], system=system)
    return {"prompt": prompt, "completion": turns[1]["content"]}


def llamafactory_rows(rows: Sequence[Row]) -> tuple[Rows, dict[str, Any], dict[str, Any]]:
    """The rows, their entry of dataset_info.json, and the settings of training that they need."""
    entry: dict[str, Any] = {"file_name": "selected.jsonl"}
    if _kind(rows, "llamafactory", ("turns", "text")) == "text":
        columns = {"columns": {"prompt": "text"}}
        return [{"text": row.response} for row in rows], entry | columns, {"stage": "pt"}
    names = ("role", "content", "user", "assistant", "observation", "function", "system")
    words = {name: "function_call" if name == "function" else name for name in names}
    entry |= {
        "formatting": "sharegpt",
        "columns": {name: name for name in ("messages", "system", "tools")},
        "tags": {f"{name}_tag": word for name, word in words.items()},
    }
    _, every = _trained(rows, "llamafactory")
    return [_spoken(row) for row in rows], entry, {} if every else {"mask_history": True}


def _spoken(row: Row) -> dict[str, Any]:
    """A row in LLaMA-Factory's form, which drops a conversation whose turns do not alternate."""
    turns = list(_turns(row))
    system = turns.pop(0)["content"] if turns[0]["role"] in ("system", "developer") else ""
    said: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        if calls := turn.get("tool_calls"):
            named = [call.get("function", call) for call in calls]
            called = [{k: call.get(k) for k in ("name", "arguments")} for call in named]
            role, content = "function_call", json.dumps(called, ensure_ascii=False)
        role = "observation" if role in ("tool", "function") else role
        asked = role in ("user", "observation")
        if role == "system" or asked == number % 2 or (calls and turn["content"].strip()):
            raise ConfigError(
                f"--format llamafactory: {row.place} does not alternate between user (or tool) and "
                "assistant, or has text beside a tool call; LLaMA-Factory drops such a row: give "
                "--format trl or parquet"
            )
        said.append({"role": role, "content": content})
    tools = json.dumps([t.get("function", t) for t in row.tools]) if row.tools else ""
    return {"messages": said, "system": system, "tools": tools}


def _training(config: Config, facts: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """LLaMA-Factory's settings of full fine-tuning, with the numbers of the run."""
    tune = config.finetune
    resolved: Any = facts.get("finetune", {}).get("auto") or {}

    def number(name: str, default: float) -> float:
        value = getattr(tune, name)
        value = resolved.get(f"finetune.{name}", default) if value == "auto" else value
        return value if isinstance(value, int | float) else default

    batch_size, epochs = number("batch_size", 16), number("epochs", 3)
    num_steps = math.ceil(num_rows / batch_size) * epochs
    model = Path(config.model.path).expanduser()  # the training starts in another folder
    return {
        "model_name_or_path": str(model.resolve()) if model.exists() else config.model.path,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": NAME,
        "dataset_dir": ".",
        "cutoff_len": config.data.max_length,
        "output_dir": "saves",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": batch_size,
        "learning_rate": number("lr", 2e-5),
        "num_train_epochs": epochs,
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(tune.warmup_ratio * num_steps),  # newer ones have no warmup_ratio
        "max_grad_norm": tune.max_grad_norm,
        "weight_decay": tune.weight_decay,
    }
