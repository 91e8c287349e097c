"""What must be refused before it can give a wrong number, and what must not end in a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Runner, corpus_rows, small_run, write_jsonl
from models import tiny_model, tiny_rows
from places import place
from safetensors.torch import load_file, save_file
from test_cli import cli
from transformers import LlamaForCausalLM

import dualsft
from dualsft.config import settings
from dualsft.errors import ConfigError
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter

Folders = Callable[[str], Path]
QUIET = Reporter(lambda _: None)


def run(model: Path, corpus: Path, out: Path, *more: str, until: str | None = None) -> Path:
    config = settings.load(None, [*small_run(model, corpus), *more])
    return pipeline.run(config, out, until, QUIET)


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def in_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def act(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        change(weights)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    return act


def offsets(start: Any, end: Any) -> Callable[[Path], None]:
    """Other bounds of the first tensor in the header of the weights."""

    def act(model: Path) -> None:
        data = (model / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        next(v for v in header.values() if "dtype" in v)["data_offsets"] = [start, end]
        text = json.dumps(header).encode()
        whole = len(text).to_bytes(8, "little") + text + data[8 + size :]
        (model / "model.safetensors").write_bytes(whole)

    return act


def in_config(**values: Any) -> Callable[[Path], None]:
    def act(model: Path) -> None:
        stored = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(stored | values))

    return act


def cut_short(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1])


NO_MODEL = "no model can be built from the config.json of"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "model.safetensors: .*truncated; download"),
        (offsets("a", "b"), "model.safetensors: .*truncated; download"),
        (offsets(0, "9"), "model.safetensors: .*truncated; download"),
        (in_weights(lambda w: w.pop("model.layers.0.mlp.up_proj.weight")), "lacks weights.*up_p"),
        (in_weights(lambda w: w.update({"model.norm.weight": torch.ones(7)})), r"model\.path"),
        (in_config(hidden_size="wide"), r"model\.path"),
        (in_config(hidden_act="zork"), NO_MODEL),
        (in_config(pad_token_id=99999), NO_MODEL),
    ],
)
def test_damaged_model_is_one_message(
    damage: Callable[[Path], None],
    message: str,
    model_folder: Folders,
    corpus: Path,
    tmp_path: Path,
) -> None:
    model = copy_of(model_folder("llama"), tmp_path / "model")
    damage(model)
    with pytest.raises(ConfigError, match=message):
        run(model, corpus, tmp_path / "run")


def halve_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama does something to its logits that its configuration does not tell."""
    plain = LlamaForCausalLM.forward

    def forward(self: LlamaForCausalLM, **given: Any) -> Any:
        output: Any = plain(self, **given)
        output.logits = output.logits / 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)


@pytest.mark.parametrize("variant", ["dual", "param", "data"])
def test_changed_logits_are_refused_before_the_warmup(
    variant: str,
    model_folder: Folders,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The linear head alone is not what the model computes."""
    halve_logits(monkeypatch)
    with pytest.raises(ConfigError, match="changes its logits"):
        run(model_folder("llama"), corpus, tmp_path / "run", f"select.variant={variant}")
    assert not list((tmp_path / "run").glob("2_warmup*"))


def test_api_refuses_changed_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_logits(monkeypatch)
    model = tiny_model("llama").eval()
    rows = tiny_rows(4)
    with pytest.raises(ConfigError, match="changes its logits"):
        dualsft.score(model, rows, rows[:2], eta_ft=1e-3, reporter=QUIET)


def test_token_beyond_the_vocabulary(model_folder: Folders, corpus: Path, tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model has embeddings for."""
    other = copy_of(model_folder("llama"), tmp_path / "model")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        in_weights(lambda w, name=name: w.update({name: w[name][:60].clone()}))(other)
    in_config(vocab_size=60)(other)
    with pytest.raises(ConfigError, match=r"model's vocabulary has 60"):
        run(other, corpus, tmp_path / "run")
    assert not list((tmp_path / "run").glob("1_split*"))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("select.param_budget=1000000000", r"select\.param_budget.*candidate"),
        ("select.data_budget=1.0", r"select\.data_budget.*pool has"),
    ],
)
def test_budgets_are_checked_before_the_scoring(
    setting: str, expected: str, model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        run(model_folder("llama"), corpus, tmp_path / "run", setting)
    assert not (tmp_path / "run/2_warmup").exists()


def test_failed_command_leaves_the_settings(make_run: Runner) -> None:
    folder = make_run(until="split")
    before = (folder / "config.yaml").read_text()
    with pytest.raises(ConfigError):
        make_run("select.data_budget=100000")
    assert (folder / "config.yaml").read_text() == before


def test_report_leaves_out_what_is_out_of_date(make_run: Runner) -> None:
    folder = make_run()
    said: list[str] = []
    make_run("select.data_budget=5", until="selection", said=said)
    assert "[finetune] is now out of date; `dualsft run` recomputes it" in said
    from dualsft.lab.report.markdown import write_report

    text = write_report(place(folder)).read_text()
    assert "Out of date, not in this report: finetune, evaluation" in text
    assert "## Before and after" not in text and "**5** of 120 examples" in text
    make_run("select.data_budget=5")
    assert "Out of date" not in (folder / "report.md").read_text()


def test_exported_config_is_the_base_s(make_run: Runner, model_folder: Folders) -> None:
    folder = make_run()
    ours, base = (
        json.loads((f / "config.json").read_text())
        for f in (folder / "6_finetune/model", model_folder("llama"))
    )
    differing = {k for k in ours.keys() | base.keys() if ours.get(k) != base.get(k)}
    assert differing <= {"transformers_version"}


def test_fewer_positions_run_the_split_again(
    model_folder: Folders, corpus: Path, tmp_path: Path
) -> None:
    model = copy_of(model_folder("llama"), tmp_path / "model")
    run(model, corpus, tmp_path / "run", until="split")
    in_config(max_position_embeddings=12)(model)
    folder = run(model, corpus, tmp_path / "run", "data.bad_rows=skip", until="split")
    facts = json.loads((folder / "1_split/summary.json").read_text())
    assert facts["data"]["max_length"] == 12


def test_a_delta_that_is_none_is_one_line(model_folder: Folders, tmp_path: Path) -> None:
    tensors = {"a.idx": torch.tensor([0.5]), "a.val": torch.tensor([1.0])}
    delta, out = str(tmp_path / "d.safetensors"), str(tmp_path / "out")
    save_file(tensors, delta, metadata={"format": "dualsft-delta-1"})
    done = cli("export", "merge", str(model_folder("llama")), delta, out, code=2)
    assert "idx must be int64" in done.stderr


def test_merge_takes_the_run_s_dtype(model_folder: Folders, tmp_path: Path) -> None:
    """A bf16 delta makes a bf16 model, whatever the base is stored in."""
    from dualsft.model.delta import merge, take_delta
    from dualsft.model.resolve import weights_hash

    base = model_folder("llama")
    model = tiny_model("llama", dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    delta = take_delta(model, {name: torch.tensor([0, 5])}, "llama", weights_hash(base))
    delta.save(tmp_path / "delta.safetensors")
    merge(str(base), [tmp_path / "delta.safetensors"], tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")[name].dtype == torch.bfloat16


def test_home_is_expanded(
    model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl", corpus_rows())
    assert run(model_folder("llama"), Path("~/rows.jsonl"), tmp_path / "run", until="split")
