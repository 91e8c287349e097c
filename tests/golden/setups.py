"""The tokenizers and chat templates of the golden fixtures, built the same in every environment."""

from __future__ import annotations

from typing import Any

from small_tokenizers import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_BODY = (
    "{{ '<' + m['role'] + '>' }}"
    "{% if m['role'] == 'assistant' %}OPEN{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '(call) ' + call['function']['name'] + ' ' }}"
    "{{ call['function']['arguments'] | tojson }}{% endfor %}{{ eos_token }}CLOSE"
    "{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}"
)
_CHAT = (
    "{% for t in tools or [] %}{{ '(tool) ' + (t | tojson) + '\n' }}{% endfor %}"
    "{% for m in messages %}" + _BODY + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
CHAT_TEMPLATES = {
    "plain": _CHAT.replace("OPEN", "").replace("CLOSE", ""),
    "generation": _CHAT.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}"),
}
"""One chat format, without and with the marks that tell answers from the rest."""

_TEXTS = (
    "the question and the answer of the day, in a short line of words",
    "what is the name of the river? the river is the longest one there is",
    "say it again, say it well: one two three four five six seven eight nine ten",
)


def merging_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Words with a marked space before them, the first one too, as sentencepiece writes them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    letters = sorted({*"".join(_TEXTS), *(chr(c) for c in range(33, 127)), "▁", "\n"} - {" "})
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    fast.chat_template = chat_template
    return fast


def make_tokenizer(name: str, chat_template: str) -> Any:
    """byte, byte_bos or merging, with one of the chat templates."""
    template = CHAT_TEMPLATES[chat_template]
    if name == "merging":
        return merging_tokenizer(template)
    return byte_tokenizer("<s> $A" if name == "byte_bos" else "$A", chat_template=template)
