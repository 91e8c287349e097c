"""The endpoints of the Hugging Face Hub that a push calls, on this machine.

Repositories, regular and LFS uploads and commits are kept in memory. A request without the one
token that may write is refused as the hub does it, and a card whose front matter is no YAML, or
whose base model is no id of the hub, too.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_aVeryPrivateTokenOfTheTests"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Hub(ThreadingHTTPServer):
    """The server and what it has received."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.lfs = False
        """Whether weights are uploaded by LFS; otherwise all files are in the commit."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests read `Hub.requests`."""

    def _answer(self, content: Any, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        self.server.requests.append(f"{self.command} {self.path}")
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        self._body()
        self._answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body, path, hub = self._body(), self.path.partition("?")[0], self.server
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{hub.address}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._answer({"objects": objects})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if not found or found[1] not in hub.repos:
            return self._answer({"error": "Repository not found"}, 404)
        if found[2] == "preupload":
            files = json.loads(body)["files"]
            return self._answer({"files": [self._mode(file["path"]) for file in files]})
        self._commit(found[1], [json.loads(line) for line in body.splitlines()])

    def _create(self, wanted: dict[str, Any]) -> None:
        hub, name = self.server, f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] == "somebody":
            return self._answer({"error": "You have no rights for the namespace somebody"}, 403)
        url = f"{hub.address}/{name}"
        if name in hub.repos:
            return self._answer({"error": "You already created this repo", "url": url}, 409)
        hub.repos[name] = {}
        hub.private |= {name} if wanted.get("visibility") == "private" else set()
        self._answer({"url": url})

    def _validate(self, card: str) -> None:
        head = yaml.safe_load(card.split("---\n")[1])
        base = head.get("base_model")
        if base is not None and not HUB_ID.fullmatch(base):
            return self._answer({"errors": [{"message": "base_model is no id"}]}, 400)
        self._answer({"errors": [], "warnings": []})

    def _mode(self, path: str) -> dict[str, Any]:
        large = self.server.lfs and path.endswith(".safetensors")
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files, oid = self.server.repos[repo], "0" * 40
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        url = f"{self.server.address}/{repo}/commit/{oid}"
        self._answer({"commitUrl": url, "commitOid": oid})


@contextmanager
def hub_server() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
