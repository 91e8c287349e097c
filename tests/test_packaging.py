"""What a stranger gets: wheel, sdist, a clean installation, the docs site, the citation."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import chromium

import dualsft

ROOT = Path(__file__).parents[1]
PAGES = {path.name for path in (ROOT / "docs").glob("*.md")}


def run(*words: str | Path, cwd: Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=clean | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel): the sdist from the files of the repository, the wheel from the sdist."""
    place = tmp_path_factory.mktemp("packages")
    listed = run("git", "ls-files", "-coz", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (place / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            run("cp", "-P", ROOT / name, place / "tree" / name, cwd=ROOT)
    make = f"from setuptools import build_meta; build_meta.build_sdist({str(place)!r})"
    run(sys.executable, "-c", make, cwd=place / "tree")
    (sdist,) = place.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", place, sdist, cwd=place)
    (wheel,) = place.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_contents_of_wheel_and_sdist(packages: tuple[Path, Path]) -> None:
    sdist, wheel = packages
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = f"dualsft-{dualsft.__version__}.dist-info"
    package = {name.removeprefix("dualsft/") for name in names if name.startswith("dualsft/")}
    assert {name.partition("/")[0] for name in names} == {"dualsft", information}
    assert f"{information}/licenses/LICENSE" in names
    source = ROOT / "src/dualsft"
    wanted = {p.relative_to(source).as_posix() for p in source.rglob("*.py")}
    for folder in ("recipes", "recipes/compare", "lab/report/pages"):
        wanted |= {f"{folder}/{p.name}" for p in (source / folder).iterdir() if p.is_file()}
    assert package == wanted | {"py.typed"} | {f"docs/{name}" for name in PAGES}
    with tarfile.open(sdist) as archive:
        inner = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= inner
    assert {f"src/dualsft/{name}" for name in package} <= inner
    assert not any(name.startswith(("docs/measured", "runs")) for name in inner)


@pytest.mark.slow
def test_a_clean_installation_without_extras_runs_the_quickstart(
    packages: tuple[Path, Path], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """pip resolves and installs the wheel's own dependencies; nothing of this environment is seen.

    The model of the quickstart is fetched and converted there; its other stages run on a tiny one.
    """
    clean = tmp_path / "venv/bin"
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    pip = [clean / "python", "-m", "pip", "install", "--quiet"]
    constraints = ROOT / "constraints.txt"
    (torch,) = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
    run(*pip, torch, cwd=tmp_path)
    run(*pip, "--constraint", constraints, packages[1], cwd=tmp_path)
    where = run(clean / "python", "-c", "import dualsft; print(dualsft.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    command = clean / "dualsft"
    assert " docs " in run(command, "--help", cwd=tmp_path)
    listed = {line.split()[0] for line in run(command, "docs", cwd=tmp_path).splitlines()}
    assert {f"{name}.md" for name in listed} == PAGES
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    assert run(command, "docs", "tutorial", cwd=tmp_path).strip() == page.strip()
    cache = {"DUALSFT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    assert "ready to run" in run(command, "check", "quickstart", cwd=tmp_path, **cache)
    tiny = f"model.path={model_folder('llama')}"
    said = run(command, "quickstart", "--out", "out", tiny, "data.max_length=200", cwd=tmp_path)
    assert "wrong examples" in said and (tmp_path / "out/report.html").is_file()


def test_citation() -> None:
    """The fields that the format requires (version 1.2.0), and our own version."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["version"] == dualsft.__version__
    for work in (cited, *cited["references"]):
        assert work["title"] and work["authors"]
        assert all(
            {"name"} <= one.keys() or {"family-names"} <= one.keys() for one in work["authors"]
        )


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """docs/site_hooks.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("site_hooks")


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<a href="https://x.org">x</a><img src="figures/a.png">', 0),
        ('<script src="https://x.org/a.js"></script>', 1),
        ('<link rel="stylesheet" href="//x.org/a.css">', 1),
        ('<link rel="canonical" href="https://x.org/page">', 0),
        ('<p style="background: url(https://x.org/a.png)">', 1),
        ('<style>@import "https://x.org/a.css";</style>', 1),
        ('<img src="a.png" srcset="https://x.org/a.png 2x">', 1),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(hooks: Any, html: str, loads: int) -> None:
    assert len(hooks.loaded(html)) == loads


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """A strict build, so every link and anchor exists; then every page in a browser."""
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    run(*program, cwd=ROOT)
    pages = sorted((tmp_path / "site").glob("*.html"))
    assert {path.stem for path in pages} >= {Path(name).stem for name in PAGES} | {"index"}
    with chromium() as page:
        for path in pages:
            if path.name == "404.html":
                continue
            page.call("Page.navigate", url=path.as_uri())
            page.wait(f"document.readyState === 'complete' && location.pathname === '{path}'")
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
            assert page.js(broken) == 0, path.name
    away = [url for url in page.requests if not url.startswith(("file:", "data:"))]
    assert not away and len(page.requests) > len(pages)
