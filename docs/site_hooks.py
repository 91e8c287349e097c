"""Hooks of the docs site (mkdocs.yml): pages from the top of the repository, and an offline check.

README.md is the site's first page; CONTRIBUTING.md, CHANGELOG.md, SECURITY.md, the licence and
`examples/` are copied beside it, and links between them and docs/ are changed to match. A built
page that would load anything over the network ends the build.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
BESIDE = ["LICENSE", "CITATION.cff", "Dockerfile", "examples/*"]
LOADING = {"src", "srcset", "poster", "data", "action", "background"}
CSS_LOAD = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])\s*(?:https?:)?//[^'\")\s]+")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files that are outside docs/."""
    from mkdocs.structure.files import File

    for name, page in TOP.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for path in sorted(path for pattern in BESIDE for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as they are in the repository, changed to the places of the site."""
    markdown = re.sub(r"\]\((?:docs/|\.\./)", "](", markdown)
    return markdown.replace("](README.md", "](index.md")


def on_post_build(config: Any) -> None:
    """End the build if a page or a style sheet loads anything from elsewhere."""
    from mkdocs.exceptions import PluginError

    loads = {}
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in (".html", ".css"):
            text = path.read_text(encoding="utf-8")
            found = loaded(text) if path.suffix == ".html" else CSS_LOAD.findall(text)
            if found:
                loads[str(path)] = found
    if loads:
        raise PluginError(f"these pages load from the network: {loads}")


def loaded(html: str) -> list[str]:
    """The addresses outside the site that a browser would load to show a page."""
    parser = _Loads()
    parser.feed(html)
    return parser.found


class _Loads(HTMLParser):
    """Collects what a page loads: sources, link elements, styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        names = LOADING | (
            {"href"} if tag == "link" and values.get("rel") != "canonical" else set()
        )
        self.found += [
            f"{tag} {value}"
            for name, value in attrs
            if name in names and value and re.match(r"(?:\w+:)?//", value)
        ]
        self.found += CSS_LOAD.findall(values.get("style") or "")

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() and str(self.get_starttag_text()).startswith("<style"):
            self.found += CSS_LOAD.findall(data)
