"""Limits: each is printed by its name, holds before the work is done, and can be raised.

Received tokenizers, model configurations and data folders; sizes of data files are in
`test_hostile_sizes.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lab import Lab
from test_malicious import lab  # noqa: F401  (a fixture)
from test_sources import hub  # noqa: F401  (a fixture)

import dualsft
from dualsft.config import settings
from dualsft.config.settings import DataConfig
from dualsft.data import examples, sources, templates
from dualsft.data.chat import ChatTemplate
from dualsft.data.examples import tokenize
from dualsft.data.readers import Limits
from dualsft.data.rows import read_rows
from dualsft.errors import ConfigError, DataError
from dualsft.model import load as model_load
from dualsft.model.load import load_model, load_tokenizer
from dualsft.runs.preflight import check_paths, path_problems

GOOD = '{"prompt": "ask", "response": "tell"}\n'


def test_limits_are_raised_by_the_environment() -> None:
    code = (
        "from dualsft.data.readers import Limits\nfrom dualsft.model import safety\n"
        "print(Limits().max_ratio, Limits().max_line_bytes, safety.MAX_GROWTH[1])"
    )
    found = {}
    code += ";import dualsft.runs.preflight as p; print(len(p.path_problems({})))"
    for word in ("", "10", "ten"):
        env = {"PYTHONPATH": str(Path(dualsft.__file__).parents[1]), "DUALSFT_LIMITS": word}
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | env, capture_output=True
        )
        found[word] = [int(number) for number in done.stdout.split()]
    *limits, problems = found[""]
    assert problems == 0 and found["10"] == [*(10 * number for number in limits), 0]
    assert found["ten"] == [*limits, 1]  # a command names it, and ends


# --- tokenizers ----------------------------------------------------------------------------------


def replaced(pattern: dict[str, str], new: str, times: int = 1) -> dict[str, Any]:
    part = {"type": "Replace", "pattern": pattern, "content": new}
    return {"type": "Sequence", "normalizers": [part] * times}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def special(text: str, number: int = 0, **more: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": text, **flags, **more}


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 5000,
    "pair": [],
    "special_tokens": {},
}
TOKENIZERS: dict[str, tuple[str, Any, str]] = {
    "doubled": ("normalizer", replaced({"String": "a"}, "aa", 40), "1.1e+12 times, over 64"),
    "everywhere": ("normalizer", replaced({"String": ""}, "x" * 100_000), "MAX_GROWTH"),
    "expression": ("normalizer", replaced({"Regex": "."}, "aaaaaaaa", 12), "MAX_GROWTH"),
    "prepended": ("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}, "MAX_GROWTH"),
    "decoder": ("decoder", replaced({"String": "a"}, "a" * 9), "over 8 (MAX_GROWTH)"),
    "long token": ("added token", [special("x" * 17_000)], "MAX_STRING"),
    "long pattern": ("pre_tokenizer", split("a|" * 9_000), "MAX_STRING"),
    "decoder that matches": ("decoder", replaced({"Regex": "(a|aa)+$"}, ""), "its decoder has a"),
    "empty expression": ("normalizer", replaced({"Regex": ""}, ""), "has an empty pattern"),
    "empty text": ("normalizer", replaced({"String": ""}, "x"), "has an empty pattern"),
    "empty split": ("pre_tokenizer", split(""), "has an empty pattern"),
    "long template": ("post_processor", TEMPLATE, "values, over 4,000 (MAX_PARTS)"),
}


def describe(lab: Lab, part: str, value: Any) -> None:  # noqa: F811
    path = lab.model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_makes_much_of_little(name: str, lab: Lab) -> None:  # noqa: F811
    part, value, expected = TOKENIZERS[name]
    describe(lab, "added_tokens" if part == "added token" else part, value)
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(lab.model)
    assert "tokenizer.json: " in str(refused.value)
    assert expected in str(refused.value) and "DUALSFT_LIMITS" in str(refused.value)


def test_an_honest_normalizer_is_accepted(lab: Lab) -> None:  # noqa: F811
    space = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    parts = [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}, space, space]
    describe(lab, "normalizer", {"type": "Sequence", "normalizers": parts})
    assert load_tokenizer(lab.model)("a").input_ids


def test_a_panic_of_the_tokenizer_is_an_error_of_the_model(lab: Lab) -> None:  # noqa: F811
    """A regular expression that gives up on a text panics in Rust, which is no Exception."""
    describe(lab, "normalizer", replaced({"Regex": "(a*)*b|(.*)*!c$"}, ""))
    path = lab.root / "c.jsonl"
    path.write_text(GOOD.replace("ask", "a" * 50 + "!") * 40)
    code, said = lab.run(f"data.path={path}")
    assert code == 2 and "its tokenizer fails on a text" in said and "retry-limit" in said, said


SLOW = "(a|aa)+$"
"""Doubles its work with each `a` of a text that it does not match."""


def test_a_tokenizer_that_takes_long_is_left(
    lab: Lab,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its expression is tried on each row anew, so that the library's own limit never ends it."""
    describe(lab, "pre_tokenizer", split(SLOW))
    path = lab.root / "c.jsonl"
    path.write_text(GOOD.replace("ask", "a" * 24 + "!") * 200)
    monkeypatch.setattr(templates, "ENCODE_SECONDS", 0.2)
    monkeypatch.setattr(templates, "ENCODE_SECONDS_PER_CHARACTER", 0)
    code, said = lab.run(f"data.path={path}")
    assert code == 2 and "its tokenizer, on 200 texts of " in said, said
    assert "takes longer than 0 seconds; DUALSFT_LIMITS=10" in said
    monkeypatch.setattr(templates, "ENCODE_SECONDS", 60)
    monkeypatch.setattr(templates, "ENCODE_MEMORY", -(1 << 40))
    monkeypatch.setattr(templates, "ENCODE_MEMORY_PER_CHARACTER", 0)
    code, said = lab.run(f"data.path={path}")
    assert code == 2 and "bytes of memory; DUALSFT_LIMITS=10" in said, said


def test_a_signal_ends_a_tokenizer_that_takes_long(lab: Lab) -> None:  # noqa: F811
    """The call is in another thread, so that Ctrl-C is obeyed (the library blocks it)."""
    describe(lab, "pre_tokenizer", split(SLOW))
    rows = [{"prompt": "a" * 24 + "!", "response": "tell"}] * 200
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        examples.encode(rows, load_tokenizer(lab.model), template="plain", add_bos="never")


def test_a_tokenizer_that_takes_long_to_load(
    lab: Lab,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Added tokens are normalized at that time, and the library holds the interpreter's lock."""
    content = json.loads((lab.model / "tokenizer.json").read_text())
    content["normalizer"] = replaced({"Regex": SLOW}, "")
    number = len(content["model"]["vocab"])
    content["added_tokens"] += [
        special("a" * 30 + f"!{i}", number + i, normalized=True) for i in range(100)
    ]
    (lab.model / "tokenizer.json").write_text(json.dumps(content))
    monkeypatch.setattr(model_load, "MAX_LOAD_SECONDS", 1)
    with pytest.raises(ConfigError, match=r"loading it takes more than 1 seconds.*DUALSFT_LIMITS"):
        load_tokenizer(lab.model)


def grown(action: Callable[[], object]) -> int:
    """Bytes by which the peak of resident memory rises (Linux)."""

    def memory(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    base = memory("VmRSS")
    action()
    return memory("VmHWM") - base


@pytest.mark.parametrize("text", ["strftime_now('%Y' * 10**8)", "'{:1000000000d}'.format(1)"])
def test_a_template_that_needs_much_memory(text: str, lab: Lab) -> None:  # noqa: F811
    tokenizer = load_tokenizer(lab.model)
    template = ChatTemplate(tokenizer, "{{ " + text + " }}{{ messages[-1].content }}")

    def render() -> None:
        with pytest.raises(ValueError, match="the chat template fails on this row"):
            template.prompt([{"role": "user", "content": "ask"}])

    assert grown(render) <= 512 << 20


def test_a_panic_while_it_is_loaded_is_not_on_the_terminal(lab: Lab) -> None:  # noqa: F811
    content = json.loads((lab.model / "tokenizer.json").read_text())
    content["normalizer"] = replaced({"Regex": "(a*)*b|(.*)*!c$"}, "")
    content["added_tokens"] += [
        special("a" * 50 + "!", len(content["model"]["vocab"]), normalized=True)
    ]
    (lab.model / "tokenizer.json").write_text(json.dumps(content))
    terminal = os.dup(2)
    with (lab.root / "stderr").open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            with pytest.raises(ConfigError, match=r"loading it takes .* or crashes"):
                load_tokenizer(lab.model)
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
    assert b"panicked" not in (lab.root / "stderr").read_bytes()


# --- configurations ------------------------------------------------------------------------------


def test_tables_far_larger_than_the_weights(lab: Lab) -> None:  # noqa: F811
    """GPT-Neo has a mask of positions × positions in each layer, which no weight shows."""
    config = {"model_type": "gpt_neo", "num_layers": 24, "num_heads": 4, "hidden_size": 4}
    config |= {"attention_types": [[["global", "local"], 12]], "vocab_size": 97}
    config |= {"max_position_embeddings": 20_000}
    (lab.model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"9,600,[\d,]+ bytes of tables"):
        load_model(lab.model, torch.float32, torch.device("cpu"))


def test_a_model_that_is_long_to_build(
    lab: Lab,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parts of a model are made one by one, also without weights."""
    monkeypatch.setattr(model_load, "MAX_BUILD_SECONDS", 0.05)
    lab.configure("config.json", num_hidden_layers=1000)
    with pytest.raises(ConfigError, match="takes longer than 0.05 seconds.*DUALSFT_LIMITS"):
        load_model(lab.model, torch.float32, torch.device("cpu"))


# --- data ----------------------------------------------------------------------------------------


def test_a_text_that_would_take_minutes_to_tokenize(
    lab: Lab,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examples, "MAX_TEXT", 5000)
    monkeypatch.setattr(examples, "TEXT_PER_TOKEN", 8)
    path = lab.root / "c.jsonl"
    path.write_text(GOOD.replace("ask", "a " * 3000) + GOOD)
    config = DataConfig(path=str(path), bad_rows="skip", template="plain", max_length=512)
    rows, report = read_rows(path, config)
    made, report = tokenize(rows, load_tokenizer(lab.model), config, report)
    assert len(made) == 1 and "line 1: its text has 6,0" in report.bad[0]
    assert "over 5,000 (MAX_TEXT)" in report.bad[0]


def test_a_template_that_writes_much_for_each_row(lab: Lab) -> None:  # noqa: F811
    template = lab.root / "c.jinja"
    template.write_text("{{ 'ab ' * 300000 }}{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"prompt": "ask", "response": "tell"}] * 20
    words: dict[str, Any] = {"template": "chat", "template_file": str(template)}
    with pytest.raises(ConfigError, match=r"it writes 2,7[\d,]+ characters.*\(MAX_WRITTEN\)"):
        examples.encode(rows, load_tokenizer(lab.model), **words)


def test_long_texts_are_tokenized_a_few_at_a_time(
    lab: Lab,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same examples and reports; no call is given all the texts."""
    rows = [{"prompt": f"ask {i} " * 30, "response": "tell"} for i in range(40)]
    tokenizer = load_tokenizer(lab.model)
    given: list[int] = []
    inner = templates.Template.encode

    def encode(self: Any, rows: Any) -> Any:
        given.append(sum(len(text) for pieces in rows for text, _ in pieces))
        return inner(self, rows)

    monkeypatch.setattr(templates.Template, "encode", encode)
    whole = examples.encode(rows, tokenizer, template="plain", add_bos="never")
    monkeypatch.setattr(examples, "_CHUNK_TEXT", 1000)
    assert examples.encode(rows, tokenizer, template="plain", add_bos="never") == whole
    assert len(whole) == 40 and max(given[1:]) < 1400 < given[0] == sum(given[1:])


def test_the_texts_of_one_row_are_tokenized_a_few_at_a_time(
    lab: Lab,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those up to each boundary are many times as long as the row."""
    template = templates.Template("plain", load_tokenizer(lab.model), "never")
    pieces = [(f"ask {i} " * 3, i % 2 == 1) for i in range(40)]
    whole = template.encode([pieces] * 3)
    said: list[str] = []
    inner = templates.watched

    def watched(what: str, *limits: Any) -> Any:
        said.append(what)
        return inner(what, *limits)

    monkeypatch.setattr(templates, "watched", watched)
    monkeypatch.setattr(templates, "_CALL_CHARACTERS", 1000)
    assert template.encode([pieces] * 3) == whole
    assert len(said) > 3
    assert all(
        " 1 texts" in what or int(what.split()[-2].replace(",", "")) <= 1000 for what in said
    )


def test_a_file_of_bad_rows_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(GOOD + "{\n" * 500)
    config = DataConfig(path=str(path), bad_rows="skip")
    with pytest.raises(DataError, match=r"101 of the first 102 rows are bad.*\(max_bad_rows\)"):
        read_rows(path, config, Limits(max_bad_rows=100))
    path.write_text(GOOD * 100 + "{\n" * 500)
    assert len(read_rows(path, config, Limits(max_bad_rows=550))[0]) == 100


def test_a_parquet_file_in_many_pieces(tmp_path: Path) -> None:
    path, table = tmp_path / "c.parquet", pa.table({"prompt": ["a"] * 9, "response": ["b"] * 9})
    pq.write_table(table, path, row_group_size=1)
    config = DataConfig(path=str(path))
    with pytest.raises(DataError, match=r"9 row groups; 8 are allowed \(max_groups\)"):
        read_rows(path, config, Limits(max_groups=8))
    assert len(read_rows(path, config, Limits(max_groups=9))[0]) == 9


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*/*/*.jsonl", "**/none/*.jsonl", ""])
def test_a_search_over_the_whole_disk(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(9):
        (tmp_path / f"d{i}/e").mkdir(parents=True)
    (tmp_path / "d0/e/c.jsonl").write_text(GOOD)
    path = f"{tmp_path}/{pattern}"
    monkeypatch.setattr(sources, "MAX_FOLDERS", 100)
    if "none" not in pattern:
        assert len(find(path)) == 1
    monkeypatch.setattr(sources, "MAX_FOLDERS", 5)
    with pytest.raises(ConfigError, match=r"searches more than 5 folders \(MAX_FOLDERS\)"):
        find(path)


def test_a_list_of_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ",".join(f"{tmp_path}/c{i}.jsonl" for i in range(20_000))
    values = {"data.path": names, "data.val_path": "none.jsonl"}
    long, missing = path_problems(values)
    assert long.startswith("data.path: a list of 20,000 names, over 1,000 (MAX_NAMES)")
    assert "DUALSFT_LIMITS" in long and "none.jsonl" in missing
    asked: list[str] = []
    monkeypatch.setattr(sources, "_exists", lambda path: asked.append(path))
    assert len(sources.split_paths(",".join(names.split(",")[:1000]))) == 1000
    assert len(asked) < 3000


def test_many_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    files = [sources.SourceFile(Path(f"/d{i}/e{i % 2}/c.jsonl")) for i in range(20_000)]
    named = sources._named(files)
    assert named[1].source == "d1/e1/c" and len({file.source for file in named}) == 20_000


def find(path: str, **words: Any) -> list[Path]:
    return [file.path for file in sources.find_files(path, DataConfig(path=path, **words))]


# --- a data folder from someone else -------------------------------------------------------------


def received(folder: Path, entry: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    return folder


def test_an_entry_may_not_fetch_from_the_hub(
    tmp_path: Path,
    hub: Callable[[], list[Any]],  # noqa: F811
) -> None:
    """The user's token would open the user's private datasets."""
    names = {"columns": {"prompt": "prompt", "response": "response"}}
    folder = received(tmp_path / "data", {"hf_hub_url": "org/name", **names})
    with pytest.raises(ConfigError, match=r"'org/name' in hf_hub_url.*set data\.outside=true"):
        find(str(folder), dataset="mine")
    assert not (tmp_path / "cache/datasets").exists()
    assert find(str(folder), dataset="mine", outside=True) and len(hub()) == 1
    for wrong in ({"hf_hub_url": str(tmp_path)}, {"hf_hub_url": "org/x", "folder": "../../x"}):
        received(folder, {**wrong, **names})
        with pytest.raises(ConfigError, match="repair it"):
            find(str(folder), dataset="mine", outside=True)
    assert len(hub()) == 1


@pytest.mark.parametrize(("count", "said"), [(0, "none"), (1, "one dataset"), (2, "several")])
def test_how_many_entries_there_are_to_choose_from(count: int, said: str, tmp_path: Path) -> None:
    entries = {f"e{i}": {"file_name": "c.jsonl"} for i in range(count)}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=f"holds {said}.*; set data.dataset"):
        find(str(tmp_path))


@pytest.mark.parametrize("whole", [False, True])
def test_an_entry_may_not_follow_a_link_out(whole: bool, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "c.jsonl").write_text(GOOD)
    entry = {"file_name": "sub" if whole else "c.jsonl"}
    entry |= {"columns": {"prompt": "prompt", "response": "response"}}
    folder = received(tmp_path / "data", entry)
    link = folder / ("sub/c.jsonl" if whole else "c.jsonl")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(private / "c.jsonl")
    with pytest.raises(ConfigError, match=r"a link to .*private.*set data\.outside=true"):
        find(str(folder), dataset="mine")
    assert find(str(folder), dataset="mine", outside=True) == [link]
    link.unlink()
    (folder / "own.jsonl").write_text(GOOD)
    link.symlink_to(folder / "own.jsonl")
    assert find(str(folder), dataset="mine") == [link]


def test_a_received_run_folder_does_not_allow_it(tmp_path: Path) -> None:
    config = settings.load(None, ["model.path=m", "data.path=d", "data.outside=true"])
    for name in ("1_split", "manifest.json"):
        (tmp_path / name).mkdir()
    path = tmp_path / "config.yaml"
    path.write_text(settings.sealed_text(settings.to_yaml(config)))
    with pytest.raises(ConfigError, match=r"data\.outside: 'true' comes from"):
        settings.load(str(path), ["model.path=m", "data.path=d"])
    path.write_text(settings.sealed_text(settings.to_yaml(config).replace("outside: true", "")))
    assert not settings.load(str(path), ["model.path=m", "data.path=d"]).data.outside


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_settings_from_a_device_or_a_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        settings.load(str(tmp_path / name))
    problems = settings.load(None, ["model.path=smollm2-135m", f"data.path={tmp_path / name}"])
    with pytest.raises(ConfigError, match="data.path"):
        check_paths(problems)
