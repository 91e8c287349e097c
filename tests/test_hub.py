"""Hub ids against a local HTTP server that plays the hub; each case in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import small_run
from test_cli import cli

import dualsft
from dualsft.config.settings import load
from dualsft.errors import ConfigError
from dualsft.model.resolve import is_hub_id, weights_hash
from dualsft.runs.preflight import check_paths

Folders = Callable[[str], Path]
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
    words = [f"model.path={NAME}" if w.startswith("model.path=") else w for w in _words(corpus)]
    cli("run", "--out", str(tmp_path / "run"), "--until", "split", *words)
    assert (tmp_path / "run/1_split/tokens.parquet").is_file()


def _words(corpus: Path) -> list[str]:
    return small_run(Path("unused"), corpus)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name") and not is_hub_id("name") and not is_hub_id("a/b/c")
    assert not is_hub_id("../name") and not is_hub_id("/org/name")
    (tmp_path / "org/name").mkdir(parents=True)
    assert not is_hub_id("org/name")


def test_revision_without_a_hub_id(model_folder: Folders, corpus: Path) -> None:
    config = load(None, [*small_run(model_folder("llama"), corpus), "model.revision=v2"])
    with pytest.raises(ConfigError, match=r"model\.revision: 'v2' needs a hub id"):
        check_paths(config)
