"""Trackers: what TensorBoard, W&B, MLflow and trackio hold of a run, read by their own readers."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Runner, small_run
from matrices import matrix_of
from places import place

import dualsft
from dualsft.config import settings
from dualsft.config.fields import TRACKERS
from dualsft.errors import ConfigError, RunError
from dualsft.integrations.trackers import CLASSES, DEFAULTS, Sent, TrackerRun, tracker_problems
from dualsft.runs import pipeline
from dualsft.system.progress import Reporter

Curves = dict[str, list[tuple[int, float]]]
"""(step, value) of each quantity, in the order in which a tracker has them."""


def from_tensorboard(run: Path) -> tuple[Curves, dict[str, object]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    (folder,) = (run / "trackers/tensorboard").iterdir()
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = found.Tags()["scalars"]
    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    given = metadata.parse_session_start_info_plugin_data(content).hparams
    facts = {key: value.number_value or value.string_value for key, value in given.items()}
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags}, facts


def from_mlflow(run: Path) -> tuple[Curves, dict[str, object]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{run}/trackers/mlflow")
    experiment = client.get_experiment_by_name("dualsft")
    assert experiment is not None
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.status == "FINISHED" and one.info.run_name == run.name
    histories = {key: client.get_metric_history(one.info.run_id, key) for key in one.data.metrics}
    curves = {key: [(m.step, m.value) for m in one] for key, one in histories.items()}
    return curves, {key: _number(value) for key, value in one.data.params.items()}


def from_wandb(run: Path) -> tuple[Curves, dict[str, object]]:
    """From the files that `wandb sync` would upload."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service has written the files when it has ended
    curves: Curves = {}
    facts: dict[str, object] = {}
    files = sorted((run / "trackers/wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1  # one run, however often it was resumed
    last = -1
    for data in (data for file in files for data in records_of(file)):
        record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
        record.ParseFromString(data)
        facts |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        row = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
        values = {key: json.loads(text) for key, text in row.items()}
        for key in values:
            stage, _, quantity = key.partition("/")
            if quantity in ("loss", "lr", "grad_norm", "retention"):
                curves.setdefault(key, []).append((values[f"{stage}/step"], values[key]))
        if values:
            assert record.history.step.num > last
            last = record.history.step.num
        for one in record.summary.update:
            name = "/".join(one.nested_key) or one.key
            if name.startswith("summary/"):  # W&B adds the last value of each curve
                curves[name] = [(0, json.loads(one.value_json))]
    return curves, facts


def records_of(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    content, block, record = file.read_bytes(), 32768, b""
    assert content.startswith(b":W&B")
    place = 7
    while place + 7 <= len(content):
        if block - place % block < 7:  # no header fits in what is left of the block
            place += block - place % block
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def from_trackio(run: Path) -> tuple[Curves, dict[str, object]]:
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    lines = map(json.loads, (run / "trackers/sent.jsonl").read_text().splitlines())
    (mine,) = [line["run"] for line in lines if "run" in line]
    (name,) = [one for one in SQLiteStorage.get_runs("dualsft") if one == f"{run.name}-{mine}"]
    curves: Curves = {}
    for row in SQLiteStorage.get_logs("dualsft", name):
        for key in row.keys() - {"step", "timestamp"}:
            curves.setdefault(key, []).append((row["step"], row[key]))
    return curves, SQLiteStorage.get_run_config("dualsft", name) or {}


def _number(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


READERS: dict[str, Callable[[Path], tuple[Curves, dict[str, object]]]] = {
    "tensorboard": from_tensorboard,
    "wandb": from_wandb,
    "mlflow": from_mlflow,
    "trackio": from_trackio,
}


def check_holds_all(name: str, run: Path, late: int | None = None) -> None:
    """Whether a tracker has every step of metrics.jsonl once, the summaries and the settings.

    With `late`, only what came after that step of the fine-tuning must be there.
    """
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "step" in record]
    curves, facts = READERS[name](run)
    for stage in ("warmup", "finetune"):
        steps = {record["step"]: record for record in records if record["stage"] == stage}
        assert sorted(steps) == list(range(1, max(steps) + 1))
        sure = range(max(steps) + 1) if late is None else range(late + 1, max(steps) + 1)
        for key in steps[1].keys() - {"time", "stage", "step", "epoch"}:
            found = curves.get(f"{stage}/{key}", [])
            have = {step for step, _ in found}
            needed = set(sure if late is None or stage == "finetune" else ()) - {0}
            assert needed <= have
            wanted = [
                (n, pytest.approx(steps[n][key], rel=1e-5)) for n in sorted(steps) if n in have
            ]
            assert found == wanted, (name, key)
    results = json.loads((run / "7_evaluation/results.json").read_text())
    for when in ("before", "after"):
        loss = results["files"]["validation"][when]["loss"]
        found = curves[f"summary/evaluation/files/validation/{when}/loss"]
        assert found == [(0, pytest.approx(loss, rel=1e-5))]
    scores = json.loads((run / "4_scores/summary.json").read_text())
    sent = curves.get("summary/scores/n_sc", [])
    assert sent == [(0, scores["n_sc"])] or (late is not None and not sent)
    assert facts["finetune.lr"] == 1e-3 and facts["data.template"] == "plain"


@pytest.fixture
def own_storage(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp() / "trackio"  # trackio reads the variable once
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "names",
    [("tensorboard",), pytest.param(TRACKERS[1:], marks=pytest.mark.slow)],
)
def test_each_tracker_holds_each_record_once(
    names: tuple[str, ...], own_storage: None, make_run: Runner
) -> None:
    """Also of a run that is stopped and continued, and started again when it is finished."""
    words = (f"log.report_to={','.join(names)}", "finetune.retention=0.5")
    make_run(*words, until="warmup")
    run = make_run(*words)
    sent = (run / "trackers/sent.jsonl").read_bytes()
    again: list[str] = []
    make_run(*words, said=again)
    assert (run / "trackers/sent.jsonl").read_bytes() == sent
    assert not any("trackers" in line for line in again)  # none was started
    for name in names:
        check_holds_all(name, run)


def test_a_stage_made_from_other_inputs_begins_another_tracker_run(make_run: Runner) -> None:
    words = ("log.report_to=tensorboard", "log.run_name=a/b")
    for lr in ("1e-3", "2e-3", "2e-3"):
        run = make_run(*words, f"warmup.lr={lr}", until="warmup")
    lines = map(json.loads, (run / "trackers/sent.jsonl").read_text().splitlines())
    ids = [line["run"] for line in lines if "run" in line]
    folders = {path.name for path in (run / "trackers/tensorboard").iterdir()}
    assert len(ids) == 2 and folders == {f"a_b-{ids[0]}", f"a_b-2-{ids[1]}"}


def test_a_tracker_that_fails_ends_no_run(
    model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    """Its folder goes in the middle of the run; the others get the rest."""
    out, warned = tmp_path / "run", dict[str, str]()

    def write(line: str) -> None:
        if line.startswith("fine-tuning: "):
            shutil.rmtree(out / "trackers/mlflow", ignore_errors=True)
        if line.startswith("warning: log.report_to"):
            warned[line] = reporter.codes[line.removeprefix("warning: ")]

    reporter = Reporter(write)
    words = [*small_run(model_folder("llama"), corpus), "log.report_to=mlflow,tensorboard"]
    pipeline.run(settings.load(None, words), out, None, reporter)
    ((line, code),) = warned.items()
    assert "mlflow failed" in line and "the run goes on" in line and code == "tracker_failed"
    check_holds_all("tensorboard", out)


def test_nothing_is_written_through_a_link_in_the_run_folder(
    make_run: Runner, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run/trackers").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("")
    (tmp_path / "run/trackers/tensorboard").symlink_to(outside)
    said: list[str] = []
    make_run("log.report_to=tensorboard", until="warmup", said=said)
    assert not any(outside.iterdir())
    assert sum("tensorboard failed" in line and "link" in line for line in said) == 1


@pytest.mark.parametrize(
    "name",
    [
        "tensorboard/run-01234567/old",
        "mlflow/0/1/metrics/summary/split/seconds",
        "wandb/offline-run-20260101_000000-01234567/run-01234567.wandb",
    ],
)
@pytest.mark.parametrize("kind", ["a hard link", "a pipe"])
def test_a_tracker_gets_no_folder_with_what_it_could_write_through(
    own_storage: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, kind: str
) -> None:
    for key, value in DEFAULTS.items():
        monkeypatch.setenv(key, value)
    outside, folder = tmp_path / "outside", tmp_path / "run/trackers"
    outside.write_text("mine\n")
    planted = folder / name
    planted.parent.mkdir(parents=True)
    os.link(outside, planted) if kind == "a hard link" else os.mkfifo(planted)
    run = TrackerRun("01234567", "run", None, {}, place(tmp_path / "run") / "trackers")
    with pytest.raises(RunError, match=kind):
        CLASSES[name.split("/")[0]](run)
    assert outside.read_text() == "mine\n"


def test_a_tracker_logs_nothing_past_our_handler(
    own_storage: None,
    make_run: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """MLflow warns of an empty folder, with a traceback, on the root logger; and on its own."""
    import mlflow

    own, root = logging.getLogger("mlflow"), logging.getLogger()
    kept = list(own.handlers)
    monkeypatch.setattr(root, "handlers", [])
    warn = mlflow.MlflowClient.log_batch

    def log_batch(*given: Any, **named: Any) -> Any:
        own.warning("its own logger")
        return warn(*given, **named)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    (tmp_path / "run/trackers/mlflow/0").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("")
    run = make_run("log.report_to=mlflow", until="split")
    printed = capfd.readouterr().err
    assert "Malformed" not in printed and "its own logger" not in printed
    assert root.handlers == [] and own.handlers == kept and len(kept) > 0
    assert '"summary"' in (run / "trackers/sent.jsonl").read_text()
    assert any((run / "trackers/mlflow").rglob("meta.yaml"))


def test_the_links_that_wandb_makes_are_no_obstacle(
    own_storage: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for key, value in DEFAULTS.items():
        monkeypatch.setenv(key, value)
    folder, target = tmp_path / "run/trackers/wandb", tmp_path / "core.log"
    logs = folder / "run-20260101_000000-01234567/logs"
    logs.mkdir(parents=True)
    target.write_text("mine")
    for link in (folder / "latest-run", folder / "debug.log", logs / "debug-core.log"):
        link.symlink_to(target)
    run = TrackerRun("01234567", "run", None, {}, place(tmp_path / "run") / "trackers")
    CLASSES["wandb"](run).close("FINISHED")
    assert len(list(folder.glob("offline-run-*/run-01234567.wandb"))) == 1
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    "facts", ["1e400", "2.5", "true", "-1", f"1{'0' * 400}", "null", "[1]", '"x"', "NaN"]
)
def test_a_line_of_sent_that_is_not_ours_is_skipped(tmp_path: Path, facts: str) -> None:
    """A line of any other value, too, and one that is no object."""
    lines = ('{"run":"01234567"}', f'{{"stage":"finetune","step":{facts}}}', facts, "{}", "[]")
    (tmp_path / "sent.jsonl").write_text("\n".join([*lines, '{"stage":"warmup","step":3}', ""]))
    sent = Sent.read(place(tmp_path / "sent.jsonl"))
    assert (sent.id, sent.steps, sent.count) == ("01234567", {"warmup": 3}, 1)


def test_a_missing_package_is_reported_before_anything_runs(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"wandb, mlflow .*pip install wandb mlflow-skinny"):
        make_run("log.report_to=wandb,mlflow,tensorboard")
    assert not (tmp_path / "run").exists()
    assert tracker_problems({"log.report_to": "all"}) == tracker_problems({}) == []


def test_a_received_run_folder_reports_to_nobody(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make_run("log.report_to=tensorboard", "log.run_name=mine", until="split")
    config = str(run / "config.yaml")
    assert settings.load(config).log.report_to == "tensorboard"
    monkeypatch.setenv("DUALSFT_CACHE", str(tmp_path / "of another user"))
    own = settings.load(config, ["log.report_to=wandb", "model.path=x", "data.path=y"])
    assert own.log.report_to == "wandb"
    assert settings.load(config, ["model.path=x", "data.path=y"]).log.report_to is None


def test_each_cell_of_a_comparison_has_its_name(tmp_path: Path, corpus: Path) -> None:
    words = ["model.path=tiny", f"data.path={corpus}", "log.report_to=tensorboard"]
    matrix = matrix_of(tmp_path, words, methods=["dualsft", "random"])
    logs = [matrix.config(cell).log for cell in matrix.cells()]
    assert [log.run_name for log in logs] == [cell.title for cell in matrix.cells()]
    assert {log.project for log in logs} == {matrix.name}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_a_killed_run_continues_in_the_same_tracker_run(
    name: str, own_storage: None, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    """SIGKILL in the middle of the fine-tuning: no step twice.

    W&B and trackio write with a delay and may lack what was sent before the kill, nothing else.
    """
    out = tmp_path / "run"
    words = [*small_run(model_folder("llama"), corpus), f"log.report_to={name}"]
    words += ["finetune.epochs=12", "resume.every=0", "--out", str(out)]
    source = str(Path(dualsft.__file__).parents[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    command = [sys.executable, "-m", "dualsft", "run", *words]
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    sent = out / "trackers/sent.jsonl"
    while not (sent.is_file() and b'"finetune", "step": 9}' in sent.read_bytes()):
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    lines = map(json.loads, sent.read_text().splitlines())
    last = max(line["step"] for line in lines if line.get("stage") == "finetune" and "step" in line)
    assert not (out / "6_finetune").exists()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    check_holds_all(name, out, late=last if name in ("wandb", "trackio") else None)
