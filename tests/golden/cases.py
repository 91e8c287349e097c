"""The rows of the golden fixtures: TRL's shapes, and LLaMA-Factory's formats."""

from __future__ import annotations

from typing import Any

USER = {"role": "user", "content": "what is the name of the river?"}
ANSWER = {"role": "assistant", "content": "the longest one"}
SYSTEM = {"role": "system", "content": "say it in a short line"}
AGAIN = {"role": "user", "content": "say it again,\n  well"}
LAST = {"role": "assistant", "content": "one two three é 🙂"}
TOOL = {
    "type": "function",
    "function": {
        "name": "length",
        "description": "the length of a river",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "length", "arguments": {"name": "Nile"}}}
    ],
}
RESULT = {"role": "tool", "content": "6650"}

TRL_ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "the question and the answer of the day"},
    "text_ended": {"text": "say it well</s>"},
    "text_unicode": {"text": " naïve 🙂\n\tline\n"},
    "pair": {"prompt": "what is the name?", "completion": " the river"},
    "pair_newline": {"prompt": "what is the name?\n", "completion": "the river\n"},
    "pair_ended": {"prompt": "say:", "completion": " it</s>"},
    "conversational": {"prompt": [USER], "completion": [ANSWER]},
    "conversational_system": {"prompt": [SYSTEM, USER], "completion": [LAST]},
    "conversational_rounds": {"prompt": [USER, ANSWER, AGAIN], "completion": [LAST]},
    "conversational_tools": {"prompt": [USER], "completion": [CALL], "tools": [TOOL]},
    "messages": {"messages": [USER, ANSWER]},
    "messages_system": {"messages": [SYSTEM, USER, LAST]},
    "messages_rounds": {"messages": [SYSTEM, USER, ANSWER, AGAIN, LAST]},
    "messages_tools": {"messages": [USER, CALL, RESULT, ANSWER], "tools": [TOOL]},
    "messages_answers": {"messages": [USER, ANSWER, LAST]},
    "messages_opening": {"messages": [ANSWER, USER, LAST]},
    "tokens_mask": {"input_ids": [40, 41, 42, 43], "completion_mask": [0, 0, 1, 1]},
    "tokens_masks": {
        "input_ids": [40, 41, 42, 43],
        "completion_mask": [0, 1, 1, 1],
        "assistant_masks": [1, 1, 0, 1],
    },
    "tokens_labels": {"input_ids": [40, 41, 42, 43], "labels": [-100, 41, -100, 43]},
}
"""By name; each is rendered by the chat template that fits it (`chat_template_of`)."""


CUT = ("conversational_rounds", "messages_rounds", "text_unicode")
"""Rows that are prepared again with three tokens less than they have (keep_start)."""


def chat_template_of(row: dict[str, Any]) -> str:
    """Conversations need the marks of {% generation %} for TRL's assistant_only_loss."""
    return "generation" if "messages" in row else "plain"


def settings_of(row: dict[str, Any]) -> dict[str, Any]:
    """TRL renders no template around texts: that is data.template=plain here."""
    is_text = any(isinstance(row.get(name), str) for name in ("text", "prompt"))
    return {"template": "plain" if is_text else "chat"}
