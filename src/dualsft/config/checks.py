"""Checks across settings: contradictions, and settings without effect.

For example, a warmup of zero epochs gives no curvature and no preservation, and a variant with one
side has nothing to re-select. Works on flat values such as `{"score.lam": 0.8}`; reads and writes
no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualsft.config.parse import show


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """Contradictions between fields. An invalid field is absent from `values`, so never matches."""
    get = values.get
    problems: list[str] = []
    if get("score.step") == "adam" and get("warmup.epochs") == 0:
        problems.append(
            "score.step: 'adam' is not allowed with warmup.epochs=0, which leaves no curvature to"
            " divide by; give score.step=sgd, or warmup.epochs >= 1"
        )
    if get("select.rounds", 0) > 0 and get("select.variant", "dual") != "dual":
        problems.append(
            f"select.rounds: {get('select.rounds')} is not allowed with select.variant="
            f"{get('select.variant')}, which selects one side; give select.rounds=0 or variant dual"
        )
    pair = ("data.prompt_field", "data.response_field")
    for one, other in (pair, pair[::-1]):
        if get(one) is not None and other in values and get(other) is None:
            problems.append(f"{one}: {show(get(one))} is not allowed alone; give {other} too")
        pairs = ("auto", "prompt_response", "prompt_completion")
        if get(one) is not None and get("data.format", "auto") not in pairs:
            problems.append(
                f"{one}: {show(get(one))} is not allowed with data.format={get('data.format')},"
                " whose fields have other names; give data.format=prompt_response, or leave the"
                " field names out"
            )
    messages = get("data.messages_field")
    if messages is not None and get("data.prompt_field") is not None:
        problems.append(
            f"data.messages_field: {show(messages)} is not allowed with data.prompt_field; a row is"
            " a list of turns or a prompt and its response: leave one of the two out"
        )
    turns = ("auto", "messages", "openai", "sharegpt")
    if messages is not None and get("data.format", "auto") not in turns:
        problems.append(
            f"data.messages_field: {show(messages)} is not allowed with data.format="
            f"{get('data.format')}; give data.format=messages or sharegpt, or leave it out"
        )
    if get("data.template_file") is not None and get("data.template", "chat") != "chat":
        problems.append(
            f"data.template_file: {show(get('data.template_file'))} is not allowed with"
            f" data.template={get('data.template')}; give data.template=chat, or leave it out"
        )
    if "validation" in (get("evaluation.files") or {}):
        problems.append(
            "evaluation.files: the name 'validation' is taken: the run uses it for D_val; write"
            " another_name:PATH"
        )
    if get("data.val_path") is not None and get("split.val") is not None:
        problems.append(
            f"split.val: {show(get('split.val'))} is not allowed with data.val_path, whose rows are"
            " all of D_val; leave one of the two out"
        )
    shares = {key: get(key) for key in ("split.val", "split.anchor", "split.warm")}
    fractions = {key: share for key, share in shares.items() if isinstance(share, float)}
    if sum(fractions.values()) >= 1:
        given = ", ".join(f"{key}={share}" for key, share in fractions.items())
        problems.append(f"{given}: leaves no pool to select from; give fractions that sum below 1")
    return problems


def missing_consent(values: Mapping[str, Any]) -> list[str]:
    """Problems if humaneval, which runs generated programs, was not allowed explicitly."""
    asked = (values["evaluation.tasks"] or "").split(",")
    if "humaneval" not in asked or values["evaluation.allow_code_execution"]:
        return []
    return [
        f"evaluation.tasks: {show(values['evaluation.tasks'])} runs programs that the models write;"
        " allow it with --allow-code-execution (evaluation.allow_code_execution=true) on this"
        " command line, or leave humaneval out"
    ]


def idle_options(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Settings that differ from the default but have no effect here, one line each."""
    found: list[str] = []

    def idle(cause: str, *keys: str) -> None:
        """Record that `keys` have no effect with `cause`, such as `select.rounds=0`."""
        for key in keys:
            if repr(values[key]) != repr(defaults[key]):
                found.append(f"{key}={show(values[key])} has no effect with {cause}")

    preservation, curvature = values["score.preservation"], values["score.curvature"]
    if preservation != "cwsd":
        idle(f"score.preservation={preservation}", "score.tau")
    if preservation == "none":
        idle("score.preservation=none", "score.lam", "score.lam_relative")
    if curvature == "none":
        idle("score.curvature=none", "score.curvature_scale")
    if values["select.rounds"] == 0:
        idle("select.rounds=0", "select.order")
    if values["select.variant"] == "data":
        idle("select.variant=data", "select.param_budget")
    if values["select.variant"] == "param":
        idle("select.variant=param", "select.data_budget", "score.mode")
    for axis, key in (("data", "select.data_budget"), ("params", "select.param_budget")):
        if values[f"method.{axis}"] == "all":
            idle(f"method.{axis}=all", key)
    if values["evaluation.prompt"] is None:
        idle("evaluation.prompt=null", "evaluation.max_new_tokens")
    if values["evaluation.tasks"] is None:
        names = ("domain", "data_dir", "limit_tasks", "task_batch_size", "backend")
        idle("evaluation.tasks=null", *(f"evaluation.{name}" for name in names))
    if values["warmup.epochs"] == 0:
        idle("warmup.epochs=0", "warmup.lr", "warmup.batch_size", "warmup.min_steps")
        at_start = "with warmup.epochs=0 (theta_bar = theta_old)"
        if preservation != "none":
            found.append(f"score.preservation={preservation} is exactly zero {at_start}")
        if curvature != "none":
            found.append(f"score.curvature={curvature} is none {at_start}")
    if values["parallel.mode"] == "replicate":
        idle("parallel.mode=replicate", "parallel.offload")
    if values["parallel.mode"] == "shard":
        idle("parallel.mode=shard", "score.plan")
    micro, batch = values["finetune.micro_batch_size"], values["finetune.batch_size"]
    if micro is not None and micro > batch:
        found.append(f"finetune.micro_batch_size={micro} acts as finetune.batch_size={batch}")
    return found
