"""Properties of the data: rows to tokens, batches, split, settings; for any input.

Rows go through files, as a user's do. What is compared is token ids and texts, exactly.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import malformed
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from models import tiny_plan
from properties import Properties, example, examples, finite, scratch, seeds, texts
from small_tokenizers import BOS, byte_tokenizer

from dualsft.algorithm.split import assign_roles, divide, resolve_budget
from dualsft.cli import parse_words
from dualsft.config import settings as config_module
from dualsft.config.settings import SplitConfig
from dualsft.data.examples import IGNORE, Example, collate, tokenize
from dualsft.data.readers import _OTHER_KINDS
from dualsft.data.rows import DataReport, read_rows
from dualsft.errors import ConfigError, DataError
from dualsft.train.loop import micro_batches

PROPERTIES = Properties()


# --- inputs --------------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZERS = {bos: byte_tokenizer("<s> $A" if bos else "$A", chat_template=CHAT) for bos in (0, 1)}

answers = texts.filter(lambda text: bool(text.strip()))
pairs = st.tuples(texts.filter(bool), answers)


def data_config(path: Path, **data: Any) -> Any:
    values = {"path": str(path), "template": "plain", **data}
    words = [f"data.{key}={value}" for key, value in values.items()]
    return config_module.load(None, ["model.path=m", *words]).data


def encoded(
    content: bytes, suffix: str = "jsonl", bos: bool = False, **data: Any
) -> tuple[list[Example], DataReport]:
    """Examples of a file, through reading and tokenising."""
    with scratch() as folder:
        path = folder / f"c.{suffix}"
        path.write_bytes(content)
        config = data_config(path, **data)
        rows, report = read_rows(path, config)
        return tokenize(rows, TOKENIZERS[bos], config, report)


def pair_rows(rows: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "response": response} for prompt, response in rows]


def decode(ids: Sequence[int]) -> str:
    text = TOKENIZERS[0].decode(list(ids))
    assert isinstance(text, str)
    return text


def distinct(count: int) -> list[Example]:
    return [example([1, i + 3, 2], 0, i) for i in range(count)]


# --- rows to tokens ------------------------------------------------------------------------------


@PROPERTIES.holds(rows=st.lists(pairs, min_size=1, max_size=6), bos=st.booleans())
def labels_are_the_ids_of_the_response(rows: list[tuple[str, str]], bos: bool) -> None:
    made, report = encoded(malformed.json_lines(pair_rows(rows)), bos=bos)
    assert report.num_good == len(rows) == len(made)
    for one, (prompt, response) in zip(made, rows, strict=True):
        trained = [t for t, label in enumerate(one.labels) if label != IGNORE]
        assert all(one.labels[t] == one.input_ids[t] for t in trained)
        assert trained == list(range(trained[0], one.num_tokens)) and trained[0] > 0
        assert decode(one.input_ids[bos : trained[0]]) == prompt
        assert decode(one.input_ids[trained[0] : -1]) == response
        assert one.num_response_tokens == len(trained)


@PROPERTIES.holds(
    turns=st.lists(pairs, min_size=1, max_size=4), system=st.none() | texts.filter(bool)
)
def every_answer_of_a_conversation_is_trained(
    turns: list[tuple[str, str]], system: str | None
) -> None:
    said = [("system", system)] if system else []
    said += [turn for ask, tell in turns for turn in (("user", ask), ("assistant", tell))]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    [one], _ = encoded(malformed.json_lines([row]), template="chat", max_length=100_000)
    whole = "".join(f"[{r}]{c}" + "</s>" * (r == "assistant") for r, c in said)
    assert decode(one.input_ids) == whole
    trained = [i for i in one.labels if i != IGNORE]
    assert decode(trained) == "".join(f"{tell}</s>" for _, tell in turns)


@PROPERTIES.holds(
    rows=st.lists(pairs, min_size=1, max_size=6), bos=st.booleans(), limit=st.integers(8, 60)
)
def a_limit_cuts_prompts_from_the_left(rows: list[tuple[str, str]], bos: bool, limit: int) -> None:
    content = malformed.json_lines(pair_rows(rows))
    whole, _ = encoded(content, bos=bos)
    try:
        made, report = encoded(content, bos=bos, max_length=limit, bad_rows="skip")
    except DataError:
        made, report = [], None
    kept = {one.index: one for one in made}
    for full in whole:
        room = limit - full.num_response_tokens - bos
        if full.index not in kept:
            assert room < (0 if bos else 1), "a response that fits was refused"
            continue
        one = kept[full.index]
        assert one.num_tokens == min(limit, full.num_tokens)
        assert one.input_ids[:bos] == [BOS] * bos
        assert one.input_ids[bos:] == full.input_ids[full.num_tokens - one.num_tokens + bos :]
        assert [i for i in one.labels if i >= 0] == [i for i in full.labels if i >= 0]
    if report:
        cut = sum(full.num_tokens > limit for full in whole if full.index in kept)
        assert (report.num_truncated, report.num_bad) == (cut, len(whole) - len(made))


@PROPERTIES.holds(
    row=pairs, spaces=st.text(" \t", max_size=3), turned=st.booleans(), escaped=st.booleans()
)
def the_spelling_of_json_changes_nothing(
    row: tuple[str, str], spaces: str, turned: bool, escaped: bool
) -> None:
    fields = pair_rows([row])[0]
    other = dict(reversed(fields.items())) if turned else fields
    text = json.dumps(other, ensure_ascii=escaped, separators=(f"{spaces},", f":{spaces}"))
    one, two = (encoded(t.encode())[0][0] for t in (json.dumps(fields), spaces + text + spaces))
    assert (one.id, one.key) == (two.id, two.key)


@PROPERTIES.holds(rows=st.lists(pairs, min_size=2, max_size=8, unique=True))
def an_id_is_its_content_and_its_place(rows: list[tuple[str, str]]) -> None:
    made, _ = encoded(malformed.json_lines(pair_rows([*rows, rows[0]])))
    hashes = [one.id.partition("-")[0] for one in made]
    assert len({one.id for one in made}) == len(made)
    assert hashes[0] == hashes[-1] and len(set(hashes)) == len(rows)
    assert {len(digest) for digest in hashes} == {16}
    assert [one.id.partition("-")[2] for one in made] == [str(i) for i in range(len(made))]


BAD = [b"{", b"[]", b'{"prompt": "p"}', b'{"prompt": "p", "response": " "}', b"\xff"]
noise = st.binary(max_size=40).filter(lambda line: bool(line.strip()) and b"\n" not in line)


@PROPERTIES.holds(lines=st.lists(pairs | st.sampled_from(BAD) | noise, min_size=1, max_size=10))
def skipping_leaves_exactly_the_good_rows(lines: list[Any]) -> None:
    good = [line for line in lines if isinstance(line, tuple)]
    assume(good)
    spelled = [
        line if isinstance(line, bytes) else json.dumps(pair_rows([line])[0]).encode()
        for line in lines
    ]
    assume(not spelled[0].startswith(tuple(magic for magic, *_ in _OTHER_KINDS)))  # refused whole
    assume(spelled[0] != codecs.BOM_UTF8)  # a blank line
    made, report = encoded(b"\n".join(spelled), bad_rows="skip", format="prompt_response")
    alone, _ = encoded(malformed.json_lines(pair_rows(good)))
    assert [e.key for e in made] == [e.key for e in alone]
    assert [e.index for e in made] == [i for i, line in enumerate(lines) if line in good]
    assert (report.num_rows, report.num_bad) == (len(lines), len(lines) - len(good))
    bad = [i + 1 for i, line in enumerate(lines) if isinstance(line, bytes)]
    assert [int(m.split(", line ")[1].split(":")[0]) for m in report.bad] == bad


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-1, 1) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
some_text = texts | st.sampled_from(["ask", "tell"]) | anything
calls = st.just([{"type": "function", "function": {"name": "f", "arguments": {}}}])


def talk_of(role: str, content: str, *roles: str) -> Any:
    """Good conversations, the same with an odd turn somewhere, and things that are none."""
    good = st.lists(pairs, min_size=1, max_size=3).map(
        lambda said: [
            {role: who, content: text}
            for pair in said
            for who, text in zip(roles[:2], pair, strict=True)
        ]
    )
    parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": some_text}))
    odd = st.fixed_dictionaries(
        {role: st.sampled_from(roles) | anything, content: some_text | parts},
        optional={"tool_calls": calls | anything, "name": some_text, "tool_call_id": some_text},
    )
    spoiled = st.tuples(good, st.integers(0, 6), odd | anything).map(
        lambda drawn: [*drawn[0][: drawn[1]], drawn[2], *drawn[0][drawn[1] :]]
    )
    return good | spoiled | st.lists(odd, max_size=3) | anything


talks = talk_of("role", "content", "user", "assistant", "system", "tool", "developer", "x")
tagged = talk_of("from", "value", "human", "gpt", "system", "observation", "function_call")
history = st.lists(st.lists(some_text, max_size=3), max_size=2) | anything
shapes: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages": talks}, {"tools": anything}),
    ({"conversations": tagged}, {"system": some_text, "tools": some_text}),
    (
        {"instruction": some_text, "output": some_text},
        {"input": some_text, "history": history, "system": some_text},
    ),
    ({"text": some_text}, {}),
]
any_rows = st.dictionaries(st.sampled_from(["prompt", "completion", "response"]), some_text | talks)
for fixed, optional in shapes:
    any_rows |= st.fixed_dictionaries(fixed, optional=optional)


@PROPERTIES.holds(
    rows=st.lists(any_rows, min_size=1, max_size=4),
    template=st.sampled_from(["chat", "alpaca", "magicoder", "plain"]),
    suffix=st.sampled_from(["jsonl", "json", "jsonl.gz"]),
)
def any_row_is_trained_on_or_named(rows: list[dict[str, Any]], template: str, suffix: str) -> None:
    """Whatever stands in the fields: examples with something to learn, or a user's error."""
    content = malformed.container(suffix, rows)
    try:
        made, report = encoded(content, suffix, template=template, bad_rows="skip")
    except DataError as problem:
        assert all(text.isprintable() and "c." + suffix in text for text in problem.problems)
        return
    assert report.num_rows == len(rows) == len(made) + report.num_bad == len(made) + len(report.bad)
    assert all("c." + suffix in text and text.isprintable() for text in report.bad)
    for one in made:
        trained = [t for t, label in enumerate(one.labels) if label != IGNORE]
        assert trained and trained[0] > 0
        assert all(one.labels[t] == one.input_ids[t] for t in trained)


# --- batches and training ------------------------------------------------------------------------


@PROPERTIES.holds(rows=examples, side=st.sampled_from(["left", "right"]), pad=st.integers(0, 9))
def a_batch_holds_its_rows_and_nothing_else(rows: list[Example], side: str, pad: int) -> None:
    batch = collate(rows, pad, side)
    width = max(e.num_tokens for e in rows)
    assert batch.input_ids.shape == (len(rows), width)
    for i, one in enumerate(rows):
        real = batch.attention_mask[i].bool()
        assert batch.input_ids[i][real].tolist() == one.input_ids
        assert batch.labels[i][real].tolist() == one.labels
        assert batch.position_ids[i][real].tolist() == list(range(one.num_tokens))
        assert set(batch.input_ids[i][~real].tolist()) <= {pad}
        assert set(batch.labels[i][~real].tolist()) <= {IGNORE}
        first, last = bool(real[0]), bool(real[-1])
        assert first if side == "right" else last


@PROPERTIES.holds(rows=examples, size=st.none() | st.integers(1, 9), tokens=st.integers(1, 60))
def micro_batches_are_the_batch(rows: list[Example], size: int | None, tokens: int) -> None:
    plan = tiny_plan(micro_batch_size=size, batch_tokens=tokens)
    pieces = micro_batches(rows, plan)
    assert sorted(e.index for piece in pieces for e in piece) == [e.index for e in rows]
    assert all(piece and (size is None or len(piece) <= size) for piece in pieces)


# --- split ---------------------------------------------------------------------------------------


@PROPERTIES.holds(
    corpus=st.lists(st.integers(0, 40), min_size=12, max_size=60),
    trusted=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    kept=st.lists(st.integers(0, 60), max_size=5),
    seed=seeds,
    anchor=st.integers(1, 4),
    warm=st.integers(1, 4),
)
def a_split_is_complete_and_no_text_has_two_roles(
    corpus: list[int], trusted: list[int], kept: list[int], seed: int, anchor: int, warm: int
) -> None:
    rows, sure, anchors = (
        [example([1, text + 3, 2], 0, i) for i, text in enumerate(t)]
        for t in (corpus, trusted, kept)
    )
    sizes = SplitConfig(anchor=None if anchors else anchor, warm=warm)
    try:
        everything, split = divide(rows, sure, seed, sizes, anchors)
    except ConfigError:
        return
    assert len(everything) == len(split.roles) == sum(split.counts.values())
    roles: dict[str, set[str]] = {}
    for one, role in zip(everything, split.roles, strict=True):
        roles.setdefault(one.key, set()).add(role)
    assert all(len(found) == 1 for found in roles.values())
    held = [e for e in anchors if e.key not in {e.key for e in sure}]
    tail = len(sure) + len(held)
    assert everything[-tail:] == [*sure, *held]
    assert split.roles[-tail:] == ["val"] * len(sure) + ["anchor"] * len(held)
    assert not anchors or "anchor" not in split.roles[:-tail]
    assert roles.keys() == {e.key for e in [*rows, *sure, *anchors]}


@PROPERTIES.holds(count=st.integers(30, 80), seed=seeds, sizes=st.tuples(*[st.integers(1, 6)] * 4))
def a_larger_role_takes_rows_from_the_pool_alone(
    count: int, seed: int, sizes: tuple[int, int, int, int]
) -> None:
    val, anchor, warm, more = sizes
    rows = distinct(count)
    small, large = (assign_roles(rows, seed, val, anchor, w).roles for w in (warm, warm + more))
    moved = [(a, b) for a, b in zip(small, large, strict=True) if a != b]
    assert moved == [("pool", "warm")] * more


@PROPERTIES.holds(share=st.floats(0, 1, exclude_min=True), total=st.integers(1, 10**7))
def a_fraction_is_rounded_down_as_it_is_written(share: float, total: int) -> None:
    count = resolve_budget(share, total)
    exact = Fraction(Decimal(repr(share))) * total
    assert count == max(1, math.floor(exact)) and 1 <= count <= total


# --- settings ------------------------------------------------------------------------------------

typed = st.sampled_from(["0", "1", "-1", "0.5", "1.0", "1e-3", "true", "null", "all", "nan", ""])


@PROPERTIES.holds(
    given_settings=st.dictionaries(
        st.sampled_from(config_module.keys()), typed | texts | finite.map(str), max_size=6
    )
)
def any_settings_are_refused_by_name_or_replayed(given_settings: dict[str, str]) -> None:
    words = {"model.path": "m", "data.path": "d.jsonl", **given_settings}
    try:
        config = config_module.load(None, [f"{key}={value}" for key, value in words.items()])
    except ConfigError as problem:
        assert all(any(key in text for key in words) for text in problem.problems)
        return
    with scratch() as folder:
        (folder / "c.yaml").write_text(config_module.to_yaml(config), encoding="utf-8")
        consent = config_module.consent_of(config)  # never stored, so it is given again
        again = config_module.load(folder / "c.yaml", consent)
    assert again == config and config_module.to_yaml(again) == config_module.to_yaml(config)
    assert config_module.from_mapping(config_module.to_mapping(config)) == config


yaml_texts = st.text(max_size=60) | st.lists(
    st.sampled_from(
        ["score", "lam", "model.path", ":", " ", "\n", "\n  ", "- ", "[", "]", "{", "}", "'", '"']
        + ["&a ", "*a", "!x ", "!!int ", "|", ">", "#", "? ", "---", "...", "%", "0x1", "1_0", "~"]
    ),
    max_size=25,
).map("".join)


@PROPERTIES.holds(text=yaml_texts)
def any_yaml_gives_settings_or_a_config_error(text: str) -> None:
    with scratch() as folder:
        path = folder / "c.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            config_module.load(path, ["model.path=m", "data.path=d.jsonl"])
        except ConfigError as problem:
            assert problem.problems and all(problem.problems)


@PROPERTIES.holds(
    words=st.lists(texts | st.sampled_from(["--a", "a=b", "--a=b", "-x", "=", "--"]), max_size=6)
)
def any_words_are_settings_or_a_config_error(words: list[str]) -> None:
    try:
        source, overrides = parse_words(words)
    except ConfigError:
        return
    assert all("=" in override for override in overrides)
    assert source is None or source in words


# --- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name: str) -> None:
    PROPERTIES.try_out(name, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_property_at_length(name: str) -> None:
    PROPERTIES.try_out(name, 2_000)
