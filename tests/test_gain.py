"""`dualsft check --gain`: the verdict on two corpora, the interval, and the pilot's settings."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Runner, write_jsonl
from models import save_tiny_folder
from test_cli import cli

from dualsft.config import settings
from dualsft.errors import ConfigError
from dualsft.lab import gain as gains
from dualsft.lab.gain import Gain, interval, measure_gain
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir
from dualsft.system.progress import Reporter

WORDS = (
    ("alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "light", "paper"),
    ("zero", "one", "two", "three", "four", "six", "seven", "eight", "nine"),
    ("if", "else", "for", "while", "return", "def", "class", "import", "yield"),
)


def task_rows(count: int, share: float, seed: int) -> list[dict[str, str]]:
    """Rows that answer each word with the next one of its list; `share` of them use list 0."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        task = 0 if rng.random() < share else rng.choice((1, 2))
        words = WORDS[task]
        picked = rng.choices(range(len(words)), k=rng.randint(1, 4))
        prompt = "Say " + " ".join(words[i] for i in picked)
        response = "".join(f" {words[(i + 1) % len(words)]}" for i in picked)
        found.append({"prompt": prompt, "response": response, "source": f"task {task}"})
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a mixed and a homogeneous corpus, and validation rows of task 0."""
    root = tmp_path_factory.mktemp("gain")
    texts = [row["prompt"] + row["response"] for row in task_rows(200, 0.4, 0)]
    save_tiny_folder(root / "model", "llama", texts)
    write_jsonl(root / "mixed.jsonl", task_rows(400, 1 / 3, 1))
    write_jsonl(root / "alike.jsonl", task_rows(400, 1.0, 2))
    write_jsonl(root / "val.jsonl", task_rows(80, 1.0, 3))
    return root


def words_of(place: Path, corpus: str, *more: str) -> list[str]:
    return [
        *("recommended", f"model.path={place / 'model'}", "model.device=cpu"),
        *(f"data.path={place / corpus}", f"data.val_path={place / 'val.jsonl'}"),
        *("data.template=plain", "score.sketch_dim=512", "finetune.lr=3e-3", *more),
    ]


def config_of(place: Path, corpus: str, *more: str) -> settings.Config:
    source, *words = words_of(place, corpus, *more)
    return settings.load(source, words)


def test_a_mixed_corpus_is_told_to_select(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = words_of(place, "mixed.jsonl", "select.variant=data")
    done = cli("check", *words, "--gain", "--gain-rows", "160", "--json", str(out))
    assert "selection is expected to help: loss lower by" in done.stdout
    found = json.loads(out.read_text())
    assert found["problems"] == []
    gain = found["gain"]
    assert gain["verdict"] == "help" and gain["low"] > 0 and gain["num_rows"] == 160
    target = gain["sources"]["task 0"]
    assert target["chosen"] > 1.3 * target["sample"]
    assert gain["standardised_score"] > 0.5 and gain["half_cosine"] > 0.2
    assert 0.2 < gain["spearman"] <= 1 and 0 <= gain["jaccard"] <= 1
    assert "pilot: 160 rows of the pool scored with" in done.stdout


def test_a_homogeneous_corpus_is_not(place: Path) -> None:
    said: list[str] = []
    config = config_of(place, "alike.jsonl")
    found = measure_gain(config, Reporter(said.append), 160)
    assert found.verdict in ("random", "unclear") and found.low <= 0
    assert found.sources == {} and len(found.random_losses) == gains.NUM_DRAWS
    assert found.base_loss > max(found.random_losses)  # random rows teach something
    assert found.lines()[-1] == found.advice


# --- the interval and the verdict ----------------------------------------------------------------


def test_the_interval_by_hand() -> None:
    chosen = np.array([1.0, 2.0, 3.0, 4.0] * 50)
    draws = chosen + np.array([0.1, 0.2, 0.3, 0.4])[:, None]
    gain, by_draws, by_rows = interval(chosen, draws, 0)
    assert gain == pytest.approx(0.25)
    assert by_draws == pytest.approx(1.638 * np.std([0.1, 0.2, 0.3, 0.4], ddof=1) * 1.25**0.5)
    assert by_rows == pytest.approx(0.0, abs=1e-12)  # every row differs alike
    chosen = chosen + np.tile([-0.2, 0.2], 100)
    _, _, by_rows = interval(chosen, draws, 0)
    assert by_rows == pytest.approx(1.282 * 0.2 / 200**0.5, rel=0.1)


def made(gain: float, width: float, base: float = 2.0) -> Gain:
    return Gain(
        num_rows=320,
        num_chosen=32,
        num_selecting=40,
        num_judging=40,
        half_cosine=None,
        spearman=None,
        jaccard=None,
        standardised_score=None,
        response_tokens={"chosen": 8.0, "sample": 9.0},
        sources={},
        base_loss=base,
        chosen_loss=1.8 - gain,
        random_losses=[1.8] * 4,
        gain=gain,
        low=gain - width,
        high=gain + width,
        error_of_draws=width,
        error_of_rows=0.0,
    )


def test_verdicts() -> None:
    assert made(0.07, 0.03).advice == (
        "selection is expected to help: loss lower by 0.070 [0.040, 0.100]"
    )
    assert made(0.0, 0.01).verdict == "random" and made(-0.3, 0.2).verdict == "random"
    assert "method.data=random" in made(0.0, 0.01).advice
    assert made(0.0, 0.02).verdict == "unclear"
    assert "give more --gain-rows" in made(0.0, 0.02).advice
    rows = replace(made(0.0, 0.02), error_of_rows=0.03)
    assert "give more validation rows" in rows.advice
    assert made(0.0, 0.04, base=3.0).verdict == "random"  # random rows teach 1.2
    assert "cosine of its halves –" in made(0.0, 0.02).lines()[0]


# --- the pilot -----------------------------------------------------------------------------------


def pilot_of(config: settings.Config, folder: Path, num_rows: int = 100) -> gains._Pilot:
    ctx = RunContext(config, RunDir("."), Reporter(lambda _: None))
    return gains._Pilot(ctx, folder, num_rows)


def test_rows_that_select_neither_judge_nor_train(place: Path, tmp_path: Path) -> None:
    for name, more in (("apart", []), ("own", ["data.val_path=null", "split.val=100"])):
        (folder := tmp_path / name).mkdir()
        pilot = pilot_of(config_of(place, "mixed.jsonl", *more), folder)
        lines = {
            name: set(Path(path).read_text().splitlines()) for name, path in pilot.files.items()
        }
        texts = {
            name: {(row["prompt"], row["response"]) for row in map(json.loads, found)}
            for name, found in lines.items()
        }
        assert not texts["select"] & texts["judge"]
        assert not texts["corpus"] & (texts["select"] | texts["judge"])
        assert len(pilot.select) == len(pilot.judge) >= 25
        assert pilot.config.split.val is None and pilot.config.data.val_path is not None


def test_what_the_pilot_refuses(place: Path, tmp_path: Path) -> None:
    for method in ("random", "all"):
        config = config_of(place, "mixed.jsonl", f"method.data={method}")
        with pytest.raises(ConfigError, match=f"--gain: method.data={method} does not select"):
            measure_gain(config, Reporter())
    few = write_jsonl(tmp_path / "few.jsonl", task_rows(9, 1.0, 4))
    config = config_of(place, "mixed.jsonl", f"data.val_path={few}")
    with pytest.raises(ConfigError, match="--gain: D_val has . different rows; .* each needs 8"):
        measure_gain(config, Reporter())
    words = words_of(place, "mixed.jsonl")
    done = cli("check", *words, "--gain-rows", "100", code=2)
    assert "--gain-rows: has no effect without --gain" in done.stderr


def test_columns_that_only_a_description_names_are_refused(place: Path, tmp_path: Path) -> None:
    rows = [{"q": row["prompt"], "a": row["response"]} for row in task_rows(200, 0.3, 6)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    columns = {"prompt": "q", "response": "a"}
    info = {"mine": {"file_name": "rows.jsonl", "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    config = config_of(place, "mixed.jsonl", f"data.path={tmp_path}", "data.dataset=mine")
    with pytest.raises(ConfigError, match="cannot be read without its description"):
        measure_gain(config, Reporter())


# --- draws ---------------------------------------------------------------------------------------


def test_another_draw_is_another_selection_of_the_same_split(make_run: Runner) -> None:
    run = make_run("method.data=random", until="selection")
    first = (run / "5_selection/ids.json").read_bytes()
    said: list[str] = []
    make_run("method.data=random", "method.random.draw=0", until="selection", said=said)
    assert any(line.startswith("[selection] reused") for line in said)  # as before it existed
    said.clear()
    make_run("method.data=random", "method.random.draw=2", until="selection", said=said)
    assert (run / "5_selection/ids.json").read_bytes() != first
    assert sum("] reused" in line for line in said) == 4
