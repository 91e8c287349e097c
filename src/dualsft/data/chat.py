"""Render a conversation with a chat template, and find the assistant's answers in the text.

A chat template is untrusted code that comes with a model or from the user. It runs only in
transformers' sandbox, with limits on time, memory and output. The text that it writes for an
assistant turn is found in one of three ways, each checked against the full text:

* `{% generation %}` in the template marks the answers (only for rows that are conversations);
* the text before an answer, rendered with its generation prompt, is a prefix of the full text, and
  so is the text up to and including the answer;
* otherwise (some templates render earlier turns differently from the last one), every answer is
  replaced by a marker to find its position; substituting the answers for the markers must reproduce
  the full text.

If none of them works, the row is refused: labels are never guessed (docs/data.md, "From a row to
tokens"). Not part of Algorithm 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualsft.errors import ConfigError
from dualsft.system.bounds import TIMES, bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dualsft.data.formats import Piece, Turn

MAX_TEMPLATE_BYTES = 1 << 20
MAX_SECONDS = 10.0 * TIMES
MAX_OUTPUT = 64 << 20
MAX_MEMORY = TIMES * (512 << 20)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


class ChatTemplate:
    """The chat template of a tokenizer or a file, as a function of turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def source(self, tools: Sequence[Turn] = ()) -> str:
        """The Jinja text in use; a tokenizer may have a separate template for tools."""
        return self._tokenizer.get_chat_template(self._template, list(tools) or None)

    def pieces(
        self, turns: Sequence[Turn], tools: Sequence[Turn] = (), trained_from: int | None = 0
    ) -> list[Piece]:
        """The text of a conversation, split into answers and the rest.

        With `trained_from=None` the last turn is the only answer. Raises ValueError if the
        conversation cannot be rendered or its answers cannot be found.
        """
        with bounded("the chat template fails on this row", MAX_SECONDS, MAX_MEMORY):
            # {% generation %} also marks answers with weight 0, which are not trained on
            all_trained = trained_from == 0 and all(turn.get("weight") != 0 for turn in turns)
            if all_trained and _GENERATION.search(self.source(tools)):
                text, spans = self._jinja(turns, tools, mask=True)
                if not spans:
                    raise ValueError(
                        "the chat template's {% generation %} marks nothing in this row"
                    )
                return _cut(text, spans)
            first = len(turns) - 1 if trained_from is None else trained_from
            answers = [
                k
                for k, turn in enumerate(turns)
                if k >= first and turn["role"] == "assistant" and turn.get("weight") != 0
            ]
            text = self._render(turns, tools)
            spans = [span for k in answers if (span := self._span(k, turns, tools, text))]
            if len(spans) < len(answers):
                spans = self._by_markers(answers, turns, tools, text)
        if any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)):
            raise ValueError("the chat template does not write the turns in their order")
        return _cut(text, spans)

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text that the model receives before it generates an answer."""
        with bounded("the chat template fails on this row", MAX_SECONDS, MAX_MEMORY):
            return self._render(turns, (), add_generation_prompt=True)

    def _render(
        self, turns: Sequence[Turn], tools: Sequence[Turn], add_generation_prompt: bool = False
    ) -> str:
        return self._jinja(turns, tools, add_generation_prompt)[0]

    def _jinja(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Turn],
        add_generation_prompt: bool = False,
        mask: bool = False,
    ) -> tuple[str, list[Span]]:
        """The text and, with `mask`, the spans inside {% generation %}."""
        from transformers.utils.chat_template_utils import render_jinja_template

        words: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        try:
            texts, spans = render_jinja_template(
                conversations=[list(turns)],
                tools=list(tools) or None,
                chat_template=self.source(tools),
                return_assistant_tokens_mask=mask,
                add_generation_prompt=add_generation_prompt,
                **words,
            )
            text = str(texts[0])
            if len(text) > MAX_OUTPUT:
                raise ValueError(f"it writes more than {MAX_OUTPUT:,} characters")
            text.encode("utf-8")
        except Exception as problem:  # a template is untrusted code: it may raise anything
            reason = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
            raise ValueError(f"the chat template fails on this row ({reason})") from problem
        marked = spans[0] if mask else []
        return text, [(int(start), int(end)) for start, end in marked if end > start]

    def _span(self, k: int, turns: Sequence[Turn], tools: Sequence[Turn], text: str) -> Span | None:
        """The span of answer k, from the texts before and up to it; None if either is no prefix,
        or if nothing is before it that shows where its header ends."""
        if not k:
            return None
        before = self._render(turns[:k], tools, add_generation_prompt=True)
        upto = text if k == len(turns) - 1 else self._render(turns[: k + 1], tools)
        fits = text.startswith(before) and text.startswith(upto) and len(before) < len(upto)
        return (len(before), len(upto)) if fits else None

    def _by_markers(
        self, answers: list[int], turns: Sequence[Turn], tools: Sequence[Turn], text: str
    ) -> list[Span]:
        """The spans of the answers, from the conversation rendered with markers in their place."""
        stand_in = [dict(turn) for turn in turns]
        marks = {k: f"zq{'x' * 6}{k}qz" for k in answers}
        for k, mark in marks.items():
            stand_in[k]["content"] = mark
        joints: list[str] = []  # the texts between the answers
        rest = self._render(stand_in, tools)
        for k in answers:
            if rest.count(marks[k]) != 1:
                raise ValueError(self._lost(turns, tools, text))
            joint, rest = rest.split(marks[k])
            joints.append(joint)
        spans: list[Span] = []
        position = 0
        for number, k in enumerate(answers):
            position += len(joints[number])
            after = joints[number + 1] if number + 1 < len(answers) else rest
            written = _written(turns[k]["content"], text, position, after)
            if written is None or text[position - len(joints[number]) : position] != joints[number]:
                raise ValueError(self._lost(turns, tools, text))
            end = position + len(written)
            # what follows the answer in both renderings, such as its end token, belongs to it
            alone = self._render(stand_in[: k + 1], tools).rpartition(marks[k])[2]
            tail = len(after) if k == len(turns) - 1 else len(commonprefix([after, alone]))
            before = self._render(turns[:k], tools, add_generation_prompt=True) if k else text
            start = len(before) if text.startswith(before) and len(before) <= position else position
            spans.append((start, end + tail))
            position = end
        if text[position:] != rest:
            raise ValueError(self._lost(turns, tools, text))
        return spans

    def _lost(self, turns: Sequence[Turn], tools: Sequence[Turn], text: str) -> str:
        alone = self._render(turns[:-1], tools, add_generation_prompt=True)
        at = len(commonprefix([text, alone]))
        return (
            "the chat template renders prompt and response to a text that does not begin with the "
            f"rendering of the prompt alone (they differ at character {at + 1}: "
            f"{text[at : at + 20]!r} against {alone[at : at + 20]!r}), so the response cannot be "
            "separated from the prompt"
        )


def _written(content: str, text: str, position: int, after: str) -> str | None:
    """How the template wrote the answer at `position` before `after`; None if unknown."""
    # templates may strip an answer, or drop the reasoning of earlier turns
    without_thought = content.rpartition("</think>")[2]
    for form in dict.fromkeys(
        (content, content.strip(), without_thought.lstrip("\n"), without_thought.strip())
    ):
        if text.startswith(form + after, position):
            return form
    return None


def _cut(text: str, spans: Sequence[Span]) -> list[Piece]:
    pieces: list[Piece] = []
    position = 0
    for start, end in spans:
        if start > position:
            pieces.append((text[position:start], False))
        if pieces and pieces[-1][1]:
            pieces[-1] = (pieces[-1][0] + text[start:end], True)
        else:
            pieces.append((text[start:end], True))
        position = end
    return pieces + ([(text[position:], False)] if position < len(text) else [])


def read_template(path: str) -> str:
    """Read the Jinja text of data.template_file."""
    try:
        file = Path(path).expanduser()
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(
                f"data.template_file: {path!r} is larger than {MAX_TEMPLATE_BYTES:,} bytes; give "
                "the Jinja text of a chat template"
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"data.template_file: {path!r} cannot be read ({problem}); give a UTF-8 text file"
        ) from None
