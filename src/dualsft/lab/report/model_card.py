"""model_card.md: what a stranger needs to know before using a run's model or delta.

A README in the form that model hubs read: front matter (base model, tags, metrics), then data,
method, budgets, results, cost, limits, and how to load the merged folder or the delta. Written
from the summaries of a run and its config.yaml; names of local files and folders stand without
their paths. It goes beside `6_finetune/model` or `delta.safetensors` when they are uploaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dualsft.config.methods import registry
from dualsft.lab.report.parts import LOSS_NOTE, duration, methods_of, number, peak_gib, percent
from dualsft.lab.report.warnings import concerns
from dualsft.storage.manifest import atomic_write_text
from dualsft.system.paths import RunPath

LOCAL_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:]+[/\\])+([^\s/\\:]+)")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def write_card(facts: Mapping[str, Any], out: RunPath) -> RunPath | None:
    """Write model_card.md into `out`; None, and no card, while there is no fine-tuned model."""
    path = out / "model_card.md"
    if "finetune" not in facts:
        path.unlink(missing_ok=True)  # of a model that is no longer there
        return None
    config = facts["config"]
    parts = [
        _front_matter(config, facts),
        f"# {shown_name(config, 'model')} fine-tuned with DualSFT",
        _what(config, facts),
        _how_to_load(config, facts),
        _data(config, facts),
        _method(facts),
        _results(facts),
        _training(config, facts),
        _limits(facts),
    ]
    atomic_write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def shown_name(config: Mapping[str, Any], part: str) -> str:
    """model.path or data.path as others may see it: a hub id or a short name whole, of a local
    path its last name."""
    given = config.get(part, {}).get("path")
    if not given:
        return "unknown"
    names = []
    for path in given if isinstance(given, list) else str(given).split(","):
        path = str(path).strip()
        local = Path(path).exists() or not HUB_ID.fullmatch(path)
        names.append(Path(path).name if local and not path.startswith("builtin:") else path)
    return ", ".join(names)


def _front_matter(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    head: dict[str, Any] = {
        "base_model": shown_name(config, "model"),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dualsft", "sparse-fine-tuning", "data-selection"],
    }
    results = facts.get("evaluation", {})
    metrics = [task["metric"] for task in results.get("tasks", {}).values()]
    if results:
        head["metrics"] = list(dict.fromkeys([*metrics, "perplexity"]))
    body = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    return f"---\n{body}---"


def _what(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    tuned, chosen = facts["finetune"], facts.get("selection", {})
    on = f"{tuned['examples']:,} examples"
    if "b" in chosen:
        share = percent(chosen["data_share"])
        on += f" ({share} of {chosen['num_full']:,})"
        if "methods" in chosen:  # old runs do not name it
            on += f", chosen by {chosen['methods']['data']}"
    text = f"`{shown_name(config, 'model')}` trained on {on}"
    changed, total = tuned.get("changed_entries"), tuned.get("num_parameters")
    if changed is not None and total:
        text += (
            f"; {changed:,} of its {total:,} parameters ({percent(changed / total, 2)}) differ "
            "from the base, all others are the same bits"
        )
    return text + "."


def _how_to_load(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    lines = [
        "## How to load it",
        "The merged model (`6_finetune/model` of the run) is an ordinary Hugging Face folder:",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```',
    ]
    if "delta.safetensors" in facts["manifests"]["finetune"]["files"]:
        base = shown_name(config, "model")
        lines += [
            "The delta alone (`6_finetune/delta.safetensors`) holds the new values of the changed "
            "entries; put onto the same base it gives the merged model bit for bit:",
            "```python\nimport dualsft\nfrom transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("BASE_FOLDER")\n'
            'dualsft.apply_delta(model, "delta.safetensors")\n```',
            f"or `dualsft export merge {base} delta.safetensors FOLDER`. The base's weights have "
            f"the hash `{facts['finetune']['base_hash']}`; another base is refused.",
        ]
    return "\n\n".join(lines)


def _data(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    split = facts.get("split")
    if split is None:
        return ""
    counts = ", ".join(f"{role} {count:,}" for role, count in split["counts"].items())
    data = split["data"]
    return (
        f"## Data\n\n`{shown_name(config, 'data')}`: {split['num_examples']:,} examples, "
        f"{split['num_tokens']:,} tokens, format {data['format']}, template {data['template']}, at "
        f"most {data['max_length']:,} tokens a row. Split: {counts}."
    )


def _method(facts: Mapping[str, Any]) -> str:
    chosen = facts.get("selection")
    if chosen is None:
        return ""
    entries = registry()
    rows = []
    for axis, name in methods_of(facts).items():
        entry = entries.get(axis, {}).get(name)  # pyright: ignore[reportArgumentType, reportCallIssue]
        said = f": {entry.summary} ({entry.source})" if entry is not None else ""
        rows.append(f"- {axis}: `{name}`{said}")
    if "b" in chosen:
        share = percent(chosen["data_share"], 2)
        rows.append(f"- data budget: {chosen['b']:,} of {chosen['num_full']:,} ({share})")
    if "k" in chosen:
        of = {"all": "parameters", "eligible": "eligible entries"}
        named = of.get(chosen.get("denominator_of", ""), "candidate parameters")
        share = percent(chosen["share"], 2)
        rows.append(
            f"- parameter budget: {chosen['k']:,} of {chosen['denominator']:,} {named} ({share})"
        )
    return "## Method and budgets\n\n" + "\n".join(rows)


def _results(facts: Mapping[str, Any]) -> str:
    results = facts.get("evaluation")
    if results is None:
        return "## Results\n\nNot evaluated."
    lines = [
        "## Results",
        "| file | examples | loss before | after | perplexity before | after | KL to base |\n"
        "|---|---|---|---|---|---|---|\n"
        + "\n".join(
            f"| {name} | {r['examples']:,} | {r['before']['loss']:.4f} | {r['after']['loss']:.4f} "
            f"| {number(r['before']['perplexity'])} | {number(r['after']['perplexity'])} "
            f"| {r['after']['kl_to_base']:.4f} |"
            for name, r in results["files"].items()
        ),
        "`validation` is the split that the selection was aimed at, so it flatters; KL is that of "
        f"the base to this model, a response token. {LOSS_NOTE}",
    ]
    if "tasks" in results:
        rows = [
            f"| {name} ({task['metric']}, {task['num_fewshot']} shots) "
            f"| {percent(task['before']['score'])} | {percent(task['after']['score'])} |"
            for name, task in results["tasks"].items()
        ]
        lines.append("| benchmark | before | after |\n|---|---|---|\n" + "\n".join(rows))
        lines += results["summary"]["notes"]
    return "\n\n".join(lines)


def _training(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    tuned, manifests = facts["finetune"], facts["manifests"]
    settings = config.get("finetune", {})
    rows = [
        f"- {tuned['steps']:,} steps, batch {settings.get('batch_size', '?')}, "
        f"{settings.get('epochs', '?')} epochs, peak learning rate {tuned.get('lr', '?')}",
        f"- seed {config.get('seed', '?')}",
        f"- whole run {duration(sum(m['seconds'] for m in manifests.values()))}; fine-tuning "
        f"{duration(manifests['finetune']['seconds'])}, {peak_gib(manifests['finetune']):.2f} GiB",
    ]
    versions = manifests["finetune"].get("versions", {})
    if versions:
        rows.append("- " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return "## Training\n\n" + "\n".join(rows)


def _limits(facts: Mapping[str, Any]) -> str:
    found = concerns(facts)
    lines = [
        "## Limits",
        "The base model's licence, biases and limits hold for this one too, and so do the data's. "
        "A selection by gradients keeps what lowers the validation loss; it does not check that a "
        "row is true, harmless or free of private data.",
    ]
    if found:
        told = (f"- {c.title}. {c.found.rstrip('.')}. {c.meaning}" for c in found)
        lines.append(LOCAL_PATH.sub(r"\1", "\n".join(told)))
    return "\n\n".join(lines)
