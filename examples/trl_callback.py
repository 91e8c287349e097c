"""DualSFT inside TRL, with rows and weight entries chosen again every 20 steps.

An epoch of the trainer is then 20 steps, so this script chooses three times.

    python examples/trl_callback.py MODEL_FOLDER ROWS.jsonl OUT
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


def choose(trainer):
    scores = dualsft.score_trainer(trainer, form="calibrated")
    return dualsft.select(scores, data_budget=0.1, param_budget=0.05)


trainer.add_callback(dualsft.DualSFTCallback(trainer, choose, every=20))
trainer.train()
trainer.save_model(out)
