"""Settings: one definition for Python, YAML and flags; every problem named at once."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

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
    keys,
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


def yaml_problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, text)
    return caught.value.problems


def typed(value: Any) -> tuple[type, Any]:
    return type(value), value


# --- the definition -------------------------------------------------------------------------------


def test_defaults_are_the_ones_promised() -> None:
    flat = to_flat(flags())
    expected = {
        "seed": 42,
        "model.dtype": "auto",
        "data.max_length": 2048,
        "data.bad_rows": "error",
        "split.val": None,
        "split.anchor": None,
        "split.warm": 0.05,
        "warmup.lr": None,
        "warmup.epochs": 1,
        "score.lam": 0.8,
        "score.lam_relative": False,
        "score.tau": 1.0,
        "score.preservation": "cwsd",
        "score.curvature": "adam_rms",
        "score.step": "sgd",
        "score.mode": "one_pass",
        "score.candidates": "block_linear",
        "score.keep": "gradients",
        "score.batch_tokens": None,
        "select.variant": "dual",
        "select.data_budget": 0.1,
        "select.param_budget": 0.05,
        "select.rounds": 0,
        "select.order": "data_to_param",
        "finetune.lr": 2e-5,
        "finetune.epochs": 3,
        "finetune.batch_size": 64,
        "finetune.max_grad_norm": 1.0,
        "finetune.weight_decay": 0.0,
        "finetune.warmup_ratio": 0.03,
        "evaluation.files": {},
        "evaluation.max_new_tokens": 48,
    }
    assert {key: flat[key] for key in expected} == expected


def test_the_keys_of_the_command_line_contract_exist() -> None:
    contract = {
        "": "seed",
        "model": "path dtype",
        "data": "path format template max_length bad_rows",
        "split": "val anchor warm",
        "warmup": "lr epochs batch_size",
        "score": "lam lam_relative tau preservation curvature curvature_scale step mode candidates"
        " keep batch_tokens",
        "select": "variant data_budget param_budget rounds order",
        "finetune": "lr epochs batch_size micro_batch_size max_grad_norm",
    }
    expected = {
        f"{s}.{name}".lstrip(".") for s, names in contract.items() for name in names.split()
    }
    assert expected <= set(keys())


def test_every_field_is_documented_with_type_and_default() -> None:
    docs = {doc.key: doc for doc in describe()}
    assert list(docs) == keys()
    assert all(doc.doc.endswith(".") and doc.type_text for doc in docs.values())
    assert docs["model.path"].default == "required"
    assert docs["split.val"].default == "null"
    assert docs["score.lam"].default == "0.8"
    assert docs["evaluation.files"].default == "{}"
    assert docs["score.step"].type_text == "one of sgd, adam"
    assert docs["score.candidates"].doc.startswith("Parameters to select from: block_linear, all")


def test_described_defaults_can_be_typed_as_flags() -> None:
    typed_out = [f"{d.key}={d.default}" for d in describe() if d.default not in ("required", "{}")]
    assert flags(*typed_out) == flags()


def test_config_imports_nothing_heavy() -> None:
    source = Path(config_module.__file__).parents[2]
    code = (
        "import sys, dualsft.config.settings; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# --- three ways, one meaning ----------------------------------------------------------------------

IN_YAML = """
seed: 7
model: {path: m, dtype: float32}
data: {path: d.jsonl, prompt_field: no, response_field: none}
split: {val: 100, anchor: 0.2, warm: 1}
warmup: {lr: 1e-4, epochs: 2, batch_size: 8}
score: {lam: 0, lam_relative: yes, candidates: '*q_proj*, !*.0.*', keep: all}
select: {data_budget: 5, param_budget: 1.0}
finetune: {lr: 3e-5, micro_batch_size: 4}
evaluation:
  files: {old: a.jsonl, new: b.jsonl}
"""

IN_FLAGS = [
    *("seed=7", "model.dtype=float32", "data.prompt_field=no", "data.response_field=none"),
    *("split.val=100", "split.anchor=0.2", "split.warm=1"),
    *("warmup.lr=1e-4", "warmup.epochs=2", "warmup.batch_size=8"),
    *("score.lam=0", "score.lam_relative=true", "score.candidates=*q_proj*,!*.0.*"),
    *("score.keep=all", "select.data_budget=5", "select.param_budget=1.0"),
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
        score=ScoreConfig(lam=0, lam_relative=True, candidates="*q_proj*,!*.0.*", keep="all"),
        select=SelectConfig(data_budget=5, param_budget=1.0),
        finetune=FinetuneConfig(lr=3e-5, micro_batch_size=4),
        evaluation=EvaluationConfig(files={"old": "a.jsonl", "new": "b.jsonl"}),
    )


def test_python_yaml_and_flags_agree(tmp_path: Path) -> None:
    by_yaml, by_flags = from_text(tmp_path, IN_YAML), flags(*IN_FLAGS)
    assert in_python() == by_yaml == by_flags
    assert to_yaml(in_python()) == to_yaml(by_yaml) == to_yaml(by_flags)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100", 100), ("1", 1), ("1.0", 1.0), ("0.1", 0.1), ("1e-1", 0.1), ("5", 5), ("1_000", 1000)],
)
@pytest.mark.parametrize("key", ["select.data_budget", "select.param_budget"])
def test_budgets_keep_counts_and_fractions_apart(
    tmp_path: Path, key: str, text: str, expected: float
) -> None:
    section, _, name = key.partition(".")
    required = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    configs = [
        flags(f"{key}={text}"),
        from_yaml(tmp_path, f"{section}:\n  {name}: {text}\n"),
        from_mapping({**required, section: {name: expected}}),
        from_text(tmp_path, to_yaml(flags(f"{key}={text}"))),
    ]
    for config in configs:
        assert typed(to_flat(config)[key]) == typed(expected)


def test_yaml_words_stay_what_the_field_says(tmp_path: Path) -> None:
    text = """
data: {prompt_field: off, response_field: no}
score: {preservation: none, curvature: none, lam_relative: off}
warmup: {lr: none}
finetune: {lr: 1e-4}
split: {val: ~, anchor: null}
evaluation: {prompt: 2024-01-01}
"""
    config = from_yaml(tmp_path, text)
    assert (config.data.prompt_field, config.data.response_field) == ("off", "no")
    assert (config.score.preservation, config.score.curvature) == ("none", "none")
    assert config.score.lam_relative is False
    assert typed(config.finetune.lr) == (float, 1e-4)
    assert config.warmup.lr is config.split.val is config.split.anchor is None
    assert config.evaluation.prompt == "2024-01-01"


def test_null_can_be_quoted_into_a_word(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, "data: {prompt_field: 'null', response_field: \"~\"}")
    assert (config.data.prompt_field, config.data.response_field) == ("null", "~")
    assert from_text(tmp_path, to_yaml(config)) == config
    assert flags("evaluation.prompt=null").evaluation.prompt is None
    assert flags("evaluation.prompt=").evaluation.prompt is None


def test_flag_values_are_taken_verbatim() -> None:
    prompt = "  what is a=b, 'really'? "
    assert flags(f"evaluation.prompt={prompt}").evaluation.prompt == prompt


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


def test_lists_are_joined_and_spaces_dropped(tmp_path: Path) -> None:
    text = "score:\n  keep: [gradients, projection]\n  candidates: ['*q*', '!*.0.*']\n"
    config = from_yaml(tmp_path, text)
    assert config.score.keep == "gradients,projection"
    assert config.score.candidates == "*q*,!*.0.*"
    assert flags("score.keep= gradients , projection").score.keep == "gradients,projection"


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


def test_two_configs_share_no_dict() -> None:
    one, two = flags(), flags()
    one.evaluation.files["a"] = "b"
    assert two.evaluation.files == {} == flags().evaluation.files


# --- round trips ----------------------------------------------------------------------------------

WORDS = st.text(min_size=1, max_size=20)
BUDGETS = st.one_of(st.integers(1, 10**12), st.floats(0, 1, exclude_min=True, allow_subnormal=True))


@settings(max_examples=300, deadline=None)
@given(
    path=WORDS,
    fields=st.none() | st.tuples(WORDS, WORDS),
    prompt=st.none() | WORDS,
    lr=st.floats(0, exclude_min=True, allow_infinity=False),
    budget=BUDGETS,
    val=st.none() | st.integers(1, 10**9),
    files=st.dictionaries(WORDS.filter(lambda name: name != "validation"), WORDS, max_size=3),
)
def test_yaml_round_trips_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    path: str,
    fields: tuple[str, str] | None,
    prompt: str | None,
    lr: float,
    budget: float,
    val: int | None,
    files: dict[str, str],
) -> None:
    config = Config(
        model=ModelConfig(path=path),
        data=DataConfig(
            path="d",
            prompt_field=fields[0] if fields else None,
            response_field=fields[1] if fields else None,
        ),
        split=SplitConfig(val=val),
        select=SelectConfig(data_budget=budget),
        finetune=FinetuneConfig(lr=lr),
        evaluation=EvaluationConfig(files=files, prompt=prompt),
    )
    again = from_text(tmp_path_factory.getbasetemp(), to_yaml(config))
    assert again == config
    assert [typed(v) for v in to_flat(again).values()] == [
        typed(v) for v in to_flat(config).values()
    ]
    assert from_mapping(to_mapping(config)) == config
    assert to_yaml(again) == to_yaml(config)


def test_the_yaml_is_plain_yaml() -> None:
    """Consent to run code is left out: it is never stored."""
    mapping = to_mapping(in_python())
    del mapping["model"]["trust_remote_code"], mapping["evaluation"]["allow_code_execution"]
    assert yaml.safe_load(to_yaml(in_python())) == mapping


# --- problems -------------------------------------------------------------------------------------


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            None,
            [
                *("score.lam=-1", "score.lmd=3", "nonsense", "score=2", "method.data=lass"),
                *("model.dtype=int4", "select.variant=data", "select.rounds=1", "seed=1.5"),
            ],
        )
    starts = sorted(text.partition(":")[0] for text in caught.value.problems)
    assert starts == sorted(
        [
            *("score.lam", "score.lmd", "'nonsense'", "score", "method.data", "model.dtype"),
            *("select.rounds", "seed", "model.path", "data.path"),
        ]
    )
    assert all(text in str(caught.value) for text in caught.value.problems)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("override", "shown", "allowed", "cure"),
    [
        ("score.lam=-0.5", "-0.5", "a number >= 0", "default 0.8"),
        ("score.lam=abc", "'abc'", "a number >= 0", "default 0.8"),
        ("score.lam=nan", "nan", "a number >= 0", "default 0.8"),
        ("score.tau=0", "0", "a number > 0", "default 1.0"),
        ("finetune.lr=inf", "inf", "a number > 0", "default 2e-05"),
        ("finetune.lr=1e999", "1e999", "a number > 0", "default 2e-05"),
        ("finetune.lr=true", "'true'", "a number > 0", "default 2e-05"),
        ("finetune.epochs=3.0", "3.0", "an integer >= 1", "default 3"),
        ("finetune.epochs=0", "0", "an integer >= 1", "default 3"),
        ("finetune.warmup_ratio=1", "1", "a number >= 0 and < 1", "default 0.03"),
        ("warmup.epochs=-1", "-1", "an integer >= 0", "default 1"),
        ("warmup.batch_size=0", "0", "an integer >= 1, or null", "default null"),
        ("data.max_length=7", "7", "an integer >= 8", "default 2048"),
        ("seed=4294967296", "4294967296", "an integer >= 0 and <= 4294967295", "default 42"),
        ("score.lam_relative=1", "1", "true or false", "default false"),
        ("score.step=adm", "'adm'", "one of sgd, adam", "did you mean 'adam'?"),
        ("score.step=", "null", "one of sgd, adam", "default 'sgd'"),
        ("score.keep=gradient", "'gradient'", "gradients, param_scores", "mean 'gradients'?"),
        ("score.candidates=a,,b", "'a,,b'", "comma-separated", "remove the empty item"),
        ("score.candidates=!", "'!'", "comma-separated", "remove the empty item"),
        ("select.data_budget=0", "0", "a count (integer >= 1) or a fraction", "write 100"),
        ("select.data_budget=0.0", "0.0", "(0, 1]", "default 0.1"),
        ("select.data_budget=1.5", "1.5", "(0, 1]", "default 0.1"),
        ("select.data_budget=150.0", "150.0", "(0, 1]", "for a count write 150"),
        ("select.data_budget=nan", "nan", "(0, 1]", "default 0.1"),
        ("select.data_budget=10%", "'10%'", "(0, 1]", "write 0.1"),
        ("split.warm=null", "null", "(0, 1]", "default 0.05"),
        ("seed=" + "9" * 5000, "999...", "an integer", "default 42"),
    ],
)
def test_a_problem_names_key_value_allowed_and_cure(
    override: str, shown: str, allowed: str, cure: str
) -> None:
    text = problem(override)
    key = override.partition("=")[0]
    assert text.startswith(f"{key}: ") and f"{shown} is not allowed; give " in text
    assert allowed in text and cure in text
    assert len(text) < 400


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("score.lam", "0.5", "write 0.5 without quotes"),
        ("finetune.epochs", "3", "write 3 without quotes"),
        ("select.data_budget", "0.5", "write 0.5 without quotes"),
        ("score.lam", True, "default"),
        ("finetune.epochs", True, "default"),
        ("select.data_budget", True, "default"),
        ("score.lam", float("nan"), "default"),
        ("score.lam", 10**400, "default"),
        ("select.data_budget", float("-inf"), "default"),
        ("score.lam", [0.5], "default"),
        ("score.lam", None, "default"),
        ("score.lam_relative", 1, "default"),
        ("score.lam_relative", "true", "default"),
        ("score.step", 3, "default"),
        ("model.path", 3, "give text"),
        ("model.path", "", "give text"),
        ("data.prompt_field", ["a"], "default"),
        ("evaluation.files", 3, "default"),
        ("evaluation.files", "a.jsonl", "default"),
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
        ("score.lambda", ["score.lam"]),
        ("scor.lam", ["score.lam"]),
        ("lam", ["score.lam"]),
        ("Score.Lam", ["score.lam"]),
        ("score.batch-tokens", ["score.batch_tokens", "evaluation.batch_tokens"]),
        ("score.lr", ["warmup.lr", "finetune.lr"]),
        ("warmup.weight_decay", ["finetune.weight_decay"]),
        ("finetune.rounds", ["select.rounds"]),
        ("finetune.batchsize", ["finetune.batch_size"]),
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
    with pytest.raises(ConfigError) as caught:
        flags("method.data=random", "select.variant=param")
    assert "leave select.variant out" in str(caught.value)


def test_rounds_need_dualsft_on_both_sides() -> None:
    assert "both sides are dualsft" in problem("select.rounds=1", "method.params=random")


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
    assert [text.partition(";")[0] for text in caught.value.problems] == [
        "model.path: missing",
        "data.path: missing",
    ]


def test_settings_that_contradict() -> None:
    assert problem("score.step=adam", "warmup.epochs=0").startswith("score.step: 'adam' is not")
    assert flags("score.step=adam").score.step == "adam"
    for variant in ("data", "param"):
        text = problem("select.rounds=2", f"select.variant={variant}")
        assert text.startswith("select.rounds: 2 is not allowed with select.variant=" + variant)
    assert "give data.response_field too" in problem("data.prompt_field=q")
    assert "give data.prompt_field too" in problem("data.response_field=q")
    both = ("data.prompt_field=q", "data.response_field=a")
    assert len(problems(*both, "data.format=alpaca")) == 2
    assert flags(*both).data.prompt_field == "q"
    text = problem("split.val=0.5", "split.anchor=0.45")
    assert text.startswith("split.val=0.5, split.anchor=0.45, split.warm=0.05: leaves no pool")


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


def test_duplicate_yaml_keys_are_named_with_their_lines(tmp_path: Path) -> None:
    (text,) = yaml_problems(tmp_path, "score:\n  lam: 0.5\n  tau: 1\n  lam: 0.6\n")
    assert "my run é.yaml:6: 'lam' is already given on line 4" in text
    assert "'score' is already given" in yaml_problems(tmp_path, "score: {}\nscore: {}\n")[0]
    (text,) = yaml_problems(tmp_path, "score: {lam: 1}\nscore.lam: 2\n")
    assert text.startswith("score.lam: given twice")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score: {candidates: *q_proj}", "quote a value that starts with one of *"),
        ("score: {candidates: !foo*}", "quote a value that starts with one of * & !"),
        ("score:\n  candidates: !foo", "the tag !foo is not allowed; quote"),
        ("seed: !!python/object/apply:os.system ['true']", "python/object/apply:os.system"),
        ("score: &s {lam: 1}\nselect: *s", "aliases"),
        ("score: &s {lam: *s}", "aliases"),
        ("score: [1, 2", "not valid YAML"),
        ("score: 5", "score: 5 is not allowed; it is a section"),
        ("? [a, b]\n: 1", "a key must be a plain word"),
        ("evaluation: {files: " + "[" * 30 + "]" * 30 + "}", "more than 8 levels"),
        ("evaluation: {files: " + "[" * 1500 + "]" * 1500 + "}", "nested too deeply"),
        ("---\nseed: 1", "not valid YAML"),
    ],
)
def test_odd_yaml_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in yaml_problems(tmp_path, text)[0]


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mapping of sections"):
        from_text(tmp_path, "- 1\n- 2\n")
    with pytest.raises(ConfigError, match="model.path: missing"):
        from_text(tmp_path, "")
    (tmp_path / "latin.yaml").write_bytes("seed: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="latin.yaml: cannot be read"):
        load_yaml(tmp_path / "latin.yaml")
    (tmp_path / "big.jsonl").write_text("{}\n" * 400_000)
    with pytest.raises(ConfigError, match="big.jsonl: over 1000000 bytes"):
        load_yaml(tmp_path / "big.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfmodel.path: m\ndata.path: d\n")
    assert load_yaml(tmp_path / "bom.yaml").model.path == "m"


def test_empty_sections_are_empty(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "score:\nselect: {}\nwarmup: ~\n") == flags()


def test_overrides_win_and_the_last_one_wins_most() -> None:
    mapping = {"score": {"lam": 0.1, "tau": 2.0}, "seed": 1}
    words = [*BASE, "score.lam=0.5", "score.lam=0.6", "seed=3", "split.val=7"]
    config = from_mapping(mapping, words)
    assert mapping == {"score": {"lam": 0.1, "tau": 2.0}, "seed": 1}
    assert (config.score.lam, config.score.tau, config.seed, config.split.val) == (0.6, 2.0, 3, 7)
    with pytest.raises(ConfigError) as caught:
        from_mapping({}, [*BASE, "score.lam", "=3"])
    assert len(caught.value.problems) == 2


def test_overrides_go_over_dotted_and_empty_sections(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model.path: m\ndata.path: d\nscore.lam: 0.1\nselect:\n")
    config = load(path, ["score.lam=0.2", "select.rounds=1"])
    assert (config.score.lam, config.select.rounds) == (0.2, 1)


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
