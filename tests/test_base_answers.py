"""Who asks the base model: one process at a time, and none is left waiting for a dead one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import place

from dualsft.lab.evaluation import base_answers
from dualsft.lab.evaluation import benchmarks as benchmarking
from dualsft.lab.evaluation.base_answers import Turn
from dualsft.system.paths import RunPath

HOLD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from dualsft.lab.evaluation.base_answers import Turn
from dualsft.system.paths import RunPath
ctx = SimpleNamespace(answers=RunPath(sys.argv[1]), model_folder=Path(sys.argv[2]))
with Turn(ctx):
    print("has it", flush=True)
    time.sleep(600)
"""


def context(answers: Path | None, model: Path, said: list[str] | None = None) -> Any:
    voice = SimpleNamespace(say=(said if said is not None else []).append)
    place = None if answers is None else RunPath(answers)
    return SimpleNamespace(answers=place, model_folder=model, reporter=voice)


def test_one_at_a_time_and_only_where_answers_are_shared(
    model_folder: Callable, tmp_path: Path
) -> None:
    model = model_folder("llama")
    ctx = context(tmp_path / "answers", model)
    first, second = Turn(ctx), Turn(ctx)
    assert first.free() and first.free() and not second.free()
    other = Turn(context(tmp_path / "answers", model_folder("gpt2")))
    assert other.free()  # another model's answers are another matter
    with first:
        assert not second.free()
    assert second.free()
    for turn in (second, other):
        turn.give_back()
    alone = context(None, model)
    with Turn(alone):
        assert Turn(alone).free()


def test_a_killed_process_gives_its_turn_back(model_folder: Callable, tmp_path: Path) -> None:
    """Another one waits for it, says so once, and goes on when it is dead."""
    model, said = model_folder("llama"), []
    command = [sys.executable, "-c", HOLD, str(tmp_path / "answers"), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "has it\n"
        turn = Turn(context(tmp_path / "answers", model, said))
        assert not turn.free()
        killer = threading.Timer(1.5, holder.kill)
        killer.start()
        begun = time.monotonic()
        with turn:
            assert time.monotonic() - begun > 1.0 and holder.wait() < 0
        killer.join()
    assert len(said) == 1 and "another run evaluates it" in said[0]


def test_whoever_comes_second_asks_its_own_model_first(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable, tmp_path: Path
) -> None:
    """The results are the same in either order, the base model's before the tuned one's."""
    asked: list[str] = []

    class Answers:
        complete = True

        def __init__(self, ctx: Any, name: str, side: str) -> None:
            asked.append(side)
            if side == "after" and held.file is not None:
                held.give_back()  # the first one is done while this one's own model answers
            self.side = side

        def outcome(self, _lm: Any) -> Any:
            item = benchmarking.Item("0", float(self.side == "after"), None, None)
            return benchmarking.Outcome([item], {}, 0, [])

    monkeypatch.setattr(benchmarking, "Answers", Answers)
    monkeypatch.setattr(benchmarking, "give_back", lambda device: None)
    monkeypatch.setattr(base_answers, "LOOK_EVERY", 0.01)
    ctx = context(tmp_path / "answers", model_folder("llama"))
    settings = SimpleNamespace(tasks="piqa", domain="math", data_dir=None, limit_tasks=None)
    ctx.config, ctx.device = SimpleNamespace(evaluation=settings), None
    models: Any = {side: lambda: None for side in benchmarking.SIDES}
    held = Turn(ctx)
    found = []
    for taken in (False, True):
        assert not taken or held.free()
        (part := tmp_path / str(taken)).mkdir()
        found.append(benchmarking.run_benchmarks(ctx, models, place(part)))
        [row] = (part / "samples.jsonl").read_text().splitlines()
        wanted = {"task": "piqa", "id": "0", "score_before": 0.0, "score_after": 1.0}
        assert json.loads(row) == wanted
    assert asked == ["before", "after", "after", "before"] and found[0] == found[1]
    assert list(found[0]["tasks"]["piqa"])[-2:] == ["before", "after"]


@pytest.mark.parametrize("damage", [b"", b'{"facts": {', b'{"facts": {"answers": {}}}', b"[1]"])
def test_a_damaged_file_is_told_and_not_read(damage: bytes, tmp_path: Path) -> None:
    said: list[str] = []
    kept: Any = object.__new__(base_answers.Kept)
    kept.path, kept.reporter = (
        RunPath(tmp_path) / "a/piqa-0.json",
        SimpleNamespace(warn=said.append),
    )
    assert kept.read() is None and said == []
    facts = {"answers": {"0": [-1.5, True], "1": "é"}, "truncated": 0}
    kept.write(facts)
    assert kept.read() == facts
    changed = kept.path.read_text(encoding="utf-8").replace("-1.5", "-1.25")
    for content in (damage, changed.encode()):
        kept.path.write_bytes(content)
        assert kept.read() is None and "piqa-0.json: damaged" in said.pop()
