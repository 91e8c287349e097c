"""The core without `lab/`: its tests run on a copy of the package from which `lab/` is deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import small_run

import dualsft

ROOT = Path(__file__).parents[1]
CORE_TESTS = ("api", "training")
MORE = ("certificate", "rundir", "split", "vectors")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from: the package as it is, without `lab/`."""
    root = tmp_path_factory.mktemp("core")
    shutil.copytree(Path(dualsft.__file__).parent, root / "dualsft")
    shutil.rmtree(root / "dualsft/lab")
    return root


def run(core: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("names", [CORE_TESTS, pytest.param(MORE, marks=pytest.mark.slow)])
def test_the_core_tests_pass(core: Path, names: tuple[str, ...]) -> None:
    files = [f"tests/test_{name}.py" for name in names]
    options = ("-p", "no:cacheprovider", "-o", f"pythonpath=. {core} tests", "-m", "not slow")
    done = run(core, "-m", "pytest", *options, *files)
    assert done.returncode == 0, done.stdout[-3000:]
    where = run(core, "-c", "import dualsft; print(dualsft.__file__)").stdout
    assert where.strip() == str(core / "dualsft/__init__.py"), "another copy was tested"


def test_a_run_up_to_the_fine_tuned_model(
    core: Path, model_folder: Callable[[str], Path], corpus: Path, tmp_path: Path
) -> None:
    words = small_run(model_folder("llama"), corpus)
    done = run(core, "-m", "dualsft", "run", "--out", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/6_finetune/model/model.safetensors").is_file()
    assert not (tmp_path / "run/7_evaluation").exists()
