"""The context of a run: settings, run folder, reporter, and loaders for everything stages read.

Stages share no state in memory. Each stage reads the files that earlier stages wrote, so
`dualsft run` and the single-stage commands compute the same thing, and every number can be
recomputed from the run folder. The methods `pick` to `weight_hashes` return parts of stage
fingerprints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from dualsft.algorithm.split import ROLES, full_size
from dualsft.config.methods import Composition, compose
from dualsft.config.settings import Config, to_flat
from dualsft.data.corpus import BUILTIN, builtin_file
from dualsft.data.examples import Batch, Example, collate
from dualsft.data.sources import split_paths
from dualsft.data.templates import pad_token_id
from dualsft.distributed.launch import launched
from dualsft.distributed.world import world
from dualsft.engine.passes import precise
from dualsft.engine.walk import PassSettings
from dualsft.errors import ConfigError, RunError
from dualsft.memory.plans import DEFAULT_BATCH_TOKENS, TRAINING_BATCH_TOKENS, Plan, Wishes
from dualsft.model.load import (
    Candidates,
    choose_device,
    choose_dtype,
    empty_model,
    find_candidates,
    load_model,
    load_tokenizer,
    read_model_config,
)
from dualsft.model.resolve import foreign_code, resolve_model, weights_hash
from dualsft.model.sharded import load_sharded
from dualsft.runs.folder import RunDir
from dualsft.runs.preflight import FOLDERS, reading, shown_files
from dualsft.runs.stages.split import read_split
from dualsft.storage.manifest import damage, read_stage_manifest, sha256_file
from dualsft.storage.resume import Pieces
from dualsft.storage.vectors import LazyVector, Vector, accumulation_dtype
from dualsft.system.paths import Place, RunPath
from dualsft.system.progress import Reporter
from dualsft.system.usage import cache_root, limit_memory
from dualsft.train.loop import Sizes, sized

Settings = dict[str, Any]
"""Settings and hashes that a stage's result depends on: part of its fingerprint."""


@dataclass
class RunContext:
    """Settings, folder and reporter of one run."""

    config: Config
    rundir: RunDir
    reporter: Reporter
    pieces: Pieces = field(default_factory=Pieces)
    """Saved progress of the current stage."""
    lenders: Sequence[RunPath] = ()
    """Cached runs: run folders whose finished stages are reused instead of recomputed."""
    answers: RunPath | None = None
    """Folder that caches the base model's benchmark answers for other runs."""
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Memory plan of each walk of the current stage, by label."""
    split_counts: dict[str, int] | None = None
    """Rows by role, for tools that run no stage; None: as the split stage wrote them."""
    vectors: tuple[Vector, Vector, Vector] | None = None
    """v_new, v_prior and G of a run that has not stored them, once computed (`vectors_now`)."""

    def folder(self, stage: str) -> RunPath:
        return self.rundir.path / FOLDERS[stage]

    @cached_property
    def methods(self) -> Composition:
        """The methods of this run, one per axis."""
        return compose(to_flat(self.config))

    # --- data -----------------------------------------------------------------------------------

    def data_path(self, path: str) -> str:
        """Resolve `builtin:NAME/FILE` items of a data path to files that the package generates."""
        return ",".join(
            str(builtin_file(item, cache_root())) if item.startswith(BUILTIN) else item
            for item in split_paths(path)
        )

    def roles(self) -> dict[str, list[Example]]:
        """Examples of each role (val, anchor, warm, pool), in source order."""
        vocabulary = getattr(self.model_config, "vocab_size", None)
        return read_split(self.folder("split"), vocabulary)

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows of each role."""
        if self.split_counts is not None:
            return self.split_counts
        manifest, wrong = read_stage_manifest(folder := self.folder("split"))
        if wrong:
            raise RunError(f"{folder}: {wrong}; run the same `dualsft run` again")
        with reading(folder):
            return {role: int(manifest["facts"]["counts"][role]) for role in ROLES}

    # --- training settings that follow the size -------------------------------------------------

    def sizes(self, num_rows: int) -> Sizes:
        """finetune.lr, epochs and batch_size for this many rows; numbers are kept."""
        given = self.config.finetune
        if given.lr != "auto":
            return sized(num_rows, given.lr, given.epochs, given.batch_size)
        return sized(num_rows, "auto", given.epochs, given.batch_size, self.width)

    @property
    def width(self) -> int:
        """Hidden size of the text model."""
        return int(self.model_config.hidden_size)

    def base_lr(self) -> float:
        """finetune.lr as a number, which is eta_ft in the scores and the default of warmup.lr.

        auto is resolved for a tenth of |D_full|, not for the rows that are selected: another
        select.data_budget or method must not repeat the warmup and the pass over the pool.
        """
        if self.config.finetune.lr != "auto":
            return self.config.finetune.lr
        return self.sizes(full_size(self.counts, self.config.data) // 10).lr

    # --- model ----------------------------------------------------------------------------------

    @property
    def trusted(self) -> bool:
        """Whether Python code shipped with the model may run."""
        return self.config.model.trust_remote_code

    @cached_property
    def model_folder(self) -> Path:
        """θ_old as a local Hugging Face folder."""
        model = self.config.model
        if self.trusted:
            self.reporter.warn(
                "model.trust_remote_code is on: Python code shipped with the model runs with your "
                "permissions",
                code="remote_code",
            )
        return resolve_model(model.path, model.revision, self.trusted)

    @cached_property
    def model_config(self) -> Any:
        """Configuration of the text model; loads no weights."""
        return read_model_config(self.model_folder, self.trusted)

    @property
    def model_type(self) -> str:
        return str(self.model_config.model_type)

    @property
    def max_positions(self) -> int | None:
        return getattr(self.model_config, "max_position_embeddings", None)

    @cached_property
    def device(self) -> torch.device:
        device, memory = choose_device(self.config.model.device), self.config.model.memory
        if device.type == "cuda" and launched():
            device = torch.device("cuda", world().local_rank)
        limit_memory(device, memory)
        if memory is not None and device.type != "cuda":
            self.reporter.warn(f"model.memory has no effect: the run is on {device.type}")
        return device

    @cached_property
    def dtype(self) -> torch.dtype:
        return choose_dtype(self.config.model.dtype, self.model_folder, self.device, self.trusted)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.model_folder, self.trusted)

    @property
    def pad_id(self) -> int:
        """Token id for padding batches; the tokenizer itself is not modified."""
        return pad_token_id(self.tokenizer)

    @cached_property
    def parameter_shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter by name; loads no weights."""
        empty = empty_model(self.model_folder, self.trusted)
        return {name: p.shape for name, p in empty.named_parameters()}

    @cached_property
    def candidate_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the candidate parameters by name; loads no weights."""
        empty = empty_model(self.model_folder, self.trusted)
        return {name: p.shape for name, p in self.candidates(empty).items()}

    @property
    def num_candidates(self) -> int:
        """Number of candidate entries."""
        return sum(shape.numel() for shape in self.candidate_shapes.values())

    @property
    def num_parameters(self) -> int:
        """Number of entries of the model."""
        return sum(shape.numel() for shape in self.parameter_shapes.values())

    @property
    def vector_bytes(self) -> int:
        """Bytes on disk of a vector over the candidates."""
        return self.num_candidates * accumulation_dtype(self.dtype).itemsize

    @property
    def model_bytes(self) -> int:
        """Bytes on disk of the model's weights in the run's dtype."""
        return self.num_parameters * self.dtype.itemsize

    def local(self, folder: Place) -> Path:
        """A model folder as a local path; a folder inside the run is verified first.

        Consent to run code was given for model.path: a folder of the run may not bring other code.
        """
        if isinstance(folder, Path):
            return folder
        path, model = model_in(folder), self.config.model.path
        found = foreign_code(path, self.model_folder, model) if self.trusted else None
        if found is not None:
            raise RunError(
                f"{folder}: {found} brings code that model.path={model} does not have, and "
                "model.trust_remote_code=true is for that model only; remove the stage folder and "
                "run the same `dualsft run` again"
            )
        return path

    def load(self, folder: Place) -> PreTrainedModel:
        attention, path = self.config.model.attention, self.local(folder)
        load = world().pick(load_model, load_sharded)
        try:
            return load(path, self.dtype, self.device, attention, self.trusted)
        except ConfigError as problem:
            if isinstance(folder, Path):
                raise
            files = shown_files([*folder.tree()[0].values()])
            raise ConfigError(
                f"{problem}. It is a model of the run folder: one of {files} is damaged; remove "
                "the stage folder that it belongs to and run the same `dualsft run` again"
            ) from problem

    def theta_old(self) -> PreTrainedModel:
        return self.load(self.model_folder)

    def theta_bar(self) -> PreTrainedModel:
        """The warmed-up model; equals θ_old without a warmup."""
        return self.load(self.folder("warmup") / "theta_bar")

    def candidates(self, model: PreTrainedModel) -> Candidates:
        return find_candidates(model, self.config.score.candidates)

    # --- vectors and passes ---------------------------------------------------------------------

    @property
    def warmed_up(self) -> bool:
        """Whether a warmup ran, so that the curvature ĉ exists."""
        return (self.folder("warmup") / "curvature.safetensors").is_file()

    def vector(self, stage: str, name: str, candidates: Candidates) -> LazyVector:
        """Open a stored vector over the candidates; pieces are read onto the device on access."""
        path = self.folder(stage) / f"{name}.safetensors"
        vector = LazyVector.open(path, candidates.names, self.device)
        wanted = accumulation_dtype(self.dtype)
        for one, form in vector.forms.items():
            if (form.shape, form.dtype) != (self.parameter_shapes[one], wanted):
                raise RunError(
                    f"{path}: {one} is {form.dtype} of {tuple(form.shape)}, not {wanted} of "
                    f"{tuple(self.parameter_shapes[one])}; remove its folder and run the same "
                    "command again"
                )
        return vector

    def curvature(self, candidates: Candidates) -> LazyVector | None:
        """ĉ, or None without a warmup."""
        return self.vector("warmup", "curvature", candidates) if self.warmed_up else None

    @cached_property
    def batch_tokens(self) -> int:
        """Padded tokens per scoring batch: score.batch_tokens, or the device's default."""
        return self.config.score.batch_tokens or DEFAULT_BATCH_TOKENS[self.device.type]

    @property
    def training_tokens(self) -> int:
        """Padded tokens per training forward pass: score.batch_tokens, or the device's default."""
        return self.config.score.batch_tokens or TRAINING_BATCH_TOKENS[self.device.type]

    def collate(self, examples: Sequence[Example]) -> Batch:
        """A padded batch on the run's device."""
        return collate(examples, self.pad_id, self.config.data.padding_side, self.device)

    def precise(
        self, what: Literal["directions", "pool"], label: str, *models: PreTrainedModel
    ) -> AbstractContextManager[tuple[PreTrainedModel, ...]]:
        """The models for a walk, in the precision set by `score.precision`."""
        return precise(self.config.score.precision, what, label, self.reporter.warn, *models)

    # --- fingerprints ---------------------------------------------------------------------------

    def pick(self, *keys: str) -> Settings:
        """Config values by full key; `section.*` selects the whole section."""
        flat = to_flat(self.config)
        chosen: Settings = {}
        for key in keys:
            if key.endswith(".*"):
                chosen |= {name: v for name, v in flat.items() if name.startswith(key[:-1])}
            else:
                chosen[key] = flat[key]
        if chosen.get("finetune.lr") == "auto":  # with this number the result is the same
            chosen["finetune.lr"] = self.base_lr()
        return chosen

    def data_settings(self) -> Settings:
        """Settings of the data, without those of later versions at their defaults: a stage that was
        made before they existed stays valid."""
        later = {
            "source_field": None,
            "input_field": None,
            "text_field": None,
            "truncation": "left",
        }
        unset = {f"data.{name}": value for name, value in later.items()}
        chosen = self.pick("data.*") | self.template_hash()
        del chosen["data.outside"]  # consent to read, which changes no row
        return {k: v for k, v in chosen.items() if k not in unset or v != unset[k]}

    def template_hash(self) -> Settings:
        """Hash of the template file, to replace its path."""
        file = self.config.data.template_file
        return {} if file is None else {"data.template_file": sha256_file(Path(file).expanduser())}

    def compute_settings(self) -> Settings:
        """Settings that affect the numerics of every pass through the model."""
        dtype = str(self.dtype).removeprefix("torch.")
        chosen = {"dtype": dtype, "device": self.device.type, "batch_tokens": self.batch_tokens}
        return chosen | self.pick("model.attention", "model.deterministic", "data.padding_side")

    def training_settings(self) -> Settings:
        """`compute_settings`, and tokens per training pass if not the default (dropout)."""
        usual = TRAINING_BATCH_TOKENS[self.device.type]
        own = self.training_tokens != usual
        return self.compute_settings() | ({"training tokens": self.training_tokens} if own else {})

    def weight_hashes(self) -> Settings:
        """Hashes of θ_old's weights and config."""
        return {
            "weights of model.path": weights_hash(self.model_folder),
            "config.json of model.path": sha256_file(self.model_folder / "config.json"),
        }


READ_BY_LOADERS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py", ".safetensors")
"""Suffixes of files that affect how a model loads; other files, such as a README, are allowed."""


def model_in(folder: RunPath, hashed: bool = False) -> Path:
    """Path of a model folder inside a stage, after checking that the run wrote every file in it.

    `hashed` also compares the hashes of all files but the weights, for callers that have not
    verified the stage before.
    """
    stage, prefix = folder.parent, f"{folder.name}/"
    manifest, wrong = read_stage_manifest(stage)
    if wrong:
        raise RunError(f"{stage}: {wrong}; run the same `dualsft run` again")
    small = [name for name in manifest["files"] if not name.endswith(".safetensors")]
    wanted = {name for name in small if name.startswith(prefix)} if hashed else set[str]()
    reasons, extra = damage(stage, manifest, only=wanted)
    reasons += [
        f"{name} was not written by the run; remove it"
        for name in extra
        if name.startswith(prefix) and name.endswith(READ_BY_LOADERS)
    ]
    if reasons:
        cure = "run the same `dualsft run` again: it replaces files that were changed"
        raise RunError("\n".join([*(f"{stage}: {reason}" for reason in reasons), cure]))
    return folder.checked()


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Restrict torch to deterministic operations inside the block (model.deterministic)."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def pass_settings(ctx: RunContext) -> PassSettings:
    """Batching and memory-plan settings of this run's walks."""
    score = ctx.config.score
    wishes = Wishes(
        placement=score.plan,
        checkpointing=score.checkpointing,
        memory=ctx.config.model.memory,
        exact_batch=score.batch_tokens is not None,
    )

    def note(label: str, plan: Plan, memory: int) -> None:
        known = [facts["plan"] for facts in ctx.plans.values()]
        ctx.plans[label] = plan.facts()
        asked = wishes.placement != "auto" or wishes.checkpointing is not None
        if (memory or asked) and plan.settings not in known:
            ctx.reporter.say(f"plan: {plan.describe(memory)}")

    return PassSettings(
        batch_tokens=ctx.batch_tokens,
        pad_id=ctx.pad_id,
        padding_side=ctx.config.data.padding_side,
        precision=score.precision,
        pieces=ctx.pieces,
        wishes=wishes,
        note=note,
    )
