"""The tables of docs/results.md from the raw files beside it; `docs/generate.py` puts them in."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).with_name("measured") / "smollm2_gsm8k"
FORMS = Path(__file__).with_name("measured") / "score_forms" / "smollm2_135m.json"
PACKAGE = Path(__file__).with_name("measured") / "pools"
BASE, OWN = "base model", "dualsft"
FILES = {"gsm8k_test": "GSM8K test", "alpaca": "Alpaca", "code": "code"}
TASKS = {
    "gsm8k": "GSM8K, 5-shot, strict",
    "mmlu": "MMLU, 5-shot",
    "arc_challenge": "ARC-Challenge, 0-shot",
    "piqa": "PIQA, 0-shot",
    "humaneval": "HumanEval, 0-shot",
}
COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "data_share": ("data %", lambda x: f"{100 * x:.0f}"),
    "param_share": ("parameters %", lambda x: f"{100 * x:.2f}"),
    "passes": ("passes to select", lambda x: f"{x:.2f}"),
    "selection_gib": ("peak of selection, GiB", lambda x: f"{x:.2f}"),
    "finetune_gib": ("peak of fine-tuning, GiB", lambda x: f"{x:.2f}"),
}


def read(name: str) -> Any:
    return json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def tables() -> dict[str, str]:
    """Every table by the name that its place in the page has."""
    comparison = read("comparison")
    results, resources = comparison["tables"]
    differences = {(d["method"], d["what"]): d for d in comparison["differences"]}
    return {
        "losses": losses(results["rows"], differences),
        "costs": costs(results["rows"], resources["rows"]),
        "benchmarks": benchmarks(results["rows"], read("benchmarks")),
        "seeds": seeds(results["rows"], read("seeds")),
        "forms": forms(json.loads(FORMS.read_text(encoding="utf-8"))),
        "damping": damping(json.loads(FORMS.read_text(encoding="utf-8"))),
        "found": found_rows(read_pools("warmup_20_seeds_0_1")),
        "pools": trained_pools(read_pools("warmup_20_seeds_3_to_5")),
        "warmups": warmups(read_pools("warmup_64"), read_pools("warmup_20_seeds_3_to_5")),
        "pools64": trained_pools(
            [*read_pools("warmup_64_seeds_0_1"), *read_pools("warmup_64_seeds_6_7")]
        ),
        "others64": other_scores(read_pools("warmup_64_seeds_6_7")),
        "masks64": early_masks(read_pools("warmup_64_seeds_0_1")),
        "pools89": trained_pools(read_pools("warmup_64_seeds_8_9")),
        "others89": other_scores(read_pools("warmup_64_seeds_8_9"), FRESH),
        "frontier": frontier(read_pools("warmup_64_seeds_8_9")),
        "which_mask": which_mask(read_pools("masks_seeds_0_1")),
        "gemma": trained_pools(read_pools("gemma3_270m_seed_8")),
        "lds": fidelity(read_pools("checks_seed_8")),
        "agreement": agreement(read_pools("checks_seed_8")),
        "target_share": target_shares(read_pools("target_share")),
    }


def read_pools(name: str) -> Any:
    return json.loads((PACKAGE / f"{name}.json").read_text(encoding="utf-8"))


def losses(rows: Sequence[Mapping[str, Any]], differences: Mapping[tuple[str, str], Any]) -> str:
    """Losses, their paired differences to DualSFT, and KL to the base model on old behaviour."""
    head = ["", "method"]
    for title in FILES.values():
        head += [title, "less DualSFT's"]
    lines = [[*head, "KL Alpaca", "KL code"]]
    for row, label in _labelled(rows):
        line = label
        for key in FILES:
            found = differences.get((row["name"], f"loss {key}"))
            line += [f"{_mean(row, f'loss.{key}'):.3f}", "" if found is None else _interval(found)]
        line += [f"{_mean(row, f'kl.{key}'):.2f}" for key in ("alpaca", "code")]
        lines.append(line)
    return _markdown(lines)


def costs(rows: Sequence[Mapping[str, Any]], resources: Sequence[Mapping[str, Any]]) -> str:
    """What each method took, in the order of the other tables."""
    by_name = {row["name"]: row for row in resources}
    lines = [["method", *(title for title, _ in COSTS.values())]]
    for row in rows:
        if row["name"] != BASE:
            own = by_name[row["name"]]
            lines.append(
                [row["name"], *(show(_mean(own, key)) for key, (_, show) in COSTS.items())]
            )
    return _markdown(lines)


def benchmarks(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    """Scores with Wilson intervals, the paper's three summaries, answers out of format."""
    head = ["", "method", *TASKS.values(), "stability", "plasticity", "overall", "out of format"]
    lines = [head]
    for row, line in _labelled(rows):
        side = "before" if row["name"] == BASE else "after"
        one = found[OWN if row["name"] == BASE else row["name"]]
        for task in TASKS:
            facts = one["tasks"][task][side]
            low, high = (100 * x for x in facts["interval"])
            line.append(f"{100 * facts['score']:.1f} [{low:.1f}, {high:.1f}]")
        three = one["summary"][side]
        line += [f"{100 * three[key]:.1f}" for key in ("stability", "plasticity", "overall")]
        wrong = one["tasks"]["gsm8k"][side]["format_error_rate"]
        lines.append([*line, f"{100 * wrong:.1f} %"])
    return _markdown(lines)


def seeds(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    """Mean ± deviation over seeds, of losses and of their differences to DualSFT's of that seed."""
    head = ["", "method"]
    for title in FILES.values():
        head += [title, "less DualSFT's"]
    lines = [head]
    for row, line in _labelled([row for row in rows if row["name"] in found]):
        for key in FILES:
            own = {seed: one[key]["loss"] for seed, one in found[row["name"]].items()}
            less = [loss - found[OWN][seed][key]["loss"] for seed, loss in own.items()]
            line.append(_spread(list(own.values()), "{:.3f}".format))
            line.append("" if row["name"] == OWN else _spread(less, _signed))
        lines.append(line)
    return _markdown(lines)


def _labelled(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Each row with its first cells: the group where it begins, and the method."""
    found, group = [], ""
    for row in rows:
        name = f"**{OWN}**" if row["name"] == OWN else row["name"]
        found.append((row, ["" if row["group"] == group else row["group"], name]))
        group = row["group"]
    return found


def _mean(row: Mapping[str, Any], key: str) -> float:
    return row["values"][key]["mean"]


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    return f"{show(statistics.mean(values))} ± {statistics.stdev(values):.3f}"


def _interval(found: Mapping[str, float]) -> str:
    return f"{_signed(found['mean'])} [{_signed(found['low'])}, {_signed(found['high'])}]"


POOLS = {
    "mixed": "thirds, target GSM8K",
    "code": "thirds, target code",
    "ten": "a tenth GSM8K",
    "noisy": "GSM8K, 40 % wrong answers",
    "clean": "GSM8K",
}


def forms(cells: Sequence[Mapping[str, Any]]) -> str:
    """Loss after training on the rows of each form, and the share of them off target or wrong."""
    # (title, key of the loss, form and damping of the share)
    columns = {
        "random": ("random", None, None),
        "target rows": ("target", None, None),
        "inner product": ("dot", "dot", None),
        "cosine": ("cos128", "cos128", None),
        "ridge": ("a128@1e-03", "a128", "1e-03"),
        "ridge over leverage": ("b128@1e-03", "b128", "1e-03"),
        "unit rows": ("c128@1e-03", "c128", "1e-03"),
        "unit rows, unit validation rows": ("c128@1e-03vu", "cvu128", "1e-03"),
    }
    lines = [["pool", "seed", *columns]]
    for cell in sorted(cells, key=lambda c: (list(POOLS).index(c["pool"]), c["seed"])):
        line = [POOLS[cell["pool"]], str(cell["seed"])]
        for key, form, rho in columns.values():
            draws = [v for name, v in cell["loss"].items() if name.rstrip("0123456789") == key]
            found = [cell["loss"][key]] if form else draws
            text = f"{statistics.mean(found):.3f}" if found else ""
            if form and cell["pool"] != "clean":
                share = cell["off_target"][form]
                text += f" ({100 * (share if rho is None else share[rho]):.0f} %)"
            line.append(text)
        lines.append(line)
    return _markdown(lines)


def damping(cells: Sequence[Mapping[str, Any]]) -> str:
    """Mean share of rows off target or wrong by ρ and size of the sketch, and where the cosine of
    the halves is largest."""
    rhos = ("1e-01", "1e-02", "3e-03", "1e-03", "3e-04", "1e-04")
    lines = [["pool", "numbers per example", "cosine", *(f"ρ = {rho}" for rho in rhos)]]
    for pool in [name for name in POOLS if name != "clean"]:
        found = [cell["off_target"] for cell in cells if cell["pool"] == pool]
        for side in (16, 32, 64, 128):
            shares = [statistics.mean(f[f"cvu{side}"][rho] for f in found) for rho in rhos]
            cosine = statistics.mean(f[f"cvu{side}"]["1e+09"] for f in found)
            texts = [f"{100 * share:.1f} %" for share in (cosine, *shares)]
            lines.append([POOLS[pool], f"{side * side:,}", *texts])
    return _markdown(lines)


NAMES = {
    "mixed": "thirds, target GSM8K",
    "code": "thirds, target code",
    "tenth": "a tenth GSM8K",
    "noisy": "GSM8K, 40 % wrong answers",
    "copies": "GSM8K, every row three times",
    "clean": "GSM8K",
}


def _in_order(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(cells, key=lambda cell: (list(NAMES).index(cell["pool"]), cell["seed"]))


def found_rows(cells: Sequence[Mapping[str, Any]]) -> str:
    """Share of selected rows that are off target, wrong, or copies, by way to select."""
    arms = ("recommended", "cosine", "literal", "less", "spice", "top_loss")
    lines = [["pool", "seed", *arms]]
    for cell in _in_order([cell for cell in cells if cell["pool"] != "clean"]):
        what = "copies" if cell["pool"] == "copies" else "off_target"
        shares = [f"{100 * cell['selected'][arm][what]:.1f} %" for arm in arms]
        lines.append([NAMES[cell["pool"]], str(cell["seed"]), *shares])
    return _markdown(lines)


def _best(results: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    """The training at the rate that is best on the rows held apart."""
    return min(results.values(), key=lambda result: result["tune"])


def _draws(cell: Mapping[str, Any], reference: str) -> list[float]:
    names = [name for name in cell["trained"] if name.rstrip("0123456789") == reference]
    return [_best(cell["trained"][name])["test"] for name in names]


def _kl(result: Mapping[str, float]) -> float:
    """Mean KL to the base over the files of other behaviour."""
    return statistics.mean(value for key, value in result.items() if key.endswith("_kl"))


def trained_pools(cells: Sequence[Mapping[str, Any]]) -> str:
    """Loss of unseen target rows after training on selected, random and target rows."""
    head = ["pool", "seed", "recommended", "random rows", "target rows"]
    lines = [[*head, "of the gap closed", "better than random by", "KL", "KL, random"]]
    for cell in _in_order([cell for cell in cells if _draws(cell, "random")]):
        own, random = _best(cell["trained"]["recommended"]), _draws(cell, "random")
        mean, spread, target = statistics.mean(random), statistics.stdev(random), ""
        closed = ""
        if aims := _draws(cell, "target"):
            target = f"{statistics.mean(aims):.3f} ± {statistics.stdev(aims):.3f}"
            closed = f"{100 * (mean - own['test']) / (mean - statistics.mean(aims)):.0f} %"
        drawn = [n for n in cell["trained"] if n.startswith("random") and "@" not in n]
        kl = statistics.mean(_kl(_best(cell["trained"][name])) for name in drawn)
        shown = [f"{own['test']:.3f}", f"{mean:.3f} ± {spread:.3f}", target, closed]
        shown += [f"{(mean - own['test']) / spread:+.1f} sd", f"{_kl(own):.2f}", f"{kl:.2f}"]
        lines.append([NAMES[cell["pool"]], str(cell["seed"]), *shown])
    return _markdown(lines)


def warmups(found: Sequence[Mapping[str, Any]], held: Sequence[Mapping[str, Any]]) -> str:
    """Longer warmups on four of the pools, each beside a random draw under the same mask."""
    words = {"bf16-64": "64 steps", "bf16-64-3e-4": "64 steps at 3e-4"}
    words |= {"fp32-20": "20 steps, fp32", "fp32-64": "64 steps, fp32"}
    lines = [["pool", "seed", "warmup", "off target or wrong", "loss", "random rows, same mask"]]
    cells = {(cell["pool"], cell["seed"]): cell for cell in held}
    for one in _in_order(found):
        if one["group"] == "bf16":
            cell = cells[one["pool"], one["seed"]]
            share = f"{100 * cell['selected']['recommended']['off_target']:.1f} %"
            own, drawn = (
                _best(cell["trained"][name])["test"] for name in ("recommended", "random0")
            )
            texts = ["20 steps", share, f"{own:.3f}", f"{drawn:.3f}"]
            lines.append([NAMES[one["pool"]], str(one["seed"]), *texts])
        for name, arm in one["arms"].items():
            if name in words:
                texts = [words[name], f"{100 * arm['off_target']:.1f} %"]
                losses = (arm["trained"]["test"], one["arms"]["random0"]["trained"]["test"])
                texts += [f"{loss:.3f}" for loss in losses]
                lines.append([NAMES[one["pool"]], str(one["seed"]), *texts])
    return _markdown(lines)


ARMS = {"recommended": "recommended", "q50": "drawn above the median", "cosine": "cosine"}
ARMS |= {"literal": "literal (the paper's)"}
FRESH = {"recommended": "recommended", "less": "LESS", "spice": "SPICE", "top_loss": "top-loss"}
FRESH |= {"literal": "literal"}


def other_scores(cells: Sequence[Mapping[str, Any]], arms: Mapping[str, str] = ARMS) -> str:
    """Loss after training on the rows of other scores, and the share of them off target."""
    lines = [["pool", "seed", *arms.values()]]
    for cell in _in_order(cells):
        line = [NAMES[cell["pool"]], str(cell["seed"])]
        for arm in arms:
            if results := cell["trained"].get(arm):
                best = _best(results)
                share = best["copies" if cell["pool"] == "copies" else "off_target"]
                line.append(f"{best['test']:.3f} ({100 * share:.0f} %)")
            else:
                line.append("")
        lines.append(line)
    return _markdown(lines)


EQUAL_KL = 0.18
ROWS = {"random0": "random", "paper": "literal, the paper's λ", "less": "LESS", "spice": "SPICE"}


def frontier(cells: Sequence[Mapping[str, Any]]) -> str:
    """Loss at the same KL to the base, and the best loss, of rows under a mask."""
    pools = [cell for cell in cells if "recommended@s2ft" in cell["trained"]]
    arms = ("recommended", "random0", "literal", "paper", "less", "spice")
    masks = {"": "largest scores", "paper": "the paper's λ", "s2ft": "S²FT", "random": "random"}
    lines = [["rows", "mask", *(NAMES[cell["pool"]] for cell in pools)]]
    for arm in arms:
        for mask, title in masks.items():
            name = f"{arm}@{mask}" if mask else arm
            found = [cell["trained"].get(name, {}) for cell in pools]
            if all(len(results) > 1 for results in found):
                texts = [_at_equal_kl(results) for results in found]
                lines.append([ROWS.get(arm, arm), title, *texts])
    return _markdown(lines)


def which_mask(trainings: Sequence[Mapping[str, Any]]) -> str:
    """Loss, KL and rate of masks on the same rows, each at the best of its rates."""
    masks = {"own": "largest scores", "random": "random", "snr": "v G / ĉ²", "cheap": "v G / ĉ³"}
    lines = [["pool", "seed", *masks.values()]]
    for pool, seed in sorted({(one["pool"], one["seed"]) for one in trainings}):
        line = [NAMES[pool], str(seed)]
        for mask in masks:
            place = (pool, seed, mask)
            of_mask = [o for o in trainings if (o["pool"], o["seed"], o["mask"]) == place]
            best = min(of_mask, key=lambda one: one["tune"], default=None)
            text = best and f"{best['test']:.3f}; KL {_kl(best):.2f}; {best['lr']:g}"
            line.append(text if text and len(of_mask) == 3 else "")
        lines.append(line)
    return _markdown(lines)


def _at_equal_kl(results: Mapping[str, Mapping[str, float]]) -> str:
    """Loss at EQUAL_KL between two rates; the best loss and its KL."""
    points = [(_kl(result), result["test"]) for _, result in sorted(results.items(), key=_rate)]
    between = "–"
    for (low, first), (high, second) in zip(points, points[1:], strict=False):
        if low <= EQUAL_KL <= high:
            part = (EQUAL_KL - low) / (high - low)
            between = f"{first + part * (second - first):.3f}"
    kl, loss = min(points, key=lambda point: point[1])
    return f"{between}; {loss:.3f} at {kl:.2f}"


def _rate(item: tuple[str, Any]) -> float:
    return float(item[0])


def fidelity(cells: Sequence[Mapping[str, Any]]) -> str:
    """LDS over single unseen rows, by form of the score."""
    forms = ("calibrated", "cosine", "inner product")
    lines = [["pool", "trained for", *forms]]
    for cell in _in_order([cell for cell in cells if cell["lds"]]):
        for schedule, found in cell["lds"].items():
            texts = [f"{found[f]['lds']:.2f} ± {found[f]['sd_boot_subsets']:.2f}" for f in forms]
            lines.append([NAMES[cell["pool"]], schedule, *texts])
    return _markdown(lines)


def agreement(cells: Sequence[Mapping[str, Any]]) -> str:
    """Overlap of the top tenths of independent warmups."""
    lines = [["pool", "warm rows in another order", "another seed", "means of two warmups"]]
    for cell in _in_order(cells):
        line = [NAMES[cell["pool"]], f"{cell['warmups']['another order']:.2f}"]
        for key in ("other rows", "means of two"):
            found = cell["warmups"][key]
            line.append(f"{statistics.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})")
        lines.append(line)
    return _markdown(lines)


def early_masks(cells: Sequence[Mapping[str, Any]]) -> str:
    """The mask after one epoch of warmup beside that of 64 steps, the same rows, at 7e-4."""
    lines = [["pool", "seed", "rows", "mask of 64 steps", "of one epoch", "KL", "KL, one epoch"]]
    for cell in _in_order(cells):
        for arm, name in (("recommended", "recommended"), ("target", "target rows")):
            names = [n for n in cell["trained"] if n.rstrip("0123456789") == arm]
            pairs = [
                (cell["trained"][n]["0.0007"], cell["trained"][f"{n}@short"]["0.0007"])
                for n in names
                if {"0.0007"} <= cell["trained"].get(f"{n}@short", {}).keys()
            ]
            if not pairs:
                continue
            late, early = zip(*pairs, strict=True)
            texts = [f"{statistics.mean(r['test'] for r in side):.3f}" for side in (late, early)]
            texts += [f"{statistics.mean(map(_kl, side)):.2f}" for side in (late, early)]
            lines.append([NAMES[cell["pool"]], str(cell["seed"]), name, *texts])
    return _markdown(lines)


def target_shares(cells: Sequence[Mapping[str, Any]]) -> str:
    """The estimated share of target rows beside the true one."""
    head = ["pool", "seed", "rows on target", "estimate"]
    lines = [[*head, "of these, in each quarter of the validation rows' scores"]]
    for cell in _in_order(cells):
        share, error = 100 * cell["target_share"], 100 * cell["target_share_error"]
        quarters = ", ".join(f"{100 * part:.0f} %" for part in cell["quartiles_on_target"])
        texts = [f"{100 * cell['on_target']:.0f} %", f"{share:.0f} ± {error:.0f} %", quarters]
        lines.append([NAMES[cell["pool"]], str(cell["seed"]), *texts])
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in tables().items():
        mark, end = f"<!-- {name} -->", "<!-- end -->"
        before, rest = page.split(mark)
        page = f"{before}{mark}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return page
