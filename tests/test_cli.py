"""The command line as a stranger uses it: real processes, exit codes, invariance of the result."""

from __future__ import annotations

import json
import os
import random
import resource
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Runner, corpus_rows, small_run, write_jsonl
from safetensors.torch import load_file
from typer.testing import CliRunner

import dualsft
from dualsft.cli import _explained, _guarded, app, escaped, folder_config
from dualsft.config.completion import complete_setting
from dualsft.config.methods import registry
from dualsft.model.delta import merge

Folders = Callable[[str], Path]


def test_output_that_fails_ends_no_run(model_folder: Folders, corpus: Path, tmp_path: Path) -> None:
    """A full disk for the log, a reader that leaves, closed streams."""
    source = str(Path(dualsft.__file__).parents[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    words = shlex.join(small_run(model_folder("llama"), corpus))
    for name, where in {"full": "> /dev/full 2>&1", "pipe": "| true", "closed": ">&- 2>&-"}.items():
        run = f"{sys.executable} -m dualsft run --out {tmp_path / name} --until split {words}"
        line = f"{run} {where}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], env=env, cwd=tmp_path, check=False)
        assert done.returncode == 0, name
        assert (tmp_path / name / "1_split/manifest.json").is_file()


def test_a_terminal_obeys_nothing_that_a_row_or_a_setting_contains(tmp_path: Path) -> None:
    rows = [{"prompt": "Say \x1b[31mred", "response": "\x1b]0;title\x07 \u202etxt"}] * 3
    path = write_jsonl(tmp_path / "a\x1b[2Jb.jsonl", [*rows, {"prompt": "\x9b31m"}])
    words = [f"data.path={path}", "model.path=\x1b[31m", "sc\x1bore=1"]
    done = cli("check", *words, code=2)
    said = done.stdout + done.stderr
    assert "\\u001b" in said
    assert not set(said) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_every_control_and_direction_character_is_written_out() -> None:
    kinds = ("Cc", "Zl", "Zp")
    wanted = {chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) in kinds}
    wanted |= set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    shown = {c for c in map(chr, range(0x110000)) if escaped(c) == c}
    assert wanted & shown == {"\n", "\t"} and shown | wanted == set(map(chr, range(0x110000)))


@pytest.mark.parametrize(
    "words",
    [["--{}"], ["{}"], ["report", "--{}"], ["export", "{}"], ["export", "--{}", "x"]],
    ids=" ".join,
)
def test_a_usage_error_quotes_safely(words: list[str]) -> None:
    odd = "a\u202eb\x1b[31m\u200fc"
    done = CliRunner().invoke(app, [word.format(odd) for word in words])
    assert done.exit_code == 2 and not set(done.output) & {"\x1b", "\u202e", "\u200f"}
    assert "\\u202eb" in done.output


def cli(*words: str, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m dualsft …` in a process of its own."""
    source = str(Path(dualsft.__file__).parents[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "dualsft", *words],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def scores_by_text(run: Path, source: Path) -> dict[str, float]:
    """Score of each distinct row text, whatever its place in the file."""
    rows = source.read_text(encoding="utf-8").splitlines()
    index = dict(
        zip(
            *pq.read_table(run / "1_split/split.parquet", columns=["id", "index"])
            .to_pydict()
            .values(),
            strict=True,
        )
    )
    table = pq.read_table(run / "4_scores/examples.parquet").to_pydict()
    return {rows[index[i]]: s for i, s in zip(table["id"], table["score"], strict=True)}


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Folders, corpus: Path
) -> Path:
    out = tmp_path_factory.mktemp("reference") / "run"
    cli("run", "--out", str(out), *small_run(model_folder("llama"), corpus))
    return out


@pytest.mark.parametrize(
    "change",
    ["score.batch_tokens=40", "data.padding_side=left", "finetune.micro_batch_size=1", "order"],
)
def test_the_result_does_not_depend_on_how_it_is_computed(
    change: str, reference: Path, make_run: Runner, corpus: Path, tmp_path: Path
) -> None:
    """Same scores to fp32 rounding, the same selection, on both sides."""
    source = corpus
    if change == "order":
        rows = corpus_rows()
        random.Random(5).shuffle(rows)
        source = write_jsonl(tmp_path / "shuffled.jsonl", rows)
        change = f"data.path={source}"
    out = make_run(change, until="selection")
    ours, theirs = scores_by_text(out, source), scores_by_text(reference, corpus)
    assert ours.keys() == theirs.keys()
    values = np.array([[ours[t], theirs[t]] for t in ours])
    assert np.abs(values[:, 0] - values[:, 1]).max() <= 1e-4 * np.abs(values).max()
    chosen = [
        sorted((r / "5_selection/selected.jsonl").read_text().splitlines())
        for r in (out, reference)
    ]
    assert chosen[0] == chosen[1]
    masks = [load_file(r / "5_selection/mask.safetensors") for r in (out, reference)]
    same = sum(int(torch.isin(masks[0][n], masks[1][n]).sum()) for n in masks[0])
    total = sum(i.numel() for i in masks[0].values())
    assert total > 100 and same >= total - 2  # two entries may trade places inside fp32 rounding


def test_same_seed_same_bits(
    reference: Path, model_folder: Folders, corpus: Path, tmp_path: Path, make_run: Runner
) -> None:
    """A second process gives every number of the first; another seed another split."""
    out = tmp_path / "again"
    cli("run", "--out", str(out), *small_run(model_folder("llama"), corpus))
    manifests = sorted(p.relative_to(reference) for p in reference.glob("*/manifest.json"))
    assert len(manifests) == 7
    for path in manifests:
        one, two = (json.loads((r / path).read_text())["files"] for r in (reference, out))
        assert one == two
    other = make_run("seed=7", until="split")
    splits = [(r / "1_split/split.parquet").read_bytes() for r in (reference, other)]
    assert splits[0] != splits[1]


def test_export_merge_and_extract(reference: Path, model_folder: Folders, tmp_path: Path) -> None:
    """base + delta is the merged model bit for bit, and extracting finds the delta again."""
    base, delta = str(model_folder("llama")), str(reference / "6_finetune/delta.safetensors")
    merged = tmp_path / "merged"
    cli("export", "merge", base, delta, str(merged))
    weights = load_file(merged / "model.safetensors")
    tuned = load_file(reference / "6_finetune/model/model.safetensors")
    assert weights.keys() == tuned.keys()
    assert all(torch.equal(weights[n], tuned[n]) for n in tuned)
    assert (merged / "tokenizer.json").is_file()
    cli("export", "extract", base, str(merged), str(tmp_path / "again.safetensors"))
    one, two = load_file(delta), load_file(tmp_path / "again.safetensors")
    moved = [name for name in two if name.endswith(".idx")]
    for name in moved:  # an entry that training moved back to its own bits is in no difference
        assert bool(torch.isin(two[name], one[name]).all())
    given = sum(index.numel() for name, index in one.items() if name.endswith(".idx"))
    assert sum(two[name].numel() for name in moved) > 0.9 * given > 0
    with pytest.raises(dualsft.ConfigError, match="made from"):
        merge(str(model_folder("qwen2")), [Path(delta)], tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_run_ends_with_its_results_and_quiet_shows_nothing_else(
    reference: Path, model_folder: Folders, corpus: Path
) -> None:
    words = ["run", "--out", str(reference), *small_run(model_folder("llama"), corpus)]
    plain, quiet = cli(*words), cli(*words, "--quiet")
    verbose = cli("--verbose", *words)
    results = json.loads((reference / "7_evaluation/results.json").read_text())["files"]
    validation = results["validation"]
    kl = validation["after"]["kl_to_base"]
    losses = " ".join(f"{validation[when]['loss']:.3f}" for when in ("before", "after"))
    assert f"new skill (validation) {losses} KL to base {kl:.3f}" in " ".join(quiet.stdout.split())
    for said in (f"run folder: {reference}", "rows selected: 12 of 120 (10.00 %)", "report.html"):
        assert said in quiet.stdout
    assert plain.stdout.endswith(quiet.stdout) and "[split] reused" in plain.stdout
    assert "[split]" not in quiet.stdout and quiet.stderr == "" == plain.stderr
    assert verbose.stdout == plain.stdout and "dualsft.runs.pipeline: split: " in verbose.stderr
    words = ["run", "--out", str(reference), "scor.lam=1"]
    assert cli("--quiet", *words, code=2).stderr == cli(*words, code=2).stderr != ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("run rec", ["recommended"]),
        ("run --until sc", ["scores"]),
        ("select runs/mine select.var", ["select.variant="]),
        ("run select.variant = du", ["dual"]),  # as bash splits words
        ("run select.variant =", ["dual", "data", "param"]),
        ("run log.report_to = tensorboard,wa", ["tensorboard,wandb"]),
        ("run method.params = s2", ["s2ft"]),
        ("diagnose runs/mine his", ["histograms"]),
        ("diagnose runs/mine diagnose.fidelity.prot", ["diagnose.fidelity.protocol="]),
        ("compare qu", ["quick"]),
    ],
)
def test_completion_in_bash(
    words: str,
    found: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["dualsft", *words.split()]
    monkeypatch.setenv("COMP_WORDS", "\n".join(given))
    monkeypatch.setenv("COMP_CWORD", str(len(given) - 1))
    monkeypatch.setenv("_DUALSFT_COMPLETE", "complete_bash")
    with pytest.raises(SystemExit):
        app(prog_name="dualsft")
    assert capsys.readouterr().out.split() == found
    monkeypatch.delenv("COMP_WORDS")  # as in zsh and fish
    key, _, value = words.rpartition(" = ")
    if key and not key.endswith("="):
        whole = f"{key.split()[-1]}={value}"
        assert complete_setting(whole) == [f"{key.split()[-1]}={found[0]}"]


def test_check_says_what_would_happen(model_folder: Folders, corpus: Path) -> None:
    said = cli("check", *small_run(model_folder("gemma3"), corpus)).stdout
    assert "candidates (block_linear): 14 tensors" in said
    assert said.count("⟦") == 3 and "BOS" in said and "check passed" in said
    assert "gradient of one example (autograd)" in said and "would train" in said


def test_methods_lists_every_method() -> None:
    said = cli("methods", "--debug").stdout  # which may stand anywhere
    assert {"data", "params"} <= set(registry()) and all(registry().values())
    for axis, entries in registry().items():
        for entry in entries.values():
            assert f"method.{axis}={entry.name}\n" in said
            assert entry.deviations in said and all(key in said for key in entry.specs())


def test_evaluation_of_given_files(make_run: Runner, tmp_path: Path) -> None:
    extra = write_jsonl(tmp_path / "extra.jsonl", corpus_rows(20, seed=9))
    out = make_run(f"evaluation.files=extra:{extra}", "evaluation.prompt=Say alpha")
    results = json.loads((out / "7_evaluation/results.json").read_text())
    assert results["files"].keys() == {"extra", "validation"}
    facts = results["files"]["extra"]
    assert facts["examples"] == 20 and facts["after"]["kl_to_base"] > 0
    assert facts["before"]["perplexity"] > 1 and results["prompt"]["before"] != ""


def test_an_unforeseen_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(problem: Exception) -> Callable[[], None]:
        def action() -> None:
            raise problem

        return action

    assert _guarded(fails(KeyError("x")), debug=False) == 1
    assert _guarded(fails(torch.OutOfMemoryError("CUDA out of memory")), debug=False) == 1
    said = capsys.readouterr().err
    assert "unexpected KeyError" in said and "--debug" in said
    assert "out of memory" in said and "score.batch_tokens" in said


def test_a_stage_command_keeps_the_settings_of_its_folder(reference: Path) -> None:
    given = dualsft.load(str(reference / "config.yaml"))
    assert folder_config(reference, [f"model.path={given.model.path}"], "split") == given


def test_pages_are_shown_without_the_repository(tmp_path: Path) -> None:
    """The pages of docs/, by name or file name; a page that does not exist is refused."""
    pages = {path.stem: path for path in (Path(dualsft.__file__).parents[2] / "docs").glob("*.md")}
    listed = cli("docs", cwd=tmp_path).stdout.splitlines()
    assert {line.split()[0] for line in listed} == pages.keys() and len(pages) > 15
    assert cli("docs", "docs/data.md", cwd=tmp_path).stdout == f"{pages['data'].read_text()}\n"
    assert "use one of adapters" in cli("docs", "dataa", code=2).stderr


def test_a_limited_address_space_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, resource.RLIM_INFINITY))
    lines, code = _explained(MemoryError())
    assert code == 1 and "1,073,741,824 bytes of address space; see `ulimit -v`" in lines[1]
    monkeypatch.undo()
    assert len(_explained(MemoryError())[0]) == 1
