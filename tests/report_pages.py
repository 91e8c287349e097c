"""Runs for the tests of report.html: one with hostile rows, one with 100,000 examples."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from conftest import corpus_rows, small_run, write_jsonl
from places import place

from dualsft.config import settings
from dualsft.lab.report.markdown import write_report
from dualsft.model.load import load_tokenizer
from dualsft.runs import pipeline
from dualsft.runs.preflight import FOLDERS, load_summaries
from dualsft.storage.manifest import render_manifest, sha256_file
from dualsft.system.progress import Reporter

HOSTILE = "<script>document.title='broken'</script></script><!--<img src=x onerror=alert(1)>"
ARABIC, EMOJI = "مرحبا بالعالم", "👩‍👩‍👧 👋🏽"
SVG = "<svg xmlns='http://www.w3.org/2000/svg' width='40' height='20'><rect width='9'/></svg>"


def rows_with_strangers() -> list[dict[str, str]]:
    rows = corpus_rows()
    rows[5] = {"prompt": f"Say {HOSTILE}", "response": "alpha {{title}} &amp; <b>bold</b>"}
    rows[6] = {"prompt": f"Say {ARABIC}", "response": f"{ARABIC} {EMOJI}"}
    return rows


def hostile_run(root: Path, model: Path) -> Path:
    """A finished run with hostile rows, a hostile prompt and two diagnostics."""
    corpus = write_jsonl(root / "rows.jsonl", rows_with_strangers())
    words = [*small_run(model, corpus), f"evaluation.prompt={HOSTILE}"]
    run = pipeline.run(settings.load(None, words), root / "run", None, Reporter(lambda _: None))
    folder = run / "diagnostics"
    folder.mkdir()
    selection = json.loads((run / "5_selection/manifest.json").read_text())["fingerprint"]["hash"]
    result = {"jaccard": 0.5, "rows": [{"k": 1, "note": HOSTILE}, {"k": 2, "note": "fine"}]}
    for name, stamp in (("local_regret", selection), ("local_regret_two", "of another run")):
        content = {"name": name, "paper": "Table 7", "made_from": {"stages": {"selection": stamp}}}
        (folder / f"{name}.json").write_text(json.dumps(content | {"result": result}))
        (folder / f"{name}.svg").write_text(SVG)
    write_report(place(run))
    return run


def blocks(page: str) -> dict[str, str]:
    return dict(re.findall(r'<script type="text/plain" id="([\w-]+)">([^<]*)</script>', page))


def read_page(run: Path) -> tuple[str, dict[str, str]]:
    page = (run / "report.html").read_text(encoding="utf-8")
    return page, blocks(page)


def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def replaced(run: Path, stage: str, name: str, more: dict[str, Any]) -> None:
    """Add to a stage's JSON, and seal the stage again."""
    folder = run / FOLDERS[stage]
    content = json.loads((folder / name).read_text()) | more
    (folder / name).write_text(json.dumps(content))
    seal(run, stage, name)


def seal(run: Path, stage: str, name: str) -> None:
    """Make a changed file of a stage one that the stage has written."""
    folder = run / FOLDERS[stage]
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("seal")
    manifest["files"][name] = entry(folder / name)
    (folder / "manifest.json").write_text(render_manifest(manifest))


def entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_file(path)}


def enlarged(run: Path, count: int, lead: str = "") -> tuple[Path, dict[str, Any]]:
    """The run with its examples replaced by many that begin with `lead`, and its facts with the
    hashes of these."""
    facts = load_summaries(place(run))
    tokenizer = load_tokenizer(run / "6_finetune/model")
    rng = np.random.default_rng(0)
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(2000)]
    bodies = tokenizer([" ".join(rng.choice(words, 60)) for _ in range(2000)])["input_ids"]
    ids = [f"{i:016x}-{i}" for i in range(count)]
    heads = tokenizer([f"{lead}needle {i:06d} " for i in range(count)])["input_ids"]
    rows = [head + bodies[i % 2000] for i, head in enumerate(heads)]
    labels = [[-100] * len(head) + row[len(head) :] for head, row in zip(heads, rows, strict=True)]
    roles = ["pool"] * count
    kind = pa.list_(pa.int32())
    columns = {"input_ids": pa.array(rows, kind), "labels": pa.array(labels, kind)}
    score = rng.normal(size=count)
    tables = {
        "1_split/split.parquet": {"id": ids, "role": roles, "index": np.arange(count)},
        "1_split/tokens.parquet": {"id": ids, "role": roles, **columns},
        "4_scores/examples.parquet": {
            "id": ids,
            "score": score,
            "exact": np.ones(count, bool),
            "bound": np.zeros(count),
            "loss": rng.random(count),
            "response_tokens": pa.array([len(b) for b in rows], pa.int32()),
        },
        "5_selection/rescored.parquet": {"id": pa.array([], pa.string()), "score": np.zeros(0)},
    }
    for name, content in tables.items():
        pq.write_table(pa.table(content), run / name)
    best = np.argsort(-score)[: count // 10]
    (run / "5_selection/ids.json").write_text(json.dumps([ids[i] for i in best]))
    stages = {folder: stage for stage, folder in FOLDERS.items()}
    for name in [*tables, "5_selection/ids.json"]:
        folder, _, file = name.partition("/")
        facts["manifests"][stages[folder]]["files"][file] = entry(run / name)
    return run, facts
