"""Warnings of a report: the finding, its meaning and its cure.

From the numbers of the stages: a curvature below rounding, preservation that dominates, scores at
or below zero among the selected, a drift of lengths, a loss that rose. From the codes of the
warnings that the stages logged: a short warmup, few steps, memory that ran out, a small corpus; a
warning without a code is shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dualsft.system.progress import NOTE

DRIFT = 1.5
"""Warn if the mean response length of the selected differs from the pool's by more than this
factor, in either direction."""
DOMINATES = 2.0
"""Warn if λ‖v_prior‖ exceeds ‖v_new‖ by more than this factor."""


@dataclass(frozen=True)
class Concern:
    """One warning of the report."""

    title: str
    found: str
    meaning: str
    cure: str


FEWER, STAGE_NOTE = "Fewer rows than the paper's", "Note of the stage"
KNOWN = {
    "short_warmup": (
        "Short warmup",
        "The reference weights and the curvature come from a handful of steps. The scores are "
        "those of an unsettled model, and another seed may choose differently.",
        "Raise split.warm, lower warmup.batch_size, or set warmup.min_steps; then select again.",
    ),
    "rounded_theta_bar": (
        "The warmup is near the rounding",
        "The warmed-up weights are kept in half precision, and rounding them moved them almost as "
        "far as the warmup did. All scores are taken there, alike, so the selection is "
        "consistent, but it is that of a slightly random model: another precision or seed may "
        "choose differently.",
        "Set model.dtype=float32, or lengthen the warmup (split.warm, warmup.min_steps, "
        "warmup.lr); then select again.",
    ),
    "few_steps": (
        "Few fine-tuning steps",
        "So few steps change the model little; that nothing was gained may say nothing about the "
        "selection.",
        "Lower finetune.batch_size, or raise finetune.epochs or select.data_budget.",
    ),
    "out_of_memory": (
        "Memory ran out and the run went on",
        "A smaller plan took over. The result is the same up to the order of sums; time was lost.",
        "Set what the message names, so that the next run starts with it.",
    ),
    "half_precision": (
        "Rounded gradients",
        "There was no room for fp32 weights, so the gradients that every score is measured against "
        "are rounded. Examples near the boundary may be on the wrong side of it.",
        "Use a GPU with more memory or a smaller score.plan, or accept it with "
        "score.precision=half.",
    ),
    "static_mask": (
        "The mask never moves",
        "The method is meant to choose its entries anew while it trains; here it kept the first "
        "ones, so this is not the method as published.",
        "Lower its interval, or train longer.",
    ),
    "remote_code": (
        "Code of the model's author ran",
        "The model came with Python code that ran with the rights of the user.",
        "Leave model.trust_remote_code off unless the source is known.",
    ),
    "small_corpus": (
        FEWER,
        "The gradients over these rows give the direction that every score is measured by: "
        "split.val that of the new skill, split.anchor that of preservation. A mean over fewer "
        "rows is noisier, so another seed may choose differently near the boundary.",
        "Give more rows, or set split.val and split.anchor.",
    ),
}
"""Title, meaning and cure of each code that a stage's warning may have."""
COUNTED = ("nonpositive_scores", "preservation_dominates")
"""Codes whose concerns are made from the summaries' own numbers instead."""


def concerns(facts: Mapping[str, Any]) -> list[Concern]:
    """All warnings of a run, in the order of `_place`."""
    found = [*_of_stages(facts)]
    if facts["outdated"]:
        found.append(_outdated(facts["outdated"]))
    if "scores" in facts:
        found += _of_scores(facts["scores"])
    if "selection" in facts:
        found += _of_selection(facts["selection"])
    if "evaluation" in facts:
        found += _of_evaluation(facts["evaluation"])
    return sorted(found, key=_place)


def _place(concern: Concern) -> int:
    """Sort key: known stage warnings, then computed concerns, a small corpus, other warnings."""
    if concern.title == FEWER:
        return len(KNOWN) + 1
    if concern.title.startswith(STAGE_NOTE):
        return len(KNOWN) + 2
    order = [title for title, *_ in KNOWN.values()]
    return order.index(concern.title) if concern.title in order else len(order)


def _outdated(stages: list[str]) -> Concern:
    return Concern(
        "Stages out of date",
        f"Left out of this report: {', '.join(stages)}.",
        "They were made before the settings changed and tell of another selection.",
        "Run `dualsft run` on this folder again.",
    )


def _of_stages(facts: Mapping[str, Any]) -> Iterator[Concern]:
    for stage, texts in facts["warnings"].items():
        codes = facts["warning_codes"].get(stage) or [NOTE] * len(texts)  # runs made before codes
        for text, code in dict(zip(texts, codes, strict=False)).items():
            if code in COUNTED:
                continue
            if code in KNOWN:
                title, meaning, cure = KNOWN[code]
                yield Concern(title, f"{stage}: {text}", meaning, cure)
            else:
                meaning = "The stage continued, and its result is as the message describes."
                cure = "Nothing needs to be done unless the message surprises you."
                yield Concern(f"{STAGE_NOTE} {stage}", text, meaning, cure)


def _of_scores(scores: Mapping[str, Any]) -> Iterator[Concern]:
    share, probes = scores["curvature_share"], scores["checks"]["alone"]
    rounding = max((row.get("rounding", row["error"]) for row in probes), default=0.0)
    if share is not None and 0 < share < rounding:
        yield Concern(
            "Curvature share below rounding",
            f"The second-order part of u is {share:.2g} of the first-order part; rounding moves a "
            f"score by up to {rounding:.2g} of ‖u‖‖g‖.",
            "The curvature decides nothing here: the selection is the first-order one. That is "
            "usual where η is small, and no reason to distrust the first-order scores.",
            "Raise score.curvature_scale or finetune.lr if the second order should count, or set "
            "score.curvature=none and save the work.",
        )
    pull = scores["lam_effective"] * scores["norms"]["prior_grad"]
    learn = scores["norms"]["val_grad"]
    if pull > DOMINATES * learn:
        yield Concern(
            "Preservation dominates",
            f"λ‖v_prior‖ = {pull:.3g} is {_times(pull, learn)} ‖v_new‖ = {learn:.3g}.",
            "The direction that scores are measured by is mostly that of keeping the old "
            "behaviour; examples are chosen for not hurting rather than for teaching.",
            "Lower score.lam, or set score.lam_relative=true, which makes λ scale-free.",
        )


def _times(a: float, b: float) -> str:
    return f"{a / b:.1f} times" if b > 0 else "far above"


def _of_selection(chosen: Mapping[str, Any]) -> Iterator[Concern]:
    for key, budget, what, total in (
        ("num_nonpositive_examples", "select.data_budget", "examples", chosen.get("b")),
        ("num_nonpositive_params", "select.param_budget", "entries", chosen.get("k")),
    ):
        if chosen.get(key):
            yield Concern(
                f"Negative scores among the selected {what}",
                f"{chosen[key]:,} of the {total:,} selected {what} have a score ≤ 0.",
                "The budget is larger than what the scores recommend: by the run's own estimate "
                "these are not expected to help.",
                f"Lower {budget}.",
            )
    if chosen.get("near_ties"):
        yield Concern(
            "Ties at the boundary",
            f"{chosen['near_ties']:,} examples lie within rounding of the cut-off.",
            "Which of them are in and which are out is chance; the rest of the selection is not "
            "touched by it.",
            "Nothing, unless they are many; then score with model.dtype=float32.",
        )
    if "response_tokens_pool" not in chosen:
        return
    selected, pool = chosen["response_tokens_selected"], chosen["response_tokens_pool"]
    if pool > 0 and not 1 / DRIFT <= selected / pool <= DRIFT:
        longer = selected > pool
        yield Concern(
            "Length drift",
            f"Selected responses have {selected:.1f} tokens on average, the pool {pool:.1f}.",
            f"The selection prefers {'long' if longer else 'short'} responses. The loss is a mean "
            "over tokens, and short rows tend to have larger gradients; the choice may be one of "
            "length rather than of content, and the model may learn to answer at that length.",
            "Look at the selected rows below; filter the shortest or longest rows, or select "
            "within groups of like length, and compare with method.data=random.",
        )


def _of_evaluation(results: Mapping[str, Any]) -> Iterator[Concern]:
    for name, r in results["files"].items():
        before, after = r["before"]["loss"], r["after"]["loss"]
        if name == "validation" and after > before:
            yield Concern(
                "Validation loss rose",
                f"From {before:.4f} to {after:.4f} on the split that scoring used.",
                "The model got worse on the very rows that the selection was aimed at.",
                "Lower finetune.lr or finetune.epochs; look at the training loss in metrics.jsonl.",
            )
