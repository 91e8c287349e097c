"""The slow, obvious DualSFT: what the fast code is compared with.

Every line of Algorithm 1 as docs/algorithm.md defines it, in plain PyTorch: one example
at a time, autograd for every gradient, full sorts, brute-force Shapley values. No hooks, no
padding, no batches, and nothing imported from the package. Meant for tiny models in float64.

A `Vector` maps parameter names, as in `model.named_parameters()` (a tied weight appears once), to
tensors. `oracle_run.py` recomputes a finished run folder with these functions.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Vector = dict[str, Tensor]


class ExampleLike(Protocol):
    """What the oracle needs of an example: tokens, and labels that are -100 off the response."""

    @property
    def input_ids(self) -> Sequence[int]: ...
    @property
    def labels(self) -> Sequence[int]: ...


# ---------------------------------------------------------------- gradients of the example loss


def response_positions(labels: Sequence[int]) -> list[int]:
    """Positions t whose logits predict a response token: those with labels[t + 1] != -100."""
    return [t for t in range(len(labels) - 1) if labels[t + 1] != -100]


def response_logits(model: Any, input_ids: Sequence[int], labels: Sequence[int]) -> Tensor:
    """Logits that predict the response tokens of one unpadded example, one row a token."""
    logits = model(input_ids=torch.tensor([input_ids])).logits[0]
    return logits[response_positions(labels)]


def example_loss(model: Any, input_ids: Sequence[int], labels: Sequence[int]) -> Tensor:
    """Mean cross-entropy over the example's own response tokens."""
    targets = torch.tensor([labels[t + 1] for t in response_positions(labels)])
    log_probs = torch.log_softmax(response_logits(model, input_ids, labels), dim=-1)
    return -log_probs[torch.arange(len(targets)), targets].mean()


def gradient_of(loss: Tensor, model: Any, names: Sequence[str]) -> Vector:
    """Gradient of a scalar with respect to the named parameters."""
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, [parameters[name] for name in names])
    return dict(zip(names, grads, strict=True))


def example_gradient(
    model: Any, ids: Sequence[int], labels: Sequence[int], names: Sequence[str]
) -> Vector:
    """g_n: gradient of one example's loss, in eval mode."""
    model.eval()
    return gradient_of(example_loss(model, ids, labels), model, names)


def grad_sum(model: Any, examples: Iterable[ExampleLike], names: Sequence[str]) -> Vector:
    """G: the sum over examples of g_n."""
    return add(example_gradient(model, e.input_ids, e.labels, names) for e in examples)


def val_grad(model: Any, examples: Sequence[ExampleLike], names: Sequence[str]) -> Vector:
    """v_new: gradient of the mean over examples of the example loss."""
    return scale(grad_sum(model, examples, names), 1 / len(examples))


# ---------------------------------------------------------------- vectors


def add(vectors: Iterable[Vector]) -> Vector:
    """Sum of one or more vectors."""
    iterator = iter(vectors)
    total = {name: tensor.clone() for name, tensor in next(iterator).items()}
    for vector in iterator:
        for name, tensor in vector.items():
            total[name] += tensor
    return total


def scale(vector: Vector, factor: float) -> Vector:
    return {name: factor * tensor for name, tensor in vector.items()}


def dot(left: Vector, right: Vector) -> float:
    """Inner product over all the entries of `left`."""
    return float(sum((left[name] * right[name]).sum() for name in left))


def norm(vector: Vector) -> float:
    return math.sqrt(dot(vector, vector))


# ---------------------------------------------------------------- preservation


def cwsd_weight(teacher_logits: Tensor) -> Tensor:
    """omega = 1 - H / log|V|, H the mean over tokens of the entropy at temperature 1."""
    log_q = torch.log_softmax(teacher_logits, dim=-1)
    entropy = -(log_q.exp() * log_q).sum(-1).mean()
    return 1 - entropy / math.log(teacher_logits.shape[-1])


def cwsd_loss(teacher: Any, student: Any, examples: Sequence[ExampleLike], tau: float) -> Tensor:
    """Mean over anchors of omega tau^2 times the mean over response tokens of KL(q || p).

    KL is written sum(q log(q/p) - q + p): the same number, for q and p both sum to one, but its
    terms, and their derivatives by log p, are exactly 0.0 when the two models are equal.
    """
    teacher.eval()
    student.eval()
    terms = []
    for example in examples:
        with torch.no_grad():
            z_old = response_logits(teacher, example.input_ids, example.labels)
            log_q = torch.log_softmax(z_old / tau, dim=-1)
        z = response_logits(student, example.input_ids, example.labels)
        log_p = torch.log_softmax(z / tau, dim=-1)
        kl = (log_q.exp() * (log_q - log_p) - log_q.exp() + log_p.exp()).sum(-1)
        terms.append(cwsd_weight(z_old) * tau**2 * kl.mean())
    return torch.stack(terms).mean()


def cwsd_gradient(
    teacher: Any, student: Any, examples: Sequence[ExampleLike], tau: float, names: Sequence[str]
) -> Vector:
    """v_prior of CWSD: teacher theta_old, student theta_bar, derivative by the student."""
    parts = (gradient_of(cwsd_loss(teacher, student, [e], tau), student, names) for e in examples)
    return scale(add(parts), 1 / len(examples))


def l2_gradient(theta_old_model: Any, theta_bar_model: Any, names: Sequence[str]) -> Vector:
    """v_prior of l2: theta_bar - theta_old."""
    old = dict(theta_old_model.named_parameters())
    bar = dict(theta_bar_model.named_parameters())
    return {name: (bar[name] - old[name]).detach() for name in names}


def fisher_gradient(
    theta_old_model: Any,
    theta_bar_model: Any,
    anchors: Sequence[ExampleLike],
    names: Sequence[str],
) -> Vector:
    """v_prior of fisher: mean over anchors of g_n(theta_old)^2, times (theta_bar - theta_old)."""
    squares = []
    for e in anchors:
        gradient = example_gradient(theta_old_model, e.input_ids, e.labels, names)
        squares.append({name: g**2 for name, g in gradient.items()})
    fisher = scale(add(squares), 1 / len(anchors))
    moved = l2_gradient(theta_old_model, theta_bar_model, names)
    return {name: fisher[name] * moved[name] for name in names}


# ---------------------------------------------------------------- training


def cosine_schedule(total_steps: int, lr: float, warmup_ratio: float = 0.03) -> list[float]:
    """Learning rate of each step: (s+1)/warmup_steps up, then a cosine that is 0 at total_steps."""
    warmup_steps = math.ceil(warmup_ratio * total_steps)
    rates = []
    for s in range(total_steps):
        if s < warmup_steps:
            rates.append(lr * (s + 1) / warmup_steps)
        else:
            progress = (s - warmup_steps) / (total_steps - warmup_steps)
            rates.append(lr * 0.5 * (1 + math.cos(math.pi * progress)))
    return rates


def sparse_adamw_step(
    weight: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    mask: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """New weight and moments after step number `step` (from 1), dense, only where mask is true."""
    exp_avg = betas[0] * moments[0] + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * moments[1] + (1 - betas[1]) * grad**2
    direction = (exp_avg / (1 - betas[0] ** step)) / (
        (exp_avg_sq / (1 - betas[1] ** step)).sqrt() + eps
    )
    moved = weight * (1 - lr * weight_decay) - lr * direction
    zero = torch.zeros_like(weight)
    kept = (torch.where(mask, exp_avg, zero), torch.where(mask, exp_avg_sq, zero))
    return torch.where(mask, moved, weight), kept


def restricted_adamw(
    model: Any,
    examples_in_order: Sequence[ExampleLike],
    lr_schedule: Sequence[float],
    batch_size: int,
    masks: Vector,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    retention: tuple[float, Any, float, Sequence[Sequence[ExampleLike]]] | None = None,
) -> tuple[Vector, Vector, Vector]:
    """AdamW on the entries where masks[name] (bool) is true: weights, first and second moments.

    A step minimises the mean over the batch's examples; the last batch may be shorter. With
    `retention` (weight, teacher, tau, anchors of each step) it adds weight times the CWSD loss of
    that step's anchors. Clipping takes the norm of the sum over the masked entries of all
    parameters. `model` itself is left alone.
    """
    model = copy.deepcopy(model)
    parameters = {name: p for name, p in model.named_parameters() if name in masks}
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in parameters.items()}
    batches = [
        examples_in_order[start : start + batch_size]
        for start in range(0, len(examples_in_order), batch_size)
    ]
    for step, (batch, lr) in enumerate(zip(batches, lr_schedule, strict=True), start=1):
        grads = val_grad(model, batch, list(parameters))
        if retention is not None:
            weight, teacher, tau, anchors = retention
            prior = cwsd_gradient(teacher, model, anchors[step - 1], tau, list(parameters))
            grads = add([grads, scale(prior, weight)])
        grads = {name: grad * masks[name] for name, grad in grads.items()}
        if max_grad_norm is not None:
            grads = scale(grads, min(1.0, max_grad_norm / (norm(grads) + 1e-6)))
        for name, parameter in parameters.items():
            weight, moments[name] = sparse_adamw_step(
                parameter.detach(),
                grads[name],
                moments[name],
                masks[name],
                step,
                lr,
                weight_decay=weight_decay,
            )
            parameter.data.copy_(weight)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, second = ({name: pair[i] for name, pair in moments.items()} for i in (0, 1))
    return weights, first, second


def warmup(
    model: Any,
    examples_in_order: Sequence[ExampleLike],
    lr_schedule: Sequence[float],
    batch_size: int,
) -> tuple[Vector, Vector, int]:
    """theta_bar, second moments r, number of steps: AdamW on all parameters, unclipped."""
    masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    weights, _, second = restricted_adamw(model, examples_in_order, lr_schedule, batch_size, masks)
    return weights, second, len(lr_schedule)


def curvature(second_moment: Vector, beta2: float, steps: int, eps: float) -> Vector:
    """c = sqrt(r / (1 - beta2^t)) + eps."""
    return {name: (r / (1 - beta2**steps)).sqrt() + eps for name, r in second_moment.items()}


# ---------------------------------------------------------------- projection, scores, selection


def projection(
    val_grad: Vector,
    prior_grad: Vector,
    grad_sum: Vector,
    curvature: Vector | None,
    lam: float,
    lam_relative: bool | str,
    eta_sc: float,
    curvature_scale: float = 1.0,
    step: str = "sgd",
) -> Vector:
    """u = eta_sc (v_new + lam v_prior) - eta_sc^2 / 2 * scale * c * G; `adam` divides it by c."""
    if step not in ("sgd", "adam") or (step == "adam" and curvature is None):
        raise ValueError(f"step={step!r}: sgd, or adam with a curvature")
    if lam_relative == "scores":
        divided = curvature if step == "adam" else None
        sizes = [rms_of_scores(v, grad_sum, divided) for v in (val_grad, prior_grad)]
        lam = lam * sizes[0] / sizes[1] if sizes[1] > 0 else 0.0
    elif lam_relative and norm(prior_grad) > 0:
        prior_grad = scale(prior_grad, norm(val_grad) / norm(prior_grad))
    u: Vector = {}
    for name, v_new in val_grad.items():
        u[name] = eta_sc * (v_new + lam * prior_grad[name])
        if curvature is not None:
            second = curvature_scale * curvature[name] * grad_sum[name]
            u[name] = u[name] - eta_sc**2 / 2 * second
            if step == "adam":
                u[name] = u[name] / curvature[name]
    return u


def rms_of_scores(v: Vector, grad_sum: Vector, curvature: Vector | None) -> float:
    """Root of the mean over all entries of (v * G)^2, or of (v * G / c)^2."""
    squares, count = 0.0, 0
    for name, gradient in v.items():
        term = gradient * grad_sum[name]
        term = term if curvature is None else term / curvature[name]
        squares += float((term**2).sum())
        count += term.numel()
    return math.sqrt(squares / count)


def param_scores(u: Vector, grad_sum: Vector) -> Vector:
    """s_theta = u * G, entry by entry."""
    return {name: u[name] * grad_sum[name] for name in u}


def example_scores(model: Any, examples: Iterable[ExampleLike], u: Vector) -> Tensor:
    """s_D,n = <u, g_n>, in the order of the examples."""
    gradients = (example_gradient(model, e.input_ids, e.labels, list(u)) for e in examples)
    return torch.tensor([dot(u, gradient) for gradient in gradients], dtype=torch.float64)


def top_k_signed(scores: Vector, k: int) -> dict[str, Tensor]:
    """Sorted flat indices, per parameter, of the k largest scores; ties: dict order, flat index."""
    flat = torch.cat([tensor.reshape(-1) for tensor in scores.values()])
    assert not flat.isnan().any() and 0 <= k <= len(flat)
    chosen = torch.sort(flat, descending=True, stable=True).indices[:k]
    selected, start = {}, 0
    for name, tensor in scores.items():
        inside = chosen[(chosen >= start) & (chosen < start + tensor.numel())]
        selected[name] = (inside - start).sort().values
        start += tensor.numel()
    return selected


def top_b(scores: Sequence[float] | Tensor, indices: Sequence[int], b: int) -> list[int]:
    """Source rows of the b largest scores, in source order; indices[i] is the row of scores[i]."""
    pairs = [(-float(s), index) for s, index in zip(scores, indices, strict=True)]
    return sorted(index for _, index in sorted(pairs)[:b])


def apply_mask(u: Vector, selected: dict[str, Tensor]) -> Vector:
    """u * m: zero outside the selected flat indices (re-selection P to D scores with this)."""
    masked = {name: torch.zeros_like(tensor) for name, tensor in u.items()}
    for name, indices in selected.items():
        masked[name].view(-1)[indices] = u[name].reshape(-1)[indices]
    return masked


def reselect_params(model: Any, data_subset: Sequence[ExampleLike], u: Vector, k: int) -> Any:
    """D to P: the top k of u * G_S, G_S the gradient sum over the selected examples only."""
    return top_k_signed(param_scores(u, grad_sum(model, data_subset, list(u))), k)


# ---------------------------------------------------------------- Shapley


def shapley(n: int, utility: Callable[[frozenset[int]], float]) -> Tensor:
    """Shapley value of players 0..n-1 by the sum over all coalitions (Eq. shapley_def)."""
    assert n <= 8
    sets = [frozenset(c) for r in range(n + 1) for c in itertools.combinations(range(n), r)]
    value = {coalition: float(utility(coalition)) for coalition in sets}
    phi = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        for s in sets:
            if i not in s:
                weight = math.factorial(len(s)) * math.factorial(n - len(s) - 1)
                phi[i] += weight / math.factorial(n) * (value[s | {i}] - value[s])
    return phi


def unit_rows(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


def calibrated_scores(pool: Tensor, val: Tensor, rho: float) -> Tensor:
    """phi_n^T (F + rho I)^-1 v, from gradients (or sketches) as rows, all at unit length."""
    phi, v = unit_rows(pool), unit_rows(val).mean(0)
    fisher = phi.T @ phi / len(phi)
    return phi @ torch.linalg.inv(fisher + rho * torch.eye(phi.shape[1], dtype=phi.dtype)) @ v


def held_out_scores(pool: Tensor, val: Tensor, rho: float) -> Tensor:
    """The score of each validation row for the others' mean, with its own term added to F."""
    phi, own, found = unit_rows(pool), unit_rows(val), []
    for j, row in enumerate(own):
        fisher = (phi.T @ phi + torch.outer(row, row)) / len(phi)
        others = torch.cat([own[:j], own[j + 1 :]]).mean(0)
        damped = fisher + rho * torch.eye(phi.shape[1], dtype=phi.dtype)
        found.append(row @ torch.linalg.solve(damped, others))
    return torch.stack(found)


def influences(pool: Tensor, queries: Tensor, rho: float) -> Tensor:
    """phi_n^T (F + rho I)^-1 q for every query at unit length: [N, Q]."""
    return torch.stack([calibrated_scores(pool, query[None], rho) for query in queries], dim=1)


def support(pool: Tensor, rho: float) -> Tensor:
    """phi_n^T (F + rho I)^-1 times the sum of the other rows, divided by N: row by row."""
    phi = unit_rows(pool)
    fisher = phi.T @ phi / len(phi)
    inverse = torch.linalg.inv(fisher + rho * torch.eye(phi.shape[1], dtype=phi.dtype))
    others = [torch.cat([phi[:n], phi[n + 1 :]]).sum(0) / len(phi) for n in range(len(phi))]
    return torch.stack([phi[n] @ inverse @ others[n] for n in range(len(phi))])
