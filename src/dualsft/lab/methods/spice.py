"""SPICE: examples that add information and do not pull against each other (METHODS.md B3).

With g_n an example's gradient at θ̄, sketched to `dim` numbers (`engine/sketch.py`), and S what is
chosen:

    Δ_x        = log(1 + α g_xᵀ (I + α Σ_{s∈S} g_s g_sᵀ)⁻¹ g_x)      what x adds to log det
    conflict_x = max(0, −cos(g_x, mean of g_s over S))
    next       = argmax Δ_x − λ conflict_x

c_n = g_nᵀ V⁻¹ g_n is kept for every example and follows each choice by a rank-1 update, and so does
the inner product with the running sum, so a choice is one product of the N x dim features with two
vectors: O(b N dim) in all, exactly. Beside the paper's rule there are those of its released code
and the objective that the DualSFT paper writes down. Each is a function of the features alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from dualsft.data.examples import Example
from dualsft.engine.sketch import Sketch, Sketcher
from dualsft.errors import ConfigError
from dualsft.lab.methods.per_example import per_example
from dualsft.model.load import is_linear
from dualsft.runs.method import DataChoice, DataMethod, Job
from dualsft.storage.vectors import reduction_dtype
from dualsft.system.progress import Progress
from dualsft.system.usage import free_memory, give_back

STOP = 0.5  # where the paper's early-stopping variant would end: Δ at most this share of the first
ROOM = 0.5  # share of a GPU's free memory that the features may take
ROWS = 4096  # features brought to a wider dtype at a time

Step = Callable[[int], None]


class Spice(DataMethod):
    """b examples by one of the rules, from features at θ̄."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        options = self.options
        features = placed(self._features(job, pool), job.ctx.device)
        if options.normalize:
            features /= torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp_min(1e-30)
        with job.ctx.reporter.track(f"spice: {options.variant}", b, "examples") as progress:
            chosen, facts = self._greedy(job, features, b, progress)
        facts |= {"spice_variant": options.variant}
        return DataChoice(chosen, facts)

    def _features(self, job: Job, pool: list[Example]) -> Tensor:
        """The sketched gradients of the pool, in the host's memory."""
        ctx = job.ctx
        model = ctx.theta_bar()
        candidates = ctx.candidates(model)
        modules = linear_maps(model, set(candidates.names))
        if not modules:
            raise ConfigError(
                f"score.candidates: {ctx.config.score.candidates!r} has no linear weight, whose "
                "gradients spice compares; use block_linear"
            )
        if others := len(candidates) - len(modules):
            ctx.reporter.say(
                f"spice: {others} of {len(candidates)} candidate tensors are no linear weights of "
                "blocks and take no part"
            )
        sketch = Sketch(self.options.dim, ctx.config.seed, "spice")
        sketcher = Sketcher(model, modules, sketch, ctx.config.score.checkpointing)
        with sketcher.tapped() as taps:
            return per_example(
                job,
                model,
                pool,
                "gradients of the pool",
                sketch.dim,
                lambda batch: sketcher.of_batch(taps, batch),
                backward=True,
            )

    def _greedy(
        self, job: Job, rows: Tensor, b: int, progress: Progress
    ) -> tuple[np.ndarray, dict[str, float | int | None]]:
        o, step = self.options, progress.advance
        if o.variant == "paper":
            chosen, gains = greedy(rows, b, o.alpha, o.conflict, step)
            below = np.flatnonzero(gains <= STOP * gains[0])
            stop = int(below[0]) if len(below) else None
            return chosen, {"log_det": float(gains.sum()), "early_stop_would_be_at": stop}
        if o.variant == "released_topk":
            utility = information(rows, o.alpha)
            step(b)
            return np.argsort(-utility, kind="stable")[:b], {}
        if o.variant == "released_window":
            walk = job.rng("spice/windows").permutation(len(rows))
            return windows(rows, walk, b, o.window, o.alpha, o.conflict, step), {}
        return pairwise(rows, b, o.alpha, o.conflict, step), {}


def placed(features: Tensor, device: torch.device) -> Tensor:
    """Features where a greedy rule reads them: on the GPU when they fit, otherwise on the host."""
    give_back(device)  # the model that made them
    fits = device.type == "cuda" and features.nbytes <= ROOM * free_memory(device)
    return features.to(device) if fits else features


def linear_maps(model: nn.Module, names: set[str]) -> dict[str, nn.Module]:
    """The linear maps whose weights have these names; the output head, tapped elsewhere, not."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        f"{path}.weight": module
        for path, module in model.named_modules()
        if f"{path}.weight" in names and is_linear(module) and module is not head
    }


def information(rows: Tensor, alpha: float) -> np.ndarray:
    """log(1 + α ‖g‖²): what each example would add alone."""
    return torch.log1p(alpha * _squares(rows)).cpu().numpy()


def _squares(rows: Tensor) -> Tensor:
    wide = reduction_dtype(rows.device)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide).square()


def _products(rows: Tensor, directions: Tensor) -> Tensor:
    """rows @ directions in the directions' wider dtype, some rows at a time.

    The updates cancel: in fp32 they would choose other examples than the rule does.
    """
    parts = [part.to(directions.dtype) @ directions for part in rows.split(ROWS)]
    return torch.cat(parts)


def greedy(
    rows: Tensor, b: int, alpha: float, conflict: float, step: Step = lambda _: None
) -> tuple[np.ndarray, np.ndarray]:
    """The paper's rule: (positions in the order they were chosen, what each added to log det)."""
    wide, dim = reduction_dtype(rows.device), rows.shape[1]
    squares = _squares(rows)
    norms = squares.sqrt().clamp_min(1e-300 if wide == torch.float64 else 1e-30)
    energy = squares.clone()  # c_n = g_nᵀ V⁻¹ g_n
    inverse = torch.eye(dim, dtype=wide, device=rows.device)
    total = torch.zeros(dim, dtype=wide, device=rows.device)
    along = torch.zeros_like(squares)  # ⟨g_n, Σ g_s⟩
    taken = torch.zeros_like(squares, dtype=torch.bool)
    chosen, gains = [], []
    for _ in range(b):
        gain = torch.log1p(alpha * energy.clamp_min(0.0))
        length = torch.linalg.vector_norm(total)
        cosine = along / (norms * length) if float(length) > 0 else torch.zeros_like(along)
        value = gain - conflict * (-cosine).clamp_min(0.0)
        x = int(value.masked_fill(taken, -torch.inf).argmax())
        chosen.append(x)
        gains.append(float(gain[x]))
        taken[x] = True
        g = rows[x].to(wide)
        w = inverse @ g
        scale = alpha / (1.0 + alpha * float(g @ w))
        inverse.addr_(w, w, alpha=-scale)
        moved = _products(rows, torch.stack([w, g], dim=1))
        energy -= scale * moved[:, 0].square()
        along += moved[:, 1]
        total += g
        step(1)
    return np.array(chosen), np.array(gains)


def pairwise(
    rows: Tensor, b: int, alpha: float, conflict: float, step: Step = lambda _: None
) -> np.ndarray:
    """max_S Σ u_i − μ Σ_{i<j} C_ij, greedily: u_i the information alone, C_ij a pair's conflict."""
    wide = reduction_dtype(rows.device)
    squares = _squares(rows)
    utility = torch.log1p(alpha * squares)
    lengths = squares.sqrt().clamp_min(1e-30)
    value = utility.clone()
    chosen = []
    for _ in range(b):
        x = int(value.argmax())
        chosen.append(x)
        along = _products(rows, rows[x].to(wide)[:, None])[:, 0] / (lengths * lengths[x])
        value -= conflict * (-along).clamp_min(0.0)
        value[x] = -torch.inf
        step(1)
    return np.array(chosen)


def windows(
    rows: Tensor,
    walk: np.ndarray,
    b: int,
    size: int,
    alpha: float,
    conflict: float,
    step: Step = lambda _: None,
) -> np.ndarray:
    """The released code's windows: in this order, so many at a time, each with a state of its own.

    Its diagonal information grows by α g⁴, as released, where α g² was meant; so it hardly grows.
    A window keeps its share of b, rounded so that all windows together keep b.
    """
    wide = reduction_dtype(rows.device)
    chosen: list[int] = []
    for start in range(0, len(walk), size):
        window = walk[start : start + size]
        quota = (start + len(window)) * b // len(walk) - len(chosen)
        g = rows[torch.from_numpy(window).to(rows.device)].to(wide)
        norms = torch.linalg.vector_norm(g, dim=1).clamp_min(1e-30)
        diagonal, total = torch.ones_like(g[0]), torch.zeros_like(g[0])
        taken = torch.zeros(len(g), dtype=torch.bool, device=g.device)
        for _ in range(quota):
            gain = torch.log1p(alpha * (g.square() / diagonal).sum(1))
            length = torch.linalg.vector_norm(total).clamp_min(1e-30)
            value = gain - conflict * (-(g @ total) / (norms * length)).clamp_min(0.0)
            x = int(value.masked_fill(taken, -torch.inf).argmax())
            taken[x] = True
            chosen.append(int(window[x]))
            diagonal += alpha * g[x].square().square()
            total += g[x]
            step(1)
    return np.array(chosen)
