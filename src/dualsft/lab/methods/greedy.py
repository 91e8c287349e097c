"""SPICE and FisherSFT: greedy selection of examples by a log determinant.

Both replace the data selection of Algorithm 1 (lines 10, 11).

**SPICE**. With g_n the gradient of example n at θ̄, sketched to `dim` numbers (`engine/sketch.py`),
and S the examples chosen so far:

    Δ_x        = log(1 + α g_xᵀ (I + α Σ_{s∈S} g_s g_sᵀ)⁻¹ g_x)      what x adds to log det
    conflict_x = max(0, −cos(g_x, mean of g_s over S))
    next       = argmax Δ_x − λ conflict_x

c_n = g_nᵀ V⁻¹ g_n and the inner product with the running sum are stored for every example and
updated after each choice. A choice thus costs one product of the N x dim features with two vectors:
O(b N dim) in total, without approximation. By default every g_n is scaled to unit length first:
otherwise the gain follows the length of g_x, whatever was chosen before. Besides the paper's rule,
the rules of its released code and the objective in the DualSFT paper are available. All of them
depend on the features only.

**FisherSFT**. With the trunk frozen, predicting the next token is a logistic regression on the
features x_t that enter the output head. Its Fisher information is bounded from below by a multiple
of Σ x_t x_tᵀ, so

    f(S) = log det(V₀ + Σ_{i∈S} X_iᵀ X_i),     V₀ = λ I

is maximized greedily, where X_i are the features at the positions that predict the response of
example i. It uses no labels, validation data or gradients, and needs one forward pass. Features are
projected to `dim` numbers by a seeded Gaussian matrix. Of each example only the strongest
directions are kept, as a factor F_i of `rank` rows with F_iᵀ F_i ≈ X_iᵀ X_i. The gain of an
example, log det(I + F_i V⁻¹ F_iᵀ), never increases as S grows, so an old gain is an upper bound:
only the examples with the largest bounds are re-evaluated, and the result equals that of the plain
greedy rule.

Shape letters: N examples, q rows of a factor, r dimension of a projected feature.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example
from dualsft.engine.losses import Positions, last_hidden
from dualsft.engine.sketch import Sketch
from dualsft.errors import ConfigError, RunError
from dualsft.lab.methods.less import Sketcher
from dualsft.lab.methods.per_example import per_example
from dualsft.model.load import is_linear, output_head
from dualsft.runs.method import DataChoice, DataMethod, Job
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype
from dualsft.system.usage import free_memory, give_back

STOP = 0.5  # SPICE's early-stopping variant stops when Δ is at most this share of the first Δ
MEMORY_SHARE = 0.5  # share of the free GPU memory that the features may use
ROWS = 4096  # rows of features converted to a wider dtype at a time
REBUILD = 500  # choices between recomputations of V⁻¹ from V, which limits rounding errors
ON_TOP = 64  # examples re-evaluated at a time
CHUNK = 2048  # examples per chunk when gains are computed

Step = Callable[[int], None]


def on_gpu_if_it_fits(features: Tensor, device: torch.device) -> Tensor:
    """The features on the GPU if they fit, otherwise on the CPU."""
    give_back(device)  # frees the memory of the model that computed the features
    fits = device.type == "cuda" and features.nbytes <= MEMORY_SHARE * free_memory(device)
    return features.to(device) if fits else features


# --- SPICE ---------------------------------------------------------------------------------------


class Spice(DataMethod):
    """Selects b examples by one of the rules, from gradient features at θ̄."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        options = self.options
        features = on_gpu_if_it_fits(self._features(job, pool), job.ctx.device)
        if options.normalize and options.variant != "released_topk":
            features /= torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp_min(1e-30)
        with job.ctx.reporter.track(f"spice: {options.variant}", b, "examples") as progress:
            chosen, facts = self._greedy(job, features, b, progress.advance)
        return DataChoice(chosen, facts | {"spice_variant": options.variant})

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
        label = "gradients of the pool"
        with sketcher.tapped() as taps:

            def compute(batch: Batch) -> Tensor:
                return sketcher.of_batch(taps, batch)

            return per_example(job, model, pool, label, sketch.dim, compute, backward=True)

    def _greedy(
        self, job: Job, rows: Tensor, b: int, step: Step
    ) -> tuple[np.ndarray, dict[str, float | int | str | None]]:
        o = self.options
        if o.variant == "paper":
            chosen, gains = spice_greedy(rows, b, o.alpha, o.conflict, step)
            below = np.flatnonzero(gains <= STOP * gains[0])
            stop = int(below[0]) if len(below) else None
            return chosen, {"log_det": float(gains.sum()), "early_stop_would_be_at": stop}
        if o.variant == "released_topk":
            utility = information(rows, o.alpha)
            step(b)
            return np.argsort(-utility, kind="stable")[:b], {}
        if o.variant == "released_window":
            walk = job.rng("spice/windows").permutation(len(rows))
            return spice_windows(rows, walk, b, o.window, o.alpha, o.conflict, step), {}
        return spice_pairwise(rows, b, o.alpha, o.conflict, step), {}


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


def spice_greedy(
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


def spice_pairwise(
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


def spice_windows(
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


# --- FisherSFT -----------------------------------------------------------------------------------


class FisherSFT(DataMethod):
    """Selects b examples greedily by the log det of their features at θ_old."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        factors, energy = self._factors(job, pool)
        if not float(energy.max()) >= torch.finfo(torch.float32).tiny:
            raise RunError(
                "method.data=fishersft: the features of the pool (the inputs of the output head) "
                f"are all 0: are the weights of {job.ctx.config.model.path} zero? Give another "
                "model.path or method.data, and run again"
            )
        rows = on_gpu_if_it_fits(factors, job.ctx.device)
        kept = float(torch.linalg.vector_norm(rows, dtype=reduction_dtype(rows.device)) ** 2)
        level = self.options.prior * float(energy.mean()) / rows.shape[-1]
        with job.ctx.reporter.track("fishersft: greedy", b, "examples") as progress:
            chosen, gains = lazy_greedy(rows, b, level, progress.advance)
        facts = {
            "log_det_gain": float(gains.sum()),
            "feature_energy_kept": kept / float(energy.sum()),
            "prior": level,
        }
        return DataChoice(chosen, facts)

    def _factors(self, job: Job, pool: list[Example]) -> tuple[Tensor, Tensor]:
        """(F [N, q, r], energy of the features ‖X_i‖² [N]), on the CPU."""
        model = job.ctx.theta_old()
        basis = self._projection(job, model)
        width, rank = basis.shape[1], 1
        if self.options.mode == "token_gram":
            rank = min(self.options.rank, width)

        @torch.no_grad()
        def compute(batch: Batch) -> Tensor:
            found = []
            for x in features(model, batch):
                projected = x @ basis
                if self.options.mode == "pooled":
                    projected = pooled(projected)
                energy = projected.square().sum().view(1)
                found.append(torch.cat([factor(projected, rank).flatten(), energy]))
            return torch.stack(found)

        size = rank * width
        label = "features of the pool"
        rows = per_example(job, model, pool, label, size + 1, compute, backward=False)
        return rows[:, :size].unflatten(1, (rank, width)), rows[:, size]

    def _projection(self, job: Job, model: PreTrainedModel) -> Tensor:
        """A seeded Gaussian matrix [D, r]; the identity if the model is no wider than `dim`."""
        head = output_head(model)
        width, dim = head.in_features, self.options.dim
        dtype = accumulation_dtype(head.weight.dtype)
        if width <= dim:
            return torch.eye(width, dtype=dtype, device=head.weight.device)
        drawn = job.rng("fishersft/projection").standard_normal((width, dim)) / dim**0.5
        return torch.from_numpy(drawn).to(head.weight.device, dtype)


def features(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, ...]:
    """Inputs of the output head at positions that predict the response: [T_i, D] per example."""
    positions = Positions.of(batch)
    hidden = last_hidden(model, batch)[positions.row_M, positions.column_M]
    return hidden.to(accumulation_dtype(hidden.dtype)).split(positions.count_B.tolist())


def pooled(x_Tr: Tensor) -> Tensor:
    """Normalized mean over the tokens: [1, r]."""
    mean = x_Tr.mean(0, keepdim=True)
    return mean / torch.linalg.vector_norm(mean).clamp_min(1e-30)


def factor(x_Tr: Tensor, rank: int) -> Tensor:
    """F [rank, r] where Fᵀ F is the best rank-`rank` approximation of Xᵀ X.

    Exact, and zero-padded, if there are at most `rank` tokens.
    """
    tokens, width = x_Tr.shape
    if tokens <= rank:
        return torch.nn.functional.pad(x_Tr, (0, 0, 0, rank - tokens))
    if tokens <= width:  # decompose the smaller of the two Gram matrices
        vectors = torch.linalg.eigh(x_Tr @ x_Tr.T).eigenvectors
        return vectors[:, -rank:].T @ x_Tr
    values, vectors = torch.linalg.eigh(x_Tr.T @ x_Tr)
    return values[-rank:].clamp_min(0.0).sqrt()[:, None] * vectors[:, -rank:].T


class Information:
    """V = V₀ + Σ F_iᵀ F_i and its inverse, in fp64 where the device supports it."""

    def __init__(self, width: int, level: float, device: torch.device) -> None:
        self.dtype = reduction_dtype(device)
        self.matrix = torch.eye(width, dtype=self.dtype, device=device) * level
        self.inverse = torch.eye(width, dtype=self.dtype, device=device) / level
        self.num_added = 0

    def gains(self, factors_Nqr: Tensor) -> np.ndarray:
        """log det(I + F V⁻¹ Fᵀ) of each factor, computed in chunks."""
        found = []
        for start in range(0, len(factors_Nqr), CHUNK):
            f = factors_Nqr[start : start + CHUNK].to(self.dtype)
            inner = f @ self.inverse @ f.mT
            inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
            diagonal = torch.linalg.cholesky(inner).diagonal(dim1=-2, dim2=-1)
            found.append(2.0 * diagonal.log().sum(-1))
        return torch.cat(found).cpu().numpy().astype(np.float64)

    def add(self, factor_qr: Tensor) -> None:
        """V += Fᵀ F; updates V⁻¹ by Woodbury's identity, or from V every `REBUILD` calls."""
        f = factor_qr.to(self.dtype)
        self.matrix.addmm_(f.T, f)
        self.num_added += 1
        if self.num_added % REBUILD == 0:
            self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(self.matrix))
            return
        moved = f @ self.inverse
        inner = moved @ f.T
        inner.diagonal().add_(1.0)
        self.inverse -= moved.T @ torch.cholesky_solve(moved, torch.linalg.cholesky(inner))


def lazy_greedy(
    factors_Nqr: Tensor, b: int, level: float, step: Step = lambda _: None
) -> tuple[np.ndarray, np.ndarray]:
    """(chosen positions in order, gain of each); the same result as the plain greedy rule.

    Ties go to the first example. `level` is λ of V₀ = λ I.
    """
    information = Information(factors_Nqr.shape[-1], level, factors_Nqr.device)
    upper = information.gains(factors_Nqr)
    evaluated = np.zeros(len(upper), np.int64)  # number of choices made when the gain was computed
    chosen, gains = [], []
    for number in range(b):
        # a current gain that is at least every upper bound is the largest gain
        while evaluated[best := int(upper.argmax())] < number:
            near = np.argpartition(-upper, min(ON_TOP, len(upper)) - 1)[:ON_TOP]
            stale = np.sort(np.append(near[near != best], best))
            stale = stale[(evaluated[stale] < number) & np.isfinite(upper[stale])]
            index = torch.from_numpy(stale).to(factors_Nqr.device)
            upper[stale] = information.gains(factors_Nqr[index])
            evaluated[stale] = number
        chosen.append(best)
        gains.append(float(upper[best]))
        information.add(factors_Nqr[best])
        upper[best] = -np.inf
        step(1)
    return np.array(chosen), np.array(gains)
