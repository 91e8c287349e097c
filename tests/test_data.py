"""Examples and batches: label spans, truncation, BOS, counting, padding and token budgets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from golden.setups import merging_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import BOS, CHAT, EOS, byte_tokenizer, text_ids

from dualsft.config.settings import DataConfig
from dualsft.data.examples import IGNORE, Example, make_batches, tokenize
from dualsft.data.rows import DataReport, Row, read_rows
from dualsft.errors import ConfigError, DataError

BYTES = byte_tokenizer("<s> $A", chat_template=CHAT)


def row(prompt: str, response: str, index: int = 0) -> Row:
    return Row(index, f"{'0' * 16}-{index}", b"", prompt, response)


def encode(
    rows: list[Row], tokenizer: Any = BYTES, max_positions: int | None = None, **config: Any
) -> tuple[list[Example], DataReport]:
    config = {"path": "corpus.jsonl", "template": "plain", **config}
    return tokenize(rows, tokenizer, DataConfig(**config), max_positions=max_positions)


def example(num_tokens: int, text: int = 0, index: int = 0) -> Example:
    ids = [(text * 31 + t) % 97 for t in range(num_tokens)]
    return Example(f"row-{index}", index, ids, [IGNORE, *ids[1:]])


# --- examples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["plain", "alpaca", "magicoder"])
def test_labels_are_the_response_and_its_end(template: str) -> None:
    [made], report = encode([row("ask", "né", 6)], template=template)
    response = text_ids("né") + [EOS]
    assert made.input_ids[0] == BOS
    assert made.input_ids[-4:] == response and made.labels[-4:] == response
    assert set(made.labels[:-4]) == {IGNORE}
    assert len(made.labels) == made.num_tokens
    assert (made.num_response_tokens, made.index, made.id) == (4, 6, "0000000000000000-6")
    assert (report.num_good, report.template) == (1, template)
    if template == "plain":
        assert made.input_ids == [BOS, *text_ids("ask"), *response]


def test_rows_that_the_chat_template_refuses_are_bad() -> None:
    picky = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + CHAT
    tokenizer = byte_tokenizer(chat_template=picky)
    rows = [row("fine", "r", 0), row("bad", "r", 4)]
    with pytest.raises(DataError, match=r"corpus.jsonl, line 5: the chat template fails .*no\)"):
        encode(rows, tokenizer, template="chat")
    examples, report = encode(rows, tokenizer, template="chat", bad_rows="skip")
    assert ([e.index for e in examples], report.num_bad) == ([0], 1)


def test_doubled_bos_is_counted_and_said() -> None:
    examples, report = encode([row("<s>a", "r", 0), row("b", "r", 1)])
    assert [e.input_ids[:2] for e in examples] == [[BOS, *text_ids(c)] for c in "ab"]
    assert report.num_double_bos == 1
    assert "1 of 2 rows began with more than one BOS" in report.notes()[0]


@pytest.mark.parametrize(
    ("around", "max_length", "kept"),
    [
        ("<s> $A", 10, "<s>abcdef"),
        ("<s> $A", 9, "<s>bcdef"),
        ("<s> $A", 4, "<s>"),
        ("$A", 9, "abcdef"),
        ("$A", 4, "f"),
    ],
)
@pytest.mark.parametrize("limit", ["max_length", "max_positions"])
def test_long_rows_lose_prompt_tokens_after_the_bos(
    around: str, max_length: int, kept: str, limit: str
) -> None:
    [made], report = encode([row("abcdef", "xy")], byte_tokenizer(around), **{limit: max_length})
    assert made.input_ids == text_ids(kept) + text_ids("xy") + [EOS]
    assert made.labels == [IGNORE] * len(text_ids(kept)) + text_ids("xy") + [EOS]
    cut = "abcdef" not in kept
    assert report.num_truncated == cut
    assert report.max_length == max_length
    assert ("1 of 1 row lost prompt tokens" in "".join(report.notes())) == cut


@pytest.mark.parametrize(
    ("limits", "cure"),
    [
        ({"max_length": 3}, "data.max_length is 3; raise data.max_length or shorten"),
        ({"max_positions": 3}, "the model has 3 positions; shorten the response"),
    ],
)
def test_a_response_that_does_not_fit_makes_a_bad_row(limits: dict[str, int], cure: str) -> None:
    rows = [row("a", "xy", 3), row("b", "x", 5)]
    with pytest.raises(DataError) as caught:
        encode(rows, **limits)
    assert caught.value.problems[0].startswith("corpus.jsonl, line 4: response has 3 tokens")
    assert cure in caught.value.problems[0]
    examples, report = encode(rows, bad_rows="skip", **limits)
    assert [e.index for e in examples] == [5]
    assert (report.num_rows, report.num_good, report.num_bad) == (2, 1, 1)


def test_a_response_without_tokens_is_a_bad_row() -> None:
    with pytest.raises(DataError, match="line 1: the response has no token except its end"):
        encode([row("a", "</s>")])


def test_an_empty_prompt_needs_a_bos() -> None:
    with pytest.raises(DataError, match="line 1: the prompt has no token.*data.add_bos=always"):
        encode([row("", "r")], byte_tokenizer("$A"))
    [made], report = encode([row("", "r")], byte_tokenizer("$A"), add_bos="always")
    assert made.input_ids == [BOS, *text_ids("r"), EOS]
    assert report.num_empty_prompts == 1
    assert "1 of 1 row has an empty prompt" in report.notes()[0]


def test_nothing_left_is_an_error_even_when_skipping() -> None:
    with pytest.raises(DataError, match="1 of 1 row of corpus.jsonl is bad .*no row is left"):
        encode([row("a", "xyz")], max_length=2, bad_rows="skip")
    with pytest.raises(DataError, match="no row to tokenize"):
        encode([])


def test_identical_texts_share_a_key() -> None:
    examples, _ = encode([row("ab", "c", 0), row("ab", "c", 1), row("a", "bc", 2)])
    assert examples[0].input_ids == examples[2].input_ids
    assert examples[0].key == examples[1].key != examples[2].key
    assert len(examples[0].key) == 64


# --- conversations and whole texts ---------------------------------------------------------------


def talk(*texts: str, index: int = 0) -> Row:
    """User and assistant in turn."""
    roles = ["user", "assistant"] * len(texts)
    turns = tuple({"role": r, "content": t} for r, t in zip(roles, texts, strict=False))
    return Row(index, f"{'0' * 16}-{index}", b"", texts[-2], texts[-1], turns=turns)


def labelled(made: Example) -> str:
    """The text with what is labelled in brackets; an end token is a bar."""
    shown = ""
    for token, label in zip(made.input_ids, made.labels, strict=True):
        text = {BOS: "^", EOS: "|"}.get(token) or str(BYTES.decode([token]))
        shown += text if label == IGNORE else f"[{text}]"
    return shown.replace("][", "")


@pytest.mark.parametrize(
    ("max_length", "expected", "cut"),
    [
        (11, "^ab[cd|]ef[gh|]", 0),
        (9, "^[cd|]ef[gh|]", 0),
        (8, "^[d|]ef[gh|]", 1),
        (6, "^ef[gh|]", 1),
        (4, "^[gh|]", 1),
    ],
)
def test_long_conversations_are_cut_from_the_left(max_length: int, expected: str, cut: int) -> None:
    [made], report = encode([talk("ab", "cd", "ef", "gh")], max_length=max_length)
    assert labelled(made) == expected
    assert (report.num_truncated, report.num_cut_responses) == (int(max_length < 11), cut)
    said = "1 of 1 row lost tokens of an earlier response in that cut"
    assert (said in "".join(report.notes())) == bool(cut)


def test_a_cut_before_a_token_that_opens_turns_and_is_the_bos_leaves_one_of_it() -> None:
    """SmolLM2's <|im_start|> is both."""
    for max_length, expected in (
        (8, "^b<s>cd[ef|]"),
        (7, "^cd[ef|]"),
        (6, "^cd[ef|]"),
        (5, "^d[ef|]"),
    ):
        prompt = "ab<s>cd"
        [made], report = encode([row(prompt, "ef")], max_length=max_length)
        assert labelled(made) == expected.replace("<s>", "^")
        assert report.num_truncated == 1


def test_the_first_token_is_never_labelled() -> None:
    [made], _ = encode([talk("ab", "cd", "ef", "gh")], byte_tokenizer("$A"), max_length=7)
    assert labelled(made) == "d[|]ef[gh|]"


def test_a_whole_text_is_its_own_response() -> None:
    whole = Row(0, "", b"", "", "abc", whole=True)
    for around, expected in (("<s> $A", "^[abc|]"), ("$A", "a[bc|]")):
        for template in ("plain", "alpaca", "chat"):
            tokenizer = byte_tokenizer(around, chat_template=CHAT)
            [made], report = encode([whole], tokenizer, template=template)
            assert labelled(made) == expected
            assert report.num_empty_prompts == 0
    with pytest.raises(DataError, match="response has 4 tokens with its end"):
        encode([whole], max_length=4)


def test_changed_rows_are_counted_and_said() -> None:
    tokenizer = merging_tokenizer()
    rows = [row("th", "e river", 0), row("a</s>b", "c", 1), row("say", " it", 2)]
    _, report = encode(rows, tokenizer)
    assert (report.num_split_borders, report.num_special_text) == (1, 1)
    said = "".join(report.notes())
    assert "1 of 3 rows has a token across the border" in said
    assert "1 of 3 rows holds the text of a special token" in said


def test_progress_is_reported_per_chunk() -> None:
    calls: list[tuple[int, int]] = []
    rows = [row("p", f"{i:04}", i) for i in range(1500)]
    config = DataConfig(path="c.jsonl", template="plain")
    examples, _ = tokenize(rows, BYTES, config, progress=lambda *done: calls.append(done))
    assert calls == [(1000, 7000), (500, 3500)]
    assert [e.index for e in examples] == list(range(1500))
    assert examples[1234].labels[-5:] == text_ids("1234") + [EOS]


def test_reading_progress_grows_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"prompt": "p", "response": "r"}\n' * 3500)
    calls: list[tuple[float, int]] = []
    config = DataConfig(path=str(path))
    read_rows(path, config, progress=lambda share, rows: calls.append((share, rows)))
    assert [rows for _, rows in calls] == [1000, 2000, 3000]
    assert 0 < calls[0][0] <= calls[1][0] <= calls[2][0] <= 1


# --- batches -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 30), st.integers(0, 3)), max_size=40),
    st.integers(1, 120),
    st.randoms(use_true_random=False),
)
def test_batches_hold_the_budget_and_ignore_the_order(
    sizes: list[tuple[int, int]], batch_tokens: int, rng: random.Random
) -> None:
    examples = [example(length, text, i) for i, (length, text) in enumerate(sizes)]
    batches = make_batches(examples, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(examples)))
    for batch in batches:
        longest = max(examples[i].num_tokens for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= batch_tokens
    for one, two in zip(batches, batches[1:], strict=False):
        longest = max(examples[i].num_tokens for i in one)
        assert (len(one) + 1) * longest > batch_tokens
        assert min(examples[i].num_tokens for i in one) >= examples[two[0]].num_tokens

    shuffled = rng.sample(examples, len(examples))
    again = make_batches(shuffled, batch_tokens)
    assert [[shuffled[i].id for i in batch] for batch in again] == [
        [examples[i].id for i in batch] for batch in batches
    ]


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="score.batch_tokens: 0"):
        make_batches([example(3)], 0)
