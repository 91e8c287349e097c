"""Outputs of commands that ran without a network hold no token, user, host or folder of the home.

Paths that the user gave are settings of his, so config.yaml has them as given. Nothing else has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import corpus_rows, small_run, write_jsonl
from models import save_tiny_folder

from dualsft.system.paths import without_home

USER, HOST, TOKEN = "alicia", "secrethost", "hf_SECRETtoken"
COMMANDS = """
import sys
from dualsft.cli import main
for line in sys.stdin:
    sys.argv = ["dualsft", *line.split()]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{line}: {end.code}")
"""


def alone(home: Path, lines: list[str]) -> None:
    """Run commands as a user with a name, a token and this home, in an empty network namespace."""
    source = Path(__file__).parents[1] / "src"
    env = {
        **{"PATH": os.environ["PATH"], "HOME": str(home), "USER": USER, "LOGNAME": USER},
        **{"HF_TOKEN": TOKEN, "HUGGING_FACE_HUB_TOKEN": TOKEN, "WANDB_API_KEY": TOKEN},
        **{"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
    }
    inner = ["sh", "-c", f'hostname {HOST} && exec "$@"', "sh", sys.executable, "-c", COMMANDS]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", "--uts", *inner],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        env=env,
        cwd=home,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def revealing(folder: Path) -> set[str]:
    """The files below a folder that hold one of the words; tables are read, not searched packed."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if path.suffix == ".parquet":
                table = pq.read_table(path)
                content = f"{table.to_pylist()} {table.schema.metadata}".encode()
            content += str(path.relative_to(folder)).encode()
            if any(word.encode() in content for word in (USER, HOST, TOKEN)):
                found.add(str(path.relative_to(folder)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "lora"])
def test_no_output_reveals_who_made_it(tmp_path: Path, method: str | None) -> None:
    home = tmp_path / f"home/{USER}"
    home.mkdir(parents=True)
    rows = corpus_rows(48)
    save_tiny_folder(
        home / "model", "llama", [f"{row['prompt']} {row['response']}" for row in rows]
    )
    file = write_jsonl(home / "rows.jsonl", [*rows, {"prompt": "", "response": ""}])
    words = [*small_run(home / "model", file), f"evaluation.files=held:{file}"]
    words += ["finetune.epochs=1", "data.bad_rows=skip", f"method.params={method or 'dualsft'}"]
    words += ["select.param_budget=0.2"] if method else []
    lines = [f"run --out {home}/out/run {' '.join(words)}"]
    if method is None:
        lines[0] += " score.form=calibrated method.data=dualsft score.keep=all"
        lines += [f"explain {home}/out/run --query {file}", f"diagnose {home}/out/run heatmap"]
        delta = f"{home}/out/run/6_finetune/delta.safetensors"
        lines += [f"export compact {home}/model {delta} {home}/out/small.safetensors"]
        lines += [f"export adapter {home}/model {delta} {home}/out/adapter --kind sparse"]
        lines += [f"export merge {home}/model {delta} {home}/out/merged"]
        lines += [f"export data {home}/out/run {home}/out/rows.jsonl --format trl"]
    alone(home, lines)
    out = home / "out"
    assert (out / "run/report.html").is_file() and len(list(out.rglob("*"))) > 50
    assert "1 of 49 rows is bad" in (out / "run/report.md").read_text()
    assert revealing(out) == {"run/config.yaml"}, (out / "run/report.md").read_text()


def test_only_the_home_itself_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/al")
    assert without_home("/home/al/x, /home/al: (/home/al/y)") == "~/x, ~: (~/y)"
    for other in ("/home/alba/x", "/mnt/home/al/x", "x/home/al", "/home/al-2"):
        assert without_home(other) == other
    monkeypatch.setenv("HOME", "/")
    assert without_home("/a/b") == "/a/b"
