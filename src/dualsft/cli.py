"""The command line: `dualsft run`, one command per stage, and tools.

    run · split · warmup · score · select · finetune · evaluate · report
    compare · diagnose · explain · estimate · check · export · methods · docs · quickstart

`dualsft run [RECIPE|FILE.yaml] --out DIR [--until STAGE] [key=value …]` runs all of Algorithm 1. A
stage command works on a run folder and reads its settings from the folder's config.yaml. With
--gpus N, or under torchrun, `run` and the stage commands run in parallel
(`distributed/launch.py`); the tools do not. This is the only module that prints. Exit codes: 0
success, 1 failure at run time, 2 user error, 75 another process was lost, 130 and 143 after Ctrl-C
and SIGTERM, with progress saved.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.resources
import io
import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from typer.core import TyperGroup

from dualsft import __version__
from dualsft.config import settings
from dualsft.config.completion import complete_setting, complete_word
from dualsft.config.methods import parts, registry
from dualsft.config.settings import Config
from dualsft.distributed import launch
from dualsft.errors import CheckError, ConfigError, DualsftError
from dualsft.runs.preflight import (
    STAGE_NAMES,
    check_run_folder,
    check_stage,
    load_checked,
    reading,
    shown_files,
)
from dualsft.system import signals as interrupt
from dualsft.system.paths import RunPath, files_read, wrong_kind
from dualsft.system.progress import Reporter, escaped, silent


class _Commands(TyperGroup):
    """The commands; what their usage errors quote is written out like all other messages."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _quoted():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _quoted():
            return super().invoke(ctx)


@contextmanager
def _quoted() -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        if hasattr(problem, "format_message"):  # click's own, which newer Typers contain
            problem.message = escaped(str(problem.message))  # pyright: ignore
        raise


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)
export_app = typer.Typer(
    no_args_is_help=True,
    help="Deltas: merge, compact, as an adapter, extract. Rows as data. A model for the hub.",
)
app.add_typer(export_app, name="export")

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def show(*lines: object, to: Console = console) -> None:
    """Print each line as it is, but for control characters."""
    for line in lines:
        to.print(escaped(str(line)), markup=False)


class _Stream(io.TextIOWrapper):
    """An output stream whose failure ends no run: it is silent after the first.

    The disk of a log may be full, and the reader of a pipe (`| head`) may leave.
    """

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            self._silence()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._silence()

    def _silence(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def _unbroken(stream: Any) -> Any:
    """The stream as a `_Stream`; a character that its encoding lacks is replaced."""
    if type(stream) is not io.TextIOWrapper:  # somebody else's, or none
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        return stream
    encoding, buffered = stream.encoding, stream.line_buffering
    return _Stream(
        stream.detach(), encoding, "replace", line_buffering=buffered, write_through=True
    )


class _Escaped(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


WORDS = {"ignore_unknown_options": True}
MAX_LINES = 50
"""Maximum number of lines of an error; a file may have any number of problems."""
RECIPES = f"A recipe ({', '.join(settings.recipe_names())})"


Completion = Callable[[str], list[str]]


def _argument(text: str, metavar: str | None = None, complete: Completion | None = None) -> Any:
    return typer.Argument(metavar=metavar, help=text, show_default=False, autocompletion=complete)


def _words(what: str, text: str, complete: Completion = complete_setting) -> Any:
    text += " or a YAML file, and settings as key=value; `dualsft docs config` lists them all."
    return _argument(text, f"[{what}] [KEY=VALUE]...", complete)


def _comparisons(incomplete: str) -> list[str]:
    folder = importlib.resources.files("dualsft") / "recipes/compare"
    names = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())
    return complete_word(incomplete, names)


def _diagnostics(incomplete: str) -> list[str]:
    known = later("dualsft.lab.diagnostics").registry()
    more = {key: spec for one in known.values() for key, spec in one.specs().items()}
    return complete_word(incomplete, ["all", *known], more)


def _stages(incomplete: str) -> list[str]:
    return [name for name in STAGE_NAMES if name.startswith(incomplete)]


Words = Annotated[list[str] | None, _words("RECIPE|FILE.yaml", RECIPES)]
Comparison = Annotated[
    list[str] | None, _words("MATRIX|FILE.yaml", "A matrix (`dualsft docs methods`)", _comparisons)
]
Delta = Annotated[Path, typer.Argument(help="delta.safetensors of a run.")]
RunFolder = Annotated[Path, _argument("The run folder.")]
Base = Annotated[str, typer.Argument(help="Base model: folder, .gguf file or short name.")]
Until = Annotated[
    str | None,
    typer.Option(help=f"Last stage: {', '.join(STAGE_NAMES)}.", autocompletion=_stages),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result to this file, as JSON.")
]

AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code-execution",
        help="Run the programs that the models generate for humaneval, in a sandbox.",
    ),
]

Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of processes, one per GPU of this machine (torchrun for several machines).",
        show_default=False,
    ),
]

STAGE_COMMANDS = {
    "split": ("split", "Tokenise and split the corpus (Algorithm 1, inputs)."),
    "warmup": ("warmup", "Pilot warmup: theta_bar and the curvature (line 1)."),
    "score": ("scores", "G, v_new, v_prior, u and both scores (lines 3 to 8)."),
    "select": ("selection", "Top-k parameters and top-b examples (lines 9 to 11)."),
    "finetune": ("finetune", "Restricted fine-tuning from theta_old (line 12)."),
    "evaluate": ("evaluation", "Loss, perplexity, KL and benchmarks, before and after."),
}


def later(module: str) -> Any:
    """Import a heavy module on demand; signals are deferred, so no import is left incomplete."""
    with interrupt.deferred():
        return importlib.import_module(module)


def make_reporter() -> Reporter:
    """Reporter to the terminal; on a tty, progress is a bar. With --quiet it shows nothing."""
    transformers_logging = later("transformers.utils.logging")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()

    if not logging.getLogger("dualsft").isEnabledFor(logging.INFO):
        return silent()
    return Reporter(show, console if console.is_terminal else None)


def parse_words(words: list[str] | None) -> tuple[str | None, list[str]]:
    """Parse `NAME key=value --key value --key=value …` into (recipe or file, overrides)."""
    source: str | None = None
    overrides: list[str] = []
    rest = list(words or [])
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            key = word[2:]
            if "=" not in key:
                if not rest:
                    raise ConfigError(f"{word}: no value given; write {key}=VALUE")
                key = f"{key}={rest.pop(0)}"
            overrides.append(key)
        elif "=" in word:
            overrides.append(word)
        elif source is None:
            source = word
        else:
            raise ConfigError(
                f"{word!r}: a second recipe or file after {source!r}; settings are key=value"
            )
    return source, overrides


def folder_config(folder: Path, words: list[str] | None, until: str) -> Config:
    """Settings of a run folder, with overrides; a new folder needs a recipe or settings."""
    source, overrides = parse_words(words)
    own = RunPath(folder) / "config.yaml"
    new = any(word.startswith("model.path=") for word in overrides) and not own.is_file()
    if source is None and not new:
        check_run_folder(RunPath(folder))
        return load_checked(own, overrides, until)
    return load_checked(source, overrides, until)


@app.command(context_settings=WORDS)
def run(
    words: Words = None,
    out: Annotated[Path, typer.Option(help="Run folder to create or resume.")] = Path("run"),
    until: Until = None,
    allow_code: AllowCode = False,
    gpus: Gpus = None,
) -> None:
    """Run Algorithm 1: select entries and examples, and fine-tune the model."""
    check_stage(until)
    config = load_checked(*parse_words(with_consent(words, allow_code)), until)
    folder = work(config, out, until, gpus)
    if launch.rank() != 0:
        return
    endings = parts("ending") if check_stage(until) == STAGE_NAMES[-1] else []
    for ending in endings:
        show(*ending(RunPath(folder)))
    if not endings:
        show(f"run folder: {folder}")


def work(config: Config, folder: Path, until: str | None, gpus: int | None) -> Path:
    """Run the stages up to `until`, in this process or in --gpus processes."""
    launch.spread(gpus, config, show)
    return later("dualsft.runs.pipeline").run(config, folder, until, make_reporter())


def with_consent(words: list[str] | None, allow_code: bool) -> list[str]:
    """Add the setting for --allow-code-execution."""
    consent = ["evaluation.allow_code_execution=true"] if allow_code else []
    return [*(words or []), *consent]


def _stage_command(name: str, stage: str, text: str) -> None:
    def command(folder: RunFolder, words: Words = None, gpus: Gpus = None) -> None:
        work(folder_config(folder, words, stage), folder, stage, gpus)

    def evaluate(
        folder: RunFolder, words: Words = None, allow_code: AllowCode = False, gpus: Gpus = None
    ) -> None:
        command(folder, with_consent(words, allow_code), gpus)

    made = evaluate if name == "evaluate" else command
    app.command(name, help=text, context_settings=WORDS)(made)


for _name, (_stage, _text) in STAGE_COMMANDS.items():
    _stage_command(_name, _stage, _text)


@app.command()
def report(
    folders: Annotated[list[Path], _argument("One run folder, or several.", "RUN...")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output folder (default: the run folder; for several runs: side_by_side)."
        ),
    ] = None,
) -> None:
    """Write report.html, report.md and a model card; several runs are shown side by side."""
    show(*later("dualsft.lab.report.markdown").write_reports(folders, out))


@app.command(context_settings=WORDS)
def check(
    words: Words = None,
    gain: Annotated[
        bool, typer.Option("--gain", help="Also measure, by a pilot, whether selecting rows helps.")
    ] = False,
    gain_rows: Annotated[
        int | None,
        typer.Option(
            min=16, help="Rows of the pool in the pilot (default: 320).", show_default=False
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Preview a run: candidates, counts, rendered examples, and a per-example gradient check."""
    config, reporter = load_checked(*parse_words(words)), make_reporter()
    if gain_rows is not None and not gain:
        raise ConfigError("--gain-rows: has no effect without --gain; give both")
    problems = later("dualsft.lab.check").check(config, reporter)
    found = None
    if gain and not problems:
        found = later("dualsft.lab.gain").measure_gain(config, reporter, gain_rows)
        show(*found.lines())
    gained = None if found is None else found.as_dict()
    write_json(json_file, {"problems": problems, "gain": gained})
    if problems:
        raise typer.Exit(1)


@app.command(context_settings=WORDS)
def estimate(
    words: Words = None,
    out: Annotated[Path, typer.Option(help="Run folder that a run would write to.")] = Path("run"),
    until: Until = None,
    json_file: JsonFile = None,
) -> None:
    """Estimate memory, time and disk space of every stage on this machine; runs no stage."""
    check_stage(until)
    config = load_checked(*parse_words(words))
    found = later("dualsft.lab.estimate.estimate").estimate(config, out, until, make_reporter())
    write_json(json_file, found.as_dict())
    show_estimate(found)
    if not found.fits:
        raise typer.Exit(1)


def write_json(file: Path | None, content: Any) -> None:
    """Write the result of a command to the file of --json, if it was given."""
    if file is not None:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def show_estimate(found: Any) -> None:
    """Print the table of `dualsft estimate`, then the stages that do not fit, with a fix."""
    human, clock = later("dualsft.system.usage").human, later("dualsft.system.progress").clock

    def gib(num_bytes: int) -> str:
        return f"{num_bytes / 2**30:.2f}" if num_bytes else "–"

    table = Table("stage", "GPU GiB", "host GiB", "time", "disk GiB", "how")
    for stage in found.stages:
        how = stage.note if stage.fits else f"DOES NOT FIT ({stage.note})"
        sizes = gib(stage.device_bytes), gib(stage.host_bytes)
        table.add_row(stage.name, *sizes, clock(stage.seconds), gib(stage.disk_bytes), how)
    seconds = sum(stage.seconds for stage in found.stages)
    table.add_row("all", "", "", clock(seconds), gib(found.disk_bytes), "")
    console.print(table)
    show(
        f"{found.num_parameters:,} parameters, {found.num_candidates:,} of them candidates; "
        f"{found.num_rows:,} rows, about {found.num_tokens:,} tokens, the longest {found.longest:,}"
        f"; {found.device} with {gib(found.device_memory)} GiB to use",
        found.finetuning,
        *(f"{stage.name} does not fit: {stage.cure}" for stage in found.stages if not stage.fits),
    )
    if not found.enough_disk:
        show(
            f"the disk has {human(found.disk_free)} free but the run needs "
            f"{human(found.disk_bytes)}; give an --out on a larger disk"
        )


@app.command(context_settings=WORDS)
def diagnose(
    folder: Annotated[Path | None, typer.Argument(help="The run folder.")] = None,
    words: Annotated[
        list[str] | None,
        _argument(
            "Diagnostics to run (default: the cheap ones; all: all of them), and options.",
            "[NAME|all]... [diagnose.NAME.OPTION=VALUE]...",
            _diagnostics,
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show every diagnostic with its options and stop.")
    ] = False,
) -> None:
    """Test whether the scores of a finished run are meaningful; writes numbers and figures."""
    diagnostics = later("dualsft.lab.diagnostics")
    if show_list:
        for one in diagnostics.registry().values():
            console.print(f"[bold]{one.name}[/bold]{'' if one.cheap else ' (on request)'}")
            show(f"  {one.summary}", f"  paper: {one.paper}", f"  cost: {one.cost}")
            show_options(one)
        return
    if folder is None:
        raise ConfigError("diagnose: give a run folder, or --list")
    check_run_folder(RunPath(folder))
    given = words or []
    consent = consents(given)
    options = [w for w in given if "=" in w and w not in consent]
    names = [w for w in given if "=" not in w]
    wanted = diagnostics.Wanted.of(names, options)
    job = later("dualsft.lab.diagnostics.job")
    show(*job.diagnose(folder, wanted, make_reporter(), consent))
    if not names:
        with reading(folder):
            show(*job.others(folder, wanted))


def consents(words: list[str]) -> list[str]:
    """The settings that must come from the command line, not from a run folder."""
    allowed = (*settings.CONSENTS, *settings.OUTSIDE)
    return [word for word in words if word.partition("=")[0] in allowed]


def given_paths(command: str, words: list[str] | None) -> list[str]:
    """The words, which may only be settings that a run folder from someone else cannot give."""
    consent = consents(words or [])
    if other := [word for word in words or [] if word not in consent]:
        known = ", ".join((*settings.CONSENTS, *settings.OUTSIDE))
        raise ConfigError(f"{command}: {other[0]!r} is not allowed; settings can be {known}")
    return consent


@app.command()
def explain(
    folder: RunFolder,
    words: Annotated[
        list[str] | None,
        _argument("Paths of a received run folder, such as model.path=...", "[KEY=VALUE]..."),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(help="Query rows, in any format of data.path. Without: only the suspects."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Examples per query and side.")] = 10,
    name: Annotated[
        str | None, typer.Option(help="Folder under RUN/explain (default: from the query file).")
    ] = None,
) -> None:
    """Show which examples of a scored run help or hurt query rows, and which look wrong."""
    consent = given_paths("explain", words)
    explain = later("dualsft.lab.explain").explain
    with reading(folder):
        found = explain(
            folder, query, top=top, name=name, consent=consent, reporter=make_reporter()
        )
    show(found.folder, found.folder / "explain.html")


@app.command(context_settings=WORDS)
def compare(
    words: Comparison = None,
    out: Annotated[Path, typer.Option(help="Folder of the comparison.")] = Path("comparison"),
    only: Annotated[
        str | None,
        typer.Option(help="Run only the cells whose title contains this (* matches all)."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="Last stage of every cell (default: all stages, then the tables).",
            autocompletion=_stages,
        ),
    ] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Only write the tables of the finished cells.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells and stop.")] = False,
    reference: Annotated[
        str, typer.Option(help="Reference method for paired differences.")
    ] = "dualsft",
    workers: Annotated[
        int, typer.Option(min=1, help="Cells to run at a time, one process per cell.")
    ] = 1,
    allow_code: AllowCode = False,
) -> None:
    """Run a matrix of methods, models, data, budgets and seeds; writes tables and figures."""
    source, overrides = parse_words(with_consent(words, allow_code))
    matrices = later("dualsft.lab.compare.matrix")
    if source is None:
        raise ConfigError(
            "compare: give a matrix file or a recipe, such as quick; use one of "
            + ", ".join(matrices.comparison_names())
        )
    check_stage(until)
    matrix = matrices.load_matrix(source, overrides)
    comparing = later("dualsft.lab.compare.cells")
    if dry_run:
        comparing.dry_run(matrix, show, only)
        return
    failed = {}
    if not tables:
        failed = comparing.run_matrix(matrix, out, make_reporter(), only, until, workers=workers)
    for title, why in failed.items():
        show(f"error: {title}: {why}", to=errors)
    if until is None and (tables or len(failed) < len(matrix.cells(only))):
        show(*later("dualsft.lab.compare.tables").write_tables(matrix, out, reference))
    if failed:
        raise typer.Exit(1)


@app.command()
def methods() -> None:
    """List the methods of each axis: summary, cost, memory, source, deviations, options."""
    for axis, entries in registry().items():
        for entry in entries.values():
            console.print(f"[bold]method.{axis}={entry.name}[/bold]")
            show(f"  {entry.summary}")
            for label in ("cost", "memory", "source", "deviations"):
                show(f"  {label}: {getattr(entry, label)}")
            if entry.lr_ratio != 1.0:
                show(f"  learning rate: {entry.lr_ratio:g} x finetune.lr")
            if entry.extra:
                show(f"  needs: pip install 'dualsft[{entry.extra}]'")
            show_options(entry, entry.paper)


@app.command()
def docs(
    page: Annotated[str | None, _argument("Name of the page, such as tutorial.")] = None,
) -> None:
    """Show a page of the documentation; without PAGE, list the pages."""
    pages = {path.stem: path for path in sorted((Path(__file__).parent / "docs").glob("*.md"))}
    if page is None:
        for name, path in pages.items():
            show(f"{name:<16}{path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
        return
    name = Path(page).stem
    if name not in pages:
        raise ConfigError(f"docs: there is no page {page!r}; use one of {', '.join(pages)}")
    text = pages[name].read_text(encoding="utf-8")
    console.print(Markdown(text) if console.is_terminal else text, markup=False)


def show_options(one: Any, paper: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print the settings of a method or a diagnostic: default, allowed values, meaning."""
    docs = one.docs()
    for key, spec in one.specs().items():
        name = key.rpartition(".")[2]
        published = f"; paper: {paper[name]}" if name in paper else ""
        show(f"  {key}={spec.default} ({spec.allowed}{published}): {docs.get(name, '')}")


@export_app.command()
def merge(
    base: Base,
    deltas: Annotated[
        list[Path], _argument("delta.safetensors of a run, or of several runs.", "DELTA...")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write the merged model to.")],
    dtype: Annotated[str, typer.Option(help="dtype of the merged weights.")] = "auto",
    force: Annotated[
        bool, typer.Option(help="Merge even if the hash of the base model differs.")
    ] = False,
    weight: Annotated[
        list[float] | None,
        typer.Option(help="Factor of a delta's changes, once per delta.", show_default="1"),
    ] = None,
    stochastic: Annotated[
        bool,
        typer.Option("--stochastic", help="With a narrower --dtype: round changes at random."),
    ] = False,
) -> None:
    """Merge deltas into their base model: the sum of their changes, as a Hugging Face folder."""
    merged = later("dualsft.model.delta").merge(base, deltas, out, dtype, force, weight, stochastic)
    show(*merged.lines(f"merged into {out}"))


@export_app.command()
def compact(
    base: Base,
    delta: Delta,
    out: Annotated[Path, typer.Argument(help="Delta file to write.")],
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Store each change in bfloat16; not bit for bit.")
    ] = False,
) -> None:
    """Write a delta in fewer bytes; `merge` gives the same model from it bit for bit."""
    count, error = later("dualsft.model.delta").compact(base, delta, out, lossy)
    told = f"; relative error of the changes {error:.1e}" if lossy else ""
    show(f"{count:,} entries written to {out}, {out.stat().st_size / 1e6:.2f} MB{told}")


@export_app.command()
def extract(
    base: Base,
    tuned: Annotated[Path, typer.Argument(help="Fine-tuned model folder.")],
    out: Annotated[Path, typer.Argument(help="Delta file to write.")],
    dtype: Annotated[str, typer.Option(help="dtype to compare in.")] = "auto",
) -> None:
    """Write the entries in which two models differ to a delta file."""
    count = later("dualsft.model.delta").extract(base, tuned, out, dtype)
    show(f"{count:,} changed entries written to {out}")


@export_app.command()
def data(
    folder: RunFolder,
    out: Annotated[Path, typer.Argument(help="File or folder to write.")],
    words: Annotated[
        list[str] | None,
        _argument("Paths of a received run folder, such as data.path=...", "[KEY=VALUE]..."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="parquet or datasets (all scored rows, with score, rank and selected), trl or "
            "llamafactory (the selected rows, ready to train on).",
        ),
    ] = "parquet",
) -> None:
    """Write the rows of a run, with what it decided about them, for other tools."""
    consent = given_paths("export data", words)
    with reading(folder):
        show(*later("dualsft.integrations.rows").export_data(folder, out, kind, consent))


@export_app.command()
def adapter(
    base: Base,
    delta: Delta,
    out: Annotated[Path, typer.Argument(help="Folder to write the adapter to.")],
    kind: Annotated[
        str, typer.Option(help="shira: loads with PEFT alone; sparse: small, needs dualsft.")
    ] = "shira",
) -> None:
    """Write a delta as a PEFT adapter of its base model."""
    made = later("dualsft.integrations.peft").write_adapter(base, delta, out, kind)
    show(
        f"{made.num_entries:,} entries written to {out} as {kind}, r={made.r}: "
        f"{made.num_stored:,} with the unchanged ones that fill its layers, "
        f"{made.num_bytes / 1e6:.2f} MB"
    )


@export_app.command()
def hub(
    folder: RunFolder,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    words: Annotated[
        list[str] | None,
        _argument("model.trust_remote_code=true, to export code of the model.", "[KEY=VALUE]..."),
    ] = None,
    delta: Annotated[
        bool, typer.Option("--delta", help="The delta in place of the merged model.")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter of LoRA in place of the merged model.")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub id of the base model, if the run read it from a local folder."),
    ] = None,
    with_data: Annotated[
        bool, typer.Option("--with-data", help="Also the selected rows, selected.jsonl.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(help="Push to this repository of the hub (OWNER/NAME)."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: create a private repository.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="With --push: the repository may exist.")
    ] = False,
) -> None:
    """Write what a run made as a folder for the Hugging Face Hub, with a card; push it if asked."""
    if delta and adapter:
        raise ConfigError("--delta, --adapter: give one of them")
    if push is None and (private or update):
        raise ConfigError("--private, --update: have no effect without --push; give it, too")
    trusted = "model.trust_remote_code=true" in given_paths("export hub", words)
    hub = later("dualsft.lab.report.hub")
    if push is not None:
        hub.check_push()
    part = "delta" if delta else "adapter" if adapter else "model"
    show(*hub.export_hub(folder, out, part, base_model, with_data, push, trusted))
    if push is not None:
        show(f"pushed to {hub.push(out, push, private, update)}")


@app.command(context_settings=WORDS)
def quickstart(
    words: Words = None,
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/quickstart"),
) -> None:
    """Run everything on a small real model and a generated corpus, then show the results."""
    source, overrides = parse_words(words)
    if source is not None:
        raise ConfigError(
            f"{source!r}: the quickstart has its own recipe; use `dualsft run` for others"
        )
    config = load_checked("quickstart", overrides)
    quickstart = later("dualsft.lab.quickstart")
    quickstart.check_own_task(config)
    show(*quickstart.run_quickstart(config, out, make_reporter()))


def _version(wanted: bool) -> None:
    if wanted:
        show(f"dualsft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show errors and the final result only.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show the debug messages of the library.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Fine-tune on the best 10 % of the data and the best 5 % of the weights."""
    if ctx.invoked_subcommand not in ("run", *STAGE_COMMANDS):
        launch.check_one_process(ctx.invoked_subcommand or "")


def _guarded(action: Callable[[], Any], debug: bool) -> int:
    """Run the application; convert errors to a message and an exit code."""
    try:
        with interrupt.handled():
            action()
    except interrupt.Interrupted as stopped:
        saved = f"saved {stopped.saved}; " if stopped.saved else ""
        _print_error(stopped, f"stopped by {stopped}: {saved}run the same command to resume")
        return stopped.exit_code
    except Exception as problem:
        if debug:
            raise
        lines, code = _explained(problem)
        _print_error(problem, *(f"error: {line}" for line in lines))
        return code
    return 0


def _print_error(error: BaseException, *lines: str) -> None:
    """Print an error to stderr; only once if several processes raise the same one."""
    launch.report(error, lines, lambda line: show(line, to=errors))


def _explained(problem: Exception) -> tuple[list[str], int]:
    """(message lines, exit code) of an exception."""
    if isinstance(problem, DualsftError):
        lines = str(problem).splitlines()
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = [f"{len(lines) - MAX_LINES:,} more problems"]
        shown = [line if len(line) <= 2000 else f"{line[:2000]}…" for line in lines]
        return shown + _suspects(problem), problem.exit_code
    if isinstance(problem, IsADirectoryError):
        return [wrong_kind(problem)], 1
    if isinstance(problem, FileNotFoundError) and str(problem.filename) in map(str, files_read()):
        return [
            f"{problem.filename}: is missing; remove the stage folder that it belongs to and run "
            "the same `dualsft run` again"
        ], 1
    if isinstance(problem, OSError):
        code = 2 if isinstance(problem, PermissionError | NotADirectoryError) else 1
        return [f"{problem}; check the path, its permissions and the disk"], code
    text = " ".join(str(problem).split())[:300]
    if later("dualsft.system.usage").is_out_of_memory(problem):
        return [
            f"out of memory ({text}); lower score.batch_tokens and data.max_length, use "
            "model.dtype=bfloat16 on a GPU, or a machine with more memory, then run the same "
            "command again (saved progress is kept)",
            *_address_limit(),
        ], 1
    return [
        f"unexpected {type(problem).__name__}: {text}; this is a bug in dualsft: please report "
        "it with the output of `dualsft --debug …`",
        *_suspects(problem),
    ], 1


def _address_limit() -> list[str]:
    """What to know about memory if the shell limits this process."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    return [f"the shell limits this process to {limit:,} bytes of address space; see `ulimit -v`"]


def _suspects(problem: Exception) -> list[str]:
    """The files of earlier stages that a failed check or an unexpected error may come from."""
    if isinstance(problem, DualsftError) and not isinstance(problem, CheckError):
        return []
    if not (read := files_read()):
        return []
    return [
        f"it read {shown_files(read)}; if one of them is damaged or not of this run, "
        "remove its stage folder and run the same `dualsft run` again"
    ]


def main() -> None:
    """Entry point of `dualsft` and `python -m dualsft`."""
    given = set(launch.ANYWHERE) & set(sys.argv[1:])  # accepted at any position
    sys.argv[1:] = [word for word in sys.argv[1:] if word not in given]
    sys.stdout, sys.stderr = _unbroken(sys.stdout), _unbroken(sys.stderr)
    if sys.stderr is None or not sys.stderr.isatty():  # None: closed
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of other libraries in a log
    if "OMP_WAIT_POLICY" not in os.environ:
        # read when torch is imported: its threads spin a little, then sleep (benchmarks/threads.py)
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    handler = logging.StreamHandler(sys.stderr)
    verbose = "%(asctime)s %(name)s: " if "--verbose" in given else ""
    handler.setFormatter(_Escaped(f"{verbose}%(message)s"))
    library = logging.getLogger("dualsft")
    library.addHandler(handler)
    levels = {"--quiet": logging.ERROR, "--verbose": logging.DEBUG}
    library.setLevel(min((levels[word] for word in levels if word in given), default=logging.INFO))
    try:
        raise SystemExit(_guarded(app, "--debug" in given))
    finally:
        library.removeHandler(handler)
        atexit.register(interrupt.release)  # a second Ctrl-C while Python ends is no traceback
