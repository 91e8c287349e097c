"""Render rows to text, and encode text to token ids with labelled answers.

The paper's two templates are reproduced exactly (appendix "Prompt Templates"): a blank line between
paragraphs and nothing after "### Response:". `plain` adds no text. `chat` is the tokenizer's chat
template, or the one in data.template_file (`data/chat.py`).

A row is rendered to pieces, which are answers or not, and the full text is encoded at once, as at
inference and in other trainers. The boundary between two pieces is clean if encoding them
separately gives the same ids, or if the ids of the text up to it are a prefix of the ids of the
full text. If a token spans a boundary, the pieces are encoded separately, so that the labels are
exact (docs/algorithm.md, "Example loss"), and the row is counted. Every answer ends with an end
token: the tokenizer's EOS, or, for `chat`, what the template writes after the last answer (followed
by the EOS if the template writes no special token there).

The labels define the example loss in Algorithm 1; the templates themselves are not part of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, pairwise
from operator import not_
from typing import TYPE_CHECKING

from dualsft.data.chat import ChatTemplate, read_template
from dualsft.data.formats import Piece, Turn
from dualsft.data.rows import Row
from dualsft.data.tokens import IGNORE
from dualsft.errors import ConfigError
from dualsft.system.bounds import TIMES, OverLimit, watched
from dualsft.system.usage import is_panic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_PREAMBLE = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)
_REQUEST = "### Instruction:\n{instruction}\n\n### Response:"

TEXT_TEMPLATES: dict[str, tuple[str, str]] = {
    "magicoder": (f"You are a proficient coding assistant. {_PREAMBLE}", _REQUEST),
    "alpaca": (_PREAMBLE, _REQUEST),
    "plain": ("", "{instruction}"),
}
"""Plain-text templates: the text before the first request, and the request.

A system text replaces the first part.
"""


def request_text(template: str, prompt: str, first: bool = True, system: str = "") -> str:
    """A request in a plain-text template, as the model receives it before it answers."""
    preamble, request = TEXT_TEMPLATES[template]
    head = (system or preamble) if first else ""
    lead = "\n\n" if head or (preamble and not first) else ""
    return f"{head}{lead}{request.replace('{instruction}', prompt)}"


ENCODE_SECONDS = TIMES * 10.0
ENCODE_SECONDS_PER_CHARACTER = TIMES * 2e-5
"""Processor time that the tokenizer may take; 0.2 to 2 µs per character were seen."""
SLOWER = 10
"""Times as much for a tokenizer written in Python."""
ENCODE_MEMORY = TIMES * (1 << 30)
ENCODE_MEMORY_PER_CHARACTER = TIMES * 2048
_CALL_CHARACTERS = 2 << 20  # of several texts in one call, which needs some hundred bytes for each
_MOST_CHARACTERS = 16 << 20  # of a row's texts up to each boundary, in total


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a row, and which of them are answers."""

    ids: list[int]
    answers: list[tuple[int, int]]
    """Start and end of every answer in `ids`."""
    has_bos: bool
    doubled_bos: bool
    split: bool
    """Whether a token spanned a boundary, so that the pieces were encoded separately."""


class Template:
    """One template with one tokenizer: rendering, and encoding with BOS and end tokens.

    `add_bos` is auto, always or never. `auto` keeps the tokenizer's behaviour, but adds a missing
    BOS for model types that begin with "gemma", which do not work without it.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        add_bos: str = "auto",
        model_type: str = "",
        template_file: str | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        own = getattr(self.tokenizer, "chat_template", None)
        if name == "chat" and not own and template_file is None:
            raise ConfigError(
                "data.template=chat: the tokenizer has no chat template; use data.template=alpaca, "
                "magicoder or plain, give a data.template_file, or a model folder whose tokenizer "
                "has one (chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        self.chat = ChatTemplate(tokenizer, read_template(template_file) if template_file else None)
        self.bos_id: int | None = _token_id(tokenizer, "bos")
        self.eos_id: int = self._required_eos()
        self._eos = str(tokenizer.eos_token)
        gemma = add_bos == "auto" and model_type.startswith("gemma")
        self._add_bos = add_bos == "always" or (gemma and self.bos_id is not None)
        self._drop_bos = add_bos == "never"
        if add_bos == "always" and self.bos_id is None:
            raise ConfigError(
                "data.add_bos=always: the tokenizer has no BOS token; use data.add_bos=auto, "
                "or set bos_token in its tokenizer_config.json"
            )
        self._adds_end = self._tokenizer_adds_end()
        self._special = _special_tokens(tokenizer)
        self._writes_end = name == "chat" and self._check_chat()

    # --- text ----------------------------------------------------------------------------------

    def render(self, row: Row) -> list[Piece]:
        """The row as pieces of text; raises ValueError if it cannot be rendered."""
        if row.whole:
            return [(self._ended(row.response), True)]
        if self.name == "chat":
            pair = not row.turns
            turns = row.turns or _pair(row.prompt, row.response)
            pieces = self.chat.pieces(turns, row.tools, None if pair else row.trained_from)
            return pieces if self._writes_end else self._with_end(pieces)
        if not row.turns:
            return [(self.render_prompt(row.prompt), False), (self._ended(row.response), True)]
        return self._render_turns(row)

    def render_prompt(self, prompt: str) -> str:
        """The text that the model receives before it answers a single question."""
        if self.name == "chat":
            return self.chat.prompt([{"role": "user", "content": prompt}])
        return request_text(self.name, prompt)

    def _render_turns(self, row: Row) -> list[Piece]:
        """A conversation in a plain-text template: alternating requests and answers with EOS."""
        turns = list(row.turns)
        system = ""
        if turns[0]["role"] in ("system", "developer"):
            system = turns.pop(0)["content"]
        before = len(row.turns) - len(turns)
        wanted = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
        if row.tools or [turn["role"] for turn in turns] != wanted or any(map(_calls, turns)):
            raise ValueError(
                f"data.template={self.name} requires alternating user and assistant turns without "
                "tools; use data.template=chat"
            )
        pieces: list[Piece] = []
        for k in range(0, len(turns), 2):
            answer = turns[k + 1]
            request = request_text(self.name, turns[k]["content"], k == 0, system)
            trained = before + k + 1 >= row.trained_from and answer.get("weight") != 0
            pieces += [(request, False), (self._ended(answer["content"]), trained)]
        return pieces

    def _ended(self, text: str) -> str:
        return text if text.endswith(self._eos) else text + self._eos

    def _with_end(self, pieces: list[Piece]) -> list[Piece]:
        """Append the EOS to a chat whose template writes no end token."""
        text, is_answer = pieces[-1]
        if not is_answer:
            return [*pieces, (self._eos, True)]
        return [*pieces[:-1], (self._ended(text), True)]

    def holds_special_text(self, row: Row) -> bool:
        """Whether the row's text contains a special token."""
        if self._special is None:
            return False
        texts = [turn["content"] for turn in row.turns] or [row.prompt, row.response]
        return any(self._special.search(text) for text in texts)

    # --- tokens --------------------------------------------------------------------------------

    def encode(self, rows: Sequence[Sequence[Piece]]) -> list[Encoded]:
        """Token ids of rendered rows, with BOS and end tokens as configured."""
        texts = ["".join(text for text, _ in pieces) for pieces in rows]
        whole = [len(pieces) == 1 for pieces in rows]
        joint = self._encode_starts(texts, whole)
        firsts = self._encode_starts([pieces[0][0] for pieces in rows], whole)
        others = iter(self._encode([text for pieces in rows for text, _ in pieces[1:]]))
        apart = [
            [first, *(next(others) for _ in pieces[1:])]
            for pieces, first in zip(rows, firsts, strict=True)
        ]
        same = [ids == list(chain(*parts)) for ids, parts in zip(joint, apart, strict=True)]
        borders = self._borders({i: (rows[i], joint[i]) for i, s in enumerate(same) if not s})
        encoded: list[Encoded] = []
        for i, pieces in enumerate(rows):
            ends = list(accumulate(map(len, apart[i])))
            split = not same[i] and i not in borders
            ids = list(chain(*apart[i])) if split else joint[i]
            encoded.append(self._labelled(pieces, ids, borders.get(i, ends), split))
        return encoded

    def encode_given(self, row: Row) -> Encoded:
        """Token ids of a row that brings them, or pieces to encode one by one; nothing is added."""
        if row.tokens is not None:
            ids, labels = row.tokens
            marked = [label != IGNORE for label in labels]
        else:
            parts = self._encode([text for text, _ in row.pieces])
            ids = list(chain(*parts))
            marked = [m for part, (_, m) in zip(parts, row.pieces, strict=True) for _ in part]
        edges = [at for at, (a, b) in enumerate(pairwise([False, *marked, False])) if a != b]
        answers = list(zip(edges[::2], edges[1::2], strict=True))
        return Encoded(ids, answers, ids[:1] == [self.bos_id], False, False)

    def prompt_ids(self, prompt: str) -> list[int]:
        """The tokens that the model receives before it answers a single question."""
        [ids] = self._encode_starts([self.render_prompt(prompt)])
        return self._with_bos(ids)[0]

    def _borders(
        self, rows: Mapping[int, tuple[Sequence[Piece], list[int]]]
    ) -> dict[int, list[int]]:
        """Number of tokens up to the end of every piece, for each row.

        Omits rows in which a token spans a boundary, and rows with so many turns that the texts up
        to each boundary would need too much memory.
        """
        starts: dict[int, list[str]] = {}
        for i, (pieces, _) in rows.items():
            texts = [text for text, _ in pieces[:-1]]
            if sum(accumulate(map(len, texts))) <= _MOST_CHARACTERS:
                starts[i] = list(accumulate(texts))
        encoded = iter(self._encode_starts([text for texts in starts.values() for text in texts]))
        found: dict[int, list[int]] = {}
        for i, texts in starts.items():
            joint = rows[i][1]
            upto = [next(encoded) for _ in texts]
            lengths = [*map(len, upto), len(joint)]
            if lengths == sorted(lengths) and all(joint[: len(ids)] == ids for ids in upto):
                found[i] = lengths
        return found

    def _labelled(
        self, pieces: Sequence[Piece], ids: list[int], ends: list[int], split: bool
    ) -> Encoded:
        """The row with its BOS as configured; `ends` are the ends of the pieces in `ids`."""
        ids, shift, doubled, has_bos = self._with_bos(ids)
        answers = [
            (max(int(has_bos), start + shift), end + shift)
            for (_, is_answer), start, end in zip(pieces, [0, *ends], ends, strict=False)
            if is_answer
        ]
        return Encoded(ids, answers, has_bos, doubled, split)

    def _with_bos(self, ids: list[int]) -> tuple[list[int], int, bool, bool]:
        """(ids with one BOS or none, their shift, whether there were two, whether one is kept)"""
        num_bos = 0
        while num_bos < len(ids) and ids[num_bos] == self.bos_id:
            num_bos += 1
        keep = not self._drop_bos and (num_bos > 0 or self._add_bos) and self.bos_id is not None
        kept = [self.bos_id] if keep and self.bos_id is not None else []
        return [*kept, *ids[num_bos:]], len(kept) - num_bos, num_bos > 1, keep

    def _encode_starts(self, texts: list[str], whole: Sequence[bool] = ()) -> list[list[int]]:
        """Ids of texts that begin a row, including what the tokenizer adds before a text.

        A chat template writes that itself. A row without a prompt has no template around it.
        """
        chat = [self.name == "chat" and not (whole and whole[i]) for i in range(len(texts))]
        plain = iter(self._encode(list(compress(texts, chat))))
        begun = iter(self._encode(list(compress(texts, map(not_, chat))), add_special_tokens=True))
        encoded = [next(plain) if written else next(begun) for written in chat]
        for ids, written in zip(encoded, chat, strict=True):
            if not written and self._adds_end and ids[-1:] == [self.eos_id]:
                del ids[-1]  # the EOS that some tokenizers append to every text
        return encoded

    def _encode(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        if not texts:
            return []
        size = sum(map(len, texts))
        if size > _CALL_CHARACTERS and len(texts) > 1:
            half = len(texts) // 2
            parts = (texts[:half], texts[half:])
            return [ids for part in parts for ids in self._encode(part, add_special_tokens)]
        times = 1 if getattr(self.tokenizer, "is_fast", False) else SLOWER
        seconds = times * (ENCODE_SECONDS + ENCODE_SECONDS_PER_CHARACTER * size)
        try:
            encoding = watched(
                f"model.path: its tokenizer, on {len(texts):,} texts of {size:,} characters,",
                lambda: self.tokenizer(
                    texts,
                    add_special_tokens=add_special_tokens,
                    padding=False,
                    truncation=False,
                    return_attention_mask=False,
                    verbose=False,
                ),
                seconds,
                ENCODE_MEMORY + ENCODE_MEMORY_PER_CHARACTER * size,
            )
        except OverLimit as problem:
            raise ConfigError(f"{problem}; or make or download the model again") from problem
        except BaseException as problem:
            if not is_panic(problem):
                raise
            raise ConfigError(
                f"model.path: its tokenizer fails on a text ({str(problem)[:200]}); make or "
                "download the model again"
            ) from problem
        return [list(ids) for ids in encoding["input_ids"]]  # type: ignore[union-attr]

    # --- checks --------------------------------------------------------------------------------

    def _check_chat(self) -> bool:
        """Whether the template writes an end token; a template that cannot be used is refused."""
        try:
            pieces = self.chat.pieces(_pair("question", "answer"), trained_from=None)
        except ValueError as problem:
            raise ConfigError(
                f"data.template=chat: {problem}; use data.template=alpaca, magicoder or plain, or "
                "repair the chat template"
            ) from problem
        if "strftime_now" in self.chat.source():
            logger.warning(
                "data.template=chat: the chat template uses today's date, so the same data may "
                "give different tokens, and a different split, on another day"
            )
        tail = "".join(text for text, _ in pieces).rpartition("answer")[2]
        return self._special is not None and self._special.search(tail) is not None

    def _required_eos(self) -> int:
        eos_id = _token_id(self.tokenizer, "eos")
        if eos_id is None:
            raise ConfigError(
                "model.path: the tokenizer has no end-of-sequence token, which every response "
                "needs; set eos_token in its tokenizer_config.json"
            )
        if self._encode([f"a{self.tokenizer.eos_token}"])[0][-1:] != [eos_id]:
            raise ConfigError(
                f"model.path: the tokenizer does not encode the text of its end token "
                f"{str(self.tokenizer.eos_token)!r} as that token, which every response needs; "
                "mark it as special in its tokenizer_config.json"
            )
        return eos_id

    def _tokenizer_adds_end(self) -> bool:
        """Whether the tokenizer appends an EOS to every text."""
        with_special = self._encode(["a"], add_special_tokens=True)[0]
        without = self._encode(["a"])[0]
        return with_special[-1:] == [self.eos_id] and without[-1:] != [self.eos_id]


def _pair(prompt: str, response: str) -> list[Turn]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _calls(turn: Turn) -> bool:
    return bool(turn.get("tool_calls") or turn.get("function_call"))


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """A pattern that matches any special token; None if there are none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token) for token in tokenizer.all_special_tokens}
    names |= {token.content for token in added if token.special}
    names.discard("")
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first))) if names else None


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token id for padding; padding is masked everywhere, so any valid id works."""
    pad_id = _token_id(tokenizer, "pad")
    eos_id = _token_id(tokenizer, "eos")
    return pad_id if pad_id is not None else eos_id if eos_id is not None else 0


def _token_id(tokenizer: PreTrainedTokenizerBase, kind: str) -> int | None:
    token_id = getattr(tokenizer, f"{kind}_token_id", None)
    return token_id if isinstance(token_id, int) else None
