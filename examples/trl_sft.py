"""DualSFT inside TRL: the best 10 % of the rows and 5 % of the weights of your own SFTTrainer.

Your arguments, chat template, columns and callbacks stay; the lines with `dualsft` are ours.

    python examples/trl_sft.py MODEL_FOLDER ROWS.jsonl OUT

ROWS.jsonl needs the columns of TRL: `prompt` and `completion`, or `messages`. From a finished run,
`dualsft export data RUN ROWS.jsonl --format trl` writes its selected rows so.
"""

import sys

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

import dualsft

model, rows, out = sys.argv[1:]
data = load_dataset("json", data_files=rows, split="train")
data = data.train_test_split(test_size=0.1, seed=0)  # "test": rows of the skill you want to learn
trainer = SFTTrainer(
    model,
    SFTConfig(out, learning_rate=3e-4, bf16=torch.cuda.is_available(), report_to="none"),
    train_dataset=data["train"],
    eval_dataset=data["test"],
)
scores = dualsft.score_trainer(trainer, form="calibrated")
chosen = dualsft.select(scores, data_budget=0.1, param_budget=0.05)
dualsft.restrict(trainer, chosen.param_mask, chosen.rows)
del scores  # G, u and the copy of the model; training does not need them
trainer.train()
trainer.save_model(out)
