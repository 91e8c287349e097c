"""How threads wait: training steps on a CPU that has other work.

    python -m benchmarks.threads --out FILE.json

PyTorch's threads wait for each other by spinning for milliseconds, so a thread that the system has
taken off its core costs the others their time. `dualsft` sets GOMP_SPINCOUNT=1000, some
microseconds, after which they sleep; with OMP_WAIT_POLICY=PASSIVE they sleep at once. Each
contender is a process of its own that trains a few blocks of SmolLM2-135M's shape for some seconds,
beside none, one or as many busy processes as there are cores; the better of two rounds counts.
Tokens per second, and the ratio to spinning.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.measuring import machine, versions

ROUNDS = 2
SET = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
STEP = """
import sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
shape = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=6)
heads = dict(num_attention_heads=9, num_key_value_heads=3)
model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, **shape, **heads))
ids = torch.randint(0, 4096, (4, 128))
steps, began = -1, 0.0
while steps < 0 or time.perf_counter() - began < float(sys.argv[1]):
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    steps += 1
    began = began or time.perf_counter()
print(steps * ids.numel() / (time.perf_counter() - began))
"""


def rate(seconds: float, **environment: str) -> float:
    """Tokens per second of a process that trains for so long."""
    env = {k: v for k, v in os.environ.items() if k not in SET}
    command = [sys.executable, "-c", STEP, str(seconds)]
    done = subprocess.run(
        command, env=env | environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    ways = {
        "spinning": {},
        "a little": {"GOMP_SPINCOUNT": "1000"},
        "sleeping": {"OMP_WAIT_POLICY": "PASSIVE"},
        "one thread": {"OMP_NUM_THREADS": "1"},
    }
    rows: list[dict[str, float | str]] = []
    for others in sorted({0, 1, cores}):
        found: defaultdict[str, float] = defaultdict(float)
        spin = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(spin) for _ in range(others)]
        try:
            for _ in range(ROUNDS):
                for name, environment in ways.items():
                    found[name] = max(found[name], rate(options.seconds, **environment))
        finally:
            for process in busy:
                process.kill()
                process.wait()
        for name, tokens in found.items():
            ratio = tokens / found["spinning"]
            rows.append({"others": others, "threads": name, "tokens_per_s": tokens, "ratio": ratio})
            print(f"{others} busy  {name:<11}{tokens:8.0f} tok/s  {ratio:.2f}", flush=True)
    facts = {"machine": machine(torch.device("cpu")), "versions": versions()}
    options.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
