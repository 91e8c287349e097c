"""A headless Chromium for tests, controlled over a pipe by the DevTools protocol.

Messages are JSON that ends with a zero byte, written to the browser's file descriptor 3 and read
from its 4. A `Page` collects what the console says, exceptions, and every request; the network is
switched off, so that a page that wants it shows.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)
PATIENCE = 120.0


def find_chromium() -> str:
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise AssertionError(
        f"these tests need a browser and found none of {', '.join(NAMES)}: install the package "
        "`chromium` (apt-get install chromium)"
    )


class Page:
    """One tab."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write, self._read = write_to, read_from
        self._buffer, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        nothing = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.call("Network.emulateNetworkConditions", offline=True, **nothing)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that come first are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as ready:
            ready.register(self._read, selectors.EVENT_READ)
            while b"\0" not in self._buffer:
                assert ready.select(PATIENCE), "the browser does not answer"
                piece = os.read(self._read, 1 << 20)
                assert piece, "the browser is gone"
                self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            said = [str(a.get("value", a.get("description"))) for a in params["args"]]
            self.console.append(f"{params['type']}: {' '.join(said)}")
        elif method == "Runtime.exceptionThrown":
            self.console.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")

    def open(self, file: Path, script: bool = True) -> None:
        """Load a file and wait until its script has finished (or, without, until it is there)."""
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=file.resolve().as_uri())
        state = "document.documentElement?.dataset"
        done = f"{state}?.complete || {state}?.failed"
        self.wait(done if script else "document.readyState === 'complete' && !!document.title")

    def js(self, expression: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.js(f"!!({condition})"):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.05)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=mobile, **size)


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser with one tab; closed afterwards."""
    program = find_chromium()
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        connect = f'exec "$@" 3<&{their_read} 4>&{their_write}'
        command = ["bash", "-c", connect, "bash", program, *FLAGS, f"--user-data-dir={profile}"]
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(command, pass_fds=(their_read, their_write), **silent)
        os.close(their_read)
        os.close(their_write)
        try:
            yield Page(our_write, our_read)
        finally:
            process.terminate()
            process.wait(30)
            os.close(our_write)
            os.close(our_read)
