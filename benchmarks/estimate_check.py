"""Compare `dualsft estimate` with the measured peak memory and time of each stage, as ratios.

    python -m benchmarks.estimate_check --model llama-3.2-1b-shape --rows 600 [key=value …]

Writes a model of a given shape with random weights, and rows of realistic lengths, to a temporary
folder, estimates a run and runs it. The measured peaks are those in the manifests (on a GPU, peak
allocated memory). Settings of the run may follow, as for `dualsft run`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.workload import LENGTHS, SHAPES, SOURCES, build_model
from dualsft.config import settings
from dualsft.lab.estimate.estimate import Estimate, estimate
from dualsft.model.load import choose_device
from dualsft.runs.preflight import FOLDERS
from dualsft.system.progress import Reporter

GIB = 2**30


def write_model(name: str, folder: Path, device: torch.device) -> int:
    """Write a random model and a word-level tokenizer; returns the number of words."""
    model = build_model(name, device)
    count = min(20_000, model.config.vocab_size - 2)
    words = {"<eos>": 0, "<unk>": 1} | {f"w{i}": i + 2 for i in range(count)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return count


def write_rows(path: Path, rows: int, num_words: int) -> None:
    """Write rows of random words with the lengths of real rows."""
    stored = json.loads(LENGTHS.read_text())
    lengths = [pair for pairs in zip(*(stored[s] for s in SOURCES), strict=True) for pair in pairs]
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{rng.randrange(num_words)}" for _ in range(max(1, count)))

    with path.open("w", encoding="utf-8") as out:
        for i in range(rows):
            prompt, response = lengths[i % len(lengths)]
            out.write(json.dumps({"prompt": text(prompt), "response": text(response)}) + "\n")


def compare(found: Estimate, run: Path) -> list[str]:
    """Lines of the table: estimated and measured GiB and seconds per stage."""
    lines = [
        f"{'stage':12}{'est. GiB':>10}{'GiB':>10}{'ratio':>8}{'est. s':>10}{'s':>10}{'ratio':>8}"
    ]
    for stage in found.stages:
        manifest = json.loads((run / FOLDERS[stage.name] / "manifest.json").read_text())
        memory = manifest["peak_memory"]
        said, seen = stage.device_bytes, memory["cuda_bytes"] or 0
        if not seen:
            said, seen = stage.host_bytes, memory["rss_bytes"]
        seconds = max(manifest["seconds"], 1e-3)
        lines.append(
            f"{stage.name:12}{said / GIB:10.2f}{seen / GIB:10.2f}{said / seen:8.2f}"
            f"{stage.seconds:10.1f}{seconds:10.1f}{stage.seconds / seconds:8.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="llama-3.2-1b-shape", help=", ".join(SHAPES))
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("settings", nargs="*", help="key=value")
    given = parser.parse_args()
    device = choose_device(given.device)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        num_words = write_model(given.model, folder / "model", device)
        write_rows(folder / "rows.jsonl", given.rows, num_words)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        words = [f"model.path={folder / 'model'}", f"data.path={folder / 'rows.jsonl'}"]
        words += [f"model.device={device.type}", "data.template=plain", *given.settings]
        config = settings.load("recommended", words)
        found = estimate(config, folder / "run", reporter=Reporter(print))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the run is a separate process
        for stage in found.stages:
            print(
                f"{stage.name}: {stage.note}"
                + ("" if stage.fits else f"; DOES NOT FIT: {stage.cure}")
            )
        command = [sys.executable, "-m", "dualsft", "run", "recommended", *words]
        subprocess.run([*command, "--out", str(folder / "run")], check=True)
        print("\n".join(compare(found, folder / "run")))


if __name__ == "__main__":
    main()
