"""Small tokenizers for the tests: one token a byte, so every length can be counted by hand."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ["<pad>", "<s>", "</s>"]

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template that writes BOS and EOS itself, and a newline after each turn."""


def byte_tokenizer(
    around: str = "$A", bos: bool = True, eos: bool = True, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer; `around` is what it puts around a text, as in "<s> $A </s>"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>" if bos else None,
        eos_token="</s>" if eos else None,
    )
    fast.chat_template = chat_template
    return fast


def text_ids(text: str) -> list[int]:
    """The token ids of a text without special tokens."""
    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
