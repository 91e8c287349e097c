"""The oracle itself against what it can be checked with: transformers, torch.optim, its own files.

A wrong oracle would make a wrong package pass. Losses and gradients are compared with the model's
own loss and finite differences, the AdamW loops with torch.optim.AdamW, selection with hand-made
ties, and `check_run` with a run folder written by hand and then spoilt, one file at a time.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from models import (
    ARCHITECTURES,
    TinyExample,
    save_tiny_folder,
    tiny_examples,
    tiny_model,
    tiny_tokenizer,
)
from oracle import (
    Vector,
    apply_mask,
    cosine_schedule,
    curvature,
    cwsd_gradient,
    example_gradient,
    example_loss,
    example_scores,
    grad_sum,
    param_scores,
    projection,
    restricted_adamw,
    shapley,
    top_b,
    top_k_signed,
    val_grad,
    warmup,
)
from oracle_run import budget, candidate_names, check_run, read_lines
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)


def all_names(model: Any) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_example_loss_is_the_models_own(arch: str) -> None:
    model = tiny_model(arch)
    for e in tiny_examples(4, seed=1):
        own = model(input_ids=torch.tensor([e.input_ids]), labels=torch.tensor([e.labels])).loss
        assert float(example_loss(model, e.input_ids, e.labels).detach()) == pytest.approx(
            float(own.detach()), rel=1e-5
        )  # transformers computes its loss in float32


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradient_by_finite_differences(arch: str) -> None:
    """In a random direction over all parameters, the padding row left out (it gets no gradient)."""
    model, e = tiny_model(arch), tiny_examples(1, seed=2)[0]
    names = all_names(model)
    gradient = example_gradient(model, e.input_ids, e.labels, names)
    gen = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(g.shape, generator=gen, dtype=g.dtype) for n, g in gradient.items()}
    if arch == "gemma3":
        direction["model.embed_tokens.weight"][0] = 0

    def loss_at(step: float) -> float:
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in shifted.named_parameters():
                parameter.add_(step * direction[name])
            return float(example_loss(shifted, e.input_ids, e.labels))

    slope = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    expected = sum(float((gradient[n] * direction[n]).sum()) for n in names)
    assert slope == pytest.approx(expected, rel=1e-6)


def test_padded_batch_gives_the_same_gradient_sum() -> None:
    """The models are float64 throughout: padding and batching change nothing above 1e-12."""
    for arch in ARCHITECTURES:
        model, pool = tiny_model(arch), tiny_examples(5, seed=3)
        width = max(e.num_tokens for e in pool)
        ids = torch.tensor([e.input_ids + [5] * (width - e.num_tokens) for e in pool])
        seen = torch.tensor([[1] * e.num_tokens + [0] * (width - e.num_tokens) for e in pool])
        logits = model(input_ids=ids, attention_mask=seen).logits.log_softmax(-1)
        loss = torch.zeros((), dtype=torch.float64)
        for row, e in enumerate(pool):
            hits = [logits[row, t - 1, y] for t, y in enumerate(e.labels) if t and y != -100]
            loss = loss - torch.stack(hits).mean()
        batched = torch.autograd.grad(loss, list(model.parameters()))
        alone = grad_sum(model, pool, all_names(model))
        for got, expected in zip(batched, alone.values(), strict=True):
            assert float((got - expected).norm()) <= 1e-12 * float(expected.norm())


def test_cosine_schedule() -> None:
    rates = cosine_schedule(100, 2.0)
    assert rates[:4] == pytest.approx([2 / 3, 4 / 3, 2.0, 2.0])
    assert rates[3 + 97 // 2] == pytest.approx(1 + math.cos(math.pi * (97 // 2) / 97))
    assert 0 < rates[-1] < 1e-3
    assert cosine_schedule(1, 2.0) == [2.0]
    assert len(cosine_schedule(34, 1.0)) == 34 and cosine_schedule(34, 1.0)[0] == 0.5


def torch_training(model: Any, pool: list[TinyExample], rates: list[float], **kwargs: Any) -> Any:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, **kwargs)
    for step, lr in enumerate(rates):
        batch = pool[2 * step : 2 * step + 2]
        losses = [example_loss(model, e.input_ids, e.labels) for e in batch]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return model, optimizer


def test_warmup_is_torch_adamw() -> None:
    model, pool = tiny_model("llama"), tiny_examples(7, seed=4)
    rates = cosine_schedule(4, 1e-2)
    weights, second, steps = warmup(model, pool, rates, 2)
    trained, optimizer = torch_training(model, pool, rates, weight_decay=0.0)
    assert steps == 4
    c = curvature(second, 0.999, steps, 1e-8)
    for name, parameter in trained.named_parameters():
        state = optimizer.state[parameter]
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(second[name], state["exp_avg_sq"], rtol=1e-9, atol=1e-18)
        expected = (state["exp_avg_sq"] / (1 - 0.999 ** int(state["step"]))).sqrt() + 1e-8
        torch.testing.assert_close(c[name], expected, rtol=1e-9, atol=0)


def test_restricted_adamw_touches_only_the_mask() -> None:
    """All ones is torch's AdamW with decay; elsewhere weights and moments do not move at all."""
    model, pool = tiny_model("qwen2"), tiny_examples(6, seed=5)
    rates = [1e-2, 2e-2, 1e-2]
    ones = {n: torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    weights, _, _ = restricted_adamw(model, pool, rates, 2, ones, weight_decay=0.1)
    trained, _ = torch_training(model, pool, rates, weight_decay=0.1)
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-12)

    gen = torch.Generator().manual_seed(0)
    old = dict(model.named_parameters())
    masks = {n: torch.rand(p.shape, generator=gen) < 0.2 for n, p in old.items()}
    free = restricted_adamw(model, pool, rates, 2, masks, weight_decay=0.1)
    clipped = restricted_adamw(model, pool, rates, 2, masks, weight_decay=0.1, max_grad_norm=0.01)
    for name, mask in masks.items():
        for weight, first, second in (
            (free[0][name], free[1][name], free[2][name]),
            (clipped[0][name], clipped[1][name], clipped[2][name]),
        ):
            assert torch.equal(weight[~mask], old[name].detach()[~mask])
            assert bool((first[~mask] == 0).all()) and bool((second[~mask] == 0).all())
            assert bool((weight[mask] != old[name].detach()[mask]).all())
    total = math.sqrt(sum(float(second.sum()) for second in clipped[2].values()))
    assert total == pytest.approx(math.sqrt(0.001 * (1 + 0.999 + 0.999**2)) * 0.01, rel=1e-3)


def test_ties_and_signs() -> None:
    scores = {"b": torch.tensor([[1.0, -5.0], [2.0, 1.0]]), "a": torch.tensor([1.0, -0.0, 0.0])}
    assert {n: i.tolist() for n, i in top_k_signed(scores, 3).items()} == {"b": [0, 2, 3], "a": []}
    assert {n: i.tolist() for n, i in top_k_signed(scores, 5).items()} == {
        "b": [0, 2, 3],
        "a": [0, 1],
    }
    assert top_b([1.0, 3.0, 1.0, -9.0], [8, 2, 5, 1], 2) == [2, 5]
    assert budget(3, 10) == 3 and budget(0.29, 100) == 29 and budget(0.001, 100) == 1


def test_apply_mask_keeps_the_selected_entries() -> None:
    u = {"b": torch.tensor([[1.0, -5.0], [2.0, 3.0]]), "a": torch.tensor([4.0])}
    masked = apply_mask(u, {"b": torch.tensor([1, 2])})
    assert masked["b"].tolist() == [[0, -5], [2, 0]] and masked["a"].tolist() == [0]


def test_shapley_of_games_that_are_not_quadratic() -> None:
    """On quadratic games other averages (Banzhaf's) give the same values; on these they do not."""
    together = shapley(5, lambda s: float({0, 1, 2} <= s))
    assert together.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    gloves = shapley(3, lambda s: float(0 in s and len(s) > 1))
    assert gloves.tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6])


def test_candidates() -> None:
    for arch in ARCHITECTURES:
        names = candidate_names(tiny_model(arch), "block_linear", None)
        assert len(names) == 2 * (4 if arch == "gpt2" else 7)
        assert not any(word in name for name in names for word in ("embed", "wte", "norm", "head"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_saved_folder_loads(tmp_path: Path, arch: str) -> None:
    folder = save_tiny_folder(tmp_path / arch, arch, bos=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = tokenizer("two plus trois é").input_ids
    assert ids == tiny_tokenizer(bos=True)("two plus trois é").input_ids
    assert ids[0] == tokenizer.bos_token_id and max(ids) < model.config.vocab_size
    assert tokenizer.decode(ids, skip_special_tokens=True) == "two plus trois é"
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><user>hi\n<assistant>"


# ---------------------------------------------------------------- check_run


def write_run(root: Path) -> Path:
    """A run folder as docs/run_folder.md lays it out, computed by the oracle and stored in fp32."""
    old = save_tiny_folder(root / "old", "llama", seed=0)
    save_tiny_folder(root / "run/2_warmup/theta_bar", "llama", seed=1)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (old, root / "run/2_warmup/theta_bar")
    )
    rows = tiny_examples(16, vocab=300, seed=9)
    roles = dict(enumerate(["val"] * 3 + ["anchor"] * 3 + ["warm"] * 2 + ["pool"] * 8))
    lines = [json.dumps({"prompt": e.id, "response": str(e.input_ids)}) for e in rows]
    (root / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    run = root / "run"
    for name in ("1_split", "3_gradients", "4_scores", "5_selection"):
        (run / name).mkdir()
    columns: dict[str, list[Any]] = {"id": [e.id for e in rows], "role": list(roles.values())}
    places = pa.table(columns | {"index": [e.index for e in rows]})
    pq.write_table(places, run / "1_split/split.parquet")
    tokens = {"input_ids": [e.input_ids for e in rows], "labels": [e.labels for e in rows]}
    pq.write_table(pa.table(columns | tokens), run / "1_split/tokens.parquet")
    score = {"preservation": "cwsd", "curvature": "adam_rms", "lam": 0.8, "lam_relative": True}
    score |= {"tau": 2.0, "curvature_scale": 1e4, "step": "sgd", "candidates": "block_linear"}
    select = {"variant": "dual", "data_budget": 0.2, "param_budget": 0.1, "rounds": 0}
    config = {"score": score, "select": select, "finetune": {"lr": 1e-2}}
    config["data"] = {"path": str(root / "corpus.jsonl")}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    write_results(
        run,
        teacher,
        student,
        {r: [e for e in rows if roles[e.index] == r] for r in set(roles.values())},
        lines,
    )
    return run


def write_results(
    run: Path, teacher: Any, student: Any, parts: dict[str, list[TinyExample]], lines: list[str]
) -> None:
    names = candidate_names(student, "block_linear", None)
    total, new = grad_sum(student, parts["pool"], names), val_grad(student, parts["val"], names)
    prior = cwsd_gradient(teacher, student, parts["anchor"], 2.0, names)
    c = {name: (tensor.abs() + 1e-3).float().double() for name, tensor in total.items()}
    u = projection(new, prior, total, c, 0.8, True, 1e-2 / 8, 1e4)
    scores = param_scores(u, total)
    by_example = example_scores(student, parts["pool"], u)
    vectors = {"2_warmup/curvature": c, "3_gradients/grad_sum": total, "3_gradients/val_grad": new}
    vectors |= {"3_gradients/prior_grad": prior, "4_scores/params": scores}
    for name, vector in vectors.items():
        save(run / f"{name}.safetensors", {n: t.float() for n, t in vector.items()})
    mask = top_k_signed(scores, sum(t.numel() for t in scores.values()) // 10)
    save(run / "5_selection/mask.safetensors", mask)
    ids = [e.id for e in parts["pool"]]
    loose = [i % 2 == 1 for i in range(len(ids))]
    stored = [
        s + (1e-3 if wide else 0.0) for s, wide in zip(by_example.tolist(), loose, strict=True)
    ]
    table = {"id": ids, "score": stored, "exact": [not w for w in loose], "bound": [2e-3] * 8}
    pq.write_table(pa.table(table), run / "4_scores/examples.parquet")
    chosen = top_b(by_example, [e.index for e in parts["pool"]], 3)
    (run / "5_selection/selected.jsonl").write_text("".join(lines[i] + "\n" for i in chosen))
    u_dot_g = float(sum(t.sum() for t in scores.values()))
    summary = {"u_dot_G": u_dot_g, "n_sc": 8, "eta_sc": 1e-2 / 8}
    (run / "4_scores/summary.json").write_text(json.dumps(summary))


def save(path: Path, vector: Vector) -> None:
    save_file({name: tensor.contiguous() for name, tensor in vector.items()}, path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("oracle"))


def test_check_run_accepts_a_true_run(finished: Path) -> None:
    report = check_run(finished, finished.parent / "old", 1e-6)
    vectors = ("grad_sum", "val_grad", "prior_grad", "param_scores")
    sets = ("mask", "selection")
    others = ("example_scores", "u_dot_G", "n_sc", "eta_sc", "ok")
    expected = {*vectors, *(f"{v}_names" for v in vectors), *sets, *(f"{s}_exact" for s in sets)}
    assert set(report) == expected | set(others)
    assert all(value is True for value in report.values() if isinstance(value, bool)), report
    assert all(v < 1e-6 for v in report.values() if not isinstance(v, bool)), report


def spoil_vector(path: Path) -> None:
    vector = load_file(path)
    name = sorted(vector)[0]
    vector[name].view(-1)[vector[name].abs().argmax()] += 0.01 * float(vector[name].norm())
    save(path, vector)


def spoil_mask(path: Path) -> None:
    mask = load_file(path)
    name = next(n for n in mask if len(mask[n]))
    free = next(i for i in range(10**6) if i not in mask[name].tolist())
    mask[name][0] = free
    save(path, {**mask, name: mask[name].sort().values})


def spoil_scores(path: Path) -> None:
    rows = pq.read_table(path).to_pydict()
    rows["score"][1] += 0.1
    pq.write_table(pa.table(rows), path)


def spoil_selection(path: Path) -> None:
    corpus = read_lines(path.parents[2] / "corpus.jsonl")
    other = next(line for line in corpus[8:] if line not in read_lines(path))
    kept = [*read_lines(path)[:-1], other]
    path.write_text("".join(line + "\n" for line in corpus if line in kept))


def spoil_summary(path: Path) -> None:
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"u_dot_G": 2 * summary["u_dot_G"]}))


@pytest.mark.parametrize(
    ("file", "spoil", "key"),
    [
        ("3_gradients/grad_sum.safetensors", spoil_vector, "grad_sum"),
        ("3_gradients/val_grad.safetensors", spoil_vector, "val_grad"),
        ("3_gradients/prior_grad.safetensors", spoil_vector, "prior_grad"),
        ("4_scores/params.safetensors", spoil_vector, "param_scores"),
        ("2_warmup/curvature.safetensors", spoil_vector, "param_scores"),
        ("4_scores/examples.parquet", spoil_scores, "example_scores"),
        ("4_scores/summary.json", spoil_summary, "u_dot_G"),
        ("5_selection/mask.safetensors", spoil_mask, "mask"),
        ("5_selection/selected.jsonl", spoil_selection, "selection"),
    ],
)
def test_check_run_notices(
    finished: Path, file: str, spoil: Callable[[Path], None], key: str
) -> None:
    path = finished / file
    kept = path.read_bytes()
    try:
        spoil(path)
        report = check_run(finished, finished.parent / "old", 1e-6)
    finally:
        path.write_bytes(kept)
    assert report["ok"] is False
    assert report[key] is False or float(report[key]) > 1e-6
