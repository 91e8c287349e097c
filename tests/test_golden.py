"""Golden fixtures: ids and labels of TRL's SFTTrainer, conversations of LLaMA-Factory's formats.

trl.json is written by golden/generate.py. llamafactory.json holds entries of dataset_info.json with
a row each and the conversation that LLaMA-Factory's data/README says it is; the expected tokens are
put together turn by turn here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden.setups import CHAT_TEMPLATES, make_tokenizer

from dualsft.config.settings import DataConfig
from dualsft.data.examples import IGNORE, Example, tokenize
from dualsft.data.rows import read_rows

GOLDEN = Path(__file__).parent / "golden"


def fixtures(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def named(fixture: dict[str, Any]) -> str:
    return f"{fixture['tokenizer']}-{fixture['case']}"


def ours(row: dict[str, Any], tokenizer: Any, folder: Path, **settings: Any) -> Example:
    path = folder / "row.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    config = DataConfig(**{"path": str(path), "max_length": 10_000, **settings})
    rows, report = read_rows(path, config)
    [example], report = tokenize(rows, tokenizer, config, report)
    assert report.num_split_borders == 0
    assert report.num_truncated == (config.truncation == "right")
    return example


def check_equal(example: Example, fixture: dict[str, Any]) -> None:
    """The same ids and labels; the first label has nothing before it and is never predicted."""
    assert example.input_ids == fixture["input_ids"]
    assert example.labels[1:] == fixture["labels"][1:]
    assert example.labels[0] == IGNORE


@pytest.mark.parametrize("fixture", fixtures("trl.json"), ids=named)
def test_ids_and_labels_are_those_of_trl(fixture: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(fixture["tokenizer"], fixture["chat_template"])
    check_equal(ours(fixture["row"], tokenizer, tmp_path, **fixture["settings"]), fixture)


@pytest.mark.slow
def test_ids_and_labels_are_those_of_trl_with_smollm2(tmp_path: Path) -> None:
    from dualsft.model.load import load_tokenizer
    from dualsft.model.resolve import resolve_model

    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    found = fixtures("trl_smollm2.json")
    assert len(found) >= 15
    for fixture in found:
        tokenizer.chat_template = CHAT_TEMPLATES[fixture["chat_template"]]
        check_equal(ours(fixture["row"], tokenizer, tmp_path, **fixture["settings"]), fixture)


# --- LLaMA-Factory -------------------------------------------------------------------------------


def turn_by_turn(fixture: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """ids and labels of the chat format of golden/setups.py, one turn after another."""
    ids: list[int] = []
    labels: list[int] = []

    def add(text: str, trained: bool = False) -> None:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(tokens)
        labels.extend(tokens if trained else [IGNORE] * len(tokens))

    if not fixture["conversation"]:
        add(fixture["row"]["text"] + "</s>", trained=True)
        return ids, [IGNORE, *labels[1:]]
    for tool in fixture["tools"]:
        add(f"(tool) {json.dumps(tool)}\n")
    for turn in fixture["conversation"]:
        add(f"<{turn['role']}>")
        calls = [call["function"] for call in turn.get("tool_calls", [])]
        text = "".join(f"(call) {call['name']} {json.dumps(call['arguments'])}" for call in calls)
        answer = turn["role"] == "assistant"
        add(turn["content"] + text + ("</s>" if answer else "") + "\n", trained=answer)
    return ids, labels


@pytest.mark.parametrize("fixture", fixtures("llamafactory.json"), ids=lambda f: f["case"])
def test_llamafactory_entries(fixture: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([fixture["row"]]), encoding="utf-8")
    info = {"mine": {"file_name": "rows.json", **fixture["entry"]}, "other": {"file_name": "x"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    config = DataConfig(path=str(tmp_path), dataset="mine", max_length=10_000)
    rows, report = read_rows(tmp_path, config)
    if fixture["conversation"]:
        pair = [{"role": "user", "content": rows[0].prompt}]
        pair += [{"role": "assistant", "content": rows[0].response}]
        assert list(rows[0].turns or pair) == fixture["conversation"]
        assert list(rows[0].tools) == fixture["tools"]
    tokenizer = make_tokenizer("byte", "plain")
    [example], _ = tokenize(rows, tokenizer, config, report)
    assert (example.input_ids, example.labels) == turn_by_turn(fixture, tokenizer)
