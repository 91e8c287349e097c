"""Read one entry of LLaMA-Factory's dataset_info.json: the location of its rows and their format.

The location is `file_name` or `hf_hub_url`; the format is `formatting`, `columns` and `tags`
(alpaca, sharegpt, openai; `columns: {"prompt": "text"}` is plain text). Entries that would run code
or hold data for another task are refused by name: `script_url`, `ranking`, image columns, other
hubs and cloud buckets. Not part of Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dualsft.data.formats import Layout, Tags
from dualsft.data.hub_datasets import HubDataset
from dualsft.errors import ConfigError

_KEYS = frozenset(
    {
        "hf_hub_url",
        "ms_hub_url",
        "om_hub_url",
        "script_url",
        "cloud_file_name",
        "file_name",
        "formatting",
        "ranking",
        "subset",
        "split",
        "folder",
        "num_samples",
        "columns",
        "tags",
    }
)
_REFUSED = {
    "script_url": "is a loading script, which would run code; convert the data to JSON Lines",
    "cloud_file_name": "is in a cloud bucket; download the file and name it with file_name",
    "ms_hub_url": "is on another hub; download it and name the file with file_name",
    "om_hub_url": "is on another hub; download it and name the file with file_name",
}
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "observation",
    "function_tag": "function",
    "system_tag": "system",
}
_COLUMNS = frozenset({*_ALPACA, "history", "messages", "system", "tools"})
_OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """The location of an entry's rows, and their format."""

    source: str | HubDataset
    layout: Layout
    num_samples: int | None = None


def read_entry(path: Path, name: str, entries: Mapping[str, Any], key: str) -> DatasetEntry:
    """Read and check the entry `name`."""

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"{key}: {path}, dataset {name!r}: {what}")

    if name not in entries:
        close = get_close_matches(name, entries, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(entries)[:300]}"
        raise ConfigError(f"data.dataset: {path} has no dataset {name!r}; {hint}")
    entry = entries[name]
    if not isinstance(entry, dict):
        raise refuse("the entry must be a JSON object; repair it")
    if unknown := sorted(entry.keys() - _KEYS):
        raise refuse(f"the key {unknown[0][:60]!r} is not known; remove it")
    if "hf_hub_url" not in entry:
        for refused, why in _REFUSED.items():
            if refused in entry:
                raise refuse(f"{refused} {str(entry[refused])[:60]!r} {why}")
    elif "script_url" in entry:
        raise refuse(f"script_url {_REFUSED['script_url']}")
    if entry.get("ranking"):
        raise refuse("ranking: true is preference data; give a dataset of prompts and responses")
    source = entry.get("hf_hub_url") or entry.get("file_name")
    if not isinstance(source, str) or not source:
        raise refuse("it needs file_name or hf_hub_url, as text; add one")
    split = entry.get("split", "train")
    if "hf_hub_url" in entry:
        found: str | HubDataset = HubDataset(
            source, entry.get("subset"), split, None, entry.get("folder")
        )
    elif split != "train":
        raise refuse(f"split {split!r} needs a hub dataset; a file has no splits: remove it")
    else:
        found = source
    samples = entry.get("num_samples")
    if samples is not None and (type(samples) is not int or samples < 1):
        raise refuse(f"num_samples {samples!r} must be an integer of 1 or more; write a count")
    return DatasetEntry(found, _layout(entry, refuse), samples)


def _layout(entry: dict[str, Any], refuse: Any) -> Layout:
    formatting, columns, tags = entry.get("formatting", "alpaca"), entry.get("columns"), {}
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise refuse(f"formatting {formatting!r} is not known; use alpaca, sharegpt or openai")
    for what, given, known in (("columns", columns, _COLUMNS), ("tags", entry.get("tags"), _TAGS)):
        if given is not None and not (
            isinstance(given, dict) and all(isinstance(v, str) for v in given.values())
        ):
            raise refuse(f"{what} must be an object with string values; repair it")
        if unknown := sorted((given or {}).keys() - set(known)):
            raise refuse(f"{what}: {unknown[0]!r} cannot be used here; remove it")
    if formatting == "alpaca":
        names = columns if columns is not None else _ALPACA
        prompt, response = names.get("prompt"), names.get("response")
        if prompt and not response:
            return Layout("text", text=prompt)
        if not prompt or not response:
            raise refuse("columns of alpaca need prompt and response; add them")
        return Layout(
            "alpaca",
            prompt,
            response,
            query=names.get("query", ""),
            history=names.get("history", ""),
            system=names.get("system", ""),
        )
    names = columns or {}
    default = "messages" if formatting == "openai" and columns is None else "conversations"
    tags = (_OPENAI_TAGS if formatting == "openai" else {}) | (entry.get("tags") or {})
    chosen = Tags(**{_TAGS[tag]: word for tag, word in tags.items()})
    roles = [chosen.user, chosen.assistant, chosen.observation, chosen.function, chosen.system]
    if twice := [word for word in roles if roles.count(word) > 1]:
        raise refuse(f"tags use {twice[0]!r} for two roles; give each role its own name")
    plain = Tags(**{_TAGS[tag]: word for tag, word in _OPENAI_TAGS.items()})
    return Layout(
        "messages" if formatting == "openai" and chosen == plain else "sharegpt",
        messages=names.get("messages", default),
        system=names.get("system", ""),
        tools=names.get("tools", ""),
        tags=chosen,
    )
