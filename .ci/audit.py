"""Known vulnerabilities of the pinned packages, checked without network: `python .ci/audit.py`.

Checks every pin of constraints.txt, and every lower bound of pyproject.toml, against the ranges in
advisories.json (the parts of OSV records that a version is compared with). Exits with 1 if one is
affected. `--update FOLDER` renews the list from a clone of github.com/pypa/advisory-database and
keeps the entries that were added by hand (`"by_hand": true`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("advisories.json")


def requirements(lock: Path, project: Path) -> Iterator[tuple[str, Requirement]]:
    """(where, requirement) of the lock and of the project's dependencies."""
    lines = (line.partition("#")[0].strip() for line in lock.read_text().splitlines())
    yield from ((lock.name, Requirement(line)) for line in lines if line)
    stated = tomllib.loads(project.read_text())["project"]
    lists = [stated["dependencies"], *stated["optional-dependencies"].values()]
    yield from ((project.name, Requirement(line)) for lines in lists for line in lines)


def lowest(requirement: Requirement) -> Version | None:
    """The pinned version, or the lowest one that is allowed."""
    bounds = [Version(s.version) for s in requirement.specifier if s.operator in ("==", ">=")]
    return max(bounds, default=None)


def affected(version: Version, advisory: Mapping[str, Any]) -> bool:
    if str(version) in advisory.get("versions", ()):
        return True
    for start, fixed, last in advisory["ranges"]:
        begun = version >= Version(start)
        over = (fixed and version >= Version(fixed)) or (last and version > Version(last))
        if begun and not over:
            return True
    return False


def findings(lock: Path, project: Path, advisories: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each version in use, or allowed, that an advisory is about."""
    found: set[str] = set()
    for where, requirement in requirements(lock, project):
        name, version = canonicalize_name(requirement.name), lowest(requirement)
        if version is None:
            found.add(f"{where}: {requirement} has no lower bound")
            continue
        for one in advisories:
            if one["package"] == name and affected(version, one):
                fixed = ", ".join(fix for _, fix, _ in one["ranges"] if fix) or "no version"
                names = ", ".join([one["id"], *one.get("aliases", [])])
                found.add(f"{where}: {name} {version} is affected by {names}; fixed in {fixed}")
    return sorted(found)


def update(clone: Path, lock: Path, project: Path) -> None:
    """Rewrite the list from the OSV records of the packages in use."""
    import yaml

    names = {canonicalize_name(one.name) for _, one in requirements(lock, project)}
    own = [one for one in json.loads(LIST.read_text())["advisories"] if one.get("by_hand")]
    git = ["git", "-C", str(clone)]

    def said(*words: str) -> str:
        return subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout

    kept: list[dict[str, Any]] = []
    for path in said("ls-tree", "-r", "--name-only", "HEAD", "vulns/").split():
        if canonicalize_name(Path(path).parent.name) not in names or not path.endswith(".yaml"):
            continue
        record = yaml.safe_load(said("show", f"HEAD:{path}"))
        if not record.get("withdrawn"):
            kept += [_condensed(record, part) for part in record["affected"]]
    new = {one["id"] for one in kept}
    kept += [one for one in own if one["id"] not in new]
    lines = ",\n".join(
        json.dumps(one) for one in sorted(kept, key=lambda x: (x["package"], x["id"]))
    )
    as_of = said("log", "-1", "--format=%cs").strip()
    head = {"source": "github.com/pypa/advisory-database (CC-BY-4.0)", "as_of": as_of}
    text = json.dumps(head)[:-1]
    LIST.write_text(f'{text}, "advisories": [\n{lines}\n]}}\n')


def _condensed(record: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """One package of a record: [introduced, fixed, last affected] of each range of versions."""
    ranges: list[list[str | None]] = []
    for events in (r["events"] for r in part.get("ranges", ()) if r["type"] == "ECOSYSTEM"):
        for event in events:
            if "introduced" in event:
                ranges.append([event["introduced"], None, None])
            elif "fixed" in event:
                ranges[-1][1] = event["fixed"]
            elif "last_affected" in event:
                ranges[-1][2] = event["last_affected"]
    one = {"id": record["id"], "package": canonicalize_name(part["package"]["name"])}
    one |= {"aliases": record.get("aliases", []), "ranges": ranges}
    return one if ranges else one | {"versions": part.get("versions", [])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", nargs="?", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--project", type=Path, default=ROOT / "pyproject.toml")
    parser.add_argument("--update", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.update:
        update(given.update, given.lock, given.project)
    stated = json.loads(LIST.read_text())
    found = findings(given.lock, given.project, stated["advisories"])
    print("\n".join(found) if found else f"no known vulnerability ({stated['as_of']})")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
