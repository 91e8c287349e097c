"""Builders for run folders from a stranger, and the rules that every command must keep.

A `Scene` is a copy of a finished run (and of a comparison) beside a folder `outside` that holds a
secret. `Scene.plant` puts a trap in the place of an entry, `Scene.attempt` runs a command in a
forked child (`faults.Launcher`), so that one which waits for a pipe can be ended, and checks:

1. everything outside is byte for byte what it was, and nothing was added;
2. the secret is in no file that the command left and in nothing that it printed, neither as it is
   nor in base64 nor deflated, as report.html packs its data;
3. the command ended in time;
4. a refusal names the entry, gives a cure, and is no traceback and no "unexpected" error.

An attacker can compute hashes, so tampered stages are sealed again (`reseal`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from faults import Launcher
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dualsft.runs.preflight import FOLDERS
from dualsft.storage.manifest import render_manifest

LIMIT = 60.0
"""Seconds that a command may take; an honest one takes about one."""
SECRET = "CANARY-of-somebody-else-4f1d09b3"
"""32 letters: eight float32 numbers, should somebody take them for weights."""
CURE = re.compile(
    r"\b(remove|delete|copy|put|give|replace|move|restore|allow|add|leave|fetch|make|makes|again)\b"
)
CONSENT = "model.trust_remote_code=true"


# --- what must not come out ----------------------------------------------------------------------


def encodings(secret: bytes) -> list[bytes]:
    """The secret as it is and in base64, wherever in a text it begins."""
    found = [secret]
    for shift in range(3):
        text = base64.b64encode(b"\0" * shift + secret)
        found.append(text[(0, 2, 3)[shift] : len(text) - 4])
    return found


TRACES = encodings(SECRET.encode())


def leaks(content: bytes) -> bool:
    """Whether the secret can be read out of this: plainly, or from what a page has packed."""
    if any(trace in content for trace in TRACES):
        return True
    for packed in re.findall(rb"[A-Za-z0-9+/]{16,}={0,2}", content):
        try:
            opened = zlib.decompress(base64.b64decode(packed))
        except (ValueError, zlib.error):
            continue
        if any(trace in opened for trace in TRACES):
            return True
    return False


def seen(folder: Path) -> dict[str, Any]:
    """Kind, permissions, time and content of everything under a folder; follows nothing."""
    found: dict[str, Any] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        state = path.lstat()
        regular = stat.S_ISREG(state.st_mode)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if regular else ""
        changed = state.st_mtime_ns if regular else 0
        found[str(path.relative_to(folder))] = (state.st_mode, changed, digest)
    return found


# --- one case ------------------------------------------------------------------------------------


@dataclass
class Said:
    """How a command ended."""

    code: int
    text: str


@dataclass
class Scene:
    """A copy of a run (and of a comparison), the folder outside, a canary, the command line."""

    root: Path
    launcher: Launcher
    model: Path
    corpus: Path
    own: set[str] = field(default_factory=set)
    """Names in `root` that are no result of a command: they are not searched for the secret."""

    def __post_init__(self) -> None:
        self.run = self.root / "run"
        self.out = self.root / "comparison"
        self.outside = self.root / "outside"
        self.canary = self.root / "canary"
        self.outside.mkdir()
        self.secret = self.outside / "secret.txt"
        self.secret.write_text(f"{SECRET}\n")
        self.own.add(self.outside.name)

    def dualsft(self, *words: str) -> Said:
        """Run it in a child, and end it when it takes too long."""
        pid = self.launcher.start(words)
        late = time.monotonic() + LIMIT
        while _runs(pid) and time.monotonic() < late:
            time.sleep(0.005)
        waited = _runs(pid)
        if waited:
            self.launcher.signal(pid, signal.SIGKILL)
        code = self.launcher.wait()
        text = self.launcher.said
        assert not waited, f"{words[0]} was still waiting after {LIMIT:.0f} s\n{text}"
        return Said(code, text)

    def attempt(self, *words: str, names: Sequence[str] = ()) -> Said:
        """Run it and hold it to the four rules; a refusal must have one of `names`, in parts."""
        before = seen(self.outside)
        said = self.dualsft(*words)
        self.check(said, before, names)
        return said

    def check(self, said: Said, before: dict[str, Any], names: Sequence[str]) -> None:
        after = seen(self.outside)
        changed = {n for n in before | after if before.get(n) != after.get(n)}
        assert not changed, f"outside: {sorted(changed)} changed\n{said.text}"
        assert not self.canary.exists(), f"the stranger's code ran\n{said.text}"
        assert not leaks(said.text.encode()), f"the secret was told\n{said.text}"
        assert (found := self.leaking()) == [], f"the secret is in {found}\n{said.text}"
        assert "Traceback" not in said.text, said.text
        assert said.code in (0, 1, 2), said.text
        if said.code:
            self.check_refusal(said, names)

    def check_refusal(self, said: Said, names: Sequence[str]) -> None:
        text = said.text.replace(str(self.root), "")
        assert "error: " in text, said.text
        text = text[text.index("error: ") :]
        assert "unexpected " not in text and "bug in dualsft" not in text, said.text
        named = [name for name in names if all(part in text for part in name.split("/"))]
        assert named or not names, f"none of {names} is named\n{said.text}"
        assert CURE.search(text), f"no cure\n{said.text}"

    def leaking(self) -> list[str]:
        """Files with the secret; not those outside, by whichever name."""
        theirs = {p.stat().st_ino for p in self.outside.rglob("*") if p.is_file()}
        found = []
        for place in self.root.iterdir():
            if place.name in self.own:
                continue
            for path in [place] if not place.is_dir() or place.is_symlink() else place.rglob("*"):
                state = path.lstat()
                plain = stat.S_ISREG(state.st_mode) and state.st_ino not in theirs
                if plain and leaks(path.read_bytes()):
                    found.append(str(path.relative_to(self.root)))
        return found

    # --- traps -----------------------------------------------------------------------------------

    def plant(self, kind: str, entry: str | Path, lure: bytes | None = None) -> None:
        """Put a link, pipe, … in the place of an entry of the run (or of any path).

        A link leads to a file outside of the same form with the secret in it, unless `lure` is its
        content; "moved out" replaces a folder by a link to a tainted copy. A hard link cannot be
        told from a file, so it has the content of the entry: it must not be written to.
        """
        place = self.run / entry
        target = self.outside / f"theirs-{place.name}"
        if kind == "moved out":
            taint(place)
            shutil.copytree(place, target)
        elif lure is None and place.is_file():
            lure = place.read_bytes() if kind == "hard link" else marked(place)
        clear(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind in ("link", "hard link"):
            target.write_bytes(f"{SECRET}\n".encode() if lure is None else lure)
        if kind == "folder link":
            target.mkdir(exist_ok=True)
            (target / "kept.txt").write_text(SECRET)
        if kind in ("link", "folder link", "moved out"):
            place.symlink_to(target)
        elif kind == "hard link":
            os.link(target, place)
        elif kind == "dangling":
            place.symlink_to(self.outside / "not-there")
        elif kind == "pipe":
            os.mkfifo(place)
        elif kind == "socket":
            bind(place)
        else:
            raise AssertionError(kind)

    def settings(self, *lines: str, sealed: bool) -> None:
        """Rewrite config.yaml as an attacker can: keys of its sections, and a fresh seal."""
        path = self.run / "config.yaml"
        head, _, text = path.read_text().partition("\n")
        assert head.startswith("# "), head
        content = yaml.safe_load(text)
        for line in lines:
            name, _, value = line.partition("=")
            section, _, key = name.partition(".")
            content[section][key] = yaml.safe_load(value)
        text = yaml.safe_dump(content, sort_keys=False)
        digest = hashlib.sha256(text.encode()).hexdigest()
        head = re.sub(r"[0-9a-f]{64}", digest, head)
        path.write_text(f"{head}\n{text}" if sealed else text)

    def evil_model(self) -> Path:
        """A copy of the model that brings code."""
        evil = Path(shutil.copytree(self.model, self.root / "model"))
        poison(evil, self.canary)
        return evil


def _runs(pid: int) -> bool:
    """Whether a child has not ended; one that has is a zombie until it is waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def clear(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def bind(place: Path) -> None:
    """A socket; the name is given from within its folder, since such names must be short."""
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{place.name}")
    finally:
        os.close(folder)
    assert stat.S_ISSOCK(place.lstat().st_mode)


def reseal(stage: Path, **facts: Any) -> None:
    """Make a stage's manifest fit its files again, as anybody can."""
    path = stage / "manifest.json"
    body = json.loads(path.read_text())
    del body["seal"]
    body["facts"] |= facts
    files = [p for p in sorted(stage.rglob("*")) if p.is_file() and p != path]
    body["files"] = {
        p.relative_to(stage).as_posix(): {
            "size": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in files
    }
    path.write_text(render_manifest(body))


def poison(folder: Path, canary: Path) -> None:
    (folder / "evil.py").write_text(
        f"open({str(canary)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class EvilConfig(LlamaConfig):\n    model_type = 'evil'\n"
        "class EvilModel(LlamaForCausalLM):\n    config_class = EvilConfig\n"
        "class EvilTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    maps = {
        "config.json": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "evil.EvilTokenizer"]},
    }
    for name, code in maps.items():
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | {"auto_map": code}))


# --- stages changed and sealed again -------------------------------------------------------------

Change = Callable[[Path], None]
"""Changes the folder of a stage."""


def in_manifest(act: Callable[[dict[str, Any]], object]) -> Change:
    def change(stage: Path) -> None:
        body = json.loads((stage / "manifest.json").read_text())
        del body["seal"]
        act(body)
        (stage / "manifest.json").write_text(render_manifest(body))

    return change


def in_table(file: str, column: str, value: Any) -> Change:
    """Give all rows of a column one value (or what a function makes of them), or drop it."""

    def change(stage: Path) -> None:
        table = pq.read_table(stage / file)
        at = table.column_names.index(column)
        if value is None:
            table = table.remove_column(at)
        else:
            made = value(table[column].to_pylist()) if callable(value) else [value] * len(table)
            table = table.set_column(at, column, pa.array(made))
        pq.write_table(table, stage / file)
        reseal(stage)

    return change


def in_json(file: str, value: Any, sealed: bool = True) -> Change:
    """Give an object other values; anything else, and {}, takes the place of the content."""

    def change(stage: Path) -> None:
        path = stage / file
        stored = json.loads(path.read_text()) if path.exists() else {}
        both = isinstance(stored, dict) and isinstance(value, dict) and value
        path.write_text(json.dumps(stored | value if both else value))
        if sealed:
            reseal(stage)

    return change


def in_tensors(file: str, act: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change every tensor of a file."""
    return in_file(file, lambda tensors: {name: act(one) for name, one in tensors.items()})


def in_file(file: str, act: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def change(stage: Path) -> None:
        with safe_open(stage / file, "pt") as stored:
            header = stored.metadata()
        changed = act(load_file(stage / file))
        save_file({n: t.contiguous() for n, t in changed.items()}, stage / file, metadata=header)
        reseal(stage)

    return change


def without(file: str) -> Change:
    """Remove a file, and from the manifest too."""

    def change(stage: Path) -> None:
        (stage / file).unlink()
        reseal(stage)

    return change


# --- content -------------------------------------------------------------------------------------


def marked(path: Path) -> bytes | None:
    """The file with the secret in it, of the same form; None for other kinds of files."""
    copy = path.with_name(f"marked-{path.name}")
    if path.name == "config.yaml":
        text = path.read_text().partition("\n")[2]
        return text.replace("prompt: null", f"prompt: {SECRET}").encode()
    if path.name == "manifest.json":
        body = json.loads(path.read_text())
        del body["seal"]
        body |= {"platform": SECRET}
        body.get("facts", {})["warnings"] = [SECRET]
        return render_manifest(body).encode()
    if path.suffix == ".jsonl":
        return path.read_bytes() + json.dumps({"stage": SECRET}).encode()
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        note = {"note": SECRET, "paper": SECRET}
        return json.dumps(
            [*content, SECRET] if isinstance(content, list) else content | note
        ).encode()
    if path.suffix == ".svg":
        return path.read_bytes().replace(b"</svg>", f"<!--{SECRET}--></svg>".encode())
    if path.suffix == ".parquet":
        pq.write_table(pq.read_table(path).replace_schema_metadata({"note": SECRET}), copy)
    elif path.suffix == ".safetensors":
        save_file(load_file(path), copy, metadata={"note": SECRET})
    else:
        return None
    content = copy.read_bytes()
    copy.unlink()
    return content


def taint(folder: Path) -> None:
    """Write the secret where a reader of this folder would show it."""
    if (folder / "manifest.json").is_file() and folder.name in FOLDERS.values():
        reseal(folder, warnings=[SECRET])
    elif (folder / "tokenizer.json").is_file():
        swap_vocabulary(folder / "tokenizer.json", SECRET)
    elif (folder / "heatmap.json").is_file():
        (folder / "heatmap.json").write_bytes(marked(folder / "heatmap.json") or b"")


def swap_vocabulary(path: Path, text: str) -> None:
    """Give the longest tokens another text: whatever is decoded shows it."""
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    longest = sorted(vocabulary, key=len)[-40:]
    for number, token in enumerate(longest):
        vocabulary[f"{text}{number}"] = vocabulary.pop(token)
    merges = content["model"]["merges"]
    gone = {*longest}
    content["model"]["merges"] = [
        m
        for m in merges
        if "".join(m if isinstance(m, list) else m.split()) not in gone
        and not gone & {*(m if isinstance(m, list) else m.split())}
    ]
    path.write_text(json.dumps(content))


def hide_in_weights(folder: Path) -> None:
    """Write the secret into the weights of a model, as numbers."""
    weights = load_file(folder / "model.safetensors")
    matrix = weights["model.layers.0.self_attn.q_proj.weight"].clone()
    matrix.view(-1)[:8] = torch.from_numpy(np.frombuffer(SECRET.encode(), np.float32).copy())
    weights["model.layers.0.self_attn.q_proj.weight"] = matrix
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def forge(run: Path) -> None:
    """Let every stage say that it was made with consent: the code of its model has a hash."""
    changed: dict[str, str] = {}
    for folder in FOLDERS.values():
        path = run / folder / "manifest.json"
        body = json.loads(path.read_text())
        del body["seal"]
        made = body["fingerprint"]
        if folder == "1_split":
            made["settings"]["code of model.path"] = hashlib.sha256(b"").hexdigest()
        made["reads"] = {name: changed[value] for name, value in made["reads"].items()}
        parts = {name: made[name] for name in ("reads", "settings")}
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        before, made["hash"] = made["hash"], hashlib.sha256(text.encode()).hexdigest()
        changed[before] = made["hash"]
        path.write_text(render_manifest(body))


def stored_consent(folder: Path) -> list[str]:
    """Files that say yes to code in any of the ways that settings are written.

    That the setting exists, "… =true only when you trust its authors", is no consent.
    """
    keys = rb"(trust_remote_code|allow_code_execution|allow_weak_sandbox)"
    yes = re.compile(keys + rb"\W{1,9}true(?! only when)", re.IGNORECASE)
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and yes.search(path.read_bytes())
    ]


def write_gguf(folder: Path, out: Path) -> None:
    """The tiny llama of a Hugging Face folder as a GGUF file."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = sorted(words["vocab"], key=words["vocab"].get)
    vocabulary += [f"<unused{i}>" for i in range(config["vocab_size"] - len(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * len(vocabulary))
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in words["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        mapped = names.get_name(name, try_suffixes=(".weight",))
        assert mapped is not None
        writer.add_tensor(mapped, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
