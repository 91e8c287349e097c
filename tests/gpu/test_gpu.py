"""On a CUDA device: the same numbers as on the CPU, and bf16 within its measured tolerance.

Run there with `python -m pytest tests/gpu -m gpu`; `make test` leaves these out.
"""

from __future__ import annotations

import json
from pathlib import Path

import oracle_run
import pytest
import torch
from conftest import Runner
from models import ARCHITECTURES, tiny_examples, tiny_model
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualsft.data.examples import Example, collate
from dualsft.engine.losses import example_objective
from dualsft.model.load import install_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float64_run_equals_the_oracle(
    arch: str, make_run: Runner, model_folder, corpus: Path
) -> None:
    options = ("model.device=cuda", "model.dtype=float64", "score.keep=all")
    run = make_run(*options, "score.candidates=all", arch=arch)
    report = oracle_run.check_run(run, model_folder(arch), 1e-5, source=corpus)
    assert report["ok"] and report["mask"] and report["selection"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_run_passes_its_own_checks(arch: str, make_run: Runner, tmp_path: Path) -> None:
    """Self-checks inside the bf16 tolerance; frozen entries keep their bits; G is fp32."""
    options = ("model.device=cuda", "model.dtype=bfloat16", "score.candidates=all")
    run = make_run(*options, arch=arch)
    summary = json.loads((run / "4_scores/summary.json").read_text())
    errors = [row["error"] for row in summary["checks"]["alone"]]
    print(arch, "sum", summary["checks"]["relative_error"], "alone", errors)
    gradient = load_file(run / "3_gradients/grad_sum.safetensors")
    assert all(t.dtype == torch.float32 for t in gradient.values())
    mask = load_file(run / "5_selection/mask.safetensors")
    delta = load_file(run / "6_finetune/delta.safetensors")
    assert all(torch.equal(delta[f"{n}.idx"], i) for n, i in mask.items() if i.numel())
    tuned = load_file(run / "6_finetune/model/model.safetensors")
    for name, index in mask.items():
        values = tuned[name].view(-1)[index]
        assert values.dtype == torch.bfloat16
        if index.numel():
            assert torch.equal(values, delta[f"{name}.val"])


def test_fp32_selection_is_the_cpu_s(make_run: Runner) -> None:
    """One pool, two devices: the same rows and, up to rounding at the border, the same mask."""
    runs = [
        make_run(f"model.device={device}", out=device, until="selection")
        for device in ("cpu", "cuda")
    ]
    chosen = [(r / "5_selection/selected.jsonl").read_bytes() for r in runs]
    assert chosen[0] == chosen[1]
    masks = [load_file(r / "5_selection/mask.safetensors") for r in runs]
    same = sum(int(torch.isin(masks[0][n], masks[1][n]).sum()) for n in masks[0])
    assert same >= sum(i.numel() for i in masks[0].values()) - 4


@pytest.mark.parametrize("arch", ["llama", "qwen3", "llama_tied_bias"])
def test_fp32_attention_of_shared_heads_keeps_no_matrix(arch: str) -> None:
    """With the memory-efficient kernel alone allowed the model runs; its gradients are right."""
    examples = [Example(e.id, e.index, e.input_ids, e.labels) for e in tiny_examples(4)]

    def gradients(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = tiny_model(arch, dtype=dtype).to(device)
        install_attention(torch.device(device))
        batch = collate(examples, 0, "right", torch.device(device))
        kernels = [SDPBackend.EFFICIENT_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
        with sdpa_kernel(kernels):
            example_objective(model, batch)[0].backward()
        named = model.named_parameters()
        return {n: p.grad.double().cpu() for n, p in named if p.grad is not None}

    exact = gradients("cpu", torch.float64)
    for name, grad in gradients("cuda", torch.float32).items():
        size = float(exact[name].abs().max())
        torch.testing.assert_close(grad, exact[name], rtol=1e-3, atol=1e-4 * size)
