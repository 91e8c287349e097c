"""The methods that choose examples, as `dualsft methods` lists them (METHODS.md parts B and D1).

Nothing heavy is imported here: names, costs, sources and settings alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dualsft.config.fields import Count, NonNegative, Positive
from dualsft.config.methods import Entry
from dualsft.config.parse import Bounds

Share = Annotated[float, Bounds(least=0, below=1)]


@dataclass(frozen=True, slots=True)
class TopLossOptions:
    """Settings of top_loss."""

    at: Literal["warmup", "base"] = "warmup"
    """Whose losses: of the warmed-up model, as the DualSFT paper measures them, or of θ_old."""


@dataclass(frozen=True, slots=True)
class DavIROptions:
    """Settings of davir."""

    floor: Positive = 1e-3
    """A loss of θ_old below this counts as this: what the model knows by heart has no ratio."""
    cross_fit: bool = False
    """Train two references, each on one half of D_train, and score each half by the other's; off,
    as in the paper, the reference has trained on what it scores."""


@dataclass(frozen=True, slots=True)
class LessOptions:
    """Settings of less."""

    rank: Count = 128
    """Rank of the LoRA adapter of its warmup."""
    alpha: Positive = 512.0
    """The adapter's scale is alpha / rank."""
    dropout: Share = 0.1
    """Dropout before the adapter, in its warmup alone."""
    lr: Positive = 2e-5
    """Peak learning rate of its warmup."""
    epochs: Count = 4
    """Epochs over D_warm; the pool is scored once at the end of each."""
    batch_size: Count = 32
    """Examples of an optimizer step of its warmup."""
    warmup_ratio: Share = 0.03
    """Share of the steps in which the learning rate rises."""
    dim: Count = 8192
    """Numbers that an example's gradient is projected to."""
    projection: Literal["sides", "dense"] = "sides"
    """Random signs on both sides of each map's gradient, or, as in the original, one dense matrix
    of them: somewhat smaller errors, but `dim` signs made for every entry and batch, which only
    small models afford."""
    eps_inside: bool = True
    """Adam's eps inside the root, as the released code has it: a floor of 1e-4 under the root; off
    puts it outside, where it hardly matters."""
    exclude_warmup: bool = False
    """Leave D_warm out of what is chosen from."""


@dataclass(frozen=True, slots=True)
class FisherOptions:
    """Settings of fishersft."""

    mode: Literal["token_gram", "pooled"] = "token_gram"
    """What an example adds to the information matrix: its tokens' features, as in the paper, or
    one averaged and normalised vector (cheap, another criterion: length and norm are lost)."""
    dim: Count = 256
    """Numbers that a token's feature is projected to; a wider model only."""
    rank: Count = 16
    """Directions that are kept of each example's tokens (token_gram)."""
    prior: Positive = 1.0
    """The start of the information matrix, in units of an average example's energy a direction."""


@dataclass(frozen=True, slots=True)
class SpiceOptions:
    """Settings of spice."""

    variant: Literal["paper", "released_topk", "released_window", "dualsft_pairwise"] = "paper"
    """Which of the rules: the paper's greedy one, the released code's default (the largest gradient
    norms), the released code's windows, or the objective that the DualSFT paper writes down."""
    dim: Count = 1024
    """Numbers that an example's gradient is projected to."""
    alpha: Positive = 1.0
    """Weight of an example's information."""
    conflict: NonNegative = 0.1
    """Weight of the conflict with what is chosen already (lambda; mu for dualsft_pairwise)."""
    normalize: bool = False
    """Scale every gradient to norm one before: alpha means the same for every model then, and large
    gradients are not preferred."""
    window: Annotated[int, Bounds(least=2)] = 128
    """Examples of a window (released_window)."""


DATA: tuple[Entry, ...] = (
    Entry(
        name="top_loss",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.loss_ranked:TopLoss",
        summary="the b highest mean response losses",
        cost="a warmup over D_warm, one forward pass over D_train",
        memory="the model, one number an example",
        source="a row of the DualSFT paper's data statistics (METHODS.md B0)",
        deviations="trained on as well, which the paper does not do",
        needs=("warmup",),
        spared=lambda options: options.at == "base",
        options=TopLossOptions,
    ),
    Entry(
        name="davir",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.loss_ranked:DavIR",
        summary="the b examples whose loss a full fine-tuning lowers by the largest share",
        cost="one full fine-tuning on D_train, two forward passes over it",
        memory="full AdamW of every parameter, one number an example",
        source="Zhou et al., ACL 2025 (arXiv 2310.13008); written from its formula, there is no "
        "public code",
        deviations="an L_base below `floor` counts as the floor (the original divides by it as it "
        "is); the reference is trained by this run's finetune.* with the rate of plain fine-tuning;"
        " cross_fit is ours",
        options=DavIROptions,
        trains=True,
    ),
    Entry(
        name="spice",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.spice:Spice",
        summary="b examples, greedily, that add the most log-det information less their conflict",
        cost="a warmup over D_warm, one gradient pass over D_train, then b products of the "
        "N x dim features with two vectors",
        memory="the model and a batch's activations; then N x dim features in fp32 (450 MB for "
        "110,000 examples), in the host's memory or on the GPU where they fit",
        source="Chang et al., ICLR 2026 (arXiv 2601.23155); written from descriptions of the paper "
        "and of its released code's behaviour",
        deviations="gradients of the model itself at θ̄ over the linear candidates, sketched to "
        "`dim` (original: LoRA gradients of a small proxy); response tokens only (released code: "
        "prompt too); chosen once over all of D_train and then trained (original: interleaved with "
        "training); no early stop, the budget is exact (where it would be is reported); "
        "released_window does not train between windows and keeps a share b / N of each",
        needs=("warmup",),
        options=SpiceOptions,
    ),
    Entry(
        name="fishersft",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.fishersft:FisherSFT",
        summary="b examples, greedily, by the log det of their tokens' features before the head",
        cost="one forward pass over D_train, then b choices with a few re-evaluations each",
        memory="the model; then N x rank x dim numbers in fp32 (1.8 GB for 110,000 examples), in "
        "the host's memory or on the GPU where they fit",
        source="Deb et al., ICML 2025 (arXiv 2505.14826); written from its criterion, there is no "
        "public code",
        deviations="features are projected to `dim` and each example keeps `rank` directions (the "
        "share of energy kept is reported); V0 is scaled to an average example's energy; features "
        "of θ_old; the DualSFT paper's first-order trace is the same gain linearised, and is not "
        "what is greedily maximised here",
        options=FisherOptions,
    ),
    Entry(
        name="less",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.less:Less",
        summary="the b examples whose Adam direction agrees most with D_val's gradients, through "
        "a LoRA adapter",
        cost="`epochs` epochs of LoRA over D_warm, then as many gradient passes over D_train and "
        "D_val",
        memory="the model, the adapter with its moments, a batch's activations; `epochs` copies of "
        "adapter and moments in the host's memory (3.5 GB for Llama-3.2-3B at the defaults)",
        source="Xia et al., ICML 2024; written from its published procedure",
        deviations="cosine instead of linear decay of the warmup's rate; projection by random signs"
        " on both sides of each map's gradient, added up over the maps, instead of one dense matrix"
        " of random signs (projection=dense has that), in fp32 instead of fp16; loss of response "
        "tokens; all of D_val is one subtask; gradients in batches and no store of them, the "
        "same scores",
        options=LessOptions,
        extra="peft",
    ),
)
