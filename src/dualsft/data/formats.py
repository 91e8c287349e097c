"""Convert the fields of a row to a conversation, for every supported row format.

Formats: prompt_response, prompt_completion (text or conversational), alpaca, messages (also called
openai), sharegpt, text, and, already split or encoded, segments and tokens. `data/layouts.py` says
which field is what. A conversation is a list of turns as chat templates take them: role, content,
and any other keys.

Nothing is guessed: a wrong type, an unknown role, an empty answer or a conversation that does not
end with an answer raises `BadRow`, which names the field and the cure. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from dualsft.data.layouts import BadRow, Layout, ascii_safe, has_turns, kind, listed
from dualsft.data.tokens import IGNORE, MASKS, TokenRow, token_row

Turn = dict[str, Any]
Piece = tuple[str, bool]
"""A piece of text, and whether it is an answer."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


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
    pieces: tuple[Piece, ...] = ()
    """The row as texts that are encoded one by one, with nothing added (axolotl's segments)."""
    tokens: TokenRow | None = None
    """The row as token ids and labels."""


# --- rows --------------------------------------------------------------------------------------


def conversation(values: Mapping[str, Any], layout: Layout) -> Conversation:
    """The content of a row, read by its layout."""
    if layout.format == "tokens":
        return Conversation("", "", whole=True, tokens=_tokens(values))
    if layout.format == "segments":
        return Conversation("", "", whole=True, pieces=_segments(values, layout.text))
    if layout.text:
        return Conversation("", text_of(values, layout.text, "write the text"), whole=True)
    tools = _tools(values, layout)
    if layout.messages:
        read = _sharegpt if layout.format == "sharegpt" else _messages
        return _checked(read(values, layout), tools, f"field {layout.messages!r}")
    sides = [isinstance(values[name], list | dict) for name in (layout.prompt, layout.response)]
    of_turns = any(has_turns(values[name]) for name in (layout.prompt, layout.response))
    if layout.format == "prompt_completion" and any(sides) or of_turns and not layout.query:
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
            f"{kind(values[layout.response])}; write both as text, or both as lists of turns; if "
            f"one is the whole conversation, name it with data.messages_field"
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
    if isinstance(items, str) and items.lstrip().startswith("["):  # a list in a cell of a CSV file
        items = _json(items, f"field {name!r}")
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
    """Turns by tags: human and observation at odd positions, gpt and function at even ones.

    The assistant may open the conversation; the positions count from the turn after that.
    """
    tags = layout.tags
    odd = {tags.user: "user", tags.observation: "tool"}
    even = {tags.assistant: "assistant", tags.function: "assistant"}
    items = _turns(values, layout.messages)
    turns = _system(values, layout)
    if items[0][1].get(tags.role) == tags.system:
        where, item = items.pop(0)
        text = _checked_text(item.get(tags.content), f"{where}: {tags.content!r}")
        turns = [_turn("system", text)]
    opened = items and items[0][1].get(tags.role) == tags.assistant
    for place, (where, item) in enumerate(items, 1 if opened else 0):
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
                "alternate, after at most one system turn and one opening answer); fix the order"
            )
        text = _checked_text(item.get(tags.content), f"{where} ({speaker}): {tags.content!r}")
        if speaker in even and not text.strip():
            raise BadRow(f"{where} ({speaker}): {tags.content!r} is empty; write the answer")
        if speaker == tags.function:
            turns.append(_turn("assistant", "") | {"tool_calls": _calls(text, where)})
        else:
            turns.append(_turn(wanted[speaker], text))
    return turns


def _tokens(values: Mapping[str, Any]) -> TokenRow:
    """The token ids and labels of a row; the labels are the ids, or -100."""
    try:
        ids, labels = row = token_row(values)
    except KeyError:
        raise BadRow(
            "field 'input_ids' without 'labels', so the response is not known; add 'labels' (-100 "
            f"outside the response), or {' or '.join(map(repr, MASKS))} (1 in the response)"
        ) from None
    except (TypeError, ValueError) as problem:
        raise BadRow(f"{problem}; repair the row") from None
    for one in (min(ids), max(ids)) if ids else ():
        if not 0 <= one < 1 << 31:
            raise BadRow(f"field 'input_ids' has {one}, which is no token id; repair the row")
    for at, (token, label) in enumerate(zip(ids, labels, strict=True), 1):
        if label not in (IGNORE, token):
            raise BadRow(
                f"field 'labels' has {label} at position {at}, where 'input_ids' has {token}; "
                f"a label is the token at its own position (not shifted), or {IGNORE}"
            )
    if all(label == IGNORE for label in labels[1:]):
        raise BadRow(f"field 'labels' has only {IGNORE}, so there is no response; remove the row")
    return row


def _segments(values: Mapping[str, Any], name: str) -> tuple[Piece, ...]:
    """axolotl's template-free rows: a list of `text` and `label`, true where it is trained on."""
    items = values[name]
    if not has_turns(items):
        what = "an empty list" if items == [] else kind(items)
        raise BadRow(f"field {name!r} is {what}, must be a list of objects with 'label' and 'text'")
    pieces: list[Piece] = []
    for number, item in enumerate(items, 1):
        where = f"field {name!r}, segment {number}"
        if not isinstance(item, dict) or not isinstance(item.get("label"), bool):
            raise BadRow(f"{where} has no 'label' that is true or false; add it")
        pieces.append((_checked_text(item.get("text"), f"{where}: 'text'"), item["label"]))
    if not any(label and text for text, label in pieces):
        raise BadRow(f"field {name!r} has no text with 'label' true; mark the response")
    return tuple(pieces)


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
