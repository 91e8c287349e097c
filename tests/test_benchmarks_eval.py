"""Benchmarks before and after: the harness's own requests and scores on local rows."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import Runner, small_run, write_jsonl
from models import save_tiny_folder

from benchmarks.harness_scores import NAMES, compared, harness_scores, harness_tasks
from dualsft.config import settings
from dualsft.errors import ConfigError, DataError
from dualsft.lab.compare.cells import run_matrix
from dualsft.lab.compare.matrix import load_matrix
from dualsft.lab.compare.tables import write_tables
from dualsft.lab.evaluation import benchmarks as benchmarking
from dualsft.lab.evaluation import tasks as benchmark_tasks
from dualsft.lab.evaluation.sandbox import Program, run_candidate
from dualsft.lab.evaluation.tasks import (
    BENCHMARKS,
    build_tasks,
    definitions,
    silenced,
    task_problems,
)
from dualsft.runs import pipeline
from dualsft.runs.preflight import check_paths
from dualsft.storage.resume import Pieces
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter

ALL = "humaneval,piqa,arc_challenge,mmlu,gsm8k"
WORDS = ("red", "old", "sun", "cat", "map", "ice", "oak")


def rows(count: int = 6) -> dict[str, list[dict[str, Any]]]:
    """A few rows of every file, with the fields of the real ones."""
    rng = random.Random(3)

    def some(k: int = 4) -> str:
        return " ".join(rng.choices(WORDS, k=k))

    def math(i: int) -> dict[str, Any]:
        return {"question": f"{some()} {i}?", "answer": f"{some()} <<1+{i}={1 + i}>>\n#### {1 + i}"}

    def subject_rows(many: int) -> list[dict[str, Any]]:
        return [
            {
                "subject": config["dataset_name"],
                "question": f" {some()} {i}? ",
                "choices": [some(2) for _ in range(4)],
                "answer": rng.randrange(4),
            }
            for config in definitions("mmlu").values()
            for i in range(many)
        ]

    return {
        "humaneval": [
            {
                "task_id": f"HumanEval/{i}",
                "prompt": f"def f{i}(x):\n",
                "entry_point": f"f{i}",
                "canonical_solution": f"    return x + {i}\n",
                "test": f"def check(f):\n    assert f(1) == {1 + i}\n",
            }
            for i in range(count)
        ],
        "piqa_validation": [
            {"goal": some(), "sol1": some(), "sol2": some(), "label": i % 2} for i in range(count)
        ],
        "arc_challenge_test": [
            {
                "id": f"row{i}",
                "question": some(),
                "choices": [some(2) for _ in range(4)],
                "labels": ["1", "2", "3", "4"] if i == 1 else ["A", "B", "C", "D"],
                "answerKey": "2" if i == 1 else "C",
                "label": 1 if i == 1 else 2,
            }
            for i in range(count)
        ],
        "mmlu_test": subject_rows(1),
        "mmlu_dev": subject_rows(5),
        "gsm8k_test": [math(i) for i in range(count)],
        "gsm8k_train": [math(i) for i in range(30, 50)],
    }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmarks")
    for stem, many in rows().items():
        write_jsonl(folder / f"{stem}.jsonl", many)
    return folder


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for the 512 tokens of HumanEval."""
    folder = tmp_path_factory.mktemp("long")
    return save_tiny_folder(folder, texts=[" ".join(WORDS)], max_position_embeddings=4096)


@pytest.fixture
def finished(make_run: Runner, long_model: Path, corpus: Path, tmp_path: Path) -> Callable:
    """Evaluate in one run folder, whose earlier stages are made once."""

    def run(*overrides: str, said: list[str] | None = None) -> Path:
        config = settings.load(None, [*small_run(long_model, corpus), *overrides])
        reporter = Reporter((said if said is not None else []).append)
        return pipeline.run(config, tmp_path / "run", "evaluation", reporter)

    return run


def rendered(task: Any) -> list[tuple[Any, ...]]:
    with silenced():
        task.build_all_requests(limit=None, rank=0, world_size=1)
    return [(r.request_type, r.doc_id, r.idx, r.args) for r in task.instances]


@pytest.mark.parametrize("name", ["piqa", "arc_challenge", "gsm8k", "mmlu", "humaneval"])
def test_requests_are_the_harnesss_own(
    name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness's TaskManager loads its task by name, and gets the same rows from its loader."""
    import evaluate

    class CodeEval:
        """Stands where the hub's code_eval would be."""

        @staticmethod
        def compute(references: list[str], predictions: list[list[str]], k: list[int]) -> Any:
            (test,), ((candidate,),) = references, predictions
            entry = test.rpartition("check(")[2].strip(")\n")
            return {"pass@1": float(run_candidate(Program(candidate, test, entry)).passed)}, {}

    monkeypatch.setattr(evaluate, "load", lambda _: CodeEval)
    theirs = harness_tasks(name, data_dir)
    ours = {t.task_name: t for t in build_tasks(name, str(data_dir), lambda **_: {"pass@1": 0.0})}
    assert set(ours) == set(theirs) and len(ours) == (57 if name == "mmlu" else 1)
    for leaf, task in theirs.items():
        if name == "humaneval":
            task.config.generation_kwargs["max_gen_toks"] = 512
        assert rendered(ours[leaf]) == rendered(task)
        for mine, other in zip(ours[leaf].instances, task.instances, strict=True):
            text = "The answer is 31.\n#### 31" if name == "gsm8k" else "    return x + 1\n"
            mine.resps = other.resps = [text if BENCHMARKS[name].generates else (-1.0, False)]
        ours[leaf].apply_filters()
        task.apply_filters()
        for mine, other in zip(ours[leaf].instances, task.instances, strict=True):
            assert mine.filtered_resps == other.filtered_resps
        if name == "humaneval":
            scores = [
                task.process_results(r.doc, [r.filtered_resps["create_test"]])["pass@1"]
                for r in task.instances
            ]
            assert scores == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_scores_equal_the_harnesss_evaluate(
    finished: Callable, data_dir: Path, long_model: Path
) -> None:
    """The whole stage against the harness's evaluate, tasks and model loading."""
    folder = finished(f"evaluation.tasks={','.join(NAMES)}", f"evaluation.data_dir={data_dir}")
    tasks = json.loads((folder / "7_evaluation/results.json").read_text())["tasks"]
    for side, model in (("before", long_model), ("after", folder / "6_finetune/model")):
        ours = {name: tasks[name][side]["score"] for name in NAMES}
        for name in ("piqa", "arc_challenge"):
            ours[f"{name} acc_norm"] = tasks[name][side]["other_metrics"]["acc_norm"]
        theirs, texts = harness_scores(model, data_dir, None, 3)
        assert ours == pytest.approx(theirs)
        [mine, *_] = (row for row in compared(folder, side, theirs, texts) if "same_texts" in row)
        assert mine["same_texts"] == mine["items"] == 6


@pytest.mark.slow
def test_results_samples_and_losses(finished: Callable, data_dir: Path) -> None:
    said: list[str] = []
    folder = finished(
        f"evaluation.tasks={ALL}",
        f"evaluation.data_dir={data_dir}",
        "evaluation.limit_tasks=2",
        "evaluation.allow_code_execution=true",
        "evaluation.domain=math",
        said=said,
    )
    results = json.loads((folder / "7_evaluation/results.json").read_text())
    tasks, summary = results["tasks"], results["summary"]
    assert list(tasks) == ALL.split(",") and "validation" in results["files"]
    lines = (folder / "7_evaluation/samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    for name, facts in tasks.items():
        own = [row for row in samples if row["task"] == name]
        for side in ("before", "after"):
            mean = sum(row[f"score_{side}"] for row in own) / len(own)
            assert facts[side]["score"] == mean
            assert facts[side]["items"] == len(own) == (57 if name == "mmlu" else 2)
            low, high = facts[side]["interval"]
            assert low <= mean <= high
            wrong = facts[side]["format_errors"]
            assert (wrong is None) == (not BENCHMARKS[name].generates)
            if wrong is not None:
                assert wrong == sum(row[f"format_error_{side}"] for row in own)
                assert all(isinstance(row[f"text_{side}"], str) for row in own)
    assert len({(row["task"], row["id"]) for row in samples}) == len(samples) == 65
    for side in ("before", "after"):
        rest = [tasks[n][side]["score"] for n in ("piqa", "arc_challenge", "mmlu", "humaneval")]
        found = summary[side]
        assert found["stability"] == pytest.approx(sum(rest) / 4)
        assert found["plasticity"] == tasks["gsm8k"][side]["score"]
        assert found["overall"] == pytest.approx((found["stability"] + found["plasticity"]) / 2)
    assert summary["domain"] == "math" and any("first 2 items" in n for n in summary["notes"])
    assert any(line.startswith("GSM8K (after): ") for line in said)
    table = pq.read_table(folder / "7_evaluation/losses.parquet").to_pydict()
    facts = results["files"]["validation"]
    assert set(table["set"]) == {"validation"} and len(set(table["id"])) == facts["examples"]
    count = facts["examples"]
    assert sum(table["loss_before"]) / count == pytest.approx(facts["before"]["loss"])
    assert sum(table["loss_after"]) / count == pytest.approx(facts["after"]["loss"])
    assert sum(table["kl"]) / count == pytest.approx(facts["after"]["kl_to_base"])


def test_a_killed_evaluation_goes_on_from_its_answers(
    finished: Callable, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second model's last task fails once; what was answered is not asked again."""
    overrides = ["evaluation.tasks=piqa,arc_challenge", f"evaluation.data_dir={data_dir}"]
    overrides.append("resume.every=0")
    whole = finished(*overrides)
    wanted = (whole / "7_evaluation/results.json").read_bytes()
    samples = (whole / "7_evaluation/samples.jsonl").read_bytes()
    asked: list[str] = []
    real = benchmarking.Answers._ask

    def ask(self: Any, lm: Any) -> None:
        asked.append(self.label)
        if self.label == "ARC-C (after)" and len(asked) == 4:
            raise RuntimeError("killed")
        real(self, lm)

    monkeypatch.setattr(benchmarking.Answers, "_ask", ask)
    (whole / "7_evaluation/results.json").unlink()
    with pytest.raises(RuntimeError, match="killed"):
        finished(*overrides)
    asked.clear()
    finished(*overrides)
    assert asked == ["ARC-C (after)"]
    assert (whole / "7_evaluation/results.json").read_bytes() == wanted
    assert (whole / "7_evaluation/samples.jsonl").read_bytes() == samples


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_comparison_shares_the_base_models_answers(
    workers: int, long_model: Path, corpus: Path, data_dir: Path, tmp_path: Path
) -> None:
    """The base's answers are kept by the requests themselves; benchmarks make the table."""
    path = tmp_path / "matrix.yaml"
    path.write_text("methods: [random, random+random, s2ft]\nseeds: [42]\n")
    words = [*small_run(long_model, corpus), "finetune.epochs=1", "evaluation.limit_tasks=3"]
    words += ["evaluation.tasks=piqa,arc_challenge", f"evaluation.data_dir={data_dir}"]
    matrix, out, said = load_matrix(path, words), tmp_path / "out", []
    assert run_matrix(matrix, out, Reporter(said.append), workers=workers) == {}
    for log in out.glob("logs/**/*.log"):
        said += log.read_text().splitlines()
    reused = sum("reusing the base model's answers from another run" in line for line in said)
    assert reused == 4 if workers == 1 else reused <= 4  # at once, several may compute them
    one, two, three = (
        json.loads((out / c.path / "7_evaluation/results.json").read_text())["tasks"]
        for c in matrix.cells()
    )
    assert [one[t]["before"] for t in one] == [two[t]["before"] for t in two]
    assert [one[t]["before"] for t in one] == [three[t]["before"] for t in three]
    write_tables(matrix, out, "random")
    [results, _] = json.loads((out / "comparison.json").read_text())["tables"]
    rows = {row["name"]: row["values"] for row in results["rows"]}
    assert rows["base model"]["task.piqa"]["mean"] == one["piqa"]["before"]["score"]
    assert (
        rows["random+random"]["task.arc_challenge"]["mean"]
        == (two["arc_challenge"]["after"]["score"])
    )


@pytest.mark.parametrize("damage", [b"", b'{"facts": {', b'{"facts": {"answers": {}}}', b"[1]"])
def test_damaged_shared_answers_are_not_read(damage: bytes, tmp_path: Path) -> None:
    said: list[str] = []
    shared: Any = object.__new__(benchmarking.SharedAnswers)
    shared.path = RunPath(tmp_path) / "a/piqa-0.json"
    shared.reporter = SimpleNamespace(warn=said.append)
    assert shared.read() is None and said == []
    facts = {"answers": {"0": [-1.5, True], "1": "é"}, "truncated": 0}
    shared.write(facts)
    assert shared.read() == facts
    changed = shared.path.read_text(encoding="utf-8").replace("-1.5", "-1.25")
    for content in (damage, changed.encode()):
        shared.path.write_bytes(content)
        assert shared.read() is None and "piqa-0.json: damaged" in said.pop()


@pytest.mark.parametrize(("device", "sizes"), [("cuda", [32, 16, 8]), ("cpu", [2, 1])])
def test_generated_answers_go_in_larger_batches_on_a_gpu(device: str, sizes: list[int]) -> None:
    """Lack of memory halves them; the batches of the other benchmarks are as before."""
    asked, said = list[int](), list[str]()

    class Model:
        batch_size_per_gpu = 2
        batch_size = property(lambda self: self.batch_size_per_gpu)

        def generate_until(self, requests: list[Any], disable_tqdm: bool) -> list[str]:
            asked.append(self.batch_size)
            if self.batch_size > sizes[-1]:
                raise torch.OutOfMemoryError
            return ["x"] * len(requests)

    answers = object.__new__(benchmarking.Answers)
    reporter = Reporter(said.append)
    answers.ctx = SimpleNamespace(device=torch.device(device), reporter=reporter, pieces=Pieces())  # pyright: ignore[reportAttributeAccessIssue]
    answers.benchmark, answers.label, answers.shared = BENCHMARKS["gsm8k"], "t", None
    answers.given, answers.piece_name = {0: "there"}, "p"
    answers.requests = [SimpleNamespace(args=("q",), request_type="generate_until")] * 6
    lm = Model()
    answers._ask(lm)
    assert [size for size, _ in itertools.groupby(asked)] == sizes and len(answers.given) == 6
    assert lm.batch_size == (2 if device == "cuda" else 1)
    last = 1 if device == "cpu" else max(1, sizes[-1] // benchmarking.GENERATED)
    assert any(f"evaluation.task_batch_size={last} starts with it" in line for line in said)


def test_summary_is_null_where_a_task_is_missing() -> None:
    side = {"score": 0.5}
    tasks = {n: {"limit": None, "before": side, "after": side} for n in ("piqa", "humaneval")}
    found = benchmarking.summary(tasks, "code")
    assert found["before"] == {"stability": None, "plasticity": 0.5, "overall": None}
    assert "arc_challenge, mmlu, gsm8k" in found["notes"][0]
    found = benchmarking.summary({"piqa": tasks["piqa"]}, "math")
    assert found["after"] == {"stability": None, "plasticity": None, "overall": None}


def test_wilson_against_published_values() -> None:
    """Newcombe 1998, table I, method 3: 81 of 263, and 0 of 20."""
    assert benchmarking.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert benchmarking.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_what_is_missing_is_said_before_any_stage(
    tmp_path: Path, data_dir: Path, long_model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gsm8k_test.jsonl").symlink_to(data_dir / "gsm8k_test.jsonl")
    base = small_run(long_model, corpus)
    config = settings.load(
        None, [*base, "evaluation.tasks=gsm8k", f"evaluation.data_dir={tmp_path}"]
    )
    with pytest.raises(ConfigError, match="gsm8k_train.jsonl"):
        pipeline.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    values = {"evaluation.tasks": "piqa", "evaluation.backend": "vllm"}
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    first, second = task_problems(values)
    assert "pip install 'dualsft[eval]'" in first and "pip install vllm" in second
    monkeypatch.undo()
    check_paths(settings.load(None, [*base, "evaluation.tasks=piqa"]))


def _mmlu(choices: str, answer: str) -> str:
    return f'{{"subject": "s", "question": "x", "choices": {choices}, "answer": {answer}}}'


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("piqa", "{", "2: not valid JSON"),
        ("piqa", '{"goal": "x", "sol1": "y", "label": 0}', "2: field 'sol2' is missing"),
        (
            "arc_challenge",
            '{"question": "x", "choices": ["a"], "labels": ["A"], "answerKey": "B"}',
            "answerKey 'B' is not one",
        ),
        ("arc_challenge", '{"question": "x", "choices": ["a"], "answerKey": "B"}', "a label"),
        ("piqa", '{"goal": "x", "sol1": "y", "sol2": "z", "label": -1}', "'label' is -1"),
        ("gsm8k", '{"question": "x", "answer": "4"}', "no number after ####"),
        ("humaneval", '{"task_id": "1", "prompt": 3, "test": "", "entry_point": ""}', "'prompt'"),
        ("mmlu", _mmlu('["a", "b", "c"]', "1"), "four strings"),
        ("mmlu", _mmlu('["a", "b", "c", "d"]', "4"), "'answer' is 4"),
    ],
)
def test_a_wrong_row_is_named(name: str, line: str, words: str, tmp_path: Path) -> None:
    stem = next(iter(BENCHMARKS[name].files.values()))
    path = write_jsonl(tmp_path / f"{stem}.jsonl", rows()[stem][:1])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=words):
        benchmark_tasks.task_rows(path, BENCHMARKS[name])


def test_a_model_without_room_for_answers_is_refused_before_any_stage(
    model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    """The tiny model has 256 positions, and HumanEval generates 512 tokens."""
    for name, many in rows().items():
        write_jsonl(tmp_path / f"{name}.jsonl", many)
    words = ["evaluation.tasks=humaneval", f"evaluation.data_dir={tmp_path}"]
    words += ["evaluation.allow_code_execution=true"]
    config = settings.load(None, [*small_run(model_folder("llama"), corpus), *words])
    with pytest.raises(ConfigError, match="humaneval generates 512 tokens .* only 256 positions"):
        pipeline.run(config, tmp_path / "run", None, Reporter(lambda _: None))
    assert not (tmp_path / "run").exists()
    pipeline.run(config, tmp_path / "run", "split", Reporter(lambda _: None))


def test_wrong_rows_are_told_before_any_stage(tmp_path: Path) -> None:
    made = rows()
    write_jsonl(tmp_path / "gsm8k_test.jsonl", made["gsm8k_test"])
    write_jsonl(tmp_path / "gsm8k_train.jsonl", made["gsm8k_train"][:4])
    values = {"evaluation.tasks": "gsm8k", "evaluation.data_dir": str(tmp_path)}
    (problem,) = benchmark_tasks.task_problems(values)
    assert "gsm8k_train.jsonl: has 4 rows and gsm8k needs 5" in problem


def test_mmlu_is_never_a_mean_over_fewer_subjects(tmp_path: Path) -> None:
    made = rows()
    write_jsonl(tmp_path / "mmlu_dev.jsonl", made["mmlu_dev"])
    write_jsonl(tmp_path / "mmlu_test.jsonl", made["mmlu_test"][1:])
    with pytest.raises(DataError, match="1 of 57 subjects"):
        build_tasks("mmlu", str(tmp_path))


def test_the_right_answers_score_one(finished: Callable, data_dir: Path) -> None:
    """Canonical solutions pass, wrong ones fail, and what is no program is a format error."""
    evaluation = SimpleNamespace(data_dir=str(data_dir), limit_tasks=3, allow_weak_sandbox=False)
    ctx: Any = SimpleNamespace(
        answers=None,
        config=SimpleNamespace(evaluation=evaluation),
        pieces=Pieces(),
        reporter=Reporter(lambda _: None),
    )
    texts = {"humaneval": ["    return x + 0\n", "    return 7\n", "    return (\n"]}
    texts["gsm8k"] = ["So #### 1", "it is 2", "nothing"]
    wanted = {"humaneval": [0, 0, 1], "gsm8k": [0, 1, 1]}
    for name, many in texts.items():
        answers = benchmarking.Answers(ctx, name, "before")
        answers.given = dict(enumerate(many))
        outcome = answers.outcome(None)
        assert [item.score for item in outcome.items] == [1.0, 0.0, 0.0]
        assert [item.format_error for item in outcome.items] == [bool(w) for w in wanted[name]]
    assert outcome.others == {"exact_match (flexible-extract)": pytest.approx(2 / 3)}


def test_the_flag_is_the_setting() -> None:
    from dualsft.cli import parse_words, with_consent
    from dualsft.runs.preflight import check_consent

    words = ["model.path=m", "data.path=d", "evaluation.tasks=humaneval"]
    allowed = settings.load(*parse_words(with_consent(words, True)))
    assert allowed.evaluation.allow_code_execution
    check_consent(allowed, None)
    config = settings.load(*parse_words(with_consent(words, False)))
    check_consent(config, "finetune")  # nothing runs before the evaluation
    for until in ("evaluation", None):
        with pytest.raises(ConfigError, match="allow-code-execution"):
            check_consent(config, until)
