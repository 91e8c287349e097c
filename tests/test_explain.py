"""`dualsft explain`: against the oracle, from Python, on folders from strangers, in the page."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from browser import Page, chromium
from conftest import Runner, corpus_rows, small_run, write_jsonl
from hostile import Change, in_file, in_json, in_table
from places import place
from report_pages import ARABIC, HOSTILE, blocks, rows_with_strangers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import dualsft
from dualsft.algorithm.calibration import sketch_of
from dualsft.cli import app
from dualsft.config import settings
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.sketch import Sketch
from dualsft.errors import ConfigError, DualsftError, RunError
from dualsft.lab.report.examples import unpack
from dualsft.lab.report.markdown import write_report
from dualsft.model.load import find_candidates
from dualsft.runs import pipeline
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter

CALIBRATED = ("score.form=calibrated", "score.sketch_dim=256", "split.val=8")
QUIET = Reporter(lambda _: None)
QUERIES = [
    {"prompt": f"Say {HOSTILE}", "response": "beta"},
    {"prompt": f"Say {ARABIC}", "response": "alpha river"},
    corpus_rows()[40],
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> Path:
    """A whole calibrated run with hostile rows, and a file of query rows beside it."""
    root = tmp_path_factory.mktemp("explain")
    corpus = write_jsonl(root / "rows.jsonl", rows_with_strangers())
    write_jsonl(root / "ask me.jsonl", QUERIES)
    words = [*small_run(model_folder("llama"), corpus), *CALIBRATED, "model.dtype=float64"]
    return pipeline.run(settings.load(None, words), root / "run", None, QUIET)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    without = shutil.ignore_patterns("explain")
    return Path(shutil.copytree(finished, tmp_path / "run", ignore=without))


def on_command_line(*words: str) -> Any:
    return CliRunner().invoke(app, ["explain", *words])


def dense(run: Path) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(sketches of the pool, of the queries) by the oracle's gradients at θ̄, and the summary."""
    model = AutoModelForCausalLM.from_pretrained(run / "2_warmup/theta_bar", dtype=torch.float64)
    engine = GhostEngine(model.eval(), find_candidates(model, "block_linear"))
    sketch = Sketch(256, seed=42, purpose="calibrated")
    tokens = pq.read_table(run / "1_split/tokens.parquet").to_pylist()
    ids = {(row["id"]): row for row in tokens}
    pool = [row for row in tokens if row["role"] == "pool"]
    repeated = next(r for i, r in ids.items() if i.endswith("-40"))  # the third query is that row

    def sketched(row: dict[str, Any]) -> torch.Tensor:
        names = list(engine.candidates)
        gradient = oracle.example_gradient(model, row["input_ids"], row["labels"], names)
        return sketch_of(engine, sketch, ParamVector(gradient))

    summary = json.loads((run / "4_scores/summary.json").read_text())
    return torch.stack([sketched(r) for r in pool]), sketched(repeated)[None], summary


def test_the_report_tells_how_much_of_the_pool_is_on_target(finished: Path) -> None:
    summary = json.loads((finished / "4_scores/summary.json").read_text())
    share, error = (round(100 * summary[key]) for key in ("target_share", "target_share_error"))
    line = f"pool that scores like the validation rows | {share} ± {error} %"
    assert line in (finished / "report.md").read_text()


def test_a_run_is_explained_as_the_oracle_does(finished: Path, tmp_path: Path) -> None:
    query = finished.parent / "ask me.jsonl"
    done = on_command_line(str(finished), "--query", str(query), "--top", "4")
    assert done.exit_code == 0, done.output
    folder = finished / "explain/ask-me"
    assert str(folder / "explain.html") in done.output
    files = {"explain.html", "influences.parquet", "queries.parquet", "suspects.parquet"}
    assert {path.name for path in folder.iterdir()} == files | {"summary.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["ask-me"]
    summary = json.loads((folder / "summary.json").read_text())
    pool, repeated, scored = dense(finished)
    assert summary["rho"] == scored["rho"] and summary["num_pool"] == len(pool)
    assert (summary["num_queries"], summary["backward_passes"]) == (3, 6)
    assert summary["query"]["file"] == query.name and len(summary["query"]["sha256"]) == 64
    assert summary["checks"]["scores_error"] < 1e-9

    suspects = pq.read_table(folder / "suspects.parquet").to_pandas()
    table = pq.read_table(finished / "4_scores/examples.parquet").to_pandas()
    chosen = set(json.loads((finished / "5_selection/ids.json").read_text()))
    by_id = suspects.set_index("id").loc[table["id"]]
    expected = oracle.support(pool, summary["rho"]).numpy()
    np.testing.assert_allclose(by_id["support"], expected, atol=1e-7 * np.abs(expected).max())
    for column in ("score", "loss", "response_tokens"):
        assert (by_id[column].to_numpy() == table[column].to_numpy()).all()
    assert set(suspects["id"][suspects["selected"]]) == chosen
    assert summary["suspected_by"] == "loss" and suspects["loss"].is_monotonic_decreasing
    assert suspects["rank"].tolist() == list(range(1, len(pool) + 1))

    found = pq.read_table(folder / "influences.parquet").to_pandas()
    wanted = oracle.influences(pool, repeated, summary["rho"])[:, 0].numpy()
    for side, order in (("helps", np.argsort(-wanted)), ("hurts", np.argsort(wanted))):
        mine = found[(found["query"] == 2) & (found["side"] == side)]
        assert mine["id"].tolist() == [table["id"][i] for i in order[:4]]
        np.testing.assert_allclose(mine["score"], wanted[order[:4]], rtol=1e-6)
        assert mine["rank"].tolist() == [1, 2, 3, 4]
    rows = rows_with_strangers()
    for _, row in found.iterrows():
        assert row["prompt"].endswith(rows[row["index"]]["prompt"])
        assert row["response"].startswith(rows[row["index"]]["response"])
    queries = pq.read_table(folder / "queries.parquet").to_pylist()
    assert [HOSTILE in queries[0]["prompt"], ARABIC in queries[1]["prompt"]] == [True, True]
    assert all(row["loss"] > 0 and row["gradient_norm"] > 0 for row in queries)


def test_from_python_with_rows_and_without_a_query(run: Path) -> None:
    rows = dualsft.explain(run, QUERIES, top=3, reporter=QUIET)
    assert rows.folder == run / "explain/rows"
    assert rows.influences.num_rows == 3 * 2 * 3 and rows.queries.num_rows == 3
    assert rows.influences.equals(pq.read_table(rows.folder / "influences.parquet"))
    assert rows.suspects.to_pandas()["support"].notna().all()
    alone = dualsft.explain(run, name="mine", reporter=QUIET)
    assert {path.name for path in alone.folder.iterdir()} == {
        *("suspects.parquet", "summary.json", "explain.html")
    }
    assert alone.suspects.equals(rows.suspects)
    assert alone.influences.num_rows == alone.queries.num_rows == 0
    assert alone.influences.schema == rows.influences.schema
    assert alone.summary["query"] is None and alone.summary["backward_passes"] == 0
    assert alone.summary["stages"].keys() == rows.summary["stages"].keys()
    again = dualsft.explain(run, QUERIES[:1], name="mine", reporter=QUIET)  # replaces it
    assert again.queries.num_rows == 1 and (again.folder / "queries.parquet").is_file()


def test_scores_alone_are_enough(make_run: Runner) -> None:
    """No selection yet: whether a row is selected is not known."""
    run = make_run(*CALIBRATED, until="scores")
    found = dualsft.explain(run, QUERIES, reporter=QUIET)
    assert found.suspects["selected"].null_count == found.suspects.num_rows
    assert "selection" not in found.summary["stages"]


def test_the_examples_of_the_page(run: Path, tmp_path: Path, monkeypatch) -> None:
    """The commands and the Python of docs/explain.md, as printed."""
    page = (Path(__file__).parents[1] / "docs/explain.md").read_text(encoding="utf-8")
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs/mine")
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data/failures.jsonl", QUERIES)
    monkeypatch.chdir(tmp_path)
    (commands,), (code,) = (
        re.findall(rf"```{language}\n(.*?)```", page, re.S) for language in ("bash", "python")
    )
    for line in commands.strip().splitlines():
        words = shlex.split(line, comments=True)
        assert words.pop(0) == "dualsft"
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    names: dict[str, Any] = {"dualsft": dualsft}
    exec(code, names)  # our own page
    assert names["found"].influences.num_rows == 10
    made = {path.name for path in Path("runs/mine/explain").iterdir()}
    assert made == {"suspects", "failures", "rows"}


# --- what is refused ------------------------------------------------------------------------------


def test_runs_without_sketches_are_refused(make_run: Runner) -> None:
    literal = make_run(until="scores")
    with pytest.raises(ConfigError, match=r"score.form=literal.*--until scores score.form=calibr"):
        dualsft.explain(literal, reporter=QUIET)
    early = make_run(*CALIBRATED, out="early", until="gradients")
    with pytest.raises(RunError, match="no finished, up-to-date stage scores; run `dualsft score"):
        dualsft.explain(early, reporter=QUIET)
    assert not (literal / "explain").exists() and not (early / "explain").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"top": 0}, "--top: 0 is not allowed"),
        ({"name": "../up"}, "--name: '../up' is not allowed"),
        ({"query": "nowhere.jsonl"}, "--query: 'nowhere.jsonl'"),
        ({"query": []}, "no row"),
        ({"query": [{"prompt": "Say", "response": 3}]}, "rows.jsonl, line 1"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], words: str, run: Path) -> None:
    with pytest.raises(DualsftError, match=re.escape(words)):
        dualsft.explain(run, reporter=QUIET, **given)
    assert not (run / "explain").exists()


def test_other_settings_are_refused_on_the_command_line(run: Path) -> None:
    done = on_command_line(str(run), "score.rho=0.1")
    assert isinstance(done.exception, ConfigError)
    assert "explain: 'score.rho=0.1' is not allowed" in str(done.exception)


SKETCHES = r"3_gradients/sketches\.safetensors"
SUMMARY, EXAMPLES = r"4_scores/summary\.json", r"4_scores/examples\.parquet"
UNRELATED = "4_scores.*do not follow"


def in_sketches(**act: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return in_file(
        "sketches.safetensors", lambda t: t | {name: one(t[name]) for name, one in act.items()}
    )


def in_scores(column: str, value: Callable[[list[Any]], list[Any]]) -> Change:
    return in_table("examples.parquet", column, value)


def in_summary(**values: Any) -> Change:
    return in_json("summary.json", values)


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        ("3_gradients", in_sketches(pool=lambda t: t * torch.nan), f"{SKETCHES}.*unit length"),
        ("3_gradients", in_sketches(pool=lambda t: t.flip(0)), UNRELATED),
        ("4_scores", in_summary(rho=1.0), UNRELATED),
        ("4_scores", in_summary(rho="0.01"), f"{SUMMARY}.*rho is '0.01'"),
        ("4_scores", in_summary(rho=-1.0), f"{SUMMARY}.*rho is -1.0"),
        ("4_scores", in_summary(sketch_dim=9), f"{SUMMARY}.*sketch_dim 9"),
        ("4_scores", in_summary(form="literal"), f"{SUMMARY}.*literal"),
        ("4_scores", in_scores("score", lambda v: v[::-1]), UNRELATED),
        ("4_scores", in_scores("score", lambda v: [str(x) for x in v]), EXAMPLES),
        (
            "4_scores",
            in_scores("loss", lambda v: [float("inf"), *v[1:]]),
            f"{EXAMPLES}.*finite",
        ),
        ("4_scores", in_scores("id", lambda v: v[::-1]), f"{EXAMPLES}.*not those of the pool"),
    ],
)
def test_forged_files_are_refused_by_name(
    stage: str, change: Change, words: str, run: Path
) -> None:
    change(run / stage)
    with pytest.raises(RunError, match=words):
        dualsft.explain(run, reporter=QUIET)
    assert not (run / "explain").exists()


def test_sketches_of_another_seed_are_refused(run: Path) -> None:
    """Everything in the folder fits, but θ̄ and the sketches do not: the queries notice."""
    rolled = dict.fromkeys(("pool", "val"), lambda t: t.roll(1, dims=1))
    in_sketches(**rolled)(run / "3_gradients")  # one rotation of all changes no score of the run
    dualsft.explain(run, reporter=QUIET)
    with pytest.raises(RunError, match=f"{SKETCHES}: the stored sketch of example"):
        dualsft.explain(run, QUERIES, reporter=QUIET)


@pytest.mark.parametrize("place_of", ["explain", "explain/suspects", "explain/.suspects.part"])
def test_a_link_is_not_written_through(place_of: str, run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    (run / place_of).parent.mkdir(exist_ok=True)
    (run / place_of).symlink_to(outside)
    if place_of == "explain":
        with pytest.raises(RunError, match="explain: is a symlink"):
            dualsft.explain(run, reporter=QUIET)
        with pytest.raises(RunError, match="explain: is a symlink"):
            write_report(place(run))
    else:  # an entry that is replaced: the link itself goes
        dualsft.explain(run, reporter=QUIET)
        assert not (run / "explain/suspects").is_symlink()
    assert [path.name for path in outside.iterdir()] == ["kept"]


@pytest.mark.parametrize("kind", ["damage", "link", "pipe"])
@pytest.mark.parametrize("entry", ["3_gradients/sketches.safetensors", "4_scores/examples.parquet"])
def test_an_input_that_is_not_the_runs(entry: str, kind: str, run: Path, tmp_path: Path) -> None:
    (run / entry).rename(tmp_path / "theirs")
    if kind == "link":
        (run / entry).symlink_to(tmp_path / "theirs")
    elif kind == "pipe":
        os.mkfifo(run / entry)
    else:
        (run / entry).write_bytes((tmp_path / "theirs").read_bytes() + b"x")
    with pytest.raises(RunError, match=Path(entry).name):
        dualsft.explain(run, reporter=QUIET)
    assert not (run / "explain").exists()


def test_paths_of_a_received_folder_need_consent(run: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache of someone else"))
    with pytest.raises(ConfigError, match=r"model.path: .* which this user did not write") as no:
        dualsft.explain(run, reporter=QUIET)
    assert "data.path" in str(no.value)
    stored = yaml.safe_load((run / "config.yaml").read_text())
    given = [f"{section}.path={stored[section]['path']}" for section in ("model", "data")]
    found = on_command_line(str(run), *given)
    assert found.exit_code == 0, found.output


# --- the page -------------------------------------------------------------------------------------


def test_no_row_or_query_can_break_out_of_the_page(run: Path) -> None:
    found = dualsft.explain(run, QUERIES, reporter=QUIET)
    page = (found.folder / "explain.html").read_text(encoding="utf-8")
    data = blocks(page)
    assert HOSTILE not in page and "<img src=x" not in page and "<b>bold" not in page
    own = re.findall(r"<script[^>]*>", page)
    assert own.count("<script>") == 1 and len(own) == len(data) + 1
    assert "default-src 'none'" in page and "script-src 'sha256-" in page
    asked, columns = unpack(data["queries-data"]), unpack(data["examples-data"])
    assert HOSTILE in "".join(asked[0]["text"])
    influences = found.influences.to_pylist()
    shown = [
        (query["line"], side, columns["id"][row], score)
        for query in asked
        for side in ("helps", "hurts")
        for row, score in query[side]
    ]
    assert [s[:3] for s in shown] == [(r["query"], r["side"], r["id"]) for r in influences]
    np.testing.assert_allclose([s[3] for s in shown], [r["score"] for r in influences], rtol=1e-8)
    support = dict(zip(columns["id"], columns["support"], strict=True))
    for row in found.suspects.to_pylist():
        assert support[row["id"]] == pytest.approx(row["support"], rel=1e-8)


def test_the_report_links_to_it(run: Path, tmp_path: Path) -> None:
    dualsft.explain(run, name="first.look", reporter=QUIET)
    (run / "explain" / "<b>x").mkdir()
    (run / "explain" / "<b>x" / "explain.html").write_text("not ours")
    write_report(place(run))
    link = 'href="explain/first.look/explain.html"'
    page = (run / "report.html").read_text()
    assert link in page and "x/explain.html" not in page
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_report(place(run), place(elsewhere))
    assert link not in (elsewhere / "report.html").read_text()


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_in_a_browser(width: int, finished: Path, tab: Page) -> None:
    found = dualsft.explain(finished, QUERIES, name="browser", top=4, reporter=QUIET)
    tab.resize(width, 900, mobile=width < 600)
    tab.requests.clear()
    tab.console.clear()
    tab.open(found.folder / "explain.html")
    assert tab.console == [] and len(tab.requests) == 1
    assert tab.js("document.title") == "DualSFT explain browser, run run"
    assert tab.js("document.documentElement.scrollWidth") <= width
    answers = "[...document.querySelectorAll('#answers .query')]"
    assert tab.js(f"{answers}.length") == 3
    assert HOSTILE in tab.js(f"{answers}[0].textContent")
    shown = tab.js(f"{answers}.map((q) => q.querySelectorAll('.example').length)")
    assert shown == [8, 8, 8]
    first = found.suspects.to_pylist()[0]
    tab.js("document.querySelector('#rows details').open = true")
    tab.wait("document.querySelector('#rows .turn.response')")
    assert first["id"] in tab.js("document.querySelector('#rows .facts').textContent")
    before = tab.js("document.getElementById('answers').dataset.shown")
    tab.js(
        "(() => { const c = document.getElementById('asked'); c.value = "
        f"{json.dumps(ARABIC)}; c.dispatchEvent(new Event('input')); }})()"
    )
    tab.wait(f"document.getElementById('answers').dataset.shown !== '{before}'")
    left = tab.js(f"{answers}.map((q) => q.textContent)")
    assert len(left) < 3 and all(ARABIC in text for text in left)
