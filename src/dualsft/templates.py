"""Templates: from a row's prompt and response to text, and from text to token ids.

The paper's two templates stand here exactly as it prints them (appendix "Prompt Templates"): a
blank line between the paragraphs and nothing after "### Response:". `plain` adds nothing at all;
`chat` is the tokenizer's own chat template, rendered in transformers' sandbox.

Prompt and response are always encoded apart, so the border between them is never inside a token
and the labels of ALGORITHM.md section 2 ("Example loss") are exact. The response carries its end
token: the tokenizer's EOS, or, for `chat`, what the template writes after the answer (with the EOS
behind it where the template writes none).
"""

from __future__ import annotations

import logging
from os.path import commonprefix
from typing import TYPE_CHECKING

from dualsft.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_REQUEST = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n"
    "### Response:"
)

TEXT_TEMPLATES: dict[str, str] = {
    "magicoder": "You are a proficient coding assistant. " + _REQUEST,
    "alpaca": _REQUEST,
    "plain": "{instruction}",
}
"""Templates that are plain text around the prompt; `chat` is the only other name."""

TEMPLATE_NAMES: tuple[str, ...] = (*TEXT_TEMPLATES, "chat")


class Template:
    """One template bound to one tokenizer: rendering, and encoding with BOS and end token.

    `add_bos` is auto (what the tokenizer does by itself; a BOS that is missing is put there for
    model types that begin with "gemma", which are useless without it), always or never.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        add_bos: str = "auto",
        model_type: str = "",
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._check_settings(add_bos)
        self.bos_id: int | None = _token_id(tokenizer, "bos")
        self.eos_id: int = self._required_eos()
        gemma = add_bos == "auto" and model_type.startswith("gemma")
        self._add_bos = add_bos == "always" or (gemma and self.bos_id is not None)
        self._drop_bos = add_bos == "never"
        if add_bos == "always" and self.bos_id is None:
            raise ConfigError(
                "data.add_bos=always: the tokenizer has no BOS token; use data.add_bos=auto, "
                "or set bos_token in its tokenizer_config.json"
            )
        self._drop_end = name != "chat" and self._tokenizer_adds_end()
        if name == "chat":
            self._check_chat()

    def render_prompt(self, prompt: str) -> str:
        """The text that the model is given before it answers."""
        if self.name != "chat":
            return TEXT_TEMPLATES[self.name].format(instruction=prompt)
        return self._chat([{"role": "user", "content": prompt}], add_generation_prompt=True)

    def render(self, prompt: str, response: str) -> tuple[str, str]:
        """Prompt text and response text; a ValueError says why a row cannot be rendered."""
        prompt_text = self.render_prompt(prompt)
        if self.name != "chat":
            return prompt_text, response
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        full = self._chat(turns, add_generation_prompt=False)
        if not full.startswith(prompt_text):
            at = len(commonprefix([full, prompt_text]))
            raise ValueError(
                "the chat template renders prompt and response to a text that does not begin with "
                f"the rendering of the prompt alone (they part at character {at + 1}: "
                f"{full[at : at + 20]!r} against {prompt_text[at : at + 20]!r}), "
                "so the response cannot be told from the prompt"
            )
        return prompt_text, full[len(prompt_text) :]

    def encode_prompts(self, texts: list[str]) -> tuple[list[list[int]], list[bool]]:
        """Token ids of rendered prompts, and which of them came with more than one BOS."""
        encoded = self._encode(texts, add_special_tokens=self.name != "chat")
        doubled: list[bool] = []
        for i, ids in enumerate(encoded):
            if self._drop_end and ids and ids[-1] == self.eos_id:
                ids = ids[:-1]
            num_bos = 0
            while num_bos < len(ids) and ids[num_bos] == self.bos_id:
                num_bos += 1
            doubled.append(num_bos > 1)
            keep_bos = not self._drop_bos and (num_bos > 0 or self._add_bos)
            ids = ids[num_bos:]
            encoded[i] = [self.bos_id, *ids] if keep_bos and self.bos_id is not None else ids
        return encoded, doubled

    def encode_responses(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered responses, the end token included."""
        encoded = self._encode(texts, add_special_tokens=False)
        for ids in encoded:
            if self.name != "chat" or self.eos_id not in ids:
                ids.append(self.eos_id)
        return encoded

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoding = self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )
        return [list(ids) for ids in encoding["input_ids"]]  # type: ignore[union-attr]

    def _chat(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as problem:  # the template is somebody's code: it may raise anything
            reason = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"the chat template fails on this row ({reason})") from problem
        assert isinstance(text, str)
        return text

    def _check_settings(self, add_bos: str) -> None:
        if self.name not in TEMPLATE_NAMES:
            allowed = ", ".join(TEMPLATE_NAMES)
            raise ConfigError(f"data.template: {self.name!r} is not known; use one of {allowed}")
        if add_bos not in ("auto", "always", "never"):
            raise ConfigError(f"data.add_bos: {add_bos!r} is not known; use auto, always or never")
        if self.name == "chat" and not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                "data.template=chat: the tokenizer has no chat template; use data.template=alpaca, "
                "magicoder or plain, or a model folder whose tokenizer has one "
                "(chat_template.jinja, or chat_template in tokenizer_config.json)"
            )

    def _check_chat(self) -> None:
        try:
            self.render("question", "answer")
        except ValueError as problem:
            raise ConfigError(
                f"data.template=chat: {problem}; use data.template=alpaca, magicoder or plain, or "
                "repair the tokenizer's chat template"
            ) from problem
        if "strftime_now" in str(self.tokenizer.chat_template):
            logger.warning(
                "data.template=chat: the chat template asks for today's date, so the same data may "
                "give other tokens, and another split, on another day"
            )

    def _required_eos(self) -> int:
        eos_id = _token_id(self.tokenizer, "eos")
        if eos_id is None:
            raise ConfigError(
                "model.path: the tokenizer has no end-of-sequence token, so a response cannot be "
                "ended; set eos_token in its tokenizer_config.json"
            )
        return eos_id

    def _tokenizer_adds_end(self) -> bool:
        """Whether the tokenizer closes every text with EOS, which must not part prompt, response"""
        with_special = self._encode(["a"], add_special_tokens=True)[0]
        without = self._encode(["a"], add_special_tokens=False)[0]
        return with_special[-1:] == [self.eos_id] and without[-1:] != [self.eos_id]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token id to fill batches with; it is masked everywhere, so any id of the model will do."""
    pad_id = _token_id(tokenizer, "pad")
    eos_id = _token_id(tokenizer, "eos")
    return pad_id if pad_id is not None else eos_id if eos_id is not None else 0


def _token_id(tokenizer: PreTrainedTokenizerBase, kind: str) -> int | None:
    token_id = getattr(tokenizer, f"{kind}_token_id", None)
    return token_id if isinstance(token_id, int) else None
