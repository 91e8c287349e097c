"""Registry entries and options of the methods that select examples (docs/methods.md).

`dualsft methods` prints these texts. The module imports neither torch nor the method classes.
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
    """Options of top_loss."""

    at: Literal["warmup", "base"] = "warmup"
    """Model whose losses are ranked: the warmed-up model, as in the DualSFT paper, or θ_old."""


@dataclass(frozen=True, slots=True)
class DavIROptions:
    """Options of davir."""

    floor: Positive = 1e-3
    """Lower limit of the loss of θ_old in the denominator, for examples the model has memorized."""
    cross_fit: bool = False
    """Train two references, each on one half of D_train, and score each half with the model trained
    on the other half; false, as in the paper, scores the examples that the reference trained on."""


@dataclass(frozen=True, slots=True)
class LessOptions:
    """Options of less."""

    rank: Count = 128
    """Rank of the LoRA adapter."""
    alpha: Positive = 512.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    dropout: Share = 0.1
    """Dropout on the adapter's input, in the adapter's warmup only."""
    lr: Positive = 2e-5
    """Peak learning rate of the adapter's warmup."""
    epochs: Count = 4
    """Epochs over D_warm; the pool is scored once per epoch, with the adapter as it ends."""
    batch_size: Count = 32
    """Examples per optimizer step of the adapter's warmup."""
    warmup_ratio: Share = 0.03
    """Share of the steps over which the learning rate increases linearly."""
    dim: Count = 8192
    """Dimension that each example's gradient is projected to."""
    projection: Literal["sides", "dense"] = "sides"
    """sides: random signs applied to both sides of each layer's gradient. dense: one dense matrix
    of random signs, as in the original; somewhat smaller errors, but it generates `dim` signs per
    entry and batch, so it is practical for small models only."""
    eps_inside: bool = True
    """Add Adam's eps inside the square root, as the released code does, so that the denominator is
    at least 1e-4; false adds it outside, where it has almost no effect."""
    exclude_warmup: bool = False
    """Exclude D_warm from the examples that can be selected."""


@dataclass(frozen=True, slots=True)
class FisherOptions:
    """Options of fishersft."""

    mode: Literal["token_gram", "pooled"] = "token_gram"
    """What an example adds to the information matrix: the features of its tokens, as in the paper,
    or their normalized mean (cheaper, but a different criterion: length and norm are lost)."""
    dim: Count = 256
    """Dimension that token features are projected to, when the model is wider than this."""
    rank: Count = 16
    """Directions kept per example (token_gram)."""
    prior: Positive = 1.0
    """Initial value of the information matrix's diagonal, in units of an average example's energy
    per direction."""


@dataclass(frozen=True, slots=True)
class SpiceOptions:
    """Options of spice."""

    variant: Literal["paper", "released_topk", "released_window", "dualsft_pairwise"] = "paper"
    """Selection rule: the paper's greedy rule, the default of the released code (the largest
    gradient norms), the windows of the released code, or the objective in the DualSFT paper."""
    dim: Count = 1024
    """Dimension that each example's gradient is projected to."""
    alpha: Positive = 1.0
    """Weight of an example's information."""
    conflict: NonNegative = 0.1
    """Weight of the conflict with the examples already chosen (lambda; mu in dualsft_pairwise)."""
    normalize: bool = False
    """Normalize every gradient to length 1 first, so that alpha has the same meaning for every
    model and large gradients are not preferred."""
    window: Annotated[int, Bounds(least=2)] = 128
    """Examples per window (released_window)."""


DATA: tuple[Entry, ...] = (
    Entry(
        name="top_loss",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.loss_ranked:TopLoss",
        summary="the b highest mean response losses",
        cost="a warmup over D_warm, one forward pass over D_train",
        memory="the model, one number per example",
        source="a row of the DualSFT paper's data statistics",
        deviations="the selection is also trained on; the paper reports only its statistics",
        needs=("warmup",),
        spared=lambda options: options.at == "base",
        options=TopLossOptions,
    ),
    Entry(
        name="davir",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.loss_ranked:DavIR",
        summary="the b examples whose loss falls by the largest share in a full fine-tuning",
        cost="one full fine-tuning on D_train, two forward passes over it",
        memory="AdamW state of every parameter, one number per example",
        source="Zhou et al., ACL 2025 (arXiv 2310.13008); implemented from its formula, no public "
        "code",
        deviations="L_base is clamped to at least `floor` (the original divides by L_base itself); "
        "the reference is trained with this run's finetune.* at the learning rate of plain "
        "fine-tuning; cross_fit is ours",
        options=DavIROptions,
        trains=True,
    ),
    Entry(
        name="spice",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.spice:Spice",
        summary="b examples, greedily, by log-det information minus conflict",
        cost="a warmup over D_warm, one gradient pass over D_train, then b products of the "
        "N x dim features with two vectors",
        memory="the model and the activations of a batch; then N x dim features in fp32 (450 MB "
        "for 110,000 examples), on the GPU if they fit, otherwise in host memory",
        source="Chang et al., ICLR 2026 (arXiv 2601.23155); implemented from descriptions of the "
        "paper and of the behavior of its released code",
        deviations="gradients of the model itself at θ̄ over the linear candidates, sketched to "
        "`dim` (original: LoRA gradients of a small proxy); response tokens only (released code: "
        "prompt tokens too); selects once over all of D_train, before training (original: "
        "interleaved with training); no early stop, the budget is exact (the step at which it "
        "would stop is reported); released_window does not train between windows and keeps a "
        "share b / N of each",
        needs=("warmup",),
        options=SpiceOptions,
    ),
    Entry(
        name="fishersft",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.fishersft:FisherSFT",
        summary="b examples, greedily, by the log det of the token features that enter the head",
        cost="one forward pass over D_train, then b choices with a few re-evaluations each",
        memory="the model; then N x rank x dim numbers in fp32 (1.8 GB for 110,000 examples), on "
        "the GPU if they fit, otherwise in host memory",
        source="Deb et al., ICML 2025 (arXiv 2505.14826); implemented from its criterion, no "
        "public code",
        deviations="features are projected to `dim` and each example keeps `rank` directions (the "
        "share of energy kept is reported); V0 is scaled to the energy of an average example; "
        "features of θ_old; maximizes the log det itself, not its linearization, the first-order "
        "trace in the DualSFT paper",
        options=FisherOptions,
    ),
    Entry(
        name="less",
        axis="data",
        lends=True,
        target="dualsft.lab.methods.less:Less",
        summary="the b examples whose Adam direction agrees most with the gradients of D_val, "
        "measured in a LoRA adapter",
        cost="`epochs` epochs of LoRA over D_warm, then `epochs` gradient passes over D_train and "
        "D_val",
        memory="the model, the adapter with its moments, the activations of a batch; `epochs` "
        "copies of adapter and moments in host memory (3.5 GB for Llama-3.2-3B at the defaults)",
        source="Xia et al., ICML 2024; implemented from its published procedure",
        deviations="cosine instead of linear learning-rate decay in the warmup; projection by "
        "random signs on both sides of each layer's gradient, summed over the layers, instead of "
        "one dense matrix of random signs (available as projection=dense), in fp32 instead of "
        "fp16; loss over response tokens; all of D_val is one subtask; gradients are computed in "
        "batches and not stored, which gives the same scores",
        options=LessOptions,
        extra="peft",
    ),
)
