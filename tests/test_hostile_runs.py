"""Run folders from a stranger: no command writes, reads, waits or runs code outside of them.

Black box: one tiny finished run (and one comparison) is copied for each case and turned into a
trap: links, pipes, sockets and hard links in the place of its files, paths in its JSON that climb
out, consent to run code stored in its settings, vocabularies swapped. What an attacker can do about
the hashes is done: they have no key, so tampered stages are sealed again. Every command runs in a
forked child (`faults.Launcher`), so that one which waits for a pipe can be ended. Beside the folder
lies `outside`, which holds a secret. After every command (`Scene.attempt`):

1. everything outside is byte for byte what it was, and nothing was added;
2. the secret is in no file that the command left and in nothing that it said, neither as it is nor
   in base64 nor deflated, as report.html packs its data;
3. it ended in time;
4. a refusal names the entry, says what to do, and is no traceback and no "unexpected" error.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import small_run
from faults import Launcher
from safetensors.torch import load_file, save_file

import dualsft
from dualsft.storage.manifest import render_manifest

Folders = Callable[[str], Path]

LIMIT = 60.0
"""Seconds that a command may take; an honest one takes about one."""
SECRET = "CANARY-of-somebody-else-4f1d09b3"
"""32 letters: eight float32 numbers, should somebody take them for weights."""
CURE = re.compile(
    r"\b(remove|delete|copy|put|give|replace|move|restore|allow|add|leave|fetch|make|makes|again)\b"
)
STAGES = {
    "split": "1_split",
    "warmup": "2_warmup",
    "gradients": "3_gradients",
    "scores": "4_scores",
    "selection": "5_selection",
    "finetune": "6_finetune",
    "evaluation": "7_evaluation",
}


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


def test_the_detector_sees_what_it_is_for() -> None:
    for shift in range(3):
        hidden = base64.b64encode(b"x" * shift + SECRET.encode() + b"yz")
        assert leaks(b"<svg>" + hidden + b"</svg>"), shift
    page = base64.b64encode(zlib.compress(json.dumps({"a": SECRET}).encode()))
    assert leaks(b'<script id="x">' + page + b"</script>")
    assert leaks(f"error: {SECRET}".encode()) and not leaks(b"CANARY-of-somebody")


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

    def plant(self, kind: str, entry: str, lure: bytes | None = None) -> None:
        """Put a link, pipe, … where an entry of the run is."""
        self.plant_at(kind, self.run / entry, lure)

    def plant_at(self, kind: str, place: Path, lure: bytes | None = None) -> None:
        clear(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        target = self.outside / f"theirs-{place.name}"
        if kind in ("link", "hard link"):
            target.write_bytes(f"{SECRET}\n".encode() if lure is None else lure)
        if kind == "link":
            place.symlink_to(target)
        elif kind == "hard link":
            os.link(target, place)
        elif kind == "dangling":
            place.symlink_to(self.outside / "not-there")
        elif kind == "pipe":
            os.mkfifo(place)
        elif kind == "socket":
            bind(place)
        elif kind == "folder link":
            target.mkdir(exist_ok=True)
            (target / "kept.txt").write_text(SECRET)
            place.symlink_to(target)
        else:
            raise AssertionError(kind)

    def move_out(self, entry: str) -> Path:
        """Move a folder of the run outside and link to it."""
        return self.move_out_at(self.run / entry)

    def move_out_at(self, place: Path) -> Path:
        target = self.outside / f"theirs-{place.name}"
        shutil.copytree(place, target)
        clear(place)
        place.symlink_to(target)
        return target

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

    def evil_code(self, folder: Path) -> None:
        """Let a model folder bring code for its configuration, model and tokenizer."""
        poison(folder, self.canary)


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


# --- the folders that cases start from -----------------------------------------------------------


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    folder = tmp_path_factory.mktemp("launcher")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.setenv("DUALSFT_CACHE", str(folder / "cache"))
        warm = Launcher(folder / "log")
    yield warm
    warm.close()


def must(launcher: Launcher, *words: str) -> None:
    assert launcher.run(words) == 0, launcher.said


@pytest.fixture(scope="module")
def finished(
    launcher: Launcher,
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Folders,
    corpus: Path,
) -> Path:
    """A whole run with a diagnostic and its reports."""
    run = tmp_path_factory.mktemp("finished") / "run"
    must(launcher, "run", "--out", str(run), *small_run(model_folder("llama"), corpus))
    must(launcher, "diagnose", str(run), "heatmap", "param_statistics")
    must(launcher, "report", str(run))
    return run


@pytest.fixture
def scene(
    launcher: Launcher, finished: Path, model_folder: Folders, corpus: Path, tmp_path: Path
) -> Scene:
    made = Scene(tmp_path, launcher, model_folder("llama"), corpus)
    shutil.copytree(finished, made.run)
    return made


def words_for(command: str, run: Path) -> list[str]:
    """A command on a run folder that has something to do there."""
    more = {
        "split": ["data.max_length=64"],
        "score": ["score.lam=0.5"],
        "select": ["select.param_budget=0.1"],
        "finetune": ["finetune.epochs=3"],
        "evaluate": ["evaluation.prompt=Say alpha"],
        "diagnose": ["heatmap"],
    }
    return [command, str(run), *more.get(command, [])]


COMMANDS = ("report", "split", "score", "select", "finetune", "evaluate", "diagnose")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_honest_folder_is_served(command: str, scene: Scene) -> None:
    """Through a link to the run folder too: that is the user's own word, not the stranger's."""
    (scene.root / "mine").symlink_to(scene.run)
    said = scene.attempt(*words_for(command, scene.root / "mine"))
    assert said.code == 0, said.text


# --- links and special files at the top ----------------------------------------------------------


def top_lure(scene: Scene, entry: str) -> bytes | None:
    """Something outside that looks like the entry, and holds the secret."""
    place = scene.run / entry
    if entry == "config.yaml":
        text = place.read_text().partition("\n")[2]
        return text.replace("prompt: null", f"prompt: {SECRET}").encode()
    if entry == "manifest.json":
        body = json.loads(place.read_text())
        del body["seal"]
        return render_manifest(body | {"platform": SECRET}).encode()
    if entry == "metrics.jsonl":
        return place.read_bytes() + json.dumps({"stage": SECRET}).encode()
    return None


TOP = [
    (entry, kind, command)
    for entry in (".lock", "metrics.jsonl", "config.yaml", "manifest.json")
    for kind in ("link", "dangling", "pipe", "socket", "folder link")
    for command in ("report", "finetune", "diagnose")
    if not (kind in ("socket", "folder link") and command == "diagnose")
]
TOP += [
    (entry, kind, "report")
    for entry in ("report.html", "report.md", "model_card.md")
    for kind in ("link", "dangling", "pipe", "socket", "folder link")
]
TOP += [
    (entry, "hard link", command)
    for entry in (".lock", "metrics.jsonl", "config.yaml", "report.html")
    for command in ("finetune", "diagnose", "report")
]


@pytest.mark.parametrize(("entry", "kind", "command"), TOP)
def test_files_at_the_top(entry: str, kind: str, command: str, scene: Scene) -> None:
    own = (scene.run / entry).read_bytes()
    scene.plant(kind, entry, own if kind == "hard link" else top_lure(scene, entry))
    scene.attempt(*words_for(command, scene.run), names=[entry])


def test_settings_that_are_no_settings_are_not_quoted(scene: Scene) -> None:
    """config.yaml as a link to any file: what is wrong with that file is not told."""
    scene.plant("link", "config.yaml", f"password: {SECRET}\n- {SECRET}: [\n".encode())
    for command in ("report", "split", "diagnose"):
        scene.attempt(*words_for(command, scene.run), names=["config.yaml"])


@pytest.mark.parametrize("command", ["select", "diagnose"])
def test_who_holds_the_lock_is_not_read_from_outside(command: str, scene: Scene) -> None:
    """A link to a file that somebody has locked: its text is not told as the owner's name."""
    scene.plant("link", ".lock")
    with (scene.outside / "theirs-.lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = scene.attempt(*words_for(command, scene.run), names=[".lock"])
    assert said.code in (0, 1, 2)


def test_a_run_is_not_made_through_a_link(scene: Scene) -> None:
    """`dualsft run` on the stranger's folder: the whole flow, every report, nothing outside."""
    for entry in ("report.md", "report.html", "model_card.md", "manifest.json"):
        scene.plant("link", entry, top_lure(scene, entry))
    words = [*small_run(scene.model, scene.corpus), "score.lam=0.6"]
    scene.attempt("run", "--out", str(scene.run), *words, names=["manifest.json", "report.md"])


def test_settings_given_as_a_pipe(scene: Scene) -> None:
    scene.plant("pipe", "config.yaml")
    out = str(scene.root / "new")
    said = scene.attempt("run", str(scene.run / "config.yaml"), "--out", out)
    assert said.code != 0


# --- stage folders -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "evaluate", "diagnose"])
@pytest.mark.parametrize("stage", STAGES.values())
def test_a_stage_that_is_a_link(stage: str, command: str, scene: Scene) -> None:
    """To a finished stage outside, sealed, whose manifest has the secret as a warning."""
    reseal(scene.run / stage, warnings=[SECRET])
    scene.move_out(stage)
    scene.attempt(*words_for(command, scene.run), names=[stage])


@pytest.mark.parametrize("command", ["report", "evaluate", "diagnose"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "socket"])
@pytest.mark.parametrize("stage", ["1_split", "5_selection"])
def test_a_stage_that_is_no_folder(stage: str, kind: str, command: str, scene: Scene) -> None:
    scene.plant(kind, stage)
    scene.attempt(*words_for(command, scene.run), names=[stage])


@pytest.mark.parametrize("command", ["report", "finetune"])
def test_several_stages_that_are_links(command: str, scene: Scene) -> None:
    for stage in STAGES.values():
        reseal(scene.run / stage, warnings=[SECRET])
        scene.move_out(stage)
    scene.attempt(*words_for(command, scene.run), names=list(STAGES.values()))


def test_side_by_side_with_an_honest_run(scene: Scene, finished: Path) -> None:
    reseal(scene.run / "5_selection", warnings=[SECRET])
    scene.move_out("5_selection")
    shutil.copytree(finished, scene.root / "honest")
    out = str(scene.root / "both")
    words = ("report", str(scene.root / "honest"), str(scene.run), "--out", out)
    scene.attempt(*words, names=["5_selection"])


BESIDE = [
    (stage, suffix, kind)
    for stage in ("5_selection", "6_finetune")
    for suffix in (".work", ".part", ".old")
    for kind in ("folder link", "link", "dangling", "pipe", "socket")
]


@pytest.mark.parametrize(("stage", "suffix", "kind"), BESIDE)
def test_what_lies_beside_a_stage(stage: str, suffix: str, kind: str, scene: Scene) -> None:
    """While the stage is made anew and its progress is saved after every step."""
    scene.plant(kind, stage + suffix)
    command = {"5_selection": "select", "6_finetune": "finetune"}[stage]
    words = [*words_for(command, scene.run), "resume.every=0"]
    scene.attempt(*words, names=[stage + suffix])


@pytest.mark.parametrize("suffix", [".part", ".old"])
@pytest.mark.parametrize("command", ["report", "finetune"])
def test_a_stage_that_a_crash_left_outside(suffix: str, command: str, scene: Scene) -> None:
    """No 5_selection, but a link to a finished one under the name that a swap leaves behind."""
    reseal(scene.run / "5_selection", warnings=[SECRET])
    target = scene.outside / "theirs"
    shutil.move(scene.run / "5_selection", target)
    (scene.run / f"5_selection{suffix}").symlink_to(target)
    scene.attempt(*words_for(command, scene.run), names=[f"5_selection{suffix}", "5_selection"])


# --- files inside stages -------------------------------------------------------------------------

INSIDE = (
    "1_split/summary.json",
    "1_split/split.parquet",
    "1_split/manifest.json",
    "2_warmup/curvature.safetensors",
    "2_warmup/theta_bar/config.json",
    "4_scores/summary.json",
    "5_selection/summary.json",
    "5_selection/ids.json",
    "5_selection/mask.safetensors",
    "6_finetune/delta.safetensors",
    "6_finetune/model/tokenizer.json",
    "7_evaluation/results.json",
)


def marked(path: Path) -> bytes:
    """The file with the secret in it, of the same form."""
    copy = path.with_name(f"marked-{path.name}")
    if path.name == "manifest.json":
        body = json.loads(path.read_text())
        del body["seal"]
        body["facts"]["warnings"] = [SECRET]
        return render_manifest(body).encode()
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        content = [*content, SECRET] if isinstance(content, list) else content | {"note": SECRET}
        return json.dumps(content).encode()
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata({"note": SECRET}), copy)
    else:
        save_file(load_file(path), copy, metadata={"note": SECRET})
    content = copy.read_bytes()
    copy.unlink()
    return content


CASES = [(entry, kind, "report") for entry in INSIDE for kind in ("link", "dangling", "pipe")]
CASES += [(entry, kind, "evaluate") for entry in INSIDE for kind in ("link", "pipe")]
CASES += [(entry, "link", "diagnose") for entry in INSIDE if entry[0] in "25"]


@pytest.mark.parametrize(("entry", "kind", "command"), CASES)
def test_files_inside_stages(entry: str, kind: str, command: str, scene: Scene) -> None:
    scene.plant(kind, entry, marked(scene.run / entry))
    words = words_for(command, scene.run)[: 2 if command == "evaluate" else None]
    scene.attempt(*words, names=[entry])


@pytest.mark.parametrize("entry", ["6_finetune/model", "2_warmup/theta_bar"])
@pytest.mark.parametrize("command", ["report", "evaluate", "score"])
def test_a_model_folder_that_is_a_link(entry: str, command: str, scene: Scene) -> None:
    """To a tokenizer outside that would write the secret into every text shown."""
    swap_vocabulary(scene.run / entry / "tokenizer.json", SECRET)
    scene.move_out(entry)
    scene.attempt(*words_for(command, scene.run), names=[entry])


@pytest.mark.parametrize("final", ["../../outside", "{outside}", "../5_selection/../../outside"])
@pytest.mark.parametrize("command", ["report", "finetune", "diagnose"])
def test_a_selection_that_says_it_is_elsewhere(command: str, final: str, scene: Scene) -> None:
    """5_selection/summary.json names a folder outside, whose mask has the secret for a name."""
    stage = scene.run / "5_selection"
    summary = json.loads((stage / "summary.json").read_text())
    shutil.copy(stage / "ids.json", scene.outside / "ids.json")
    mask = load_file(stage / "mask.safetensors")
    mask = {f"model.layers.0.{SECRET}.weight": next(iter(mask.values())).clone()} | mask
    save_file(mask, scene.outside / "mask.safetensors")
    summary["final"] = final.format(outside=scene.outside)
    (stage / "summary.json").write_text(json.dumps(summary))
    reseal(stage)
    clear(scene.run / "diagnostics")
    words = words_for(command, scene.run)
    if command == "diagnose":
        words = ["diagnose", str(scene.run), "param_statistics"]
    said = scene.attempt(
        *words,
        names=["summary.json", "5_selection", "outside"],
    )
    assert said.code != 0, "a selection outside of the folder was taken"


# --- what is shown is what was written -----------------------------------------------------------


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


def change(name: str, **values: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | values))

    return act


def unlist(name: str) -> Callable[[Path], None]:
    """The file is there and its manifest, sealed again, does not know it."""

    def act(folder: Path) -> None:
        path = folder.parent / "manifest.json"
        body = json.loads(path.read_text())
        del body["seal"], body["files"][f"{folder.name}/{name}"]
        path.write_text(render_manifest(body))

    return act


SHOWN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "swapped entry": (
        "tokenizer.json",
        lambda folder: swap_vocabulary(folder / "tokenizer.json", "PWNED"),
    ),
    "other settings": (
        "tokenizer_config.json",
        change("tokenizer_config.json", clean_up_tokenization_spaces=True, eos_token="PWNED"),
    ),
    "other template": (
        "chat_template.jinja",
        lambda folder: (folder / "chat_template.jinja").write_text("PWNED"),
    ),
    "added tokens": ("added_tokens.json", change("added_tokens.json", PWNED=300)),
    "special tokens": (
        "special_tokens_map.json",
        change("special_tokens_map.json", eos_token="PWNED"),
    ),
    "vocabulary of another kind": ("vocab.json", change("vocab.json", PWNED=1)),
    "unlisted tokenizer": ("tokenizer.json", unlist("tokenizer.json")),
    "unlisted settings": ("tokenizer_config.json", unlist("tokenizer_config.json")),
    "unlisted template": ("chat_template.jinja", unlist("chat_template.jinja")),
}


@pytest.mark.parametrize("place", ["6_finetune/model", "2_warmup/theta_bar"])
@pytest.mark.parametrize("name", SHOWN)
def test_a_tokenizer_is_checked_before_it_is_shown(name: str, place: str, scene: Scene) -> None:
    """Refused by name, and the page stays what it was."""
    file, act = SHOWN[name]
    if place.startswith("2_"):  # the tokenizer of a run that stopped before the fine-tuning
        for stage in ("6_finetune", "7_evaluation"):
            shutil.rmtree(scene.run / stage)
    act(scene.run / place)
    before = (scene.run / "report.html").read_bytes()
    said = scene.attempt("report", str(scene.run), names=[f"{place}/{file}"])
    assert said.code != 0, "shown without a word"
    assert (scene.run / "report.html").read_bytes() == before


# --- diagnostics ---------------------------------------------------------------------------------


def diagnostic_lure(scene: Scene, entry: str) -> bytes | None:
    path = scene.run / entry
    if entry.endswith(".json"):
        return json.dumps(json.loads(path.read_text()) | {"paper": SECRET}).encode()
    if entry.endswith(".svg"):
        return path.read_bytes().replace(b"</svg>", f"<!--{SECRET}--></svg>".encode())
    return None


NUMBERS = [
    (name, kind, command)
    for name in ("heatmap.json", "heatmap.svg", "heatmap.png")
    for kind in ("link", "dangling", "pipe", "socket")
    for command in ("report", "diagnose")
]
NUMBERS += [(f"heatmap.{end}", "hard link", "diagnose") for end in ("json", "svg", "png")]


@pytest.mark.parametrize(("name", "kind", "command"), NUMBERS)
def test_files_of_diagnostics(name: str, kind: str, command: str, scene: Scene) -> None:
    entry = f"diagnostics/{name}"
    scene.plant(kind, entry, diagnostic_lure(scene, entry))
    scene.attempt(*words_for(command, scene.run), names=[entry])


@pytest.mark.parametrize("command", ["report", "diagnose"])
@pytest.mark.parametrize("kind", ["moved out", "folder link", "link", "dangling", "pipe", "socket"])
def test_the_folder_of_diagnostics(kind: str, command: str, scene: Scene) -> None:
    if kind == "moved out":
        entry = "diagnostics/heatmap.json"
        (scene.run / entry).write_bytes(diagnostic_lure(scene, entry) or b"")
        scene.move_out("diagnostics")
    else:
        scene.plant(kind, "diagnostics")
    scene.attempt(*words_for(command, scene.run), names=["diagnostics"])


@pytest.mark.parametrize("kind", ["folder link", "link", "dangling", "pipe"])
def test_saved_progress_of_a_diagnostic(kind: str, scene: Scene) -> None:
    """One that saves after every step, because config.yaml says so."""
    scene.settings("resume.every=0", sealed=True)
    entry = "diagnostics/coordination_gap.work"
    scene.plant(kind, entry)
    scene.attempt("diagnose", str(scene.run), "coordination_gap", names=[entry])


# --- consent to run code -------------------------------------------------------------------------

CONSENT = "model.trust_remote_code=true"
CONSENT_WORDS = ["trust_remote_code", "auto_map", "evil.py", "config.yaml"]


def forge(run: Path) -> None:
    """Let every stage say that it was made with consent: the code of its model has a hash."""
    changed: dict[str, str] = {}
    for folder in STAGES.values():
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


@pytest.mark.parametrize("how", ["sealed", "unsealed", "forged"])
@pytest.mark.parametrize("command", ["report", "score", "evaluate", "diagnose"])
def test_consent_in_the_settings_of_the_folder(command: str, how: str, scene: Scene) -> None:
    """The models inside the folder bring code, and its config.yaml trusts it."""
    for place in ("6_finetune/model", "2_warmup/theta_bar"):
        scene.evil_code(scene.run / place)
        reseal((scene.run / place).parent)
    scene.settings(CONSENT, sealed=how != "unsealed")
    if how == "forged":
        forge(scene.run)
    words = words_for(command, scene.run)
    if command == "diagnose":
        words = ["diagnose", str(scene.run), "coordination_gap"]
    scene.attempt(*words, names=CONSENT_WORDS)


@pytest.mark.parametrize(
    "command", ["report", "split", "score", "finetune", "evaluate", "diagnose"]
)
def test_consent_for_a_model_elsewhere(command: str, scene: Scene) -> None:
    """config.yaml names a hostile model and trusts it."""
    evil = scene.root / "model"
    shutil.copytree(scene.model, evil)
    scene.evil_code(evil)
    scene.settings(f"model.path={evil}", CONSENT, sealed=True)
    words = words_for(command, scene.run)
    if command == "diagnose":
        words = ["diagnose", str(scene.run), "coordination_gap"]
    said = scene.attempt(*words, names=CONSENT_WORDS)
    assert said.code != 0 or command == "report", said.text


@pytest.mark.parametrize("command", ["run", "check", "estimate"])
def test_consent_in_a_recipe(command: str, scene: Scene) -> None:
    """The settings of a folder, given as the recipe of a new run."""
    evil = scene.root / "model"
    shutil.copytree(scene.model, evil)
    scene.evil_code(evil)
    scene.settings(f"model.path={evil}", CONSENT, sealed=False)
    out = [] if command == "check" else ["--out", str(scene.root / "new")]
    said = scene.attempt(command, str(scene.run / "config.yaml"), *out, names=CONSENT_WORDS)
    assert said.code != 0, said.text


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("command", ["evaluate", "run"])
def test_consent_to_run_what_models_write(command: str, sealed: bool, scene: Scene) -> None:
    """humaneval with the consent in config.yaml is refused as it is without any."""
    words = ("evaluation.tasks=humaneval", "evaluation.allow_code_execution=true")
    scene.settings(*words, sealed=sealed)
    run = [str(scene.run / "config.yaml"), "--out", str(scene.root / "new")]
    given = [command, str(scene.run)] if command == "evaluate" else [command, *run]
    said = scene.attempt(*given, names=["allow_code_execution", "--allow-code-execution"])
    assert said.code == 2, said.text


def test_a_run_of_ones_own_with_consent(
    launcher: Launcher, model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    """Given with each command it works; it is stored nowhere; the report never needs it."""
    scene = Scene(tmp_path, launcher, model_folder("llama"), corpus)
    count, custom = tmp_path / "imports", tmp_path / "custom"
    shutil.copytree(scene.model, custom)
    poison(custom, count)  # its own code, which leaves a trace
    run, out = str(scene.run), ["--out", str(scene.run)]
    words = small_run(custom, corpus)
    refused = scene.attempt("run", *out, *words, names=["auto_map", "trust_remote_code"])
    assert refused.code == 2 and not count.exists()

    def works(*given: str) -> None:
        said = scene.attempt(*given)
        assert said.code == 0, said.text

    works("run", *out, *words, CONSENT)
    assert count.exists(), "the model's own code was not used"
    count.unlink()
    assert stored_consent(scene.run) == []
    works("report", run)
    assert not count.exists(), "the report ran the model's code"
    for command in ("split", "score", "evaluate"):
        said = scene.attempt(*words_for(command, scene.run), names=CONSENT_WORDS)
        assert said.code == 2 and not count.exists(), said.text
        works(*words_for(command, scene.run), CONSENT)
        count.unlink(missing_ok=True)
    works("run", *out, *words, CONSENT)
    works("diagnose", run, "coordination_gap", CONSENT)
    count.unlink(missing_ok=True)
    works("report", run)
    assert not count.exists(), "the report ran the model's code"
    assert stored_consent(scene.run) == []


def stored_consent(folder: Path) -> list[str]:
    """Files that say yes to code in any of the ways that settings are written.

    That the setting exists, "… =true only when you trust its authors", is no consent.
    """
    keys = rb"(trust_remote_code|allow_code_execution)"
    yes = re.compile(keys + rb"\W{1,9}true(?! only when)", re.IGNORECASE)
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and yes.search(path.read_bytes())
    ]


# --- comparisons ---------------------------------------------------------------------------------


def matrix_file(folder: Path, **content: Any) -> Path:
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump({"name": "test", "seeds": [42], **content}))
    return path


CELL = "cells/default/default/default/random/seed-42"


@pytest.fixture(scope="module")
def compared(
    launcher: Launcher,
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Folders,
    corpus: Path,
) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    matrix = matrix_file(folder, methods=["random"])
    out = folder / "out"
    words = small_run(model_folder("llama"), corpus)
    must(launcher, "compare", str(matrix), "--out", str(out), *words)
    assert (out / CELL / "7_evaluation/results.json").is_file(), sorted(out.rglob("*"))
    return out


@pytest.fixture
def comparing(
    launcher: Launcher, compared: Path, model_folder: Folders, corpus: Path, tmp_path: Path
) -> Scene:
    made = Scene(tmp_path, launcher, model_folder("llama"), corpus)
    shutil.copytree(compared, made.out)
    return made


def compare(scene: Scene, *more: str, **content: Any) -> list[str]:
    matrix = matrix_file(scene.root, **{"methods": ["random"], **content})
    words = small_run(scene.model, scene.corpus)
    return ["compare", str(matrix), "--out", str(scene.out), *words, *more]


def test_an_honest_comparison_is_served(comparing: Scene) -> None:
    for more in (["--tables"], [], ["finetune.epochs=3"]):
        said = comparing.attempt(*compare(comparing, *more))
        assert said.code == 0, said.text


PLACES = ("cells", "cells/default", CELL)


FOUND = [
    (place, kind, more)
    for place in PLACES
    for kind in ("moved out", "folder link", "dangling", "pipe")
    for more in ("--tables", "finetune.epochs=3")
]


@pytest.mark.parametrize(("place", "kind", "more"), FOUND)
def test_folders_of_a_comparison(place: str, kind: str, more: str, comparing: Scene) -> None:
    if kind == "moved out":
        comparing.move_out_at(comparing.out / place)
    else:
        comparing.plant_at(kind, comparing.out / place)
    comparing.attempt(*compare(comparing, more), names=[place])


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "hard link"])
@pytest.mark.parametrize("name", ["cells.json", "comparison.md", "comparison.html", "figure"])
def test_files_of_a_comparison(name: str, kind: str, comparing: Scene) -> None:
    methods = ["random", "sft"] if name == "figure" else ["random"]
    place = comparing.out / name
    if name == "figure":  # one that several methods are drawn in
        assert comparing.dualsft(*compare(comparing, methods=methods)).code == 0
        place = min(comparing.out.glob("*.svg"))
    comparing.plant_at(kind, place)
    comparing.attempt(*compare(comparing, methods=methods), names=[place.name])


@pytest.mark.parametrize("stage", ["6_finetune", "2_warmup", "5_selection/start"])
def test_pruning_removes_nothing_outside(stage: str, comparing: Scene) -> None:
    """`keep: results` removes the weights of finished cells, but not those behind a link."""
    place = comparing.out / CELL / stage
    if not place.is_dir():
        place.mkdir()
        save_file({"a": torch.zeros(1)}, place / "a.safetensors")
    comparing.move_out_at(place)
    assert list(comparing.outside.rglob("*.safetensors"))
    comparing.attempt(*compare(comparing, keep="results"), names=[stage])


@pytest.mark.parametrize("entry", ["6_finetune", "1_split", ".lock", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["folder link", "link", "dangling", "pipe"])
def test_files_of_a_cell(entry: str, kind: str, comparing: Scene) -> None:
    comparing.plant_at(kind, comparing.out / CELL / entry)
    comparing.attempt(*compare(comparing, "finetune.epochs=3"), names=[entry])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder link", "link", "dangling", "pipe"])
@pytest.mark.parametrize("name", ["logs", "log"])
def test_logs_of_workers(name: str, kind: str, comparing: Scene) -> None:
    """The folder, and a file in it that a worker's log would have the name of."""
    words = compare(comparing, "--workers", "2", "finetune.epochs=3", methods=["random", "sft"])
    place = comparing.out / "logs"
    if name == "log":
        assert comparing.dualsft(*compare(comparing, "--workers", "2", "seeds=7")).code == 0
        place = next(place.rglob("*.log"), place / "none.log")
        words = compare(comparing, "--workers", "2", "seeds=7", "finetune.epochs=3")
    comparing.plant_at(kind, place)
    comparing.attempt(*words, names=[place.name])


@pytest.mark.parametrize("where", ["settings", "models", "methods", "base", "base_and_model"])
def test_consent_in_a_matrix(where: str, comparing: Scene) -> None:
    """A comparison's file trusts the code of the model that it names."""
    evil = comparing.root / "model"
    shutil.copytree(comparing.model, evil)
    comparing.evil_code(evil)
    words = [w for w in small_run(evil, comparing.corpus) if not w.startswith("model.path")]
    content: dict[str, Any] = {"methods": ["random"], "models": {"evil": str(evil)}}
    trust = {"model.trust_remote_code": True}
    if where == "settings":
        content["settings"] = trust
    elif where == "models":
        content["models"] = {"evil": {"path": str(evil), "settings": trust}}
    elif where == "methods":
        content["methods"] = [
            {"name": "mine", "data": "random", "params": "random", "settings": trust}
        ]
    else:
        base = comparing.root / "base.yaml"
        told = {"trust_remote_code": True}
        if where == "base_and_model":
            told |= {"path": str(evil)}
            del content["models"]
        base.write_text(yaml.safe_dump({"model": told}))
        content["base"] = "base.yaml"
    matrix = matrix_file(comparing.root, **content)
    out = ["--out", str(comparing.root / "new")]
    names = ["trust_remote_code", "auto_map"]
    said = comparing.attempt("compare", str(matrix), *out, *words, names=names)
    assert said.code != 0, said.text


def test_consent_to_run_programs_in_a_matrix(comparing: Scene) -> None:
    told = {"evaluation.tasks": "humaneval", "evaluation.allow_code_execution": True}
    words = compare(comparing, settings=told)
    said = comparing.attempt(*words, names=["allow_code_execution", "--allow-code-execution"])
    assert said.code == 2, said.text


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_comparison_of_ones_own_with_consent(workers: str, comparing: Scene) -> None:
    """Given on the command line it reaches every cell, and is stored in none."""
    custom, count = comparing.root / "model", comparing.root / "imports"
    shutil.copytree(comparing.model, custom)
    poison(custom, count)
    matrix = matrix_file(comparing.root, methods=["random", "sft"], models={"own": str(custom)})
    words = [w for w in small_run(custom, comparing.corpus) if not w.startswith("model.path")]
    out = comparing.root / "new"
    more = ["--out", str(out), "--workers", workers]
    said = comparing.attempt("compare", str(matrix), *more, *words, CONSENT)
    assert said.code == 0 and count.exists(), said.text
    assert stored_consent(out) == []


# --- export --------------------------------------------------------------------------------------


def theirs_delta(path: Path) -> bytes:
    """A sound delta of another model, whose name is the secret."""
    header = {"format": "dualsft-delta-1", "base_model": SECRET, "base_hash": "0" * 64}
    tensors = load_file(path)
    copy = path.with_name("copy.safetensors")
    save_file(tensors, copy, metadata=header)
    content = copy.read_bytes()
    copy.unlink()
    return content


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "socket"])
def test_merging_the_delta_of_a_folder(kind: str, scene: Scene) -> None:
    entry = "6_finetune/delta.safetensors"
    scene.plant(kind, entry, theirs_delta(scene.run / entry))
    words = ("export", "merge", str(scene.model), str(scene.run / entry))
    said = scene.attempt(*words, str(scene.root / "merged"), names=["delta.safetensors"])
    assert said.code != 0 and not (scene.root / "merged").exists()


def hide_in_weights(folder: Path) -> None:
    """Write the secret into the weights of a model, as numbers."""
    weights = load_file(folder / "model.safetensors")
    matrix = weights["model.layers.0.self_attn.q_proj.weight"].clone()
    matrix.view(-1)[:8] = torch.from_numpy(np.frombuffer(SECRET.encode(), np.float32).copy())
    weights["model.layers.0.self_attn.q_proj.weight"] = matrix
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


EXTRACTED = {
    "model is a link": "6_finetune/model",
    "weights are a link": "6_finetune/model/model.safetensors",
}


@pytest.mark.parametrize("name", EXTRACTED)
def test_extracting_from_the_model_of_a_folder(name: str, scene: Scene) -> None:
    """Someone else's weights do not become a delta."""
    model, entry = scene.run / "6_finetune/model", EXTRACTED[name]
    hide_in_weights(model)
    reseal(model.parent)
    if entry.endswith("model"):
        scene.move_out(entry)
    else:
        scene.plant("link", entry, (scene.run / entry).read_bytes())
    words = ("export", "extract", str(scene.model), str(model), str(scene.root / "delta"))
    said = scene.attempt(*words, names=[entry, Path(entry).name])
    assert said.code != 0, said.text


@pytest.mark.parametrize("entry", ["config.json", "model.safetensors", "tokenizer.json"])
def test_extracting_does_not_wait_for_a_pipe(entry: str, scene: Scene) -> None:
    model = scene.run / "6_finetune/model"
    scene.plant("pipe", f"6_finetune/model/{entry}")
    words = ("export", "extract", str(scene.model), str(model), str(scene.root / "delta"))
    said = scene.attempt(*words, names=[entry])
    assert said.code != 0, said.text


# --- .gguf files ---------------------------------------------------------------------------------


def write_gguf(folder: Path, out: Path) -> None:
    """The tiny llama of a Hugging Face folder as a GGUF file."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
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
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removesuffix(".weight")
        block = ""
        if name.startswith("model.layers."):
            layer, _, name = name.removeprefix("model.layers.").partition(".")
            block = f"blk.{layer}."
        writer.add_tensor(f"{block}{names[name]}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def code_beside(scene: Scene, folder: Path) -> None:
    scene.evil_code(folder)


def code_of_the_tokenizer_beside(scene: Scene, folder: Path) -> None:
    scene.evil_code(folder)
    (folder / "config.json").unlink()


def adapter_beside(scene: Scene, folder: Path) -> None:
    """It says that the weights are an adapter of a model elsewhere, which has a GGUF file too."""
    base = scene.root / "base"
    shutil.copytree(scene.model, base)
    hide_in_weights(base)
    write_gguf(base, base / "tiny.gguf")
    scene.own.add("base")
    told = {"base_model_name_or_path": str(base), "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(told))


BESIDE_GGUF = {
    "code": code_beside,
    "code of the tokenizer": code_of_the_tokenizer_beside,
    "adapter": adapter_beside,
}


@pytest.mark.parametrize("name", BESIDE_GGUF)
def test_what_lies_beside_a_gguf_file(
    name: str, launcher: Launcher, model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    """No code, no question that "y" would answer, no other weights; refused or converted alone."""
    scene = Scene(tmp_path, launcher, model_folder("llama"), corpus)
    folder = tmp_path / "downloads"
    folder.mkdir()
    file = folder / "tiny.gguf"
    write_gguf(scene.model, file)
    BESIDE_GGUF[name](scene, folder)
    before = seen(scene.outside)
    source = str(Path(dualsft.__file__).parents[1])
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": source,
        "COLUMNS": "300",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hub"),
        "DUALSFT_CACHE": str(tmp_path / "cache"),
    }
    words = ["run", "--out", str(scene.run), "--until", "split", *small_run(file, corpus)]
    done = subprocess.run(
        [sys.executable, "-m", "dualsft", *words],
        input="y\n" * 20,
        capture_output=True,
        text=True,
        env=env,
        timeout=2 * LIMIT,
        check=False,
    )
    said = Said(done.returncode, done.stdout + done.stderr)
    assert "[y/N]" not in said.text and "Do you wish" not in said.text, said.text
    scene.check(said, before, ["tiny.gguf", "tokenizer_config.json", "adapter_config.json"])
    if said.code == 0:
        made = load_file(next((tmp_path / "cache").rglob("model.safetensors")))
        own = load_file(scene.model / "model.safetensors")
        embedding = "model.embed_tokens.weight"
        assert made.keys() == own.keys() and torch.equal(made[embedding], own[embedding])
