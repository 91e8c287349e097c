"""The nightly counts of docs/reliability.md: `make nightly` (`MINUTES=480`), or chosen works.

Kills of real processes, flips and cuts over a run folder, save/load/rotate cycles, and fuzzing of
each target of `tests/fuzzing.py`. The works take turns until every goal is reached or the time is
over. The counts are in `runs/nightly/COMMIT.json`, from which the same command goes on; inputs that
the fuzzing found are in `runs/fuzz`, also for the next commit. Exits with 1 after any failure.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzzing import TARGETS

ROOT = Path(__file__).parents[1]
TURN_SECONDS = 60
GOALS = {"kills": 200, "flips": 2_000, "cuts": 500, "cycles": 10_000} | {
    f"fuzz {name}": 6_000_000 for name in TARGETS
}
"""Cases of each work; 42 million inputs of the fuzzing in all."""

Step = Callable[[int], tuple[int, list[str]]]
"""One turn, given its number: cases tried, and failures."""


@dataclass
class Tally:
    """What was done of one work."""

    cases: int = 0
    turns: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, cases: int, failures: list[str], seconds: float) -> None:
        self.cases += cases
        self.turns += 1
        self.seconds = round(self.seconds + seconds, 1)
        self.failures = (self.failures + failures)[:20]


@contextmanager
def steps(folder: Path, corpus: Path) -> Iterator[dict[str, Callable[[], Step]]]:
    """The works by name, each made when its first turn comes."""
    made: list[Callable[[], None]] = []

    def kills() -> Step:
        from test_kills import Runs, sigkill_rounds

        from dualsft.runs.preflight import FOLDERS

        bench = Runs(folder / "kills")
        made.append(bench.launcher.close)
        stages = list(FOLDERS)
        return lambda turn: (sigkill_rounds(bench, stages[turn % len(stages)], 1, turn), [])

    def damage(kind: str) -> Step:
        import transformers
        from conftest import corpus_rows, small_run, write_jsonl
        from models import save_tiny_folder
        from test_damage import damage_many, finish

        transformers.utils.logging.disable_progress_bar()
        own = folder / kind
        own.mkdir()
        rows = corpus_rows()
        save_tiny_folder(own / "model", "llama", [f"{r['prompt']} {r['response']}" for r in rows])
        words = small_run(own / "model", write_jsonl(own / "rows.jsonl", rows))
        finish(own / "run", [*words, "score.keep=all", "select.rounds=1"])

        def turn(number: int) -> tuple[int, list[str]]:
            damage_many(own / "run", kind, 100, random.Random(f"{kind}{number}"))
            return 100, []

        return turn

    def cycles() -> Step:
        from faults import soak

        def turn(number: int) -> tuple[int, list[str]]:
            soak(folder / "cycles", 500)
            return 500, []

        (folder / "cycles").mkdir()
        return turn

    def fuzz(name: str) -> Step:
        def turn(number: int) -> tuple[int, list[str]]:
            words = ["--corpus", str(corpus), "--seconds", str(TURN_SECONDS)]
            command = [sys.executable, str(ROOT / "tests/fuzzing.py"), name, *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return 0, [f"ended with {done.returncode}: {done.stderr[-500:]}"]
            seen = json.loads(done.stdout.splitlines()[-1])
            return seen["count"], [f"{what} ({n} times)" for what, n in seen["failures"].items()]

        return turn

    (folder / "kills").mkdir()
    try:
        yield {
            "kills": kills,
            "flips": lambda: damage("flip"),
            "cuts": lambda: damage("cut"),
            "cycles": cycles,
            **{f"fuzz {name}": lambda name=name: fuzz(name) for name in TARGETS},
        }
    finally:
        for close in made:
            close()


def work(tallies: dict[str, Tally], minutes: float, corpus: Path, save: Callable[[], None]) -> None:
    """Give each work a turn, again and again, until its goal is reached or the time is over."""
    end = time.monotonic() + 60 * minutes
    ready: dict[str, Step] = {}
    with tempfile.TemporaryDirectory() as folder, steps(Path(folder), corpus) as makers:
        while left := [n for n, t in tallies.items() if t.cases < GOALS[n]]:
            for name in left:
                turn_end = min(end, time.monotonic() + TURN_SECONDS)
                while tallies[name].cases < GOALS[name] and time.monotonic() < turn_end:
                    start = time.monotonic()
                    try:
                        if name not in ready:
                            ready[name] = makers[name]()
                        cases, failures = ready[name](tallies[name].turns)
                    except Exception as problem:
                        cases, failures = 0, [f"{type(problem).__name__}: {str(problem)[:500]}"]
                    tallies[name].add(cases, failures, time.monotonic() - start)
                    save()
            if time.monotonic() > end:
                return


def table(tallies: dict[str, Tally]) -> str:
    lines = [f"{'work':18}{'cases':>12}{'goal':>12}{'failures':>10}{'minutes':>9}"]
    for name, tally in tallies.items():
        counts = f"{tally.cases:12,}{GOALS[name]:12,}{len(tally.failures):10}"
        lines.append(f"{name:18}{counts}{tally.seconds / 60:9.1f}")
        lines += [f"    {failure}" for failure in tally.failures]
    return "\n".join(lines)


def commit() -> str:
    """The commit of the working tree; counts of another one do not go on."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(GOALS)}; all")
    parser.add_argument("--minutes", type=float, default=480)
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    given = parser.parse_args(words)
    if unknown := set(given.works) - set(GOALS):
        parser.error(f"no work {', '.join(sorted(unknown))}; there are {', '.join(GOALS)}")
    file = given.out / "nightly" / f"{commit()}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    tallies = {name: Tally(**before.get(name, {})) for name in GOALS}
    chosen = {name: tallies[name] for name in given.works or GOALS}

    def save() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({name: asdict(t) for name, t in tallies.items()}, indent=1))

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work(chosen, given.minutes, given.out / "fuzz", save)
    except KeyboardInterrupt:
        print("stopped; the same command goes on")
    print(f"{table(chosen)}\ncounts: {file}")
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
