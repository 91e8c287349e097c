"""The methods that choose entries, as `dualsft methods` lists them (METHODS.md part A and E4).

Nothing heavy is imported here: names, costs, sources and settings alone.
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
    """Settings of s2ft."""

    d_ratio: Part | None = None
    """Share of the channels of the down projections; null is as many as select.param_budget
    allows."""
    u_ratio: Share = 0.0
    """Share of the rows of the up projections, drawn by themselves."""
    o_ratio: Share = 0.0
    """Share of the heads whose columns of the output projection are trained."""
    v_ratio: Share = 0.0
    """Share of the key-value heads whose rows of the value projection are trained."""
    score: Literal["random", "weight", "activation", "product"] = "random"
    """Order of the channels of the down projections: chance, the norm of their weights, of their
    activations over the training examples (one forward pass), or the product of both."""
    end: Literal["largest", "smallest"] = "largest"
    """Which end of that order is taken; chance has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SMTOptions:
    """Settings of smt."""

    steps: Count = 100
    """Dense fine-tuning steps whose gradients are added up."""
    block: Count = 256
    """Side of a block; blocks at a ragged edge are smaller."""
    strategy: Literal["mean_abs", "abs_mean", "l1", "l2"] = "mean_abs"
    """A block's score from the summed gradient: |mean| (the original's name for it is mean_abs),
    mean of |.|, sum of |.|, or root of the sum of squares. All but the first keep a gradient of the
    eligible matrices' size."""
    attention_ratio: Share | None = None
    """Share of the blocks of q, k, v that is taken; null is none when mlp_ratio is set, and when
    neither is, the best blocks of both families for select.param_budget."""
    mlp_ratio: Share | None = None
    """Share of the blocks of gate, up, down that is taken; null as above."""
    ratio_of: Literal["family", "model"] = "family"
    """What the ratios are of: the family's own blocks, or, as the released code has it, all entries
    of all matrices of the model over the entries of a block."""
    restart_from_base: bool = False
    """Go back to theta_old before fine-tuning; false keeps the dense steps, as the original."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LIFTOptions:
    """Settings of lift."""

    rank: Count = 64
    """Rank of the reconstruction that says which weights are principal."""
    lora_rank: Count | None = None
    """Entries of a matrix: (rows + columns) times this; null shares select.param_budget out by
    size."""
    interval: Count = 200
    """Optimizer steps between two masks."""
    freeze: Annotated[str, Names(("q", "k", "v", "o", "gate", "up", "down"))] | None = None
    """Projections that are left out, comma-separated: any of q, k, v, o, gate, up, down."""
    svd: Literal["lowrank", "exact"] = "lowrank"
    """How the reconstruction is found: a seeded randomised factorisation, or a full one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoAdamOptions:
    """Settings of nanoadam."""

    interval: Count = 600
    """Optimizer steps between two masks."""
    chunk: Count = 1 << 20
    """Entries of a flattened parameter that share one quota."""
    moments: Literal["carry", "reset"] = "carry"
    """What entries that stay in the mask do with their moments when it moves; the paper does not
    say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapleyOptions:
    """Settings of model_shapley."""

    ratio: Part | None = None
    """Share of the neurons that is taken; null is as many as select.param_budget allows."""
    examples: Literal["train", "val"] = "train"
    """Where the gradients are taken: the examples that will be trained on, or D_val."""
    batch_size: Count = 8
    """Examples of a mini-batch."""
    decay: Annotated[float, Bounds(least=0, below=1)] = 0.99
    """Of the moving average over mini-batches (corrected for its start); 0 keeps the last alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Settings of lora."""

    r: Count | None = None
    """Rank of the adapters; null is the largest that select.param_budget allows."""
    alpha: Count | None = None
    """The adapters' product is scaled by alpha / r; null is twice the rank, as in the paper."""
    dropout: Annotated[float, Bounds(least=0, below=1)] = 0.05
    """Share of an adapter's inputs that are dropped in training."""
    dora: bool = False
    """Train the size of each row of the sum beside its direction (DoRA)."""
    dtype: Literal["float32", "model"] = "float32"
    """Type of the adapters' weights beside a half-precision model: float32, or the model's own."""


PARAMS: tuple[Entry, ...] = (
    Entry(
        name="s2ft",
        axis="params",
        target="dualsft.lab.methods.s2ft:S2FT",
        summary="whole channels of the down projections, drawn over all layers together",
        cost="none; one forward pass over the training examples with score=activation or product",
        memory="8 bytes a selected entry",
        source="S2FT (Yang et al., NeurIPS 2024, arXiv 2412.06289); from METHODS.md A1",
        deviations=(
            "indexed in place instead of co-permuted channels, so the difference to theta_old is "
            "sparse; heads of values counted by key-value head; our AdamW, schedule and betas; the "
            "formulas of score=weight, activation, product are ours (L2 norms)"
        ),
        options=S2FTOptions,
        paper={"d_ratio": 0.03, "u_ratio": 0.0, "o_ratio": 0.0, "v_ratio": 0.0},
        lr_ratio=2.5,
    ),
    Entry(
        name="smt",
        axis="params",
        target="dualsft.lab.methods.smt:SMT",
        summary="256 x 256 blocks with the largest summed gradient over a dense warm start",
        cost="`steps` dense fine-tuning steps (100)",
        memory="full AdamW during the warm start; a number a block, or a gradient of all of them",
        source="SMT (He et al., ICLR 2025); from METHODS.md A2",
        deviations=(
            "steps are optimizer steps, not micro-batches; fine-tuning runs its whole epochs after "
            "the warm start, which has a cosine of its own and takes no notice of method.lr_ratio; "
            "ragged edges have smaller blocks; with select.param_budget the blocks of attention "
            "and MLP compete in one ranking (the paper's ratios, when set, rank each family and "
            "are read as shares of it); betas (0.9, 0.999), not (0.9, 0.95)"
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
        summary="the largest entries of each matrix's rank-r reconstruction, anew every 200 steps",
        cost="a randomised factorisation of every matrix at each mask; no data",
        memory="one matrix in fp32 and its factors; 8 bytes a selected entry",
        source="LIFT (Liu et al., ICML 2025); from METHODS.md A3",
        deviations=(
            "takes the largest, as the paper says: the released code has taken the smallest since "
            "2025-07; embeddings and head stay frozen; betas (0.9, 0.999), eps 1e-8, not 1e-6; "
            "randomised SVD; a matrix's quota grows with its size, not with (rows + columns) rank, "
            "unless method.lift.lora_rank is set"
        ),
        options=LIFTOptions,
        paper={"rank": 64, "lora_rank": 64, "interval": 200, "freeze": "gate,up,down"},
        lr_ratio=2.0,
    ),
    Entry(
        name="nanoadam",
        axis="params",
        target="dualsft.lab.methods.nanoadam:NanoAdam",
        summary="the smallest weights of every chunk, anew every 600 steps",
        cost="one reading of the weights at each mask; no data",
        memory="a chunk; 8 bytes a selected entry",
        source="NanoAdam (Zhou et al., NeurIPS 2025, arXiv 2506.21374); from METHODS.md A4",
        deviations=(
            "chunks of 2^20 entries (the paper states no size); no density that falls with time; "
            "what is no candidate stays frozen; moments at a change of mask as option says"
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
        memory="a batch's activations and two numbers a neuron",
        source="Model Shapley (Chu et al., NeurIPS 2025); from METHODS.md E4",
        deviations=(
            "path weights 1 and the sign of the removal expansion (the paper prints a minus); a "
            "pass at theta_old before training instead of along it; rows of the candidates alone; "
            "preset paper is their own 10 % of the neurons"
        ),
        options=ModelShapleyOptions,
        paper={"ratio": 0.1},
    ),
    Entry(
        name="lora",
        axis="params",
        target="dualsft.lab.methods.lora:Lora",
        summary="no entries: adapters beside every linear map, of the rank that the budget allows, "
        "merged after training",
        cost="none",
        memory="the model, master and moments of the adapters",
        source="LoRA (Hu et al., ICLR 2022) as PEFT has it; from METHODS.md A0",
        deviations=(
            "the rank follows the budget unless it is given (the paper has r=64, which is 3 % of a "
            "3B model and 14 % of a 135M one); linear maps of the text decoder alone, which is "
            "PEFT's all-linear on a text model; "
            "the adapter is saved and then merged, which rounds in half precision"
        ),
        options=LoraOptions,
        paper={"r": 64, "alpha": 128, "dropout": 0.05},
        lr_ratio=10.0,
        uses_budget=False,
        extra="peft",
    ),
)
