"""Detect the format of rows from the names of their fields.

A `Layout` holds the field names and role tags of a format; `Recogniser` finds the layout of a file
from its first row that has all fields of one. A row of no format may be a prompt and a response
under other common names (question and answer), or a list of turns under one. That is used only
where it can mean one thing: two possible prompts, a text beside the prompt that may belong to it,
or preference pairs are an error that names the fields and the setting that decides. Not part of
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dualsft.errors import DataError

if TYPE_CHECKING:
    from dualsft.config.settings import DataConfig

SHOWN_NAMES = 20
_UNRECOGNISED_ROWS = 1_000
OWN_NAMES = (
    "name your fields with data.prompt_field=... and data.response_field=..., with "
    "data.messages_field=... or with data.text_field=..."
)
_AS_OTHERS = "give this row the fields of the other rows, or remove it"

PROMPTS = ("prompt", "question", "instruction", "query", "problem")
PROMPTS += ("input", "inputs", "user", "human")
RESPONSES = ("response", "completion", "answer", "output", "solution")
RESPONSES += ("target", "targets", "assistant")
USERS = ("human", "user")
ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard")
TURNS = ("conversation", "dialogue", "dialog", "chat")
SYSTEMS = ("system", "system_prompt")
CONTEXTS = ("context", "passage", "history")
"""Texts that may belong to the prompt: who leaves one out decides it."""


class BadRow(ValueError):
    """One row cannot be used; the message gives the reason."""


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
    """A whole text; for tokens and segments, the field that holds them."""
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


_SHAREGPT = Layout("sharegpt", messages="conversations", system="system", tools="tools")
_LAYOUTS = (
    Layout("prompt_response", "prompt", "response", system="system"),
    Layout("prompt_completion", "prompt", "completion", tools="tools"),
    Layout("alpaca", "instruction", "output", query="input", history="history", system="system"),
    Layout("messages", messages="messages", tools="tools"),
    _SHAREGPT,
    Layout("text", text="text"),
    Layout("segments", text="segments"),
    Layout("tokens", text="input_ids"),
)


def layouts_of(config: DataConfig) -> list[Layout]:
    """The layouts that the settings allow (`contradictions` has checked that they agree).

    None with only one of data.prompt_field and data.response_field: `Recogniser` finds the other.
    """
    name = "messages" if config.format == "openai" else config.format
    layouts = [layout for layout in _LAYOUTS if name in ("auto", layout.format)]
    if config.prompt_field and config.response_field:
        kind = "prompt_response" if name == "auto" else name
        layouts = [Layout(kind, config.prompt_field, config.response_field, tools="tools")]
    elif config.prompt_field or config.response_field:
        layouts = []
    elif config.text_field:
        layouts = [Layout("text", text=config.text_field)]
    elif field_of_turns := config.messages_field:
        layouts = [
            replace(layout, messages=field_of_turns) for layout in layouts if layout.messages
        ]
    return [_with_own(layout, config) for layout in layouts]


def _with_own(layout: Layout, config: DataConfig) -> Layout:
    """The layout with the fields of data.system_field and data.input_field."""
    layout = replace(layout, system=config.system_field or layout.system)
    return replace(layout, query=config.input_field or layout.query) if layout.prompt else layout


class Recogniser:
    """Detects the layout of a file from the first row that has all fields of one."""

    def __init__(self, config: DataConfig, layout: Layout | None = None) -> None:
        self.config = config
        self.accepted = layouts_of(config) if layout is None else [layout]
        self.layout: Layout | None = self.accepted[0] if len(self.accepted) == 1 else None
        self.known = {name for layout in self.accepted for name in layout.needed}
        self.shown = False
        """Whether a row has all fields of the layout."""
        self.waiting: list[tuple[int, str, list[str]]] = []
        """(index, place, fields) of rows before the first that shows the format."""

    def find(self, index: int, place: str, values: Mapping[str, Any]) -> Layout | None:
        """The layout of a row; None while the format is unknown (the row is kept waiting)."""
        if self.layout is None:
            self._recognise(place, values)
        if self.layout is None:
            names = sorted(values, key=lambda name: name not in self.known)  # known ones first
            self.waiting.append((index, place, names[: SHOWN_NAMES + 1]))
            if len(self.waiting) >= _UNRECOGNISED_ROWS:
                self.settle()
        elif missing := self.layout.missing(values):
            raise BadRow(_missing(missing, list(values), _AS_OTHERS if self.shown else OWN_NAMES))
        else:
            self.shown = True
        return self.layout

    def settle(self) -> list[tuple[int, str, str]]:
        """(index, place, problem) of the waiting rows; an error if no format was detected."""
        if self.layout is None and self.waiting:
            _, place, names = next((row for row in self.waiting if row[2]), self.waiting[0])
            raise DataError(f"{place}: {self._unknown(names)}")
        waited, self.waiting = self.waiting, []
        return [
            (index, place, _missing(self.layout.missing(names), names, _AS_OTHERS))
            for index, place, names in waited
            if self.layout
        ]

    def _unknown(self, names: list[str]) -> str:
        own = [n for n in (self.config.prompt_field, self.config.response_field) if n]
        if not self.accepted and (absent := [name for name in own if name not in names]):
            return f"{_missing(absent, names, OWN_NAMES)}; no later row has it either"
        prompts, responses = self._pair_names(names)
        if (prompts or responses) and self.config.format == "auto":
            have, lack = ("prompt", "response") if prompts else ("response", "prompt")
            given = listed(prompts or responses)
            return (
                f"the fields {listed(names)} have a {have} ({given}) but no known name of a {lack},"
                f" nor do those of any later row; set data.{lack}_field to the field that holds the"
                f" {lack}, or {OWN_NAMES}"
            )
        accepted = "; ".join(str(layout) for layout in self.accepted)
        found = f"the fields {listed(names)} match no known format, nor do those of any later row"
        return (
            f"{found if names else 'the row has no fields, nor has any later row'}; "
            f"{OWN_NAMES}; recognised without that: {accepted}; one of {', '.join(PROMPTS)} with "
            f"one of {', '.join(RESPONSES)}"
        )

    def _recognise(self, place: str, values: Mapping[str, Any]) -> None:
        fitting = [layout for layout in self.accepted if not layout.missing(values)]
        if len(fitting) > 1:  # a `text` column often repeats the other fields
            fitting = [layout for layout in fitting if layout.format != "text"]
        if len({layout.messages or layout.format for layout in fitting}) == 1:
            fitting = fitting[:1]  # same field of turns: _by_keys tells messages from sharegpt
        if all(layout.format == "text" for layout in fitting):
            fitting += self._by_other_names(place, values)
        if len(fitting) > 1:
            raise DataError(
                f"{place}: the fields match more than one format: "
                f"{'; '.join(str(layout) for layout in fitting)}; set data.format, or {OWN_NAMES}"
            )
        if fitting:
            self.layout = _by_keys(fitting[0], values)

    # --- other names ---------------------------------------------------------------------------

    def _by_other_names(self, place: str, values: Mapping[str, Any]) -> list[Layout]:
        """The layouts of a row whose fields have other common names; an error if one can mean
        several things."""
        config = self.config
        if config.format not in ("auto", "prompt_response") or (
            config.messages_field or config.text_field
        ):
            return []
        turns = [name for name in values if plain(name) in TURNS and has_turns(values[name])]
        found = [replace(_SHAREGPT, messages=name) for name in turns]
        prompts, responses = self._pair_names(values)
        if {"chosen", "rejected"} <= values.keys() and not responses:
            whole = has_turns(values["chosen"]) and not has_turns(values.get("prompt"))
            name = "messages" if whole else "response" if prompts else "text"
            raise DataError(
                f"{place}: the rows are preference pairs ('chosen', 'rejected'); set "
                f"data.{name}_field=chosen to train on the preferred answers"
            )
        if prompts and responses:
            found.append(self._pair(place, list(values), prompts, responses))
        return [_with_own(layout, config) for layout in found]

    def _pair_names(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """The fields that can be the prompt, and those that can be the response."""
        own = (self.config.prompt_field, self.config.response_field)
        prompts, responses = (
            [n for n in names if (n == name if name else plain(n) in known)]
            for name, known in zip(own, (PROMPTS, RESPONSES), strict=True)
        )
        extra = self.config.input_field
        return [n for n in prompts if n not in (extra, own[1])], responses

    def _pair(
        self, place: str, names: list[str], prompts: list[str], responses: list[str]
    ) -> Layout:
        """The prompt, the response and the system text, if there is one field for each."""

        def decided(found: list[str], what: str) -> str:
            if len(found) > 1:
                raise DataError(
                    f"{place}: {listed(found)} can each be the {what}; set data.{what}_field to "
                    "the one that is"
                )
            return found[0] if found else ""

        config, of = self.config, {plain(name): name for name in prompts}
        query = ""
        if len(prompts) == 2 and of.keys() == {"instruction", "input"}:  # as in alpaca
            prompts, query = [of["instruction"]], of["input"]
        prompt, response = decided(prompts, "prompt"), decided(responses, "response")
        beside = [n for n in names if plain(n) in CONTEXTS and n not in (prompt, response)]
        if beside and config.input_field is None:
            raise DataError(
                f"{place}: {listed(beside)} beside {prompt!r} and {response!r} may belong to the "
                f"prompt; set data.input_field={beside[0]} to put it after the prompt, or "
                f"data.prompt_field={prompt} and data.response_field={response} to leave it out"
            )
        own = config.system_field
        system = own or decided([n for n in names if plain(n) in SYSTEMS], "system")
        return Layout(
            "prompt_response", prompt, response, query=query, system=system, tools="tools"
        )


def plain(name: str) -> str:
    """A field's name without case and outer spaces."""
    return name.strip().lower()


def has_turns(value: object) -> bool:
    """Whether this is a list of turns: of objects."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _by_keys(layout: Layout, values: Mapping[str, Any]) -> Layout:
    """Detect the format of a list of turns by its keys: `role` is messages, `from` sharegpt.

    The speakers of a sharegpt list are human or user, and one of `ASSISTANTS`.
    """
    turns = values[layout.messages] if layout.messages else None
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(turns, list) or not isinstance(first, dict):
        return layout
    if "role" in first:
        return replace(layout, format="messages")
    if layout.tags.role not in first:
        return layout
    said = {str(turn.get(layout.tags.role)) for turn in turns if isinstance(turn, dict)}
    if layout.tags == Tags():
        user, assistant = ([n for n in names if n in said] for names in (USERS, ASSISTANTS))
        tags = Tags(user=[*user, USERS[0]][0], assistant=[*assistant, ASSISTANTS[0]][0])
        if tags.assistant == "assistant":
            tags = replace(tags, observation="tool")
        layout = replace(layout, tags=tags)
    return replace(layout, format="sharegpt")


def _missing(missing: list[str], names: list[str], cure: str) -> str:
    plural = "field" if len(missing) == 1 else "fields"
    return f"{plural} {listed(missing)} missing (the row has {listed(names)}); {cure}"


def listed(names: Sequence[str]) -> str:
    """Format names for a message, at most SHOWN_NAMES."""
    shown = ", ".join(ascii_safe(name) for name in names[:SHOWN_NAMES]) or "no fields"
    return shown + (", ..." if len(names) > SHOWN_NAMES else "")


def counted(number: int, noun: str) -> str:
    """A number and its noun; the plural has an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ascii_safe(name: object) -> str:
    """A value of the row in quotes, shortened and escaped for printing."""
    return repr(str(name)[:40])


def kind(value: object) -> str:
    """The JSON name of a value's type."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")
