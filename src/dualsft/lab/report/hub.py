"""`dualsft export hub`: what a run made as a folder for the Hugging Face Hub, and its push.

A published folder tells strangers nothing about this machine, and holds nothing that a stranger put
into a run folder. Only files that the manifest of the fine-tuning lists are copied, if their kind
belongs to a model and their copy has the hash of the manifest; the card is made anew. Paths and
leftovers of loading are removed from configurations, and the export is refused if a text still
names a folder of this user, or a file holds their token. The training rows are left out unless they
are asked for.

`push` is the only part that uses the network. The token is found and sent by huggingface_hub; it is
neither stored nor shown. Reads 5_selection and 6_finetune. Not part of Algorithm 1.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, get_token

from dualsft.errors import ConfigError, RunError
from dualsft.lab.report.card import ADAPTER, DELTA, LOCAL_PATH, MODEL, base_name, card, made_by
from dualsft.lab.report.facts import Facts
from dualsft.model.delta import check_target, written_whole
from dualsft.model.resolve import HUB_ID
from dualsft.model.safety import check_folder, weight_files
from dualsft.runs.preflight import FOLDERS, check_run_folder, load_summaries, reading
from dualsft.storage.manifest import sha256_file
from dualsft.system.paths import Place, RunPath, run_path

PREFIXES = {MODEL: "model/", DELTA: "delta.safetensors", ADAPTER: "adapter/"}
"""What the files of each part begin with in 6_finetune."""
KINDS = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Files that belong to a model; with consent to run its code also .py."""
WORDS = ("tokenizer.json", "vocab.json", "added_tokens.json", "merges.txt", "vocab.txt")
"""Files of words, which may look like paths."""
LEFTOVERS = {"_name_or_path", "name_or_path", "is_local", "local_files_only"}
"""Keys that loading writes into configurations."""
MIN_TOKEN = 8
"""Length from which on a token is searched for; a shorter one is none of the hub, and a word."""


def export_hub(
    run: str | Place,
    out: Path,
    part: str = MODEL,
    base_model: str | None = None,
    with_data: bool = False,
    repo: str | None = None,
    trusted: bool = False,
) -> list[str]:
    """Write a part of a run to the new folder `out`; returns lines to show.

    `base_model` is the hub id of the base, for runs that read it from elsewhere, `repo` the name
    under which it will be published, and `trusted` the consent to export code of the model.
    """
    for name, given in (("--base-model", base_model), ("--push", repo)):
        if given is not None and not HUB_ID.fullmatch(given):
            raise ConfigError(f"{name}: {given!r} is no id of the hub; give owner/name")
    check_target(out)
    folder = run_path(run)
    with reading(folder):
        facts = load_summaries(folder)
        _check_made(folder, facts, part)
        with written_whole(out) as path:
            path.mkdir()
            place = RunPath(path)
            _copy_part(folder, facts, part, place, trusted)
            if with_data:
                _copy_data(folder, facts, place)
            text = card(facts, [part], base_model=base_model, repo=repo)
            (place / "README.md").write_text(text)
            for file in path.rglob("*.json"):
                if file.name not in WORDS:
                    _clean_config(place / file.relative_to(path).as_posix(), facts, base_model)
            if part == MODEL:
                check_folder(path, trusted)
                weight_files(path)
            _check_private(folder, path)
    count = sum(file.is_file() for file in out.rglob("*"))
    size = sum(file.stat().st_size for file in out.rglob("*")) / 1e6
    lines = [f"{out}: {part} and card, {count} files, {size:,.1f} MB"]
    if base_model is None and "\nbase_model:" not in text:
        lines.append(
            "the card names no base model, because the run did not read it from the hub: give "
            "--base-model OWNER/NAME"
        )
    return lines


def _check_made(run: RunPath, facts: Facts, part: str) -> None:
    made = made_by(facts)
    if part in made:
        return
    if not made:
        check_run_folder(run)
        raise RunError(
            f"{run}: has no finished, up-to-date stage finetune; run `dualsft finetune {run}` first"
        )
    rest = " or ".join("without it" if one == MODEL else f"--{one}" for one in made)
    sparse = " (`dualsft export adapter` makes one of a delta)" if DELTA in made else ""
    raise ConfigError(
        f"--{part}: this run made none{sparse if part == ADAPTER else ''}; use {rest}"
    )


def _copy_part(run: RunPath, facts: Facts, part: str, out: RunPath, trusted: bool) -> None:
    stage = FOLDERS["finetune"]
    kinds = (*KINDS, ".py") if trusted else KINDS
    for name in facts["manifests"]["finetune"]["files"]:
        if not name.startswith(PREFIXES[part]):
            continue
        if not name.endswith(kinds):
            raise RunError(
                f"{run / stage / name}: is no file that the hub's loaders need; give "
                "model.trust_remote_code=true if it is code whose authors you trust, or run the "
                "stage again"
            )
        target = name if part == DELTA else name.removeprefix(PREFIXES[part])
        _copy(run / stage / name, facts["manifests"]["finetune"], name, out / target)


def _copy_data(run: RunPath, facts: Facts, out: RunPath) -> None:
    """The selected rows of the last round."""
    manifest = facts["manifests"].get("selection", {"files": {}})
    final = facts.get("selection", {}).get("final", ".")
    name = "selected.jsonl" if final == "." else f"{final}/selected.jsonl"
    if name not in manifest["files"]:
        raise ConfigError(f"--with-data: {run} has no file of selected rows; leave it out")
    _copy(run / FOLDERS["selection"] / name, manifest, name, out / "selected.jsonl")


def _copy(source: RunPath, manifest: Any, name: str, target: RunPath) -> None:
    """Copy a file of a stage, if it is the one that the stage wrote."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open() as old, target.open("wb") as new:
        while piece := old.read(1 << 20):
            new.write(piece)
    if sha256_file(target) != manifest["files"][name]["sha256"]:
        raise RunError(
            f"{source}: has a different SHA-256 than when it was written; run the same `dualsft "
            "run` again, which repeats the stage"
        )


# --- privacy ------------------------------------------------------------------------------------


def _clean_config(file: RunPath, facts: Facts, base_model: str | None) -> None:
    """Remove leftovers of loading, and the folders from local paths."""
    old = file.read_json()
    new = _cleaned(old)
    if isinstance(new, dict) and "base_model_name_or_path" in new:
        new["base_model_name_or_path"] = base_model or base_name(facts)
    if new != old:
        file.write_json(new, ensure_ascii=False)


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cleaned(one) for key, one in value.items() if key not in LEFTOVERS}
    if isinstance(value, list):
        return [_cleaned(one) for one in value]
    local = isinstance(value, str) and LOCAL_PATH.fullmatch(value)
    return local[1] if local else value


def _check_private(run: RunPath, folder: Path) -> None:
    """Refuse a file that holds this user's token, and a text that names one of their folders."""
    tokens = _tokens()
    user = _user()
    private = {str(Path.home()), str(run.location.resolve().parent), os.getcwd()} - {os.sep, ""}
    private |= {f"/{user}/", f"\\{user}\\"} if user else set[str]()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if _holds(file, tokens):
            raise RunError(
                f"{file.relative_to(folder)}: would publish your token for the Hugging Face Hub; "
                "remove it from the model or the data that the file comes from, revoke it, and run "
                "the stage again"
            )
        if file.suffix not in (".md", ".json", ".jinja", ".safetensors") or file.name in WORDS:
            continue
        if file.name == "selected.jsonl":
            continue  # the user's own rows, asked for
        text = _header(file) if file.suffix == ".safetensors" else file.read_text("utf-8")
        found = sorted(word for word in private if word in text)
        if found:
            raise RunError(
                f"{file.name}: would publish {found[0]!r}, a folder of this machine; rename what "
                "it comes from (a file, a name in evaluation.files, a key of the configuration)"
            )


def _tokens() -> set[bytes]:
    """This user's tokens for the hub: in the environment, and in the file of `hf auth login`."""
    file = ""
    with suppress(OSError):
        file = Path(constants.HF_TOKEN_PATH).read_text("utf-8", "replace").strip()
    return {token.encode() for token in (get_token(), file) if token and len(token) >= MIN_TOKEN}


def _holds(file: Path, words: set[bytes]) -> bool:
    if file.suffix == ".safetensors":
        return any(word in _header(file).encode() for word in words)
    with file.open("rb") as lines:
        return any(word in line for line in lines for word in words)


def _header(file: Path) -> str:
    """The JSON header of a safetensors file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        return opened.read(min(size, 100_000_000)).decode("utf-8", "replace")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # no such user in this system
        return ""


# --- push ---------------------------------------------------------------------------------------


def check_push() -> None:
    """Refuse a push that cannot succeed, before anything is written."""
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("--push: HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if not get_token():
        raise ConfigError(
            "--push: no token for the Hugging Face Hub; log in with `hf auth login`, or set "
            "HF_TOKEN to a token that may write"
        )


def push(folder: Path, repo: str, private: bool, update: bool) -> str:
    """Push an exported folder to the repository `repo`; returns its address."""
    check_push()
    api = HfApi()
    try:
        url = api.create_repo(repo, private=private or None, exist_ok=update)
        api.upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="Upload by dualsft"
        )
    except Exception as problem:  # of the hub, of HTTP, of the network: many libraries
        reason, cure = _explained(problem, repo)
        rest = f"{folder} is complete: `hf upload {repo} {folder} .` pushes it later"
        raise RunError(f"--push {repo}: {reason}; {cure}. {rest}") from None
    return str(url)


def _explained(problem: Exception, repo: str) -> tuple[str, str]:
    """(what went wrong, how to cure it), without the token."""
    lines = str(problem).replace(get_token() or "\0", "***").strip().splitlines()
    text = next(_told(lines), type(problem).__name__)[:300].rstrip(".")
    response = getattr(problem, "response", None) if isinstance(problem, OSError) else None
    code = getattr(response, "status_code", None)
    if code == 409:
        return "the repository exists", "give another name, or --update for a new commit in it"
    if code == 401:
        return "the hub refuses the token", "log in again with `hf auth login`, or set HF_TOKEN"
    if code == 403:
        owner = repo.partition("/")[0]
        return f"the token may not write there ({text})", f"use one with write access to {owner}"
    if isinstance(problem, errors.HfHubHTTPError | ValueError):
        return f"the hub refuses it ({text})", "mend what it names"
    reached = f"{constants.ENDPOINT} cannot be reached ({type(problem).__name__}: {text})"
    return reached, "check the network and HF_ENDPOINT, and try again"


def _told(lines: list[str]) -> Iterator[str]:
    return (line.strip() for line in lines if line.strip())
