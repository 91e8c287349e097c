"""report.html: a run in one self-contained file that needs no network.

The summary at the top shows what was selected, what it cost, and what was gained and kept. It works
without JavaScript. Below it: warnings with their meaning and cure, results, a browser of examples,
the mask by layer and module, scores, diagnostics, time and memory, settings and versions. Reads the
files of a run folder (`runs/folder.py`, `lab/report/examples.py`) and computes nothing new. A
Content-Security-Policy with a hash blocks connections and every script except the page's own. Not
part of Algorithm 1.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import pyarrow as pa
from safetensors import SafetensorError

from dualsft.errors import ConfigError, RunError
from dualsft.lab.diagnostics import registry
from dualsft.lab.report.examples import Examples, collect_examples, collect_mask, cut_off, pack
from dualsft.lab.report.parts import (
    LOSS_NOTE,
    bars,
    card,
    duration,
    esc,
    heat_map,
    histogram,
    methods_of,
    number,
    numbers_of,
    peak_gib,
    percent,
    section,
    table,
)
from dualsft.lab.report.warnings import concerns
from dualsft.model.load import load_tokenizer
from dualsft.runs.context import model_in
from dualsft.runs.preflight import FOLDERS
from dualsft.storage.manifest import atomic_write_text, damage
from dualsft.system.paths import RunPath

EXAMPLE_FILES = {"split": ("split.parquet", "tokens.parquet"), "scores": ("examples.parquet",)}
SELECTION_FILES = ("rescored.parquet", "baseline_scores.parquet")


def write_html(run: RunPath, facts: Mapping[str, Any], out: RunPath) -> RunPath:
    """Write report.html into `out` and return its path."""
    _check_files(run, facts)
    try:
        examples = None
        if "split" in facts["manifests"]:
            examples = collect_examples(run, facts, *_tokenizer(run, facts))
        cells = collect_mask(run, facts)
    except (OSError, pa.ArrowException, SafetensorError, ValueError, KeyError) as problem:
        raise RunError(
            f"{run}: its files are inconsistent ({type(problem).__name__}: {problem}); "
            f"run `dualsft run {run}/config.yaml --out {run}` again: it replaces what is damaged"
        ) from problem
    title = f"DualSFT run {run.location.resolve().name}"
    body = "".join(
        [
            _summary(facts),
            _warnings(facts),
            _results(facts),
            _examples(facts, examples),
            _mask(facts, cells),
            _scores(facts, examples),
            _diagnostics(run, facts),
            _cost(facts),
            _settings(facts),
        ]
    )
    blocks: dict[str, str] = {}
    if examples is not None:
        blocks["examples-data"] = pack({**examples.columns, "alike": examples.alike})
        blocks |= {f"text-{at}": chunk for at, chunk in enumerate(examples.chunks)}
    if cells:
        blocks["mask-data"] = pack(cells)
    path = out / "report.html"
    atomic_write_text(path, page(title, body, blocks))
    return path


def page(title: str, body: str, blocks: Mapping[str, str]) -> str:
    """The complete page: template, style, body, data, script."""
    files = resources.files("dualsft.lab.report") / "pages"
    parts = {name: (files / f"report.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    digest = base64.b64encode(hashlib.sha256(parts["js"].encode("utf-8")).digest()).decode()
    data = "\n".join(
        f'<script type="text/plain" id="{name}">{text}</script>' for name, text in blocks.items()
    )
    values = {
        "title": esc(title),
        "script_hash": digest,
        "css": parts["css"],
        "contents": _contents(body),
        "body": body,
        "data": data,
        "js": parts["js"],
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], parts["html"])


def _contents(body: str) -> str:
    found = re.findall(r"<section id='([\w-]+)'><h2>(.*?)</h2>", body)
    return "".join(f"<a href='#{anchor}'>{title}</a>" for anchor, title in found)


def _check_files(run: RunPath, facts: Mapping[str, Any]) -> None:
    """Verify the hashes of the files that the page reads in addition to the summaries."""
    wanted = {stage: set(names) for stage, names in EXAMPLE_FILES.items()}
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


def _tokenizer(run: RunPath, facts: Mapping[str, Any]) -> tuple[Any, str]:
    """(the run's tokenizer, or None; why it is missing). Never runs custom tokenizer code."""
    for stage, folder in (("finetune", "6_finetune/model"), ("warmup", "2_warmup/theta_bar")):
        if stage in facts["manifests"] and (run / folder).is_dir():
            try:
                return load_tokenizer(model_in(run / folder, hashed=True)), ""
            except ConfigError as problem:
                return None, str(problem)
    return (
        None,
        "the run folder has no tokenizer yet; the warmup and the fine-tuning save one",
    )


def _summary(facts: Mapping[str, Any]) -> str:
    done = facts["manifests"]
    cards = [_chosen_card(facts), _cost_card(done)]
    if "evaluation" in facts:
        cards += [_gained_card(facts["evaluation"]), _kept_card(facts)]
    missing = [stage for stage in FOLDERS if stage not in done and _expected(stage, facts)]
    lead = ""
    if missing:
        lead = f"This run is not finished; still to come: {esc(', '.join(missing))}."
    body = "<div class='cards'>" + "".join(c for c in cards if c) + "</div>"
    return section("summary", "Summary", body, lead)


def _expected(stage: str, facts: Mapping[str, Any]) -> bool:
    """Whether the run still needs this stage.

    Optional stages run before the selection, so after it a missing one was not needed.
    """
    optional = stage in ("warmup", "gradients", "scores")
    return not (optional and "selection" in facts["manifests"])


def _chosen_card(facts: Mapping[str, Any]) -> str:
    chosen = facts.get("selection")
    if chosen is None:
        return card("Chosen", "nothing yet", ["The selection has not been made."])
    lines, big = [], []
    if "b" in chosen:
        big.append(f"{percent(chosen['data_share'])} of the data")
        lines.append(f"{chosen['b']:,} of {chosen['num_full']:,} examples")
    else:
        big.append("all of the data")
    if "k" in chosen:
        big.append(f"{percent(chosen['share'])} of the weights")
        of = {"all": "parameters", "eligible": "eligible entries"}
        named = of.get(chosen.get("denominator_of", ""), "candidate weights")
        lines.append(f"{chosen['k']:,} of {chosen['denominator']:,} {named}")
    else:
        big.append("no mask on the weights")
    if methods := methods_of(facts):
        lines.append("by " + ", ".join(f"{name} ({axis})" for axis, name in methods.items()))
    return card("Chosen", ", ".join(big), lines)


def _cost_card(manifests: Mapping[str, Any]) -> str:
    if not manifests:
        return ""
    total = sum(m["seconds"] for m in manifests.values())
    stage, most = max(manifests.items(), key=lambda item: peak_gib(item[1]))
    longest, slow = max(manifests.items(), key=lambda item: item[1]["seconds"])
    where = "GPU" if any(m["peak_memory"]["cuda_bytes"] for m in manifests.values()) else "host"
    return card(
        "Cost",
        f"{duration(total)}, {peak_gib(most):.1f} GiB",
        [
            f"longest stage: {longest} ({duration(slow['seconds'])})",
            f"most {where} memory: {stage} ({peak_gib(most):.2f} GiB)",
        ],
    )


def _gained_card(results: Mapping[str, Any]) -> str:
    plastic, drops = _pair(results, "plasticity"), _drops(results)
    fell = {name: drop for name, drop in drops.items() if drop > 0}
    lines = []
    for name in fell:
        sides = [results["files"][name][side]["loss"] for side in ("before", "after")]
        lines.append(f"{name}: loss {sides[0]:.3f} → {sides[1]:.3f}")
    given = {name: drop for name, drop in fell.items() if name != "validation"} or fell
    if plastic is not None:
        big = f"new skill {percent(plastic[0])} → {percent(plastic[1])}"
    elif given:
        best = max(given, key=lambda name: given[name])
        big = f"{best}: loss down by {percent(given[best])}"
    else:
        big = "no loss fell"
    return card("Gained", big, lines or ["No evaluation file has a lower loss than before."])


def _drops(results: Mapping[str, Any]) -> dict[str, float]:
    """Relative decrease of the loss per file; negative if it rose."""
    losses = {n: (r["before"]["loss"], r["after"]["loss"]) for n, r in results["files"].items()}
    return {n: (before - after) / before for n, (before, after) in losses.items() if before > 0}


def _pair(results: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    summary = results.get("summary")
    if summary is None or summary["before"][key] is None or summary["after"][key] is None:
        return None
    return summary["before"][key], summary["after"][key]


def _kept_card(facts: Mapping[str, Any]) -> str:
    results, tuned = facts["evaluation"], facts.get("finetune", {})
    lines = []
    rose = {name: -drop for name, drop in _drops(results).items() if drop < 0}
    lines += [f"{name}: loss up by {percent(much)}" for name, much in rose.items()]
    kl = {name: r["after"]["kl_to_base"] for name, r in results["files"].items()}
    nearest = min(kl, key=lambda name: kl[name])
    lines.append(f"least drift from the base: {nearest}, KL {kl[nearest]:.3g} per token")
    changed, total = tuned.get("changed_entries"), tuned.get("num_parameters")
    untouched = None if changed is None or not total else 1 - changed / total
    stable = _pair(results, "stability")
    if stable is not None:
        big = f"old skills {percent(stable[0])} → {percent(stable[1])}"
    elif untouched is not None:
        big = f"{percent(untouched)} of the weights untouched"
    else:
        big = "every file at least as good" if not rose else f"{len(rose)} files got worse"
    if untouched is not None and stable is not None:
        lines.append(f"{percent(untouched)} of the weights are unchanged bit for bit")
    return card("Kept", big, lines)


def _warnings(facts: Mapping[str, Any]) -> str:
    found = concerns(facts)
    if not found:
        return section("warnings", "Warnings", "<p>None.</p>")
    items = "".join(
        f"<div class='warning'><h3>{esc(c.title)}</h3><p dir='auto'>{esc(c.found)}</p>"
        f"<p><b>Meaning.</b> {esc(c.meaning)}</p><p><b>Cure.</b> {esc(c.cure)}</p></div>"
        for c in found
    )
    return section("warnings", f"Warnings ({len(found)})", items)


def _results(facts: Mapping[str, Any]) -> str:
    results = facts.get("evaluation")
    if results is None:
        return ""
    head = ["file", "examples", "loss before", "after", "perplexity before", "after", "KL to base"]
    rows = []
    for name, r in results["files"].items():
        before, after = r["before"], r["after"]
        losses = [f"{before['loss']:.4f}", f"{after['loss']:.4f}"]
        odds = [number(before["perplexity"]), number(after["perplexity"])]
        row = [name, number(r["examples"]), *losses, *odds, f"{after['kl_to_base']:.4f}"]
        rows.append(row)
    text = table(head, rows)
    if "tasks" in results:
        text += "<h3>Benchmarks</h3>" + table(*benchmark_rows(results))
        text += "".join(f"<p>{esc(note)}</p>" for note in results["summary"]["notes"])
    if "prompt" in results:
        p = results["prompt"]
        asked = [["asked", p["prompt"]], ["before", p["before"]], ["after", p["after"]]]
        text += "<h3>One prompt, both models</h3><div class='talk'>"
        text += table(["", "text"], asked, words=2) + "</div>"
    lead = f"Scoring used the validation split, so judge the run by the other files. {LOSS_NOTE}"
    return section("results", "Before and after", text, lead)


def benchmark_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the benchmark table, for Markdown and HTML."""
    rows = []
    for name, task in results["tasks"].items():
        cells = [name, task["metric"], number(task["after"]["items"])]
        for side in ("before", "after"):
            low, high = task[side]["interval"]
            cells.append(f"{percent(task[side]['score'])} ({100 * low:.1f} – {100 * high:.1f})")
        errors = [task[side]["format_errors"] for side in ("before", "after")]
        cells.append(" → ".join(number(e) for e in errors))
        rows.append(cells)
    for key in ("plasticity", "stability", "overall"):
        sides = [percent(results["summary"][side][key]) for side in ("before", "after")]
        rows.append([key, "mean" if key != "plasticity" else "", "", *sides, ""])
    head = ["task", "metric", "items", "before (95 %)", "after (95 %)", "format errors"]
    return head, rows


def _examples(facts: Mapping[str, Any], examples: Examples | None) -> str:
    if examples is None:
        return ""
    text = (resources.files("dualsft.lab.report") / "pages/browser.html").read_text("utf-8")
    notes = []
    if examples.no_text:
        notes.append(f"No text is shown: {examples.no_text}.")
    if examples.token_cap is not None:
        notes.append(f"Texts are truncated to {examples.token_cap:,} tokens to limit page size.")
    if facts.get("selection", {}).get("rounds"):
        notes.append("Scores are from before re-selection; the selection is the last round's.")
    lead = (
        f"{examples.count:,} examples as the model saw them: the run's tokens, decoded, with "
        "template and special tokens. " + esc(" ".join(notes))
    )
    return section("examples", "Examples", text, lead)


def _mask(facts: Mapping[str, Any], cells: list[dict[str, Any]]) -> str:
    if not cells:
        return ""
    chosen = facts["selection"]
    total = max(1, chosen["k"])
    tables = ""
    for title, key in (("module", "per_module"), ("layer", "per_layer")):
        rows = [
            (name, [(count, number(count)), (count, percent(count / total))])
            for name, count in chosen[key].items()
        ]
        inner = bars(rows, [title, "selected entries", "share of the mask"])
        tables += f"<details><summary>by {title}</summary>{inner}</details>"
    zoom = "<div id='zoom' hidden></div>"
    lead = (
        "Columns are layers, rows are modules; each number is the percentage of the matrix's "
        "entries that were selected. Click a cell to see the density inside the matrix."
    )
    return section("mask", "Mask", heat_map(cells) + zoom + tables, lead)


def _scores(facts: Mapping[str, Any], examples: Examples | None) -> str:
    s = facts.get("scores")
    text = ""
    if examples is not None:
        score = examples.numbers("score")
        known = ~(score != score)
        chosen, rest = (score[known & examples.in_state(x)] for x in ("selected", "rejected"))
        if len(chosen):
            text += histogram(chosen, rest, cut_off(chosen, rest), _unit(facts))
    if s is None:
        return section("scores", "Scores", text)
    norms, cosines = s["norms"], s["cosines"]
    rows = [
        ["‖v_new‖, gradient of the validation loss", number(norms["val_grad"])],
        ["‖v_prior‖, gradient of the preservation loss", number(norms["prior_grad"])],
        ["λ as applied to v_prior", number(s["lam_effective"])],
        ["‖G/N‖, mean gradient of the pool", number(norms["grad_mean"])],
        ["curvature share ‖second‖/‖first‖", number(s["curvature_share"])],
        ["cos(v_new, G)", number(cosines["val_grad_grad_sum"])],
        ["cos(v_new, v_prior)", number(cosines["val_grad_prior_grad"])],
    ]
    checks = s["checks"]
    worst = max((row["error"] for row in checks["alone"]), default=0.0)
    if "relative_error" in checks:
        rows.append(["self-check: Σ scores against ⟨u, G⟩", f"{checks['relative_error']:.1e}"])
    rows.append([f"self-check: {len(checks['alone'])} examples by autograd", f"{worst:.1e}"])
    chosen = facts.get("selection", {})
    for key, label in (
        ("boundary_gap", "gap between the last selected and the first rejected"),
        ("rounding_slack", "rounding slack of a score"),
        ("near_ties", "examples within the slack of the boundary"),
        ("rescored", "examples scored exactly for this budget"),
    ):
        if key in chosen:
            rows.append([label, number(chosen[key])])
    return section("scores", "Scores", text + table(["quantity", "value"], rows))


def _unit(facts: Mapping[str, Any]) -> str:
    """Axis label of the scores. Methods other than DualSFT have their own unit."""
    if "baseline_scores.parquet" in facts["manifests"]["selection"]["files"]:
        return f"score of {facts['selection']['methods']['data']}, larger is better"
    return "predicted decrease of the validation loss (nats)"


def _diagnostics(run: RunPath, facts: Mapping[str, Any]) -> str:
    folder = run / "diagnostics"
    known = registry()
    order = [*known]
    files = folder.glob("*.json") if folder.is_dir() else []
    files.sort(key=lambda path: order.index(path.stem) if path.stem in known else len(order))
    found: dict[str, dict[str, Any]] = {}
    for path in files:
        try:
            content = path.read_json()
            found[path.stem] = {
                "paper": content["paper"],
                "result": content["result"],
                "stages": dict(content.get("made_from", {}).get("stages", {})),
            }
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise RunError(
                f"{path}: not the output of a diagnostic ({problem}); delete it and run "
                f"`dualsft diagnose {run} {path.stem}`"
            ) from problem
    parts = []
    hashes = {s: m["fingerprint"]["hash"] for s, m in facts["manifests"].items()}
    for name, content in found.items():
        old = any(hashes.get(stage) != value for stage, value in content["stages"].items())
        note = "<p class='old'>Made from an earlier version of this run.</p>" if old else ""
        figures = "".join(_figure(svg) for svg in _figures(folder, name, found))
        body = numbers_of(content["result"])
        told = f"{known[name].summary.rstrip('.')}." if name in known else ""
        parts.append(
            f"<article><h3>{esc(name.replace('_', ' '))}</h3>{note}<p>{esc(told)} Paper: "
            f"{esc(content['paper'])}.</p>{figures}<details><summary>numbers</summary>{body}"
            "</details></article>"
        )
    return section("diagnostics", "Diagnostics", "".join(parts))


def _figures(folder: RunPath, name: str, names: Mapping[str, Any]) -> list[RunPath]:
    """SVG files of a diagnostic: those that start with its name, but not with a longer one's."""
    longer = [other for other in names if other.startswith(name) and other != name]
    return [
        svg
        for svg in folder.glob(f"{name}*.svg")
        if not any(svg.stem.startswith(other) for other in longer)
    ]


def _figure(svg: RunPath) -> str:
    """The SVG as an <img>, so that no script in it can run."""
    data = base64.b64encode(svg.read_bytes()).decode("ascii")
    name = esc(svg.stem.replace("_", " "))
    return f"<figure><img alt='{name}' src='data:image/svg+xml;base64,{data}'></figure>"


def _cost(facts: Mapping[str, Any]) -> str:
    rows = [
        (stage, [(m["seconds"], duration(m["seconds"])), (peak_gib(m), f"{peak_gib(m):.2f}")])
        for stage, m in facts["manifests"].items()
    ]
    if not rows:
        return ""
    text = bars(rows, ["stage", "time", "peak memory, GiB"])
    return section(
        "cost", "Time and memory", text, "GPU memory if a GPU was used, otherwise host memory."
    )


def _settings(facts: Mapping[str, Any]) -> str:
    versions: dict[str, str] = {}
    for manifest in facts["manifests"].values():
        versions |= manifest.get("versions", {})
    rows = [[name, value] for name, value in versions.items()]
    finished = [[stage, m["finished"]] for stage, m in facts["manifests"].items()]
    text = table(["version of", ""], rows, words=2) if rows else ""
    text += f"<details><summary>when</summary>{table(['stage', 'finished'], finished, 2)}</details>"
    if facts["config_text"]:
        config = esc(facts["config_text"])
        text += f"<details><summary>config.yaml</summary><pre>{config}</pre></details>"
        text += "<p>Replay: <code>dualsft run RUN/config.yaml --out NEW_FOLDER</code></p>"
    return section("settings", "Settings and versions", text)
