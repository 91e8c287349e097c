"""HumanEval's canonical solutions in the sandbox: how many pass, and what the sandbox costs.

    python -m benchmarks.canonical humaneval.jsonl.gz

Each program also runs in a plain interpreter; the overhead is the difference of the mean times, one
program at a time. Exit code 1 if one does not pass or the overhead is over 150 ms.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

from dualsft.lab.evaluation.sandbox import Program, run_candidates

MOST_OVERHEAD = 0.150


def programs(path: Path) -> list[Program]:
    """The canonical solution of every row, with its test as the harness renders it."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [json.loads(line) for line in text.splitlines()]
    return [
        Program.of(
            row,
            row["prompt"] + row["canonical_solution"],
            f"{row['test']}\ncheck({row['entry_point']})",
        )
        for row in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    todo = programs(parser.parse_args().file)
    start = time.perf_counter()
    verdicts = run_candidates(todo, workers=1)
    held = (time.perf_counter() - start) / len(todo)
    start = time.perf_counter()
    for one in todo:
        command = [sys.executable, "-I", "-c", "import sys; exec(sys.argv[1], {})"]
        subprocess.run([*command, f"{one.candidate}\n{one.test}"], check=True)
    plain = (time.perf_counter() - start) / len(todo)
    for one, verdict in zip(todo, verdicts, strict=True):
        if not verdict.passed:
            print(f"{one.entry}: {verdict.reason}")
    passed = sum(verdict.passed for verdict in verdicts)
    print(f"{passed} of {len(todo)} pass")
    print(f"{held * 1e3:.0f} ms each; plain interpreter {plain * 1e3:.0f} ms")
    return int(passed < len(todo) or held - plain > MOST_OVERHEAD)


if __name__ == "__main__":
    sys.exit(main())
