"""Registry entries and options of the methods that select parameter entries (docs/methods.md).

`dualsft methods` prints these texts. The module imports neither torch nor the method classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dualsft.config.fields import Count
from dualsft.config.methods import Entry
from dualsft.config.parse import Bounds, Names

Share = Annotated[float, Bounds(least=0, most=1)]
Part = Annotated[float, Bounds(above=0, most=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class S2FTOptions:
    """Options of s2ft."""

    d_ratio: Part | None = None
    """Share of the channels of the down projections; null takes as many as select.param_budget
    allows."""
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
    """Options of smt."""

    steps: Count = 100
    """Dense fine-tuning steps whose gradients are summed."""
    block: Count = 256
    """Rows and columns of a block; blocks at the edges of a matrix can be smaller."""
    strategy: Literal["mean_abs", "abs_mean", "l1", "l2"] = "mean_abs"
    """How a block is scored from the summed gradient: |mean| (mean_abs is the original's name),
    mean of |.|, sum of |.|, or root of the sum of squares. All but the first store a gradient the
    size of the eligible matrices."""
    attention_ratio: Share | None = None
    """Share of the q, k, v blocks to take; null takes none when mlp_ratio is set. When both are
    null, the best blocks of both families are taken up to select.param_budget."""
    mlp_ratio: Share | None = None
    """Share of the gate, up, down blocks to take; null as for attention_ratio."""
    ratio_of: Literal["family", "model"] = "family"
    """What the ratios are relative to: the number of blocks in the family, or, as in the released
    code, the entries of all matrices of the model divided by the entries of a block."""
    restart_from_base: bool = False
    """Fine-tune from theta_old; false keeps the dense steps, as the original does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LIFTOptions:
    """Options of lift."""

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
    """Options of nanoadam."""

    interval: Count = 600
    """Optimizer steps between mask updates."""
    chunk: Count = 1 << 20
    """Entries per chunk of a flattened parameter; each chunk has its own quota."""
    moments: Literal["carry", "reset"] = "carry"
    """Whether entries that stay in the mask at an update keep their Adam moments or start from
    zero; the paper does not specify it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapleyOptions:
    """Options of model_shapley."""

    ratio: Part | None = None
    """Share of the neurons to take; null takes as many as select.param_budget allows."""
    examples: Literal["train", "val"] = "train"
    """Examples whose gradients are used: those that fine-tuning trains on, or D_val."""
    batch_size: Count = 8
    """Examples per mini-batch."""
    decay: Annotated[float, Bounds(least=0, below=1)] = 0.99
    """Decay of the moving average over mini-batches (bias-corrected); 0 uses the last mini-batch
    only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Options of lora."""

    r: Count | None = None
    """Rank of the adapters; null is the largest that select.param_budget allows."""
    alpha: Count | None = None
    """Scale of the adapters: their output is multiplied by alpha / r; null is twice the rank, as in
    the paper."""
    dropout: Annotated[float, Bounds(least=0, below=1)] = 0.05
    """Dropout on the adapters' inputs in training."""
    dora: bool = False
    """Train the magnitude of each row of the adapted weight separately (DoRA)."""
    dtype: Literal["float32", "model"] = "float32"
    """Dtype of the adapter weights when the model is in half precision: float32, or the model's."""


PARAMS: tuple[Entry, ...] = (
    Entry(
        name="s2ft",
        axis="params",
        target="dualsft.lab.methods.s2ft:S2FT",
        summary="whole channels of the down projections, drawn jointly over all layers",
        cost="none; one forward pass over the training examples with score=activation or product",
        memory="8 bytes per selected entry",
        source="S2FT (Yang et al., NeurIPS 2024, arXiv 2412.06289)",
        deviations=(
            "channels are indexed in place instead of co-permuted, so the difference from "
            "theta_old is sparse; value heads are counted as key-value heads; our AdamW, schedule "
            "and betas; the formulas of score=weight, activation, product are ours (L2 norms)"
        ),
        options=S2FTOptions,
        paper={"d_ratio": 0.03, "u_ratio": 0.0, "o_ratio": 0.0, "v_ratio": 0.0},
        lr_ratio=2.5,
    ),
    Entry(
        name="smt",
        axis="params",
        target="dualsft.lab.methods.smt:SMT",
        summary="256 x 256 blocks with the largest gradient summed over a dense warm start",
        cost="`steps` dense fine-tuning steps (100)",
        memory="AdamW state of every parameter during the warm start; one number per block, or one "
        "gradient of the eligible matrices (strategy)",
        source="SMT (He et al., ICLR 2025)",
        deviations=(
            "steps are optimizer steps, not micro-batches; fine-tuning runs all its epochs after "
            "the warm start, which has its own cosine schedule and ignores method.lr_ratio; blocks "
            "at the edges of a matrix can be smaller; with select.param_budget, attention and MLP "
            "blocks compete in one ranking (the paper's ratios, when set, rank each family and are "
            "shares of that family); betas (0.9, 0.999), not (0.9, 0.95)"
        ),
        options=SMTOptions,
        paper={"steps": 100, "attention_ratio": 0.25, "mlp_ratio": 0.1},
        lr_ratio=2.0,
        trains=True,
    ),
    Entry(
        name="lift",
        axis="params",
        target="dualsft.lab.methods.lift:LIFT",
        summary="the largest entries of each matrix's rank-r reconstruction, updated every 200 "
        "steps",
        cost="a randomized SVD of every matrix at each mask update; no data",
        memory="one matrix in fp32 and its factors; 8 bytes per selected entry",
        source="LIFT (Liu et al., ICML 2025)",
        deviations=(
            "takes the largest entries, as the paper describes (the released code takes the "
            "smallest since 2025-07); embeddings and head stay frozen; betas (0.9, 0.999), eps "
            "1e-8, not 1e-6; randomized SVD; the quota of a matrix is proportional to its size, "
            "not to (rows + columns) rank, unless method.lift.lora_rank is set"
        ),
        options=LIFTOptions,
        paper={"rank": 64, "lora_rank": 64, "interval": 200, "freeze": "gate,up,down"},
        lr_ratio=2.0,
    ),
    Entry(
        name="nanoadam",
        axis="params",
        target="dualsft.lab.methods.nanoadam:NanoAdam",
        summary="the smallest weights of every chunk, updated every 600 steps",
        cost="one read of the weights at each mask update; no data",
        memory="one chunk; 8 bytes per selected entry",
        source="NanoAdam (Zhou et al., NeurIPS 2025, arXiv 2506.21374)",
        deviations=(
            "chunks of 2^20 entries (the paper gives no size); constant density, not decreasing "
            "over time; parameters that are not candidates stay frozen; Adam moments at a mask "
            "update follow method.nanoadam.moments"
        ),
        options=NanoAdamOptions,
        paper={"interval": 600},
        lr_ratio=1.5,
    ),
    Entry(
        name="model_shapley",
        axis="params",
        target="dualsft.lab.methods.model_shapley:ModelShapley",
        summary="whole neurons (rows) whose removal would raise the loss most, to second order",
        cost="one backward pass over the training examples",
        memory="the activations of a batch and two numbers per neuron",
        source="Model Shapley (Chu et al., NeurIPS 2025)",
        deviations=(
            "path weights of 1 and the sign of the removal expansion (the paper prints a minus); "
            "scores are computed in one pass at theta_old before training, not during training; "
            "rows of the candidates only; preset=paper is the original's 10 % of the neurons"
        ),
        options=ModelShapleyOptions,
        paper={"ratio": 0.1},
    ),
    Entry(
        name="lora",
        axis="params",
        target="dualsft.lab.methods.lora:Lora",
        summary="no entries: LoRA adapters on every linear layer, of the rank that the budget "
        "allows, merged after training",
        cost="none",
        memory="the model, master weights and moments of the adapters",
        source="LoRA (Hu et al., ICLR 2022), PEFT implementation",
        deviations=(
            "the rank follows from the budget unless it is given (the paper uses r=64, which is "
            "3 % of a 3B model and 14 % of a 135M one); linear layers of the text decoder only, "
            "which is PEFT's all-linear on a text model; "
            "the adapter is saved and then merged, which rounds in half precision"
        ),
        options=LoraOptions,
        paper={"r": 64, "alpha": 128, "dropout": 0.05},
        lr_ratio=10.0,
        uses_budget=False,
        extra="peft",
    ),
)
