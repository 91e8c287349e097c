"""report.html, the model card and runs side by side: the embedded data parsed back."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import corpus_rows, write_jsonl
from huggingface_hub import ModelCard
from places import place
from report_pages import ARABIC, EMOJI, HOSTILE, copy, hostile_run, read_page, replaced, seal
from safetensors.numpy import load_file
from typer.testing import CliRunner

import dualsft
from dualsft.cli import app
from dualsft.errors import ConfigError, RunError
from dualsft.lab.report.examples import (
    STATES,
    collect_examples,
    cut_off,
    density,
    token_cap,
    unpack,
)
from dualsft.lab.report.facts import COUNTED, LOSS_NOTE, concerns, flat, known_warnings, leaf
from dualsft.lab.report.html import histogram
from dualsft.lab.report.hub import export_hub
from dualsft.lab.report.markdown import write_report, write_reports
from dualsft.model.load import load_tokenizer
from dualsft.runs.preflight import load_summaries


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> Path:
    return hostile_run(tmp_path_factory.mktemp("report"), model_folder("llama"))


# --- the data in the page -----------------------------------------------------------------------


def test_every_example_is_in_the_page_as_the_run_has_it(finished: Path) -> None:
    _, data = read_page(finished)
    columns = unpack(data["examples-data"])
    tokens = pq.read_table(finished / "1_split/tokens.parquet").to_pylist()
    assert columns["id"] == [row["id"] for row in tokens]
    chosen = set(json.loads((finished / "5_selection/ids.json").read_text()))
    states = [STATES[s] for s in columns["state"]]
    assert {i for i, s in zip(columns["id"], states, strict=True) if s == "selected"} == chosen
    names = {"val": "validation", "anchor": "anchor", "warm": "warmup", "pool": "rejected"}
    for row, state in zip(tokens, states, strict=True):
        assert state == ("selected" if row["id"] in chosen else names[row["role"]])
    scored = {r["id"]: r for r in pq.read_table(finished / "4_scores/examples.parquet").to_pylist()}
    for at, row in enumerate(tokens):
        assert columns["tokens"][at] == len(row["input_ids"])
        assert columns["response"][at] == sum(label != -100 for label in row["labels"][1:])
        if row["id"] in scored:
            wanted = scored[row["id"]]
            assert columns["loss"][at] == pytest.approx(wanted["loss"], rel=1e-6)
            assert abs(columns["score"][at] - wanted["score"]) <= wanted["bound"] * 1.0001 + 1e-15
        else:
            assert columns["score"][at] is None and columns["rank"][at] is None


def test_the_text_is_what_the_model_saw(finished: Path) -> None:
    _, data = read_page(finished)
    tokenizer = load_tokenizer(finished / "6_finetune/model")
    rows = unpack(data["text-0"])
    tokens = pq.read_table(finished / "1_split/tokens.parquet").to_pylist()
    assert len(rows) == len(tokens)
    for parts, row in zip(rows, tokens, strict=True):
        assert "".join(parts) == tokenizer.decode(row["input_ids"], skip_special_tokens=False)
        inside = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
        assert "".join(parts[1::2]) == tokenizer.decode(inside, skip_special_tokens=False)
    assert sum(HOSTILE in "".join(parts) for parts in rows) == 1
    assert sum(EMOJI in "".join(parts) and ARABIC in parts[0] for parts in rows) == 1


def test_no_row_can_break_out_of_the_page(finished: Path) -> None:
    page, data = read_page(finished)
    assert HOSTILE not in page and "<img src=x" not in page and "<b>bold" not in page
    own = re.findall(r"<script[^>]*>", page)
    assert own.count("<script>") == 1 and len(own) == len(data) + 1
    assert "&lt;script&gt;document.title=&#39;broken&#39;" in page  # the prompt, in the results
    assert "{{title}}" not in page  # what stands in a row is no template, and is packed
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page.partition("<body>")[2])


def test_ranks_and_the_boundary(finished: Path) -> None:
    columns = unpack(read_page(finished)[1]["examples-data"])
    ranked = sorted((r, i) for i, r in enumerate(columns["rank"]) if r is not None)
    assert [r for r, _ in ranked] == list(range(1, len(ranked) + 1))
    b = sum(s == 0 for s in columns["state"])
    assert {i for _, i in ranked[:b]} == {i for i, s in enumerate(columns["state"]) if s == 0}
    assert set(columns["near"]) == {i for _, i in ranked[b - 10 : b + 10]}


def test_the_mask_adds_up(finished: Path) -> None:
    cells = unpack(read_page(finished)[1]["mask-data"])
    mask = load_file(finished / "5_selection/mask.safetensors")
    summary = json.loads((finished / "5_selection/summary.json").read_text())
    assert {c["name"]: c["count"] for c in cells} == {n: len(i) for n, i in mask.items()}
    assert sum(c["count"] for c in cells) == summary["k"]
    assert sum(summary["per_module"].values()) == summary["k"] > 0
    for module, count in summary["per_module"].items():
        assert sum(c["count"] for c in cells if c["module"] == module) == count


def test_density_against_the_dense_mask() -> None:
    rng = np.random.default_rng(0)
    for shape in ([50, 31], [3, 100], [7]):
        dense = rng.random(shape) < 0.2
        grid = density(np.flatnonzero(dense), shape, 24)
        flat = dense.reshape(shape[0] if len(shape) > 1 else 1, -1)
        high, wide = len(grid), len(grid[0])
        rows, columns = (
            np.arange(n) * m // n for n, m in zip(flat.shape, (high, wide), strict=True)
        )
        wanted = [
            [flat[np.ix_(rows == r, columns == c)].mean() for c in range(wide)] for r in range(high)
        ]
        np.testing.assert_allclose(grid, wanted, atol=1e-5)


def test_texts_are_cut_to_the_budget() -> None:
    counts = np.array([10, 20, 30, 4000, 5000])
    assert token_cap(counts, 10_000) is None
    cap = token_cap(counts, 3060)
    assert cap == 1500 and np.minimum(counts, cap).sum() <= 3060


# --- the summary, the warnings, the rest of the page --------------------------------------------


def test_the_summary_answers_four_questions(finished: Path) -> None:
    page, _ = read_page(finished)
    chosen = json.loads((finished / "5_selection/summary.json").read_text())
    assert re.findall(r'<div class="card"><h3>(\w+)', page) == ["Chosen", "Cost", "Gained", "Kept"]
    assert f"{chosen['b']:,} of {chosen['num_full']:,} examples" in page
    assert f"{chosen['k']:,} of {chosen['denominator']:,} candidate parameters" in page
    for anchor in ("warnings", "results", "examples", "mask", "scores", "cost", "settings"):
        assert f'<section id="{anchor}">' in page
    assert "Short warmup" in page and "lower warmup.batch_size" in page


def test_diagnostics_are_shown_with_their_figures(finished: Path) -> None:
    page, _ = read_page(finished)
    part = page[page.index('<section id="diagnostics">') :].partition("</section>")[0]
    first, second = part.split("<article>")[1:]
    assert "local regret</h3>" in first and "earlier version" not in first
    assert "local regret two</h3>" in second and "earlier version" in second
    assert first.count("data:image/svg+xml;base64,") == second.count("data:image/svg") == 1
    assert "Table 7" in first and "0.5" in first and HOSTILE not in part


MADE_FROM = (["a list"], None, {"stages": ["selection"]})


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2",
        *(json.dumps({"paper": "Table 7", "result": {}, "made_from": of}) for of in MADE_FROM),
    ],
)
def test_a_damaged_diagnostic_is_refused(finished: Path, tmp_path: Path, text: str) -> None:
    run = copy(finished, tmp_path)
    (run / "diagnostics/local_regret.json").write_text(text)
    with pytest.raises(
        RunError, match=r"local_regret.json: not the output of a diagnostic.*delete it"
    ):
        write_report(place(run))


@pytest.mark.parametrize(
    "text", ["model: {path: [", "- a list", "model: llama", "a: 2020-99-99", b"\xff\xfe\xff"]
)
def test_damaged_settings_are_refused_before_anything_is_written(
    finished: Path, tmp_path: Path, text: str | bytes
) -> None:
    run = copy(finished, tmp_path)
    file, out = run / "config.yaml", tmp_path / "out"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    for runs in ([run], [finished, run]):
        with pytest.raises(RunError, match=r"config.yaml: not the settings of a run.*move it away"):
            write_reports(runs, out)
        assert not out.exists()
    file.unlink()  # the cure
    write_reports([run], out)
    assert "# unknown fine-tuned with DualSFT" in (out / "model_card.md").read_text()


def test_an_old_run_that_names_no_methods(finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    facts = load_summaries(place(run))
    facts["selection"].pop("methods")
    (run / "5_selection/summary.json").write_text(json.dumps(facts["selection"]))
    seal(run, "selection", "summary.json")
    write_report(place(run))
    assert "trained on 12 examples (10.0 % of 120); " in (run / "model_card.md").read_text()
    assert "<li>by </li>" not in read_page(run)[0]


def test_damaged_rows_are_refused(finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path)
    file = run / "1_split/tokens.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"tokens.parquet has a different SHA-256"):
        write_report(place(run))


def test_a_tokenizer_that_cannot_decode_is_named(finished: Path) -> None:
    class Broken:
        def get_vocab(self) -> dict[str, int]:
            return {}

        def batch_decode(self, *_: Any, **__: Any) -> list[str]:
            raise OverflowError("id 99 is none of mine")

    examples = collect_examples(place(finished), load_summaries(place(finished)), Broken())
    assert examples.chunks == [] and "OverflowError: id 99 is none of mine" in examples.no_text
    assert examples.count == 120


@pytest.mark.parametrize("until", ["split", "scores", "selection"])
def test_a_run_that_stopped_early_has_a_page(make_run: Callable[..., Path], until: str) -> None:
    run = make_run(until=until)
    write_report(place(run))
    page, data = read_page(run)
    assert "not finished; still to come:" in page and not (run / "model_card.md").exists()
    columns = unpack(data["examples-data"])
    assert len(columns["id"]) == 120 and (0 in columns["state"]) == (until == "selection")
    assert ("No text is shown" in page) == (until == "split") == ("text-0" not in data)


def test_runs_of_other_methods(make_run: Callable[..., Path]) -> None:
    run = make_run("method.data=random", "method.params=random", "select.variant=dual")
    columns = unpack(read_page(run)[1]["examples-data"])
    assert set(columns["score"]) == {None} and columns["near"] == []
    assert STATES.index("warmup") not in columns["state"]  # random may choose those rows
    run = make_run("method.data=all", "method.params=all", out="sft")
    page, data = read_page(run)
    states = [STATES[s] for s in unpack(data["examples-data"])["state"]]
    assert set(states) == {"selected", "validation", "anchor"} and "mask-data" not in data
    assert "all of the data" in page and "no mask on the weights" in page


def test_re_selection_shows_the_last_round(make_run: Callable[..., Path]) -> None:
    run = make_run("select.rounds=2")
    page, data = read_page(run)
    chosen = set(json.loads((run / "5_selection/round_2/ids.json").read_text()))
    columns = unpack(data["examples-data"])
    got = {i for i, s in zip(columns["id"], columns["state"], strict=True) if s == 0}
    assert got == chosen and "Scores are from before re-selection" in page


SCORES: dict[str, Any] = {
    "curvature_share": 1e-3,
    "checks": {"alone": [{"error": 1e-8, "rounding": 1e-6}]},
    "lam_effective": 1.0,
    "norms": {"prior_grad": 1.0, "val_grad": 1.0},
}
CHOSEN: dict[str, Any] = {
    "b": 10,
    "k": 100,
    "num_nonpositive_examples": 0,
    "num_nonpositive_params": 0,
    "near_ties": 0,
    "response_tokens_selected": 100.0,
    "response_tokens_pool": 100.0,
}
LOSSES = {"validation": {"before": {"loss": 2.0}, "after": {"loss": 1.0}}}


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({}, None),
        ({"curvature_share": 1e-7}, "Curvature share below rounding"),
        ({"lam_effective": 2.1}, "Preservation dominates"),
        ({"num_nonpositive_examples": 3}, "Negative scores among the selected examples"),
        ({"num_nonpositive_params": 3}, "Negative scores among the selected entries"),
        ({"near_ties": 2}, "Ties at the boundary"),
        ({"near_ties": 2, "dtype": "bfloat16"}, "Ties at the boundary"),
        ({"response_tokens_selected": 160.0}, "Length drift"),
        ({"response_tokens_selected": 60.0}, "Length drift"),
        ({"code": "short_warmup"}, "Short warmup"),
        ({"code": "note"}, "Note of the stage warmup"),
        ({"code": None}, "Note of the stage warmup"),  # a run made before warnings had codes
        ({"code": "small_corpus"}, "Fewer rows than the paper's"),
        ({"code": "nonpositive_scores"}, None),
        ({"loss": 2.5}, "Validation loss rose"),
        ({"outdated": ["finetune"]}, "Stages out of date"),
    ],
)
def test_each_warning_has_meaning_and_cure(change: dict[str, Any], title: str | None) -> None:
    after, dtype = {"loss": change.get("loss", 1.0)}, change.get("dtype", "float32")
    facts = {
        "warnings": {"warmup": ["what was said"] if "code" in change else []},
        "warning_codes": {"warmup": [change["code"]] if change.get("code") else []},
        "outdated": change.get("outdated", []),
        "manifests": {"gradients": {"fingerprint": {"settings": {"dtype": dtype}}}},
        "scores": SCORES | {k: v for k, v in change.items() if k in SCORES},
        "selection": CHOSEN | {k: v for k, v in change.items() if k in CHOSEN},
        "evaluation": {"files": {"validation": LOSSES["validation"] | {"after": after}}},
    }
    found = concerns(facts)
    assert [c.title for c in found] == ([title] if title else [])
    assert all(len(c.meaning) > 30 and len(c.cure) > 5 for c in found)
    assert any("model.dtype=float32" in c.cure for c in found) == (dtype == "bfloat16")
    if "code" in change and title is not None:
        assert "what was said" in found[0].found


def test_what_matters_stands_first() -> None:
    said = {"split": ["a", "b"], "warmup": ["c"]}
    codes = {"split": ["small_corpus", "note"], "warmup": ["short_warmup"]}
    facts = {"warnings": said, "warning_codes": codes, "outdated": []}
    facts |= {"selection": CHOSEN | {"near_ties": 2}}
    wanted = ["Short warmup", "Ties at the boundary", "Fewer rows than the paper's"]
    assert [c.title for c in concerns(facts)] == [*wanted, "Note of the stage split"]


def test_every_code_that_the_package_warns_with_is_known_to_the_report() -> None:
    """And every code that the report knows is given somewhere: no entry is dead."""
    given = {
        word.value.value
        for path in Path(dualsft.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "code" and isinstance(word.value, ast.Constant)
    }
    assert given == {*known_warnings(), *COUNTED}


def test_both_reports_have_the_same_warnings(finished: Path) -> None:
    found = concerns(load_summaries(place(finished)))
    assert len(found) > 2
    text, page = (finished / "report.md").read_text(), read_page(finished)[0]
    listed = text.partition("## Warnings\n")[2].partition("\nSettings:")[0]
    assert re.findall(r"^- \*\*(.*?)\.\*\* ", listed, re.M) == [c.title for c in found]
    assert page.count('<div class="warning">') == len(found)
    assert all(c.cure in listed and c.meaning in listed for c in found)


def test_loss_and_perplexity_are_told_apart(finished: Path) -> None:
    for file in ("report.html", "report.md", "model_card.md"):
        assert LOSS_NOTE in (finished / file).read_text()


def test_benchmarks_are_in_every_report(make_run: Callable[..., Path]) -> None:
    run = make_run()
    side = {"score": 0.5, "interval": [0.4, 0.6], "items": 20, "format_errors": 1}
    task = {"metric": "acc", "num_fewshot": 5, "before": side, "after": side | {"score": 0.75}}
    means = {"plasticity": 0.5, "stability": None, "overall": None}
    summary = {"before": means, "after": means | {"plasticity": 0.75}, "notes": ["few | tasks"]}
    replaced(run, "evaluation", "results.json", {"tasks": {"gsm8k": task}, "summary": summary})
    write_report(place(run))
    page, _ = read_page(run)
    assert "new skill 50.0 % → 75.0 %" in page and "75.0 % (40.0 – 60.0)" in page
    assert "| gsm8k | acc | 20 |" in (run / "report.md").read_text()
    assert "| gsm8k (acc, 5 shots) | 50.0 % | 75.0 % |" in (run / "model_card.md").read_text()


def test_nested_numbers_become_dotted_keys() -> None:
    value = {"a": 1, "deep": {"b": [{"c": 2.5, "d": "x"}, {"c": True}]}, "many": [*range(99)]}
    rows = {key: leaf(one) for key, one in flat(value)}
    assert rows.pop("many").endswith("39, … (99 in all)")
    assert rows == {"a": "1", "deep.b.1.c": "2.5", "deep.b.1.d": "x", "deep.b.2.c": "yes"}


# --- the histogram of scores --------------------------------------------------------------------


def test_the_cut_off_lies_between_the_two_sets() -> None:
    low, high = np.array([-1.0, 0.0, 1.0]), np.array([2.0, 3.0])
    assert cut_off(high, low) == cut_off(low, high) == 1.5  # reversed selections take the low end
    assert cut_off(np.array([1.0, 4.0]), np.array([1.0, 0.0])) == 1.0  # a tie
    assert cut_off(np.array([0.0, 4.0]), np.array([1.0, 2.0])) is None
    assert cut_off(high, low[:0]) is None and cut_off(high[:0], low) is None


def test_the_histogram_shows_the_cut_off_and_zero() -> None:
    scores = np.linspace(-1, 3, 400)
    low, high = np.percentile(scores, [0.5, 99.5])
    chart = histogram(scores[300:], scores[:300], 2.0, "unit")
    assert chart is not None and chart["note"] == "dashed: the cut-off"
    assert chart["label"] == "unit"
    cut = 100 * (2 - low) / (high - low)
    assert chart["cut_label"] == (pytest.approx(cut), "cut-off 2")
    assert [x for x, kind in chart["lines"] if kind == "cut"] == [pytest.approx(cut)]
    zeros = [x for x, anchor, words in chart["ticks"] if (anchor, words) == ("middle", "0")]
    assert zeros == [pytest.approx(-100 * low / (high - low))]

    without = histogram(scores[::2], scores[1::2], None, "unit")
    assert without is not None and "there is no cut-off" in without["note"]
    assert "cut" not in [line[-1] for line in without["lines"]]
    positive = histogram(scores[300:], scores[200:300], 2.0, "unit")
    assert positive is not None and ("middle", "0") not in [x[1:] for x in positive["ticks"]]
    assert histogram(scores[:1], scores[:0], None, "unit") is None


def scores_part(page: str) -> str:
    return page[page.index('<section id="scores">') :].partition("</section>")[0]


def test_the_cut_off_of_a_reversed_selection(make_run: Callable[..., Path]) -> None:
    page, data = read_page(make_run("method.data=dualsft_reversed"))
    columns = unpack(data["examples-data"])
    both = list(zip(columns["score"], columns["state"], strict=True))
    chosen, rest = ([x for x, s in both if s == state] for state in (0, 1))
    assert max(chosen) < min(rest)
    part = scores_part(page)
    assert f">cut-off {(max(chosen) + min(rest)) / 2:.3g}</span>" in part
    assert ">predicted decrease of the validation loss (nats)</p>" in part
    assert ">examples per bin</figcaption>" in part and part.count('class="cut"') == 1


@pytest.mark.parametrize("method", ["dualsft", "dualsft_reversed"])
def test_repeats_that_were_passed_over_hide_no_cut_off(
    method: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    rows = corpus_rows()
    rows += [dict(row) for row in rows[:60]]  # copies of good and of bad rows
    words = ["select.duplicates=exact", "score.mode=two_pass", f"method.data={method}"]
    file = write_jsonl(tmp_path / "copies.jsonl", rows)
    page, data = read_page(make_run(f"data.path={file}", *words))
    columns, sign = unpack(data["examples-data"]), 1 if method == "dualsft" else -1
    both = list(zip(columns["score"], columns["state"], strict=True))
    chosen, rest = ([sign * x for x, s in both if s == state] for state in (0, 1))
    better = [x for x in rest if x > min(chosen)]
    cut = sign * (min(chosen) + max(x for x in rest if x <= min(chosen))) / 2
    part = scores_part(page)
    assert better and f">cut-off {cut:.3g}</span>" in part
    words = f"; {len(better)} of the rejected score better and were passed over because they repeat"
    assert words in part and "no cut-off" not in part


def test_quotas_that_overlap_are_not_taken_for_repeats(make_run: Callable[..., Path]) -> None:
    run = make_run("select.duplicates=exact", "score.mode=two_pass", "select.lengths=balanced")
    assert "there is no cut-off" in scores_part(read_page(run)[0])


def test_scores_of_another_method_have_their_own_unit(make_run: Callable[..., Path]) -> None:
    part = scores_part(read_page(make_run("method.data=top_loss"))[0])
    assert ">score of top_loss, larger is better</p>" in part and ">cut-off " in part


# --- the model card, several runs, the command --------------------------------------------------


def test_no_text_of_a_run_is_markup_in_markdown(finished: Path, tmp_path: Path) -> None:
    run, strange = copy(finished, tmp_path), "<img src=x onerror=alert(1)> [x](javascript:alert(1))"
    methods = json.loads((run / "5_selection/summary.json").read_text())["methods"]
    replaced(run, "selection", "summary.json", {"methods": methods | {"data": strange}})
    results = json.loads((run / "7_evaluation/results.json").read_text())
    files = {strange: results["files"]["validation"]}
    replaced(run, "evaluation", "results.json", {"files": files | results["files"]})
    write_report(place(run))
    write_reports([run, finished], tmp_path / "both")
    for page in (run / "report.md", run / "model_card.md", tmp_path / "both/report.md"):
        text = page.read_text()
        assert "&lt;img src=x" in text, page
        assert "<img" not in text and "](javascript" not in text, page


def test_no_text_of_a_run_controls_a_terminal_or_a_page(finished: Path, tmp_path: Path) -> None:
    run, odd = copy(finished, tmp_path), "a\u202eb\x1b[31m\u200fc"
    config = run / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["model"]["path"] = settings["data"]["path"] = odd
    config.write_text(yaml.safe_dump(settings, allow_unicode=True))
    methods = json.loads((run / "5_selection/summary.json").read_text())["methods"]
    replaced(run, "selection", "summary.json", {"methods": methods | {"data": odd}})
    results = json.loads((run / "7_evaluation/results.json").read_text())
    files = {odd: results["files"]["validation"]}
    replaced(run, "evaluation", "results.json", {"files": files | results["files"]})
    write_reports([run, finished], tmp_path / "both")
    export_hub(run, tmp_path / "hub", "model")
    cards = [run / "report.md", run / "model_card.md", run / "6_finetune/model/README.md"]
    both = [tmp_path / "both" / name for name in ("report.md", "report.html")]
    for page in (*cards, run / "report.html", *both, tmp_path / "hub/README.md"):
        text = page.read_text()
        assert "a\\u202eb" in text, page
        assert not set(text) & {"\u202e", "\x1b", "\u200f"}, page
    assert ModelCard((tmp_path / "hub/README.md").read_text()).data.to_dict()["tags"]


def test_the_model_card_is_read_by_a_stranger(finished: Path) -> None:
    text = (finished / "model_card.md").read_text()
    head = ModelCard(text).data.to_dict()
    assert "base_model" not in head and "dualsft" in head["tags"]  # it was not read from the hub
    beside = (finished / "6_finetune/model/README.md").read_text()
    assert ModelCard(beside).data.to_dict() == head and "delta.safetensors" not in beside
    tuned = json.loads((finished / "6_finetune/summary.json").read_text())
    for said in (
        f"{tuned['changed_entries']:,} of its {tuned['num_parameters']:,} parameters",
        tuned["base_hash"],
        "dualsft.apply_delta",
        "`rows.jsonl`: 120 examples",
        "data budget: 12 of 120",
        "## Results",
        "## Limits",
    ):
        assert said in text
    assert str(finished.parent) not in text  # nobody else has that folder


def test_runs_side_by_side(make_run: Callable[..., Path], tmp_path: Path) -> None:
    a = make_run(out="a/run")
    b = make_run("select.data_budget=0.2", out="b/run")
    made = write_reports([a, b], tmp_path / "both")
    assert [path.name for path in made] == ["report.html"] * 2 + ["report.md", "report.html"]
    text = (tmp_path / "both/report.md").read_text()
    assert "|  | a/run | b/run |" in text
    assert "| select.data_budget | 0.1 | 0.2 |" in text
    assert "| examples | 12 of 120 (10.00 %) | 24 of 120 (20.00 %) |" in text
    assert "| same examples as a/run (Jaccard) | 1.000 | 0.500 |" in text
    page = (tmp_path / "both/report.html").read_text()
    assert page.count("<section") == text.count("\n## ") and "12 of 120 (10.00 %)" in page
    with pytest.raises(ConfigError, match="given twice"):
        write_reports([a, a], None)
    with pytest.raises(ConfigError, match="one of the runs"):
        write_reports([a, b], a)


def test_a_method_that_was_not_named_has_its_name_side_by_side(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    a, b = make_run(out="a"), make_run("method.data=random", out="b")
    write_reports([a, b], tmp_path / "both")
    text = (tmp_path / "both/report.md").read_text()
    assert '| method.data | "dualsft" | "random" |' in text and "| method.params |" not in text


def test_masks_side_by_side(make_run: Callable[..., Path], tmp_path: Path) -> None:
    a, b = (
        make_run("select.variant=param", f"select.param_budget={share}", out=name)
        for name, share in (("a", 0.1), ("b", 0.2))
    )
    data = make_run("select.variant=data", out="data")
    write_reports([a, b, data], tmp_path / "all")
    text = (tmp_path / "all/report.md").read_text()
    first, second = (load_file(run / "5_selection/mask.safetensors") for run in (a, b))
    shared = sum(len(np.intersect1d(first[n], second[n])) for n in first)
    sizes = [sum(map(len, mask.values())) for mask in (first, second)]
    wanted = f"{shared / (sum(sizes) - shared):.3f}"
    assert f"| same entries of the mask as a (Jaccard) | 1.000 | {wanted} | – |" in text
    assert f"| same entries of the mask as b (Jaccard) | {wanted} | 1.000 | – |" in text
    assert "same entries of the mask as data" not in text and 0 < float(wanted) < 1
    other = make_run("select.variant=param", arch="gpt2", out="other")
    write_reports([a, other], tmp_path / "two")
    text = (tmp_path / "two/report.md").read_text()
    assert "| same entries of the mask as a (Jaccard) | 1.000 | – |" in text


def test_the_command(finished: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(finished), "--out", str(tmp_path / "x")])
    assert done.exit_code == 0, done.output
    assert {p.name for p in (tmp_path / "x").iterdir()} == {
        "report.md",
        "report.html",
        "model_card.md",
    }
    failed = runner.invoke(app, ["report", str(tmp_path / "nothing")])
    assert isinstance(failed.exception, ConfigError)
