"""report.html in a real browser: a headless Chromium, over the DevTools protocol (`browser.py`).

All of it is of the slow tier; without a browser it fails and says what to install.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium
from places import place
from report_pages import ARABIC, EMOJI, HOSTILE, copy, enlarged, hostile_run, read_page

from dualsft.lab.report.examples import unpack
from dualsft.lab.report.html import write_html
from dualsft.lab.report.markdown import write_reports

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> Path:
    return hostile_run(tmp_path_factory.mktemp("report"), model_folder("llama"))


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with chromium() as page:
        yield page


def rows_shown(tab: Page) -> list[dict[str, Any]]:
    """State, numbers and preview of the rows on the page of the browser of examples."""
    return tab.js(
        """[...document.querySelectorAll('#rows details')].map((row) => ({
            row: Number(row.dataset.row),
            state: row.querySelector('.state').textContent,
            text: row.querySelector('.preview').textContent}))"""
    )


def act(tab: Page, script: str) -> None:
    """Do something to the controls and wait until the rows are those it asks for."""
    before = tab.js("document.getElementById('browser').dataset.shown")
    tab.js(script)
    tab.wait(f"document.getElementById('browser').dataset.shown !== '{before}'")


def choose(tab: Page, control: str, value: str) -> None:
    event = "input" if control == "query" else "change"
    act(
        tab,
        f"(() => {{ const c = document.getElementById('{control}'); c.value = "
        f"{json.dumps(value)}; c.dispatchEvent(new Event('{event}')); }})()",
    )


def open_row(tab: Page) -> str:
    """Open the first row and return its whole text."""
    tab.js("document.querySelector('#rows details').open = true")
    tab.wait("document.querySelector('#rows .turn.response')")
    return tab.js(
        "[...document.querySelectorAll('#rows .turn')].map((t) => t.textContent).join('')"
    )


def test_the_page_opens_without_errors_or_requests(finished: Path, tab: Page) -> None:
    tab.requests.clear()
    tab.console.clear()
    file = finished / "report.html"
    tab.open(file)
    choose(tab, "show", "all")
    assert tab.console == []
    inline = [url for url in tab.requests if not url.startswith("data:")]
    assert inline == [file.resolve().as_uri()]
    assert tab.js("document.title") == "DualSFT run run"
    assert tab.js("document.querySelectorAll('figure img')[0].naturalWidth") == 40


def test_strangers_are_shown_as_text(finished: Path, tab: Page) -> None:
    tab.open(finished / "report.html")
    choose(tab, "show", "all")
    choose(tab, "query", "ONERROR=")
    (row,) = rows_shown(tab)
    assert HOSTILE in row["text"]
    text = open_row(tab)
    assert HOSTILE in text and "{{title}} &amp; <b>bold</b>" in text
    assert tab.js("document.querySelectorAll('#rows script, #rows img, #rows b').length") == 0
    choose(tab, "query", EMOJI)
    (row,) = rows_shown(tab)
    open_row(tab)
    response = "document.querySelector('#rows .turn.response')"
    assert f"{ARABIC} {EMOJI}" in tab.js(f"{response}.textContent")
    assert tab.js(f"getComputedStyle({response}).direction") == "rtl"
    assert tab.js("document.title") == "DualSFT run run"


def test_search_sort_filter_and_pages(finished: Path, tab: Page) -> None:
    columns = unpack(read_page(finished)[1]["examples-data"])
    texts = ["".join(parts) for parts in unpack(read_page(finished)[1]["text-0"])]
    tab.open(finished / "report.html")
    everyone = range(len(columns["id"]))

    def ordered(rows: list[int], key: str, down: bool) -> list[int]:
        known = [i for i in rows if columns[key][i] is not None]
        sign = -1 if down else 1
        return sorted(known, key=lambda i: (sign * columns[key][i], i)) + [
            i for i in rows if columns[key][i] is None
        ]

    selected = [i for i in everyone if columns["state"][i] == 0]
    assert [r["row"] for r in rows_shown(tab)] == ordered(selected, "score", True)
    choose(tab, "show", "near")
    assert {r["row"] for r in rows_shown(tab)} == set(columns["near"])
    choose(tab, "show", "rejected")
    rejected = [i for i in everyone if columns["state"][i] == 1]
    for key in ("loss", "response", "tokens", "line"):
        choose(tab, "sort", key)
        assert [r["row"] for r in rows_shown(tab)] == ordered(rejected, key, True)[:25]
    act(tab, "document.getElementById('direction').click()")
    assert [r["row"] for r in rows_shown(tab)] == ordered(rejected, "line", False)[:25]
    act(tab, "document.getElementById('next').click()")
    assert [r["row"] for r in rows_shown(tab)] == ordered(rejected, "line", False)[25:50]
    choose(tab, "show", "all")
    choose(tab, "query", "River Stone")
    wanted = [i for i in everyone if "river stone" in texts[i].lower()]
    assert wanted and {r["row"] for r in rows_shown(tab)} == set(wanted[:25])
    choose(tab, "query", columns["id"][17])
    assert [r["row"] for r in rows_shown(tab)] == [17]


def test_a_preview_leaves_out_what_all_texts_begin_with(
    finished: Path, tmp_path: Path, tab: Page
) -> None:
    lead = "<|system|>\n" + f"{EMOJI} You are a helpful assistant. " * 20 + "\n<|user|>\n"
    run, facts = enlarged(copy(finished, tmp_path), 300, lead)
    tab.open(write_html(place(run), facts, place(tmp_path)).location)
    rows = rows_shown(tab)
    assert len(rows) == 25 and len({row["text"] for row in rows}) == 25
    for row in rows:
        assert re.match(rf"… {row['row']:06d} \w", row["text"]), row["text"]
        assert row["text"].endswith(" …")
    choose(tab, "show", "all")
    choose(tab, "query", "helpful assistant")  # the search reads the whole text
    assert tab.js("document.getElementById('status').textContent") == "300 examples"
    choose(tab, "query", "needle 000123")
    assert [row["row"] for row in rows_shown(tab)] == [123]
    assert open_row(tab).startswith(lead + "needle 000123 ")


def test_a_matrix_can_be_looked_into(finished: Path, tab: Page) -> None:
    cells = unpack(read_page(finished)[1]["mask-data"])
    tab.open(finished / "report.html")
    assert tab.js("document.getElementById('zoom').hidden") is True
    tab.js("document.querySelectorAll('svg.heat .cell')[3].dispatchEvent(new Event('click'))")
    assert tab.js("document.querySelector('#zoom h3').textContent") == cells[3]["name"]
    fields = len(cells[3]["grid"]) * len(cells[3]["grid"][0])
    assert tab.js("document.querySelectorAll('#zoom rect').length") == fields
    assert f"{cells[3]['count']:,} entries" in tab.js(
        "document.querySelector('#zoom p').textContent"
    )


def test_without_javascript_the_summary_stands(finished: Path, tab: Page) -> None:
    try:
        tab.open(finished / "report.html", script=False)
        assert tab.js("document.querySelectorAll('.card').length") == 4
        assert tab.js("document.querySelectorAll('svg.heat .cell').length") == 14
        assert tab.js("document.getElementById('browser').hidden") is True
        assert tab.js("document.documentElement.dataset.ready") is None
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(finished: Path, tab: Page, width: int) -> None:
    tab.resize(width, 844, mobile=width < 600)
    tab.open(finished / "report.html")
    assert tab.js("document.documentElement.scrollWidth") <= width
    assert tab.js("document.querySelector('#rows .preview').clientWidth") > 200


WIDER = """[...document.querySelectorAll('main *')].filter((e) => !e.closest('svg')
    && e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0
    && getComputedStyle(e).overflowX === 'auto').map((e) => e.firstElementChild.tagName)"""


def test_on_a_phone_only_tables_scroll_and_show_it(
    finished: Path, tmp_path: Path, tab: Page
) -> None:
    runs = [finished, copy(finished, tmp_path), copy(finished, tmp_path / "more")]
    write_reports(runs, tmp_path / "both")
    try:
        tab.resize(360, 800, mobile=True)
        for page, script in ((finished, True), (tmp_path / "both", False)):
            tab.open(page / "report.html", script=script)
            tab.js("document.querySelectorAll('details').forEach((e) => e.open = true)")
            assert tab.js("document.documentElement.scrollWidth") == 360
            assert set(tab.js(WIDER)) == {"TABLE"}
            shadows = tab.js("getComputedStyle(document.querySelector('.scroll')).backgroundImage")
            assert shadows.count("linear-gradient") == 4
            width = "document.querySelector('.area').clientWidth"
            size = "getComputedStyle(document.querySelector('.area .x')).fontSize"
            assert tab.js(width) > 200 and tab.js(size) == "12px"
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)
        tab.resize(1280, 844)


def luminance(tab: Page, selector: str, key: str) -> float:
    colour = tab.js(f"getComputedStyle(document.querySelector('{selector}')).{key}")
    red, green, blue = (int(n) / 255 for n in re.findall(r"\d+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(
    ("media", "scheme", "dark"),
    [("screen", "light", False), ("screen", "dark", True), ("print", "dark", False)],
)
def test_dark_on_a_screen_and_light_on_paper(
    finished: Path, tab: Page, media: str, scheme: str, dark: bool
) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    try:
        tab.call("Emulation.setEmulatedMedia", media=media, features=features)
        tab.open(finished / "report.html")
        ground = luminance(tab, "section", "backgroundColor")
        assert (ground < 0.2) == dark and (ground > 0.9) != dark
        for selector, key in (
            ("section p", "color"),
            (".lead", "color"),
            (".area .x", "color"),
            (".area polyline.s0:not(.faint)", "stroke"),
            ("svg.heat text", "fill"),
            (".warning p", "color"),
        ):
            assert abs(luminance(tab, selector, key) - ground) > 0.3, selector
    finally:
        tab.call("Emulation.setEmulatedMedia", media="", features=[])


def test_a_hundred_thousand_examples_open_in_three_seconds(
    finished: Path, tmp_path: Path, tab: Page
) -> None:
    run, facts = enlarged(copy(finished, tmp_path), 100_000)
    page = write_html(place(run), facts, place(tmp_path))
    tab.console.clear()
    tab.open(page.location)
    ready = float(tab.js("document.documentElement.dataset.ready"))
    assert ready < 3000, f"{ready} ms, {page.location.stat().st_size / 2**20:.0f} MiB"
    assert len(rows_shown(tab)) == 25 and tab.console == []
    assert tab.js("document.getElementById('where').textContent") == "page 1 of 400"
    choose(tab, "show", "all")
    choose(tab, "sort", "loss")
    choose(tab, "query", "needle 077777")
    (row,) = rows_shown(tab)
    assert row["row"] == 77_777 and "077777 " in row["text"]
