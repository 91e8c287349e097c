"""Settings: one definition for Python, YAML and flags; every problem named at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualsft.config import settings as config_module
from dualsft.config.settings import (
    Config,
    DataConfig,
    EvaluationConfig,
    FinetuneConfig,
    ModelConfig,
    ScoreConfig,
    SelectConfig,
    SplitConfig,
    WarmupConfig,
    describe,
    from_mapping,
    load,
    load_yaml,
    recipe_names,
    to_flat,
    to_mapping,
    to_yaml,
    validate,
    warnings,
)
from dualsft.errors import ConfigError

BASE = ["model.path=m", "data.path=d.jsonl"]


def flags(*overrides: str) -> Config:
    return load(None, [*BASE, *overrides])


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        flags(*overrides)
    return caught.value.problems


def problem(*overrides: str) -> str:
    found = problems(*overrides)
    assert len(found) == 1, found
    return found[0]


def from_text(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "my run é.yaml"
    path.write_text(text, encoding="utf-8")
    return load_yaml(path)


def from_yaml(tmp_path: Path, text: str) -> Config:
    return from_text(tmp_path, "model.path: m\ndata.path: d.jsonl\n" + text)


def typed(value: Any) -> tuple[type, Any]:
    return type(value), value


# --- the definition -------------------------------------------------------------------------------


def test_described_defaults_can_be_typed_as_flags() -> None:
    typed_out = [f"{d.key}={d.default}" for d in describe() if d.default not in ("required", "{}")]
    assert flags(*typed_out) == flags()


# --- three ways, one meaning ----------------------------------------------------------------------

IN_YAML = """
seed: 7
model: {path: m, dtype: float32}
data: {path: d.jsonl, prompt_field: no, response_field: none}
split: {val: 100, anchor: 0.2, warm: 1}
warmup: {lr: 1e-4, epochs: 2, batch_size: 8}
score: {lam: 0, lam_relative: scores, form: calibrated, candidates: '*q_proj*, !*.0.*', keep: all}
select: {data_budget: 1_000, param_budget: 1e-1}
finetune: {lr: 3e-5, micro_batch_size: 4}
evaluation:
  files: {old: a.jsonl, new: b.jsonl}
"""

IN_FLAGS = [
    *("seed=7", "model.dtype=float32", "data.prompt_field=no", "data.response_field=none"),
    *("split.val=100", "split.anchor=0.2", "split.warm=1"),
    *("warmup.lr=1e-4", "warmup.epochs=2", "warmup.batch_size=8"),
    *("score.lam=0", "score.lam_relative=scores", "score.form=calibrated"),
    "score.candidates=*q_proj*,!*.0.*",
    *("score.keep=all", "select.data_budget=1_000", "select.param_budget=1e-1"),
    *("finetune.lr=3e-5", "finetune.micro_batch_size=4"),
    "evaluation.files=old:a.jsonl,new:b.jsonl",
]


def in_python() -> Config:
    return Config(
        seed=7,
        model=ModelConfig(path="m", dtype="float32"),
        data=DataConfig(path="d.jsonl", prompt_field="no", response_field="none"),
        split=SplitConfig(val=100, anchor=0.2, warm=1),
        warmup=WarmupConfig(lr=1e-4, epochs=2, batch_size=8),
        score=ScoreConfig(
            lam=0,
            lam_relative="scores",
            form="calibrated",
            candidates="*q_proj*,!*.0.*",
            keep="all",
        ),
        select=SelectConfig(data_budget=1000, param_budget=0.1),
        finetune=FinetuneConfig(lr=3e-5, micro_batch_size=4),
        evaluation=EvaluationConfig(files={"old": "a.jsonl", "new": "b.jsonl"}),
    )


def test_python_yaml_and_flags_agree(tmp_path: Path) -> None:
    by_yaml, by_flags = from_text(tmp_path, IN_YAML), flags(*IN_FLAGS)
    assert in_python() == by_yaml == by_flags
    assert to_yaml(in_python()) == to_yaml(by_yaml) == to_yaml(by_flags)
    ways = [in_python(), by_yaml, by_flags, from_text(tmp_path, to_yaml(by_flags))]
    assert from_mapping(to_mapping(by_flags)) == by_flags
    first, *others = ([typed(value) for value in to_flat(config).values()] for config in ways)
    assert others == [first] * 3


@pytest.mark.parametrize(
    "words",
    [
        ("score.mode=two_pass",),
        ("score.form=calibrated",),
        ("select.variant=param",),
        ("method.data=random",),
    ],
)
def test_lambda_by_scores_needs_g_before_the_scores(words: tuple[str, ...]) -> None:
    assert flags("score.lam_relative=scores", *words).score.lam_relative == "scores"
    with pytest.raises(ConfigError, match="this weight needs G"):
        flags("score.lam_relative=scores")


def test_yaml_words_stay_what_the_field_says(tmp_path: Path) -> None:
    text = """
data: {prompt_field: off, response_field: "~"}
score: {preservation: none, lam_relative: off, keep: [gradients, projection]}
warmup: {lr: none}
finetune: {lr: 1e-4}
split: {val: ~, anchor: null}
evaluation: {prompt: 2024-01-01}
select:
"""
    config = from_yaml(tmp_path, text)
    assert (config.data.prompt_field, config.data.response_field) == ("off", "~")
    assert config.score.preservation == "none" and config.score.lam_relative is False
    assert config.score.keep == "gradients,projection"
    assert typed(config.finetune.lr) == (float, 1e-4)
    assert config.warmup.lr is config.split.val is config.split.anchor is None
    assert config.evaluation.prompt == "2024-01-01"
    assert from_text(tmp_path, to_yaml(config)) == config
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfmodel.path: m\ndata.path: d\n")
    assert load_yaml(tmp_path / "bom.yaml").model.path == "m"
    with pytest.raises(ConfigError, match="model.path: missing"):
        from_text(tmp_path, "")


def test_words_of_flags() -> None:
    prompt = "  what is a=b, 'really'? "
    assert flags(f"evaluation.prompt={prompt}").evaluation.prompt == prompt
    assert flags("evaluation.prompt=null").evaluation.prompt is None
    assert flags("evaluation.prompt=").evaluation.prompt is None
    assert flags("score.keep= gradients , projection").score.keep == "gradients,projection"


def test_evaluation_files_in_every_form(tmp_path: Path) -> None:
    expected = {"old": "x/old.jsonl", "new": "y/new.jsonl.gz"}
    assert flags("evaluation.files=x/old.jsonl,y/new.jsonl.gz").evaluation.files == expected
    listed = "evaluation:\n  files:\n  - x/old.jsonl\n  - y/new.jsonl.gz\n"
    assert from_yaml(tmp_path, listed).evaluation.files == expected
    paths: Any = [Path("x/old.jsonl"), Path("y/new.jsonl.gz")]
    made = dataclasses.replace(flags(), evaluation=EvaluationConfig(files=paths))
    assert made.evaluation.files == expected
    assert flags("evaluation.files=a:b:c").evaluation.files == {"a": "b:c"}
    assert flags("evaluation.files=").evaluation.files == {}
    twice = problem("evaluation.files=x/a.jsonl,y/a.jsonl")
    assert twice.startswith("evaluation.files: ") and "'a' is used twice" in twice
    assert "a name and a path" in problem("evaluation.files=a:")


def test_python_values_are_normalised() -> None:
    path: Any = Path("some") / "model"
    lr: Any = np.float32(0.5)
    epochs: Any = np.int64(2)
    config = Config(
        model=ModelConfig(path=path),
        data=DataConfig(path="d"),
        finetune=FinetuneConfig(lr=lr, epochs=epochs, max_grad_norm=1),
        select=SelectConfig(data_budget=np.float64(0.25)),
    )
    assert config.model.path == str(path)
    assert typed(config.finetune.lr) == (float, 0.5)
    assert typed(config.finetune.epochs) == (int, 2)
    assert typed(config.finetune.max_grad_norm) == (float, 1.0)
    assert typed(config.select.data_budget) == (float, 0.25)
    assert "path: some/model" in to_yaml(config)


# --- problems -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("score.lam", "0.5", "write 0.5 without quotes"),
        ("select.data_budget", "0.5", "write 0.5 without quotes"),
        ("score.lam", None, "default"),
        ("score.lam", True, "default"),
        ("finetune.epochs", True, "default"),
        ("score.lam", float("nan"), "default"),
        ("score.lam", 10**400, "default"),
        ("select.data_budget", float("-inf"), "default"),
        ("score.lam_relative", "true", "default"),
        ("score.step", 3, "default"),
        ("model.path", "", "give text"),
        ("evaluation.files", 3, "default"),
        ("evaluation.files", {"a": 3}, "a name and a path"),
        ("score.keep", {"a": 1}, "default"),
    ],
)
def test_wrong_python_types_are_refused(key: str, value: Any, cure: str) -> None:
    mapping = {"model.path": "m", "data.path": "d", key: value}
    with pytest.raises(ConfigError) as caught:
        from_mapping(mapping)
    (text,) = caught.value.problems
    assert text.startswith(f"{key}: ") and cure in text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("score.lamb", ["score.lam"]),
        ("scor.lam", ["score.lam"]),
        ("lam", ["score.lam"]),
        ("score.batch-tokens", ["score.batch_tokens", "evaluation.batch_tokens"]),
        ("score.lr", ["warmup.lr", "finetune.lr"]),
        ("warmup.weight_decay", ["finetune.weight_decay"]),
        ("sed", ["seed"]),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, meant: list[str]) -> None:
    expected = " or ".join(repr(known) for known in meant)
    assert problem(f"{key}=1") == f"{key}: no such key; did you mean {expected}?"


def test_a_hopeless_key_lists_what_there_is() -> None:
    assert "select.* has select.variant, select.data_budget" in problem("select.qqqqq=1")
    assert "sections: data, evaluation, finetune" in problem("zzz.qqqqq=1")
    with pytest.raises(ConfigError, match="zzz: no such key"):
        from_mapping({"model.path": "m", "data.path": "d", "zzz": {}})


def test_methods_are_found_by_axis_and_name(tmp_path: Path) -> None:
    assert "did you mean 'random'?" in problem("method.data=randon")
    assert "it is a method of method.data" in problem("method.weights=random")
    assert problem("method=random").startswith("method: 'random' is not allowed; it is a section")
    assert "no such key" in problem("method.what=1")
    assert "both sides are dualsft" in problem("select.rounds=1", "method.params=random")
    assert "did you mean 'piqa'" in problem("evaluation.tasks=piqaa")
    with pytest.raises(ConfigError) as caught:
        flags("method.data=random", "select.variant=param")
    assert "leave select.variant out" in str(caught.value)


def test_options_of_methods_are_one_mapping(tmp_path: Path) -> None:
    """Dotted, nested, and as config.yaml writes them back."""
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ndata: {path: d}\nmethod: {params: lift, lift: {rank: 7}}\n")
    nested, dotted = load(path), flags("method.params=lift", "method.lift.rank=7")
    assert nested.method.options == dotted.method.options == {"lift.rank": 7}
    path.write_text(to_yaml(dotted))
    assert load(path) == dotted
    assert "did you mean 'method.lift.rank'?" in problem("method.params=lift", "method.lift.rnk=7")
    assert "has no effect" in problem("method.lift.rank=7")
    assert "an integer" in problem("method.params=lift", "method.lift.rank=many")


def test_required_keys_are_asked_for() -> None:
    with pytest.raises(ConfigError) as caught:
        load()
    found = [text.partition(";")[0] for text in caught.value.problems]
    assert found == ["model.path: missing", "data.path: missing"]
    fields = ("data.prompt_field=q", "data.response_field=a")
    assert len(problems(*fields, "data.format=alpaca")) == 2


def test_an_invalid_config_cannot_be_made_in_python() -> None:
    with pytest.raises(ConfigError, match=r"score\.lam: -1 is not allowed"):
        Config(model=ModelConfig(path="m"), data=DataConfig(path="d"), score=ScoreConfig(lam=-1))
    wrong: Any = {"path": "m"}
    with pytest.raises(ConfigError, match="give a ModelConfig"):
        Config(model=wrong, data=DataConfig(path="d"))
    config = flags()
    with pytest.raises(ConfigError, match=r"score\.step"):
        dataclasses.replace(
            config,
            score=dataclasses.replace(config.score, step="adam"),
            warmup=WarmupConfig(epochs=0),
        )
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_validate_sees_a_change_behind_its_back() -> None:
    config = flags()
    validate(config)
    object.__setattr__(config.score, "tau", 0.0)
    with pytest.raises(ConfigError, match=r"score\.tau: 0\.0 is not allowed"):
        validate(config)
    not_a_config: Any = {"seed": 1}
    with pytest.raises(ConfigError, match="give a dualsft.Config"):
        validate(not_a_config)


# --- files ----------------------------------------------------------------------------------------


def test_overrides_win_and_the_last_one_wins_most(tmp_path: Path) -> None:
    mapping = {"score": {"lam": 0.1, "tau": 2.0}, "seed": 1}
    words = [*BASE, "score.lam=0.5", "score.lam=0.6", "seed=3", "split.val=7"]
    config = from_mapping(mapping, words)
    assert mapping == {"score": {"lam": 0.1, "tau": 2.0}, "seed": 1}
    assert (config.score.lam, config.score.tau, config.seed, config.split.val) == (0.6, 2.0, 3, 7)
    with pytest.raises(ConfigError) as caught:
        from_mapping({}, [*BASE, "score.lam", "=3"])
    assert len(caught.value.problems) == 2
    path = tmp_path / "c.yaml"
    path.write_text("model.path: m\ndata.path: d\nscore.lam: 0.1\nselect:\n")
    config = load(path, ["score.lam=0.2", "select.rounds=1"])
    assert (config.score.lam, config.select.rounds) == (0.2, 1)
    path.write_text("method.lift.rank: 9\nmethod: {params: lift, lift: {rank: 7}}\n")
    assert load(path, [*BASE, "method.lift.rank=4"]).method.options == {"lift.rank": 4}


def test_recipes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.yaml").write_text("model: {path: m}\nseed: 5\n")
    (tmp_path / "README.md").write_text("not a recipe")
    monkeypatch.setattr(config_module, "_recipe_folder", lambda: tmp_path)
    assert recipe_names() == ["small"]
    assert load("small", ["data.path=d", "score.lam=0.3"]).seed == 5
    with pytest.raises(ConfigError, match="did you mean 'small'?"):
        load("smal")
    with pytest.raises(ConfigError, match="data.path: missing"):
        load("small")


def test_every_packaged_recipe_loads() -> None:
    assert recipe_names() == ["magicoder", "metamathqa", "quickstart", "recommended"]
    for name in recipe_names():
        config = load(name, ["data.path=d.jsonl", "model.path=m"])
        assert warnings(config) == [], name


# --- options without effect -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), []),
        (("score.preservation=l2", "score.tau=2"), ["score.tau=2.0 has no effect"]),
        (("score.preservation=l2",), []),
        (("score.preservation=none", "score.lam=0.5"), ["score.lam=0.5 has no effect"]),
        (("score.preservation=none", "score.lam_relative=on"), ["score.lam_relative=true has no"]),
        (
            ("score.preservation=none", "data.anchor_path=a.jsonl"),
            ["data.anchor_path='a.jsonl' has"],
        ),
        (
            ("score.preservation=none", "data.anchor_path=a.jsonl", "finetune.retention=1"),
            [],
        ),
        (("score.curvature=none", "score.curvature_scale=10"), ["score.curvature_scale=10.0 has"]),
        (("select.order=param_to_data",), ["select.order='param_to_data' has no effect"]),
        (("select.order=param_to_data", "select.rounds=1"), []),
        (("select.variant=data", "select.param_budget=9"), ["select.param_budget=9 has no effect"]),
        (
            ("select.variant=param", "select.data_budget=0.2", "score.mode=two_pass"),
            ["select.data_budget=0.2 has no", "score.mode='two_pass' has no effect"],
        ),
        (("evaluation.max_new_tokens=9",), ["evaluation.max_new_tokens=9 has no effect"]),
        (("evaluation.max_new_tokens=9", "evaluation.prompt=hi"), []),
        (("finetune.micro_batch_size=99",), ["finetune.micro_batch_size=99 acts as"]),
        (
            ("warmup.epochs=0", "warmup.lr=1e-3"),
            [
                "warmup.lr=0.001 has no effect with warmup.epochs=0",
                "score.preservation=cwsd is exactly zero with warmup.epochs=0",
                "score.curvature=adam_rms is none with warmup.epochs=0",
            ],
        ),
    ],
)
def test_options_without_effect_are_said(overrides: tuple[str, ...], expected: list[str]) -> None:
    found = warnings(flags(*overrides))
    assert len(found) == len(expected), found
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))
