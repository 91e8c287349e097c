"""`dualsft export data`: the rows of a run as other tools read them, with the run's own labels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import Runner, corpus_rows, write_jsonl
from golden.cases import ANSWER, CALL, LAST, RESULT, SYSTEM, TOOL, USER
from models import tiny_model

from dualsft import cli
from dualsft.config.settings import DataConfig
from dualsft.data.examples import tokenize
from dualsft.data.formats import conversation
from dualsft.data.layouts import Recogniser
from dualsft.data.rows import Row, read_rows
from dualsft.errors import ConfigError, DataError, RunError
from dualsft.integrations.rows import KINDS, NAME, export_data, llamafactory_rows, trl_rows
from dualsft.model.load import load_tokenizer

Tokens = list[tuple[list[int], list[int]]]
MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token + '\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""The chat template of the tiny models with the marks that TRL needs for assistant_only_loss."""
OPENED = {"role": "assistant", "content": "paper light"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of two shapes in two files, a blank line between those of the first."""
    folder = tmp_path_factory.mktemp("mixed")
    rows = corpus_rows(120)
    pairs = [{"question": row["prompt"], "answer": row["response"]} for row in rows[:70]]
    (folder / "pairs.jsonl").write_text("\n\n".join(json.dumps(row) for row in pairs))
    with (folder / "sheet.csv").open("w", encoding="utf-8") as file:
        file.write(";instruction;response\n")
        file.writelines(f"{i};{r['prompt']};{r['response']}\n" for i, r in enumerate(rows[70:118]))
    return f"{folder}/pairs.jsonl,{folder}/sheet.csv"


@pytest.fixture
def run(shared_run: Runner, mixed: str) -> Path:
    return shared_run(f"data.path={mixed}", "data.template=chat", until="selection")


def chosen_tokens(run: Path) -> Tokens:
    """ids and labels of the selected rows, in source order, as the run made them."""
    chosen = set(json.loads((run / "5_selection/ids.json").read_text()))
    table = pq.read_table(run / "1_split/tokens.parquet").to_pylist()
    return [(row["input_ids"], row["labels"]) for row in table if row["id"] in chosen]


def by_trl(file: Path, run: Path, model: Path, folder: Path) -> Tokens:
    """ids and labels that TRL's own SFTTrainer prepares from a file."""
    from trl import SFTConfig, SFTTrainer  # pyright: ignore

    data = datasets.load_dataset("json", data_files=str(file), split="train")
    tokenizer = load_tokenizer(model)
    if "messages" in data.column_names:
        tokenizer.chat_template = MARKED
    args = SFTConfig(
        output_dir=str(folder),
        max_length=None,
        assistant_only_loss="messages" in data.column_names,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    vocabulary = len(tokenizer) + 8
    trainer = SFTTrainer(
        tiny_model("llama", vocab_size=vocabulary),
        args=args,
        train_dataset=data,  # pyright: ignore
        processing_class=tokenizer,
    )
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]  # pyright: ignore


def same(found: Tokens, wanted: Tokens) -> None:
    """Equal but for the first label, which nothing predicts."""
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    assert [labels[1:] for _, labels in found] == [labels[1:] for _, labels in wanted]


# --- every row, with what the run decided --------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_every_row_with_its_score(run: Path, mixed: str, tmp_path: Path, kind: str) -> None:
    lines = export_data(run, tmp_path / "out", kind)
    if kind == "datasets":
        rows: Any = list(datasets.load_from_disk(str(tmp_path / "out")))
    else:
        rows = pq.read_table(tmp_path / "out").to_pylist()
    split = pq.read_table(run / "1_split/split.parquet").to_pylist()
    pool = [row for row in split if row["role"] == "pool"]
    assert [(r["id"], r["index"], r["source"]) for r in rows] == [
        (r["id"], r["index"], r["source"]) for r in pool
    ]
    scores = pq.read_table(run / "4_scores/examples.parquet").to_pylist()
    assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in scores])
    ranked = sorted(rows, key=lambda row: row["rank"])
    assert [row["rank"] for row in ranked] == list(range(1, len(rows) + 1))
    assert all(a["score"] >= b["score"] for a, b in zip(ranked, ranked[1:], strict=False))
    chosen = json.loads((run / "5_selection/ids.json").read_text())
    assert [row["id"] for row in rows if row["selected"]] == chosen
    assert {row["rank"] for row in rows if row["selected"]} == set(range(1, len(chosen) + 1))
    source = mixed.split(",")[0]
    texts = dict(enumerate(Path(source).read_text().split("\n")))
    for row in rows:
        fields = json.loads(row["row"])
        if row["source"] == "pairs":
            assert row["row"] == texts[row["index"]]
        else:
            assert fields["Unnamed: 0"] == str(row["index"] - len(texts))
        asked = fields.get("question") or fields["instruction"]
        assert (row["prompt"], row["response"]) == (
            asked,
            fields.get("answer") or fields["response"],
        )
    assert f"{len(rows)} rows, {len(chosen)}" in lines[0]


def test_rows_that_no_method_scored_have_no_rank(shared_run: Runner, tmp_path: Path) -> None:
    run = shared_run("method.data=random", until="selection")
    export_data(run, tmp_path / "out.parquet", "parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    chosen = json.loads((run / "5_selection/ids.json").read_text())
    assert table.filter(table["selected"])["id"].to_pylist() == chosen
    assert table["source"].null_count == len(table) > len(chosen)


# --- rows that a trainer reads --------------------------------------------------------------------


@pytest.mark.parametrize("template", ["chat", "alpaca"])
def test_trl_makes_the_labels_of_the_run(
    shared_run: Runner,
    mixed: str,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    template: str,
) -> None:
    run = shared_run(f"data.path={mixed}", f"data.template={template}", until="selection")
    lines = export_data(run, tmp_path / "rows.jsonl", "trl")
    assert "with prompt, completion" in lines[0] and "completion_only_loss=True" in lines[1]
    found = by_trl(tmp_path / "rows.jsonl", run, model_folder("llama"), tmp_path)
    same(found, chosen_tokens(run))
    assert len(found) > 8


def test_trl_trains_on_every_answer_of_conversations(
    make_run: Runner, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    rows: Any = [
        {"messages": [*([OPENED] if i % 3 else []), *_said(row), *_said(row)]}
        for i, row in enumerate(corpus_rows(60))
    ]
    path = write_jsonl(tmp_path / "talk.jsonl", rows)
    run = make_run(f"data.path={path}", "data.template=chat", until="selection")
    lines = export_data(run, tmp_path / "rows.jsonl", "trl")
    assert "with messages" in lines[0] and "assistant_only_loss=True" in lines[1]
    same(
        by_trl(tmp_path / "rows.jsonl", run, model_folder("llama"), tmp_path / "t"),
        chosen_tokens(run),
    )


def _said(row: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["response"]},
    ]


@pytest.mark.slow
def test_the_trl_command_trains_on_the_file(
    run: Path, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """`trl sft --config`, with the YAML of docs/data.md."""
    export_data(run, tmp_path / "rows.jsonl", "trl")
    page = (Path(__file__).parents[1] / "docs/data.md").read_text(encoding="utf-8")
    written = page.split("```yaml\n")[-1].split("```")[0]
    for name, here in {
        "models/my-model": model_folder("llama"),
        "runs/rows.jsonl": tmp_path / "rows.jsonl",
        "runs/trl": tmp_path / "out",
    }.items():
        assert name in written
        written = written.replace(name, str(here))
    own = {"max_steps": 2, "report_to": "none", "use_cpu": True, "bf16": False}
    (tmp_path / "file.yaml").write_text(written + yaml.safe_dump(own | {"dtype": "float32"}))
    command = [str(Path(sys.executable).with_name("trl")), "sft", "--config", "file.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out/model.safetensors").exists()


def test_llamafactory_reads_its_folder(
    run: Path, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Read by our reader of dataset_info.json, which follows data/README of LLaMA-Factory."""
    out = tmp_path / "lf"
    lines = export_data(run, out, "llamafactory")
    config = DataConfig(path=str(out), dataset=NAME)
    rows, report = read_rows(out, config)
    examples, _ = tokenize(rows, load_tokenizer(model_folder("llama")), config, report)
    same([(list(e.input_ids), list(e.labels)) for e in examples], chosen_tokens(run))
    training = yaml.safe_load((out / "train.yaml").read_text())
    assert (training["dataset"], training["dataset_dir"], training["stage"]) == (NAME, ".", "sft")
    assert training["model_name_or_path"] == str(model_folder("llama").resolve())
    assert (training["learning_rate"], training["num_train_epochs"]) == (1e-3, 2)
    assert (training["warmup_steps"], training["gradient_accumulation_steps"]) == (1, 4)
    assert "mask_history" not in training and "llamafactory-cli train" in lines[1]


def test_numbers_of_auto_are_those_of_the_run(
    shared_run: Runner, mixed: str, tmp_path: Path
) -> None:
    auto = [f"finetune.{name}=auto" for name in ("lr", "epochs", "batch_size")]
    words = [f"data.path={mixed}", "data.template=chat", "select.data_budget=30", *auto]
    run = shared_run(*words, until="finetune")
    export_data(run, tmp_path / "lf", "llamafactory")
    training = yaml.safe_load((tmp_path / "lf/train.yaml").read_text())
    summary = json.loads((run / "6_finetune/summary.json").read_text())
    assert training["learning_rate"] == summary["auto"]["finetune.lr"]
    assert training["num_train_epochs"] == summary["auto"]["finetune.epochs"] != 3
    assert training["gradient_accumulation_steps"] == summary["auto"]["finetune.batch_size"]


FACTORY = """
import json, sys, types
from importlib.machinery import ModuleSpec

for name in ("torchaudio",):  # imported for audio, which these rows have not
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None)

import yaml
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from transformers import AutoTokenizer

own = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": "none"}
model, data, training, *_ = get_train_args(yaml.safe_load(open("train.yaml")) | own)
tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
template = get_template_and_fix_tokenizer(tokenizer, data)
rows = get_dataset(template, model, data, training, "sft", tokenizer)["train_dataset"]
json.dump([[row["input_ids"], row["labels"]] for row in rows], open("tokens.json", "w"))
"""


@pytest.mark.slow
def test_llamafactory_itself_reads_the_folder(run: Path, tmp_path: Path) -> None:
    """Its own loader on the folder and its train.yaml; the package is fetched, without the rest."""
    export_data(run, out := tmp_path / "factory", "llamafactory")
    wanted = ["llamafactory==0.9.5", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "site"]
    subprocess.run([*install, *wanted], cwd=tmp_path, check=True)
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "DISABLE_VERSION_CHECK": "1"}
    command = [sys.executable, "-c", FACTORY]
    done = subprocess.run(command, cwd=out, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [(ids, labels) for ids, labels in json.loads((out / "tokens.json").read_text())]
    same(found, chosen_tokens(run))


# --- rows of every kind ---------------------------------------------------------------------------


def rows_of(*values: dict[str, Any]) -> list[Row]:
    made: list[Row] = []
    for at, one in enumerate(values):
        layout = Recogniser(DataConfig(path="x")).find(0, "x", one)
        assert layout is not None
        content = conversation(one, layout)
        made.append(Row(at, str(at), b"", place=f"x, line {at + 1}", **content._asdict()))
    return made


PAIR, SAID = {"question": "q", "answer": "a"}, {"messages": [SYSTEM, USER, ANSWER]}
CALLED = {"messages": [USER, CALL, RESULT, ANSWER], "tools": [TOOL]}
HISTORY = {"prompt": [USER, ANSWER, USER], "completion": [LAST]}
TOKENS = {"input_ids": [5, 6], "labels": [-100, 6]}


def test_trl_has_one_schema() -> None:
    found, _ = trl_rows(rows_of(PAIR, SAID, HISTORY), "chat")
    assert [row["completion"] for row in found] == [[_answer("a")], [ANSWER], [LAST]]
    assert found[2]["prompt"] == [USER, ANSWER, USER]
    found, cure = trl_rows(rows_of(PAIR, CALLED), "chat")
    assert {tuple(row) for row in found} == {("messages", "tools")} and "assistant_only" in cure
    assert [row["tools"] and json.loads(row["tools"]) for row in found] == [None, [TOOL]]
    assert found[1]["messages"] == [USER, CALL, RESULT, ANSWER]
    untrained = {"messages": [USER, {**ANSWER, "weight": 0}, USER, LAST]}
    found, _ = trl_rows(rows_of(PAIR, untrained), "chat")
    assert found[1] == {"prompt": [USER, ANSWER, USER], "completion": [LAST]}
    assert trl_rows(rows_of(TOKENS), "chat")[0] == [TOKENS]
    assert trl_rows(rows_of({"text": "t"}), "plain")[0] == [{"text": "t"}]


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_llamafactory_has_its_roles() -> None:
    found, entry, training = llamafactory_rows(rows_of(SAID, CALLED))
    assert found[0]["system"] == SYSTEM["content"] and len(found[0]["messages"]) == 2
    roles = [turn["role"] for turn in found[1]["messages"]]
    assert roles == ["user", "function_call", "observation", "assistant"]
    call = CALL["tool_calls"][0]["function"]
    assert json.loads(found[1]["messages"][1]["content"]) == [call]
    assert json.loads(found[1]["tools"]) == [TOOL["function"]]
    assert (entry["formatting"], training) == ("sharegpt", {})
    assert llamafactory_rows(rows_of(PAIR, HISTORY))[2] == {"mask_history": True}
    found, entry, training = llamafactory_rows(rows_of({"text": "t"}))
    assert (found, training) == ([{"text": "t"}], {"stage": "pt"})
    assert entry["columns"] == {"prompt": "text"}


Refused = tuple[Callable[[], Any], str]
REFUSED: dict[str, Refused] = {
    "kinds": (
        lambda: trl_rows(rows_of(PAIR, {"text": "t"}), "chat"),
        "several kinds.*turns as in x, line 1; text as in x, line 2",
    ),
    "segments": (
        lambda: trl_rows(rows_of({"segments": [{"label": True, "text": "t"}]}), "chat"),
        "trl has no rows of segments",
    ),
    "tokens": (lambda: llamafactory_rows(rows_of(TOKENS)), "has no rows of tokens"),
    "labels": (
        lambda: trl_rows(rows_of(HISTORY, {"messages": [USER, ANSWER, USER, LAST]}), "chat"),
        "x, line 2 needs the first, x, line 1 the second",
    ),
    "rounds": (
        lambda: trl_rows(rows_of(PAIR, {"messages": [USER, ANSWER, USER, LAST]}), "alpaca"),
        "x, line 2 has several rounds.*data.template=alpaca",
    ),
    "opening": (
        lambda: llamafactory_rows(rows_of(PAIR, {"messages": [ANSWER, USER, LAST]})),
        "x, line 2 does not alternate",
    ),
    "two_questions": (
        lambda: llamafactory_rows(rows_of({"messages": [USER, USER, ANSWER]})),
        "x, line 1 does not alternate",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trainer_cannot_express_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()


# --- the command, and runs that are not as they should be -----------------------------------------


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: object) -> tuple[int, str]:
        sys.argv = ["dualsft", "export", "data", *map(str, words)]
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        shown = capsys.readouterr()
        return int(stopped.value.code or 0), shown.out + shown.err

    out = tmp_path / "rows.jsonl"
    assert call(run, out, "--format", "trl") == (
        0,
        f"{out}: 11 rows with prompt, completion\n"
        "SFTTrainer: completion_only_loss=True, its default for these rows\n",
    )
    code, said = call(run, out)
    assert code == 2 and "rows.jsonl: exists; give the name of a new file" in said
    code, said = call(run, tmp_path / "x", "--format", "csv")
    assert code == 2 and f"use one of {', '.join(KINDS)}" in said
    code, said = call(run, tmp_path / "x", "seed=3")
    assert code == 2 and "export data: 'seed=3' is not allowed; settings can be" in said
    assert sorted(os.listdir(tmp_path)) == ["rows.jsonl"]


@pytest.fixture
def copied(run: Path, mixed: str, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the run, and of its data, in places of their own."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "data").mkdir()
    for file in mixed.split(","):
        shutil.copy(file, tmp_path / "data")
    return tmp_path / "run", tmp_path / "data"


def test_a_received_folder_names_no_data(
    copied: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = copied
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="data.path.*which this user did not write here"):
        export_data(folder, tmp_path / "out", "parquet")
    given = [f"data.path={data}/pairs.jsonl,{data}/sheet.csv", "model.path=any"]
    assert "rows, 11 of them selected" in export_data(folder, tmp_path / "out", "parquet", given)[0]


def test_other_data_is_noticed(copied: tuple[Path, Path], tmp_path: Path) -> None:
    folder, data = copied
    sheet = data / "sheet.csv"
    given = [f"data.path={data}/pairs.jsonl,{sheet}"]
    sheet.write_text(sheet.read_text().replace("alpha", "omega"))
    with pytest.raises(DataError, match=r"has \d+ of the \d+ rows that the run read"):
        export_data(folder, tmp_path / "out", "trl", given)
    assert not (tmp_path / "out").exists()


def test_damage_is_noticed(copied: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = copied
    ids = folder / "5_selection/ids.json"
    ids.write_text(ids.read_text()[::-1])
    with pytest.raises(RunError, match=r"5_selection: ids.json has a different SHA-256"):
        export_data(folder, tmp_path / "out", "parquet")


def test_a_run_without_a_selection(shared_run: Runner, tmp_path: Path) -> None:
    run = shared_run(until="scores")
    with pytest.raises(RunError, match="has no finished, up-to-date stage selection"):
        export_data(run, tmp_path / "out", "parquet")
    with pytest.raises(ConfigError, match="not a run folder"):
        export_data(tmp_path, tmp_path / "out", "parquet")
