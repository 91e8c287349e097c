"""Whole runs on pools of more and more rows: what grows with N, and how.

    python -m benchmarks.pool_size --rows 10000,100000 --out FILE.json [--set KEY=VALUE ...]

Synthetic rows with the prompt and response lengths of real ones (`benchmarks/lengths.json`), a
tokenizer of words and a Llama of one layer, so that the work per row which is not the model's
counts most. Each N is `dualsft run recommended` in a process of its own. Per stage: seconds, the
resident peak that the manifest states, and the peak of the memory that is not backed by a file
(mapped sketches count in the first only). Between the smallest N and each larger one: the ratio of
the peaks, and the exponent of time, log(t₂/t₁) / log(N₂/N₁).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.measuring import machine, versions
from benchmarks.workload import LENGTHS
from dualsft.runs.preflight import FOLDERS
from dualsft.storage.manifest import MANIFEST

NUM_WORDS = 2_048
SETTINGS = (
    *("data.template=plain", "data.max_length=1024", "split.val=200", "split.warm=200"),
    *("score.sketch_dim=256", "select.data_budget=500"),
)


def make_model(folder: Path) -> None:
    """A Llama of one layer, and a tokenizer of whole words."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *words()])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def words() -> list[str]:
    """Words of three syllables."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    ways = itertools.product(syllables, repeat=3)
    return ["".join(way) for way in itertools.islice(ways, 0, None, 105)][:NUM_WORDS]


def write_rows(path: Path, count: int) -> None:
    """Rows of random words, a few of which are frequent; half as long as GSM8K's, half as long as
    rows of code, in tokens."""
    rng, lengths = np.random.default_rng(0), json.loads(LENGTHS.read_text())
    kinds, known = [lengths["gsm8k_train"], lengths["code_sft"]], words()
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            sides = kinds[i % 2][rng.integers(len(kinds[i % 2]))]
            drawn = [rng.zipf(1.3, min(length, 400)) % NUM_WORDS for length in sides]
            texts = [" ".join(known[at] for at in side) for side in drawn]
            row = dict(zip(("prompt", "response"), texts, strict=True))
            file.write(json.dumps(row) + "\n")


def measure(model: Path, folder: Path, count: int, extra: list[str]) -> dict[str, Any]:
    """Run the recipe on `count` rows; the facts of every stage."""
    data, out = folder / f"{count}.jsonl", folder / f"run{count}"
    write_rows(data, count)
    words = ["run", "recommended", f"model.path={model}", f"data.path={data}", *SETTINGS, *extra]
    started = time.perf_counter()
    with (folder / f"{count}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dualsft", *words, "--out", str(out)], stdout=log, stderr=log
        )
        held: dict[str, int] = defaultdict(int)
        while process.poll() is None:
            stage = _stage(out)
            held[stage] = max(held[stage], _anonymous(process.pid))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit((folder / f"{count}.log").read_text()[-3000:])
    stages: dict[str, Any] = {}
    for stage, name in FOLDERS.items():
        path = out / name / MANIFEST
        if path.exists():
            facts = json.loads(path.read_text())
            stages[stage] = {
                "seconds": facts["seconds"],
                "peak_bytes": facts["peak_memory"]["rss_bytes"],
                "held_bytes": held.get(stage, 0),
            }
    tokens = json.loads((out / "1_split/summary.json").read_text())["num_tokens"]
    return {
        "rows": count,
        "tokens": tokens,
        "file_bytes": data.stat().st_size,
        "seconds": time.perf_counter() - started,
        "held_bytes": max(held.values()),
        "stages": stages,
    }


def _stage(out: Path) -> str:
    """The stage that is running."""
    return next((stage for stage, name in FOLDERS.items() if (out / f"{name}.part").exists()), "")


def _anonymous(pid: int) -> int:
    """Bytes of the process that are not backed by a file."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="10000,100000")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the runs")
    options = parser.parse_args()
    counts = sorted(int(count) for count in options.rows.split(","))
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model")
        for count in counts:
            found.append(measure(folder / "model", folder, count, options.set))
            first, last = found[0], found[-1]
            for stage, facts in last["stages"].items():
                before = first["stages"].get(stage, facts)
                ratio = facts["peak_bytes"] / before["peak_bytes"]
                line = f"{count:>9,} {stage:<11}{facts['seconds']:9.1f} s "
                line += f"{facts['peak_bytes'] / 2**20:8.0f} MiB peak ({ratio:.2f})"
                line += f"{facts['held_bytes'] / 2**20:8.0f} MiB held"
                if count > first["rows"]:
                    times = math.log(max(facts["seconds"], 1e-3) / max(before["seconds"], 1e-3))
                    line += f"   exponent {times / math.log(count / first['rows']):.2f}"
                print(line, flush=True)
            print(f"{count:>9,} {'run':<11}{last['seconds']:9.1f} s", flush=True)
            settings = [*SETTINGS, *options.set]
            content = {
                "machine": machine(torch.device("cpu")),
                "versions": versions(),
                "settings": settings,
            }
            options.out.write_text(json.dumps(content | {"runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
