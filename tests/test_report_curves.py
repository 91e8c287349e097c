"""Curves of training: what is read from metrics.jsonl, how it is thinned, and the charts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Runner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import place
from report_pages import copy, read_page

from dualsft.lab.report import curves
from dualsft.lab.report.curves import Curve, charts, read_curves, thinned, ticks_of
from dualsft.lab.report.markdown import write_report, write_reports
from dualsft.runs.preflight import load_summaries

NOW = 1_700_000_000.0
DONE = "2023-11-14T22:13:20+00:00"  # the same time


def step(number: Any, loss: Any = 1.0, lr: Any = 0.1, at: float = NOW, **more: Any) -> str:
    values = {"time": at, "stage": "finetune", "step": number, "loss": loss, "lr": lr}
    return json.dumps(values | more)


def read(
    folder: Path, lines: Iterable[str | bytes], steps: int | None = None, **more: Any
) -> Curve | None:
    """The curve of fine-tuning in a log; `steps` is their number if the stage is finished."""
    content = b"\n".join(line.encode() if isinstance(line, str) else line for line in lines)
    (folder / "metrics.jsonl").write_bytes(content)
    done = {"finished": DONE, "facts": {"steps": steps}}
    facts = {"manifests": {} if steps is None else {"finetune": done}, "outdated": []}
    return read_curves(place(folder), facts | more).get("finetune")


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    first = [step(i, loss=10 + i) for i in range(1, 8)]
    again = [step(i, loss=20 + i) for i in range(5, 10)]
    resumed = json.dumps({"time": NOW, "stage": "finetune", "resumed_at": 4})
    curve = read(tmp_path, [*first, resumed, *again], 9)
    assert curve is not None and list(curve.steps) == list(range(1, 10))
    assert list(curve.loss) == [11, 12, 13, 14, 25, 26, 27, 28, 29]
    repeated = read(tmp_path, [*first, *(step(i, loss=30) for i in (1, 2, 3))], 3)
    assert repeated is not None and list(repeated.loss) == [30, 30, 30]


def test_only_the_attempt_that_was_finished_counts(tmp_path: Path) -> None:
    steps = [step(i) for i in (1, 2, 3)]
    later = [step(i, at=NOW + 60) for i in (1, 2)]  # made anew and killed: the old stage stands
    curve = read(tmp_path, [*steps, *later], 3)
    assert curve is not None and list(curve.steps) == [1, 2, 3]
    assert read(tmp_path, steps, 4) is None  # the stage is another run's, the log an old attempt's
    under_way = read(tmp_path, [*steps, *later])
    assert under_way is not None and list(under_way.steps) == [1, 2]
    assert read(tmp_path, steps, outdated=["finetune"]) is None


def test_damaged_and_hostile_lines_are_left_out(tmp_path: Path) -> None:
    deep = '{"step": ' + "[" * 3000
    wrong: list[Any] = [True, 0, -1, 1.5, "2", None, [], 10**10, 10**400]
    lines: list[str | bytes] = [
        *(deep, "", "{", '{"step": 1}', '"step"', b'\xff\xfe"step"', '["step"]'),
        *(step(value) for value in wrong),
        *(step(1, loss=value) for value in ("nan", None, True, [], 10**400, 1e300)),
        *(step(1, lr=value) for value in (-1, "nan", None)),
        *(step(2, loss=float(word)) for word in ("nan", "inf")),  # JSON of other programs
        *(step(3, stage=value) for value in ("other", 1, None, [])),
        step(4, padding="x" * 10_000),
        step(7),
        step(8)[:-5],
    ]
    curve = read(tmp_path, lines)
    assert curve is not None and list(curve.steps) == [7]


def test_a_log_is_read_up_to_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [step(i) for i in range(1, 101)]
    monkeypatch.setattr(curves, "MAX_LINES", 50)
    curve = read(tmp_path, lines)
    assert curve is not None and len(curve.steps) == 50
    monkeypatch.setattr(curves, "MAX_METRICS_BYTES", 10 * len(lines[0]))
    curve = read(tmp_path, lines)
    assert curve is not None and len(curve.steps) == 9


def curve_of(losses: Iterable[float], lr: float = 0.1) -> Curve:
    curve = Curve()
    for at, loss in enumerate(losses, 1):
        curve.add(at, loss, lr)
    return curve


def test_thinning_keeps_means_and_extremes() -> None:
    losses = np.random.default_rng(0).normal(5, 1, 12_345)
    one = thinned(curve_of(losses))
    assert len(one.x) == curves.POINTS and one.x[-1] == 12_345
    counts = np.diff([0, *one.x])
    assert (one.loss * counts).sum() == pytest.approx(losses.sum())
    assert one.high.max() == losses.max() and one.low.min() == losses.min()
    assert np.all((one.low <= one.loss) & (one.loss <= one.high))
    assert one.trend.std() < one.loss.std() and abs(one.trend.mean() - 5) < 0.05
    few = thinned(curve_of([3.0, 1.0, 2.0]))
    assert few.loss.tolist() == few.trend.tolist() == few.low.tolist() == [3.0, 1.0, 2.0]


FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, 5e-324, 3e-323, 1e-322, 1e-300, 1e308]
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(FLOATS, min_size=2, max_size=30),
    st.lists(FLOATS.map(abs), min_size=1, max_size=3),
)
@example([1.0, 2.0], [3e-323])
@example([1e-322, 5e-324], [0.1])
@example([5e-324, 5e-324], [5e-324, 1e300])
def test_any_numbers_have_a_chart_of_bounded_size(losses: list[float], rates: list[float]) -> None:
    runs = {f"run {at}": {"finetune": curve_of(losses, lr)} for at, lr in enumerate(rates)}
    [training] = charts(runs)
    for chart in training["charts"]:
        assert 0 <= len(chart["x_ticks"]) <= 12 and len(chart["y_ticks"]) <= 50
        for *_, points in chart["lines"]:
            numbers = [float(n) for pair in points.split() for n in pair.split(",")]
            assert len(numbers) == 2 * len(losses) and np.isfinite(numbers).all()
            assert min(numbers) >= -100 and max(numbers) <= 200


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 60, [0, 20, 40, 60]),
        (4.2, 6.9, [5, 6]),
        (0, 0.001, [0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001]),
        (-3, 3, [-2, 0, 2]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert ticks_of(low, high) == wanted


def test_runs_share_the_axes() -> None:
    runs = {
        "a": {"finetune": curve_of(np.linspace(4, 2, 100), 1e-3)},
        "b": {"finetune": curve_of(np.linspace(3, 1, 50), 0.5), "warmup": curve_of([5, 4])},
        "c": {},
    }
    warmup, tuning = charts(runs)
    assert [name for name, *_ in tuning["legend"]] == ["a", "b"]
    assert [name for name, *_ in warmup["legend"]] == ["b"]
    assert warmup["legend"][0][1:] == tuning["legend"][1][1:]  # one colour per run
    loss, rate = tuning["charts"]
    ends = [points.split()[-1].split(",") for *_, points in loss["lines"]]
    assert [float(x) for x, _ in ends] == [100, 50]  # a shorter run ends earlier
    assert float(ends[0][1]) < float(ends[1][1])  # and a lower loss is lower
    assert [words for _, words in rate["y_ticks"]] == ["0.001", "0.01", "0.1"]
    assert "band" not in loss and "faint" not in loss
    assert loss["strips"][0][2].split("\n")[1:] == ["a: 3.97", "b: 2.959"]
    assert len(loss["strips"][-1][2].split("\n")) == 2
    head, rows = tuning["table"]
    assert head[1:] == ["a: loss", "a: learning rate", "b: loss", "b: learning rate"]
    assert rows[0] == ["1", "4.0000", "0.001", "3.0000", "0.5"] and rows[-1][3:] == ["–", "–"]


# --- on the pages -------------------------------------------------------------------------------


def part_of(page: str, anchor: str) -> str:
    return page[page.index(f'<section id="{anchor}">') :].partition("</section>")[0]


def test_the_page_of_a_run_has_its_curves(shared_run: Runner, tmp_path: Path) -> None:
    run = copy(shared_run(), tmp_path)
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {s: sum("step" in r and r["stage"] == s for r in log) for s in ("warmup", "finetune")}
    part = part_of(read_page(run)[0], "training")
    titles = re.findall(r"<h3>([^<]*)</h3>", part)
    assert titles == [
        f"Warmup, {steps['warmup']} steps",
        f"Fine-tuning, {steps['finetune']} steps",
    ]
    assert part.count('<figure class="plot">') == 4 and part.count("<details>") == 2
    last = [r for r in log if r["stage"] == "finetune" and "step" in r][-1]
    assert f"{last['loss']:.4f}" in part  # in the table
    assert "<script" not in part
    (run / "metrics.jsonl").write_text("<script>\n")
    write_report(place(run))
    part = part_of(read_page(run)[0], "training")
    assert "<svg" not in part and "peak learning rate" in part
    assert "| steps | " in (run / "report.md").read_text()


def test_lora_side_by_side(shared_run: Runner, tmp_path: Path) -> None:
    lora = shared_run("method.data=random", "method.params=lora", "method.lora.r=2")
    runs = [copy(run, tmp_path / name) for run, name in ((shared_run(), "mask"), (lora, "lora"))]
    write_reports(runs, tmp_path / "both")
    text = (tmp_path / "both/report.md").read_text()
    tuned = [load_summaries(place(run))["finetune"] for run in runs]
    total = tuned[0]["num_parameters"]
    own, theirs = (
        f"{one['trained_entries']:,} ({100 * one['trained_entries'] / total:.2f} %)"
        for one in tuned
    )
    assert f"| trained parameters | {own} | {theirs} in an adapter |" in text
    assert f"| changed entries | {own} | all of the adapted layers |" in text
    assert "| peak learning rate | 0.001 | 0.01 |" in text and "| none (lora) |" in text
    page = (tmp_path / "both/report.html").read_text()
    part = part_of(page, "training")
    assert part.count('class="s1"') >= 3 and "copy" in part  # legend, and a line in each plot
    facts = load_summaries(place(runs[1]))
    assert facts["finetune"]["changed_entries"] is None
    assert f"an adapter of {tuned[1]['trained_entries']:,} parameters" in read_page(lora)[0]
    assert "no mask on the weights" not in read_page(lora)[0]
