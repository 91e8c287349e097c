"""Fuzz targets: readers of files that may come from a stranger, each as a function of bytes.

`python tests/fuzzing.py TARGET --corpus FOLDER --seconds 60` mutates inputs with atheris (extra
`fuzz`), guided by the coverage of `dualsft`. A reader may refuse an input with an error of its own
kind. Any other exception, more than a second of processor time for one input, and growth of the
process by more than 256 MB are failures; the inputs are kept, one per place in the code.

Hashes that a stranger can compute again are computed here, so that mutations get behind them. The
limits of a chat template are scaled down below the limits of this watch, and so are tested by it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Check = Callable[[bytes], object]

MAX_SECONDS = 1.0
MAX_GROWTH = 256 << 20
MAX_LENGTH = 512
KEPT = Path(__file__).parent / "fixtures/fuzz"
"""Inputs that failed once, by target: `tests/test_fuzzing.py` tries them all."""


@dataclass(frozen=True)
class Target:
    """A reader: `make` returns its check in a scratch folder; `refuses` are its own errors."""

    make: Callable[[Path], Check]
    seeds: Callable[[], list[bytes]]
    words: str = ""
    """Tokens for the mutations."""

    def kept(self, name: str) -> list[Path]:
        return sorted((KEPT / name).glob("*"))


# --- the targets ----------------------------------------------------------------------------------


def _rows(folder: Path) -> Check:
    from dualsft.config.settings import DataConfig
    from dualsft.data.rows import read_rows

    path = folder / "c.jsonl"
    config = DataConfig(path=str(path), bad_rows="skip")

    def check(data: bytes) -> None:
        path.write_bytes(data)
        rows, report = read_rows(path, config)
        assert len(rows) == report.num_good > 0
        assert report.num_rows == report.num_good + report.num_bad

    return check


def _row_seeds() -> list[bytes]:
    import malformed as m

    return [m.container("jsonl", [shape.good] * 2) for shape in m.SHAPES.values()]


def _info(folder: Path) -> Check:
    """dataset_info.json beside two files, and the rows that it leads to."""
    import malformed as m

    from dualsft.config.settings import DataConfig
    from dualsft.data.rows import read_rows

    for name in ("a", "s"):
        shape = m.SHAPES["alpaca" if name == "a" else "sharegpt"]
        (folder / f"{name}.jsonl").write_bytes(m.container("jsonl", [shape.good] * 2))
    config = DataConfig(path=str(folder), dataset="a", bad_rows="skip")

    def check(data: bytes) -> None:
        (folder / "dataset_info.json").write_bytes(data)
        read_rows(folder, config)

    return check


def _info_seeds() -> list[bytes]:
    alpaca = {"file_name": "a.jsonl", "columns": {"prompt": "instruction", "response": "output"}}
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human"}
    shared: dict[str, Any] = {"file_name": "s.jsonl", "formatting": "sharegpt", "tags": tags}
    entries = [alpaca, shared, {**alpaca, "num_samples": 1}, {"hf_hub_url": "o/n", "subset": "x"}]
    entries += [{"script_url": "x.py"}, {**shared, "ranking": True, "folder": "f", "split": "v"}]
    return [json.dumps({"a": entry}).encode() for entry in entries]


def _yaml(folder: Path) -> Check:
    """Settings from a file. What is accepted is written and read again, to the same settings."""
    from dualsft.config import settings

    path = folder / "c.yaml"
    words = ["model.path=m", "data.path=c.jsonl"]

    def check(data: bytes) -> None:
        path.write_bytes(data)
        config = settings.load(str(path), words)
        path.write_text(settings.to_yaml(config), encoding="utf-8")
        assert settings.load(str(path)) == config

    return check


def _yaml_seeds() -> list[bytes]:
    import dualsft

    recipes = Path(dualsft.__file__).parent / "recipes"
    whole = [path.read_bytes()[-MAX_LENGTH // 2 :] for path in sorted(recipes.glob("*.yaml"))]
    one = [b"score.lam: 0.5\n", b"method: {data: less, less: {lr: 1e-3}}\n", b"evaluation:\n"]
    one += [b"evaluation: {files: {a: b}}\n", b"select: {per_source: even, data_budget: 5}\n"]
    return [*whole, *one, b"seed: &a 1\nsplit: {val: *a}\n", b"score: !!python/name:os.system\n"]


def _manifest(folder: Path) -> Check:
    """A stage's manifest, sealed again, and what is then asked of it."""
    from dualsft.storage import manifest as m
    from dualsft.system.paths import RunPath

    stage = folder / "stage"
    stage.mkdir()
    (stage / "x.json").write_text("{}")
    path, place = stage / m.MANIFEST, RunPath(folder, "stage")

    def check(data: bytes) -> None:
        content = data[1:] if data[:1] == b"#" else data
        if data[:1] != b"#":
            with suppress(ValueError, RecursionError):
                body = json.loads(data)
                content = m.render_manifest(body).encode() if isinstance(body, dict) else data
        path.write_bytes(content)
        found, wrong = m.read_stage_manifest(place)
        if not wrong:
            m.damage(place, found)
            m.Fingerprint({"a": 1}, {"data": "x"}).explain(found)

    return check


def _manifest_seeds() -> list[bytes]:
    entry = {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    body = {
        "format_version": 1,
        "stage": "split",
        "fingerprint": {"hash": "a", "settings": {"a": 2, "b": [1]}, "reads": {"data": "y"}},
        "facts": {"warnings": ["w"], "warning_codes": ["c"]},
        "files": {"x.json": entry},
        "seconds": 0.5,
        "peak_memory": {"rss_bytes": 1, "cuda_bytes": None},
        "finished": "now",
        "versions": {"python": "3"},
    }
    other = {**body, "format_version": 2, "files": {"../x": entry, "y": {**entry, "size": -1}}}
    return [json.dumps(body).encode(), json.dumps(other).encode(), b"#" + json.dumps(body).encode()]


def _framed(data: bytes) -> bytes:
    """A safetensors file: as it is behind "#", else header, "|" and tensors with a true length."""
    if data[:1] == b"#":
        return data[1:]
    header, _, tensors = data.partition(b"|")
    return len(header).to_bytes(8, "little") + header + tensors


def _tensors(folder: Path) -> Check:
    """Scores and masks: any tensors, then as sorted positions in a parameter."""
    from dualsft.runs.context import ConfigError, RunError
    from dualsft.runs.stages.selection import read_mask
    from dualsft.storage.tensor_files import TensorFile
    from dualsft.system.paths import RunPath

    place = RunPath(folder.parent, folder.name)

    def check(data: bytes) -> None:
        (folder / "mask.safetensors").write_bytes(_framed(data))
        TensorFile(place / "mask.safetensors").tensors()
        with suppress(ConfigError, RunError):
            read_mask(place, {"a": (8,), "b": (2, 2)})

    return check


def _tensor_seeds() -> list[bytes]:
    def entry(dtype: str, count: int, start: int, size: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": [count], "data_offsets": [start, start + size * count]}

    floats = {"__metadata__": {"format": "pt"}, "a": entry("F32", 2, 0, 4)}
    ints = {"a": entry("I64", 2, 0, 8), "b": entry("I64", 1, 16, 8)}
    files = [(floats, bytes(8)), (ints, b"\1" + bytes(7) + b"\2" + bytes(15)), ({}, b"")]
    found = [json.dumps(head).encode() + b"|" + data for head, data in files]
    return [*found, *(b"#" + _framed(one) for one in found)]


def _delta(folder: Path) -> Check:
    """Deltas of all three formats; the hash in the header always fits."""
    from dualsft.model import delta

    delta._content_hash = lambda *_: "0"
    path = folder / "delta.safetensors"

    def check(data: bytes) -> None:
        path.write_bytes(_framed(data))
        delta.Delta.load(path)

    return check


def _delta_seeds() -> list[bytes]:
    def file(version: int, kind: str, dtype: str, size: int, **more: str) -> bytes:
        meta = {"format": f"dualsft-delta-{version}", "sha256": "0", "base_model": "m", **more}
        head = {
            "__metadata__": meta,
            f"a.{kind}": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]},
            "a.val": {"dtype": "F32", "shape": [2], "data_offsets": [2 * size, 2 * size + 8]},
        }
        data = b"\1".ljust(size, b"\0") + b"\2".ljust(size, b"\0") + bytes(8)
        return json.dumps(head).encode() + b"|" + data

    new = [file(3, "gap", "U8", 1), file(3, "gap", "U16", 2, added_in="bfloat16")]
    return [file(1, "idx", "I64", 8), file(2, "idx", "I64", 8), *new]


def _template(folder: Path) -> Check:
    """A chat template on two conversations. It may fail in any way, within its limits."""
    from small_tokenizers import byte_tokenizer

    from dualsft.data import chat

    chat.MAX_SECONDS, chat.MAX_MEMORY, chat.MAX_OUTPUT = 0.5, MAX_GROWTH // 2, 1 << 20
    turns = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "tell"}]
    rounds = [{"role": "system", "content": "be"}, *turns, *turns]
    path, tokenizer = folder / "t.jinja", byte_tokenizer()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        template = chat.ChatTemplate(tokenizer, chat.read_template(str(path)))
        for conversation in (turns, rounds):
            with suppress(ValueError):
                template.pieces(conversation)
        template.prompt(turns[:1])

    return check


def _template_seeds() -> list[bytes]:
    from small_tokenizers import CHAT

    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    more = "{% set x = namespace(n=0) %}{% macro f(a) %}{{ a | tojson }}{% endmacro %}"
    some = "{{ f(messages[-1].content[1:]) ~ x.n }}{{ raise_exception('no') if 0 is defined }}"
    loop = "{% for i in range(99) %}{{ loop.index0 * '%s' | upper | indent(2) }}{% endfor %}"
    return [text.encode() for text in (CHAT, marked, more + some, loop, "{{ strftime_now('%Y') }}")]


JSON_WORDS = '{ } [ ] : , " null true NaN 1e999 -1 \\u0000 \\ud800 [[ {"a":'
TARGETS: dict[str, Target] = {
    "rows": Target(
        _rows,
        _row_seeds,
        f"{JSON_WORDS} prompt response messages conversations instruction input output role "
        "content from value human gpt tools text input_ids labels segments weight \ufeff",
    ),
    "dataset_info": Target(
        _info,
        _info_seeds,
        f"{JSON_WORDS} file_name columns formatting tags num_samples subset ../ hf_hub_url openai",
    ),
    "yaml": Target(
        _yaml,
        _yaml_seeds,
        "model: data: score: select: finetune: evaluation: method: auto null ~ true .inf 1e-3 - : "
        "{ } [ ] & * ! | > ' \" # % @ ` ? << \t \u0085 path: lr: options: files: val: !!binary",
    ),
    "manifest": Target(
        _manifest,
        _manifest_seeds,
        f"{JSON_WORDS} format_version fingerprint settings reads files size sha256 facts seconds",
    ),
    "tensors": Target(
        _tensors,
        _tensor_seeds,
        f"{JSON_WORDS} dtype shape data_offsets F32 BF16 I64 U8 F8_E4M3 BOOL __metadata__ |",
    ),
    "delta": Target(
        _delta,
        _delta_seeds,
        f"{JSON_WORDS} dtype shape data_offsets F32 F64 BF16 I64 U16 a.idx a.gap a.val added_in "
        "float16 dualsft-delta-2 dualsft-delta-3 format __metadata__ |",
    ),
    "template": Target(
        _template,
        _template_seeds,
        "{{ }} {% %} {# for if set macro endfor endif loop messages range(9) ** * [1:] | ~ join "
        "tojson __class__ namespace generation endgeneration format center(9) replace( include",
    ),
}


# --- the watch ------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Tries inputs on a target and records what no input may do."""

    check: Check
    refuses: tuple[type[Exception], ...]
    folder: Path
    """Where failing inputs are kept, the shortest of each kind."""
    count: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    slowest: float = 0.0
    peak: int = 0

    def one(self, data: bytes) -> None:
        self.count += 1
        start, peak = time.process_time(), self.peak
        try:
            self.check(data)
        except self.refuses:
            pass
        except Exception as problem:
            self.fail(f"{type(problem).__name__} {where(problem)}", data)
        seconds = time.process_time() - start
        self.slowest = max(self.slowest, seconds)
        if seconds > MAX_SECONDS:
            self.fail("hang", data)
        self.peak = max(peak, peak_bytes())
        if peak and self.peak - peak > MAX_GROWTH:
            self.fail("growth", data)

    def fail(self, kind: str, data: bytes) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / hashlib.sha256(kind.encode()).hexdigest()[:12]
        if not file.exists() or file.stat().st_size > len(data):
            file.write_bytes(data)


def peak_bytes() -> int:
    """VmHWM; `ru_maxrss` starts at the size of the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def where(problem: BaseException) -> str:
    """The innermost line of the package in a traceback: inputs that fail there are one failure."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if "dualsft" in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} {str(problem)[:60]}"


def watch(name: str, scratch: Path, failed: Path) -> Watch:
    from dualsft.errors import DualsftError

    refuses = (ValueError,) if name == "template" else (DualsftError,)
    return Watch(TARGETS[name].make(scratch), refuses, failed)


def fuzz(name: str, corpus: Path, seconds: float) -> None:
    """Mutate for some time, print a line of JSON with the counts, and end the process."""
    atheris = importlib.import_module("atheris")
    sys.setrecursionlimit(1000)
    with atheris.instrument_imports(include=["dualsft"]):
        for module in ("config.settings", "data.rows", "storage.manifest", "data.chat"):
            importlib.import_module(f"dualsft.{module}")
        if name in ("tensors", "delta"):
            importlib.import_module("torch").set_num_threads(1)
            importlib.import_module("dualsft.model.delta")
            importlib.import_module("dualsft.runs.stages.selection")
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    own = corpus / name
    for place in (own, corpus / "failed"):
        place.mkdir(parents=True, exist_ok=True)
    seen = watch(name, scratch, corpus / "failed" / name)
    target = TARGETS[name]
    for data in [*target.seeds(), *(path.read_bytes() for path in target.kept(name))]:
        seen.one(data)
        (own / hashlib.sha1(data).hexdigest()).write_bytes(data)
    base, end = seen.peak, time.monotonic() + seconds

    def one(data: bytes) -> None:
        seen.one(data)
        if seen.count % 64 == 0 and time.monotonic() > end:
            if seen.peak - base > 2 * MAX_GROWTH:  # by little each time; the corpus is in memory
                seen.fail("growth of the process", b"")
            facts = {"count": seen.count, "failures": seen.failures, "slowest": seen.slowest}
            print(json.dumps(facts | {"growth_mb": (seen.peak - base) >> 20}), flush=True)
            for path in sorted(scratch.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            scratch.rmdir()
            os._exit(0)

    words = scratch / "words"
    escaped = (
        "".join(f"\\x{byte:02x}" for byte in word.encode()) for word in target.words.split(" ")
    )
    words.write_text("".join(f'"{word}"\n' for word in escaped if word))
    limits = ["-timeout=60", f"-rss_limit_mb={(base + 4 * MAX_GROWTH) >> 20}", "-verbosity=0"]
    atheris.Setup(
        [
            *("fuzz", str(own), f"-dict={words}", f"-max_len={MAX_LENGTH}"),
            *(*limits, f"-artifact_prefix={corpus}/failed/{name}-"),
        ],
        one,
    )
    atheris.Fuzz()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--corpus", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args(words)
    fuzz(given.target, given.corpus, given.seconds)


if __name__ == "__main__":
    main()
