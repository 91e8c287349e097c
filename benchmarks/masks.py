"""Which mask gives the most new skill for the least change of old behaviour?

    python -m benchmarks.masks --data DIR --out DIR [--pools mixed,noisy] [--seeds 0,1]
        [--masks own,random,dense] [--workers 12] [--until SECONDS]

On the cells of `benchmarks.pools`: the rows that `recommended` selects are trained under masks of
the same size, chosen in different ways, each at several rates. Reported per training: the loss of
unseen target rows, and loss and KL to the base on rows of other behaviour. With v = v_new, G and ĉ
of the run (all at its θ̄), the masks are

    own       (v + λ v_prior) G: DualSFT             random    random
    new       v G                                    s2ft      random channels (S²FT)
    adam      v G / ĉ, the gain of an Adam step      lift      LIFT's first mask
    snr       v G / ĉ², gain over noise              agree     random among entries with v G > 0
    cheap     v G / ĉ³, the same by its change of the outputs (a step moves them by about ĉ²)
    matrix    v G, the same share of every matrix    rows      v G, the same share of every row
    rows_snr  v G / ĉ², the same share of every row

`early_X` is X with the gradients after one epoch of warmup, and `X+keep` trains with the retention
term (weight 1, 4 rows of other behaviour per step). `dense` trains all parameters, `lora` adapters
of rank 64. Several workers share the trainings; one JSON file each, so a second call continues.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.pools import MASKS, Cell, Trainer, cells_of, options
from dualsft.lab.methods.lora import linear_names
from dualsft.runs.stages.split import load_examples
from dualsft.train.loop import Hooks, Retention

Vectors = Mapping[str, Tensor]
SHARE = 0.05
EARLY, SHORT = "early_", ("warmup.min_steps=0",)
RATES = {
    "dense": (3e-5, 7e-5, 1.5e-4),
    "lora": (3e-4, 7e-4, 1.5e-3),
    "concentrated": (3e-4, 7e-4, 1.2e-3),
    "spread": (7e-4, 1.4e-3, 2.5e-3),
}
SPREAD = ("random", "s2ft", "lift", "agree", "snr", "cheap", "rows", "rows_snr")


def vectors(run: Path) -> dict[str, Vectors]:
    """The vectors of a finished gradients stage, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = {
        "v": "3_gradients/val_grad",
        "p": "3_gradients/prior_grad",
        "G": "3_gradients/grad_sum",
        "c": "2_warmup/curvature",
    }
    return {
        key: load_file(run / f"{name}.safetensors", device=device) for key, name in files.items()
    }


def scores(kind: str, held: Mapping[str, Vectors], name: str, seed: int, place: int) -> Tensor:
    """The score of every entry of one matrix."""
    v, g, c = held["v"][name].float(), held["G"][name].float(), held["c"][name].float()
    if kind in ("random", "agree"):
        generator = torch.Generator(v.device).manual_seed(1000 * seed + place)
        drawn = torch.rand(v.shape, generator=generator, device=v.device)
        return drawn if kind == "random" else torch.where(v * g > 0, drawn, drawn - 2)
    power = {"adam": 1, "snr": 2, "rows_snr": 2, "cheap": 3}.get(kind, 0)
    return v * g / c**power


def choose(kind: str, held: Mapping[str, Vectors], seed: int) -> dict[str, Tensor]:
    """Sorted flat indices of the best SHARE of the entries."""
    found = {name: scores(kind, held, name, seed, i) for i, name in enumerate(sorted(held["v"]))}
    if kind.startswith("rows"):
        best = {}
        for name, score in found.items():
            k = max(1, round(SHARE * score.shape[1]))
            columns = score.topk(k, dim=1).indices
            lines = torch.arange(len(score), device=score.device)[:, None] * score.shape[1]
            best[name] = (lines + columns).reshape(-1)
    elif kind == "matrix":
        best = {
            name: score.reshape(-1).topk(round(SHARE * score.numel())).indices
            for name, score in found.items()
        }
    else:
        whole = torch.cat([score.reshape(-1) for score in found.values()])
        top = whole.topk(int(SHARE * whole.numel())).indices.sort().values
        best, start = {}, 0
        for name, score in found.items():
            inside = top[(top >= start) & (top < start + score.numel())] - start
            best[name], start = inside, start + score.numel()
    return {name: index.sort().values.cpu() for name, index in best.items() if len(index)}


def prepare(cell: Cell) -> None:
    """Rows of `recommended`, and every mask, as files beside the pool."""
    cell.select("recommended")
    wanted = {mask.partition("+")[0] for mask in cell.args.masks} - {"dense", "lora"}
    early = {mask for mask in wanted if mask.startswith(EARLY)}
    for masks, folder, extra in ((wanted - early, "run", ()), (early, "early", SHORT)):
        missing = [mask for mask in sorted(masks) if not mask_path(cell, mask).is_file()]
        note(f"{cell.name} {cell.seed} selects {' '.join(missing)}")
        cell.run = cell.pool.folder / folder
        if set(missing) - MASKS.keys():
            cell.run_until_selection(extra)
            held = vectors(cell.run)
            for mask in set(missing) - MASKS.keys():
                chosen = choose(mask.removeprefix(EARLY), held, cell.seed)
                torch.save(chosen, mask_path(cell, mask))
        for mask in set(missing) & MASKS.keys():
            cell.mask(mask)
            note(f"{cell.name} {cell.seed} has {mask}")
    cell.run = cell.pool.folder / "run"


def mask_path(cell: Cell, mask: str) -> Path:
    return cell.pool.folder / f"mask_{mask}.pt"


class Work:
    """The trainings of one cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.trainer = cell, Trainer(cell)
        anchors = load_examples(self.trainer.ctx, str(cell.pool.folder / "anchors.jsonl"))[0]
        self.keep = Retention(
            weight=1.0,
            teacher=self.trainer.base,
            tau=self.trainer.ctx.config.score.tau,
            anchors=anchors,
            batch_size=4,
            seed=cell.seed,
        )
        self.rows = cell.found["selected"]["recommended"]["rows"]

    def measure(self, mask: str, lr: float) -> dict[str, float]:
        """Train once; what came out."""
        trainer, (kind, _, keep) = self.trainer, mask.partition("+")
        start = time.perf_counter()
        trainer.restore()
        found: dict[str, float] = {}
        hooks = Hooks(retention=self.keep) if keep else Hooks()
        if kind == "lora":
            found["entries"] = self.fit_lora(lr, hooks)
        else:
            indices = (
                None
                if kind == "dense"
                else torch.load(mask_path(self.cell, kind), weights_only=True)
            )
            trainer.optimize(indices, self.rows, lr, hooks=hooks)
            found["entries"] = sum(map(len, indices.values())) if indices else 0
        found |= trainer.judge()
        return found | {"seconds": round(time.perf_counter() - start, 1)}

    def fit_lora(self, lr: float, hooks: Hooks) -> int:
        import peft

        model, names = self.trainer.model, linear_names(self.trainer.model)
        torch.manual_seed(self.cell.seed)
        settings = peft.LoraConfig(
            r=64, lora_alpha=128, target_modules=names, bias="none", task_type="CAUSAL_LM"
        )
        wrapped = peft.get_peft_model(model, settings)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.trainer.optimize(None, self.rows, lr, hooks=hooks, named=named)
        wrapped.merge_and_unload()  # in place
        model.requires_grad_(True)
        return sum(p.numel() for _, p in named)


def rates_of(mask: str) -> tuple[float, ...]:
    kind = mask.partition("+")[0].removeprefix(EARLY)
    spread = "spread" if kind in SPREAD else "concentrated"
    return RATES.get(kind) or RATES[spread]


def ready(cell: Cell) -> Path:
    """Exists once the rows and the masks of a cell are there."""
    return cell.pool.folder / "ready"


def prepare_cell(args: argparse.Namespace, number: int) -> None:
    for i, cell in enumerate(cells_of(args)):
        if i == number:
            ready(cell).unlink(missing_ok=True)
            prepare(cell)
            ready(cell).touch()
            note(f"{cell.name} {cell.seed} is ready")


def work(args: argparse.Namespace, number: int, stop: float) -> None:
    """Trainings that no other worker has begun, cell by cell, starting with this worker's."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.9 / args.workers)
    cells = list(cells_of(args))
    start = number % len(cells)
    for cell in cells[start:] + cells[:start]:
        held: Work | None = None
        for mask, lr in [(name, lr) for name in args.masks for lr in rates_of(name)]:
            while not ready(cell).exists() and time.time() < stop:
                time.sleep(0.5)
            path = args.out / f"{cell.name}_{cell.seed}_{mask}_{lr:g}.json"
            if time.time() > stop or path.exists():
                continue
            try:
                os.close(os.open(path.with_suffix(".begun"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            cell.found = json.loads(cell.path.read_text())
            held = held or Work(cell)
            facts: dict[str, Any] = {"pool": cell.name, "seed": cell.seed, "mask": mask}
            facts |= {"lr": lr, "model": args.model} | held.measure(mask, lr)
            path.write_text(json.dumps(facts))
            path.with_suffix(".begun").unlink()
            note(f"{path.stem}: {facts['test']:.4f} in {facts['seconds']} s")


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def guarded(task: Any, *arguments: Any) -> None:
    try:
        task(*arguments)
    except Exception:
        traceback.print_exc()
        raise


def main() -> None:
    parser = options("masks", __doc__)
    parser.add_argument("--masks", default="own,random,dense")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which none begins")
    args = parser.parse_args()
    args.masks, stop = args.masks.split(","), time.time() + args.until
    args.work = args.work or args.out / "work"
    num_cells = len(args.pools.split(",")) * len(args.seeds.split(","))
    spawn = multiprocessing.get_context("spawn")
    for old in args.out.glob("*.begun"):
        old.unlink()
    processes = [
        spawn.Process(target=guarded, args=(task, args, i, *extra), daemon=True)
        for task, count, extra in ((prepare_cell, num_cells, ()), (work, args.workers, (stop,)))
        for i in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes], flush=True)


if __name__ == "__main__":
    main()
