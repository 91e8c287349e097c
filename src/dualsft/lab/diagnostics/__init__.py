"""Registry of diagnostics, which check the scores and the selection of a finished run.

Each diagnostic computes numbers from a run folder (the paper's diagnostic section and the
appendices from `local_regret` on) and writes them as JSON. Its figure is drawn from the JSON only.
This module holds the texts and options that `dualsft diagnose --list` prints; implementations are
imported when they run. Not part of Algorithm 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dualsft.config.fields import Count, Positive, Whole
from dualsft.config.methods import NoOptions, option_docs, option_specs
from dualsft.config.parse import Bounds, FieldSpec, Names, Text, convert, did_you_mean
from dualsft.errors import ConfigError, RunError
from dualsft.runs.preflight import reading
from dualsft.storage.manifest import atomic_write_text, sha256_file
from dualsft.system.paths import RunPath

AtLeast3 = Annotated[int, Bounds(least=3)]

Numbers = Annotated[str, Names()]
"""Numbers or names separated by commas."""


@dataclass(frozen=True, slots=True)
class DataStatisticsOptions:
    limit: Count = 256
    """Most examples per group whose gradients are computed for the alignment."""


@dataclass(frozen=True, slots=True)
class ReselectionOptions:
    rounds: Numbers = "0,1,2,3,5"
    """Numbers of rounds T to report for each order; rounds run up to the largest."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of the ablations that score the pool again."""

    pool: Whole = 4096
    """Pool examples whose scores are compared (a seeded sample); 0 takes all."""


@dataclass(frozen=True, slots=True)
class AnchorSizeOptions(PoolOptions):
    sizes: Numbers = "256,512,1024,2048,4096"
    """Numbers of anchors to compare; sizes beyond the run's anchors are skipped, and the full
    number of anchors is added."""


@dataclass(frozen=True, slots=True)
class SensitivityOptions(PoolOptions):
    data_budgets: Numbers = "0.02,0.05,0.1,0.2,0.5"
    """Data budgets to compare, as shares of all rows."""
    param_budgets: Numbers = "0.01,0.02,0.05,0.1,0.2"
    """Parameter budgets to compare, as shares of the candidates."""
    lambdas: Numbers = "0,0.2,0.5,0.8,1.0,1.3,2.0"
    """Values of λ to compare."""
    taus: Numbers = "0.5,1.0,2.0,4.0"
    """Temperatures of CWSD to compare; each costs one walk over the anchors and one over the
    compared pool."""


@dataclass(frozen=True, slots=True)
class BoundaryOptions:
    rows: Count = 32
    """Number of validation rows, and of anchors, in the Hessian."""
    iterations: Count = 6
    """Steps of the power iteration for the operator norm."""


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    protocol: Literal["small", "paper"] = "small"
    """small: 24 subsets, 24 masks, K = 10, 50, 200, 256 validation rows; paper: 64 and 64, K = 10,
    50, 200, 500, 1000, 1024 validation rows. The options below override it."""
    subsets: Count | None = None
    """Number of random subsets of the pool; null takes it from the protocol."""
    masks: Count | None = None
    """Number of random masks of the run's parameter budget; null takes it from the protocol."""
    subset_size: Count = 256
    """Examples per subset, at most half of the pool."""
    horizons: Numbers | None = None
    """Steps K at which the gain is measured, as in 10,50,200; null takes them from the protocol."""
    val_rows: Count | None = None
    """Validation rows (and anchors) on which the gain is measured; null takes it from the
    protocol."""
    checkpoints: Annotated[str, Names(("init", "warmup"))] = "init,warmup"
    """Checkpoints at which scores are computed and trainings start: init is θ_old, warmup is θ̄."""
    shares: Numbers | None = "0.1,1"
    """Also score with the second-order term scaled to these shares of the first-order term; null is
    none."""
    strata: Literal["proportional", "varied"] = "proportional"
    """Entries that a mask takes from each parameter: in proportion to its size, or with a random
    density per parameter, so that masks differ more."""
    batch_size: Count | None = None
    """Examples per optimizer step; null is finetune.batch_size."""
    lr: Positive | None = None
    """The constant learning rate; null is that of fine-tuning."""
    bootstrap: Count = 1000
    """Bootstrap resamples for each interval."""


@dataclass(frozen=True, slots=True)
class HessianOptions:
    layers: Numbers | None = None
    """Layers to compare, as in 3,8,10; null is the paper's eight of 28, scaled to the depth."""
    modules: Numbers | None = None
    """Modules to compare, by the end of their names; null is the last matrix of attention and of
    the MLP (the paper's o_proj and down_proj)."""
    slice_size: AtLeast3 = 255
    """Entries per slice, a third from each third of the scores."""
    pool_rows: AtLeast3 = 256
    """Pool examples that G is summed over and that are ranked."""
    val_rows: Count = 64
    """Validation rows (and anchors) for v and the Hessian."""


@dataclass(frozen=True, slots=True)
class DriftOptions:
    start: Literal["old", "warmup"] = "old"
    """Weights that fine-tuning starts from: θ_old, as in the method, or θ̄."""
    points: Count = 5
    """Points of the trajectory at which scores are measured, in addition to the start."""
    probes: AtLeast3 = 32
    """Pool examples whose scores are measured, half of them selected ones."""
    val_rows: Count | None = 256
    """Validation rows (and anchors) for each ∇L_val; null is all of them."""


@dataclass(frozen=True, slots=True)
class ReverseOptions:
    steps: Count | None = 100
    """Optimizer steps per training; null is the number of steps of the run's fine-tuning."""
    draws: Count = 2
    """Random draws per control."""


@dataclass(frozen=True)
class Diagnostic:
    """A diagnostic, as listed by `dualsft diagnose --list`."""

    name: str
    module: str
    """Module of this package with two functions: NAME (takes a job, returns a JSON dictionary) and
    draw_NAME (takes the dictionary, returns its figures)."""
    summary: str
    paper: str
    """The table, figure or equation of the paper that it reproduces."""
    cost: str
    options: type = NoOptions
    cheap: bool = False
    """Whether `dualsft diagnose RUN` without names runs it: about a pass over the pool at most."""
    vectors: bool = True
    """Whether it reads G, v_new and v_prior, which are computed first for a run without them."""
    needs: tuple[str, ...] = ("scores", "selection")
    """Stages of the run that it reads; earlier stages are then available too."""
    reports: tuple[str, ...] = ()
    """Later stages whose numbers it reports if they exist."""

    @property
    def target(self) -> str:
        return f"{__name__}.{self.module}:{self.name}"

    @property
    def figure(self) -> str:
        return f"{__name__}.{self.module}:draw_{self.name}"

    def specs(self) -> Mapping[str, FieldSpec]:
        """Its options by full key, diagnose.<name>.<field>."""
        return option_specs(f"diagnose.{self.name}", self.options)

    def docs(self) -> dict[str, str]:
        return option_docs(self.options)


_TRAINED = ("scores", "finetune")
_DIAGNOSTICS = (
    Diagnostic(
        "data_statistics",
        "chosen_statistics",
        "alignment, loss, diversity of selected, random, top-loss and all examples",
        paper="Table selected_data_main; appendix selection_statistics",
        cost="a forward pass over the pool, gradients of a few hundred examples",
        cheap=True,
        options=DataStatisticsOptions,
    ),
    Diagnostic(
        "param_statistics",
        "chosen_statistics",
        "distribution of selected entries over layers and modules, vs. the candidates",
        paper="Table selected_param_stats_app; appendix selection_statistics",
        cost="reads the mask",
        cheap=True,
        vectors=False,
    ),
    Diagnostic(
        "heatmap",
        "chosen_statistics",
        "mean |score| of every layer and module",
        paper="Figures layerwise_param_heatmap, appendix_layerwise_param_heatmaps",
        cost="one read of u and G",
        cheap=True,
    ),
    Diagnostic(
        "histograms",
        "chosen_statistics",
        "distribution of both scores, and the cut-off of the budget",
        paper="none (ours)",
        cost="a few reads of u and G",
        cheap=True,
    ),
    Diagnostic(
        "local_regret",
        "coordination",
        "utility that one-shot scores lose by ignoring the other side's selection",
        paper="Table local_regret",
        cost="up to two pool passes at θ̄ and three at θ_old",
    ),
    Diagnostic(
        "coordination_gap",
        "coordination",
        "isolated first-order scores vs. scores aware of the other side",
        paper="Proposition coord_gap",
        cost="up to three pool passes",
    ),
    Diagnostic(
        "reselection",
        "coordination",
        "one-shot selection vs. T rounds of fixed-side re-selection, with cost",
        paper="Table conditional_reselection_main; Figure fixed_side_reselection",
        cost="a pool pass for every round that moves the examples",
        options=ReselectionOptions,
        reports=("finetune",),
    ),
    Diagnostic(
        "preservation",
        "ablations",
        "selections with no preservation, L2, Fisher, CWSD; λ absolute and relative",
        paper="Table cwsd_ablation (its accuracies need `dualsft compare`)",
        cost="two walks over the anchors, four over the compared pool",
        options=PoolOptions,
    ),
    Diagnostic(
        "anchor_size",
        "ablations",
        "CWSD's direction and both selections with fewer anchors",
        paper="Table anchor_size_sensitivity",
        cost="one walk over the anchors, and one over the compared pool per size",
        options=AnchorSizeOptions,
    ),
    Diagnostic(
        "components",
        "ablations",
        "selections without warmup, preservation, or the second-order term",
        paper="Figure ablation_components",
        cost="a pool pass at θ_old, four walks over the compared pool",
        options=PoolOptions,
    ),
    Diagnostic(
        "sensitivity",
        "ablations",
        "selections under other budgets, λ and τ",
        paper="Figure hyperparameter_sensitivity",
        cost="two walks over the compared pool; per τ one more, and one over the anchors",
        options=SensitivityOptions,
    ),
    Diagnostic(
        "boundary",
        "boundary",
        "is the selection provably the same under the exact Hessian?",
        paper="Proposition direct_score_gap, Corollaries topk_param and topb_data_stability",
        cost="a few hundred double backward passes, one or two pool passes",
        options=BoundaryOptions,
    ),
    Diagnostic(
        "fidelity",
        "fidelity",
        "does training on sets with higher scores lower the validation loss more?",
        paper="Tables score_consistency_main, score_fidelity_long_horizon and _domain",
        cost="(subsets + masks) × checkpoints short trainings, each of the largest K steps",
        options=FidelityOptions,
        needs=_TRAINED,
    ),
    Diagnostic(
        "hessian",
        "hessian",
        "does the diagonal curvature give the same ranking as the exact Hessian?",
        paper="Tables diag_full_main, diag_full_multilayer",
        cost="per checkpoint: pool_rows single backward passes, val_rows double ones per slice",
        options=HessianOptions,
    ),
    Diagnostic(
        "drift",
        "retraining",
        "how much do scores change during fine-tuning, compared with the paper's bound?",
        paper="Eq. score_drift_bound (appendix local_surrogate)",
        cost="one more fine-tuning; points × (2 val_rows + 2 probes) backward passes",
        options=DriftOptions,
        needs=_TRAINED,
    ),
    Diagnostic(
        "reverse",
        "retraining",
        "are the lowest-scored examples and entries worse than random ones?",
        paper="Fig. reverse_selection",
        cost="4 + 3 × draws trainings of `steps` steps, each evaluated",
        options=ReverseOptions,
        needs=_TRAINED,
    ),
)


def registry() -> dict[str, Diagnostic]:
    """All diagnostics by name, in report order."""
    return {one.name: one for one in _DIAGNOSTICS}


ALL = "all"


@dataclass(frozen=True)
class Wanted:
    """The diagnostics to run and the options that the user set for them."""

    diagnostics: list[Diagnostic]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    named: bool = True
    """False: the cheap ones, so those that are not cheap for a run are left out."""

    @classmethod
    def of(cls, names: list[str], words: list[str]) -> Wanted:
        """Parse names and `diagnose.NAME.OPTION=value` words; without names, the cheap ones.

        Reports all problems with the names, or with the words, at once.
        """
        known, named = registry(), bool(names)
        available = f"available: all, {', '.join(registry())}"
        problems = [
            f"{name}: no such diagnostic; {did_you_mean(name, [ALL, *known], available)}"
            for name in names
            if name not in known and name != ALL
        ]
        if problems:
            raise ConfigError(problems)
        if not names:
            names = [name for name, one in known.items() if one.cheap]
        chosen = known if ALL in names else {name: known[name] for name in names}
        specs = {key: spec for one in known.values() for key, spec in one.specs().items()}
        options: dict[str, dict[str, Any]] = {}
        for word in words:
            key, _, value = word.partition("=")
            if key not in specs:
                cure = did_you_mean(key, specs, "see `dualsft diagnose --list`")
                problems.append(f"{key}: no diagnostic has this option; {cure}")
                continue
            _, name, option = key.split(".", 2)
            if name not in chosen:
                problems.append(f"{key}: {name} is not run; name it too, or remove the option")
                continue
            try:
                options.setdefault(name, {})[option] = convert(specs[key], Text(value))
            except ConfigError as problem:
                problems += problem.problems
        if problems:
            raise ConfigError(problems)
        return cls([*chosen.values()], options, named)


# --- hashes of the results -----------------------------------------------------------------------

SEALS = "seals.json"
"""In the folder of the diagnostics: the SHA-256 of every result and figure, by file name."""


def read_seals(folder: RunPath) -> dict[str, str]:
    """The hashes of the results; empty for results of an earlier version, which has none."""
    if not (folder / SEALS).is_file():
        return {}
    with reading(folder / SEALS):
        found = (folder / SEALS).read_json()
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            raise ValueError("it is not a table of hashes")
        return found


def seal(folder: RunPath, files: Sequence[RunPath]) -> None:
    """Note the hashes of these files of the folder."""
    hashes = read_seals(folder) | {path.name: sha256_file(path) for path in files}
    atomic_write_text(folder / SEALS, json.dumps(hashes, indent=1, sort_keys=True))


def is_sealed(path: RunPath, seals: Mapping[str, str]) -> bool:
    """Whether a result is as it was written; False if it was written without a hash.

    Raises if it was changed.
    """
    if path.name not in seals:
        return False
    if sha256_file(path) != seals[path.name]:
        raise RunError(
            f"{path}: changed since `dualsft diagnose` wrote it; remove it and run `dualsft "
            "diagnose` again"
        )
    return True
