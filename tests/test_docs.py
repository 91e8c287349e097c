"""Every command and script of the pages and examples runs; generated parts match the code."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import Runner, corpus_rows, write_jsonl
from nbclient import NotebookClient
from nightly import GOALS

import dualsft
from dualsft.config.methods import registry
from dualsft.config.settings import recipe_names
from dualsft.lab.compare.matrix import load_matrix
from dualsft.runs.preflight import STAGE_NAMES
from dualsft.runs.stages.split import read_split
from dualsft.system.paths import RunPath

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


@pytest.fixture(scope="module")
def workplace(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]
) -> Path:
    """What the README presupposes: models/my-model and data/my.jsonl."""
    return make_workplace(tmp_path_factory.mktemp("readme"), model_folder("llama"))


def make_workplace(folder: Path, model: Path) -> Path:
    (folder / "models").mkdir()
    (folder / "data").mkdir()
    os.symlink(model, folder / "models/my-model")
    write_jsonl(folder / "data/my.jsonl", corpus_rows(80))
    write_jsonl(folder / "data/failures.jsonl", corpus_rows(80)[:3])
    return folder


def run(words: list[str], cwd: Path) -> str:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    env |= {"PATH": programs}
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_every_shell_command_runs(workplace: Path) -> None:
    """All `dualsft …` lines, top to bottom; CI and the slow tier run the two `make` lines."""
    lines = [
        line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()
    ]
    makes = [line for line in lines if line.startswith("make ")]
    assert makes == ["make quickstart", "make test"]
    commands = [line for line in lines if line and line not in makes]
    assert commands.pop(0) == "source .venv/bin/activate"
    assert len(commands) >= 8
    for command in commands:
        words = shlex.split(command)
        launcher = {"dualsft": ["dualsft"], "torchrun": ["torch.distributed.run", "--standalone"]}
        assert words[0] in launcher, command
        run([sys.executable, "-m", *launcher[words[0]], *words[1:]], workplace)
    assert (workplace / "runs/mine/report.md").is_file()
    assert (workplace / "runs/merged/config.json").is_file()
    selected = [
        (workplace / f"runs/{name}/5_selection/selected.jsonl").read_bytes()
        for name in ("two", "sharded")
    ]
    assert selected[0] == selected[1]


def test_python_blocks_run(workplace: Path) -> None:
    (code,) = blocks("python")
    run([sys.executable, "-c", code], workplace)
    assert (workplace / "runs/python/6_finetune/model/config.json").is_file()


def test_the_script_for_ones_own_loop_runs(workplace: Path) -> None:
    """Under 30 lines of code, and it shows the best and the worst rows."""
    code, *inside = blocks("python", (ROOT / "docs/python.md").read_text(encoding="utf-8"))
    for block, name in zip(inside, ("trl_sft", "trl_callback"), strict=True):
        assert block in (ROOT / f"examples/{name}.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in code.splitlines()) < 30
    shown = run([sys.executable, "-c", code], workplace)
    assert "val_quantile" in shown and "True" in shown and "False" in shown


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> Path:
    """What the pages presuppose: the README's things, a finished run, two adapters of it."""
    folder = make_workplace(tmp_path_factory.mktemp("pages"), model_folder("llama"))
    given = ["model.path=models/my-model", "data.path=data/my.jsonl"]
    run(["dualsft", "run", "recommended", "--out", "runs/mine", *given], folder)
    delta = ["models/my-model", "runs/mine/6_finetune/delta.safetensors"]
    for name in ("a", "b"):
        run(["dualsft", "export", "adapter", *delta, f"runs/adapter-{name}"], folder)
    return folder


BLOCK = re.compile(r'```(\w*)(?: title="([^"]*)")?\n(.*?)```', re.S)
ELSEWHERE = {
    "README.md": "test_every_shell_command_runs, test_python_blocks_run",
    "python.md": "test_the_script_for_ones_own_loop_runs",
    "methods.md": "test_a_method_of_ones_own; its one command is the README's",
    "CONTRIBUTING.md": "make env, lint, test: .ci/run",
}
"""Pages whose blocks other tests run."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorial", "integrations", "adapters", "explain"])
def test_every_block_of_a_page_runs(name: str, finished: Path, tmp_path: Path) -> None:
    """From top to bottom; a block with a title is a file. The tiny model is the tutorial's."""
    place = tmp_path if name == "tutorial" else finished
    text = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    text = text.replace("smollm2-135m", str((finished / "models/my-model").resolve()))
    for language, title, code in BLOCK.findall(text):
        if title:
            (place / title).write_text(code, encoding="utf-8")
        elif language == "bash":
            run(["bash", "-euo", "pipefail", "-c", code], place)
        elif language == "python":
            run([sys.executable, "-c", code], place)


def test_every_block_says_what_it_is() -> None:
    """bash and python blocks are run by a test; console is for what this machine has not."""
    for page in PAGES:
        found = {language for language, _, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
        assert found <= {"bash", "python", "console", "text", "yaml", "toml"}, page.name
        if found & {"bash", "python"} and page.name not in ELSEWHERE:
            marks = getattr(test_every_block_of_a_page_runs, "pytestmark", [])
            (names,) = [mark.args[1] for mark in marks if mark.name == "parametrize"]
            assert page.stem in names, f"no test runs the blocks of {page.name}"


def test_a_method_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Runner
) -> None:
    """The package of docs/methods.md, found by its entry point, selects what it says."""
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    own = text[text.index("## A method of your own") : text.index("## Comparing")]
    package, information = tmp_path / "my_package", tmp_path / "my_package-1.dist-info"
    package.mkdir()
    information.mkdir()
    (information / "METADATA").write_text("Name: my-package\nVersion: 1\n")
    for language, title, code in BLOCK.findall(own):
        if language == "python":
            (tmp_path / title).write_text(code)
        else:
            points = tomllib.loads(code)["project"]["entry-points"]["dualsft.methods"]
            lines = [f"{name} = {target}\n" for name, target in points.items()]
            (information / "entry_points.txt").write_text("[dualsft.methods]\n" + "".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.cache_clear()
    try:
        run = make_run("method.data=shortest", "method.params=all", until="selection")
    finally:
        registry.cache_clear()
    roles = read_split(RunPath(run) / "1_split", None)
    ids = set(json.loads((run / "5_selection/ids.json").read_text()))
    offered = [*roles["pool"], *roles["warm"]]
    chosen = [example.num_response_tokens for example in offered if example.id in ids]
    others = [example.num_response_tokens for example in offered if example.id not in ids]
    assert 0 < len(chosen) == len(ids) and max(chosen) <= min(others)


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stripped(path: Path) -> None:
    """No outputs, no counters, no path of a machine."""
    text = path.read_text(encoding="utf-8")
    for cell in nbformat.reads(text, 4).cells:
        assert cell.cell_type != "code" or not (cell.outputs or cell.execution_count)
    assert not re.search(r"[\"' ]/(home|work|root|tmp|Users)/", text)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_exist(page: Path) -> None:
    """Every relative link of a page leads to a file, and its anchor to a title."""
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        file = page.parent / target if target else page
        assert file.is_file(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in {slug(title) for title in titles}, f"{page.name}: {target}#{anchor}"


def slug(title: str) -> str:
    """The anchor that a Markdown page gives a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_source_files_exist(page: Path) -> None:
    """Paths of modules, tests and tools in code spans are files of the repository."""
    text = page.read_text(encoding="utf-8")
    folders = {path.name for path in (ROOT / "src/dualsft").iterdir() if path.is_dir()}
    for name in re.findall(r"`([\w/]+/[\w/]*\w\.py)(?:::?[ \w]+)?`", text):
        known = [ROOT / name, ROOT / "src" / name, ROOT / "src/dualsft" / name]
        assert name.split("/")[0] not in folders or known[2].is_file(), f"{page.name}: {name}"
        assert any(path.is_file() for path in known), f"{page.name}: {name}"


def test_no_page_names_a_page_that_is_not_here() -> None:
    for page in PAGES:
        for name in re.findall(r"\b[A-Z]{3,}\.md\b", page.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_recipes_and_stages_are_named() -> None:
    assert recipe_names() and all(f"`{name}`" in README for name in recipe_names())
    assert STAGE_NAMES and ", ".join(STAGE_NAMES) in README


def test_verdicts_follow_from_the_raw_files(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is what the raw numbers give, and other numbers give other verdicts."""
    page = (ROOT / "docs/verdict.md").read_text(encoding="utf-8")
    assert generate.with_verdicts(page) == page
    edited = page.replace("**not confirmed**", "confirmed", 1)
    assert edited != page and generate.with_verdicts(edited) == page
    verdict = importlib.import_module("verdict")
    own = {claim.text: claim.judge() for claim in verdict.CLAIMS}
    assert len(own) == len(verdict.CLAIMS) >= 40
    assert {holds for _, holds in own.values()} == {True, False, None}

    def mirrored(value: Any) -> Any:
        """The raw numbers with their order turned around."""
        if isinstance(value, dict):
            return {key: mirrored(item) for key, item in value.items()}
        if isinstance(value, list):
            return [mirrored(item) for item in value]
        return -value if isinstance(value, float) else value

    for name in ("read", "read_pools"):
        raw = getattr(verdict, name)
        monkeypatch.setattr(verdict, name, lambda file, raw=raw: mirrored(raw(file)))
    held = [claim for claim in verdict.CLAIMS if own[claim.text][1]]
    kept = [claim.text for claim in held if claim.judge()[1]]
    assert not kept, kept


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """docs/generate.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generate")


def test_map_of_the_package_is_generated_from_the_docstrings(generate: Any) -> None:
    assert generate.with_rooms(README) == README
    rooms = [path.parent.name for path in (ROOT / "src/dualsft").glob("*/__init__.py")]
    assert len(rooms) >= 10
    assert all(f"| `{room}/` | " in README for room in rooms)


def with_another_digit(page: str, mark: str) -> str:
    """The page with one digit of the last number in the table behind this mark changed."""
    start = page.index(f"<!-- {mark} -->")
    end = page.index("<!-- end -->", start)
    at = max(i for i in range(start, end) if page[i].isdecimal())
    return f"{page[:at]}{(int(page[at]) + 1) % 10}{page[at + 1 :]}"


def test_config_page_is_generated_from_the_code(generate: Any) -> None:
    assert (ROOT / "docs/config.md").read_text(encoding="utf-8") == generate.render()


def test_reference_pages_are_generated_from_the_code(generate: Any) -> None:
    """Every public name with its signature; the messages and warnings as the code gives them."""
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert generate.api_page() == page
    for name in dualsft.__all__:
        assert re.search(rf"(### |\| `)dualsft\.{name}\b", page), name
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert generate.with_messages(page) == page
    for mark in ("mistakes", "warnings"):
        start = page.index(f"<!-- {mark} -->")
        edited = page[:start] + page[start:].replace("give", "take", 1).replace("Give", "Take", 1)
        assert edited != page and generate.with_messages(edited) == page


def test_scaling_table_is_generated_from_the_formulas(generate: Any) -> None:
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    assert generate.with_table(page) == page
    assert generate.with_table(with_another_digit(page, "table")) == page
    assert page.count("| Llama-3.1-405B, ") == 4


def test_result_tables_are_generated_from_the_raw_files(generate: Any) -> None:
    """Every method of the recipe stands in the tables of losses, costs and benchmarks."""
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert generate.with_tables(page) == page
    marks = re.findall(r"<!-- (?!end )(\w+) -->", page)
    prototype, package = ["forms", "damping"], ["found", "pools", "warmups"]
    package += ["pools64", "others64", "target_share", "masks64"]
    package += ["pools89", "others89", "frontier", "which_mask", "gemma", "lds", "agreement"]
    assert marks == ["losses", "seeds", "costs", "benchmarks", *prototype, *package]
    for mark in marks:
        assert generate.with_tables(with_another_digit(page, mark)) == page, mark
    names = [cell.method.name for cell in load_matrix("smollm2_gsm8k", ["data.path=x"]).cells()]
    assert len(names) == 26
    for name in names:
        assert len(re.findall(rf"\| \*?\*?{re.escape(name)}\*?\*? \|", page)) >= 3, name


def fault_rows() -> dict[int, list[str]]:
    """Cells of the table in docs/reliability.md, by number: class, goal, fast, slow, nightly, …"""
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    rows = [
        line.strip("| ").split("|") for line in page.splitlines() if re.match(r"\| \d+ \|", line)
    ]
    return {int(cells[0]): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_every_class_of_faults_has_a_row_and_a_command() -> None:
    rows = fault_rows()
    assert list(rows) == list(range(1, 26))
    for number, cells in rows.items():
        assert len(cells) == 7 and cells[5].startswith("`"), number
        for name in re.findall(r"tests/[\w/]+(?:\.py)?", cells[5]):
            assert (ROOT / name).exists(), name


def test_nightly_goals_are_those_of_the_page() -> None:
    rows, fuzz = fault_rows(), {n: goal for n, goal in GOALS.items() if n.startswith("fuzz ")}
    assert rows[2][4] == f"{GOALS['kills']:,}"
    assert rows[7][4] == f"{GOALS['flips']:,} / {GOALS['cuts']:,}"
    assert rows[22][4] == f"{GOALS['cycles']:,}"
    assert set(fuzz.values()) == {6_000_000} and rows[16][4] == f"{len(fuzz)} × 6 million"


COUNTED = {
    4: ("distributed/test_failures.py", "distributed/test_kills_world.py"),
    5: ("distributed/test_same_answer.py",),
    9: ("test_disk.py",),
    10: ("test_nonfinite.py",),
    13: ("test_malformed.py",),
    14: ("test_hostile_sizes.py",),
    18: ("test_malicious.py", "test_hostile_runs.py"),
    20: ("test_code_sandbox.py",),
}


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "tier"), [(2, "not slow and not gpu"), (3, "slow and not gpu")])
def test_counts_of_the_page_are_those_of_pytest(cell: int, tier: str) -> None:
    files = sorted({f"tests/{name}" for names in COUNTED.values() for name in names})
    said = run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", tier, *files], ROOT)
    counts = {name: int(count) for name, count in re.findall(r"^tests/(\S+): (\d+)$", said, re.M)}
    for number, names in COUNTED.items():
        stated = [int(n) for n in re.findall(r"\d+", fault_rows()[number][cell])]
        here = [counts[name] for name in names if name in counts]
        if number != 9 or cell == 2:  # the slow test of row 9 has 50 points in it
            assert sum(stated) == sum(here), (number, stated, here)


def test_algorithm_page_names_functions_that_exist() -> None:
    text = (ROOT / "docs/algorithm.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py): (\w+)`", text)
    assert len(named) >= 8
    for file, name in named:
        source = (ROOT / "src/dualsft" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", source, re.M), f"{file}: {name}"
