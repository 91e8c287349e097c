"""Registry entries and options of the methods that DualSFT is compared with (docs/methods.md).

`dualsft methods` prints these texts; `deviations` names the differences from the original, which
docs/methods.md explains. The module imports neither torch nor the method classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from dualsft.config.fields import Count, NonNegative, Positive
from dualsft.config.methods import Entry
from dualsft.config.parse import Bounds, Names

Share = Annotated[float, Bounds(least=0, most=1)]
Part = Annotated[float, Bounds(above=0, most=1)]
BelowOne = Annotated[float, Bounds(least=0, below=1)]

_data = partial(Entry, axis="data", lends=True)
_params = partial(Entry, axis="params")
_weights = partial(Entry, axis="weights")

# --- data: which examples ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopLossOptions:
    at: Literal["warmup", "base"] = "warmup"
    """Model whose losses are ranked: the warmed-up model, as in the DualSFT paper, or θ_old."""


@dataclass(frozen=True, slots=True)
class DavIROptions:
    floor: Positive = 1e-3
    """Lower limit of the loss of θ_old in the denominator, for examples the model has memorized."""
    cross_fit: bool = False
    """Train two references, each on one half of D_train, and score each half with the model trained
    on the other half; false, as in the paper, scores the examples that the reference trained on."""


@dataclass(frozen=True, slots=True)
class SpiceOptions:
    variant: Literal["paper", "released_topk", "released_window", "dualsft_pairwise"] = "paper"
    """Selection rule: the paper's greedy rule, the default of the released code (the largest
    gradient norms), the windows of the released code, or the objective in the DualSFT paper."""
    dim: Count = 1024
    """Dimension that each example's gradient is projected to."""
    alpha: Positive = 1.0
    """Weight of an example's information."""
    conflict: NonNegative = 0.1
    """Weight of the conflict with the examples already chosen (lambda; mu in dualsft_pairwise)."""
    normalize: bool = True
    """Normalize every gradient to length 1 first. Otherwise the gain is hardly more than the
    gradient's length. Ignored by released_topk, whose rule is the length."""
    window: Annotated[int, Bounds(least=2)] = 128
    """Examples per window (released_window)."""


@dataclass(frozen=True, slots=True)
class FisherOptions:
    mode: Literal["token_gram", "pooled"] = "token_gram"
    """What an example adds to the information matrix: the features of its tokens, as in the paper,
    or their normalized mean (cheaper, but a different criterion: length and norm are lost)."""
    dim: Count = 256
    """Dimension that token features are projected to, when the model is wider than this."""
    rank: Count = 16
    """Directions kept per example (token_gram)."""
    prior: Positive = 1.0
    """Initial diagonal of the information matrix, relative to an average example's energy."""


@dataclass(frozen=True, slots=True)
class LessOptions:
    rank: Count = 128
    """Rank of the LoRA adapter."""
    alpha: Positive = 512.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    dropout: BelowOne = 0.1
    """Dropout on the adapter's input, in the adapter's warmup only."""
    lr: Positive | None = None
    """Peak learning rate of the adapter's warmup; null is finetune.lr (the original uses 2e-5 for
    both)."""
    epochs: Count = 4
    """Epochs over D_warm; the pool is scored once per epoch, with the adapter as it ends."""
    batch_size: Count = 32
    """Examples per optimizer step of the adapter's warmup."""
    warmup_ratio: BelowOne = 0.03
    """Share of the steps over which the learning rate increases linearly."""
    dim: Count = 8192
    """Dimension that each example's gradient is projected to."""
    projection: Literal["sides", "dense"] = "sides"
    """sides: random signs on both sides of each layer's gradient. dense: one dense matrix of random
    signs, as in the original, which is practical for small models only."""
    eps_inside: bool = True
    """Add Adam's eps inside the square root, as the released code does, instead of outside."""
    exclude_warmup: bool = False
    """Exclude D_warm from the examples that can be selected."""


DATA = (
    _data(
        name="top_loss",
        target="dualsft.lab.methods.per_example:TopLoss",
        summary="the b highest mean response losses",
        cost="a warmup over D_warm, one forward pass over D_train",
        memory="the model, one number per example",
        source="a row of the DualSFT paper's data statistics",
        deviations="the selection is also trained on; the paper reports only its statistics",
        needs=("warmup",),
        spared=lambda options: options.at == "base",
        options=TopLossOptions,
    ),
    _data(
        name="davir",
        target="dualsft.lab.methods.per_example:DavIR",
        summary="the b examples whose loss falls by the largest share in a full fine-tuning",
        cost="one full fine-tuning on D_train, two forward passes over it",
        memory="AdamW state of every parameter, one number per example",
        source="Zhou et al., ACL 2025 (arXiv 2310.13008); from its formula, no public code",
        deviations="L_base is at least `floor`; the reference uses this run's finetune.* at the "
        "learning rate of plain fine-tuning; cross_fit is ours",
        options=DavIROptions,
        trains=True,
    ),
    _data(
        name="spice",
        target="dualsft.lab.methods.greedy:Spice",
        summary="b examples, greedily, by log-det information minus conflict",
        cost="a warmup over D_warm, one gradient pass over D_train, b products with N x dim",
        memory="the model and a batch; then N x dim fp32 numbers (450 MB for 110,000 examples)",
        source="Chang et al., ICLR 2026 (arXiv 2601.23155); from descriptions of paper and code",
        deviations="gradients of the model itself at θ̄ over the linear candidates, sketched "
        "and at unit length (original: LoRA gradients of a small proxy, at their own lengths, "
        "which then decide alone); response tokens only; selects once, before "
        "training (original: interleaved); no early stop, the budget is exact",
        needs=("warmup",),
        options=SpiceOptions,
    ),
    _data(
        name="fishersft",
        target="dualsft.lab.methods.greedy:FisherSFT",
        summary="b examples, greedily, by the log det of the token features that enter the head",
        cost="one forward pass over D_train, then b choices with a few re-evaluations each",
        memory="the model; then N x rank x dim fp32 numbers (1.8 GB for 110,000 examples)",
        source="Deb et al., ICML 2025 (arXiv 2505.14826); from its criterion, no public code",
        deviations="features are projected to `dim`, and each example keeps `rank` directions; V0 "
        "is scaled to the energy of an average example; features of θ_old; the log det itself, "
        "not the first-order trace in the DualSFT paper",
        options=FisherOptions,
    ),
    _data(
        name="less",
        target="dualsft.lab.methods.less:Less",
        summary="the b examples whose Adam direction, in a LoRA adapter, agrees most with D_val",
        cost="`epochs` epochs of LoRA over D_warm, then `epochs` gradient passes over D_train and "
        "D_val",
        memory="the model, the adapter with its moments, a batch; `epochs` copies of adapter and "
        "moments in host memory (3.5 GB for Llama-3.2-3B)",
        source="Xia et al., ICML 2024; from its published procedure",
        deviations="cosine decay in the warmup (original: linear); random signs on both sides of "
        "each layer's gradient (original: projection=dense), in fp32; loss over response tokens; "
        "all of D_val is one subtask; gradients are not stored; the warmup's learning rate follows "
        "finetune.lr",
        options=LessOptions,
        follows_lr=True,
        extra="peft",
    ),
)

# --- params: which entries -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class S2FTOptions:
    d_ratio: Part | None = None
    """Share of the channels of the down projections; null: what select.param_budget allows."""
    u_ratio: Share = 0.0
    """Share of the rows of the up projections, drawn independently of the down projections."""
    o_ratio: Share = 0.0
    """Share of the heads whose columns of the output projection are trained."""
    v_ratio: Share = 0.0
    """Share of the key-value heads whose rows of the value projection are trained."""
    score: Literal["random", "weight", "activation", "product"] = "random"
    """What ranks the channels of the down projections: a random order, the norm of their weights,
    the norm of their activations over the training examples (one forward pass), or the product."""
    end: Literal["largest", "smallest"] = "largest"
    """Which end of that ranking is taken; ignored for score=random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SMTOptions:
    steps: Count = 100
    """Dense fine-tuning steps whose gradients are summed; at most half of the steps that
    fine-tuning would take, which takes as many fewer."""
    dense_lr: Positive | None = None
    """Peak learning rate of the dense steps; null is finetune.lr."""
    block: Count = 256
    """Rows and columns of a block; blocks at the edges of a matrix can be smaller."""
    strategy: Literal["mean_abs", "abs_mean", "l1", "l2"] = "mean_abs"
    """Score of a block, from its summed gradient: |mean| (mean_abs is the original's name), mean of
    |.|, sum of |.|, or 2-norm. All but the first store a gradient of the eligible matrices."""
    attention_ratio: Share | None = None
    """Share of the q, k, v blocks to take; null takes none when mlp_ratio is set. When both are
    null, each family has its share of select.param_budget."""
    mlp_ratio: Share | None = None
    """Share of the gate, up, down blocks to take; null as for attention_ratio."""
    ratio_of: Literal["family", "model"] = "family"
    """What the ratios are relative to: the number of blocks in the family, or, as in the released
    code, the entries of all matrices of the model divided by the entries of a block."""
    restart_from_base: bool = False
    """Fine-tune from theta_old; false keeps the dense steps, as the original does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LIFTOptions:
    rank: Count = 64
    """Rank of the reconstruction whose largest entries are selected."""
    lora_rank: Count | None = None
    """Entries selected per matrix: (rows + columns) times this; null divides select.param_budget
    among the matrices by size."""
    interval: Count = 200
    """Optimizer steps between mask updates."""
    freeze: Annotated[str, Names(("q", "k", "v", "o", "gate", "up", "down"))] | None = None
    """Projections to exclude, comma-separated: any of q, k, v, o, gate, up, down."""
    svd: Literal["lowrank", "exact"] = "lowrank"
    """How the reconstruction is computed: a seeded randomized SVD, or a full SVD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoAdamOptions:
    interval: Count = 600
    """Optimizer steps between mask updates."""
    chunk: Count = 1 << 20
    """Entries per chunk of a flattened parameter; each chunk has its own quota."""
    moments: Literal["carry", "reset"] = "carry"
    """Whether entries that stay in the mask at an update keep their Adam moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapleyOptions:
    ratio: Part | None = None
    """Share of the neurons to take; null takes as many as select.param_budget allows."""
    examples: Literal["train", "val"] = "train"
    """Examples whose gradients are used: those that fine-tuning trains on, or D_val."""
    batch_size: Count = 8
    """Examples per mini-batch."""
    decay: BelowOne = 0.99
    """Decay of the bias-corrected moving average over mini-batches; 0 uses the last one only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    r: Count | None = None
    """Rank of the adapters; null is the largest that select.param_budget allows."""
    alpha: Count | None = None
    """Scale: the adapters' output is multiplied by alpha / r; null is twice the rank."""
    dropout: BelowOne = 0.05
    """Dropout on the adapters' inputs in training."""
    dora: bool = False
    """Train the magnitude of each row of the adapted weight separately (DoRA)."""
    dtype: Literal["float32", "model"] = "float32"
    """Dtype of the adapter weights when the model is in half precision: float32, or the model's."""


PARAMS = (
    _params(
        name="s2ft",
        target="dualsft.lab.methods.channels:S2FT",
        summary="whole channels of the down projections, drawn jointly over all layers",
        cost="none; one forward pass over the training examples with score=activation or product",
        memory="8 bytes per selected entry",
        source="S2FT (Yang et al., NeurIPS 2024, arXiv 2412.06289)",
        deviations="channels are indexed in place instead of co-permuted, so the difference from "
        "theta_old is sparse; value heads are key-value heads; our AdamW, schedule and betas; the "
        "formulas of score are ours",
        options=S2FTOptions,
        paper={"d_ratio": 0.03, "u_ratio": 0.0, "o_ratio": 0.0, "v_ratio": 0.0},
        lr_ratio=2.5,
    ),
    _params(
        name="smt",
        target="dualsft.lab.methods.matrices:SMT",
        summary="256 x 256 blocks with the largest gradient summed over a dense warm start",
        cost="`steps` dense fine-tuning steps (100)",
        memory="AdamW state of every parameter during the warm start; one number per block, or one "
        "gradient of the eligible matrices (strategy)",
        source="SMT (He et al., ICLR 2025)",
        deviations="steps are optimizer steps; the dense steps have their own cosine schedule and "
        "the learning rate of plain fine-tuning; blocks at edges can be smaller, and are scored as "
        "full ones; select.param_budget is divided between attention and MLP by their sizes; betas "
        "(0.9, 0.999)",
        options=SMTOptions,
        paper={"steps": 100, "attention_ratio": 0.25, "mlp_ratio": 0.1},
        lr_ratio=2.0,
        trains=True,
    ),
    _params(
        name="lift",
        target="dualsft.lab.methods.magnitudes:LIFT",
        summary="the largest entries of each matrix's rank-r reconstruction, updated regularly",
        cost="a randomized SVD of every matrix at each mask update; no data",
        memory="one matrix in fp32 and its factors; 8 bytes per selected entry",
        source="LIFT (Liu et al., ICML 2025)",
        deviations="the largest entries, as in the paper (the released code takes the smallest "
        "since 2025-07); embeddings and head stay frozen; betas (0.9, 0.999), eps 1e-8; randomized "
        "SVD; quotas proportional to size unless method.lift.lora_rank is set",
        options=LIFTOptions,
        paper={"rank": 64, "lora_rank": 64, "interval": 200, "freeze": "gate,up,down"},
        lr_ratio=2.0,
    ),
    _params(
        name="nanoadam",
        target="dualsft.lab.methods.magnitudes:NanoAdam",
        summary="the smallest weights of every chunk, updated every 600 steps",
        cost="one read of the weights at each mask update; no data",
        memory="one chunk; 8 bytes per selected entry",
        source="NanoAdam (Zhou et al., NeurIPS 2025, arXiv 2506.21374)",
        deviations="chunks of 2^20 entries (the paper gives no size); constant density; parameters "
        "that are not candidates stay frozen; moments follow method.nanoadam.moments",
        options=NanoAdamOptions,
        paper={"interval": 600},
        lr_ratio=1.5,
    ),
    _params(
        name="model_shapley",
        target="dualsft.lab.methods.channels:ModelShapley",
        summary="whole neurons (rows) whose removal would raise the loss most, to second order",
        cost="one backward pass over the training examples",
        memory="the activations of a batch and two numbers per neuron",
        source="Model Shapley (Chu et al., NeurIPS 2025)",
        deviations="path weights of 1 and the sign of the removal expansion (the paper prints a "
        "minus); scored once at theta_old, not during training; rows of the candidates only",
        options=ModelShapleyOptions,
        paper={"ratio": 0.1},
    ),
    _params(
        name="lora",
        target="dualsft.lab.methods.lora:Lora",
        summary="no entries: LoRA adapters on every linear layer, merged after training",
        cost="none",
        memory="the model, master weights and moments of the adapters",
        source="LoRA (Hu et al., ICLR 2022), PEFT implementation",
        deviations="the rank follows from the budget unless it is given (the paper uses r=64); "
        "linear layers of the text decoder only; merging rounds in half precision",
        options=LoraOptions,
        paper={"r": 64, "alpha": 128, "dropout": 0.05},
        lr_ratio=10.0,
        uses_budget=False,
        extra="peft",
    ),
)

# --- weights and after: the loss, and the trained weights ----------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOptions:
    normalize: bool = False
    """Divide the weights by their mean over the training examples; the original does not."""
    tau: Positive | None = None
    """Temperature of exp(-loss / tau); null is the median loss of the training examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StmOptions:
    threshold: Positive = 2.5
    """Perplexity exp(loss) under the base model above which a token is masked."""
    mode: Literal["highest", "lowest", "random"] = "highest"
    """Which tokens are masked: those above the threshold, or, as controls, the same number of
    tokens in the example with the lowest perplexity or at random."""
    keep_ends: bool = True
    """Never mask control tokens (end of text, end of turn), which teach the model to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalrOptions:
    tau: Positive | None = None
    """Temperature of exp(-loss / tau); null is the median sequence loss of the step."""
    window: Literal["step", "past"] = "step"
    """Where tau=null takes the median from: the sequences of the current step (an extra forward
    pass per step), or a moving average over earlier steps."""
    momentum: BelowOne = 0.9
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
    keep: Share = 0.1
    """Share of each tensor's entries that keep their update; the others are reset to the base."""


WEIGHTS = (
    _weights(
        name="flow",
        target="dualsft.lab.methods.token_weights:Flow",
        summary="fixed example weights exp(-loss / median loss) from the base model",
        cost="one forward pass over the training examples",
        memory="one number per example",
        source="Sanyal et al., ICML 2025 (arXiv 2502.02797); from its rule",
        deviations="divides by the response tokens of the optimizer step, not of a micro-batch; an "
        "example whose loss is not finite stops the run instead of getting weight 0",
        options=FlowOptions,
    ),
    _weights(
        name="stm",
        target="dualsft.lab.methods.token_weights:Stm",
        summary="tokens with a perplexity above 2.5 under the base model are masked from the loss",
        cost="one forward pass over the training examples",
        memory="one byte per response token",
        source="Wu et al., NeurIPS 2025 (arXiv 2501.14315); from its rule",
        deviations="control tokens are never masked (keep_ends); a fully masked example or step "
        "has a zero gradient instead of NaN; no separate length limit for scoring; the original "
        "trains DoRA of rank 16 (method.params=lora with r=16, alpha=32, dora=true)",
        options=StmOptions,
    ),
    _weights(
        name="talr",
        target="dualsft.lab.methods.token_weights:Talr",
        summary="token weights max(p^(1/tau), 0.01); tau is the median sequence loss of the step",
        cost="one extra forward pass per step with window=step",
        memory="no extra memory",
        source="Lin et al., ICLR 2026 (arXiv 2509.20758); from its rule, no public code",
        deviations="tau is the median over the whole optimizer step; floor and denominator follow "
        "a third-party implementation, since the paper's are not known",
        options=TalrOptions,
    ),
    _weights(
        name="dft",
        target="dualsft.lab.methods.token_weights:Dft",
        summary="token weights equal to the probability p under the current model",
        cost="none",
        memory="no extra memory",
        source="dynamic fine-tuning (DFT); TALR's rule with tau = 1 and no floor",
        deviations="the denominator is the number of response tokens in the whole optimizer step",
    ),
)

AFTER = (
    Entry(
        name="fapm",
        axis="after",
        target="dualsft.lab.methods.magnitudes:Fapm",
        summary="each tensor keeps the tenth of its updates with the largest "
        "|d| (1 - mean|W| / |W|); the rest are reset to the base",
        cost="a few reads of the weights of both models after training",
        memory="base and trained weights, a chunk of scores",
        source="Huang et al., EMNLP 2025 (arXiv 2509.08255); from its rule",
        deviations="scores in fp32 or fp64 instead of bf16; a base weight of zero gets the lowest "
        "score instead of NaN, ranked first; ties are broken by index; a kept entry has the "
        "trained value itself; tied weights are edited once",
        options=FapmOptions,
    ),
)

ENTRIES = (*DATA, *PARAMS, *WEIGHTS, *AFTER)
