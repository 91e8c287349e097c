"""Training settings that follow the size: the rule, what a run resolves, stores and repeats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Runner, small_run

from dualsft.config import settings
from dualsft.errors import ConfigError
from dualsft.lab.check import check
from dualsft.lab.compare.matrix import effective_rate
from dualsft.lab.estimate.estimate import estimate
from dualsft.runs import pipeline
from dualsft.runs.preflight import FOLDERS
from dualsft.system.progress import Reporter
from dualsft.train import loop
from dualsft.train.loop import Sizes, sized

AUTO = ["finetune.lr=auto", "finetune.epochs=auto", "finetune.batch_size=auto"]
SETTINGS = ("finetune.lr", "finetune.epochs", "finetune.batch_size")


@pytest.mark.parametrize(
    ("num_rows", "lr", "epochs", "batch_size", "steps"),
    [
        (12, 1e-4, 8, 8, 16),
        (17, 1e-4, 8, 8, 24),
        (100, 1e-4, 3, 8, 39),
        (300, 6.1e-5, 3, 8, 114),
        (747, 9.7e-5, 3, 32, 72),
        (1280, 1e-4, 3, 64, 60),
        (7467, 2e-5, 3, 64, 351),
        (39_500, 2e-5, 3, 64, 1854),
    ],
)
def test_the_rule(num_rows: int, lr: float, epochs: int, batch_size: int, steps: int) -> None:
    found = sized(num_rows)
    assert found == Sizes(lr, epochs, batch_size)
    assert epochs * -(-num_rows // batch_size) == steps


def test_no_size_is_left_without_steps_and_none_moves_too_far() -> None:
    for num_rows in [*range(1, 3000), 10_000, 100_000]:
        found = sized(num_rows)
        steps = found.epochs * -(-num_rows // found.batch_size)
        assert steps >= 8 and (steps >= 20 or num_rows <= 16)
        assert found.lr * steps >= 7.9e-4 and (found.lr * steps <= 7.4e-3 or found.lr == 2e-5)


def test_a_given_number_is_kept_and_the_others_follow_it() -> None:
    assert sized(300, batch_size=100).batch_size == 100
    assert sized(300, batch_size=100).epochs == 8  # 3 steps per epoch
    assert sized(300, epochs=1).batch_size == 8
    assert sized(20, lr=5e-4) == Sizes(5e-4, 8, 8)
    assert sized(7467, epochs=6).lr == 2e-5


@pytest.mark.parametrize(
    ("width", "lr"),
    [(64, 1e-4), (576, 1e-4), (1152, 5e-5), (2048, 2.8e-5), (3072, 2e-5), (8192, 2e-5)],
)
def test_the_largest_rate_falls_with_the_width(width: int, lr: float) -> None:
    assert sized(100, width=width).lr == lr
    assert sized(7467, width=width).lr == 2e-5
    assert sized(100, lr=5e-4, width=width).lr == 5e-4


def test_a_run_reads_the_width_of_its_model(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(*AUTO, until="split")
    config = json.loads(
        (Path(settings.load(run / "config.yaml").model.path) / "config.json").read_text()
    )
    monkeypatch.setattr(loop, "MEASURED_WIDTH", config["hidden_size"] // 2)
    run = make_run(*AUTO, until="finetune")
    summary = json.loads((run / "6_finetune/summary.json").read_text())
    assert summary["auto"]["finetune.lr"] == 5e-5 and summary["lr"] == pytest.approx(1.5e-4)


def test_a_fine_tuning_that_makes_the_new_skill_worse_is_reported(make_run: Runner) -> None:
    def codes(run: Path) -> list[str | None]:
        manifest = json.loads((run / "7_evaluation/manifest.json").read_text())
        return manifest["facts"]["warning_codes"]

    dense = ["select.variant=data", "select.data_budget=80", "finetune.epochs=10"]
    good = make_run("finetune.lr=1e-2", *dense)
    assert "worse_loss" not in codes(good)
    said: list[str] = []
    trained = f"model.path={good / '6_finetune/model'}"
    assert "worse_loss" in codes(make_run(trained, "method.lr_ratio=1e4", out="again", said=said))
    assert any("validation loss" in line and "lower finetune.lr" in line for line in said)


def test_auto_in_a_config(corpus: Path) -> None:
    words = ["model.path=m", f"data.path={corpus}"]
    config = settings.load(None, [*words, *AUTO])
    assert [settings.to_flat(config)[key] for key in SETTINGS] == ["auto"] * 3
    assert settings.from_mapping(settings.to_flat(config)) == config
    assert effective_rate(config) == "auto"
    with pytest.raises(ConfigError, match="finetune.lr: 'Auto' is not allowed.* > 0, or auto;"):
        settings.load(None, [*words, "finetune.lr=Auto"])
    with pytest.raises(ConfigError, match=r"finetune.epochs: 0 .* >= 1, or auto;"):
        settings.load(None, [*words, "finetune.epochs=0"])
    recommended = settings.load("recommended", words)
    assert recommended.finetune.lr == recommended.finetune.batch_size == "auto"


def files_of(run: Path) -> dict[str, dict[str, str]]:
    """Hashes of the files of every stage but summaries that name auto."""
    found = {}
    for name, folder in FOLDERS.items():
        files = json.loads((run / folder / "manifest.json").read_text())["files"]
        found[name] = {f: entry["sha256"] for f, entry in files.items() if f != "summary.json"}
    return found


def test_auto_is_the_numbers_it_resolves_to(make_run: Runner) -> None:
    """Equal fingerprints and bits: giving the numbers afterwards repeats nothing."""
    said: list[str] = []
    run = make_run(*AUTO, said=said)
    assert "fine-tuning: 12 rows, batch 8, 8 epochs, 16 steps, lr 0.0003" in "\n".join(said)
    assert "lr: auto" in (run / "config.yaml").read_text()
    summary = json.loads((run / "6_finetune/summary.json").read_text())
    assert summary["lr"] == 3 * 1e-4 and summary["steps"] == 16
    numbers = {"finetune.lr": 1e-4, "finetune.epochs": 8, "finetune.batch_size": 8}
    assert summary["auto"] == numbers
    warmup = json.loads((run / "2_warmup/manifest.json").read_text())["fingerprint"]["settings"]
    assert (warmup["warmup.lr"], warmup["warmup.batch_size"]) == (1e-4, 8)
    words = [f"{key}={value}" for key, value in numbers.items()]
    other = make_run(*words, "method.lr_ratio=3", out="numbers")
    assert files_of(run) == files_of(other)
    assert "auto" not in json.loads((other / "6_finetune/summary.json").read_text())
    said.clear()
    make_run(*words, "method.lr_ratio=3", said=said)
    assert sum("reused" in line for line in said) == 7


def test_another_budget_repeats_neither_warmup_nor_scores(make_run: Runner) -> None:
    make_run(*AUTO, until="finetune")
    said: list[str] = []
    make_run(*AUTO, "select.data_budget=0.3", until="finetune", said=said)
    for stage in ("split", "warmup", "gradients", "scores"):
        assert any(line.startswith(f"[{stage}] reused") for line in said)
    assert any("36 rows, batch 8, 6 epochs, 30 steps, lr 0.0003" in line for line in said)


def test_methods_that_train_in_their_selection(make_run: Runner) -> None:
    """davir and smt train by finetune.* before the fine-tuning; lr_ratio of the method applies."""
    more = ["method.data=davir", "method.params=smt", "method.smt.steps=2", "method.smt.block=4"]
    run = make_run(*AUTO, *more, until="finetune")
    assert json.loads((run / "6_finetune/summary.json").read_text())["lr"] == 3 * 1e-4 * 2


def test_warnings_of_a_fine_tuning_that_changes_nothing(
    make_run: Runner, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    paper = ["finetune.lr=2e-5", "finetune.batch_size=64", "finetune.epochs=3"]
    said: list[str] = []
    run = make_run(*paper, until="finetune", said=said)
    facts = json.loads((run / "6_finetune/manifest.json").read_text())["facts"]
    assert facts["warning_codes"] == ["few_steps", "small_change"]
    early = next(i for i, line in enumerate(said) if "only 3 steps over 12 examples" in line)
    assert early < next(i for i, line in enumerate(said) if line.startswith("[warmup]"))
    slow = ["finetune.lr=1e-5", "finetune.batch_size=4", "finetune.epochs=10"]
    config = settings.load(None, [*small_run(model_folder("llama"), corpus), *slow])
    reporter = Reporter(said.append)
    assert check(config, reporter) == []
    assert [code for code in reporter.codes.values() if code != "note"] == ["small_change"]
    assert "fine-tuning: 12 rows, batch 4, 10 epochs, 30 steps, lr 1e-05" in said
    quiet = Reporter(said.append)
    auto = settings.load(None, [*small_run(model_folder("llama"), corpus), *AUTO])
    check(settings.from_mapping(settings.to_flat(auto) | {"select.data_budget": 0.3}), quiet)
    assert not {"few_steps", "small_change"} & set(quiet.codes.values())
    found = estimate(auto, tmp_path / "none", None, Reporter(said.append))
    resolved = "fine-tuning: 12 rows, batch 8, 8 epochs, 16 steps, lr 0.0003"
    assert found.finetuning == f"{resolved} (auto: batch_size, epochs, lr)"


def test_finished_and_a_split_whose_counts_are_gone(make_run: Runner) -> None:
    run = make_run(*AUTO, until="warmup")
    config = settings.load(run / "config.yaml")
    assert pipeline.Finished(config, pipeline.RunPath(run)).up_to("warmup")
    manifest = run / "1_split/manifest.json"
    facts = json.loads(manifest.read_text())
    del facts["facts"]["counts"]
    manifest.write_text(json.dumps(facts))
    said: list[str] = []
    make_run(*AUTO, until="warmup", said=said)
    assert [line[:14] for line in said if line.startswith("[")][0] == "[split] again "
    assert any(line.startswith("[warmup] reused") for line in said)
