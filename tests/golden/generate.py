"""Write trl.json: token ids and labels of the fixture rows by TRL's own SFTTrainer.

Run in an environment of its own, from the repository's root:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 transformers==5.22.2 \\
        trl==1.16.0 datasets==5.2.0
    PYTHONPATH=tests /tmp/trl/bin/python tests/golden/generate.py [SMOLLM2_FOLDER]

With the folder of SmolLM2 (the short name smollm2-135m, under `$DUALSFT_CACHE/models`) it writes
trl_smollm2.json too. Every row is a dataset of its own, prepared by a trainer around a tiny model:
what is compared is TRL's preparation, not its training.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset  # pyright: ignore[reportMissingImports]
from golden.cases import CUT, TRL_ROWS, chat_template_of, settings_of
from golden.setups import CHAT_TEMPLATES, make_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer  # pyright: ignore

HERE = Path(__file__).parent


def prepared(
    row: dict[str, Any], tokenizer: Any, model: Any, marks: bool, max_length: int | None = None
) -> dict[str, list[int]]:
    """input_ids and labels as TRL prepares them."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = SFTConfig(
            output_dir=scratch,
            max_length=max_length,
            completion_only_loss=True if "completion_mask" in row else None,
            assistant_only_loss=marks,
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        trainer = SFTTrainer(
            model, args=settings, train_dataset=Dataset.from_list([row]), processing_class=tokenizer
        )
        made = trainer.train_dataset[0]  # pyright: ignore
        batch = trainer.data_collator([made])
    return {
        "input_ids": batch["input_ids"][0].tolist(),
        "labels": batch["labels"][0].tolist(),
    }


def fixtures(names: list[str], make: Any) -> list[dict[str, Any]]:
    """One fixture a row and tokenizer."""
    found: list[dict[str, Any]] = []
    for name in names:
        for case, row in TRL_ROWS.items():
            chat_template = chat_template_of(row)
            tokenizer = make(name, chat_template)
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=8,
                    intermediate_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                )
            )
            marks = chat_template == "generation"
            made = prepared(row, tokenizer, model, marks)
            fixture = {
                "case": case,
                "tokenizer": name,
                "chat_template": chat_template,
                "settings": settings_of(row),
                "row": row,
            }
            found.append({**fixture, **made})
            if case in CUT:
                limit = len(made["input_ids"]) - 3
                settings = settings_of(row) | {"truncation": "right", "max_length": limit}
                shorter = prepared(row, tokenizer, model, marks, limit)
                fixture |= {"case": f"{case}_cut", "settings": settings}
                found.append({**fixture, **shorter})
    return found


def smollm2(folder: str) -> Any:
    def make(_: str, chat_template: str) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = CHAT_TEMPLATES[chat_template]
        return tokenizer

    return make


def write(path: Path, found: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(fixture, ensure_ascii=False) for fixture in found)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    write(HERE / "trl.json", fixtures(["byte", "byte_bos", "merging"], make_tokenizer))
    if len(sys.argv) > 1:
        write(HERE / "trl_smollm2.json", fixtures(["smollm2"], smollm2(sys.argv[1])))
