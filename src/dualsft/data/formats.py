"""Convert the fields of a row to a conversation, for every supported row format.

Formats: prompt_response, prompt_completion (text or conversational), alpaca, messages (also called
openai), sharegpt and text. A `Layout` holds the field names and role tags of a format. `Recogniser`
detects the layout from the first row that has all fields of one. A conversation is a list of turns
as chat templates take them: role, content, and any other keys.

Nothing is guessed: a wrong type, an unknown role, an empty answer or a conversation that does not
end with an answer raises `BadRow`, which names the field and the cure. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dualsft.errors import DataError

if TYPE_CHECKING:
    from dualsft.config.settings import DataConfig

Turn = dict[str, Any]

SHOWN_NAMES = 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_UNRECOGNISED_ROWS = 1_000
OWN_NAMES = (
    "name your fields with data.prompt_field=... and data.response_field=..., or with "
    "data.messages_field=..."
)


class BadRow(ValueError):
    """One row cannot be used; the message gives the reason."""


class Conversation(NamedTuple):
    """The content of a row: a prompt and its response, turns, or one text without a prompt.

    For turns, `prompt` and `response` are the last ones.
    """

    prompt: str
    response: str
    turns: tuple[Turn, ...] = ()
    """All turns; empty for a plain pair and for a text without a prompt."""
    tools: tuple[Turn, ...] = ()
    """The tools that the model may call, as JSON schemas."""
    trained_from: int = 0
    """The first turn whose answer is trained on; earlier turns are context."""
    whole: bool = False
    """Whether the row is one text without a prompt."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The keys and role names of a sharegpt file."""

    role: str = "from"
    content: str = "value"
    user: str = "human"
    assistant: str = "gpt"
    observation: str = "observation"
    function: str = "function_call"
    system: str = "system"


@dataclass(frozen=True, slots=True)
class Layout:
    """The field names of a format; an empty name is a part that the format does not have."""

    format: str
    prompt: str = ""
    response: str = ""
    messages: str = ""
    text: str = ""
    tags: Tags = field(default_factory=Tags)
    query: str = ""
    history: str = ""
    system: str = ""
    tools: str = ""

    @property
    def needed(self) -> tuple[str, ...]:
        names = (self.prompt, self.response, self.messages, self.text)
        return tuple(name for name in names if name)

    def missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in self.needed if name not in names]

    def __str__(self) -> str:
        parts = (self.query, self.history, self.system, self.tools)
        optional = [name for name in parts if name and self.format != "prompt_response"]
        extra = f", optional {', '.join(optional)}" if optional else ""
        return f"{self.format} ({', '.join(self.needed)}{extra})"


_LAYOUTS = (
    Layout("prompt_response", "prompt", "response"),
    Layout("prompt_completion", "prompt", "completion", tools="tools"),
    Layout("alpaca", "instruction", "output", query="input", history="history", system="system"),
    Layout("messages", messages="messages", tools="tools"),
    Layout("sharegpt", messages="conversations", system="system", tools="tools"),
    Layout("text", text="text"),
)


def layouts_of(config: DataConfig) -> list[Layout]:
    """The layouts that the settings allow (`contradictions` has checked that they agree)."""
    name = "messages" if config.format == "openai" else config.format
    layouts = [layout for layout in _LAYOUTS if name in ("auto", layout.format)]
    if config.prompt_field and config.response_field:
        kind = "prompt_response" if name == "auto" else name
        layouts = [Layout(kind, config.prompt_field, config.response_field, tools="tools")]
    elif field_of_turns := config.messages_field:
        layouts = [
            replace(layout, messages=field_of_turns) for layout in layouts if layout.messages
        ]
    if config.system_field:
        layouts = [replace(layout, system=config.system_field) for layout in layouts]
    return layouts


class Recogniser:
    """Detects the layout of a file from the first row that has all fields of one."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.accepted = list(layouts)
        self.layout: Layout | None = layouts[0] if len(layouts) == 1 else None
        self.known = {name for layout in layouts for name in layout.needed}
        self.waiting: list[tuple[int, str, list[str]]] = []
        """(index, place, fields) of rows before the first that shows the format."""

    def read(self, index: int, place: str, values: dict[str, Any]) -> Conversation | None:
        """The conversation of a row; None while the format is unknown (the row is kept waiting)."""
        if self.layout is None:
            self._recognise(place, values)
        if self.layout is None:
            names = sorted(values, key=lambda name: name not in self.known)  # known ones first
            self.waiting.append((index, place, names[: SHOWN_NAMES + 1]))
            if len(self.waiting) >= _UNRECOGNISED_ROWS:
                self.settle()
            return None
        if missing := self.layout.missing(values):
            raise BadRow(_missing(missing, list(values)))
        return conversation(values, self.layout)

    def settle(self) -> list[tuple[int, str, str]]:
        """(index, place, problem) of the waiting rows; an error if no format was detected."""
        if self.layout is None and self.waiting:
            _, place, names = self.waiting[0]
            accepted = "; ".join(str(layout) for layout in self.accepted)
            raise DataError(
                f"{place}: the fields {listed(names)} match no known format, nor do those of any "
                f"later row; accepted: {accepted}; or {OWN_NAMES}"
            )
        waited, self.waiting = self.waiting, []
        return [
            (index, place, _missing(self.layout.missing(names), names))
            for index, place, names in waited
            if self.layout
        ]

    def _recognise(self, place: str, values: dict[str, Any]) -> None:
        fitting = [layout for layout in self.accepted if not layout.missing(values)]
        if len(fitting) > 1:  # a `text` column often repeats the other fields
            fitting = [layout for layout in fitting if layout.format != "text"]
        if len({layout.messages or layout.format for layout in fitting}) == 1:
            fitting = fitting[:1]  # same field of turns: _by_keys tells messages from sharegpt
        if len(fitting) > 1:
            raise DataError(
                f"{place}: the fields match more than one format: "
                f"{'; '.join(str(layout) for layout in fitting)}; set data.format, or {OWN_NAMES}"
            )
        if fitting:
            self.layout = _by_keys(fitting[0], values)


def _by_keys(layout: Layout, values: dict[str, Any]) -> Layout:
    """Detect the format of a list of turns by its keys: `role` is messages, `from` sharegpt."""
    turns = values[layout.messages] if layout.messages else None
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict):
        return layout
    if "role" in first:
        return replace(layout, format="messages")
    return replace(layout, format="sharegpt") if layout.tags.role in first else layout


def _missing(missing: list[str], names: list[str]) -> str:
    plural = "field" if len(missing) == 1 else "fields"
    return f"{plural} {listed(missing)} missing (the row has {listed(names)}); {OWN_NAMES}"


def listed(names: Sequence[str]) -> str:
    """Format names for a message, at most SHOWN_NAMES."""
    shown = ", ".join(ascii_safe(name) for name in names[:SHOWN_NAMES]) or "no fields"
    return shown + (", ..." if len(names) > SHOWN_NAMES else "")


def ascii_safe(name: object) -> str:
    """A value of the row in quotes, shortened and escaped for printing."""
    return repr(str(name)[:40])


# --- rows --------------------------------------------------------------------------------------


def conversation(values: Mapping[str, Any], layout: Layout) -> Conversation:
    """The content of a row, read by its layout."""
    if layout.text:
        return Conversation("", text_of(values, layout.text, "write the text"), whole=True)
    tools = _tools(values, layout)
    if layout.messages:
        read = _sharegpt if layout.format == "sharegpt" else _messages
        return _checked(read(values, layout), tools, f"field {layout.messages!r}")
    sides = [isinstance(values[name], list | dict) for name in (layout.prompt, layout.response)]
    if layout.format == "prompt_completion" and any(sides):
        return _completion(values, layout, tools)
    user = text_of(values, layout.prompt)
    if layout.query and values.get(layout.query) is not None:
        query = text_of(values, layout.query)
        user = "\n".join(part for part in (user, query) if part)
    answer = text_of(values, layout.response, "write the response")
    before = _system(values, layout) + _history(values, layout)
    if not before and not tools:
        return Conversation(user, answer)
    turns = [*before, _turn("user", user), _turn("assistant", answer)]
    return Conversation(user, answer, tuple(turns), tools)


def _completion(values: Mapping[str, Any], layout: Layout, tools: tuple[Turn, ...]) -> Conversation:
    """Conversational prompt and completion; only the answers of the completion are trained on."""
    if not all(isinstance(values[name], list) for name in (layout.prompt, layout.response)):
        raise BadRow(
            f"field {layout.prompt!r} is {kind(values[layout.prompt])} and {layout.response!r} "
            f"{kind(values[layout.response])}; write both as text, or both as lists of turns"
        )
    prompt = _messages(values, replace(layout, messages=layout.prompt))
    answer = _messages(values, replace(layout, messages=layout.response, system=""))
    if not prompt:
        raise BadRow(f"field {layout.prompt!r} is an empty list; write at least one turn")
    return _checked(
        [*prompt, *answer], tools, f"field {layout.response!r}", trained_from=len(prompt)
    )


def _checked(
    turns: list[Turn], tools: tuple[Turn, ...], where: str, trained_from: int = 0
) -> Conversation:
    """Check that a conversation has an answer and ends with one."""
    roles = [turn["role"] for turn in turns[trained_from:] if turn.get("weight") != 0]
    if "assistant" not in roles:
        raise BadRow(f"{where} has no assistant turn to train on; add the answer")
    if turns[-1]["role"] != "assistant":
        raise BadRow(
            f"{where} ends with a {turns[-1]['role']} turn that has no answer; add the answer, or "
            "remove the turn"
        )
    users = [turn["content"] for turn in turns if turn["role"] == "user"]
    return Conversation(
        users[-1] if users else "", turns[-1]["content"], tuple(turns), tools, trained_from
    )


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _system(values: Mapping[str, Any], layout: Layout) -> list[Turn]:
    """The system turn from its column; none if the column is empty or absent."""
    if not layout.system or values.get(layout.system) is None:
        return []
    text = text_of(values, layout.system)
    return [_turn("system", text)] if text.strip() else []


def _history(values: Mapping[str, Any], layout: Layout) -> list[Turn]:
    """Alpaca's earlier rounds: a list of [instruction, response] pairs."""
    pairs = values.get(layout.history) if layout.history else None
    if pairs is None:
        return []
    name = f"field {layout.history!r}"
    if not isinstance(pairs, list):
        raise BadRow(f"{name} is {kind(pairs)}, must be a list of [instruction, response] pairs")
    turns: list[Turn] = []
    for number, pair in enumerate(pairs, 1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"{name}, pair {number} must be a list of two: [instruction, response]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            where = f"{name}, pair {number}: the {'instruction' if role == 'user' else 'response'}"
            checked = _checked_text(text, where)
            if role == "assistant" and not checked.strip():
                raise BadRow(f"{where} is empty; write it")
            turns.append(_turn(role, checked))
    return turns


def _turns(values: Mapping[str, Any], name: str) -> list[tuple[str, Turn]]:
    """(location, turn) of every item of a list of turns; null values are dropped."""
    items = values[name]
    if not isinstance(items, list):
        raise BadRow(f"field {name!r} is {kind(items)}, must be a list of turns")
    if not items:
        raise BadRow(f"field {name!r} is an empty list; write at least a question and its answer")
    turns: list[tuple[str, Turn]] = []
    for number, item in enumerate(items, 1):
        where = f"field {name!r}, turn {number}"
        if not isinstance(item, dict):
            raise BadRow(f"{where} is {kind(item)}, must be an object")
        turns.append((where, {key: value for key, value in item.items() if value is not None}))
    return turns


def _messages(values: Mapping[str, Any], layout: Layout) -> list[Turn]:
    """Turns with role and content; all other keys are passed to the chat template unchanged."""
    turns: list[Turn] = []
    for where, item in _turns(values, layout.messages):
        if "role" not in item:
            raise BadRow(f"{where} has no 'role' (it has {listed(list(item))}); add the role")
        role = item["role"]
        if not isinstance(role, str) or role not in ROLES:
            raise BadRow(f"{where}: role {ascii_safe(role)} is not known; use {', '.join(ROLES)}")
        calls = _check_calls(item, f"{where} ({role})")
        if "content" not in item and not (role == "assistant" and calls):
            raise BadRow(f"{where} ({role}): 'content' is missing or null; write the text")
        content = _content(item.get("content", ""), f"{where} ({role}): 'content'")
        if role == "assistant" and not calls and not content.strip():
            raise BadRow(f"{where} (assistant): 'content' is empty; write the answer")
        turns.append({**item, "content": content})
    return [*_system(values, layout), *turns] if turns[0]["role"] != "system" else turns


def _check_calls(item: Turn, where: str) -> bool:
    """Whether a turn calls tools; each call must name its function."""
    calls = item.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise BadRow(f"{where}: 'tool_calls' is {kind(calls)}, must be a list of calls")
    named = [(call, "tool_calls") for call in calls or []]
    if item.get("function_call") is not None:
        named.append((item["function_call"], "function_call"))
    for call, name in named:
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{where}: {name!r} must name its function, as an object with a 'name'")
    return bool(named)


def _content(content: object, where: str) -> str:
    """Text, or a list of parts that are all text."""
    if not isinstance(content, list):
        return _checked_text(content, where)
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or "text" not in part:
            what = part.get("type") if isinstance(part, dict) else kind(part)
            raise BadRow(
                f"{where} has a part that is not text ({ascii_safe(what)}); remove the row"
            )
        texts.append(_checked_text(part["text"], where))
    return "".join(texts)


def _sharegpt(values: Mapping[str, Any], layout: Layout) -> list[Turn]:
    """Turns by tags: human and observation at odd positions, gpt and function at even ones."""
    tags = layout.tags
    odd = {tags.user: "user", tags.observation: "tool"}
    even = {tags.assistant: "assistant", tags.function: "assistant"}
    items = _turns(values, layout.messages)
    turns = _system(values, layout)
    if items[0][1].get(tags.role) == tags.system:
        where, item = items.pop(0)
        text = _checked_text(item.get(tags.content), f"{where}: {tags.content!r}")
        turns = [_turn("system", text)]
    for place, (where, item) in enumerate(items):
        if tags.role not in item:
            raise BadRow(f"{where} has no {tags.role!r} (it has {listed(list(item))}); add it")
        speaker = item[tags.role]
        if not isinstance(speaker, str) or speaker not in (odd | even):
            allowed = ", ".join((*odd, *even, tags.system))
            raise BadRow(f"{where}: {tags.role} {ascii_safe(speaker)} is not known; use {allowed}")
        wanted = even if place % 2 else odd
        if speaker not in wanted:
            raise BadRow(
                f"{where}: {ascii_safe(speaker)} where {' or '.join(wanted)} is required (they "
                "alternate, after at most one system turn at the beginning); fix the order"
            )
        text = _checked_text(item.get(tags.content), f"{where} ({speaker}): {tags.content!r}")
        if speaker in even and not text.strip():
            raise BadRow(f"{where} ({speaker}): {tags.content!r} is empty; write the answer")
        if speaker == tags.function:
            turns.append(_turn("assistant", "") | {"tool_calls": _calls(text, where)})
        else:
            turns.append(_turn(wanted[speaker], text))
    return turns


def _calls(text: str, where: str) -> list[Turn]:
    """The tool calls of a function turn, which holds one call or a list as JSON."""
    calls = _json(text, where)
    calls = calls if isinstance(calls, list) else [calls]
    turns: list[Turn] = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow(f"{where}: a function call must be an object with a 'name'; repair it")
        function = {"name": call["name"], "arguments": call.get("arguments", {})}
        turns.append({"type": "function", "function": function})
    return turns


def _tools(values: Mapping[str, Any], layout: Layout) -> tuple[Turn, ...]:
    """The tools column: a list of schemas, or that list as JSON text."""
    value = values.get(layout.tools) if layout.tools else None
    if value is None or value == "":
        return ()
    where = f"field {layout.tools!r}"
    tools = _json(value, where) if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"{where} must be a list of tool schemas, or that list as JSON text")
    return tuple(
        {"type": "function", "function": tool} if "type" not in tool and "name" in tool else tool
        for tool in tools
    )


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        reason = str(problem)[:80] if isinstance(problem, ValueError) else "nested too deeply"
        raise BadRow(f"{where} is not valid JSON ({reason}); write it as JSON text") from None


def kind(value: object) -> str:
    """The JSON name of a value's type."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")


def text_of(values: Mapping[str, Any], name: str, missing: str = "") -> str:
    """A field that must be text; `missing` is the cure if it must not be empty either."""
    text = _checked_text(values[name], f"field {name!r}")
    if missing and not text.strip():
        raise BadRow(f"field {name!r} is empty; {missing}")
    return text


def _checked_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{where} is {kind(value)}, must be a string; write it as text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise BadRow(
            f"{where} has half a surrogate pair at character {problem.start + 1}, which is not "
            "valid text; write the whole character"
        ) from None
    return value
