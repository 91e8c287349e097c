"""SPICE: greedy selection of examples by log-det information, with a penalty on gradient conflict.

Replaces the data selection of Algorithm 1 (lines 10, 11). With g_n the gradient of example n at θ̄,
sketched to `dim` numbers (`engine/sketch.py`), and S the examples chosen so far:

    Δ_x        = log(1 + α g_xᵀ (I + α Σ_{s∈S} g_s g_sᵀ)⁻¹ g_x)      what x adds to log det
    conflict_x = max(0, −cos(g_x, mean of g_s over S))
    next       = argmax Δ_x − λ conflict_x

c_n = g_nᵀ V⁻¹ g_n and the inner product with the running sum are stored for every example and
updated after each choice. A choice thus costs one product of the N x dim features with two vectors:
O(b N dim) in total, without approximation. Besides the paper's rule, the rules of its released code
and the objective in the DualSFT paper are available. All of them depend on the features only.
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

STOP = 0.5  # the paper's early-stopping variant stops when Δ is at most this share of the first Δ
ROOM = 0.5  # share of the free GPU memory that the features may use
ROWS = 4096  # rows of features converted to a wider dtype at a time

Step = Callable[[int], None]


class Spice(DataMethod):
    """Selects b examples by one of the rules, from gradient features at θ̄."""

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
        """The sketched gradients of the pool, on the CPU."""
        ctx = job.ctx
        model = ctx.theta_bar()
        candidates = ctx.candidates(model)
        modules = linear_maps(model, set(candidates.names))
        if not modules:
            raise ConfigError(
                f"score.candidates: {ctx.config.score.candidates!r} has no linear weights, and "
                "spice needs their gradients; use block_linear"
            )
        if others := len(candidates) - len(modules):
            ctx.reporter.say(
                f"spice: ignores {others} of {len(candidates)} candidate tensors, which are not "
                "linear weights of blocks"
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
    """The features on the GPU if they fit, otherwise on the CPU."""
    give_back(device)  # frees the memory of the model that computed the features
    fits = device.type == "cuda" and features.nbytes <= ROOM * free_memory(device)
    return features.to(device) if fits else features


def linear_maps(model: nn.Module, names: set[str]) -> dict[str, nn.Module]:
    """The linear layers whose weights have these names, without the output head, which the engine
    taps separately."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        f"{path}.weight": module
        for path, module in model.named_modules()
        if f"{path}.weight" in names and is_linear(module) and module is not head
    }


def information(rows: Tensor, alpha: float) -> np.ndarray:
    """log(1 + α ‖g‖²): the information of each example by itself."""
    return torch.log1p(alpha * _squares(rows)).cpu().numpy()


def _squares(rows: Tensor) -> Tensor:
    wide = reduction_dtype(rows.device)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide).square()


def _products(rows: Tensor, directions: Tensor) -> Tensor:
    """rows @ directions in the wider dtype of `directions`, in chunks of rows.

    The updates of c_n subtract nearly equal numbers; in fp32 the rounding errors would change which
    examples are chosen.
    """
    parts = [part.to(directions.dtype) @ directions for part in rows.split(ROWS)]
    return torch.cat(parts)


def greedy(
    rows: Tensor, b: int, alpha: float, conflict: float, step: Step = lambda _: None
) -> tuple[np.ndarray, np.ndarray]:
    """The paper's rule: (chosen positions in order, increase of log det at each choice)."""
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
        w = inverse @ g  # Sherman-Morrison: V⁻¹ ← V⁻¹ − scale · w wᵀ
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
    """max_S Σ u_i − μ Σ_{i<j} C_ij, greedily; u_i is the information of i, C_ij the conflict of i
    and j."""
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
    """The windows of the released code: `size` examples of `walk` at a time, with separate state.

    The diagonal information grows by α g⁴, as in the released code, where α g² was intended,
    and therefore hardly grows. Each window keeps its share of b, rounded so that all windows
    together keep b.
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
