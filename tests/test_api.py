"""`dualsft.score` and `dualsft.select` in memory, against the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import oracle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Runner
from models import tiny_model, tiny_rows, tiny_tokenizer
from places import place
from safetensors.torch import load_file, save_file

import dualsft
from dualsft.data.examples import Example
from dualsft.errors import CheckError, ConfigError
from dualsft.model.load import find_candidates, load_model
from dualsft.runs.stages.selection import read_mask
from dualsft.runs.stages.split import read_split
from dualsft.storage.manifest import render_manifest, seal
from dualsft.storage.vectors import ParamVector
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter

QUIET = Reporter(lambda _: None)


@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("relative", [False, True])
def test_score_and_select_equal_the_oracle(relative: bool, scale: float) -> None:
    """From an invisible to a dominating second-order term; the mask trains with SparseAdamW."""
    old, bar = tiny_model("qwen3", seed=0).eval(), tiny_model("qwen3", seed=4).eval()
    pool, val, anchors = tiny_rows(40, 1), tiny_rows(6, 2), tiny_rows(7, 3)
    names = [n for n, p in bar.named_parameters() if ".layers." in n and p.ndim == 2]
    generator = torch.Generator().manual_seed(0)
    curvature = {
        n: torch.rand(dict(bar.named_parameters())[n].shape, generator=generator).double()
        for n in names
    }
    scores = dualsft.score(
        bar,
        pool,
        val,
        eta_ft=1e-3,
        anchors=anchors,
        theta_old=old,
        curvature=ParamVector(curvature),
        lam=0.7,
        lam_relative=relative,
        curvature_scale=scale,
        reporter=QUIET,
    )
    true_sum = oracle.grad_sum(bar, pool, names)
    u = oracle.projection(
        oracle.val_grad(bar, val, names),
        oracle.cwsd_gradient(old, bar, anchors, 1.0, names),
        true_sum,
        curvature,
        0.7,
        relative,
        1e-3 / len(pool),
        scale,
    )
    true = np.asarray(oracle.example_scores(bar, pool, u))
    rounding = 1e-10 * np.abs(true).max()
    assert (np.abs(scores.example_scores - true) <= scores.bound + rounding).all()
    everything = np.arange(len(pool))
    assert np.abs(scores.rescore(everything) - true).max() <= rounding
    chosen = dualsft.select(scores, data_budget=9, param_budget=0.05)
    expected = oracle.top_b(torch.tensor(true), list(range(len(pool))), 9)
    assert chosen.data_subset.tolist() == sorted(expected)
    sources = ["ab"[i % 2] for i in everything]
    halves = dualsft.select(scores, data_budget=8, per_source={"b": 0.25}, sources=sources)
    order = sorted(everything, key=lambda i: (-true[i], i))
    best = [i for i in order if i % 2][:2] + [i for i in order if i % 2 == 0][:6]
    assert halves.data_subset.tolist() == sorted(best)
    with pytest.raises(dualsft.ConfigError, match="have none"):
        dualsft.select(scores, data_budget=8, per_source="even")
    k = int(0.05 * sum(g.numel() for g in true_sum.values()))
    mask = oracle.top_k_signed(oracle.param_scores(u, true_sum), k)
    assert all(torch.equal(chosen.param_mask[n], mask[n]) for n in names)
    with dualsft.SparseAdamW(old.named_parameters(), chosen.param_mask, lr=1e-3) as optimizer:
        assert optimizer.num_selected == k


def test_score_wants_both_or_neither_of_teacher_and_anchors() -> None:
    model = tiny_model("llama").eval()
    with pytest.raises(dualsft.ConfigError, match="both theta_old and anchors"):
        dualsft.score(model, tiny_rows(3, 1), tiny_rows(2, 2), eta_ft=1e-3, anchors=tiny_rows(2, 3))
    with pytest.raises(dualsft.ConfigError, match="must not be empty"):
        dualsft.score(model, [], tiny_rows(2, 2), eta_ft=1e-3)


def test_a_copy_that_runs_the_original_s_forward_fails_the_self_check() -> None:
    """Its own weights have no gradient: what the engine finds for them cannot be confirmed."""
    model = tiny_model("llama", torch.float64)
    copy = deepcopy(model)
    copy.forward = model.forward
    rows = tiny_rows(8)
    with pytest.raises(CheckError, match="alone by plain autograd"):
        dualsft.score(copy, rows[:6], rows[6:], eta_ft=1e-3, reporter=QUIET)


def test_apply_and_extract_delta_are_inverse() -> None:
    base, tuned = tiny_model("gpt2", dtype=torch.bfloat16), tiny_model("gpt2", dtype=torch.bfloat16)
    with torch.no_grad():
        tuned.transformer.h[0].attn.c_attn.weight.view(-1)[[3, 17]] += 1
        tuned.transformer.ln_f.bias[5] = -0.0
    delta = dualsft.extract_delta(base, tuned)
    assert delta.num_entries == 3
    dualsft.apply_delta(base, delta)
    for (name, p), (_, q) in zip(base.named_parameters(), tuned.named_parameters(), strict=True):
        assert torch.equal(p.view(torch.int16), q.view(torch.int16)), name


def test_delta_of_another_model_is_refused() -> None:
    llama, gpt2 = tiny_model("llama"), tiny_model("gpt2")
    delta = dualsft.extract_delta(gpt2, tiny_model("gpt2", seed=1))
    with pytest.raises(dualsft.ConfigError, match="which the model does not have"):
        dualsft.apply_delta(llama, delta)
    with pytest.raises(dualsft.ConfigError, match="different parameters"):
        dualsft.extract_delta(llama, gpt2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_api_chooses_what_a_run_chooses(make_run: Runner, dtype: str) -> None:
    """The same examples and the same entries, the certificate's rounding in bf16 included."""
    run = make_run(f"model.dtype={dtype}", "warmup.min_steps=4", until="selection")
    config = dualsft.load(str(run / "config.yaml"))
    roles = read_split(place(run / "1_split"))
    chosen = json.loads((run / "5_selection/summary.json").read_text())
    kind, cpu = getattr(torch, dtype), torch.device("cpu")
    bar = load_model(run / "2_warmup/theta_bar", kind, cpu)
    old = load_model(Path(config.model.path), kind, cpu)
    names = find_candidates(bar, config.score.candidates).names
    assert isinstance(config.finetune.lr, float)
    scores = dualsft.score(
        bar,
        roles["pool"],
        roles["val"],
        eta_ft=config.finetune.lr,
        anchors=roles["anchor"],
        theta_old=old,
        curvature=ParamVector.load(run / "2_warmup/curvature.safetensors", names),
        lam=config.score.lam,
        lam_relative=config.score.lam_relative,
        tau=config.score.tau,
        curvature_scale=config.score.curvature_scale,
        precision=config.score.precision,
        seed=config.seed,
        reporter=QUIET,
    )
    stored = json.loads((run / "4_scores/summary.json").read_text())
    assert (scores.summary["checks"]["rounding_ratio"] > 0) and stored["rounding_ratio"] > 0
    found = dualsft.select(scores, data_budget=chosen["b"], param_budget=chosen["k"])
    ids = json.loads((run / "5_selection/ids.json").read_text())
    assert [roles["pool"][i].id for i in found.data_subset] == ids
    assert found.num_rescored == chosen["rescored"]
    mask = read_mask(run / "5_selection")
    assert found.param_mask.keys() >= mask.keys()
    for name, index in found.param_mask.items():
        assert torch.equal(index, mask.get(name, index[:0])), name
    if dtype == "bfloat16":  # the rounding widens every bound, as it does in the stage
        assert (scores.bound > 0).all()


def test_the_warmup_is_that_of_a_run(make_run: Runner) -> None:
    run = make_run("warmup.min_steps=4", until="warmup")
    config = dualsft.load(str(run / "config.yaml"))
    warm = read_split(place(run / "1_split"))["warm"]
    cpu = torch.device("cpu")
    model = load_model(Path(config.model.path), torch.float32, cpu)
    assert isinstance(config.finetune.lr, float)
    settings = {"lr": config.finetune.lr, "batch_size": 4, "min_steps": 4, "seed": config.seed}
    curvature = dualsft.warmup(model, warm, reporter=QUIET, **settings)
    bar = load_model(run / "2_warmup/theta_bar", torch.float32, cpu)
    for (name, ours), theirs in zip(model.named_parameters(), bar.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=name)
    names = find_candidates(bar, config.score.candidates).names
    stored = ParamVector.load(run / "2_warmup/curvature.safetensors", names)
    for name, block in curvature.items():
        torch.testing.assert_close(block, stored[name], rtol=1e-4, atol=1e-9, msg=name)
    for wrong in ({"lr": 0.0}, {"examples": []}):
        with pytest.raises(ConfigError, match="warmup: "):
            dualsft.warmup(model, **{"examples": warm, "lr": 1e-3, **wrong})


def batched(rows: list[Example]) -> list[dict[str, torch.Tensor]]:
    """Two batches, padded on the left, as a DataLoader gives them."""
    found = []
    for part in (rows[:3], rows[3:]):
        longest = max(e.num_tokens for e in part)
        pad = [longest - e.num_tokens for e in part]
        columns = {
            "input_ids": [[*[0] * n, *e.input_ids] for n, e in zip(pad, part, strict=True)],
            "labels": [[*[-100] * n, *e.labels] for n, e in zip(pad, part, strict=True)],
            "attention_mask": [
                [0] * n + [1] * e.num_tokens for n, e in zip(pad, part, strict=True)
            ],
        }
        found.append({key: torch.tensor(value) for key, value in columns.items()})
    return found


def first_label(example: Example) -> int:
    return next(i for i, label in enumerate(example.labels) if label != -100)


KINDS: dict[str, Callable[[list[Example]], Any]] = {
    "dicts": lambda rows: [{"input_ids": e.input_ids, "labels": e.labels} for e in rows],
    "arrays": lambda rows: [
        {"input_ids": np.array(e.input_ids), "labels": torch.tensor(e.labels)} for e in rows
    ],
    "trl": lambda rows: [
        {"input_ids": e.input_ids, "completion_mask": [int(x != -100) for x in e.labels]}
        for e in rows
    ],
    "pairs": lambda rows: [
        (e.input_ids[: first_label(e)], e.input_ids[first_label(e) :]) for e in rows
    ],
    "dataset": lambda rows: datasets.Dataset.from_list(
        [{"input_ids": e.input_ids, "labels": e.labels} for e in rows]
    ),
    "batches": batched,
    "generator": lambda rows: ({"input_ids": e.input_ids, "labels": e.labels} for e in rows),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_give_the_same_scores(kind: str) -> None:
    model, pool, val = tiny_model("llama"), tiny_rows(9, 1), tiny_rows(4, 2)
    pool = [e for e in pool if e.labels[first_label(e) :] == e.input_ids[first_label(e) :]]
    assert len(pool) > 5
    expected = dualsft.score(model, pool, val, eta_ft=1e-3, reporter=QUIET)
    found = dualsft.score(model, KINDS[kind](pool), KINDS[kind](val), eta_ft=1e-3, reporter=QUIET)
    np.testing.assert_allclose(found.example_scores, expected.example_scores, rtol=1e-9)
    assert [e.key for e in found.pool] == [e.key for e in pool]
    entries = f"{found.grad_sum.num_entries:,}"
    assert repr(found) == f"Scores({len(pool)} examples, literal, {entries} candidate entries)"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1, 2]}], r"pool\[0\] is no tokenized row \('it has no labels'\)"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids and 1 labels"),
        ([{"text": "hello"}], r"pool\[0\] is no tokenized row \('input_ids'\)"),
        (["hello"], "give an Example, a mapping"),
        ([([1.5], [2])], "whole numbers"),
        ({"input_ids": [1], "labels": [1]}, "pool: is one dict; give a sequence"),
    ],
)
def test_rows_of_no_known_kind_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dualsft.score(tiny_model("llama"), rows, tiny_rows(4, 2), eta_ft=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [5, 10**6]}, "outside the model's vocabulary"),
        ({"labels": [-100]}, "2 ids but 1 labels"),
        ({"labels": [-100, -100]}, "only labels of -100"),
    ],
)
def test_examples_of_the_api_are_checked(change: dict[str, Any], message: str) -> None:
    model = tiny_model("llama", torch.float32)
    good = Example("a", 0, [5, 6], [-100, 6])
    bad = Example(**{"id": "b", "index": 1, "input_ids": [5, 6], "labels": [-100, 6]} | change)
    with pytest.raises(dualsft.ConfigError, match=rf"pool\[1\] \(b\) has .*{message}"):
        dualsft.score(model, [good, bad], [good], eta_ft=1e-3)
    with pytest.raises(dualsft.ConfigError, match="eta_ft"):
        dualsft.score(model, [good], [good], eta_ft=-1e-3)


def test_lambda_by_the_parameter_scores() -> None:
    old, bar = tiny_model("qwen3", seed=0).eval(), tiny_model("qwen3", seed=4).eval()
    pool, val, anchors = tiny_rows(20, 1), tiny_rows(6, 2), tiny_rows(7, 3)
    given = {"eta_ft": 1e-3, "anchors": anchors, "theta_old": old, "lam": 0.7, "reporter": QUIET}
    with pytest.raises(ConfigError, match="give form='calibrated'"):
        dualsft.score(bar, pool, val, lam_relative="scores", **given)
    with pytest.raises(ConfigError, match="give True, False or 'scores'"):
        dualsft.score(bar, pool, val, lam_relative="norms", **given)  # pyright: ignore[reportArgumentType]
    scores = dualsft.score(
        bar, pool, val, form="calibrated", sketch_dim=64, lam_relative="scores", **given
    )
    names = list(scores.grad_sum)
    total = oracle.grad_sum(bar, pool, names)
    new, prior = (
        oracle.val_grad(bar, val, names),
        oracle.cwsd_gradient(old, bar, anchors, 1.0, names),
    )
    u = oracle.projection(new, prior, total, None, 0.7, "scores", 1e-3 / len(pool))
    for name in names:
        assert torch.allclose(scores.projection[name] * scores.eta_sc, u[name], rtol=1e-6)


def test_scores_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = tiny_rows(12, 1)
    model = tiny_model("llama", torch.float32)
    scores = dualsft.score(model, pool, tiny_rows(4, 2), eta_ft=1e-3, reporter=QUIET)
    table = scores.to_table()
    assert table.column_names == ["id", "index", "score", "bound", "loss"]
    assert table["id"].to_pylist() == [e.id for e in pool]
    assert (table["score"].to_numpy() == scores.example_scores).all()
    chosen = dualsft.select(scores, data_budget=3)
    tokenizer = tiny_tokenizer()
    frame = scores.to_pandas(chosen, tokenizer)
    assert np.flatnonzero(frame["selected"]).tolist() == sorted(chosen.data_subset)
    for example, response in zip(pool, frame["response"], strict=True):
        assert response == tokenizer.decode([i for i in example.labels if i != -100])
    assert frame["prompt"].str.len().gt(0).any()
    monkeypatch.setattr("dualsft.integrations.scores.find_spec", lambda _: None)
    with pytest.raises(dualsft.ConfigError, match="pandas is not installed; install it, or use"):
        scores.to_pandas()


def differ(a: Any, b: Any) -> bool:
    """Whether two results of `score` differ in a bit that a selection can depend on."""
    arrays = ("example_scores", "bound", "losses", "ties", "val_quantile")
    vectors = ("grad_sum", "val_grad", "prior_grad", "projection")
    return (
        any(not np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
        or any(
            list(getattr(a, name)) != list(getattr(b, name))
            or any(not torch.equal(t, getattr(b, name)[key]) for key, t in getattr(a, name).items())
            for name in vectors
        )
        or (a.eta_sc, a.summary, list(a.pool)) != (b.eta_sc, b.summary, list(b.pool))
        or not torch.equal(*(s.scored.terms.residual(s.grad_sum)[ATTN] for s in (a, b)))
    )


ATTN = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("form", ["literal", "calibrated"])
def test_scores_are_saved_and_loaded(tmp_path: Path, form: Any) -> None:
    """Every bit, and the same selection; u is wrong enough that literal scores need θ̄."""
    pool, old = tiny_rows(40, 1), tiny_model("llama", torch.float32)
    model, literal = deepcopy(old), form == "literal"
    given: dict[str, Any] = {"reporter": QUIET, "form": form, "eta_ft": 3.0, "sketch_dim": 64}
    given["curvature"] = dualsft.warmup(model, tiny_rows(8, 5), lr=1e-3, min_steps=4)
    given |= {} if literal else {"anchors": tiny_rows(4, 3), "theta_old": old}
    scores = dualsft.score(model, pool, tiny_rows(4, 2), **given)
    wanted = dualsft.select(scores, data_budget=10)
    scores.save(tmp_path / "scores")
    with pytest.raises(dualsft.ConfigError, match="exists"):
        scores.save(tmp_path / "scores")
    assert not any(file.suffix in (".pt", ".pkl", ".bin") for file in tmp_path.rglob("*"))
    alone = dualsft.Scores.load(tmp_path / "scores")
    assert not differ(alone, scores) and repr(alone) == repr(scores) and len(repr(scores)) < 80
    if literal:
        assert wanted.num_rescored > 0
        with pytest.raises(dualsft.ConfigError, match=r"give it as Scores.load\(folder, model="):
            dualsft.select(alone, data_budget=10)
    with_model = dualsft.Scores.load(tmp_path / "scores", model)
    for loaded in [with_model] if literal else [with_model, alone]:
        chosen = dualsft.select(loaded, data_budget=10)
        assert chosen.rows == wanted.rows
        assert chosen.param_mask.keys() == wanted.param_mask.keys()
        assert all(torch.equal(m, wanted.param_mask[n]) for n, m in chosen.param_mask.items())
    with pytest.raises(dualsft.ConfigError, match="give the model that was scored"):
        dualsft.Scores.load(tmp_path / "scores", old)
    assert repr(wanted).startswith("Selection(10 examples, ") and len(repr(wanted)) < 80


@pytest.mark.parametrize("name", ["scores.parquet", "vectors.safetensors", "manifest.json"])
def test_damaged_scores_are_refused(tmp_path: Path, name: str) -> None:
    model = tiny_model("llama", torch.float32)
    scores = dualsft.score(model, tiny_rows(8, 1), tiny_rows(4, 2), eta_ft=1e-3, reporter=QUIET)
    scores.save(tmp_path / "scores")
    file = tmp_path / "scores" / name
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (bytes(flipped), content[:-1], None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(dualsft.ConfigError, match=r"score again, or copy the folder again"):
            dualsft.Scores.load(tmp_path / "scores")
        file.write_bytes(content)
    with pytest.raises(dualsft.ConfigError, match=r"manifest.json is missing"):
        dualsft.Scores.load(tmp_path / "nothing")
    stated = json.loads((tmp_path / "scores/manifest.json").read_text())
    stated = {k: v for k, v in stated.items() if k not in ("seal", "terms")}
    (tmp_path / "scores/manifest.json").write_text(render_manifest(stated))
    with pytest.raises(dualsft.ConfigError, match="terms must be an object; save the scores again"):
        dualsft.Scores.load(tmp_path / "scores")


def column(name: str, value: Any, at: int | None = None) -> Callable[..., None]:
    """A change of a column: each value, or the one at a place."""

    def change(columns: dict[str, Any], tensors: Any, stated: Any) -> None:
        columns[name] = (
            [value] * 8
            if at is None
            else [value if i == at else v for i, v in enumerate(columns[name])]
        )

    return change


def vector(kind: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def change(columns: Any, tensors: dict[str, torch.Tensor], stated: Any) -> None:
        tensors[f"{kind}/{ATTN}"] = new(tensors[f"{kind}/{ATTN}"])

    return change


def stated(part: str, name: str, value: Any) -> Callable[..., None]:
    return lambda columns, tensors, manifest: manifest[part].update({name: value})


def without(place: str, name: str) -> Callable[..., None]:
    def change(columns: Any, tensors: Any, manifest: Any) -> None:
        parts = {"columns": columns, "tensors": tensors, "manifest": manifest}
        if place == "names":
            del manifest["theta_bar"]["names"][-1]
        else:
            del parts[place][name]

    return change


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


NAN, LABELS = float("nan"), "scores.parquet: column labels"
RESEALED: dict[str, tuple[Callable[..., None], str]] = {
    "text": (column("score", "x"), "scores.parquet: column score"),
    "null": (column("score", None), "column score"),
    "one null": (column("score", None, 2), "column score .* nulls"),
    "lists": (column("score", [1.0]), "column score"),
    "infinite": (column("score", float("inf"), 3), "column score"),
    "negative bound": (column("bound", -1.0, 0), "column bound must be from 0"),
    "nan bound": (column("bound", NAN, 0), "column bound"),
    "nan loss": (column("loss", NAN, 0), "column loss"),
    "quantile": (column("val_quantile", 1.5), "column val_quantile must be from 0 to 1"),
    "index -5": (column("index", -5, 0), "column index"),
    "index 0.5": (column("index", 0.5), "column index"),
    "index x": (column("index", "x"), "column index"),
    "id": (column("id", 7), "column id"),
    "token": (column("input_ids", [-1, 3], 0), "column input_ids"),
    "label": (column("labels", [-7], 0), LABELS),
    "short labels": (column("labels", [3], 0), f"{LABELS} must be as long"),
    "null labels": (column("labels", [None, 3], 0), f"{LABELS} .* nulls"),
    "no column": (without("columns", "bound"), "column bound must be there once"),
    "integers": (vector("grad_sum", lambda t: t.long()), "grad_sum/"),
    "half": (vector("grad_sum", lambda t: t.half()), "grad_sum/"),
    "bools": (vector("projection", lambda t: t > 0), f"projection/{ATTN} must be of one float"),
    "mixed": (vector("val_grad", lambda t: t.double()), f"val_grad/{ATTN} must be of one float"),
    "length": (vector("val_grad", lambda t: t.view(-1)[1:].clone()), f"val_grad/{ATTN}"),
    "nan": (vector("grad_sum", lambda t: t * NAN), f"grad_sum/{ATTN} must be finite"),
    "no tensor": (without("tensors", f"projection/{ATTN}"), "projection must be over"),
    "names": (without("names", ""), "grad_sum must be over the .* theta_bar.names"),
    "eta": (stated("terms", "eta_ft", 10**400), "manifest.json: terms.eta_ft"),
    "true eta": (stated("terms", "eta_ft", True), "terms.eta_ft"),
    "n_sc": (stated("terms", "n_sc", 9), "terms.n_sc must be the 8 rows"),
    "lam": (stated("terms", "lam_effective", "nan"), "terms.lam_effective"),
    "precision": (stated("theta_bar", "precision", nested(900)), "theta_bar.precision"),
    "norm": (stated("theta_bar", "norm", 0), "theta_bar.norm"),
    "batches": (stated("theta_bar", "batch_tokens", -1), "theta_bar.batch_tokens"),
    "names twice": (stated("theta_bar", "names", ["a", "a"]), "theta_bar.names"),
    "form": (stated("summary", "form", 3), "summary.form"),
    "no summary": (without("manifest", "summary"), "summary must be an object"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores") / "saved"
    model = tiny_model("llama", torch.float32)
    scores = dualsft.score(model, tiny_rows(8, 1), tiny_rows(4, 2), eta_ft=1e-3, reporter=QUIET)
    scores.save(folder)
    return folder


@pytest.mark.parametrize("case", ["nothing", *RESEALED])
def test_resealed_scores_are_validated(tmp_path: Path, saved: Path, case: str) -> None:
    """Wrong content with right hashes; what is written back unchanged is loaded."""
    folder = RunPath(tmp_path)
    columns = pq.read_table(saved / "scores.parquet").to_pydict()
    tensors = load_file(saved / "vectors.safetensors")
    manifest = json.loads((saved / "manifest.json").read_text())
    change, field = RESEALED.get(case, (None, ""))
    if change is not None:
        change(columns, tensors, manifest)
    for name in {"input_ids", "labels"} & columns.keys():
        columns[name] = pa.array(columns[name], pa.list_(pa.int32()))
    pq.write_table(pa.table(columns), tmp_path / "scores.parquet")
    save_file(tensors, tmp_path / "vectors.safetensors")
    seal(folder, {key: v for key, v in manifest.items() if key not in ("seal", "files")})
    if change is None:
        assert not differ(dualsft.Scores.load(tmp_path), dualsft.Scores.load(saved))
        return
    with pytest.raises(ConfigError, match=rf"{field}.*; save the scores again"):
        dualsft.Scores.load(tmp_path)


@pytest.mark.parametrize("files", [None, [], {}, {"scores.parquet": 5}, {"scores.parquet": {}}])
def test_a_manifest_of_scores_without_files_is_refused(
    tmp_path: Path, saved: Path, files: Any
) -> None:
    stated = json.loads((saved / "manifest.json").read_text()) | {"files": files}
    del stated["seal"]
    (tmp_path / "manifest.json").write_text(render_manifest(stated))
    with pytest.raises(ConfigError, match="again"):
        dualsft.Scores.load(tmp_path)


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    model, small = (tiny_model("llama", torch.float32, vocab_size=v) for v in (320, 64))
    rows = [Example(f"{i}", i, [5, 100 + i], [-100, 6]) for i in range(4)]
    dualsft.score(model, rows, rows[:2], eta_ft=1e-3, reporter=QUIET).save(tmp_path / "scores")
    for (_, p), (_, q) in zip(small.named_parameters(), model.named_parameters(), strict=True):
        if p.shape == q.shape:
            p.data.copy_(q.data)
    with pytest.raises(ConfigError, match="outside the model's vocabulary of 64"):
        dualsft.Scores.load(tmp_path / "scores", small)
