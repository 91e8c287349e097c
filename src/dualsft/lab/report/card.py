"""The model card: the README of the model, of the delta or of the adapter that a run made.

`write_cards` writes model_card.md at the top of the run folder, which covers all that the run made,
and README.md into 6_finetune/model. The card needs the evaluation, which comes after the model is
sealed; the README is therefore no part of the stage: no manifest lists it, no command reads it, and
each report writes it anew from the summaries. `export hub` (`lab/report/hub.py`) makes the card of
what it exports.

The front matter has the keys of the Hugging Face Hub. It names a base model or a dataset only if
the run read it from the hub. Local paths are reduced to their last component, so that a card does
not reveal the author's directories. Not part of Algorithm 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData, try_to_load_from_cache

from dualsft.config.methods import registry
from dualsft.lab.report.facts import Facts, concerns, has_adapter, methods_of
from dualsft.lab.report.html import render
from dualsft.model.resolve import is_hub_id
from dualsft.runs.preflight import FOLDERS
from dualsft.storage.manifest import atomic_write_text
from dualsft.system.paths import RunPath

LOCAL_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:]+[/\\])+([^\s/\\:]+)")
MODEL, DELTA, ADAPTER = "model", "delta", "adapter"
"""What a run makes, and a card can be of."""
LIBRARIES = {MODEL: "transformers", DELTA: "dualsft", ADAPTER: "peft"}


def made_by(facts: Facts) -> list[str]:
    """What the fine-tuning of a run has made."""
    files = facts["manifests"].get("finetune", {}).get("files", {})
    parts = [MODEL] if "finetune" in facts else []
    parts += [DELTA] if "delta.safetensors" in files else []
    return parts + ([ADAPTER] if has_adapter(facts) else [])


def write_cards(run: RunPath, facts: Facts, out: RunPath) -> None:
    """Write model_card.md into `out`, and the README of the model if `out` is the run folder.

    Without a model, remove model_card.md.
    """
    path, model = out / "model_card.md", run / FOLDERS["finetune"] / "model"
    if "finetune" not in facts:
        path.unlink(missing_ok=True)  # an old card describes a model that no longer exists
        return
    atomic_write_text(path, card(facts, made_by(facts), in_run=True))
    if out == run and model.is_dir():
        atomic_write_text(model / "README.md", card(facts, [MODEL]))


def card(
    facts: Facts,
    parts: Sequence[str],
    in_run: bool = False,
    base_model: str | None = None,
    repo: str | None = None,
) -> str:
    """The card of these parts of a run; `base_model` is the hub id of its base, and `repo` that
    under which it will be published."""
    model, results = base_model or base_name(facts), facts.get("evaluation", {})
    found = list(_eval_results(facts))
    hub_id = base_model or (model if _on_hub(model) else None)
    relation = "adapter" if parts[0] == ADAPTER else "finetune"
    data = ModelCardData(
        base_model=hub_id,
        base_model_relation=relation if hub_id else None,
        datasets=_hub_datasets(facts) or None,
        library_name=LIBRARIES[parts[0]],
        pipeline_tag="text-generation",
        tags=["dualsft", "sparse-fine-tuning", "data-selection"],
        metrics=list(dict.fromkeys(r.metric_type for r in found)) or None,
        model_name=f"{_last(model)}-dualsft" if found else None,
        eval_results=found or None,
    )
    limits = [f"{c.title}. {c.found.rstrip('.')}. {c.meaning}" for c in concerns(facts)]
    return render(
        "model_card.md",
        table=table,
        front_matter=data.to_yaml(),
        facts=facts,
        parts=parts,
        in_run=in_run,
        folder=repo or "FOLDER",
        base_folder=hub_id or "BASE_FOLDER",
        results=results,
        model=model,
        corpus=", ".join(_hub_datasets(facts, also_local=True)) or "unknown",
        methods=methods_of(facts),
        entries=registry(),
        limits=[LOCAL_PATH.sub(r"\1", limit) for limit in limits],
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of formatted cells. Escapes pipes and replaces newlines."""
    escapes = str.maketrans({"|": "\\|", "\n": " "})
    first, *rest = [[cell.translate(escapes) for cell in row] for row in (head, *rows)]
    lines = ["| " + " | ".join(first) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rest])


def _eval_results(facts: Facts) -> Iterator[EvalResult]:
    """Results for the model-index, without those on the split that the selection was made for."""
    results = facts.get("evaluation", {})
    for name, task in results.get("tasks", {}).items():
        yield EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=f"{name}, {task['num_fewshot']} shots",
            metric_type=task["metric"],
            metric_value=round(task["after"]["score"], 4),
        )
    for name, file in results.get("files", {}).items():
        for metric in ("loss", "perplexity"):
            if name != "validation":
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=_last(name),
                    dataset_name=_last(name),
                    metric_type=metric,
                    metric_value=round(file["after"][metric], 4),
                )


# --- names for publication ----------------------------------------------------------------------


def _last(path: str) -> str:
    return Path(" ".join(str(path).split())).name or "unknown"


def _on_hub(model: str) -> bool:
    """Whether a name is that of a model of the hub, whose files are in the hub's cache.

    A relative path, as in models/mine, has the same form.
    """
    return is_hub_id(model) and isinstance(try_to_load_from_cache(model, "config.json"), str)


def base_name(facts: Facts) -> str:
    """model.path for publication."""
    given = str(facts["config"].get("model", {}).get("path") or "unknown")
    return given if _on_hub(given) else _last(given)


def _hub_datasets(facts: Facts, also_local: bool = False) -> list[str]:
    """The datasets of the hub that data.path names, and with `also_local` its other files."""
    given = facts["config"].get("data", {}).get("path") or ""
    files = facts.get("split", {}).get("data", {}).get("files", [])
    cached = {Path(str(file)).name for file in files}
    found = []
    for path in given if isinstance(given, list) else str(given).split(","):
        name = str(path).strip()
        start = name.replace("/", "--") + "-"
        if is_hub_id(name) and any(file.startswith(start) for file in cached):
            found.append(name)
        elif also_local and name:
            found.append(name if name.startswith("builtin:") else _last(name))
    return found
