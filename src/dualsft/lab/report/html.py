"""report.html: a run in one self-contained file that needs no network.

The summary at the top shows what was selected, what it cost, and what was gained and kept. Below
it: warnings with their meaning and cure, results, a browser of examples, the mask by layer and
module, scores, diagnostics, time and memory, settings and versions. Only the browser of examples
and the view into a matrix need JavaScript. Reads the files of a run folder (`runs/preflight.py`,
`lab/report/examples.py`) and computes nothing new.

The pages are Jinja2 templates in `pages/`. All text of a run is escaped, and a
Content-Security-Policy with a hash blocks connections and every script except the page's own. Not
part of Algorithm 1.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import Environment, PackageLoader, TemplateError, select_autoescape
from markupsafe import Markup
from safetensors import SafetensorError

from dualsft.errors import ConfigError, RunError
from dualsft.lab.diagnostics import SEALS, is_sealed, read_seals, registry
from dualsft.lab.report import facts as rows
from dualsft.lab.report.curves import charts, read_curves
from dualsft.lab.report.examples import Examples, collect_examples, collect_mask, cut_off, pack
from dualsft.lab.report.facts import (
    Facts,
    competitors,
    concerns,
    duration,
    flat,
    has_adapter,
    leaf,
    methods_of,
    number,
    peak_gib,
    percent,
    served_text,
)
from dualsft.model.load import load_tokenizer
from dualsft.model.safety import check_folder
from dualsft.runs.context import model_in
from dualsft.runs.preflight import FOLDERS, shown_files
from dualsft.storage.manifest import atomic_write_text, damage
from dualsft.system.paths import RunPath, files_read, num_reads, without_home
from dualsft.system.progress import escaped

EXAMPLE_FILES = {"split": ("split.parquet", "tokens.parquet"), "scores": ("examples.parquet",)}
SELECTION_FILES = ("rescored.parquet", "baseline_scores.parquet")
EXPLAIN, EXPLAIN_NAME = "explain", re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""Folder of the results of `dualsft explain`, and what they may be called."""
CHOSEN, REST = "#D55E00", "#8FB8DE"
"""Colours of the histogram, which colour-blind readers can tell apart."""
CLOSE = 28
"""Distance, in percent of the width, below which two labels could overlap on a phone."""
MAX_RESULTS = 500
MAX_FIGURE_BYTES = 64 << 20

FUNCTIONS = (
    *(rows.loss_rows, rows.benchmark_rows, rows.prompt_rows, rows.score_rows),
    *(rows.mask_rows, rows.source_rows, rows.cost_rows, rows.competitors, served_text),
    *(has_adapter, rows.training_values),
)
FILTERS = (number, percent, duration, peak_gib, rows.texts, without_home)
"""What the templates can call."""


def _shown(value: Any) -> Any:
    """A text without control characters and those that turn the direction of what follows."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return escaped(value.replace("\r\n", "\n"))
    return value


@cache
def _environment() -> Environment:
    loader = PackageLoader("dualsft.lab.report", "pages")
    env = Environment(
        loader=loader,
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_shown,
    )
    style, script = (loader.get_source(env, f"report.{kind}")[0] for kind in ("css", "js"))
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    env.globals |= {
        "style": Markup(style),
        "script": Markup(script),
        "script_hash": base64.b64encode(digest).decode(),
    }
    env.globals |= {"LOSS_NOTE": rows.LOSS_NOTE}
    env.globals |= {function.__name__: function for function in FUNCTIONS}
    env.filters |= {function.__name__: function for function in FILTERS}
    return env


def _no_markup(value: Any) -> Any:
    """A value in a Markdown page, where tags, links and control characters of a run's texts must
    not work.

    Underlining does no harm, and marks the second best of a comparison.
    """
    if not isinstance(value, str):
        return value
    return escaped(re.sub("<(?!/?u>)", "&lt;", value).replace("](", "]\\("))


def render(template: str, **values: Any) -> str:
    """Fill a template of `pages/`. HTML templates escape all values that are not `Markup`, and
    Markdown templates all tags, links and control characters."""
    env = _environment()
    env = env.overlay(finalize=_no_markup) if template.endswith(".md") else env
    try:
        return env.get_template(template).render(contents=[], **values)
    except TemplateError as problem:  # a value of a summary is not of the form that a run writes
        raise ValueError(f"{template}: {problem}") from problem


def write_html(run: RunPath, facts: Facts, out: RunPath) -> RunPath:
    """Write report.html into `out` and return its path."""
    check_files(run, facts)
    with consistent(run):
        examples = None
        if "split" in facts["manifests"]:
            examples = collect_examples(run, facts, *find_tokenizer(run, facts))
        cells = collect_mask(run, facts)
    blocks: dict[str, str] = {}
    if examples is not None:
        blocks["examples-data"] = pack(examples.columns)
        blocks |= {f"text-{at}": chunk for at, chunk in enumerate(examples.chunks)}
    if cells:
        blocks["mask-data"] = pack(cells)
    versions: dict[str, str] = {}
    for manifest in facts["manifests"].values():
        versions |= manifest.get("versions", {})
    text = render(
        "report.html",
        title=f"DualSFT run {run.location.resolve().name}",
        facts=facts,
        blocks=blocks,
        missing=[stage for stage in FOLDERS if _expected(stage, facts)],
        cards=list(_cards(facts)),
        concerns=concerns(facts),
        trainings=charts({"": read_curves(run, facts)}),
        examples=examples,
        mask=heat_map(cells) if cells else None,
        scores=None if examples is None else _histogram(facts, examples),
        diagnostics=_diagnostics(run, facts),
        explained=explanations(run) if out == run else [],
        versions=versions,
        finished={stage: m["finished"] for stage, m in facts["manifests"].items()},
    )
    path = out / "report.html"
    atomic_write_text(path, text)
    return path


@contextmanager
def consistent(run: RunPath) -> Iterator[None]:
    """Report files that do not fit each other as damage."""
    before = num_reads()
    try:
        yield
    except (OSError, pa.ArrowException, SafetensorError, ValueError, KeyError) as problem:
        read = shown_files(files_read(before))
        raise RunError(
            f"{run}: its files are inconsistent ({type(problem).__name__}: {str(problem)[:300]}), "
            f"one of {read or 'the stages'}; run `dualsft run {run}/config.yaml --out {run}` "
            "again: it replaces what is damaged"
        ) from problem


def check_files(run: RunPath, facts: Facts, **more: str) -> None:
    """Verify the hashes of the files that a page reads in addition to the summaries; `more` has
    one more file of a stage."""
    wanted = {stage: set(names) for stage, names in EXAMPLE_FILES.items()}
    wanted |= {stage: {name} for stage, name in more.items()}
    if "selection" in facts:
        final = facts["selection"]["final"]
        prefix = "" if final == "." else f"{final}/"
        wanted["selection"] = {f"{prefix}ids.json", f"{prefix}mask.safetensors", *SELECTION_FILES}
    problems: list[str] = []
    for stage, names in wanted.items():
        if stage in facts["manifests"]:
            folder = run / FOLDERS[stage]
            reasons = damage(folder, facts["manifests"][stage], only=names)[0]
            problems += [f"{folder}: {reason}" for reason in reasons]
    if problems:
        cure = f"run `dualsft run {run}/config.yaml --out {run}` again: it replaces what is damaged"
        raise RunError("\n".join([*problems, cure]))


def find_tokenizer(run: RunPath, facts: Facts) -> tuple[Any, str]:
    """(the run's tokenizer, or None; why it is missing). Never runs custom tokenizer code."""
    for stage, folder in (("finetune", "6_finetune/model"), ("warmup", "2_warmup/theta_bar")):
        if stage in facts["manifests"] and (run / folder).is_dir():
            try:
                place = model_in(run / folder, hashed=True)
                check_folder(place)
                return load_tokenizer(place), ""
            except ConfigError as problem:
                return None, str(problem)
    return None, "the run folder has no tokenizer yet; the warmup and the fine-tuning save one"


def _expected(stage: str, facts: Facts) -> bool:
    """Whether the run still needs this stage.

    Optional stages run before the selection, so after it a missing one was not needed.
    """
    optional = stage in ("warmup", "gradients", "scores")
    done = facts["manifests"]
    return stage not in done and not (optional and "selection" in done)


# --- the summary --------------------------------------------------------------------------------

Card = tuple[str, str, list[str]]
"""Title, the one result in large letters, and lines below it."""


def _cards(facts: Facts) -> Iterator[Card]:
    yield _chosen_card(facts)
    if facts["manifests"]:
        yield _cost_card(facts["manifests"])
    if "evaluation" in facts:
        yield _gained_card(facts["evaluation"])
        yield _kept_card(facts)


def _chosen_card(facts: Facts) -> Card:
    chosen = facts.get("selection")
    if chosen is None:
        return "Chosen", "nothing yet", ["The selection has not been made."]
    data, weights, lines = "all of the data", "no mask on the weights", []
    if "b" in chosen:
        data = f"{percent(chosen['data_share'])} of the data"
        lines.append(f"{chosen['b']:,} of {chosen['num_full']:,} examples")
    if "k" in chosen:
        weights = f"{percent(chosen['share'])} of the weights"
        lines.append(f"{chosen['k']:,} of {chosen['denominator']:,} {competitors(chosen)}")
    elif has_adapter(facts):
        weights = f"an adapter of {number(facts['finetune']['trained_entries'])} parameters"
    if served := served_text(facts.get("finetune", {})):
        lines.append(served)
    if methods := methods_of(facts):
        lines.append("by " + ", ".join(f"{name} ({axis})" for axis, name in methods.items()))
    return "Chosen", f"{data}, {weights}", lines


def _cost_card(manifests: Mapping[str, Any]) -> Card:
    total = sum(m["seconds"] for m in manifests.values())
    stage, most = max(manifests.items(), key=lambda item: peak_gib(item[1]))
    longest, slow = max(manifests.items(), key=lambda item: item[1]["seconds"])
    where = "GPU" if any(m["peak_memory"]["cuda_bytes"] for m in manifests.values()) else "host"
    lines = [
        f"longest stage: {longest} ({duration(slow['seconds'])})",
        f"most {where} memory: {stage} ({peak_gib(most):.2f} GiB)",
    ]
    return "Cost", f"{duration(total)}, {peak_gib(most):.1f} GiB", lines


def _gained_card(results: Mapping[str, Any]) -> Card:
    fell = {name: drop for name, drop in _drops(results).items() if drop > 0}
    lines = []
    for name in fell:
        before, after = (results["files"][name][side]["loss"] for side in ("before", "after"))
        lines.append(f"{name}: loss {before:.3f} → {after:.3f}")
    given = {name: drop for name, drop in fell.items() if name != "validation"} or fell
    if skill := _pair(results, "plasticity"):
        big = f"new skill {skill}"
    elif given:
        best = max(given, key=lambda name: given[name])
        big = f"{best}: loss down by {percent(given[best])}"
    else:
        big = "no loss fell"
    return "Gained", big, lines or ["No evaluation file has a lower loss than before."]


def _kept_card(facts: Facts) -> Card:
    results, tuned = facts["evaluation"], facts.get("finetune", {})
    rose = {name: -drop for name, drop in _drops(results).items() if drop < 0}
    lines = [f"{name}: loss up by {percent(much)}" for name, much in rose.items()]
    kl = {name: r["after"]["kl_to_base"] for name, r in results["files"].items()}
    nearest = min(kl, key=lambda name: kl[name])
    lines.append(f"least drift from the base: {nearest}, KL {kl[nearest]:.3g} per token")
    changed, total = tuned.get("changed_entries"), tuned.get("num_parameters")
    untouched = None if changed is None or not total else percent(1 - changed / total)
    if skills := _pair(results, "stability"):
        big = f"old skills {skills}"
        if untouched is not None:
            lines.append(f"{untouched} of the weights are unchanged bit for bit")
    elif untouched is not None:
        big = f"{untouched} of the weights untouched"
    else:
        big = "every file at least as good" if not rose else f"{len(rose)} files got worse"
    return "Kept", big, lines


def _drops(results: Mapping[str, Any]) -> dict[str, float]:
    """Relative decrease of the loss per file; negative if it rose."""
    losses = {n: (r["before"]["loss"], r["after"]["loss"]) for n, r in results["files"].items()}
    return {n: (before - after) / before for n, (before, after) in losses.items() if before > 0}


def _pair(results: Mapping[str, Any], key: str) -> str:
    """Score of the benchmarks before and after. Empty if one of them is missing."""
    summary = results.get("summary")
    if summary is None or summary["before"][key] is None or summary["after"][key] is None:
        return ""
    return f"{percent(summary['before'][key])} → {percent(summary['after'][key])}"


# --- drawings, by pages/parts.html: positions ---------------------------------


def heat_map(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Heat map of the mask: a column per layer, a row per module."""
    layers = list(dict.fromkeys(cell["layer"] for cell in cells))
    modules = list(dict.fromkeys(cell["module"] for cell in cells))
    shares = [c["count"] / int(np.prod(c["shape"])) if c["shape"] else None for c in cells]
    most = max((s for s in shares if s is not None), default=0.0) or 1.0
    left, top, high = 8 + 6.6 * max(map(len, modules)), 22, 24
    wide = 34 if len(layers) <= 24 else 30
    labels = [(left + wide * (at + 0.5), 15, "middle", name) for at, name in enumerate(layers)]
    labels += [(left - 6, top + high * at + 16, "end", name) for at, name in enumerate(modules)]
    drawn = []
    for cell, share in zip(cells, shares, strict=True):
        level = 0.0 if share is None else share / most
        shown = "" if share is None else f"{100 * share:.1f}" if share < 0.995 else "100"
        drawn.append(
            {
                "x": left + wide * layers.index(cell["layer"]),
                "y": top + high * modules.index(cell["module"]),
                "title": f"{cell['name']}: {cell['count']:,} selected, {percent(share, 2)}",
                "level": round(0.04 + 0.96 * level, 3),
                "strong": level > 0.55,
                "number": shown,
            }
        )
    return {
        "width": round(left + wide * len(layers) + 4),
        "height": top + high * len(modules) + 4,
        "cell_width": wide,
        "cell_height": high,
        "labels": labels,
        "cells": drawn,
    }


def _histogram(facts: Facts, examples: Examples) -> dict[str, Any] | None:
    score = examples.numbers("score")
    known = ~np.isnan(score)
    chosen, rest = (score[known & examples.in_state(x)] for x in ("selected", "rejected"))
    if not len(chosen):
        return None
    repeats = _better_repeats(facts, examples, chosen, rest)
    note = "dashed: the cut-off"
    if count := int(repeats.sum()):
        note += (
            f"; {count:,} of the rejected score better and were passed over because they repeat "
            "others (select.duplicates)"
        )
    unit = "predicted decrease of the validation loss (nats)"
    if "baseline_scores.parquet" in facts["manifests"]["selection"]["files"]:
        unit = f"score of {facts['selection']['methods']['data']}, larger is better"
    return histogram(chosen, rest, cut_off(chosen, rest[~repeats]), unit, note)


def _better_repeats(
    facts: Facts, examples: Examples, chosen: np.ndarray, rest: np.ndarray
) -> np.ndarray:
    """Which of `rest` were passed over as repeats of others though they score better than the last
    of `chosen`. None where quotas or inexact scores leave other reasons."""
    found = facts["selection"]
    asked = facts["manifests"]["selection"]["fingerprint"]["settings"]  # names what is not usual
    repeated = "select.duplicates" in asked and "score_threshold" in found
    quotas = "select.per_source" in asked or "select.lengths" in asked
    if not repeated or quotas or np.nan_to_num(examples.numbers("bound")).any():
        return np.zeros(len(rest), bool)
    if found["methods"]["data"] == "dualsft_reversed":
        return rest < chosen.max()
    return rest > chosen.min()


def histogram(
    chosen: np.ndarray,
    rest: np.ndarray,
    cut: float | None,
    label: str,
    note: str = "dashed: the cut-off",
) -> dict[str, Any] | None:
    """Stacked histogram of the scores of selected and rejected examples, with the cut-off.

    Positions are in percent of the plot. The x range spans the 0.5 to 99.5 percentiles and the
    cut-off. Scores outside it are counted in the outermost bins. None if there is only one score.
    """
    both = np.concatenate([chosen, rest])
    if len(both) < 2 or both.min() == both.max():
        return None
    low, high = (float(edge) for edge in np.percentile(both, [0.5, 99.5]))
    if cut is not None:
        low, high = min(low, cut), max(high, cut)
    if low == high:
        low, high = float(both.min()), float(both.max())
    edges = np.linspace(low, high, 61)
    sides = [np.histogram(np.clip(v, low, high), edges)[0] for v in (rest, chosen)]
    tallest = int((sides[0] + sides[1]).max())
    bars = []
    for at in range(60):
        y = 100.0
        for counts, fill in zip(sides, (REST, CHOSEN), strict=True):
            height = 100 * int(counts[at]) / tallest
            y -= height
            if height:
                bars.append((at / 0.6, y, height, fill))

    def across(value: float) -> float:
        return 100 * (value - low) / (high - low)

    lines: list[tuple[float, str]] = []
    ticks = {low: "start", high: "end"}
    if low < 0 < high:
        zero = across(0)
        near = {low: zero < CLOSE, high: 100 - zero < CLOSE}
        ticks = {edge: anchor for edge, anchor in ticks.items() if not near[edge]} | {0: "middle"}
        lines.append((zero, "axis"))
    cut_label = None
    if cut is None:
        note = "the two overlap, so there is no cut-off"
    else:
        lines.append((across(cut), "cut"))
        cut_label = (min(max(across(cut), CLOSE / 2), 100 - CLOSE / 2), f"cut-off {cut:.3g}")
    return {
        "bar_width": 0.94 / 0.6,
        "bars": bars,
        "lines": lines,
        "ticks": [(across(x), anchor, f"{x:.3g}") for x, anchor in ticks.items()],
        "tallest": f"{tallest:,}",
        "cut_label": cut_label,
        "label": label,
        "note": note if len(rest) else "",
        "chosen": CHOSEN,
        "rest": REST,
    }


# --- what was explained -------------------------------------------------------------------------


def explanations(run: RunPath) -> list[str]:
    """Names of the results of `dualsft explain` that have a page."""
    folder = run / EXPLAIN
    names = [name for name in folder.names() if EXPLAIN_NAME.fullmatch(name)]
    return [name for name in names if (folder / name / "explain.html").is_file()]


# --- diagnostics --------------------------------------------------------------------------------


def _check_figures(folder: RunPath, files: list[RunPath]) -> None:
    """Refuse more results and larger figures than diagnostics draw: the page holds all of them."""
    figures = folder.glob("*.svg") if files else []
    if len(files) > MAX_RESULTS or len(figures) > MAX_RESULTS:
        raise RunError(f"{folder}: more than {MAX_RESULTS} results; remove those that are not used")
    sizes = {path: path.size for path in (*files, *figures)}
    if sum(sizes.values()) > MAX_FIGURE_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise RunError(
            f"{folder}: {sum(sizes.values()):,} bytes of results and figures, over the limit of "
            f"{MAX_FIGURE_BYTES:,}; remove the largest, {largest.name}"
        )


def _diagnostics(run: RunPath, facts: Facts) -> list[dict[str, Any]]:
    folder, known = run / "diagnostics", registry()
    order = [*known]
    files = folder.glob("*.json") if folder.is_dir() else []
    files, seals = [path for path in files if path.name != SEALS], read_seals(folder)
    _check_figures(folder, files)
    files.sort(key=lambda path: order.index(path.stem) if path.stem in known else len(order))
    hashes = {stage: m["fingerprint"]["hash"] for stage, m in facts["manifests"].items()}
    found = []
    for path in files:
        try:
            content = path.read_json()
            paper, result = content["paper"], content["result"]
            stages = dict(content.get("made_from", {}).get("stages", {}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise RunError(
                f"{path}: not the output of a diagnostic ({problem}); delete it and run "
                f"`dualsft diagnose {run} {path.stem}`"
            ) from problem
        # A figure belongs to the diagnostic with the longest name that its own name starts with.
        names = [p.stem for p in files if p.stem != path.stem and p.stem.startswith(path.stem)]
        drawn = [
            svg
            for svg in folder.glob(f"{path.stem}*.svg")
            if not any(svg.stem.startswith(longer) for longer in names)
        ]
        figures = {
            svg.stem.replace("_", " "): base64.b64encode(svg.read_bytes()).decode("ascii")
            for svg in drawn
        }
        summary = f"{known[path.stem].summary.rstrip('.')}." if path.stem in known else ""
        one = {
            "name": path.stem.replace("_", " "),
            "unverified": not all([is_sealed(file, seals) for file in (path, *drawn)]),
            "outdated": any(hashes.get(stage) != value for stage, value in stages.items()),
            "summary": summary,
            "paper": paper,
            "figures": figures,
            "numbers": [(key, leaf(value)) for key, value in flat(result)],
        }
        found.append(one)
    return found
