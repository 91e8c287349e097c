"""Check a model folder with the standard library, before transformers reads it.

A model folder is untrusted input. Nothing in it is unpickled, no configuration key may name code to
run or weights to fetch from elsewhere, and no file may lead outside the folder by link or by name.
Each error names the file, the key and the cure. Reads the configuration files (limited in size and
depth), the weight index and the header of each weight file. Imports nothing heavy, so that a bad
model is refused within a fraction of a second. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PureWindowsPath
from stat import S_ISDIR, S_ISREG
from typing import Any

from dualsft.errors import ConfigError
from dualsft.system.bounds import MAX_PARSED_BYTES, RAISE, TIMES, check_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIGS = "*config*.json"
SPECIAL_TOKENS = "special_tokens_map.json"
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz", ".npy", ".h5", ".joblib"}

CONFIG_BYTES = TIMES * (4 << 20)
INDEX_BYTES = TIMES * (64 << 20)
TEMPLATE_BYTES = 1 << 20
HEADER_BYTES = 100_000_000  # the format's own limit
TOKENIZER_BYTES = TIMES * (128 << 20)
TOKENIZER_MEMORY = TIMES * (1 << 30)
DEPTH = 64
MAX_VALUES = TIMES * 100_000
MAX_FILES = TIMES * 20_000
MAX_ADDED_TOKENS = TIMES * 100_000
MAX_GROWTH = (TIMES * 64, TIMES * 8)
"""Largest factor by which a tokenizer may lengthen a text, and its decoder that of the tokens."""
MAX_PARTS = TIMES * 4_000
"""Most values in the description of its normalizer, pre-tokenizer, post-processor or decoder."""
MAX_STRING = TIMES * 16_384
"""Longest token, pattern or other string of a tokenizer.json; published ones have hundreds."""
RISKY_PARTS = 32
"""Values of a normalizer from which on, or with an expression or a table of its own, the tokenizer
is loaded in a child first: added tokens are normalized while it is loaded."""
MAX_COUNTS = {
    "layer": 1024,
    "expert": 4096,
    "labels": 1 << 16,
    "extra_ids": 1 << 12,
    "offset": 1 << 16,
}
MAX_COUNTS |= {"num_": 1 << 24, "n_": 1 << 24}
"""Largest counts in config.json and tokenizer_config.json, by what the key contains (the last two:
begins with). Modules and lists of that length are built before the weights show what is wrong."""
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MEND = "repair the file, or make or download the model again"

_CODE = (
    "names Python code to run; when transformers has this model itself, remove the key or the "
    "folder's .py files; set model.trust_remote_code=true only when you trust its authors"
)
_KERNELS = "fetches and runs compiled code; remove the key and choose model.attention instead"
_OTHER_WEIGHTS = f"names other weights than {WEIGHTS} or {INDEX}, which are checked; remove the key"
_QUANTISED = "quantised weights cannot be scored or trained exactly; give the unquantised model"
_OTHER_NAMES = "gives other keys of the file new names, or other classes; remove the key"
_OTHER_FILES = "names other files than those that are checked; remove the key"
_REMOTE_KEYS = {"auto_map": _CODE, "custom_pipelines": _CODE}
_REFUSED_KEYS = {
    "trust_remote_code": "a model cannot allow itself to run code; remove the key",
    "_attn_implementation_internal": _KERNELS,
    "_experts_implementation_internal": _KERNELS,
    "use_kernels": _KERNELS,
    "allow_all_kernels": _KERNELS,
    "kernel_config": _KERNELS,
    "transformers_weights": _OTHER_WEIGHTS,
    **dict.fromkeys(
        ("attribute_map", "sub_configs", "base_config_key", "_auto_class"), _OTHER_NAMES
    ),
    **dict.fromkeys(("fusion_config", "distributed_config"), _OTHER_NAMES),
    **dict.fromkeys(("fast_tokenizer_files", "configuration_files"), _OTHER_FILES),
    **dict.fromkeys(("gguf_file", "subfolder", "init_inputs"), _OTHER_FILES),
    "quantization_config": _QUANTISED,
    "compression_config": _QUANTISED,
}
_TOKENIZERS = re.compile(
    r"(?!(Auto|Rag|MyT5|BertJapanese)Tokenizer)\w+Tokenizer(Fast)?|\w+sBackend"
)
"""Classes that a tokenizer may have. The key can name any attribute of transformers; those left out
here, and other classes, open what is not checked."""
_MODEL_TYPES = {"rag", "myt5", "bert-japanese"}  # have these tokenizers by default
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
"""A file of this name makes transformers read all .safetensors of the folder."""
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_VOCABULARIES = (".json", ".txt", ".model", ".tiktoken")
_READ = (".py", ".safetensors", ".jinja", SPECIAL_TOKENS, "tokenizer.json", "index.json")
_FILE_KEYS = ("_file", "_files", "_path", "_dir", "_spm", "vocab")
_UNREAD = {"special_tokens_map_file", "name_or_path", "_name_or_path"}
"""Leftovers from the author's machine in many published configurations; nothing opens them."""


def check_folder(folder: Path, trust_remote_code: bool = False) -> None:
    """Refuse a folder if its links or its configuration files name code or leave the folder."""
    problems = list(_bad_entries(folder))
    if not problems:  # configs are opened only once no link leaves the folder
        problems += _bad_configs(folder, trust_remote_code)
    if problems:
        raise ConfigError([f"model.path: {folder}: {problem}" for problem in problems])


def code_elsewhere(folder: Path, name: str) -> str | None:
    """A configuration entry that names code of another repository than `name`, if there is one."""
    for path in sorted(folder.glob(CONFIGS)):
        for where, key, value in _entries(_read_json(path, CONFIG_BYTES, MAX_VALUES)):
            text = json.dumps(value, default=str) if key in _REMOTE_KEYS else ""
            if "--" in text.replace(f'"{name}--', ""):
                return f"{path.name}: {where}"
    return None


def check_neighbours(gguf: Path) -> None:
    """Refuse a .gguf file if a configuration file beside it names code or another model."""
    folder = gguf.resolve().parent
    problems = list(_bad_entries(folder, deep=False))
    if not problems:
        problems += _bad_configs(folder, trust_remote_code=False, deep=False)
    if problems:
        cure = f"or move {gguf.name} to a folder of its own"
        raise ConfigError([f"model.path: {problem}; {cure}" for problem in problems])


def check_tokenizer(folder: Path) -> bool:
    """Refuse a tokenizer.json whose parts turn little text, or few token ids, into any amount.

    Returns whether loading it can take long, which no check of the file tells.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return False
    try:
        content = _read_json(path, TOKENIZER_BYTES, memory=TOKENIZER_MEMORY)
    except ConfigError as problem:
        raise ConfigError(f"model.path: {folder}: {problem}") from problem
    told = content if isinstance(content, dict) else {}
    model = told.get("model")
    kinds = {"vocab": (dict, list), "merges": (list, type(None))}
    if not isinstance(model, dict) or not all(
        isinstance(model.get(k), v) for k, v in kinds.items()
    ):
        raise ConfigError(
            f"model.path: {folder}: tokenizer.json: its model has no vocabulary and merges, or "
            f"names files for them; {_MEND}"
        )
    added = told.get("added_tokens")
    many = isinstance(added, list) and len(added) > MAX_ADDED_TOKENS
    why = f"over {MAX_ADDED_TOKENS:,} added tokens (MAX_ADDED_TOKENS)" if many else None
    risky = False
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        parts = list(_entries({part: told.get(part)}))
        count = sum(len(value) for _, _, value in parts if isinstance(value, dict | list))
        growth = math.prod(_growth(value) for _, _, value in parts if isinstance(value, dict))
        own = {"Regex", "precompiled_charsmap"} & {key for _, key, _ in parts}
        if count > MAX_PARTS:
            why = f"its {part} has {count:,} values, over {MAX_PARTS:,} (MAX_PARTS)"
        elif growth > MAX_GROWTH[part == "decoder"]:
            most = MAX_GROWTH[part == "decoder"]
            why = f"its {part} repeats text up to {growth:.3g} times, over {most} (MAX_GROWTH)"
        elif any(key in ("String", "Regex") and value == "" for _, key, value in parts):
            why = f"its {part} has an empty pattern, which matches everywhere"
        elif part == "decoder" and own:
            why = f"its decoder has a {own.pop()}, which can take any time"
        risky |= part == "normalizer" and (count > RISKY_PARTS or bool(own))
    longest = max(map(len, _strings(told, model)), default=0)
    if not why and longest > MAX_STRING:
        why = f"a token or pattern of {longest:,} characters, over {MAX_STRING:,} (MAX_STRING)"
    if why:
        raise ConfigError(f"model.path: {folder}: tokenizer.json: {why}; {_MEND}, or {RAISE}")
    return risky


def _strings(told: dict[str, Any], model: dict[str, Any]) -> Iterator[str]:
    """The strings of a tokenizer.json that are tokens, patterns or texts to insert."""
    vocabulary = model["vocab"]
    yield from (
        vocabulary
        if isinstance(vocabulary, dict)
        else (str(entry[0]) for entry in vocabulary if isinstance(entry, list) and entry)
    )
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    for _, key, value in _entries({**told, "model": rest}):
        if key != "precompiled_charsmap":
            yield from (v for v in [value, *_parts(value)] if isinstance(v, str))


def _growth(part: dict[str, Any]) -> float:
    """Times by which this part of a tokenizer may lengthen a text."""
    if part.get("type") == "Prepend":
        return max(1, len(str(part.get("prepend"))))
    if part.get("type") != "Replace":
        return 1
    pattern, new = part.get("pattern"), len(str(part.get("content")))
    old = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(old, str) and old:
        return max(1, new / len(old))
    return new + 1  # an expression, which may match nothing, as an empty pattern does everywhere


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model.

    Refuses weights that are missing, pickled, truncated, or outside the folder.
    """
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        files = _shards(folder)
    else:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        reason = f" ({pickled[0]} is pickled: it can run code and is not read)" if pickled else ""
        raise ConfigError(
            f"model.path: {str(folder)!r} holds no {WEIGHTS} and no {INDEX}{reason}; save the "
            "model again with `model.save_pretrained(folder)`, or use a revision with safetensors"
        )
    problems = [f"model.path: {folder}: {why}" for file in files if (why := _bad_header(file))]
    problems += [
        f"model.path: {folder}: {file.name}: makes transformers read other weights than those that "
        "are checked; remove or rename it"
        for file in sorted(folder.iterdir())
        if _SHARD.fullmatch(file.name)
    ]
    if problems:
        raise ConfigError(problems)
    return files


def _bad_entries(folder: Path, deep: bool = True) -> Iterator[str]:
    """Links that leave the folder, and entries that are neither files nor folders.

    Without `deep`, only those of the folder itself that `_bad_configs` would open.
    """
    root = folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":  # the hub's cache links into its blobs
        roots.append(root.parent.parent / "blobs")
    seen = 0
    for place, folders, files in os.walk(root, followlinks=False):
        if not deep:
            files = [name for name in (*folders, *files) if fnmatch(name, CONFIGS)]
            folders[:] = []
        for name in (*folders, *files):
            path = Path(place, name)
            shown = path.relative_to(root)
            seen += 1
            if seen > MAX_FILES:
                yield f"{str(folder)!r} holds more than {MAX_FILES:,} files; give only the model's"
                return
            try:
                target, mode = path.resolve(strict=True), path.stat().st_mode
            except (OSError, RuntimeError) as problem:
                yield f"{shown}: cannot be read ({problem}); remove it"
                continue
            if (low := name.lower()) != name and (fnmatch(low, CONFIGS) or low.endswith(_READ)):
                yield f"{shown}: not all systems tell it from {low}, which loaders read; rename it"
            if path.is_symlink() and not any(target.is_relative_to(r) for r in roots):
                yield f"{shown}: a link to {str(target)!r}, outside the folder; copy the file"
            elif not (S_ISREG(mode) or S_ISDIR(mode)):
                yield f"{shown}: neither a file nor a folder; remove it"


def _bad_configs(folder: Path, trust_remote_code: bool, deep: bool = True) -> Iterator[str]:
    if (folder / "adapter_config.json").exists():
        yield (
            "adapter_config.json: the folder is a PEFT adapter, which loads another model; merge "
            "it (`merge_and_unload`) and give the merged folder"
        )
    has_code = any(folder.rglob("*.py") if deep else folder.glob("*.py"))
    tokens = folder / SPECIAL_TOKENS
    files = list(folder.glob(CONFIGS)) + ([tokens] if deep and tokens.exists() else [])
    for path in sorted(files):
        try:
            content = _read_json(path, CONFIG_BYTES, MAX_VALUES)
        except ConfigError as problem:
            yield str(problem)
            continue
        if not isinstance(content, dict):
            yield f"{path.name}: holds a {type(content).__name__}, not an object; {_MEND}"
            continue
        for where, key, value in _entries(content):
            # "org/name--module.Class" is code in another repository. Else, if the code is not in
            # the folder, transformers has the model itself, or fails.
            if key == "auto_map" and not has_code and "--" not in json.dumps(value, default=str):
                continue
            reason = _refusal(key, value, trust_remote_code)
            if path.name in ("config.json", "tokenizer_config.json"):
                reason = reason or _excess(key, value)
            if path == tokens and where == key and not key.endswith(("_token", "_tokens")):
                reason = f"is not a special token, which is all that the file may hold; {_MEND}"
            reason = reason or _outside(key, value, folder)
            if reason is not None:
                yield f"{path.name}: {where} = {_short(value)}: {reason}"
    if not deep:  # the file is converted in a folder of its own: no more of this one is read
        return
    for path in sorted([*folder.glob("*.jinja"), *folder.glob("*/*.jinja")]):
        if path.stat().st_size > TEMPLATE_BYTES:
            yield f"{path.name}: {path.stat().st_size:,} bytes, over {TEMPLATE_BYTES:,}; {_MEND}"
    yield from _bad_vocabularies(folder)


def _bad_vocabularies(folder: Path) -> Iterator[str]:
    """Files of the tokenizer that would need too much memory."""
    for path in sorted(p for p in folder.iterdir() if p.suffix in _VOCABULARIES and p.is_file()):
        if path.name.endswith("index.json") or "config" in path.name:
            continue  # have a limit of their own
        if (size := path.stat().st_size) > TOKENIZER_BYTES:
            yield f"{path.name}: {size:,} bytes, over {TOKENIZER_BYTES:,}; {_MEND}"
        elif path.suffix == ".json":
            try:
                check_json(path.read_bytes(), TOKENIZER_MEMORY)
            except ValueError as problem:
                yield f"{path.name}: {problem}; {_MEND}"


def _excess(key: str, value: Any) -> str | None:
    """Why this number cannot be a count of parts of a model; None if it can."""
    if isinstance(value, list) and key.startswith(("attention_", "attn_")):  # repeated per layer
        most, waiting = MAX_COUNTS["layer"], [value]
        while waiting:
            one = waiting.pop()
            waiting += one if isinstance(one, list) else []
            if (len(one) if isinstance(one, list) else one if isinstance(one, int) else 0) > most:
                return f"over {most:,} layers, more than any model has; {_MEND}"
    if not isinstance(value, int) or "_size" in key:  # sizes are held against the weights
        return None
    if key in _DEPTHS and value < 1:
        return f"a model has layers; {_MEND}"
    for word, most in MAX_COUNTS.items():
        if (key.startswith(word) if word.endswith("_") else word in key) and value > most:
            return f"over {most:,}, more than any model has; {_MEND}"
    return None


def _refusal(key: str, value: Any, trust_remote_code: bool) -> str | None:
    """Why this configuration entry is refused; None if it is allowed."""
    if not value:
        return None
    if key in _REMOTE_KEYS:
        return None if trust_remote_code else _REMOTE_KEYS[key]
    if key in _REFUSED_KEYS:
        return _REFUSED_KEYS[key]
    if key == "tokenizer_class" and not _TOKENIZERS.fullmatch(str(value)):
        return "is not the name of a tokenizer that this check covers; give its own name"
    if key == "model_type" and value in _MODEL_TYPES:
        return "has a tokenizer that opens other files; give a causal language model"
    if key in ("merges", "vocab", "entity_vocab") and isinstance(value, str):
        return _OTHER_FILES
    words = [word for word in _parts(value) if isinstance(word, str)]
    if key.endswith(_IMPLEMENTATIONS) and any("/" in word for word in words):
        return _KERNELS
    if key.endswith(_FILE_KEYS) and key not in _UNREAD and any(map(_leads_out, words)):
        return "leads out of the folder; give a file name inside it, or remove the key"
    return None


def _outside(key: str, value: Any, folder: Path) -> str | None:
    """Why this value may not stay: it names a file of this machine that is not the model's.

    Loaders hand most keys to classes as arguments, and some of these open what they are given,
    relative to the current directory.
    """
    for word in _parts(value):
        if not isinstance(word, str) or key in _UNREAD:
            continue
        if "/" not in word and not key.endswith(_FILE_KEYS):
            continue
        try:
            path, mode = Path(word).resolve(), Path(word).stat().st_mode
        except (OSError, ValueError):  # no such file, or no file name
            continue
        if not S_ISDIR(mode) and not path.is_relative_to(folder.resolve()):
            return "names a file outside the folder; remove the key"
    return None


def _parts(value: Any) -> Iterable[Any]:
    """The values of a list, the keys of an object, or the value itself."""
    return value if isinstance(value, list | dict) else [value]


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(dotted path, key, value) of every entry at any depth.

    Values inside the object of an attention key are yielded under that key.
    """
    stack: list[tuple[str, str, Any]] = [(key, key, value) for key, value in content.items()]
    while stack:
        where, key, value = stack.pop()
        yield where, key, value
        if isinstance(value, dict):
            inherit = key.endswith(_IMPLEMENTATIONS)
            stack += [(f"{where}.{k}", key if inherit else k, v) for k, v in value.items()]
        elif isinstance(value, list):
            nested = (dict, list)
            stack += [
                (f"{where}[{i}]", key, v) for i, v in enumerate(value) if isinstance(v, nested)
            ]


def _read_json(
    path: Path, limit: int, most: float = math.inf, memory: int = MAX_PARSED_BYTES
) -> Any:
    """Read a JSON file of bounded size and nesting, with at most `most` values."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not block
        state = os.fstat(file.fileno())
        if not S_ISREG(state.st_mode):
            raise ConfigError(f"{path.name}: is not a regular file; remove it")
        if state.st_size > limit:
            raise ConfigError(
                f"{path.name}: {state.st_size:,} bytes, more than the {limit:,} allowed; {_MEND}"
            )
        text = file.read(limit)
    try:
        content = json.loads(check_json(text, memory).decode("utf-8"))
    except RecursionError:
        raise ConfigError(f"{path.name}: nested deeper than {DEPTH} levels; {_MEND}") from None
    except ValueError as problem:
        raise ConfigError(f"{path.name}: is not valid JSON: {problem}; {_MEND}") from problem
    level, depth, count = [content] if isinstance(content, dict | list) else [], 0, 0
    while level:
        depth += 1
        if depth > DEPTH:
            raise ConfigError(f"{path.name}: nested deeper than {DEPTH} levels; {_MEND}")
        count += sum(map(len, level))
        if count > most:
            raise ConfigError(f"{path.name}: more than {most:,} values; {_MEND}")
        parts = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for part in parts for v in part if isinstance(v, dict | list)]
    return content


def _shards(folder: Path) -> list[Path]:
    """The files that the index names; each must be a safetensors file in this folder."""
    try:
        index = _read_json(folder / INDEX, INDEX_BYTES)
    except ConfigError as problem:
        raise ConfigError(f"model.path: {folder}: {problem}") from problem
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not table:
        raise ConfigError(
            f"model.path: {folder}: {INDEX}: has no weight_map; save the model again with "
            "`save_pretrained`"
        )
    problems: list[str] = []
    names = sorted({name if isinstance(name, str) else repr(name) for name in table.values()})
    if len(names) > MAX_FILES:
        raise ConfigError(
            f"model.path: {folder}: {INDEX}: names {len(names):,} files, over {MAX_FILES:,}; "
            + _MEND
        )
    for name in names:
        if _leads_out(name) or Path(name).name != name:
            problems.append(
                f"weight_map names {name!r}, which is not in the folder itself; {_MEND}"
            )
        elif not name.endswith(".safetensors"):
            problems.append(f"weight_map names {name!r}, which is not a .safetensors file; {_MEND}")
        elif not (folder / name).is_file():
            problems.append(f"the shard {name} is missing; download or copy it again")
    if problems:
        raise ConfigError([f"model.path: {folder}: {INDEX}: {problem}" for problem in problems])
    return [folder / name for name in names]


def _bad_header(path: Path) -> str | None:
    """What is wrong with the header of a safetensors file; None if it is valid.

    The file begins with the length of its JSON header (8 bytes); the header begins with `{`. The
    tensors must end exactly at the end of the file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    broken = f"{path.name}: is not a safetensors file, or truncated; download or save it again"
    if len(start) < 9 or start[8:] != b"{" or length > min(size - 8, HEADER_BYTES):
        return broken
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(check_json(file.read(length)))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
            whole = 8 + length + max(ends, default=0) == size
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return broken
    return None if whole else broken


def _leads_out(name: str) -> bool:
    """Whether a name is absolute or leaves the folder, by the rules of any operating system."""
    path = PureWindowsPath(name)
    return name.startswith(("/", "\\", "~")) or bool(path.drive) or ".." in path.parts


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else f"{text[:77]}…"
