"""Run folders from a stranger: no command writes, reads, waits or runs code outside of them.

Black box: one tiny finished run (and one comparison) is copied for each case and turned into a
trap. The tables list (entry made hostile, kind of trap, command); the rules that every command must
keep, and the builders, are in `hostile.py`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import small_run
from faults import Launcher
from hostile import (
    CONSENT,
    LIMIT,
    SECRET,
    Said,
    Scene,
    clear,
    forge,
    hide_in_weights,
    in_json,
    in_manifest,
    in_table,
    in_tensors,
    leaks,
    marked,
    poison,
    reseal,
    seen,
    stored_consent,
    swap_vocabulary,
    without,
    write_gguf,
)
from safetensors.torch import load_file, save_file

import dualsft
from dualsft.runs.preflight import FOLDERS

Folders = Callable[[str], Path]
STAGES = tuple(FOLDERS.values())
LINKS = ("link", "dangling", "pipe", "socket")


def test_the_detector_sees_what_it_is_for() -> None:
    for shift in range(3):
        hidden = base64.b64encode(b"x" * shift + SECRET.encode() + b"yz")
        assert leaks(b"<svg>" + hidden + b"</svg>"), shift
    page = base64.b64encode(zlib.compress(json.dumps({"a": SECRET}).encode()))
    assert leaks(b'<script id="x">' + page + b"</script>")
    assert leaks(f"error: {SECRET}".encode()) and not leaks(b"CANARY-of-somebody")


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
def bare(launcher: Launcher, model_folder: Folders, corpus: Path, tmp_path: Path) -> Scene:
    return Scene(tmp_path, launcher, model_folder("llama"), corpus)


@pytest.fixture
def scene(bare: Scene, finished: Path) -> Scene:
    shutil.copytree(finished, bare.run)
    return bare


CHANGES = {
    "split": ["data.max_length=64"],
    "score": ["score.lam=0.5"],
    "select": ["select.param_budget=0.1"],
    "finetune": ["finetune.epochs=3"],
    "evaluate": ["evaluation.prompt=Say alpha"],
    "diagnose": ["heatmap"],
}
"""What gives each command something to do in a finished run."""


def words_for(command: str, run: Path) -> list[str]:
    """A command on a run folder; `X again` changes nothing, `X saving` saves after every step."""
    name, _, how = command.partition(" ")
    change = [] if how == "again" else CHANGES.get(name, [])
    return [name, str(run), *change, *(["resume.every=0"] if how == "saving" else [])]


@pytest.mark.parametrize("stage", STAGES)
def test_a_manifest_without_facts(stage: str, scene: Scene) -> None:
    in_manifest(lambda body: body.update(facts={}))(scene.run / stage)
    said = scene.attempt("report", str(scene.run))
    assert said.code == 0, said.text


@pytest.mark.parametrize("command", ["report", *CHANGES])
def test_an_honest_folder_is_served(command: str, scene: Scene) -> None:
    """Through a link to the run folder too: that is the user's own word, not the stranger's."""
    (scene.root / "mine").symlink_to(scene.run)
    said = scene.attempt(*words_for(command, scene.root / "mine"))
    assert said.code == 0, said.text


# --- links and special files in the place of entries ---------------------------------------------

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
FIGURES = tuple(f"diagnostics/heatmap.{end}" for end in ("json", "svg", "png"))
READERS = ("report", "evaluate", "diagnose")

TRAPS: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    # files at the top
    (
        (".lock", "metrics.jsonl", "config.yaml", "manifest.json"),
        (*LINKS, "folder link"),
        ("report", "finetune"),
    ),
    (
        (".lock", "metrics.jsonl", "config.yaml", "manifest.json"),
        ("link", "dangling", "pipe"),
        ("diagnose",),
    ),
    (("report.html", "report.md", "model_card.md"), (*LINKS, "folder link"), ("report",)),
    (("6_finetune/model/README.md",), (*LINKS, "folder link", "hard link"), ("report",)),
    (
        (".lock", "metrics.jsonl", "config.yaml", "report.html"),
        ("hard link",),
        ("finetune", "diagnose", "report"),
    ),
    # stage folders: a link to a finished stage outside, sealed, with the secret as a warning
    (STAGES, ("moved out",), READERS),
    (("1_split", "5_selection"), LINKS, READERS),
    # beside a stage that is made anew and saves its progress after every step
    (
        ("5_selection.work", "5_selection.part", "5_selection.old"),
        (*LINKS, "folder link"),
        ("select saving",),
    ),
    (
        ("6_finetune.work", "6_finetune.part", "6_finetune.old"),
        (*LINKS, "folder link"),
        ("finetune saving",),
    ),
    # files inside stages
    (INSIDE, ("link", "dangling", "pipe"), ("report",)),
    (INSIDE, ("link", "pipe"), ("evaluate again",)),
    (tuple(entry for entry in INSIDE if entry[0] in "25"), ("link",), ("diagnose",)),
    # a tokenizer outside would write the secret into every text shown
    (("6_finetune/model", "2_warmup/theta_bar"), ("moved out",), ("report", "evaluate", "score")),
    # diagnostics
    (FIGURES, LINKS, ("report", "diagnose")),
    (FIGURES, ("hard link",), ("diagnose",)),
    (("diagnostics",), (*LINKS, "moved out", "folder link"), ("report", "diagnose")),
]
CASES = [
    (entry, kind, command)
    for entries, kinds, commands in TRAPS
    for entry in entries
    for kind in kinds
    for command in commands
]


@pytest.mark.parametrize(("entry", "kind", "command"), CASES)
def test_an_entry_that_leads_elsewhere(entry: str, kind: str, command: str, scene: Scene) -> None:
    hard_figure = kind == "hard link" and entry in FIGURES
    scene.plant(kind, entry, marked(scene.run / entry) if hard_figure else None)
    scene.attempt(*words_for(command, scene.run), names=[entry])


@pytest.mark.parametrize("kind", ["folder link", "link", "dangling", "pipe"])
def test_saved_progress_of_a_diagnostic(kind: str, scene: Scene) -> None:
    """One that saves after every step, because config.yaml says so."""
    scene.settings("resume.every=0", sealed=True)
    entry = "diagnostics/coordination_gap.work"
    scene.plant(kind, entry)
    paths = [f"model.path={scene.model}", f"data.path={scene.corpus}"]
    scene.attempt("diagnose", str(scene.run), "coordination_gap", *paths, names=[entry])


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
        scene.attempt(*words_for(command, scene.run), names=[".lock"])


def test_a_run_is_not_made_through_a_link(scene: Scene) -> None:
    """`dualsft run` on the stranger's folder: the whole flow, every report, nothing outside."""
    for entry in ("report.md", "report.html", "model_card.md", "manifest.json"):
        scene.plant("link", entry)
    words = [*small_run(scene.model, scene.corpus), "score.lam=0.6"]
    scene.attempt("run", "--out", str(scene.run), *words, names=["manifest.json", "report.md"])


def test_settings_given_as_a_pipe(scene: Scene) -> None:
    scene.plant("pipe", "config.yaml")
    out = str(scene.root / "new")
    assert scene.attempt("run", str(scene.run / "config.yaml"), "--out", out).code != 0


def test_side_by_side_with_an_honest_run(scene: Scene, finished: Path) -> None:
    scene.plant("moved out", "5_selection")
    shutil.copytree(finished, scene.root / "honest")
    out = str(scene.root / "both")
    words = ("report", str(scene.root / "honest"), str(scene.run), "--out", out)
    scene.attempt(*words, names=["5_selection"])


@pytest.mark.parametrize("suffix", [".part", ".old"])
@pytest.mark.parametrize("command", ["report", "finetune"])
def test_a_stage_that_a_crash_left_outside(suffix: str, command: str, scene: Scene) -> None:
    """No 5_selection, but a link to a finished one under the name that a swap leaves behind."""
    scene.plant("moved out", "5_selection")
    (scene.run / "5_selection").rename(scene.run / f"5_selection{suffix}")
    scene.attempt(*words_for(command, scene.run), names=[f"5_selection{suffix}", "5_selection"])


@pytest.mark.parametrize("final", ["../../outside", "{outside}", "../5_selection/../../outside"])
@pytest.mark.parametrize("command", ["report", "finetune", "diagnose"])
def test_a_selection_that_says_it_is_elsewhere(command: str, final: str, scene: Scene) -> None:
    """5_selection/summary.json names a folder outside, whose mask has the secret for a name."""
    stage = scene.run / "5_selection"
    shutil.copy(stage / "ids.json", scene.outside / "ids.json")
    mask = load_file(stage / "mask.safetensors")
    mask = {f"model.layers.0.{SECRET}.weight": next(iter(mask.values())).clone()} | mask
    save_file(mask, scene.outside / "mask.safetensors")
    in_json("summary.json", {"final": final.format(outside=scene.outside)})(stage)
    clear(scene.run / "diagnostics")
    words = words_for(command, scene.run)
    if command == "diagnose":
        words = ["diagnose", str(scene.run), "param_statistics"]
    said = scene.attempt(*words, names=["summary.json", "5_selection", "outside"])
    assert said.code != 0, "a selection outside of the folder was taken"


# --- content that no run writes, sealed again ----------------------------------------------------


Case = tuple[str, str, Callable[[Path], None], str]


def each(stage: str, command: str, named: str, *acts: Callable[[Path], None]) -> Iterator[Case]:
    """One case for each way to change the stage; the refusal must name this."""
    return ((stage, command, act, named) for act in acts)


MASK, TOKENS, EXAMPLES = "mask.safetensors", "tokens.parquet", "examples.parquet"
MALFORMED: list[Case] = [
    *each(
        *("5_selection", "report", "5_selection/manifest.json"),
        in_manifest(lambda body: body["fingerprint"].pop("hash")),
        in_manifest(lambda body: body.pop("facts")),
        in_manifest(lambda body: body.update(facts=[1])),
        in_manifest(lambda body: body.update(seconds=10**400)),
        in_manifest(lambda body: body.update(peak_memory={"cuda": "x"})),
        in_manifest(lambda body: body.update(versions=3)),
        in_manifest(lambda body: body["facts"].update(warning_codes=3)),
        in_manifest(
            lambda body: body["fingerprint"]["reads"].update(
                {f"f{i}": "x" for i in range(3 * 10**5)}
            )
        ),
        in_manifest(
            lambda body: body["files"].update(
                {f"f{i}": {"size": 1, "sha256": ""} for i in range(10**5)}
            )
        ),
    ),
    *each(
        *("5_selection", "report", "run"),
        in_manifest(lambda body: body["facts"].update(warnings=3)),
        in_manifest(lambda body: body.update(seconds="x")),
    ),
    *each(
        *("5_selection", "finetune", "summary.json"),
        in_json("summary.json", {"final": 3}),
        in_json("summary.json", [1]),
    ),
    *each(
        *("5_selection", "report", "5_selection/summary.json"),
        in_json("summary.json", {"b": "x", "final": 3}),
        without("summary.json"),
    ),
    *each(
        *("5_selection", "finetune", "ids.json"),
        *(in_json("ids.json", ids) for ids in ([[1]], ["of no row"], [])),
    ),
    *each("5_selection", "report", MASK, in_tensors(MASK, lambda index: index + 2**40)),
    *each(
        *("5_selection", "finetune", MASK),
        in_tensors(MASK, lambda index: index.float()),
        in_tensors(MASK, lambda index: index[:0]),
        in_tensors(MASK, lambda index: index[None]),
        in_tensors(MASK, lambda index: index.flip(0)),
        in_tensors(MASK, lambda index: index - 10**6),
        in_tensors(MASK, lambda index: index + 2**40),
    ),
    *each(
        *("1_split", "finetune", "1_split/split.parquet"),
        in_table("split.parquet", "index", None),
        in_table("split.parquet", "role", "evil"),
    ),
    *each(
        *("1_split", "finetune", "1_split/tokens.parquet"),
        in_table(TOKENS, "input_ids", ["text"]),
        in_table(TOKENS, "input_ids", [2**30]),
        without(TOKENS),
    ),
    *each("1_split", "score", "1_split/tokens.parquet", in_table(TOKENS, "labels", [-7])),
    *each("1_split", "report", "1_split/summary.json", in_json("summary.json", {"counts": "x"})),
    *each(
        *("4_scores", "select", "4_scores/examples.parquet"),
        in_table(EXAMPLES, "bound", None),
        in_table(EXAMPLES, "bound", -1.0),
        in_table(EXAMPLES, "score", "x"),
        in_table(EXAMPLES, "score", float("nan")),
        in_table(EXAMPLES, "id", "same"),
        without(EXAMPLES),
    ),
    *each("4_scores", "select", "4_scores/summary.json", in_json("summary.json", {})),
    *each("4_scores", "boundary", EXAMPLES, in_table(EXAMPLES, "score", "x")),
    *each("7_evaluation", "report", "7_evaluation/results.json", in_json("results.json", [1])),
    *(
        case
        for stage, file, command in (
            ("2_warmup", "curvature.safetensors", "select"),
            ("3_gradients", "grad_sum.safetensors", "rescore"),
            ("3_gradients", "grad_sum.safetensors", "select"),
            ("3_gradients", "val_grad.safetensors", "rescore"),
            ("3_gradients", "prior_grad.safetensors", "select"),
        )
        for case in each(
            *(stage, command, f"{stage}/{file}"),
            in_tensors(file, lambda one: one * float("nan")),
            in_tensors(file, lambda one: one.reshape(-1)),
            in_tensors(file, lambda one: one[:1]),
            in_tensors(file, lambda one: one.double()),
        )
    ),
    *each(
        *("2_warmup", "score", "model.safetensors"),
        in_tensors("theta_bar/model.safetensors", lambda one: one * float("nan")),
        in_tensors("theta_bar/model.safetensors", lambda one: one[:1]),
    ),
    *each("3_gradients", "rescore", "pool.parquet", in_table("pool.parquet", "loss", "x")),
]


@pytest.mark.parametrize(("stage", "command", "act", "named"), MALFORMED)
def test_content_that_no_run_writes(
    stage: str, command: str, act: Callable[[Path], None], named: str, scene: Scene
) -> None:
    """Whoever made the folder can seal anything; it is refused by name, as no bug of dualsft."""
    act(scene.run / stage)
    words = words_for(command, scene.run)
    if command == "boundary":
        words = ["diagnose", str(scene.run), "boundary"]
    elif command == "rescore":  # the scores alone, from the stored vectors
        words = ["score", str(scene.run), "score.keep=all"]
    said = scene.attempt(*words, names=[named])
    assert said.code in (1, 2), said.text
    assert len(said.text) < 20_000, "the whole content is told"


@pytest.mark.parametrize("entry", ["report.html", "diagnostics/heatmap.svg", "model_card.md"])
def test_a_folder_in_the_place_of_a_file(entry: str, scene: Scene) -> None:
    (scene.run / entry).unlink()
    (scene.run / entry).mkdir()
    said = scene.attempt("report", str(scene.run), names=[Path(entry).name])
    assert said.code == 1, said.text


# --- sizes: little on disk, much in memory or time -----------------------------------------------


def hollow(run: Path, entry: str, size: int = 1 << 40) -> None:
    """A sparse file, and a manifest that says so: its hash takes a quarter of an hour."""
    (run / entry).write_bytes(b"")
    os.truncate(run / entry, size)
    if entry[0].isdigit():
        told = {"size": size, "sha256": "0" * 64}
        in_manifest(lambda body: body["files"].update({entry.partition("/")[2]: told}))(
            run / entry.partition("/")[0]
        )


HOLLOW = [
    ("1_split/tokens.parquet", "report"),
    ("5_selection/ids.json", "report"),
    ("6_finetune/model/tokenizer.json", "report"),
    ("3_gradients/grad_sum.safetensors", "report"),
    ("config.yaml", "report"),
    ("diagnostics/heatmap.svg", "report"),
    ("2_warmup/theta_bar/model.safetensors", "evaluate"),
    ("metrics.jsonl", "evaluate"),
    (".lock", "evaluate"),
]


@pytest.mark.parametrize(("entry", "command"), HOLLOW)
def test_a_terabyte_of_nothing(entry: str, command: str, scene: Scene) -> None:
    """Refused by name, or made again; in no case hashed or read."""
    hollow(scene.run, entry)
    said = scene.dualsft(*words_for(command, scene.run))
    assert said.code == (1 if command == "report" or entry == "metrics.jsonl" else 0), said.text
    if said.code:
        scene.check_refusal(said, [entry])
    else:
        assert (scene.run / "7_evaluation/results.json").is_file()


def test_one_file_under_many_names(scene: Scene) -> None:
    """Hard links: what lies on the disk once would be hashed a thousand times."""
    stage = scene.run / "5_selection"
    (stage / "n0").write_bytes(os.urandom(1 << 20))
    for i in range(1, 1000):
        os.link(stage / "n0", stage / f"n{i}")
    said = scene.dualsft("report", str(scene.run))
    assert said.code == 1, said.text
    scene.check_refusal(said, ["5_selection/hard links"])


@pytest.mark.parametrize("command", ["report", "finetune"])
def test_a_stage_of_many_files(command: str, scene: Scene) -> None:
    """Refused, or made again; the files that no stage wrote are not all listed."""
    (scene.run / "5_selection/more").mkdir()
    for i in range(25_000):
        (scene.run / f"5_selection/more/f{i}").touch()
    said = scene.dualsft(*words_for(command, scene.run))
    assert said.code == (1 if command == "report" else 0) and len(said.text) < 20_000, said.text
    if said.code:
        scene.check_refusal(said, ["5_selection/more"])


def nest(folder: Path, depth: int) -> None:
    """Folders in folders, deeper than any path can be long."""
    handle = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=handle)
        below = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)


@pytest.mark.parametrize("where", ["5_selection", "5_selection.part", "5_selection.work"])
def test_folders_of_any_depth(where: str, scene: Scene) -> None:
    """The stage is made again, and the deep folder is gone."""
    (scene.run / where).mkdir(exist_ok=True)
    nest(scene.run / where, 3000)
    (scene.outside / "kept").mkdir()
    (scene.run / where / "d" / "link").symlink_to(scene.outside)
    try:
        said = scene.dualsft(*words_for("select", scene.run))
        assert said.code == 0, said.text
        assert not (scene.run / "5_selection/d").exists() and (scene.outside / "kept").is_dir()
        if where != "5_selection":
            assert not (scene.run / where).exists()
    finally:  # pytest cannot remove it either
        subprocess.run(["rm", "-rf", str(scene.run)], check=True)


LAUGHS = "a: &a [x, x]\nb: &b [*a, *a]\nseed: [*b, *b]\n"
SETTINGS = {
    "aliases": lambda text: LAUGHS + text.replace("seed:", "old:"),
    "too long": lambda text: text + "# " + "x" * 150_000 + "\n",
    "too many keys": lambda text: text + "".join(f"k{i}: 1\n" for i in range(9000)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("command", ["report", "split", "diagnose"])
def test_settings_that_cost_too_much(name: str, command: str, scene: Scene) -> None:
    """A few lines of aliases stand for gigabytes; the whole page would show them."""
    text = (scene.run / "config.yaml").read_text().partition("\n")[2]
    (scene.run / "config.yaml").write_text(SETTINGS[name](text))
    said = scene.attempt(*words_for(command, scene.run))
    assert said.code != 0 or (name, command) == ("too many keys", "report"), said.text
    assert len(said.text) < 20_000, "every problem is told"


COUNTS: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**7},
    "no layers": {"num_hidden_layers": 0},
    "layers, negative": {"num_hidden_layers": -1},
    "layers, listed": {"model_type": "qwen3", "num_hidden_layers": 10**7},
    "experts": {"model_type": "mixtral", "num_local_experts": 10**8},
    "labels": {"num_labels": 1 << 24},
    "vocabulary": {"vocab_size": 1 << 24},
    "width": {"hidden_size": 1 << 20},
    "a long list": {"eos_token_id": list(range(200_000))},
    "nested": {"text_config": {"num_hidden_layers": 10**7}},
    "repeated": {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 10**9]]},
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    ("place", "command"),
    [("6_finetune/model", "evaluate"), ("6_finetune/model", "report")]
    + [("2_warmup/theta_bar", "score"), ("2_warmup/theta_bar", "gap")],
)
def test_a_model_of_absurd_size(name: str, place: str, command: str, scene: Scene) -> None:
    """Refused by folder and key before any part of it is built; the report needs no model."""
    stage, _, folder = place.partition("/")
    in_json(f"{folder}/config.json", COUNTS[name])(scene.run / stage)
    words = words_for(command, scene.run)
    if command == "gap":
        words = ["diagnose", str(scene.run), "coordination_gap"]
    said = scene.attempt(*words, names=[f"{place}/config.json"])
    assert said.code == 2 or command == "report", said.text


def test_a_model_that_asks_for_a_million_beams(scene: Scene) -> None:
    """The answer to a prompt is greedy, whatever the generation_config.json of the model says."""
    many = {"num_beams": 10**6, "num_return_sequences": 10**6}
    in_json("model/generation_config.json", many)(scene.run / "6_finetune")
    assert scene.attempt(*words_for("evaluate", scene.run)).code == 0


def replacing(old: dict[str, str], new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


DECODERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "everywhere": lambda t: t.update(decoder=replacing({"String": ""}, "x" * 10**6)),
    "nested": lambda t: t.update(
        decoder={"type": "Sequence", "decoders": [replacing({"Regex": "."}, "x" * 10)] * 9}
    ),
    "long token": lambda t: t["added_tokens"].append(
        t["added_tokens"][0] | {"id": len(t["model"]["vocab"]), "content": "Z" * 10**6}
    ),
    "added tokens": lambda t: t["added_tokens"].extend(
        t["added_tokens"][0] | {"id": 1000 + i, "content": f"<t{i}>"} for i in range(120_000)
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_tokenizer_that_writes_without_end(name: str, scene: Scene) -> None:
    """The page is written without texts, and says why."""
    path = scene.run / "6_finetune/model/tokenizer.json"
    content = json.loads(path.read_text())
    DECODERS[name](content)
    path.write_text(json.dumps(content))
    reseal(scene.run / "6_finetune")
    if name == "long token":  # every token of the corpus is this one
        ids = [content["added_tokens"][-1]["id"]] * 30
        in_table("tokens.parquet", "input_ids", ids)(scene.run / "1_split")
        in_table("tokens.parquet", "labels", ids)(scene.run / "1_split")
    said = scene.attempt("report", str(scene.run))
    assert said.code == 0, said.text
    page = (scene.run / "report.html").read_text()
    assert "repeats text" in page or "added tokens" in page or "a token or pattern of" in page


@pytest.mark.parametrize("what", ["many", "large"])
def test_figures_that_no_page_can_hold(what: str, scene: Scene) -> None:
    for i in range(600 if what == "many" else 3):
        path = scene.run / f"diagnostics/heatmap{i}.svg"
        path.write_bytes(b"")
        os.truncate(path, 0 if what == "many" else 30 << 20)
    said = scene.attempt("report", str(scene.run), names=["diagnostics"])
    assert said.code == 1, said.text


# --- what is shown is what was written -----------------------------------------------------------


def unlist(name: str) -> Callable[[Path], None]:
    """The file is there and its manifest, sealed again, does not know it."""
    return lambda folder: in_manifest(lambda body: body["files"].pop(f"{folder.name}/{name}"))(
        folder.parent
    )


def shown(file: str, **values: Any) -> tuple[str, Callable[[Path], object]]:
    """The file with other values, beside a seal that is no longer right."""
    return file, in_json(file, values, sealed=False)


SHOWN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "swapped entry": (
        "tokenizer.json",
        lambda folder: swap_vocabulary(folder / "tokenizer.json", "PWNED"),
    ),
    "other settings": shown("tokenizer_config.json", eos_token="PWNED"),
    "other template": (
        "chat_template.jinja",
        lambda folder: (folder / "chat_template.jinja").write_text("PWNED"),
    ),
    "added tokens": shown("added_tokens.json", PWNED=300),
    "special tokens": shown("special_tokens_map.json", eos_token="PWNED"),
    "vocabulary of another kind": shown("vocab.json", PWNED=1),
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


# --- files of the user that the settings of the folder name ---------------------------------------


@pytest.mark.parametrize(
    "key",
    ["data.path", "data.val_path", "data.anchor_path", "data.template_file", "evaluation.files"],
)
@pytest.mark.parametrize(
    "command", ["split", "score", "select", "finetune", "evaluate", "diagnose"]
)
def test_a_private_file_named_in_the_settings(command: str, key: str, scene: Scene) -> None:
    """It would become the corpus, and its rows selected.jsonl; on the command line it may."""
    private = scene.outside / "private.jsonl"
    rows = [{"prompt": f"{SECRET} {i}", "response": f"{SECRET} and more {i}"} for i in range(60)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    private.write_text(f"{SECRET}" if key == "data.template_file" else text)
    value = f"{{mine: {private}}}" if key == "evaluation.files" else str(private)
    scene.settings(f"{key}={value}", sealed=True)
    said = scene.attempt(*words_for(command, scene.run), names=[f"{key}/config.yaml"])
    assert said.code == 2 and "give it on this command line" in said.text, said.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.path", "builtin:zeno/corpus,PRIVATE"),
        ("data.val_path", "builtin:zeno/trusted, PRIVATE"),
        ("evaluation.files", "builtin:PRIVATE"),  # a file of the name builtin
        ("evaluation.files", "{mine: 'builtin:zeno/held_out,PRIVATE'}"),
        ("evaluation.data_dir", "builtin:PRIVATE"),
        ("data.template_file", "builtin:PRIVATE"),
    ],
)
def test_a_private_file_behind_a_packaged_name(key: str, value: str, scene: Scene) -> None:
    private = scene.outside / "private.jsonl"
    row = {"prompt": SECRET, "response": f"{SECRET} and more"}
    private.write_text(json.dumps(row) + "\n")
    scene.settings(f"{key}={value.replace('PRIVATE', str(private))}", sealed=True)
    words = [*words_for("select", scene.run), f"model.path={scene.model}"]
    words += [] if key == "data.path" else [f"data.path={scene.corpus}"]
    said = scene.attempt(*words, names=[f"{key}/config.yaml"])
    assert said.code == 2 and f"{key}: " in said.text, said.text


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.revision", "refs/pr/1"), ("data.revision", "main"), ("data.dataset", "payroll")],
)
def test_a_choice_among_files_of_the_user(key: str, value: str, scene: Scene) -> None:
    """The version of a model, or the entry of a data folder, that a stranger chose."""
    scene.settings(f"{key}={value}", sealed=True)
    words = [*words_for("select", scene.run), f"model.path={scene.model}"]
    said = scene.attempt(*words, f"data.path={scene.corpus}", names=[f"{key}/config.yaml"])
    assert said.code == 2 and f"{key}: " in said.text, said.text


def test_settings_behind_a_link_in_the_folder(scene: Scene) -> None:
    private = scene.outside / "private.jsonl"
    private.write_text((json.dumps({"prompt": SECRET, "response": SECRET}) + "\n") * 60)
    scene.settings(f"data.path={private}", sealed=False)
    (scene.run / ".x").mkdir()
    (scene.run / "config.yaml").rename(scene.run / ".x/c.yaml")
    (scene.run / "config.yaml").symlink_to(".x/c.yaml")
    words = ["run", str(scene.run / "config.yaml"), "--out", str(scene.root / "new")]
    said = scene.attempt(*words, names=["data.path"])
    assert said.code == 2, said.text


@pytest.mark.parametrize("sealed", [True, False])
def test_a_private_file_in_settings_that_the_user_names(sealed: bool, scene: Scene) -> None:
    """`dualsft run RUN/config.yaml --out RUN`, which refusals give as their cure."""
    private = scene.outside / "private.jsonl"
    row = {"prompt": SECRET, "response": f"{SECRET} and more"}
    private.write_text((json.dumps(row) + "\n") * 60)
    scene.settings(f"data.path={private}", sealed=sealed)
    words = ["run", str(scene.run / "config.yaml"), "--out", str(scene.run)]
    said = scene.attempt(*words, names=["data.path"])
    assert said.code == 2 and "give it on this command line" in said.text, said.text


@pytest.mark.parametrize("gone", [["1_split"], ["1_split", "manifest.json"]])
def test_settings_of_a_folder_that_lacks_a_part(gone: list[str], scene: Scene) -> None:
    private = scene.outside / "private.jsonl"
    private.write_text((json.dumps({"prompt": SECRET, "response": SECRET}) + "\n") * 60)
    scene.settings(f"data.path={private}", sealed=False)
    for name in gone:
        (scene.run / name).rename(scene.root / f"gone-{name}")
    words = ["run", str(scene.run / "config.yaml"), "--out", str(scene.root / "new")]
    said = scene.attempt(*words, f"model.path={scene.model}", names=["data.path"])
    assert said.code == 2, said.text


def test_results_of_diagnostics_are_checked_before_they_are_shown(scene: Scene) -> None:
    assert scene.dualsft("diagnose", str(scene.run), "param_statistics").code == 0
    assert scene.dualsft("report", str(scene.run)).code == 0
    assert "Not verified" not in (scene.run / "report.html").read_text()
    for ending in (".json", ".svg"):
        path = scene.run / f"diagnostics/param_statistics{ending}"
        before = path.read_text()
        path.write_text(before.replace("0.", "0.9", 1))
        for words in (["report"], ["diagnose", "param_statistics"])[
            : 2 if ending == ".json" else 1
        ]:
            command = [words[0], str(scene.run), *words[1:]]
            said = scene.attempt(*command, names=[f"diagnostics/{path.name}"])
            assert said.code != 0, said.text
        path.write_text(before)
    (scene.run / "diagnostics/seals.json").unlink()
    assert scene.dualsft("report", str(scene.run)).code == 0
    assert "Not verified" in (scene.run / "report.html").read_text()


@pytest.mark.parametrize("kind", ["pipe", "endless", "link"])
@pytest.mark.parametrize("name", ["config.json", "my_config_2.json"])
def test_special_files_beside_a_gguf_file(
    name: str, kind: str, bare: Scene, tmp_path: Path
) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    write_gguf(bare.model, folder / "tiny.gguf")
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "endless" else bare.secret)
    words = ["check", *small_run(folder / "tiny.gguf", bare.corpus)]
    said = bare.attempt(*words, names=[name])
    assert said.code == 2, said.text


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_settings_of_matplotlib_in_the_folder(kind: str, tmp_path: Path) -> None:
    """They could start LaTeX; a pipe would be waited for."""
    if kind == "pipe":
        os.mkfifo(tmp_path / "matplotlibrc")
    else:
        (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    code = "from dualsft.lab.plots import panels; panels(); import matplotlib; "
    code += "sys.exit(bool(matplotlib.rcParams['text.usetex']))"
    source = str(Path(dualsft.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": source}
    words = [sys.executable, "-c", f"import sys; {code}"]
    subprocess.run(words, cwd=tmp_path, env=env, timeout=60, check=True)


@pytest.mark.parametrize(
    ("file", "change", "code"),
    [
        ("config.json", {"return_dict": False}, 0),
        ("generation_config.json", {"max_length": "x", "eos_token_id": "x"}, 1),
    ],
)
def test_settings_of_a_model_that_break_its_answers(
    file: str, change: dict[str, Any], code: int, scene: Scene
) -> None:
    model = scene.run / "6_finetune/model"
    path = model / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | change))
    reseal(model.parent)
    said = scene.attempt("evaluate", str(scene.run), "evaluation.prompt=Say alpha", names=[file])
    assert said.code == code, said.text


def test_paths_given_again_serve_a_received_folder(scene: Scene) -> None:
    scene.settings("select.data_budget=0.2", sealed=True)  # not the text that this user wrote
    words = ["select", str(scene.run)]
    said = scene.attempt(*words, names=["model.path", "data.path"])
    assert said.code == 2, said.text
    said = scene.dualsft(*words, f"model.path={scene.model}", f"data.path={scene.corpus}")
    assert said.code == 0, said.text
    assert scene.dualsft(*words).code == 0  # config.yaml is this user's now


# --- consent to run code -------------------------------------------------------------------------

CONSENT_WORDS = ["trust_remote_code", "auto_map", "evil.py", "config.yaml"]


def gap_or(command: str, run: Path) -> list[str]:
    """`words_for`, with a diagnostic that loads the models."""
    if command == "diagnose":
        return ["diagnose", str(run), "coordination_gap"]
    return words_for(command, run)


@pytest.mark.parametrize("how", ["sealed", "unsealed", "forged"])
@pytest.mark.parametrize("command", ["report", "score", "evaluate", "diagnose"])
def test_consent_in_the_settings_of_the_folder(command: str, how: str, scene: Scene) -> None:
    """The models inside the folder bring code, and its config.yaml trusts it."""
    for place in ("6_finetune/model", "2_warmup/theta_bar"):
        poison(scene.run / place, scene.canary)
        reseal((scene.run / place).parent)
    scene.settings(CONSENT, sealed=how != "unsealed")
    if how == "forged":
        forge(scene.run)
    scene.attempt(*gap_or(command, scene.run), names=CONSENT_WORDS)


@pytest.mark.parametrize(
    "command",
    ["report", "split", "score", "finetune", "evaluate", "diagnose", "run", "check", "estimate"],
)
def test_consent_for_a_model_elsewhere(command: str, scene: Scene) -> None:
    """config.yaml names a hostile model and trusts it; also as the recipe of a new run."""
    recipe = command in ("run", "check", "estimate")
    scene.settings(f"model.path={scene.evil_model()}", CONSENT, sealed=not recipe)
    words = gap_or(command, scene.run)
    if recipe:
        out = [] if command == "check" else ["--out", str(scene.root / "new")]
        words = [command, str(scene.run / "config.yaml"), *out]
    said = scene.attempt(*words, names=CONSENT_WORDS)
    assert said.code != 0 or command == "report", said.text


@pytest.mark.parametrize("elsewhere", [False, True], ids=["files", "another repository"])
def test_consent_for_ones_own_model_is_none_for_the_folder(elsewhere: bool, scene: Scene) -> None:
    theta_bar = scene.run / "2_warmup/theta_bar"
    poison(theta_bar, scene.canary)
    if elsewhere:
        config = json.loads((theta_bar / "config.json").read_text())
        config["auto_map"] = {
            kind: f"evil/repo--{name}" for kind, name in config["auto_map"].items()
        }
        (theta_bar / "config.json").write_text(json.dumps(config))
        for file in theta_bar.glob("*.py"):
            file.unlink()
    reseal(theta_bar.parent)
    paths = [f"model.path={scene.model}", f"data.path={scene.corpus}", CONSENT]
    said = scene.attempt(
        "diagnose", str(scene.run), "coordination_gap", *paths, names=["theta_bar"]
    )
    assert said.code == 1 and "does not have" in said.text, said.text


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


def test_a_run_of_ones_own_with_consent(bare: Scene) -> None:
    """Given with each command it works; it is stored nowhere; the report never needs it."""
    scene, count, custom = bare, bare.root / "imports", bare.root / "custom"
    shutil.copytree(scene.model, custom)
    poison(custom, count)  # its own code, which leaves a trace
    run, out = str(scene.run), ["--out", str(scene.run)]
    words = small_run(custom, scene.corpus)
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


# --- comparisons ---------------------------------------------------------------------------------

CELL = "cells/default/default/default/random/seed-42"


def matrix_file(folder: Path, **content: Any) -> Path:
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump({"name": "test", "seeds": [42], **content}))
    return path


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
def comparing(bare: Scene, compared: Path) -> Scene:
    shutil.copytree(compared, bare.out)
    return bare


def compare(scene: Scene, *more: str, **content: Any) -> list[str]:
    matrix = matrix_file(scene.root, **{"methods": ["random"], **content})
    words = small_run(scene.model, scene.corpus)
    return ["compare", str(matrix), "--out", str(scene.out), *words, *more]


def test_an_honest_comparison_is_served(comparing: Scene) -> None:
    for more in (["--tables"], [], ["finetune.epochs=3"]):
        said = comparing.attempt(*compare(comparing, *more))
        assert said.code == 0, said.text


def test_a_cell_of_a_terabyte(comparing: Scene) -> None:
    """It is named and left out of the tables, of which none is left."""
    hollow(comparing.out / CELL, "6_finetune/model/model.safetensors")
    said = comparing.dualsft(*compare(comparing, "--tables"))
    assert said.code == 2, said.text
    comparing.check_refusal(said, [f"{CELL}/6_finetune/model.safetensors"])


CELLS = [
    (place, kind, more)
    for place in ("cells", "cells/default", CELL)
    for kind in ("moved out", "folder link", "dangling", "pipe")
    for more in ("--tables", "finetune.epochs=3")
]
CELLS += [
    (f"{CELL}/{entry}", kind, "finetune.epochs=3")
    for entry in ("6_finetune", "1_split", ".lock", "metrics.jsonl")
    for kind in ("folder link", "link", "dangling", "pipe")
]


@pytest.mark.parametrize(("place", "kind", "more"), CELLS)
def test_folders_and_cells_of_a_comparison(
    place: str, kind: str, more: str, comparing: Scene
) -> None:
    comparing.plant(kind, comparing.out / place)
    named = place if place in ("cells", "cells/default", CELL) else place.removeprefix(f"{CELL}/")
    comparing.attempt(*compare(comparing, more), names=[named])


@pytest.mark.parametrize("place", ["cells", "cells/default", CELL, f"{CELL}/1_split"])
def test_a_file_where_a_folder_of_a_comparison_belongs(place: str, comparing: Scene) -> None:
    clear(comparing.out / place)
    (comparing.out / place).write_text("a file\n")
    comparing.attempt(*compare(comparing, "finetune.epochs=3"), names=[place.split("/")[-1]])


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "hard link"])
@pytest.mark.parametrize("name", ["cells.json", "comparison.md", "comparison.html", "figure"])
def test_files_of_a_comparison(name: str, kind: str, comparing: Scene) -> None:
    methods = ["random", "sft"] if name == "figure" else ["random"]
    place = comparing.out / name
    if name == "figure":  # one that several methods are drawn in
        assert comparing.dualsft(*compare(comparing, methods=methods)).code == 0
        place = min(comparing.out.glob("*.svg"))
    comparing.plant(kind, place, f"{SECRET}\n".encode())
    comparing.attempt(*compare(comparing, methods=methods), names=[place.name])


@pytest.mark.parametrize("stage", ["6_finetune", "2_warmup", "5_selection/start"])
def test_pruning_removes_nothing_outside(stage: str, comparing: Scene) -> None:
    """`keep: results` removes the weights of finished cells, but not those behind a link."""
    place = comparing.out / CELL / stage
    if not place.is_dir():
        place.mkdir()
        save_file({"a": torch.zeros(1)}, place / "a.safetensors")
    comparing.plant("moved out", place)
    assert list(comparing.outside.rglob("*.safetensors"))
    comparing.attempt(*compare(comparing, keep="results"), names=[stage])


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
    comparing.plant(kind, place)
    comparing.attempt(*words, names=[place.name])


@pytest.mark.parametrize("where", ["settings", "models", "methods", "base", "base_and_model"])
def test_consent_in_a_matrix(where: str, comparing: Scene) -> None:
    """A comparison's file trusts the code of the model that it names."""
    evil = comparing.evil_model()
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


@pytest.mark.parametrize("kind", LINKS)
def test_merging_the_delta_of_a_folder(kind: str, scene: Scene) -> None:
    """A link leads to a sound delta of another model, whose name is the secret."""
    delta = scene.run / "6_finetune/delta.safetensors"
    header = {"format": "dualsft-delta-1", "base_model": SECRET, "base_hash": "0" * 64}
    theirs = scene.outside / "their.safetensors"
    save_file(load_file(delta), theirs, metadata=header)
    scene.plant(kind, delta, theirs.read_bytes())
    words = ("export", "merge", str(scene.model), str(delta))
    said = scene.attempt(*words, str(scene.root / "merged"), names=["delta.safetensors"])
    assert said.code != 0 and not (scene.root / "merged").exists()


EXTRACTED = [
    ("6_finetune/model", "moved out"),
    ("6_finetune/model/model.safetensors", "link"),
    ("6_finetune/model/config.json", "pipe"),
    ("6_finetune/model/model.safetensors", "pipe"),
    ("6_finetune/model/tokenizer.json", "pipe"),
]


@pytest.mark.parametrize(("entry", "kind"), EXTRACTED)
def test_extracting_from_the_model_of_a_folder(entry: str, kind: str, scene: Scene) -> None:
    """Someone else's weights do not become a delta, and no pipe is waited for."""
    model = scene.run / "6_finetune/model"
    if kind != "pipe":
        hide_in_weights(model)
        reseal(model.parent)
    scene.plant(kind, entry, (scene.run / entry).read_bytes() if kind == "link" else None)
    words = ("export", "extract", str(scene.model), str(model), str(scene.root / "delta"))
    said = scene.attempt(*words, names=[entry, Path(entry).name])
    assert said.code != 0, said.text


# --- .gguf files ---------------------------------------------------------------------------------


def adapter_beside(scene: Scene, folder: Path) -> None:
    """It says that the weights are an adapter of a model elsewhere, which has a GGUF file too."""
    base = scene.root / "base"
    shutil.copytree(scene.model, base)
    hide_in_weights(base)
    write_gguf(base, base / "tiny.gguf")
    scene.own.add("base")
    told = {"base_model_name_or_path": str(base), "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(told))


@pytest.mark.parametrize("name", ["code", "code of the tokenizer", "adapter"])
def test_what_lies_beside_a_gguf_file(name: str, bare: Scene, tmp_path: Path) -> None:
    """No code, no question that "y" would answer, no other weights; refused or converted alone."""
    scene, folder = bare, tmp_path / "downloads"
    folder.mkdir()
    file = folder / "tiny.gguf"
    write_gguf(scene.model, file)
    if name == "adapter":
        adapter_beside(scene, folder)
    else:
        poison(folder, scene.canary)
    if name == "code of the tokenizer":
        (folder / "config.json").unlink()
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
    words = ["run", "--out", str(scene.run), "--until", "split", *small_run(file, scene.corpus)]
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
