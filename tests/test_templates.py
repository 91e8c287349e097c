"""Templates: the paper's texts to the letter, and BOS and end token in every combination."""

from __future__ import annotations

import pytest
from small_tokenizers import BOS, CHAT, EOS, PAD, byte_tokenizer, text_ids

from dualsft.errors import ConfigError
from dualsft.templates import TEMPLATE_NAMES, Template, pad_token_id

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


@pytest.mark.parametrize(
    ("name", "expected"), [("magicoder", MAGICODER), ("alpaca", ALPACA), ("plain", PROMPT)]
)
def test_text_templates_are_the_paper_s(name: str, expected: str) -> None:
    template = Template(name, byte_tokenizer())
    assert template.render(PROMPT, " ok ") == (expected, " ok ")
    assert template.render_prompt(PROMPT) == expected


def test_chat_is_the_tokenizer_s_own() -> None:
    template = Template("chat", byte_tokenizer(chat_template=CHAT))
    assert template.render("hi", " yes ") == ("<s>[user]hi\n[assistant]", "yes</s>\n")


def test_chat_prompt_is_the_beginning_of_the_whole() -> None:
    broken = "{% for m in messages %}{{ messages | length }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"data.template=chat: .*character 1: '2question"):
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
    prompt, response = template.render("hi", "yes")
    [ids], doubled = template.encode_prompts([prompt])
    own = around.startswith("<s>") or name == "chat"
    expected = {"always": True, "never": False, "auto": own or model_type == "gemma3_text"}
    assert ids == [BOS] * expected[add_bos] + text_ids(prompt.removeprefix("<s>"))
    assert doubled == [False]
    end = [] if name == "chat" else [EOS]
    assert template.encode_responses([response]) == [text_ids(response) + end]


@pytest.mark.parametrize(("add_bos", "kept"), [("auto", [BOS]), ("always", [BOS]), ("never", [])])
def test_a_doubled_bos_is_dropped_and_told(add_bos: str, kept: list[int]) -> None:
    template = Template("plain", byte_tokenizer("<s> $A"), add_bos)
    ids, doubled = template.encode_prompts(["<s>a", "b"])
    assert ids == [kept + text_ids("a"), kept + text_ids("b")]
    assert doubled == [True, False]


def test_chat_appends_eos_only_where_the_template_writes_none() -> None:
    without_end = CHAT.replace("{{ eos_token }}", "<end>")
    template = Template("chat", byte_tokenizer(chat_template=without_end))
    [ids] = template.encode_responses([template.render("hi", "yes")[1]])
    assert ids == text_ids("yes<end>\n") + [EOS]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "vicuna"}, r"data.template: 'vicuna'.*magicoder, alpaca, plain, chat"),
        ({"name": "chat"}, r"data.template=chat: the tokenizer has no chat template; use"),
        ({"add_bos": "yes"}, r"data.add_bos: 'yes'.*auto, always or never"),
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
    assert template.encode_prompts(["a"])[0] == [text_ids("a")]


def test_names_and_padding() -> None:
    assert TEMPLATE_NAMES == ("magicoder", "alpaca", "plain", "chat")
    tokenizer = byte_tokenizer()
    assert pad_token_id(tokenizer) == PAD
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == EOS
    assert Template("plain", tokenizer).encode_prompts([]) == ([], [])
