"""Cache of the base model's benchmark answers, shared by all cells of a comparison.

The cache key is a hash of everything the answers depend on: the requests, the weights, the
tokenizer, the dtype, the batch size, the attention implementation and the harness version. When
several cells run at once, one evaluates the base model under a file lock; the others evaluate their
fine-tuned models first and then read its answers. Not part of Algorithm 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from importlib import metadata
from typing import Any

from dualsft.model.resolve import tokenizer_hash, weights_hash
from dualsft.runs.context import RunContext
from dualsft.runs.folder import atomic_write_text, locked
from dualsft.system.paths import RunPath
from dualsft.system.progress import clock

LOOK_EVERY = 0.5
"""Seconds between two attempts to take the lock."""
TELL_EVERY = 60.0
"""Seconds between two log lines while waiting for the lock."""


class Kept:
    """The cache file for the answers to one list of requests."""

    def __init__(
        self, folder: RunPath, ctx: RunContext, name: str, requests: list[Any], batch: Any
    ):
        what = {
            "requests": [(request.request_type, request.args) for request in requests],
            "weights": weights_hash(ctx.model_folder),
            "tokenizer": tokenizer_hash(ctx.model_folder),
            "dtype": str(ctx.dtype),
            "device": ctx.device.type,
            "backend": ctx.config.evaluation.backend,
            "batch": batch,
            "attention": ctx.config.model.attention,
            "harness": metadata.version("lm_eval"),
        }
        text = json.dumps(what, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()
        self.path = folder / f"{name}-{key[:16]}.json"
        self.reporter = ctx.reporter

    def read(self) -> dict[str, Any] | None:
        """{"answers": …, "truncated": …}, or None if the file is missing or damaged."""
        try:
            stored = self.path.read_json()
            if stored["sha256"] == _seal(stored["facts"]):
                return stored["facts"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self.reporter.warn(f"{self.path}: damaged; the base model is asked again")
        return None

    def write(self, facts: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"facts": facts, "sha256": _seal(facts)}
        atomic_write_text(self.path, json.dumps(stored, ensure_ascii=False))


def _seal(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Turn:
    """File lock that lets one process at a time evaluate the base model.

    `with turn:` waits for the lock. The operating system releases it when the process ends, even
    after a crash. Without a shared cache no lock is needed, and it is always free.
    """

    def __init__(self, ctx: RunContext) -> None:
        self.ctx = ctx
        self.file: int | None = None

    def free(self) -> bool:
        """Try to take the lock. Returns False if another process holds it."""
        if self.ctx.answers is None or self.file is not None:
            return True
        self.ctx.answers.mkdir(parents=True, exist_ok=True)
        path = self.ctx.answers / f"asking-{weights_hash(self.ctx.model_folder)[:16]}.lock"
        file = path.descriptor(os.O_RDWR | os.O_CREAT)
        if not locked(file, path):
            os.close(file)
            return False
        self.file = file
        return True

    def give_back(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __enter__(self) -> None:
        if self.free():
            return
        told, begun, waiting = -TELL_EVERY, time.monotonic(), "another run evaluates it; waiting"
        while not self.free():
            if (spent := time.monotonic() - begun) - told >= TELL_EVERY:
                self.ctx.reporter.say(f"the base model: {waiting} for its answers, {clock(spent)}")
                told = spent
            time.sleep(LOOK_EVERY)

    def __exit__(self, *_: object) -> None:
        self.give_back()
