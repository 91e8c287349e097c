"""Shared by the tests: a small corpus, tiny model folders, and one way to make a run."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_tiny_folder

from dualsft.config import settings
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it for all
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # read at the first bf16 product

WORDS = ("alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "light", "paper")

Runner = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: at the end no process is left alone with one of them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def corpus_rows(count: int = 120, seed: int = 0) -> list[dict[str, str]]:
    """Short prompts and responses of varied length, with two exact duplicates."""
    rng = random.Random(seed)
    rows = [
        {
            "prompt": "Say " + " ".join(rng.choices(WORDS, k=rng.randint(1, 6))),
            "response": " ".join(rng.choices(WORDS, k=rng.randint(1, 5))),
        }
        for _ in range(count - 2)
    ]
    return [*rows, rows[3], rows[7]]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "rows.jsonl", corpus_rows())


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny fp32 model and tokenizer of an architecture, made once."""
    root = tmp_path_factory.mktemp("models")
    texts = [f"{row['prompt']} {row['response']}" for row in corpus_rows()]

    def get(arch: str) -> Path:
        folder = root / arch
        if not folder.exists():
            save_tiny_folder(folder, arch, texts)
        return folder

    return get


@pytest.fixture(scope="session")
def shared_run(
    corpus: Path, model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Runner:
    """A run that many tests read and none may change, made once for its settings."""
    made: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str, arch: str = "llama", until: str | None = None) -> Path:
        key = (*overrides, arch, until or "")
        if key not in made:
            config = settings.load(None, [*small_run(model_folder(arch), corpus), *overrides])
            out = tmp_path_factory.mktemp("shared") / "run"
            made[key] = pipeline.run(config, out, until, Reporter(lambda _: None))
        return made[key]

    return run


@pytest.fixture
def make_run(corpus: Path, model_folder: Callable[[str], Path], tmp_path: Path) -> Runner:
    """Run the pipeline in this process on a tiny model; `said` collects what it says."""

    def run(
        *overrides: str,
        arch: str = "llama",
        out: str = "run",
        until: str | None = None,
        said: list[str] | None = None,
    ) -> Path:
        config = settings.load(None, [*small_run(model_folder(arch), corpus), *overrides])
        lines = said if said is not None else []
        return pipeline.run(config, tmp_path / out, until, Reporter(lines.append))

    return run


def small_run(model: Path, corpus: Path) -> list[str]:
    """Settings for a run of about a second."""
    return [
        f"model.path={model}",
        "model.device=cpu",
        f"data.path={corpus}",
        "data.template=plain",
        "finetune.lr=1e-3",
        "finetune.batch_size=4",
        "finetune.epochs=2",
        "split.val=0.1",
        "split.anchor=0.1",
        "split.warm=0.1",
    ]
