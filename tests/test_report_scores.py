"""The histogram of scores in report.html: cut-off, unit and ticks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from places import place
from report_pages import read_page, seal

import dualsft
from dualsft.lab.report.examples import cut_off, unpack
from dualsft.lab.report.markdown import write_report
from dualsft.lab.report.parts import histogram
from dualsft.lab.report.warnings import COUNTED, KNOWN


def lines_of(text: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", text)


def test_the_cut_off_lies_between_the_two_sets() -> None:
    low, high = np.array([-1.0, 0.0, 1.0]), np.array([2.0, 3.0])
    assert cut_off(high, low) == cut_off(low, high) == 1.5  # reversed selections take the low end
    assert cut_off(np.array([1.0, 4.0]), np.array([1.0, 0.0])) == 1.0  # a tie
    assert cut_off(np.array([0.0, 4.0]), np.array([1.0, 2.0])) is None
    assert cut_off(high, low[:0]) is None and cut_off(high[:0], low) is None


def test_the_histogram_says_what_it_shows() -> None:
    scores = np.linspace(-1, 3, 400)
    label = "predicted decrease of the validation loss (nats)"
    text = histogram(scores[300:], scores[:300], 2.0, label)
    assert {label, "examples per bin", "0", "cut-off 2"} <= set(lines_of(text))
    dashed = re.findall(r"<line x1='([\d.]+)'[^>]*dasharray", text)
    (zero,) = re.findall(r"<text x='([\d.]+)' y='[\d.]+' text-anchor='middle'>0</text>", text)
    low, high = np.percentile(scores, [0.5, 99.5])
    assert float(dashed[0]) == pytest.approx(72 + 600 * (2 - low) / (high - low), abs=0.1)
    assert float(zero) == pytest.approx(72 - 600 * low / (high - low), abs=0.1)
    without = histogram(scores[::2], scores[1::2], None, label)
    assert "dasharray" not in without and "there is no cut-off" in without
    positive = histogram(scores[300:], scores[200:300], 2.0, label)
    assert "text-anchor='middle'>0<" not in positive


def scores_part(page: str) -> str:
    return page[page.index("<section id='scores'>") :].partition("</section>")[0]


def sides(data: dict[str, str]) -> tuple[list[float], list[float]]:
    """Scores of the selected and of the rejected."""
    columns = unpack(data["examples-data"])
    both = list(zip(columns["score"], columns["state"], strict=True))
    return [x for x, s in both if s == 0], [x for x, s in both if s == 1]


def test_the_cut_off_of_a_reversed_selection(make_run: Callable[..., Path]) -> None:
    page, data = read_page(make_run("method.data=dualsft_reversed"))
    chosen, rest = sides(data)
    assert max(chosen) < min(rest)
    words = lines_of(scores_part(page))
    assert f"cut-off {(max(chosen) + min(rest)) / 2:.3g}" in words
    assert "predicted decrease of the validation loss (nats)" in words


def test_scores_of_another_method_have_their_own_unit(make_run: Callable[..., Path]) -> None:
    words = lines_of(scores_part(read_page(make_run("method.data=top_loss"))[0]))
    assert "score of top_loss, larger is better" in words
    assert any(word.startswith("cut-off") for word in words)


def test_two_sets_that_overlap_have_no_cut_off(make_run: Callable[..., Path]) -> None:
    """As after a second round, whose choice is not by the scores that are shown."""
    run = make_run()
    columns = unpack(read_page(run)[1]["examples-data"])
    ranked = sorted((r, i) for i, r in enumerate(columns["rank"]) if r is not None)
    moved = [columns["id"][i] for _, i in [*ranked[:11], ranked[40]]]
    (run / "5_selection/ids.json").write_text(json.dumps(moved))
    seal(run, "selection", "ids.json")
    write_report(place(run))
    part = scores_part(read_page(run)[0])
    assert "the two overlap, so there is no cut-off" in part and "dasharray" not in part


def test_every_code_that_the_package_warns_with_is_known_to_the_report() -> None:
    """And every code that the report knows is given somewhere: no entry is dead."""
    source = Path(dualsft.__file__).parent
    given = {
        word.value.value
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "code" and isinstance(word.value, ast.Constant)
    }
    assert given == {*KNOWN, *COUNTED}
