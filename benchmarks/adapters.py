"""Adapter size, load time and survival: a sparse delta as adapters, against LoRA with r=64.

    python -m benchmarks.adapters MODEL_FOLDER OUT.json

A model (in docs/adapters.md SmolLM2-135M) is trained twice for the same steps, on the README: 5 %
of the block weights, drawn at random, and LoRA r=64 (alpha 64) on the same layers. Each adapter is
written to disk and loaded onto the base with `PeftModel.from_pretrained`, in turns; the fastest of
the rounds counts. `survival` is the share of the changed weights (of LoRA: of its layers) that
differ from the base after both are cast to bfloat16. Files are in the page cache.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

import dualsft
from benchmarks.measuring import machine, versions, write
from benchmarks.workload import build_model
from dualsft.integrations.peft import write_adapter
from dualsft.model.delta import compact
from dualsft.model.load import find_candidates

STEPS, TOKENS, LR, ROUNDS = 20, 128, 3e-4, 5


def trained(model: Any, optimizer: Any, tokens: torch.Tensor) -> None:
    for ids in tokens:
        model(input_ids=ids[None], labels=ids[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def survival(base: Any, tuned: Any, names: list[str]) -> float:
    """The share of the entries that training changed which a cast to bfloat16 leaves changed."""
    changed = left = 0
    for name in names:
        old, new = base.get_parameter(name).detach(), tuned.get_parameter(name).detach()
        changed += int((old != new).sum())
        left += int((old.bfloat16() != new.bfloat16()).sum())
    return left / changed


def num_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(map(num_bytes, path.iterdir()))


def main(source: str, out: Path) -> dict[str, Any]:
    base = build_model(source, torch.device("cpu"), torch.float32)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(source)(text, return_tensors="pt").input_ids[0]
    tokens = ids[: STEPS * TOKENS].view(STEPS, TOKENS)
    candidates = find_candidates(base, "block_linear")
    names = list(candidates)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base.save_pretrained(folder / "base")
        draw = torch.Generator().manual_seed(0)
        mask = {
            n: (torch.rand(p.numel(), generator=draw) < 0.05).nonzero().squeeze(-1)
            for n, p in candidates.items()
        }
        tuned = copy.deepcopy(base)
        with dualsft.SparseAdamW(tuned.named_parameters(), mask, lr=LR) as optimizer:
            trained(tuned, optimizer, tokens)
        delta = folder / "delta.safetensors"
        dualsft.extract_delta(base, tuned).save(delta)
        kept = {"sparse": survival(base, tuned, names)}
        del tuned
        for kind in ("sparse", "shira"):
            write_adapter(str(folder / "base"), delta, folder / kind, kind)
        compact(str(folder / "base"), delta, folder / "compact.safetensors")
        modules = sorted({n.rsplit(".", 2)[-2] for n in names})
        lora = LoraConfig(r=64, lora_alpha=64, target_modules=modules, task_type="CAUSAL_LM")
        torch.manual_seed(0)
        model: Any = get_peft_model(copy.deepcopy(base), lora)
        adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        trained(model, adam, tokens)
        for label, dtype in (("lora fp32", torch.float32), ("lora bf16", torch.bfloat16)):
            for n, p in model.named_parameters():
                if "lora_" in n:
                    p.data = p.data.to(dtype)
            model.save_pretrained(str(folder / label))
        fp32 = PeftModel.from_pretrained(copy.deepcopy(base), str(folder / "lora fp32"))
        kept["lora"] = survival(base, fp32.merge_and_unload(), names)
        del model, fp32
        files = {label: folder / label for label in ("sparse", "shira", "lora fp32", "lora bf16")}
        seconds: dict[str, list[float]] = {label: [] for label in files}
        for _ in range(ROUNDS):
            for label, path in files.items():
                fresh = copy.deepcopy(base)
                start = time.perf_counter()
                PeftModel.from_pretrained(fresh, str(path))
                seconds[label].append(time.perf_counter() - start)
        sizes = {
            label: num_bytes(path / "adapter_model.safetensors") for label, path in files.items()
        }
        sizes |= {"delta": num_bytes(delta), "compact": num_bytes(folder / "compact.safetensors")}
    fastest = {label: min(times) for label, times in seconds.items()}
    result = {
        "model": Path(source).name,
        "entries": sum(len(index) for index in mask.values()),
        "steps": STEPS,
        "lr": LR,
        "bytes": sizes,
        "load_seconds": seconds,
        "load_ratio_to_lora_bf16": {k: t / fastest["lora bf16"] for k, t in fastest.items()},
        "survival_bfloat16": kept,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
    }
    write(out, result)
    return result


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2])))
