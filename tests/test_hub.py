"""`dualsft export hub`: what is in the folder, what is not, and the push to a server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Runner
from hub_server import TOKEN, Hub, hub_server
from huggingface_hub import ModelCard
from places import place
from report_pages import copy, replaced, seal
from transformers import AutoModelForCausalLM

from dualsft.errors import ConfigError, RunError
from dualsft.lab.report.card import card
from dualsft.lab.report.hub import export_hub
from dualsft.runs.preflight import load_summaries

LORA = ("method.data=random", "method.params=lora", "method.lora.r=2")


def head_of(text: str) -> Any:
    """The front matter of a card."""
    return ModelCard(text).data


def texts(folder: Path) -> str:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return "\n".join(file.read_bytes().decode("utf-8", "replace") for file in files)


# --- the folder ---------------------------------------------------------------------------------


def test_the_merged_model_with_its_card(shared_run: Runner, tmp_path: Path) -> None:
    run, out = shared_run(), tmp_path / "out"
    lines = export_hub(run, out)
    names = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    own = {path.name for path in (run / "6_finetune/model").iterdir()}
    assert names == own | {"README.md"} and "names no base model" in lines[1]
    theirs = AutoModelForCausalLM.from_pretrained(run / "6_finetune/model").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        assert torch.equal(value, theirs[name])
    found = texts(out)
    for private in (str(run.parent), str(Path.home()), "/tmp", "local_files_only"):
        assert private not in found, private
    assert not [file for file in out.parent.iterdir() if file.name.startswith(".out")]
    with pytest.raises(ConfigError, match="already exists; give a new name"):
        export_hub(run, out)


def test_the_head_of_the_card(shared_run: Runner, tmp_path: Path) -> None:
    run, out = shared_run(), tmp_path / "out"
    export_hub(run, out, base_model="me/base", repo="me/tuned")
    text = (out / "README.md").read_text()
    head = head_of(text)
    assert head.base_model == "me/base" and head.to_dict()["base_model_relation"] == "finetune"
    assert (head.library_name, head.pipeline_tag) == ("transformers", "text-generation")
    assert head.datasets is None and head.eval_results is None  # the validation split is no result
    tuned = json.loads((run / "6_finetune/summary.json").read_text())
    for said in (
        f"({tuned['changed_entries'] / tuned['num_parameters']:.2%})".replace("%", " %"),
        "in bfloat16",
        'from_pretrained("me/tuned")',
        "data budget: 12 of 120",
        "| validation |",
    ):
        assert said in text, said
    with pytest.raises(ConfigError, match="'llama' is no id of the hub; give owner/name"):
        export_hub(run, tmp_path / "other", base_model="llama")
    assert not (tmp_path / "other").exists()


def test_results_that_the_selection_did_not_see_are_in_the_model_index(
    shared_run: Runner, tmp_path: Path
) -> None:
    run = copy(shared_run(), tmp_path)
    results = json.loads((run / "7_evaluation/results.json").read_text())
    own = results["files"]["validation"]
    side = {"score": 0.5, "interval": [0.4, 0.6], "items": 20, "format_errors": 1}
    task = {"metric": "acc", "num_fewshot": 5, "before": side, "after": side | {"score": 0.75}}
    means = dict.fromkeys(("plasticity", "stability", "overall"))
    summary = {"before": means, "after": means, "notes": []}
    more = {"files": {"validation": own, "mine\n---\nx": own}, "tasks": {"gsm8k": task}}
    replaced(run, "evaluation", "results.json", more | {"summary": summary})
    data = head_of(card(load_summaries(place(run)), ["model"]))
    assert data.eval_results is not None
    rows = [(r.dataset_type, r.metric_type, r.metric_value) for r in data.eval_results]
    after = own["after"]
    wanted = [("mine --- x", key, round(after[key], 4)) for key in ("loss", "perplexity")]
    assert rows == [("gsm8k", "acc", 0.75), *wanted]


def test_a_path_that_looks_like_an_id_is_no_base_model(shared_run: Runner) -> None:
    """As models/mine does, read from another folder than the one that the run was made in."""
    facts = load_summaries(place(shared_run()))
    config = {"model": {"path": "models/mine"}, "data": {"path": "data/rows.jsonl"}}
    text = card(facts | {"config": config}, ["model"])
    data = head_of(text)
    assert data.base_model is None and data.datasets is None
    assert "models/mine" not in text and "# mine fine-tuned" in text and "`rows.jsonl`" in text
    split = facts["split"]["data"] | {"files": ["/cache/datasets/me--rows-train-0f.jsonl"]}
    config["data"] = {"path": "me/rows"}
    facts = facts | {"config": config, "split": facts["split"] | {"data": split}}
    assert head_of(card(facts, ["model"])).datasets == ["me/rows"]


def test_the_delta_and_the_selected_rows(shared_run: Runner, tmp_path: Path) -> None:
    run = shared_run()
    export_hub(run, tmp_path / "delta", "delta", with_data=True)
    for name, source in (
        ("delta.safetensors", "6_finetune/delta.safetensors"),
        ("selected.jsonl", "5_selection/selected.jsonl"),
    ):
        assert (tmp_path / "delta" / name).read_bytes() == (run / source).read_bytes()
    text = (tmp_path / "delta/README.md").read_text()
    assert head_of(text).library_name == "dualsft"
    assert "apply_delta" in text and "AutoTokenizer" not in text
    with pytest.raises(ConfigError, match=r"--adapter: this run made none.*use without it or --de"):
        export_hub(run, tmp_path / "adapter", "adapter")


def test_the_adapter_of_lora(shared_run: Runner, tmp_path: Path) -> None:
    run, out = shared_run(*LORA), tmp_path / "out"
    export_hub(run, out, "adapter", base_model="me/base")
    settings = json.loads((out / "adapter_config.json").read_text())
    before = json.loads((run / "6_finetune/adapter/adapter_config.json").read_text())
    assert settings == before | {"base_model_name_or_path": "me/base"}
    head = head_of((out / "README.md").read_text()).to_dict()
    assert (head["library_name"], head["base_model_relation"]) == ("peft", "adapter")
    export_hub(run, tmp_path / "unnamed", "adapter")
    settings = json.loads((tmp_path / "unnamed/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "llama"  # not its folder
    with pytest.raises(ConfigError, match="--delta: this run made none; use without it or --adap"):
        export_hub(run, tmp_path / "delta", "delta")


def test_a_folder_that_does_not_exist_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: not a run folder"):
        export_hub(place(tmp_path / "nowhere"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_model(make_run: Runner, tmp_path: Path) -> None:
    run = make_run(until="split")
    with pytest.raises(RunError, match="no finished, up-to-date stage finetune; run"):
        export_hub(run, tmp_path / "out")


# --- a folder from a stranger -------------------------------------------------------------------


def listed(run: Path, name: str, content: str) -> None:
    """A file in 6_finetune that the manifest lists."""
    (run / "6_finetune" / name).write_text(content)
    seal(run, "finetune", name)


def leftovers(run: Path) -> None:
    path = run / "6_finetune/model/config.json"
    paths = {"_name_or_path": f"{Path.home()}/m", "template": "/home/me/t.jinja"}
    listed(run, "model/config.json", json.dumps(json.loads(path.read_text()) | paths))


def test_only_what_the_run_wrote_is_published(shared_run: Runner, tmp_path: Path) -> None:
    run = copy(shared_run(), tmp_path)
    model = run / "6_finetune/model"
    (model / "README.md").write_text("a stranger's card")
    (model / "notes.txt").write_text("a stranger's notes")
    leftovers(run)
    export_hub(run, tmp_path / "out")
    assert "stranger" not in texts(tmp_path / "out")
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert "_name_or_path" not in settings and settings["template"] == "t.jinja"


def code(run: Path) -> None:
    listed(run, "model/modeling.py", "print('hello')")


def pickled(run: Path) -> None:
    listed(run, "model/pytorch_model.bin", "pickle")


def auto_map(run: Path) -> None:
    content = json.loads((run / "6_finetune/model/config.json").read_text())
    content["auto_map"] = {"AutoConfig": "other/repo--code.C"}
    listed(run, "model/config.json", json.dumps(content))


def changed(run: Path) -> None:
    path = run / "6_finetune/model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def link(run: Path) -> None:
    path = run / "6_finetune/model/tokenizer.json"
    path.unlink()
    path.symlink_to("/etc/hostname")


def outside(run: Path) -> None:
    (run / "5_selection/secret.json").write_text("{}")
    seal(run, "finetune", "model/../../5_selection/secret.json")


def private(run: Path) -> None:
    results = json.loads((run / "7_evaluation/results.json").read_text())
    files = results["files"] | {f"{Path.home()}": results["files"]["validation"]}
    replaced(run, "evaluation", "results.json", {"files": files})


@pytest.mark.parametrize(
    ("trap", "said"),
    [
        (code, r"modeling.py: is no file that the hub's loaders need"),
        (pickled, r"pytorch_model.bin: is no file that the hub's loaders need"),
        (auto_map, r"auto_map"),
        (changed, r"model.safetensors: has a different SHA-256"),
        (link, r"tokenizer.json is a symlink"),
        (outside, r"leads out of the run folder"),
        (private, r"README.md: would publish '.*', a folder of this machine; rename"),
    ],
)
def test_a_trap_is_refused_and_nothing_is_left(
    shared_run: Runner, tmp_path: Path, trap: Callable[[Path], None], said: str
) -> None:
    run = copy(shared_run(), tmp_path)
    trap(run)
    with pytest.raises((ConfigError, RunError), match=said):
        export_hub(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_token_is_not_published(
    shared_run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, stored: bool
) -> None:
    """Neither that of the environment nor, beside another one there, that of the token file."""
    run = copy(shared_run(), tmp_path)
    content = json.loads((run / "6_finetune/model" / file).read_text())
    listed(run, f"model/{file}", json.dumps(content | {"note": f"by {TOKEN}"}))
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    if not stored:
        (tmp_path / "token").unlink()
    monkeypatch.setenv("HF_TOKEN", "hf_anotherOne" if stored else TOKEN)
    with pytest.raises(RunError, match=f"^{file}: would publish your token") as caught:
        export_hub(run, tmp_path / "out")
    assert TOKEN not in str(caught.value) and not (tmp_path / "out").exists()
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("HF_TOKEN", "by")  # no token, but a word
    export_hub(run, tmp_path / "out")


def test_code_is_exported_with_consent(shared_run: Runner, tmp_path: Path) -> None:
    run = copy(shared_run(), tmp_path)
    code(run)
    export_hub(run, tmp_path / "out", trusted=True)
    assert (tmp_path / "out/modeling.py").is_file()


# --- the push -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


Told = subprocess.CompletedProcess[str]


def exported(run: Path, out: Path, *words: str, **env: str) -> Told:
    """The command in a process of its own, with a home of its own."""
    given = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    given |= {"HF_HOME": str(out.parent / "home"), "HF_TOKEN": TOKEN, **env}
    command = [sys.executable, "-m", "dualsft", "export", "hub", str(run), str(out), *words]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    home = texts(out.parent / "home") if (out.parent / "home").exists() else ""
    assert TOKEN not in done.stdout + done.stderr + home + (texts(out) if out.exists() else "")
    return done


@pytest.mark.slow
@pytest.mark.parametrize("lfs", [False, True])
def test_a_push(shared_run: Runner, tmp_path: Path, hub: Hub, lfs: bool) -> None:
    hub.lfs, repo, out = lfs, f"me/model-{lfs}", tmp_path / "out"
    env = {"HF_ENDPOINT": hub.address} | ({"HF_HUB_DISABLE_XET": "1"} if lfs else {})
    words = ("--push", repo, "--private", "--base-model", "me/base")
    done = exported(shared_run(), out, *words, **env)
    assert done.returncode == 0, done.stderr
    assert f"pushed to {hub.address}/{repo}" in done.stdout and repo in hub.private
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.repos[repo] == files and "README.md" in files
    assert bool(hub.large) == lfs
    shutil.rmtree(out)
    done = exported(shared_run(), out, "--push", repo, **env)
    assert done.returncode == 1 and out.is_dir()
    assert "the repository exists; give another name, or --update" in done.stderr
    shutil.rmtree(out)
    done = exported(shared_run(), out, "--push", repo, "--update", "--delta", **env)
    assert done.returncode == 0 and "delta.safetensors" in hub.repos[repo]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        (("--push", "me/one"), {"HF_TOKEN": ""}, 2, "no token for the Hugging Face Hub; log in"),
        (("--push", "me/one"), {"HF_HUB_OFFLINE": "1"}, 2, "HF_HUB_OFFLINE is set; unset it"),
        (("--push", "one"), {}, 2, "'one' is no id of the hub; give owner/name"),
        (("--private",), {}, 2, "have no effect without --push"),
        (("--push", "me/one"), {"HF_TOKEN": "hf_old"}, 1, "refuses the token; log in again"),
        (("--push", "somebody/one"), {}, 1, "use one with write access to somebody"),
        (("--push", "me/one"), {"HF_ENDPOINT": "http://127.0.0.1:9"}, 1, "cannot be reached"),
    ],
)
def test_a_push_that_fails_says_why(
    shared_run: Runner,
    tmp_path: Path,
    hub: Hub,
    words: tuple[str, ...],
    env: dict[str, str],
    code: int,
    said: str,
) -> None:
    out = tmp_path / "out"
    done = exported(shared_run(), out, *words, **({"HF_ENDPOINT": hub.address} | env))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr and "hf_old" not in done.stderr
    assert out.exists() == (code == 1)  # complete where the push alone failed
    if code == 1:
        assert f"{out} is complete: `hf upload" in done.stderr
