"""Rows as users have them: other names of fields, hints, rows of tokens, rows that are too long.

A row that can mean two things is refused with the setting that decides; with that setting it is
read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from golden.cases import ANSWER, LAST, SYSTEM, USER
from golden.setups import make_tokenizer

import dualsft
from dualsft.config.settings import DataConfig
from dualsft.data.examples import IGNORE, Example, tokenize
from dualsft.data.rows import DataReport, Row, read_rows
from dualsft.errors import DataError


def read(folder: Path, *rows: dict[str, Any], **settings: Any) -> tuple[list[Row], DataReport]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_rows(path, DataConfig(path=str(path), **settings))


def encoded(
    folder: Path, row: dict[str, Any], chat_template: str = "plain", **settings: Any
) -> tuple[Example, DataReport]:
    rows, report = read(folder, row, **settings)
    config = DataConfig(path="rows.jsonl", **settings)
    [example], report = tokenize(rows, make_tokenizer("byte", chat_template), config, report)
    return example, report


def texts(example: Example) -> tuple[str, str]:
    """All text, and the text that is trained on."""
    tokenizer = make_tokenizer("byte", "plain")
    trained = [token for token in example.labels if token != IGNORE]
    return tokenizer.decode(example.input_ids), tokenizer.decode(trained)


# --- names of fields -----------------------------------------------------------------------------

PAIRS = [
    ("question", "answer"),
    ("input", "output"),
    ("instruction", "response"),
    ("query", "response"),
    ("problem", "solution"),
    ("inputs", "targets"),
    ("user", "assistant"),
    ("prompt", "answer"),
    (" Question", "ANSWER "),
]


@pytest.mark.parametrize(("prompt", "response"), PAIRS)
def test_a_pair_under_other_names(tmp_path: Path, prompt: str, response: str) -> None:
    [row], report = read(tmp_path, {"id": 7, prompt: "q", response: "a", "category": "x"})
    assert (row.prompt, row.response, row.turns) == ("q", "a", ())
    assert report.format == "prompt_response"


def test_the_parts_beside_a_pair(tmp_path: Path) -> None:
    [row], _ = read(tmp_path, {"instruction": "i", "input": "x", "response": "r"})
    assert row.prompt == "i\nx"
    for name in ("system", "system_prompt"):
        [row], _ = read(tmp_path, {name: "s", "question": "q", "response": "r"})
        assert [turn["content"] for turn in row.turns] == ["s", "q", "r"]
    [row], _ = read(tmp_path, {"system": "s", "prompt": "q", "response": "r"})
    assert [turn["content"] for turn in row.turns] == ["s", "q", "r"]


def test_turns_under_other_names(tmp_path: Path) -> None:
    [row], report = read(tmp_path, {"Dialogue": [USER, ANSWER]})
    assert (row.turns, report.format) == ((USER, ANSWER), "messages")
    spoken = [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]
    [row], report = read(tmp_path, {"conversations": spoken})
    assert [turn["role"] for turn in row.turns] == ["user", "assistant"]
    assert report.format == "sharegpt"
    [row], _ = read(tmp_path, {"messages": json.dumps([USER, ANSWER])})
    assert row.turns == (USER, ANSWER)


def test_the_known_formats_come_first(tmp_path: Path) -> None:
    """A corpus that was read before is read in the same way."""
    for row, wanted in (
        ({"prompt": "p", "response": "r", "answer": "right"}, ("p", "r")),
        ({"prompt": "p", "completion": "r", "solution": "4"}, ("p", "r")),
        ({"instruction": "p", "output": "r", "question": "x"}, ("p", "r")),
        ({"problem": "x", "solution": "y", "messages": [USER, ANSWER]}, (USER["content"], None)),
    ):
        [found], _ = read(tmp_path, row)
        assert (found.prompt, found.response) == (wanted[0], wanted[1] or ANSWER["content"])


class Unclear(NamedTuple):
    """A row that can mean several things, words of the message, and settings with their prompt and
    response."""

    row: dict[str, Any]
    message: str
    ways: dict[str, tuple[str, str]]


CHOSEN, REJECTED = [USER, ANSWER], [USER, LAST]
ASKED, SAID = USER["content"], ANSWER["content"]
UNCLEAR = {
    "prompts": Unclear(
        {"question": "q", "query": "x", "answer": "a"},
        "'question', 'query' can each be the prompt; set data.prompt_field",
        {"prompt_field=query": ("x", "a"), "prompt_field=question": ("q", "a")},
    ),
    "responses": Unclear(
        {"problem": "q", "solution": "s", "answer": "a"},
        "'solution', 'answer' can each be the response; set data.response_field",
        {"response_field=solution": ("q", "s"), "response_field=answer": ("q", "a")},
    ),
    "context": Unclear(
        {"instruction": "q", "context": "c", "response": "a"},
        "'context' beside 'instruction' and 'response' may belong to the prompt; set "
        "data.input_field=context",
        {
            "input_field=context": ("q\nc", "a"),
            "prompt_field=instruction response_field=response": ("q", "a"),
        },
    ),
    "input": Unclear(
        {"question": "q", "input": "c", "answer": "a"},
        "'question', 'input' can each be the prompt",
        {"input_field=input": ("q\nc", "a"), "prompt_field=question": ("q", "a")},
    ),
    "text": Unclear(
        {"text": "q a", "question": "q", "answer": "a"},
        "match more than one format",
        {"format=text": ("", "q a"), "prompt_field=question": ("q", "a")},
    ),
    "preference": Unclear(
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        "preference pairs ('chosen', 'rejected'); set data.response_field=chosen",
        {"response_field=chosen": ("q", "a")},
    ),
    "preference_turns": Unclear(
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [LAST]},
        "preference pairs ('chosen', 'rejected'); set data.response_field=chosen",
        {"response_field=chosen": (ASKED, SAID)},
    ),
    "preference_whole": Unclear(
        {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED},
        "preference pairs ('chosen', 'rejected'); set data.messages_field=chosen",
        {"messages_field=chosen": (ASKED, SAID)},
    ),
    "preference_text": Unclear(
        {"chosen": "Human: q Assistant: a", "rejected": "Human: q Assistant: b"},
        "preference pairs ('chosen', 'rejected'); set data.text_field=chosen",
        {"text_field=chosen": ("", "Human: q Assistant: a")},
    ),
    "no_response": Unclear(
        {"question": "q", "reply": "a"},
        "have a prompt ('question') but no known name of a response, nor do those of any later row;"
        " set data.response_field",
        {"response_field=reply": ("q", "a")},
    ),
    "content": Unclear(
        {"content": "a"}, "or with data.text_field=...", {"text_field=content": ("", "a")}
    ),
    "own_names": Unclear(
        {"tokens": [1], "text": "a b", "input_ids": [4, 5], "labels": [-100, 5]},
        "",
        {"text_field=text": ("", "a b"), "format=text": ("", "a b"), "format=tokens": ("", "")},
    ),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_unclear_is_asked(tmp_path: Path, name: str) -> None:
    case = UNCLEAR[name]
    if case.message:
        with pytest.raises(DataError, match=re.escape(case.message)) as caught:
            read(tmp_path, case.row, bad_rows="skip")
        assert "rows.jsonl, line 1: " in str(caught.value)
    for settings, wanted in case.ways.items():
        given = dict(word.split("=") for word in settings.split())
        [row], _ = read(tmp_path, case.row, **given)
        assert (row.prompt, row.response) == wanted


def test_a_named_field_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="field 'reply' missing .the row has 'question', 'answer'"):
        read(tmp_path, {"question": "q", "answer": "a"}, response_field="reply")
    with pytest.raises(DataError, match="'prompt' is a string and 'chosen' a list.*messages_field"):
        read(tmp_path, {"prompt": "q", "chosen": CHOSEN}, response_field="chosen")


# --- rows that are tokens or segments ------------------------------------------------------------


def test_padding_of_token_rows_is_removed(tmp_path: Path) -> None:
    for mask, kept in (([0, 1, 1, 1], slice(1, 4)), ([1, 1, 1, 0], slice(0, 3))):
        row = {"input_ids": [4, 5, 6, 7], "labels": [-100, -100, 6, -100], "attention_mask": mask}
        example, report = encoded(tmp_path, row)
        assert example.input_ids == row["input_ids"][kept]
        assert example.labels == row["labels"][kept]
        assert report.format == "tokens"


def test_segments_are_encoded_one_by_one_with_nothing_added(tmp_path: Path) -> None:
    """As axolotl's input_output does: no template, no BOS or EOS but those in the texts."""
    parts = [(False, "<s>the question"), (True, " and the"), (True, " answer</s>"), (False, "\nof")]
    row = {"segments": [{"label": label, "text": text} for label, text in parts]}
    tokenizer = make_tokenizer("merging", "plain")
    rows, report = read(tmp_path, row)
    [example], _ = tokenize(rows, tokenizer, DataConfig(path="x"), report)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for _, text in parts]
    assert example.input_ids == [token for part in ids for token in part]
    assert example.labels == [
        token if label else IGNORE
        for (label, _), part in zip(parts, ids, strict=True)
        for token in part
    ]


# --- a conversation that the assistant opens -----------------------------------------------------


def test_an_opening_answer_is_trained_on_without_its_header(tmp_path: Path) -> None:
    spoken = [("gpt", "hello"), ("human", "say it"), ("gpt", "it")]
    row = {"conversations": [{"from": who, "value": text} for who, text in spoken]}
    marked, _ = encoded(tmp_path, row, "generation")  # the template marks the answers itself
    found, _ = encoded(tmp_path, row)
    assert texts(marked)[1] == "hello</s>it</s>"
    assert texts(found)[1] == "hello</s>\nit</s>\n"  # with what the template writes after it
    assert texts(found)[0] == texts(marked)[0]


# --- rows that are too long ----------------------------------------------------------------------

LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z "
CHAT = {"messages": [SYSTEM, {"role": "user", "content": LONG * 4}, ANSWER]}


def test_prompt_keeps_what_the_template_writes(tmp_path: Path) -> None:
    whole = texts(encoded(tmp_path, CHAT)[0])[0]
    head = f"<system>{SYSTEM['content']}\n<user>"
    tail = f"\n<assistant>{ANSWER['content']}</s>\n"
    for limit in range(len(head) + len(tail) + 1, len(whole) + 3, 7):
        example, report = encoded(tmp_path, CHAT, truncation="prompt", max_length=limit)
        text = texts(example)[0]
        assert text == head + whole[len(head) :][-(len(text) - len(head)) :]
        assert text.endswith(tail)
        assert len(example.input_ids) == min(limit, len(whole))
        assert report.num_truncated == (limit < len(whole))
    by_left = texts(encoded(tmp_path, CHAT, max_length=limit // 2)[0])[0]
    assert not by_left.startswith("<system>")


def test_prompt_drops_whole_rounds_first(tmp_path: Path) -> None:
    rounds = [SYSTEM, USER, ANSWER, {**USER, "content": "second"}, LAST]
    example, report = encoded(tmp_path, {"messages": rounds}, truncation="prompt", max_length=90)
    said = f"<system>{SYSTEM['content']}\n<user>second\n<assistant>{LAST['content']}</s>\n"
    assert texts(example)[0] == said
    assert texts(example)[1] == f"{LAST['content']}</s>\n"
    assert (report.num_truncated, report.num_cut_responses) == (1, 1)
    assert any("lost earlier rounds or the beginning" in note for note in report.notes())


def test_prompt_shortens_pairs_in_text_templates(tmp_path: Path) -> None:
    row = {"prompt": LONG * 4, "response": "yes"}
    example, _ = encoded(tmp_path, row, truncation="prompt", max_length=200, template="alpaca")
    text = texts(example)[0]
    assert text.startswith("Below is an instruction") and "### Instruction:\n" in text
    assert text.endswith("x y z \n\n### Response:yes</s>")
    assert len(example.input_ids) == 200


def test_right_cuts_the_response(tmp_path: Path) -> None:
    row = {"prompt": "say it:", "response": LONG * 2}
    whole, _ = encoded(tmp_path, row)
    example, report = encoded(tmp_path, row, truncation="right", max_length=50)
    assert example.input_ids == whole.input_ids[:50]
    assert example.labels == whole.labels[:50]
    assert (report.num_truncated, report.num_cut_responses) == (1, 1)
    assert any("lost tokens at the end to fit 50" in note for note in report.notes())
    assert any("lost tokens of a response in that cut" in note for note in report.notes())


@pytest.mark.parametrize(
    ("row", "truncation", "message"),
    [
        ({"prompt": "p", "response": LONG * 2}, "left", "response has 1.. tokens"),
        ({"prompt": "p", "response": LONG * 2}, "prompt", "have more than 50 tokens; data.max_len"),
        ({"prompt": LONG * 2, "response": "r"}, "right", "begins after 1.. tokens.*the prompt"),
        ({"text": LONG * 2}, "prompt", "has no user text to shorten"),
        ({"messages": [SYSTEM, {**LAST, "content": LONG * 2}]}, "prompt", "has no user text"),
        (
            {"input_ids": [9] * 60, "labels": [-100] * 59 + [9]},
            "prompt",
            "has no user text to shorten; data.max_length is 50",
        ),
    ],
)
def test_what_cannot_be_shortened_is_bad(
    tmp_path: Path, row: dict[str, Any], truncation: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        encoded(tmp_path, row, truncation=truncation, max_length=50)


# --- rows of text in Python ----------------------------------------------------------------------


def test_a_generator_of_dicts_is_encoded_as_a_file_is(tmp_path: Path) -> None:
    rows = [{"question": f"say {i}", "answer": LONG[: 10 + i], "from": "a b"} for i in range(4)]
    tokenizer = make_tokenizer("merging", "plain")
    settings: dict[str, Any] = {"max_length": 30, "truncation": "right", "source_field": "from"}
    read_back, report = read(tmp_path, *rows, **settings)
    wanted, _ = tokenize(read_back, tokenizer, DataConfig(path="x", **settings), report)
    found = dualsft.encode((row for row in rows), tokenizer, **settings)
    assert [e.key for e in found] == [e.key for e in wanted] and len(found) == 4
    assert [(e.index, e.source, e.id) for e in found] == [(e.index, e.source, e.id) for e in wanted]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"question": "q", "answer": "a"}, {"question": "q"}], {}, "rows, row 2: field 'answer'"),
        ([{"question": "q", "answer": "a"}, "text"], {}, "rows, row 2: is no mapping of fields"),
        ([{"question": "q", "answer": "a"}], {"templat": "plain"}, "data.templat.*data.template"),
        ([], {}, "rows: has no row to tokenize"),
    ],
)
def test_rows_in_python_that_cannot_be_used(
    rows: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(dualsft.DualsftError, match=message):
        dualsft.encode(rows, make_tokenizer("byte", "plain"), **settings)
