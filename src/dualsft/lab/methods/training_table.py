"""Registry entries and options of the methods that weight the training loss or edit the trained
weights (docs/methods.md).

`dualsft methods` prints these texts. The module imports neither torch nor the method classes.
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
    """Options of flow (one fixed weight per example)."""

    normalize: bool = False
    """Divide the weights by their mean over the training examples; the original does not, so its
    gradients are about 2.5 times smaller."""
    tau: Positive | None = None
    """Temperature of exp(-loss / tau); null is the median loss of the training examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StmOptions:
    """Options of stm (a fixed mask over response tokens)."""

    threshold: Positive = 2.5
    """Perplexity exp(loss) under the base model above which a token is masked."""
    mode: Literal["highest", "lowest", "random"] = "highest"
    """Which tokens are masked: those above the threshold, or, as controls, the same number of
    tokens in the example with the lowest perplexity or at random."""
    keep_ends: bool = True
    """Never mask control tokens (end of text, end of turn). The base model gives them a low
    probability, and a model that is not trained on them does not learn to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalrOptions:
    """Options of talr (token weights from the model being trained)."""

    tau: Positive | None = None
    """Temperature of exp(-loss / tau); null is the median sequence loss of the step."""
    window: Literal["step", "past"] = "step"
    """Where tau=null takes the median from: the sequences of the current step (an extra forward
    pass per step), or a moving average over earlier steps (an extra forward pass in the first step
    only)."""
    momentum: Annotated[float, Bounds(least=0, below=1)] = 0.9
    """Momentum of that moving average: the share of the old value."""
    floor: Share = 0.01
    """Smallest weight of a token."""
    least_tau: Positive = 1e-3
    """Smallest temperature; without it 1 / tau diverges as the loss goes to 0."""
    normalize: Literal["none", "batch_sum"] = "none"
    """What the weighted sum is divided by: the number of response tokens in the step, or the sum of
    their weights (an extra forward pass)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FapmOptions:
    """Options of fapm."""

    keep: Share = 0.1
    """Share of each tensor's entries that keep their update; the others are reset to the base."""


WEIGHTS: tuple[Entry, ...] = (
    Entry(
        name="flow",
        axis="weights",
        target="dualsft.lab.methods.flow:Flow",
        summary="example weights exp(-loss / median loss) from the base model, fixed before "
        "training",
        cost="one forward pass over the training examples",
        memory="one number per example",
        source="Sanyal et al., ICML 2025 (arXiv 2502.02797); implemented from its rule",
        deviations="the denominator is the number of predicted response tokens in the optimizer "
        "step, independent of micro-batches (the original's two scripts differ by one token per "
        "example); an example whose loss is not finite stops the run instead of getting weight 0",
        options=FlowOptions,
    ),
    Entry(
        name="stm",
        axis="weights",
        target="dualsft.lab.methods.stm:Stm",
        summary="tokens with a perplexity above 2.5 under the base model are masked from the loss",
        cost="one forward pass over the training examples",
        memory="one byte per response token",
        source="Wu et al., NeurIPS 2025 (arXiv 2501.14315); implemented from its rule",
        deviations="control tokens are never masked (keep_ends); a fully masked example or step "
        "has a zero gradient instead of NaN; scoring uses the same token sequences as training, "
        "with no separate length limit; the original trains DoRA of rank 16 (method.params=lora "
        "method.lora.r=16 method.lora.alpha=32 method.lora.dora=true)",
        options=StmOptions,
    ),
    Entry(
        name="talr",
        axis="weights",
        target="dualsft.lab.methods.talr:Talr",
        summary="token weights max(p^(1/tau), 0.01) from the current model, where tau is the "
        "median sequence loss of the step",
        cost="one extra forward pass per step with window=step",
        memory="no extra memory",
        source="Lin et al., ICLR 2026 (arXiv 2509.20758); implemented from its rule, no public "
        "code",
        deviations="tau is the median over the whole optimizer step, not over a micro-batch; floor "
        "and denominator follow a third-party implementation, since the paper's are not known",
        options=TalrOptions,
    ),
    Entry(
        name="dft",
        axis="weights",
        target="dualsft.lab.methods.talr:Dft",
        summary="token weights equal to the probability p under the current model (TALR with "
        "tau = 1)",
        cost="none",
        memory="no extra memory",
        source="dynamic fine-tuning (DFT); TALR's rule with tau = 1 and no floor",
        deviations="the denominator is the number of response tokens in the whole optimizer step",
    ),
)
AFTER: tuple[Entry, ...] = (
    Entry(
        name="fapm",
        axis="after",
        target="dualsft.lab.methods.fapm:Fapm",
        summary="each tensor keeps the tenth of its updates with the largest "
        "|d| (1 - mean|W| / |W|); the rest are reset to the base",
        cost="a few reads of the weights of both models after training",
        memory="base and trained weights, a chunk of scores",
        source="Huang et al., EMNLP 2025 (arXiv 2509.08255); implemented from its rule",
        deviations="scores in fp32 or fp64 instead of bf16; a base weight of zero gets the lowest "
        "score instead of NaN, which the original ranks first; ties are broken by index; a kept "
        "entry has the trained value itself, not base + difference; tied weights are edited once",
        options=FapmOptions,
    ),
)
