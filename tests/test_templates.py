"""Templates: the paper's texts to the letter, and BOS and end token in every combination."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from golden.setups import merging_tokenizer
from small_tokenizers import BOS, CHAT, EOS, PAD, byte_tokenizer, text_ids

from dualsft.data import chat
from dualsft.data.rows import Row
from dualsft.data.templates import Template, pad_token_id
from dualsft.errors import ConfigError

MAGICODER = """You are a proficient coding assistant. Below is an instruction that describes a \
task. Write a response that appropriately completes the request.

### Instruction:
Sort {x} and "y".
Ascending.

### Response:"""

ALPACA = """Below is an instruction that describes a task. Write a response that appropriately \
completes the request.

### Instruction:
Sort {x} and "y".
Ascending.

### Response:"""

PROMPT = 'Sort {x} and "y".\nAscending.'


def pair(prompt: str, response: str) -> Row:
    return Row(0, "", b"", prompt, response)


@pytest.mark.parametrize(
    ("name", "expected"), [("magicoder", MAGICODER), ("alpaca", ALPACA), ("plain", PROMPT)]
)
def test_text_templates_are_the_paper_s(name: str, expected: str) -> None:
    template = Template(name, byte_tokenizer())
    assert template.render(pair(PROMPT, " ok ")) == [(expected, False), (" ok </s>", True)]
    assert template.render_prompt(PROMPT) == expected


def test_chat_prompt_is_the_beginning_of_the_whole() -> None:
    broken = "{% for m in messages %}{{ messages | length }}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"data.template=chat: .*character 1: '2QUESTION"):
        Template("chat", byte_tokenizer(chat_template=broken))


def test_a_chat_template_that_fails_is_named() -> None:
    failing = "{{ raise_exception('no such role') }}"
    with pytest.raises(ConfigError, match=r"data.template=chat.*no such role"):
        Template("chat", byte_tokenizer(chat_template=failing))


def test_a_chat_template_with_today_s_date_is_said(caplog: pytest.LogCaptureFixture) -> None:
    Template("chat", byte_tokenizer(chat_template="{{ strftime_now('%Y') }}" + CHAT))
    assert "today's date" in caplog.text


@pytest.mark.parametrize("name", ["magicoder", "plain", "chat"])
@pytest.mark.parametrize("around", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("add_bos", ["auto", "always", "never"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_one_bos_or_none_and_no_end_before_the_response(
    name: str, around: str, add_bos: str, model_type: str
) -> None:
    tokenizer = byte_tokenizer(around, chat_template=CHAT)
    template = Template(name, tokenizer, add_bos, model_type)
    pieces = template.render(pair("hi", "yes"))
    [made] = template.encode([pieces])
    own = around.startswith("<s>") or name == "chat"
    expected = {"always": True, "never": False, "auto": own or model_type == "gemma3_text"}
    prompt = [BOS] * expected[add_bos] + text_ids(pieces[0][0].removeprefix("<s>"))
    response = text_ids("yes") + [EOS] + text_ids("\n") * (name == "chat")
    assert made.ids == prompt + response
    assert made.answers == [(len(prompt), len(prompt) + len(response))]
    assert (made.doubled_bos, made.split, made.has_bos) == (False, False, expected[add_bos])
    assert template.prompt_ids("hi") == prompt


@pytest.mark.parametrize(("add_bos", "kept"), [("auto", [BOS]), ("always", [BOS]), ("never", [])])
def test_a_doubled_bos_is_dropped_and_counted(add_bos: str, kept: list[int]) -> None:
    template = Template("plain", byte_tokenizer("<s> $A"), add_bos)
    made = template.encode([template.render(pair(text, "r")) for text in ("<s>a", "b")])
    assert [e.ids for e in made] == [[*kept, *text_ids(f"{c}r"), EOS] for c in "ab"]
    assert [e.answers for e in made] == [[(1 + len(kept), 3 + len(kept))]] * 2
    assert [e.doubled_bos for e in made] == [True, False]


def test_chat_appends_eos_only_where_the_template_writes_none() -> None:
    without_end = CHAT.replace("{{ eos_token }}", "<end>")
    template = Template("chat", byte_tokenizer(chat_template=without_end))
    assert template.render(pair("hi", "yes"))[-1] == ("yes<end>\n</s>", True)
    other_special = CHAT.replace("{{ eos_token }}", "<pad>")
    template = Template("chat", byte_tokenizer(chat_template=other_special))
    assert template.render(pair("hi", "yes"))[-1] == ("yes<pad>\n", True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "chat"}, r"data.template=chat: the tokenizer has no chat template; use"),
        ({"bos": False, "add_bos": "always"}, r"data.add_bos=always: .*no BOS token; use"),
        ({"eos": False}, r"no end-of-sequence token.*set eos_token"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    settings: dict[str, str | bool], message: str
) -> None:
    tokenizer = byte_tokenizer(bos="bos" not in settings, eos="eos" not in settings)
    name, add_bos = settings.get("name", "plain"), settings.get("add_bos", "auto")
    with pytest.raises(ConfigError, match=message):
        Template(str(name), tokenizer, str(add_bos))


def test_gemma_without_a_bos_token_does_without() -> None:
    template = Template("plain", byte_tokenizer(bos=False), model_type="gemma2")
    assert template.prompt_ids("a") == text_ids("a")


def test_padding_falls_back_to_the_end_token() -> None:
    tokenizer = byte_tokenizer()
    assert pad_token_id(tokenizer) == PAD
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == EOS
    assert Template("plain", tokenizer).encode([]) == []


# --- conversations -------------------------------------------------------------------------------


def talk(*pairs: tuple[str, str], trained_from: int = 0) -> Row:
    turns = tuple({"role": role, "content": content} for role, content in pairs)
    return Row(0, "", b"", "", "", turns=turns, trained_from=trained_from)


ROUNDS = (("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"))


def test_every_answer_of_a_chat_is_labelled() -> None:
    template = Template("chat", byte_tokenizer(chat_template=CHAT))
    pieces = template.render(talk(("system", "s"), *ROUNDS))
    assert pieces == [
        ("<s>[system]s\n[user]q1\n[assistant]", False),
        ("a1</s>\n", True),
        ("[user]q2\n[assistant]", False),
        ("a2</s>\n", True),
    ]
    assert template.render(talk(*ROUNDS, trained_from=3)) == [
        ("<s>[user]q1\n[assistant]a1</s>\n[user]q2\n[assistant]", False),
        ("a2</s>\n", True),
    ]


THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}<think></think>{% endif %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\\n') }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Writes an empty thought before the last answer alone, and drops the thoughts of earlier ones."""


def test_answers_that_are_written_in_two_ways_are_found() -> None:
    template = Template("chat", byte_tokenizer(chat_template=THINKING))
    expected = [
        ("[user]q1|[assistant]", False),
        ("a1</s>|", True),
        ("[user]q2|[assistant]", False),
        ("<think></think>a2</s>|", True),
    ]
    assert template.render(talk(*ROUNDS)) == expected
    thoughtful = [ROUNDS[0], ("assistant", "<think>hm</think>\n\na1"), *ROUNDS[2:]]
    assert template.render(talk(*thoughtful)) == expected


def test_a_beginning_that_depends_on_the_turns_is_allowed() -> None:
    ok = CHAT.replace("{{ bos_token }}", "{% if messages | length > 2 %}X{% endif %}")
    template = Template("chat", byte_tokenizer(chat_template=ok))
    assert template.render(talk(*ROUNDS))[0] == ("X[user]q1\n[assistant]", False)


@pytest.mark.parametrize(
    ("name", "system", "expected"),
    [
        (
            "alpaca",
            "",
            [
                (ALPACA.replace(PROMPT, "q1"), False),
                ("a1</s>", True),
                ("\n\n### Instruction:\nq2\n\n### Response:", False),
                ("a2</s>", True),
            ],
        ),
        (
            "plain",
            "Be short.",
            [("Be short.\n\nq1", False), ("a1</s>", True), ("q2", False), ("a2</s>", True)],
        ),
        ("plain", "", [("q1", False), ("a1</s>", True), ("q2", False), ("a2</s>", True)]),
    ],
)
def test_conversations_in_text_templates(
    name: str, system: str, expected: list[tuple[str, bool]]
) -> None:
    template = Template(name, byte_tokenizer())
    turns = [("system", system)] if system else []
    assert template.render(talk(*turns, *ROUNDS)) == expected
    made = template.encode([expected])[0]
    assert [made.ids[start:end] for start, end in made.answers] == [
        [*text_ids("a1"), EOS],
        [*text_ids("a2"), EOS],
    ]


@pytest.mark.parametrize(
    "turns",
    [
        [ROUNDS[0], ("tool", "x"), ROUNDS[1]],
        [ROUNDS[0], ROUNDS[0], ROUNDS[1]],
        [ROUNDS[1], ROUNDS[1]],
    ],
)
def test_text_templates_refuse_other_turns(turns: list[tuple[str, str]]) -> None:
    with pytest.raises(
        ValueError, match="data.template=plain requires alternating user and assistant.*=chat"
    ):
        Template("plain", byte_tokenizer()).render(talk(*turns))


# --- borders -------------------------------------------------------------------------------------


def test_a_text_is_encoded_at_once() -> None:
    """Apart, the response would begin with the space that a text begins with."""
    tokenizer = merging_tokenizer()
    template = Template("plain", tokenizer)
    [made] = template.encode([template.render(pair("say it", ",again"))])
    assert made.ids == [*tokenizer("say it,again")["input_ids"], tokenizer.eos_token_id]
    prompt = tokenizer("say it")["input_ids"]
    assert made.ids[: len(prompt)] == prompt and made.answers == [(len(prompt), len(made.ids))]
    assert not made.split


def test_a_token_across_the_border_splits_the_text() -> None:
    tokenizer = merging_tokenizer()
    template = Template("plain", tokenizer)
    assert len(tokenizer("the", add_special_tokens=False)["input_ids"]) == 1
    [made] = template.encode([template.render(pair("th", "e river"))])
    prompt = tokenizer("th")["input_ids"]
    rest = tokenizer("e river", add_special_tokens=False)["input_ids"]
    assert made.ids == [*prompt, *rest, tokenizer.eos_token_id]
    assert made.split and made.answers == [(len(prompt), len(made.ids))]


def test_special_text_in_a_row_is_seen() -> None:
    template = Template("plain", byte_tokenizer())
    assert template.holds_special_text(pair("a</s>b", "c"))
    assert template.holds_special_text(talk(("user", "<pad>"), ("assistant", "a")))
    assert not template.holds_special_text(pair("< /s>", "c"))


# --- a template of one's own ---------------------------------------------------------------------


def own(tmp_path: Path, text: str | bytes) -> Template:
    path = tmp_path / "chat.jinja"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Template("chat", byte_tokenizer(), template_file=str(path))


def test_a_template_file_takes_the_place_of_the_tokenizer_s(tmp_path: Path) -> None:
    template = own(tmp_path, CHAT.replace("[assistant]", "[bot]").replace("m['role']", "'bot'"))
    assert template.render(pair("hi", "yes")) == [("<s>[bot]hi\n[bot]", False), ("yes\n</s>", True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "cannot be read"),
        (b"x" * (2 << 20), "is larger than 1,048,576 bytes"),
        ("{{ messages", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ 'a' * 10 ** 11 }}", "MemoryError"),
        ("{% for i in range(99999999) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_template_files_that_cannot_be_used(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        own(tmp_path, text)


def test_a_template_may_not_run_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(chat, "MAX_OUTPUT", 1000)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match="TimeoutError: it takes longer than 0.2 seconds"):
        own(tmp_path, loop)
    with pytest.raises(ConfigError, match="it writes more than 1,000 characters"):
        own(tmp_path, "{% for i in range(999) %}ab{% endfor %}")
    assert signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None)
