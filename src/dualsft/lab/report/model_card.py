"""model_card.md: the README to upload with a run's `6_finetune/model` or `delta.safetensors`.

Uses the model card format of the Hugging Face Hub: front matter (base model, tags, metrics), then
how to load the merged folder or the delta, data, method, budgets, results, cost and limits. Reads
the summaries of a run and its config.yaml. Local paths are reduced to their last component, so the
card does not reveal the author's directories. Not part of Algorithm 1.
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
    """Write model_card.md into `out`. Returns None, without a card, if there is no model yet."""
    path = out / "model_card.md"
    if "finetune" not in facts:
        path.unlink(missing_ok=True)  # an old card describes a model that no longer exists
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
    """model.path or data.path for publication: hub ids and `builtin:` names as they are, local
    paths by their last component."""
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
            "from the base, all others are identical bit for bit"
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
            "The delta (`6_finetune/delta.safetensors`) contains the new values of the changed "
            "entries. Applied to the same base, it gives the merged model bit for bit:",
            "```python\nimport dualsft\nfrom transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("BASE_FOLDER")\n'
            'dualsft.apply_delta(model, "delta.safetensors")\n```',
            f"or `dualsft export merge {base} delta.safetensors FOLDER`. The base weights have "
            f"the hash `{facts['finetune']['base_hash']}`; any other base is refused.",
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
        f"most {data['max_length']:,} tokens per row. Split: {counts}."
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
        "The selection was optimized for `validation`, so its results are optimistic. KL is "
        f"KL(base ‖ this model), per response token. {LOSS_NOTE}",
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
        "The licences, biases and limits of the base model and of the data apply to this model. "
        "Selection by gradients keeps what lowers the validation loss; it does not check that a "
        "row is true, harmless or free of private data.",
    ]
    if found:
        told = (f"- {c.title}. {c.found.rstrip('.')}. {c.meaning}" for c in found)
        lines.append(LOCAL_PATH.sub(r"\1", "\n".join(told)))
    return "\n\n".join(lines)
