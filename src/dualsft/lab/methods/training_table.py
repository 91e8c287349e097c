"""Methods that weigh tokens or examples, and those that edit the trained weights (METHODS.md D).

Nothing heavy is imported here: names, costs, sources and settings alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dualsft.config.fields import Positive
from dualsft.config.methods import Entry
from dualsft.config.parse import Bounds

Share = Annotated[float, Bounds(least=0, most=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOptions:
    """FLOW: fixed weights of whole examples."""

    normalize: bool = False
    """Divide the weights by their mean over the examples trained on; the original does not, so its
    gradients are about 2.5 times smaller."""
    tau: Positive | None = None
    """Temperature of exp(-loss / tau); null is the median loss of the examples trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StmOptions:
    """STM: a fixed mask of response tokens."""

    threshold: Positive = 2.5
    """Perplexity exp(loss) under the base model above which a token is masked."""
    mode: Literal["highest", "lowest", "random"] = "highest"
    """Which tokens are masked: those above the threshold, or, as controls, as many in the same
    example with the lowest perplexity, or as many at random."""
    keep_ends: bool = True
    """Never mask a control token (end of text, end of turn): a base model gives it a low
    probability, and a model that is never shown it does not learn to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalrOptions:
    """TALR: weights of tokens by the model being trained."""

    tau: Positive | None = None
    """Temperature of exp(-loss / tau); null is the median loss of the step's sequences."""
    window: Literal["step", "past"] = "step"
    """Where a tau that is not given comes from: the sequences of this very step (one more forward
    pass), or a moving average of the medians of the steps before (only the first step has one)."""
    momentum: Annotated[float, Bounds(least=0, below=1)] = 0.9
    """Share of the old value in that moving average."""
    floor: Share = 0.01
    """Least weight of a token."""
    least_tau: Positive = 1e-3
    """Least temperature: 1 / tau grows without bound as the loss falls."""
    normalize: Literal["none", "batch_sum"] = "none"
    """What the weighted sum is divided by: the step's response tokens, or the sum of their weights
    (one more forward pass)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FapmOptions:
    """FAPM: which part of the update stays."""

    keep: Share = 0.1
    """Share of each tensor's entries that keep their update; the others return to the base."""


WEIGHTS: tuple[Entry, ...] = (
    Entry(
        name="flow",
        axis="weights",
        target="dualsft.lab.methods.flow:Flow",
        summary="examples weigh exp(-loss / median loss) by the base model, fixed before training",
        cost="one forward pass over the examples trained on",
        memory="one number an example",
        source="Sanyal et al., ICML 2025 (arXiv 2502.02797); written from its rule",
        deviations="the denominator is the predicted response tokens of the whole optimizer step, "
        "however it is cut into micro-batches (the original's two scripts differ by one token an "
        "example); an example whose loss is not finite stops the run instead of weighing 0",
        options=FlowOptions,
    ),
    Entry(
        name="stm",
        axis="weights",
        target="dualsft.lab.methods.stm:Stm",
        summary="tokens with a perplexity above 2.5 by the base model do not count",
        cost="one forward pass over the examples trained on",
        memory="one byte a response token",
        source="Wu et al., NeurIPS 2025 (arXiv 2501.14315); written from its rule",
        deviations="control tokens are never masked (keep_ends); a fully masked example or step "
        "adds a zero gradient instead of NaN; tokens are scored as they are trained, without a "
        "length limit of its own; the original trains DoRA of rank 16 (method.params=lora "
        "method.lora.r=16 method.lora.alpha=32 method.lora.dora=true)",
        options=StmOptions,
    ),
    Entry(
        name="talr",
        axis="weights",
        target="dualsft.lab.methods.talr:Talr",
        summary="tokens weigh max(p^(1/tau), 0.01) by the current model, tau the step's median "
        "sequence loss",
        cost="one more forward pass a step with window=step",
        memory="as without it",
        source="Lin et al., ICLR 2026 (arXiv 2509.20758); no public code, written from its rule",
        deviations="tau is the median over the whole optimizer step, not over a micro-batch; floor "
        "and denominator are those of a third party's version, the paper's own are not known",
        options=TalrOptions,
    ),
    Entry(
        name="dft",
        axis="weights",
        target="dualsft.lab.methods.talr:Dft",
        summary="tokens weigh their probability p by the current model (TALR with tau = 1)",
        cost="none",
        memory="as without it",
        source="dynamic fine-tuning (DFT); TALR's rule with tau = 1 and no floor",
        deviations="the denominator is the response tokens of the whole optimizer step",
    ),
)
AFTER: tuple[Entry, ...] = (
    Entry(
        name="fapm",
        axis="after",
        target="dualsft.lab.methods.fapm:Fapm",
        summary="each tensor keeps the tenth of its updates with the largest "
        "|d| (1 - mean|W| / |W|), the rest returns to the base",
        cost="a few readings of both models' weights after training",
        memory="base and trained weights, a chunk of scores",
        source="Huang et al., EMNLP 2025 (arXiv 2509.08255); written from its rule",
        deviations="scores in fp32 or fp64 instead of bf16; a base weight of zero scores lowest "
        "instead of NaN, which the original keeps first; ties by index; a kept entry has the "
        "trained value itself, not base + difference; tied weights once",
        options=FapmOptions,
    ),
)
