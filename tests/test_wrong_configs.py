"""Wrong configurations through the command line: each is refused with field, value and cure.

Every case runs `dualsft` in this process, as the entry point does: exit code 2, one `error:` line
per problem, no traceback, and nothing is written. The last tests are about several mistakes at
once, and about refusing them before torch is imported.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dualsft
from dualsft import cli

Folders = Callable[[str], Path]
NAMED = ("run", "model.path=m", "data.path=d.jsonl")


class Shell:
    """The command line in a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def refused(self, *words: str) -> list[str]:
        """The problems, one a line; fails unless they are the user's and leave no trace."""
        before = self.tree()
        code, stderr = self.call(*words)
        assert code == 2, f"exit {code}\n{stderr}"
        assert "Traceback" not in stderr
        assert self.tree() == before, "something was written"
        lines = stderr.splitlines()
        assert lines and all(line.startswith("error: ") for line in lines), stderr
        return [line.removeprefix("error: ") for line in lines]

    def call(self, *words: str) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["dualsft", *words])
            patch.setenv("COLUMNS", "200")
            with pytest.raises(SystemExit) as ended:
                cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        return code, self.capsys.readouterr().err

    def tree(self) -> dict[str, bytes]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        found = {str(path): path.read_bytes() for path in files}
        return found | {str(path): b"" for path in self.folder.rglob("*") if path.is_dir()}

    def write(self, name: str, content: str | bytes) -> None:
        data = content.encode() if isinstance(content, str) else content
        (self.folder / name).write_bytes(data)


@pytest.fixture
def shell(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_folder: Folders,
    corpus: Path,
) -> Iterator[Shell]:
    """With a model `m` and data `d.jsonl` that are fine, so that one thing at a time is wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").symlink_to(model_folder("llama"))
    for name in ("d.jsonl", "v.jsonl"):
        (tmp_path / name).write_bytes(corpus.read_bytes())
    capsys.readouterr()
    library = logging.getLogger("dualsft")
    handlers = list(library.handlers)
    yield Shell(tmp_path, capsys)
    library.handlers[:] = handlers


def has(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


# --- values ------------------------------------------------------------------------------------

VALUES: list[tuple[str, str, str, str]] = [
    # one of each kind: setting, the value as shown, what is allowed, the cure
    ("model.trust_remote_code=sure", "'sure'", "true or false", "default false"),
    ("seed=-1", "-1", "an integer >= 0", "default 42"),
    ("seed=4294967296", "4294967296", "an integer >= 0 and <= 4294967295", "default 42"),
    ("seed=" + "9" * 5000, "999...", "an integer", "default 42"),
    ("model.dtype=fp16", "'fp16'", "one of auto, float32, bfloat16", "did you mean 'float16'?"),
    ("model.device=gpu", "'gpu'", "one of auto, cpu, cuda", "did you mean 'cuda'?"),
    ("data.path=", "null", "a path, or a list of paths", "give"),
    ("data.max_length=1e3", "1e3", "an integer >= 8", "default 2048"),
    ("split.val=-5", "-5", "a count (integer >= 1) or a fraction", "write 100 for"),
    ("split.val=0", "0", "a count (integer >= 1) or a fraction", "write 100 for"),
    ("split.anchor=-5", "-5", "a count (integer >= 0) or a fraction", "write 100 for"),
    ("split.val=2.0", "2.0", "(0, 1]", "for a count write 2"),
    ("warmup.lr=0", "0", "a number > 0", "default null"),
    ("warmup.batch_size=0", "0", "an integer >= 1, or null", "default null"),
    ("score.lam=-0.1", "-0.1", "a number >= 0", "default 0.8"),
    ("score.lam=1e31", "1e31", "<= 1e+30", "default 0.8"),
    ("score.lam=0,8", "'0,8'", "a number >= 0", "default 0.8"),
    ("score.lam_relative=score", "'score'", "true or false, or scores", "default false"),
    ("score.preservation=CWSD", "'CWSD'", "one of cwsd", "did you mean 'cwsd'?"),
    ("score.mode=onepass", "'onepass'", "one of one_pass, two_pass", "did you mean 'one_pass'?"),
    ("score.step=", "null", "one of sgd, adam", "default 'sgd'"),
    ("score.keep=all,scores", "'all,scores'", "projection, all", "did you mean 'param_scores'?"),
    ("score.candidates=a,,b", "'a,,b'", "comma-separated", "remove the empty item"),
    ("score.candidates=!", "'!'", "comma-separated", "remove the empty item"),
    ("select.data_budget=nan", "nan", "(0, 1]", "default 0.1"),
    ("select.data_budget=150.0", "150.0", "(0, 1]", "for a count write 150"),
    ("select.param_budget=5%", "'5%'", "(0, 1]", "write 0.05"),
    ("finetune.lr=1e999", "1e999", "a number > 0", "default 2e-05"),
    ("finetune.lr=true", "'true'", "a number > 0", "default 2e-05"),
    ("finetune.warmup_ratio=1", "1", "a number >= 0 and < 1", "default 0.03"),
]


@pytest.mark.parametrize(("setting", "shown", "allowed", "cure"), VALUES, ids=lambda v: v[:40])
def test_a_wrong_value(setting: str, shown: str, allowed: str, cure: str, shell: Shell) -> None:
    [text] = shell.refused(*NAMED, setting)
    assert text.startswith(f"{setting.partition('=')[0]}: "), text
    has(text, f"{shown} is not allowed; give ", allowed, cure)
    assert len(text) < 400


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # keys that do not exist
        (("--score.lamb", "0.5"), ("score.lamb: no such key; did you mean 'score.lam'?",)),
        (("--modle.path=x",), ("modle.path: no such key; did you mean 'model.path'",)),
        (("score.lam.x=1",), ("score.lam.x: no such key", "score.lam")),
        (("score=1",), ("score: 1 is not allowed; it is a section", "such as score.form")),
        (("score.=1",), ("score.: no such key",)),
        (("=1",), ("'=1': not a setting; write key=value, as in score.lam=0.5",)),
        (("method.data=lass",), ("method.data: 'lass' is not a method of this axis",)),
        # settings that contradict
        (
            ("score.step=adam", "warmup.epochs=0"),
            ("score.step: 'adam' is not allowed with warmup.epochs=0", "give score.step=sgd"),
        ),
        (
            ("select.variant=param", "select.rounds=1"),
            ("select.rounds: 1 is not allowed with select.variant=param", "select.rounds=0"),
        ),
        (
            ("select.variant=data", "select.rounds=2"),
            ("select.rounds: 2 is not allowed with select.variant=data",),
        ),
        (
            ("data.prompt_field=q", "data.format=prompt_completion"),
            ("give data.response_field too",),
        ),
        (
            ("data.text_field=q", "data.prompt_field=a"),
            ("data.text_field: 'q' is not allowed with data.prompt_field", "one text or"),
        ),
        (
            ("data.messages_field=q", "data.input_field=a"),
            ("data.messages_field: 'q' is not allowed with data.input_field", "a list of turns"),
        ),
        (
            ("data.text_field=q", "data.format=tokens"),
            ("data.text_field: 'q' is not allowed with data.format=tokens", "data.format=text"),
        ),
        (
            ("data.val_path=v.jsonl", "split.val=10"),
            ("split.val: 10 is not allowed with data.val_path", "leave one of the two out"),
        ),
        (
            ("score.lam_relative=scores",),
            ("score.lam_relative: 'scores' is not allowed with score.mode=one_pass", "two_pass"),
        ),
        (
            ("data.anchor_path=v.jsonl", "split.anchor=0.1"),
            (
                "split.anchor: 0.1 is not allowed with data.anchor_path",
                "leave one of the two out",
            ),
        ),
        (
            ("split.anchor=0",),
            (
                "score.preservation: cwsd is not allowed with split.anchor=0",
                "give score.preservation=none or l2, data.anchor_path, or split.anchor=null",
            ),
        ),
        (
            ("split.anchor=0", "score.preservation=l2", "finetune.retention=1"),
            (
                "finetune.retention: 1.0 is not allowed with split.anchor=0",
                "give data.anchor_path, or split.anchor=null",
            ),
        ),
        (
            ("split.val=0.4", "split.anchor=0.4", "split.warm=0.2"),
            ("split.val=0.4, split.anchor=0.4, split.warm=0.2: leaves no pool", "below 1"),
        ),
        (
            ("data.messages_field=talk", "data.format=alpaca"),
            ("data.messages_field: 'talk' is not allowed with data.format=alpaca", "sharegpt"),
        ),
        (
            ("data.template_file=v.jsonl", "data.template=plain"),
            ("data.template_file: 'v.jsonl' is not allowed with data.template=plain", "chat"),
        ),
        (
            ("data.prompt_field=q", "data.response_field=a", "data.format=text"),
            ("data.prompt_field: 'q' is not allowed with data.format=text", "prompt_response"),
        ),
        (
            ("data.response_field=a", "data.format=prompt_completion"),
            ("data.response_field: 'a' is not allowed alone",),
        ),
        (
            ("evaluation.files=validation:v.jsonl",),
            ("evaluation.files: the name 'validation' is taken", "another_name:PATH"),
        ),
        (("evaluation.files=d.jsonl,./d.jsonl",), ("evaluation.files", "'d'")),
        # paths
        (("model.path=d.jsonl",), ("model.path: 'd.jsonl'",)),
        (("model.path=empty",), ("model.path: 'empty'", "config.json")),
        (("data.path=empty",), ("data.path", "empty")),
        (("data.path=notes.txt",), ("data.path", "notes.txt", ".jsonl")),
        (("data.path=builtin:zeno",), ("data.path: 'builtin:zeno'", "builtin:zeno/corpus")),
        (("data.path=d.jsonl,none.csv",), ("data.path: 'none.csv'",)),
        (("data.template_file=none.jinja",), ("data.template_file: 'none.jinja'", "Jinja")),
        (("data.path=~nobody_here/d.jsonl",), ("data.path", "nobody_here")),
        (("data.val_path=none.jsonl",), ("data.val_path: 'none.jsonl'",)),
        (("evaluation.files=x:none.jsonl",), ("evaluation.files: x: 'none.jsonl'",)),
        (("data.path=" + "x" * 5000,), ("data.path",)),
        (("data.path=a\x00b",), ("data.path",)),
        (("--out", "d.jsonl"), ("--out: 'd.jsonl' is not a folder", "give a new folder")),
        (
            ("--out", "full"),
            ("--out: 'full' is neither empty nor a run folder", "give a new folder"),
        ),
        (("--out", "d.jsonl/run"), ("d.jsonl",)),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_words_that_are_refused(
    words: tuple[str, ...], expected: tuple[str, ...], shell: Shell
) -> None:
    """Beside a model and data that are fine."""
    (shell.folder / "empty").mkdir()
    (shell.folder / "full").mkdir()
    shell.write("full/mine.txt", "mine")
    shell.write("notes.txt", "hello")
    text = shell.refused(*NAMED, *words)[0]
    has(text, *expected)
    assert len(text) < 6000


# --- files -------------------------------------------------------------------------------------

YAMLS: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "unclosed": ("score: {lam: 0.5\nseed: 1\n", ("c.yaml", "not valid YAML", "line")),
    "tab": ("score:\n\tlam: 0.5\n", ("c.yaml", "not valid YAML", "line 2", "indent by spaces")),
    "twice_inside": (
        "score:\n  lam: 0.5\n  tau: 1\n  lam: 0.6\n",
        ("c.yaml:4: 'lam' is already given on line 2",),
    ),
    "nested_and_dotted": ("score: {lam: 1}\nscore.lam: 2\n", ("score.lam: given twice",)),
    "python_tag": ("seed: !!python/name:os.system\n", ("c.yaml", "tag", "python/name")),
    "own_tag": ("data:\n  path: !env HOME\n", ("c.yaml", "tag !env is not allowed; quote")),
    "bare_star": ("score: {candidates: *q}\n", ("quote a value that starts with one of * & !",)),
    "self_alias": ("score: &s {lam: *s}\n", ("c.yaml", "aliases")),
    "laughs": (
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
        ("c.yaml", "aliases"),
    ),
    "list": ("- model.path: m\n", ("c.yaml", "mapping of sections")),
    "latin1": ("evaluation: {prompt: é}\n".encode("latin-1"), ("c.yaml: cannot be read", "UTF-8")),
    "binary": (b"\x1f\x8b\x08\x00" + bytes(range(256)), ("c.yaml", "cannot be read")),
    "too_big": (b"# " + b"x" * 110_000, ("c.yaml: over 100000 bytes",)),
    "deep": ("score: " + "{a: " * 3000 + "1" + "}" * 3000, ("c.yaml", "nested too deeply")),
    "levels": (
        "evaluation: {files: " + "[" * 30 + "]" * 30 + "}",
        ("c.yaml", "more than 8 levels"),
    ),
    "section_value": ("select: dual\n", ("select: 'dual' is not allowed; it is a section",)),
    "quoted_number": ("score: {lam: '0.5'}\n", ("score.lam", "write 0.5 without quotes")),
    "list_value": ("data: {max_length: [1, 2]}\n", ("data.max_length: ", "an integer >= 8")),
    "unknown_key": (
        "scoring: {lam: 1}\n",
        ("scoring.lam: no such key", "did you mean 'score.lam'"),
    ),
    "odd_key": ("? {a: b}\n: 1\n", ("c.yaml", "a key must be a plain word")),
}


@pytest.mark.parametrize("name", YAMLS)
def test_a_wrong_file(name: str, shell: Shell) -> None:
    content, expected = YAMLS[name]
    shell.write("c.yaml", content)
    found = shell.refused("run", "c.yaml", "model.path=m", "data.path=d.jsonl")
    has(found[0], *expected)
    assert all(line[0].strip() and ": " in line for line in found), "each line is a problem"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", "quickstar"), ("quickstar: no such file or recipe", "did you mean 'quickstart'?")),
        (
            ("run", "none.yaml"),
            ("none.yaml: no such file or recipe; recipes: ", "give a YAML file"),
        ),
        (("run", "lam"), ("lam: no such file or recipe",)),
        (("run", "a.yaml", "b.yaml"), ("'b.yaml': a second recipe or file after 'a.yaml'",)),
        (("run", "."), (".: cannot be read", "give a UTF-8 YAML file")),
        (("run", "--seed"), ("--seed: no value given; write seed=VALUE",)),
        (
            ("run", "--until", "everything"),
            ("--until: 'everything' is not a stage", "split, warmup"),
        ),
        (("run", "--until", "score"), ("--until: 'score' is not a stage", "scores")),
        (("run", "--until", ""), ("--until: '' is not a stage", "split, warmup")),
        (("run",), ("model.path: missing; it is required",)),
        (("check",), ("model.path: missing",)),
        (("score", "nowhere"), ("nowhere: not a run folder", "dualsft run")),
        (("finetune", "d.jsonl"), ("d.jsonl: not a run folder",)),
        (("report", "nowhere"), ("nowhere: no finished stage", "dualsft run --out nowhere")),
        (("quickstart", "c.yaml"), ("'c.yaml': the quickstart has its own recipe",)),
        (("quickstart", "seed=x"), ("seed: 'x' is not allowed",)),
        (("quickstart", "select.variant=param"), ("select.variant: cannot be changed in the",)),
        (("quickstart", "evaluation.prompt=null"), ("evaluation.prompt: cannot be changed",)),
        (("export", "merge", "no_base", "no_delta", "out"), ("no_",)),
        (("export", "extract", "no_base", "no_tuned", "out"), ("no_",)),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_wrong_words(words: tuple[str, ...], expected: tuple[str, ...], shell: Shell) -> None:
    has(shell.refused(*words)[0], *expected)


# --- paths -------------------------------------------------------------------------------------


def test_everything_that_is_missing_is_named_at_once(shell: Shell) -> None:
    found = shell.refused(
        "run",
        "model.path=no/such/model",
        "data.path=no/data.jsonl",
        "data.val_path=no/val.jsonl",
        "data.anchor_path=no/anchors.jsonl",
        "evaluation.files=old:no/old.jsonl,new:builtin:zeno/nothing",
    )
    sources = ("data.path", "data.val_path", "data.anchor_path")
    keys = ("model.path: 'no/such/model'", *sources, "evaluation.files: old")
    for line, key in zip(found, (*keys, "new"), strict=True):
        has(line, key)


# --- together ----------------------------------------------------------------------------------


def test_all_problems_are_named_at_once(shell: Shell) -> None:
    """From the file and from the words, of every kind, each once and on a line of its own."""
    shell.write("c.yaml", "seed: x\nscore: {lam: -1, tua: 2}\nselect: {variant: all}\n")
    words = ["run", "c.yaml", "finetune.lr=0", "warmup.epochs=0", "score.step=adam"]
    words += ["split.val=0.9", "split.warm=0.1"]
    [text] = shell.refused(*words, "bogus")
    assert "'bogus'" in text  # the words must make sense first
    found = shell.refused(*words)
    starts = (
        "score.tua: no such key; did you mean 'score.tau'?",
        "seed: 'x' is not allowed",
        "model.path: missing",
        "data.path: missing",
        "score.lam: -1 is not allowed",
        "select.variant: 'all' is not allowed",
        "finetune.lr: 0 is not allowed",
        "score.step: 'adam' is not allowed",
        "split.val=0.9, split.warm=0.1: leaves no pool",
    )
    assert len(found) == len(starts), found
    for start in starts:
        assert sum(line.startswith(start) for line in found) == 1, start


def test_debug_shows_where(shell: Shell) -> None:
    """`--debug` is the only way to a traceback."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dualsft", "--debug", *NAMED, "seed=x"])
        with pytest.raises(dualsft.ConfigError, match="seed"):
            cli.main()


def test_mistakes_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    """Six kinds of mistake in one process, which has then still not imported torch."""
    (tmp_path / "bad.yaml").write_text("score: {lam: [}\n")
    (tmp_path / "d.jsonl").write_text('{"prompt": "p", "response": "r"}\n')
    code = """
import sys
from dualsft.cli import main
for words in (["run", "seed=x"], ["run", "bad.yaml"], ["run", "no_recipe"], ["score", "no_run"],
              ["run", "model.path=no", "data.path=d.jsonl"], ["run", "--until", "never"]):
    sys.argv = ["dualsft", *words]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2, words
print(sorted({"torch", "transformers", "pyarrow", "numpy"} & set(sys.modules)))
"""
    source = str(Path(dualsft.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": source},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", "imported for nothing"
    assert done.stderr.count("error: ") >= 6
