"""Check that the tasks on local files give the same scores as lm_eval's own tasks.

    python -m benchmarks.harness_scores DATA_DIR --model smollm2-135m --limit 16 --out FILE.json

A short run evaluates θ_old and θ* on the local tasks. Then lm_eval loads its own tasks by name,
reads the same rows through its own loader (`datasets.load_dataset` is patched to return the local
files), loads both models and evaluates them. The scores must be equal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from dualsft.config import settings
from dualsft.lab.evaluation.tasks import BENCHMARKS, silenced
from dualsft.model.resolve import resolve_model
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter

Row = dict[str, Any]
NAMES = ("piqa", "arc_challenge", "gsm8k", "mmlu")
KEYS = {
    "piqa": "acc,none",
    "arc_challenge": "acc,none",
    "mmlu": "acc,none",
    "gsm8k": "exact_match,strict-match",
}


def read_rows(folder: Path, stem: str) -> list[dict[str, Any]]:
    """The rows of a local file."""
    [path] = sorted(folder.glob(f"{stem}.jsonl*"))
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def hub_form(stem: str, many: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in the format of the hub."""
    if stem != "arc_challenge_test":
        return many
    return [{**row, "choices": {"text": row["choices"], "label": row["labels"]}} for row in many]


@contextmanager
def hub_of(name: str, folder: Path) -> Iterator[None]:
    """Patch `datasets.load_dataset` to return the local rows in the format of the hub."""
    import datasets

    files = {s: hub_form(t, read_rows(folder, t)) for s, t in BENCHMARKS[name].files.items()}

    def load_dataset(path: str, name: str | None = None, **_: Any) -> Any:
        made: dict[Any, Any] = {"train": datasets.Dataset.from_list([])}
        for split, many in files.items():
            own = [row for row in many if "mmlu" not in path or row["subject"] == name]
            made[split] = datasets.Dataset.from_list(own)
        return datasets.DatasetDict(made)

    with mock.patch.object(datasets, "load_dataset", load_dataset):
        yield


def harness_tasks(name: str, folder: Path) -> dict[str, Any]:
    """lm_eval's own tasks of this name, with the paper's number of shots."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    root = Path(str(lm_eval.tasks.__file__)).parent / Path(BENCHMARKS[name].definition).parts[0]
    with silenced(), hub_of(name, folder):
        manager = TaskManager(include_path=str(root), include_defaults=False)
        tasks: dict[str, Any] = dict(manager.load([name])["tasks"])
    for task in tasks.values():
        task.set_config("num_fewshot", BENCHMARKS[name].shots)
        task.set_fewshot_seed(1234)
    return tasks


def harness_scores(
    model: Path, folder: Path, limit: int | None, batch: int, names: Sequence[str] = NAMES
) -> tuple[dict[str, float], list[str]]:
    """Evaluate a model with lm_eval on its own tasks: (scores, answers to GSM8K).

    The scores include `acc_norm` where a task has one; MMLU is averaged over all its items.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    wrapper: Any = HFLM
    scores, texts = {}, []
    with silenced():
        lm = wrapper(pretrained=str(model), device="cpu", batch_size=batch, dtype="float32")
        for name in names:
            tasks = harness_tasks(name, folder)
            found: Any = evaluate(lm, {"tasks": tasks}, limit=limit, bootstrap_iters=0)
            counts = {leaf: found["n-samples"][leaf]["effective"] for leaf in tasks}
            for label, key in ((name, KEYS[name]), (f"{name} acc_norm", "acc_norm,none")):
                shares = [(found["results"][leaf].get(key), n) for leaf, n in counts.items()]
                if all(share is not None for share, _ in shares):
                    scores[label] = sum(share * n for share, n in shares) / sum(counts.values())
            if name == "gsm8k":
                kept = {one["doc_id"]: one["resps"][0][0] for one in found["samples"][name]}
                texts = [kept[i] for i in sorted(kept)]
    return scores, texts


def our_run(
    model: str, folder: Path, limit: int, batch: int, names: Sequence[str], out: Path
) -> Path:
    """A short run with an evaluation on the local tasks."""
    rows = [{"prompt": f"How much is {n} + {n}?", "response": str(2 * n)} for n in range(60)]
    corpus = out / "rows.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"model.path={model}", "model.device=cpu", f"data.path={corpus}"]
    words += ["method.data=random", "method.params=random", "finetune.lr=1e-4"]
    words += [f"evaluation.tasks={','.join(names)}", f"evaluation.data_dir={folder}"]
    words += [f"evaluation.limit_tasks={limit}", f"evaluation.task_batch_size={batch}"]
    return pipeline.run(settings.load(None, words), out / "run", "evaluation", Reporter())


def compared(run: Path, side: str, theirs: dict[str, float], texts: list[str]) -> list[Row]:
    """One row per task: both scores and, for GSM8K, the number of identical answers."""
    tasks = json.loads((run / "7_evaluation/results.json").read_text())["tasks"]
    samples = (run / "7_evaluation/samples.jsonl").read_text().splitlines()
    ours = [one[f"text_{side}"] for one in map(json.loads, samples) if one["task"] == "gsm8k"]
    rows: list[Row] = []
    for name, facts in tasks.items():
        row = {"task": name, "side": side, "items": facts[side]["items"]}
        row |= {"ours": facts[side]["score"], "harness": theirs[name]}
        if name == "gsm8k":
            row["same_texts"] = sum(a == b for a, b in zip(ours, texts, strict=True))
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default=",".join(NAMES))
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    names, rows = given.tasks.split(","), list[Row]()
    with tempfile.TemporaryDirectory() as place:
        sizes = (given.limit, given.batch, names)
        run = our_run(given.model, given.data_dir, *sizes, Path(place))
        models = {"before": resolve_model(given.model), "after": run / "6_finetune/model"}
        for side, model in models.items():
            rows += compared(run, side, *harness_scores(model, given.data_dir, *sizes))
    for row in rows:
        same = f", {row['same_texts']} answers the same" if "same_texts" in row else ""
        words = f"{row['task']:14} {row['side']:7} {row['items']:4} items"
        print(f"{words}  ours {row['ours']:.4f}  harness {row['harness']:.4f}{same}")
    if given.out:
        given.out.write_text(json.dumps({"model": given.model, "rows": rows}, indent=1) + "\n")
    return int(any(abs(row["ours"] - row["harness"]) > 1e-9 for row in rows))


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of the description."""


if __name__ == "__main__":
    sys.exit(main())
