"""On a CUDA device: kills and a resume to the same bits, and a GPU whose memory really runs out."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Runner, corpus_rows, small_run, write_jsonl
from faults import Launcher, content
from models import save_tiny_folder, tiny_examples, tiny_model
from safetensors.torch import load_file

from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings, loss_objective, walk
from dualsft.model.load import find_candidates
from dualsft.storage.vectors import ParamVector
from dualsft.system.progress import Reporter

pytestmark = pytest.mark.gpu

SETTINGS = ("model.device=cuda", "model.deterministic=true", "score.candidates=all")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launcher, list[str], Path]]:
    folder = tmp_path_factory.mktemp("gpu")
    rows = corpus_rows(60)
    model = save_tiny_folder(folder / "model", "llama_tied_bias", [str(row) for row in rows])
    words = [*small_run(model, write_jsonl(folder / "rows.jsonl", rows)), *SETTINGS]
    launcher = Launcher(folder / "log")
    yield launcher, words, folder
    launcher.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_and_resumed_to_the_same_bits(
    bench: tuple[Launcher, list[str], Path], dtype: str
) -> None:
    """Ten kills at moments spread over the run, each finished by the same command."""
    launcher, words, folder = bench
    words = [*words, f"model.dtype={dtype}", "finetune.epochs=20", "warmup.min_steps=20"]
    start = time.monotonic()
    assert launcher.run(["run", "--out", str(folder / dtype), *words]) == 0, launcher.said
    seconds = time.monotonic() - start
    expected, alive = content(folder / dtype), 0
    for number in range(10):
        out = folder / f"{dtype}-{number}"
        command = ["run", "--out", str(out), *words, "resume.every=0"]
        pid = launcher.start(command)
        time.sleep(seconds * (number + 0.5) / 10)
        launcher.signal(pid, signal.SIGKILL)
        alive += launcher.wait() != 0
        assert launcher.run(command) == 0, launcher.said
        assert content(out) == expected, number
    print(dtype, "kills of a living run:", alive)
    assert alive >= 5


def test_sigterm_saves_on_a_gpu(bench: tuple[Launcher, list[str], Path]) -> None:
    launcher, words, folder = bench
    command = ["run", "--out", str(folder / "term"), *words, "warmup.min_steps=300"]
    pid = launcher.start(command)
    while "[warmup] " not in launcher.said or "warmup: " not in launcher.said:
        time.sleep(0.01)
    launcher.signal(pid, signal.SIGTERM)
    assert launcher.wait() == 143 and "saved warmup: step" in launcher.said
    assert launcher.run(command) == 0 and "resuming after" in launcher.said


def filled_gpu(keep: int) -> torch.Tensor:
    """Take all but `keep` bytes of the free memory."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - keep, dtype=torch.uint8, device="cuda")


def test_a_walk_survives_real_lack_of_memory() -> None:
    model = tiny_model("llama", torch.float64, hidden_size=512, intermediate_size=2048).cuda()
    engine = GhostEngine(model, find_candidates(model, "all"))
    rows = tiny_examples(256, 97, 3, max_length=200)
    examples = [Example(e.id, e.index, list(e.input_ids), list(e.labels)) for e in rows]
    said: list[str] = []

    def scored(batch_tokens: int) -> tuple[ParamVector, torch.Tensor]:
        sums = ParamVector.zeros(engine.candidates)
        settings = PassSettings(batch_tokens=batch_tokens, pad_id=0, padding_side="right")
        reporter = Reporter(said.append)
        objective = loss_objective(model)
        result = walk(engine, examples, objective, settings, reporter, "pool", sums=sums)
        return sums, torch.from_numpy(result.values)

    expected = scored(2048)
    ballast = filled_gpu(600 << 20)
    got = scored(1 << 20)
    del ballast
    warnings = [line for line in said if "out of memory" in line]
    print(warnings)
    assert warnings
    torch.testing.assert_close(got[1], expected[1], rtol=1e-9, atol=1e-9)
    for name, block in expected[0].items():
        error = float((block - got[0][name]).norm() / block.norm())
        assert error < 1e-9, (name, error)


def test_a_whole_run_survives_real_lack_of_memory(
    make_run: Runner, model_folder: Callable[[str], Path]
) -> None:
    """The same selection with a budget of tokens that cannot fit as with a small one."""
    options = ("model.device=cuda", "select.data_budget=12")
    small = make_run(*options, "score.batch_tokens=64", out="small")
    ballast = filled_gpu(64 << 20)
    said: list[str] = []
    try:
        large = make_run(*options, "score.batch_tokens=100000000", out="large", said=said)
    finally:
        del ballast
    print([line for line in said if "out of memory" in line])
    for file in ("5_selection/selected.jsonl",):
        assert (small / file).read_bytes() == (large / file).read_bytes()
    losses = [json.loads((r / "7_evaluation/results.json").read_text()) for r in (small, large)]
    ours, theirs = (r["files"]["validation"]["after"]["loss"] for r in losses)
    assert ours == pytest.approx(theirs, rel=1e-4)
    deltas = [load_file(r / "6_finetune/delta.safetensors") for r in (small, large)]
    assert deltas[0].keys() == deltas[1].keys()
