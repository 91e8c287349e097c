"""What scoring costs: the one-pass run over a pool against one plain training epoch over it.

    python benchmarks/scoring.py [--model smollm2-135m] [--rows 32] [--repeats 2] [--out FILE.json]

Everything is a ratio inside one run. The reference is the plain epoch: Hugging Face forward with
labels and backward into `.grad`, same rows, same length-bucketed batches, at the best of several
batch sizes. Beside it: the one-pass walk (G, s_D and the certificate's sums), the same without the
certificate, both walks of the two-pass mode, v_new and CWSD per example. The pieces are measured in
turn, several times, and the fastest of each counts, so that a busy moment of the machine does not.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dualsft.corpus import skill_rows
from dualsft.data import Example, collate, make_batches
from dualsft.ghost import GhostEngine
from dualsft.model import choose_device, find_candidates, load_model
from dualsft.passes import PassSettings, cwsd_objective, loss_objective, walk
from dualsft.pretrained import resolve_model
from dualsft.progress import Reporter
from dualsft.vectors import ParamVector

BATCH_TOKENS = {"cpu": (128, 256, 512, 1024), "cuda": (2048, 8192, 32768)}  # of the plain epoch
GOAL = 1.4
SHAPES = {  # random weights: vocabulary, hidden, inner, layers, heads, key-value heads
    "tiny": (8192, 256, 768, 6, 8, 4),
    "llama-3.2-1b-shape": (128256, 2048, 8192, 16, 32, 8),
}


def load(name: str, device: torch.device) -> PreTrainedModel:
    """A real model by name or folder, or a Llama shape with random weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name in SHAPES:
        vocabulary, hidden, inner, layers, heads, kv_heads = SHAPES[name]
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=True,
        )
        with torch.device(device):
            return LlamaForCausalLM(config).to(dtype).eval()  # pyright: ignore
    return load_model(resolve_model(name), dtype, device)


def make_pool(rows: int, vocabulary: int) -> list[Example]:
    """Rows with the lengths of instruction data: prompts of 20 to 100, responses of 10 to 90."""
    generator = torch.Generator().manual_seed(0)
    pool = []
    for i, _ in enumerate(skill_rows(0, rows, 0.0)):
        prompt, response = (
            int(torch.randint(low, high, (1,), generator=generator))
            for low, high in ((20, 100), (10, 90))
        )
        ids = torch.randint(0, vocabulary, (prompt + response,), generator=generator).tolist()
        pool.append(Example(f"row-{i}", i, ids, [-100] * prompt + ids[prompt:]))
    return pool


def plain_epoch(model: PreTrainedModel, pool: list[Example], batch_tokens: int) -> None:
    """Forward with labels, backward into .grad: what a training epoch does, less the optimizer."""
    device = next(model.parameters()).device
    model.requires_grad_(True)
    for rows in make_batches(pool, batch_tokens):
        batch = collate([pool[i] for i in rows], 0, "right", device)
        loss = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
        ).loss
        loss.backward()
    model.zero_grad(set_to_none=True)


def pieces(
    model: PreTrainedModel, pool: list[Example], batch_tokens: int
) -> dict[str, Callable[[], object]]:
    """Each thing to time, by name."""
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    settings = PassSettings(batch_tokens=batch_tokens, pad_id=0, padding_side="right")
    quiet = Reporter(lambda _: None)
    sums = ParamVector.zeros(engine.candidates)
    direction = ParamVector({n: torch.randn_like(t) for n, t in sums.items()})
    loss, distil = loss_objective(model), cwsd_objective(model, model, 1.0)

    def step(objective=loss, **what: object) -> Callable[[], object]:  # noqa: ANN001
        return lambda: walk(engine, pool, objective, settings, quiet, "", **what)  # pyright: ignore

    return {
        "one pass: G, s_D, certificate": step(sums=sums, direction=direction, bounds=True),
        "one pass without the certificate": step(sums=sums, direction=direction),
        "two-pass, first: G": step(sums=sums),
        "two-pass, second: s_D": step(direction=direction),
        "CWSD (teacher and student)": step(distil, sums=sums),
    }


def fastest(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of the fastest of several rounds; one unmeasured round first."""
    best = dict.fromkeys(work, float("inf"))
    for number in range(repeats + 1):
        for name, call in work.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-tokens", type=int, default=512, help="of the scoring walks")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = choose_device(options.device)
    model = load(options.model, device)
    pool = make_pool(options.rows, model.config.vocab_size)
    tokens = sum(e.num_tokens for e in pool)
    work: dict[str, Callable[[], object]] = {
        f"plain epoch, {size} tokens a batch": lambda size=size: plain_epoch(model, pool, size)
        for size in BATCH_TOKENS[device.type]
    }
    scoring = pieces(model, pool, options.batch_tokens)
    seconds = fastest(work | scoring, options.repeats)
    plain = min(seconds[name] for name in work)
    ratios = {name: seconds[name] / plain for name in scoring}
    ratios["two-pass, both"] = ratios["two-pass, first: G"] + ratios["two-pass, second: s_D"]
    print(f"{options.model}: {options.rows} rows, {tokens:,} tokens, {device}")
    print(
        f"plain forward + backward epoch (best batch): {plain:.2f} s, {tokens / plain:,.0f} tok/s"
    )
    for name, ratio in ratios.items():
        print(f"{ratio:6.2f} x  {name}   ({1000 * ratio * plain / len(pool):.1f} ms an example)")
    met = ratios["one pass: G, s_D, certificate"] <= GOAL
    print(f"goal: one pass at most {GOAL} x: {'met' if met else 'NOT met'}")
    if options.out:
        record = {
            "model": options.model,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rows": options.rows,
            "tokens": tokens,
            "plain_seconds": plain,
            "seconds": seconds,
            "ratios": ratios,
            "goal": GOAL,
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
