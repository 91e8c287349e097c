"""Figures of a comparison, from a comparison.json made by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from places import place

from dualsft.lab.plots import draw_comparison, panels, save

LEARNS = {"loss.new": 0.5, "kl.new": 2.0, "kl.old": 0.01, "kl.code": 0.03}
FORGETS = {"loss.new": 1.5, "kl.new": 0.1, "kl.old": 1.0, "kl.code": 3.0}
REST = {"loss.old": 1.0, "loss.code": 1.0, "loss.validation": 9.0, "kl.validation": 9.0}


def drawn(out: Path, names: list[str], more: dict[str, float]) -> list[str]:
    """The figures of a comparison whose evaluation has the files `names`, and `more` of it."""
    keys = [*more, *(f"{kind}.{name}" for name in names for kind in ("loss", "kl"))]
    rows = [
        {"name": name, "values": {key: {"mean": (values | REST | more)[key]} for key in keys}}
        for name, values in (("learns", LEARNS), ("forgets", FORGETS))
    ]
    columns = [{"key": key, "title": key, "better": -1} for key in keys]
    cost = [{"name": row["name"], "values": {"total_seconds": {"mean": 9.0}}} for row in rows]
    tables = [
        {"title": "Results", "kind": "results", "columns": columns, "rows": rows, "where": "m"},
        {"title": "Resources", "kind": "resources", "columns": [], "rows": cost, "where": "m"},
    ]
    (out / "comparison.json").write_text(json.dumps({"tables": tables}))
    return sorted(path.name for path in draw_comparison(place(out)))


def places(svg: Path) -> dict[str, tuple[float, float]]:
    """Where the markers stand in the axes, which come before the legend; y grows downwards."""
    text = svg.read_text()
    marks = re.findall(r"<use [^>]*x=\"([\d.]+)\" y=\"([\d.]+)\" style=\"fill: #(\w+)", text)
    colours = {"0072b2": "learns", "d55e00": "forgets"}
    return {colours[c]: (float(x), float(y)) for x, y, c in reversed(marks) if c in colours}


def test_what_learns_and_forgets_nothing_stands_at_small_kl(tmp_path: Path) -> None:
    files = drawn(tmp_path, ["new", "old", "code", "validation"], {})
    assert files[:2] == ["forgetting_Results.png", "forgetting_Results.svg"]
    at = places(tmp_path / "forgetting_Results.svg")
    names = re.findall(
        r"<!-- (learns|forgets) -->", (tmp_path / "forgetting_Results.svg").read_text()
    )
    assert names == ["learns", "forgets"]  # the legend
    assert at["learns"][0] < at["forgets"][0]  # KL on the other files: small is left
    assert at["learns"][1] > at["forgets"][1]  # loss on the new task: small is below
    text = (tmp_path / "forgetting_Results.svg").read_text()
    assert "<!-- forgetting: mean KL to the base on old, code (lower is better) -->" in text
    assert "<!-- new skill: loss on new (lower is better) -->" in text
    assert "<!-- 2.0 -->" in text and "<!-- 3.0 -->" not in text  # 0.02 and 2.0 are the means


@pytest.mark.parametrize("names", [["new"], ["new", "validation"], ["validation"]])
def test_without_another_file_there_is_no_forgetting_plane(
    tmp_path: Path, names: list[str]
) -> None:
    old = tmp_path / "forgetting_Results.svg"
    old.write_text("of an earlier comparison")
    files = drawn(tmp_path, names, {})
    assert not old.exists() and not [name for name in files if name.startswith("forgetting")]
    assert "frontier_time_Results.svg" in files


def test_benchmarks_make_a_plane_of_their_own_where_there_are_any(tmp_path: Path) -> None:
    summary = {"summary.plasticity": 0.5, "summary.stability": 0.25}
    assert "forgetting_Results.svg" in drawn(tmp_path, ["new", "old"], summary)
    text = (tmp_path / "skills_Results.svg").read_text()
    assert "<!-- stability (higher is better) -->" in text
    assert "<!-- plasticity (higher is better) -->" in text
    files = drawn(tmp_path, ["new", "old"], {})
    assert "forgetting_Results.svg" in files and "skills_Results.svg" not in files
    assert not (tmp_path / "skills_Results.svg").exists()


def test_planes_need_no_resource_table_and_titles_keep_their_files(tmp_path: Path) -> None:
    """Titles that differ in signs alone, or hold the sign between title and place."""
    drawn(tmp_path, ["new", "old"], {})
    made = json.loads((tmp_path / "comparison.json").read_text())
    [results, resources] = made["tables"]
    alone = [{**results, "title": t, "where": t} for t in ("a · b", "m 1", "m-1")]
    for tables in (alone, [*alone, {**resources, "where": "a · b"}]):
        (tmp_path / "comparison.json").write_text(json.dumps({"tables": tables}))
        names = [path.stem for path in draw_comparison(place(tmp_path)) if path.suffix == ".svg"]
        assert [n for n in names if n.startswith("forgetting")] == [
            f"forgetting_{stem}" for stem in ("a___b", "m_1", "m_1_2")
        ]
        frontiers = [n for n in names if n.startswith("frontier")]
        assert frontiers == (["frontier_time_a___b"] if len(tables) == 4 else [])


@pytest.mark.parametrize(
    ("kind", "values", "label"),
    [("log", [1e-3, 1e3], "1e−03"), ("log", [2.0, 5.0], "3"), ("symlog", [0, 50], "10")],
)
def test_no_tick_label_is_tex(kind: str, values: list[float], label: str, tmp_path: Path) -> None:
    figure, (axes,) = panels()
    axes.plot(values, values)
    axes.set_xscale(kind)
    axes.set_yscale(kind)
    axes.set_title("costs $5")
    text = save(figure, place(tmp_path) / "ticks")[0].read_text()
    assert "mathdefault" not in text and text.count(f"<!-- {label} -->") == 2
    assert "<!-- costs $5 -->" in text
