"""One contract for every registered method, whatever it does (`runs/method.py`).

The budget holds exactly; the seed decides everything; examples come from D_train alone; no file of
the evaluation is read before the evaluation; frozen weights keep their bits; a stopped run goes on
to the same bits; two architectures; what it took is recorded. A method that is registered is in
all of it: nothing here knows a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import Runner, corpus_rows, write_jsonl
from faults import stopped_at
from safetensors.torch import load_file

from dualsft.config.methods import AXES, ROWS, Axis, Entry, registry, row, row_name
from dualsft.config.settings import ConfigError
from dualsft.system.signals import Interrupted

ENTRIES = [entry for axis in AXES for entry in registry()[axis].values()]
SELECTING = [e for e in ENTRIES if e.axis in ("data", "params")]


def named(entry: Entry) -> str:
    return f"{entry.axis}-{entry.name}"


def words_for(entry: Entry) -> list[str]:
    """The method on its axis; the other side whole, so that nothing else is chosen by scores."""
    others = {"data": "all", "params": "all"} | {entry.axis: entry.name}
    return [f"method.{axis}={name}" for axis, name in others.items()] + [
        "select.data_budget=0.2",
        "select.param_budget=0.1",
        "warmup.min_steps=4",
        "finetune.epochs=1",
    ]


def stage(run: Path, folder: str) -> dict[str, Any]:
    return json.loads((run / folder / "summary.json").read_text())


def roles(run: Path) -> dict[str, str]:
    table = pq.read_table(run / "1_split/split.parquet").to_pydict()
    return dict(zip(table["id"], table["role"], strict=True))


def files_of(run: Path, folder: str) -> dict[str, str]:
    manifest = json.loads((run / folder / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


@pytest.fixture(params=ENTRIES, ids=named)
def entry(request: pytest.FixtureRequest) -> Entry:
    return request.param


@pytest.mark.parametrize("arch", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_method_keeps_the_contract(
    entry: Entry, arch: str, shared_run: Runner, model_folder: Callable[[str], Path]
) -> None:
    """Budget, roles, frozen weights, the record of what it took."""
    run = shared_run(*words_for(entry), arch=arch, until="finetune")
    chosen, tuned = stage(run, "5_selection"), stage(run, "6_finetune")
    assert tuned["methods"][entry.axis] == entry.name
    assert chosen["methods"] == {axis: tuned["methods"][axis] for axis in ("data", "params")}
    of = roles(run)
    train = {i for i, role in of.items() if role in ("pool", "warm")}
    ids_file = run / "5_selection/ids.json"
    if entry.axis == "data" and entry.uses_budget:
        ids = json.loads(ids_file.read_text())
        assert len(ids) == len(set(ids)) == chosen["b"] == int(0.2 * len(of))
        assert set(ids) <= train
        rows = (run / "5_selection/selected.jsonl").read_text().splitlines()
        assert len(rows) == len(ids)
        assert tuned["examples"] == len(ids)
    else:
        assert not ids_file.exists() and tuned["examples"] == len(train)
    check_weights(entry, run, chosen, load_file(str(model_folder(arch) / "model.safetensors")))
    facts = json.loads((run / "5_selection/manifest.json").read_text())["facts"]
    for axis in ("data", "params"):
        took = facts["accounts"][axis]
        assert 0 < took["seconds"] < 600 and took["peak_bytes"] > 0
    if entry.axis in ("data", "params") and "scores" not in entry.needs:
        took = facts["accounts"][entry.axis]
        silent = entry.cost.startswith("none") or entry.cost.endswith("no data")
        passed = took["forward_examples"] + took["backward_examples"]
        assert (passed == 0) == silent, (entry.cost, took)


def check_weights(
    entry: Entry, run: Path, chosen: dict[str, Any], before: dict[str, torch.Tensor]
) -> None:
    """A mask within the budget, and every entry outside of it as it was, bit for bit."""
    after = load_file(str(run / "6_finetune/model/model.safetensors"))
    moved = {n: (after[n] != before[n]).view(-1) for n in before if n in after}
    assert any(bool(m.any()) for m in moved.values()), "training changes something"
    mask_file = run / "5_selection/mask.safetensors"
    if entry.axis != "params" or not entry.uses_budget:
        assert not mask_file.exists()
        return
    mask = load_file(str(mask_file))
    count = sum(i.numel() for i in mask.values())
    assert 0 < count == chosen["k"] <= chosen["budget_entries"]
    for name, index in mask.items():
        assert index.dtype == torch.int64 and bool((index[1:] > index[:-1]).all())
        assert index.numel() == 0 or 0 <= int(index[0]) <= int(index[-1]) < before[name].numel()
    if (run / "5_selection/start").exists():
        return  # it says that it goes on from other weights than θ_old
    for name, changed in moved.items():  # few steps: a mask that moves has not moved yet
        allowed = torch.zeros_like(changed)
        if name in mask:
            allowed[mask[name]] = True
        assert not bool((changed & ~allowed).any()), name
    delta = load_file(str(run / "6_finetune/delta.safetensors"))
    held = {n.removesuffix(".idx"): i for n, i in delta.items() if n.endswith(".idx")}
    for name, changed in moved.items():
        index = held.get(name)
        kept = set() if index is None else set(index.tolist())
        assert set(changed.nonzero().flatten().tolist()) <= kept, name


def test_a_method_is_deterministic_by_its_seed(
    entry: Entry, make_run: Runner, shared_run: Runner
) -> None:
    """Twice the same bits; for what chance decides, another seed is another choice."""
    words = words_for(entry)
    one, two = (run(*words, until="finetune") for run in (shared_run, make_run))
    for folder in ("5_selection", "6_finetune"):
        assert files_of(one, folder) == files_of(two, folder), folder
    other = make_run(*words, "seed=7", out="three", until="finetune")
    assert files_of(other, "6_finetune") != files_of(one, "6_finetune")


def test_a_method_goes_on_after_a_stop(entry: Entry, make_run: Runner, shared_run: Runner) -> None:
    """Interrupted in the middle of fine-tuning, run again: the bits of a run that was not."""
    words = [*words_for(entry), "resume.every=0"]
    whole = shared_run(*words_for(entry), until="finetune")
    with stopped_at(3, "fine-tuning", Interrupted(2)):
        make_run(*words, out="stopped", until="finetune")
    again = make_run(*words, out="stopped", until="finetune")
    assert files_of(again, "5_selection") == files_of(whole, "5_selection")
    assert files_of(again, "6_finetune") == files_of(whole, "6_finetune")


@pytest.mark.slow
def test_no_method_sees_what_it_is_evaluated_on(
    entry: Entry, make_run: Runner, tmp_path: Path
) -> None:
    """Another file to evaluate on changes no byte of selection and model."""
    found = []
    for seed in (1, 2):
        path = write_jsonl(tmp_path / f"eval-{seed}.jsonl", corpus_rows(12, seed=seed))
        words = [*words_for(entry), f"evaluation.files=extra:{path}"]
        run = make_run(*words, out=f"run-{seed}")
        found.append({f: files_of(run, f) for f in ("5_selection", "6_finetune")})
    assert found[0] == found[1]


@pytest.mark.parametrize("entry", SELECTING, ids=named, indirect=False)
def test_the_paper_preset_runs(entry: Entry, make_run: Runner) -> None:
    run = make_run(*words_for(entry), "method.preset=paper", until="selection")
    assert stage(run, "5_selection")["methods"][entry.axis] == entry.name


# --- names --------------------------------------------------------------------------------------


def test_every_entry_says_what_a_reader_needs() -> None:
    for entry in ENTRIES:
        texts = (entry.summary, entry.cost, entry.memory, entry.source, entry.deviations)
        assert all(text.strip() for text in texts), entry.name
        assert set(entry.paper) <= {key.rpartition(".")[2] for key in entry.specs()}, entry.name
        assert all(entry.docs().get(key.rpartition(".")[2]) for key in entry.specs()), entry.name
        assert set(entry.needs) <= {"warmup", "scores"}


JOINED = ["less+s2ft", "random+random", "s2ft", "spice+nanoadam", "random+dualsft"]
JOINED += ["dualsft+random", "dualsft+fapm", "dualsft-param+flow", "dualsft-data+flow+fapm"]


@pytest.mark.parametrize("name", [*ROWS, *JOINED])
def test_rows_are_named_both_ways(name: str) -> None:
    axes: dict[Axis, str] = row(name)
    assert row_name(axes) == name
    assert {"data", "params"} <= set(axes)


def test_a_whole_row_keeps_both_sides_beside_other_axes() -> None:
    """And gives one of them up to a method that takes it."""
    assert row("flow+dualsft") == {"data": "dualsft", "params": "dualsft", "weights": "flow"}
    assert row("dualsft+s2ft") == {"data": "dualsft", "params": "s2ft"}
    assert row("sft+flow") == row("flow")
    assert row("dualsft-param+fapm") == {"data": "all", "params": "dualsft", "after": "fapm"}


def test_a_row_that_does_not_exist_is_answered() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        row("les+s2ft")
    with pytest.raises(ConfigError, match="twice"):
        row("s2ft+lift")
    with pytest.raises(ConfigError, match="names the axis data twice"):
        row("less+dualsft-data")
