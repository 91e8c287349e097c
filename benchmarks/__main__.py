"""Run the benchmarks: prints tables and writes JSON with machine and versions.

    python -m benchmarks                              all sections, with the defaults of the device
    python -m benchmarks --device cuda --only scoring,finetuning --out runs/bench.json
    python -m benchmarks --quick                      all sections, as small as possible

The JSON is rewritten after every section, so an interrupted run keeps the finished ones.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bf16 products on some CPUs

import torch  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from benchmarks.measuring import machine, versions, write  # noqa: E402
from benchmarks.options import Options  # noqa: E402
from benchmarks.workload import SHAPES  # noqa: E402
from dualsft.errors import DualsftError  # noqa: E402
from dualsft.model.load import choose_device  # noqa: E402

SECTIONS = (
    "scoring",
    "finetuning",
    "saving",
    "topk",
    "solving",
    "peers",
    "less",
    "sharding",
    "answers",
    "fidelity",
    "training_fidelity",
    "microscope",
)
DEFAULTS = {  # model, rows, rounds, tokens per scoring batch
    "cpu": ("smollm2-135m-shape", 8, 2, 1024),
    "cuda": ("llama-3.2-3b-shape", 512, 2, 32768),
    "quick": ("tiny", 6, 1, 256),
}


def parse(arguments: list[str]) -> tuple[Options, list[str], Path | None]:
    """(options, sections, path of the JSON)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--only", help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--model", help=f"one of {', '.join(SHAPES)}; or a model's name or folder")
    parser.add_argument("--real-model", help="fidelity, microscope: a trained model")
    parser.add_argument("--data", type=Path, help="fidelity, microscope: JSONL rows")
    parser.add_argument("--fields", help="PROMPT,RESPONSE, the names in those rows")
    parser.add_argument("--rows", type=int, help="rows of the pool")
    parser.add_argument("--rounds", type=int, help="timed rounds")
    parser.add_argument("--batch-tokens", type=int, help="padded tokens of a scoring batch")
    parser.add_argument("--match", default="", help="scoring, finetuning: names that contain this")
    parser.add_argument("--memory", type=float, help="GiB of the GPU that may be used")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--quick", action="store_true", help="as small as possible")
    given = parser.parse_args(arguments)
    names: list[str] = given.only.split(",") if given.only else [*SECTIONS]
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: {unknown[0]!r} is not known; use some of {','.join(SECTIONS)}")
    device = choose_device(given.device)
    if given.memory is not None:
        if device.type != "cuda":
            parser.error("--memory: only a GPU's memory can be limited")
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.memory * 2**30 / total))
    model, rows, rounds, batch_tokens = DEFAULTS["quick" if given.quick else device.type]
    options = Options(
        device=device,
        model=given.model or model,
        real_model=given.real_model or ("tiny" if given.quick else "smollm2-135m"),
        data=given.data,
        fields=_pair(parser, given.fields),
        rows=given.rows or rows,
        rounds=given.rounds or rounds,
        batch_tokens=given.batch_tokens or batch_tokens,
        match=given.match,
        quick=given.quick,
    )
    return options, names, given.out


def _pair(parser: argparse.ArgumentParser, fields: str | None) -> tuple[str, str] | None:
    if fields is None:
        return None
    if len(parts := fields.split(",")) != 2:
        parser.error(f"--fields: {fields!r} must be two names, such as question,answer")
    return parts[0], parts[1]


def main(arguments: list[str]) -> None:
    options, names, out = parse(arguments)
    transformers_logging.set_verbosity_error()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks", *(Path(word).name for word in arguments)]),
        "machine": machine(options.device),
        "versions": versions(),
        "sections": {},
    }
    print("; ".join(f"{key} {value}" for key, value in record["machine"].items()))
    print("; ".join(f"{key} {value}" for key, value in record["versions"].items()))
    for name in names:
        start = time.perf_counter()
        try:
            section = import_module(f"benchmarks.{name}").run(options)
        except DualsftError as problem:
            sys.exit(f"{name}: {problem}")
        print("\n".join(["", *section.lines()]), flush=True)
        record["sections"][name] = {**vars(section), "wall_seconds": time.perf_counter() - start}
        if out is not None:
            write(out, record)


if __name__ == "__main__":
    main(sys.argv[1:])
