"""Real processes, killed: the same command again gives the bits of a run that was left alone."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import DIED, Bench, Fault, Launcher, changes, content, turning_points

from dualsft.runs.folder import Fingerprint, RunDir
from dualsft.runs.preflight import FOLDERS

EVERY_STEP = "resume.every=0"
LONG = ("finetune.epochs=12", "warmup.min_steps=8", "score.batch_tokens=48")


class Runs(Bench):
    """And what undisturbed runs leave."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._references: dict[tuple[str, ...], dict[str, str]] = {}
        self.seconds: dict[tuple[tuple[str, ...], str], float] = {}
        """What each stage took in an undisturbed run."""

    def reference(self, *more: str) -> dict[str, str]:
        """The content of an undisturbed run that saves no progress on the way."""
        if more not in self._references:
            out = f"reference{len(self._references)}"
            assert self.launcher.run(self.words(out, *more)) == 0, self.launcher.said
            self._references[more] = content(self.folder / out)
            assert len(self._references[more]) > 25
            for stage, name in FOLDERS.items():
                manifest = json.loads((self.folder / out / name / "manifest.json").read_text())
                self.seconds[more, stage] = manifest["seconds"]
        return self._references[more]

    def finish(self, out: str, *more: str) -> str:
        """Run to the end and compare every file with the undisturbed run; returns what it said."""
        assert self.launcher.run(self.words(out, *more)) == 0, self.launcher.said
        said = self.launcher.said
        settings = tuple(word for word in more if word != EVERY_STEP)
        assert content(self.folder / out) == self.reference(*settings)
        left = [name for name in os.listdir(self.folder / out) if "." in name and name[0].isdigit()]
        assert not left, f"left behind: {left}"
        return said


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    bench = Runs(tmp_path_factory.mktemp("kills"))
    yield bench
    bench.launcher.close()


def kill_in_stage(bench: Runs, words: list[str], line: str, delay: float, signum: int) -> int:
    """Wait until a line has come, then a while, then send the signal; the exit code."""
    pid = bench.launcher.start(words)
    deadline = time.monotonic() + 60
    while line not in bench.launcher.said:
        assert time.monotonic() < deadline, bench.launcher.said
        time.sleep(0.002)
    time.sleep(delay)
    bench.launcher.signal(pid, signum)
    return bench.launcher.wait()


def sigkill_rounds(bench: Runs, stage: str, rounds: int, seed: int) -> int:
    """Kill `rounds` runs at random moments of a stage, finish each; how many were still alive."""
    rng, alive = random.Random(f"{stage}{seed}"), 0
    bench.reference(*LONG)
    longest = bench.seconds[LONG, stage]
    for number in range(rounds):
        out = f"{stage}-{seed}-{number}"
        words = bench.words(out, *LONG, EVERY_STEP)
        started = f"[{stage}] started"
        code = kill_in_stage(bench, words, started, rng.uniform(0, longest), signal.SIGKILL)
        assert code in (0, -signal.SIGKILL), bench.launcher.said
        alive += code != 0
        bench.finish(out, *LONG, EVERY_STEP)
    return alive


@pytest.mark.parametrize("stage", [name for name in FOLDERS if name != "scores"])
def test_one_sigkill_in_a_stage(bench: Runs, stage: str) -> None:
    sigkill_rounds(bench, stage, rounds=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", FOLDERS)
def test_many_sigkills_in_a_stage(bench: Runs, stage: str) -> None:
    """15 in each of the seven stages: 105 in all."""
    assert sigkill_rounds(bench, stage, rounds=15, seed=2) >= 8, "most must hit a living run"


@pytest.mark.parametrize(
    "kills", [pytest.param(4, id="four"), pytest.param(20, id="twenty", marks=pytest.mark.slow)]
)
def test_many_kills_of_one_run(bench: Runs, kills: int) -> None:
    rng = random.Random(kills)
    epochs = f"finetune.epochs={60 if kills < 10 else 240}"  # long enough to be killed so often
    out, settings = f"again-and-again-{kills}", (epochs, "warmup.min_steps=40")
    bench.reference(*settings)
    words = bench.words(out, *settings, EVERY_STEP)
    survived = 0
    for _ in range(kills):
        pid = bench.launcher.start(words)
        time.sleep(rng.uniform(0.15, 0.5))
        bench.launcher.signal(pid, signal.SIGKILL)
        survived += bench.launcher.wait() == 0
    assert survived < kills // 2, "the run was over too soon to be killed so often"
    bench.finish(out, *settings, EVERY_STEP)


def test_a_killed_stage_goes_on_and_does_not_start_again(bench: Runs) -> None:
    settings = ("warmup.min_steps=200",)
    words = bench.words("goes-on", *settings, EVERY_STEP)
    assert kill_in_stage(bench, words, "warmup: 1/", 0.2, signal.SIGKILL) == -signal.SIGKILL
    work = bench.folder / "goes-on" / f"{FOLDERS['warmup']}.work"
    saved = max(
        json.loads(path.read_text())["facts"]["steps"] for path in work.glob("*[0-9]/manifest.json")
    )
    assert 0 < saved < 200
    said = bench.finish("goes-on", *settings, EVERY_STEP)
    assert f"warmup: resuming after {saved:,} of 200 steps" in said
    assert "[split] reused" in said


@pytest.mark.parametrize(
    ("work", "signum", "code"),
    [
        ("warmup", signal.SIGTERM, 143),
        ("pool (G and f)", signal.SIGINT, 130),
        pytest.param("warmup", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("pool (G and f)", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("fine-tuning", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("fine-tuning", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_asked_to_stop(bench: Runs, work: str, signum: int, code: int) -> None:
    """Without saves on the way: the signal itself saves, says so, and gives the exit code."""
    out = f"stop-{work[:4]}-{code}"
    settings = ("finetune.epochs=80", "warmup.min_steps=80", "score.batch_tokens=16")
    bench.reference(*settings)
    words = bench.words(out, *settings, "resume.every=null")
    ended = kill_in_stage(bench, words, f"{work}: 1/", 0.0, signum)
    said = bench.launcher.said
    assert ended == code, said
    assert f"stopped by {signal.Signals(signum).name}" in said and "Traceback" not in said
    assert "run the same command to resume" in said
    assert f"saved {work}: " in said, said
    again = bench.finish(out, *settings, EVERY_STEP)
    assert f"{work}: resuming after" in again


def test_signal_before_the_work_begins(bench: Runs) -> None:
    words = bench.words("early", *LONG)
    pid = bench.launcher.start(words)
    bench.launcher.signal(pid, signal.SIGTERM)
    assert bench.launcher.wait() in (143, -signal.SIGTERM)
    bench.finish("early", *LONG)


# --- crash points -------------------------------------------------------------------------------


def crash_at(bench: Runs, name: str, point: int, *settings: str) -> None:
    out = f"{name}-{point}"
    fault = Fault(bench.folder / out, at=point)
    assert bench.launcher.run(bench.words(out, *settings), fault) == DIED, bench.launcher.said
    bench.finish(out, *settings)


@pytest.mark.slow
def test_every_crash_point_of_a_run(bench: Runs) -> None:
    """Die at an open, write, rename, unlink …: the next start needs nobody's help."""
    out = bench.folder / "counted"
    calls = changes(bench.launcher, bench.words("counted", EVERY_STEP), out)
    points = turning_points(calls)
    assert len(calls) > 1000 and len(points) > 100
    others = sorted(set(range(1, len(calls) + 1)) - set(points))
    for point in [*points, *random.Random(5).sample(others, 16)]:
        crash_at(bench, "every", point, EVERY_STEP)
        shutil.rmtree(bench.folder / f"every-{point}")


@pytest.mark.slow
def test_crash_while_a_stage_is_replaced(bench: Runs) -> None:
    """Crash points of a second selection: the old one or the new one is there, never neither."""
    base = bench.words("replaced", "--until", "selection")
    other = [*base, "select.data_budget=9"]
    assert bench.launcher.run(base) == 0
    before = content(bench.folder / "replaced")
    points = turning_points(changes(bench.launcher, other, bench.folder / "replaced"))
    after = content(bench.folder / "replaced")
    assert before != after and len(points) > 12
    for point in points:
        assert bench.launcher.run(base) == 0 and content(bench.folder / "replaced") == before
        fault = Fault(bench.folder / "replaced", at=point)
        assert bench.launcher.run(other, fault) == DIED
        RunDir(bench.folder / "replaced").stage_state(FOLDERS["selection"], Fingerprint({}, {}))
        assert content(bench.folder / "replaced") in (before, after)
        assert bench.launcher.run(other) == 0 and content(bench.folder / "replaced") == after


# --- one lock -----------------------------------------------------------------------------------


def test_two_runs_on_one_folder(bench: Runs) -> None:
    """The second is refused at once and told who holds the folder; the first is not disturbed."""
    settings = ("finetune.epochs=60", "warmup.min_steps=40")
    words = bench.words("shared", *settings)
    second = Launcher(bench.folder / "second.log")
    try:
        pid = bench.launcher.start(words)
        deadline = time.monotonic() + 60
        while "[warmup] " not in bench.launcher.said:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        code, said = second.run(words), second.said
        first = bench.launcher.wait()
    finally:
        second.close()
    assert first == 0, bench.launcher.said
    assert code == 1, said
    assert f"in use by process {pid} on " in said and "another --out" in said
    bench.finish("shared", *settings)
