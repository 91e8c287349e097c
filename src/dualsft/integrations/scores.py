"""`Scores` and `Selection`, which `dualsft.score` and `dualsft.select` give, as tables and files.

A saved `Scores` is a folder: scores.parquet (one row per pool example, with its tokens),
vectors.safetensors (u, G, v_new, v_prior and ĉ over the candidates) and manifest.json (the numbers,
and a hash of each file). Nothing is pickled; a damaged file is refused. Selecting from loaded
scores gives what selecting before saving gave. Where a selection has to score examples exactly
(literal scores near the boundary), it needs θ̄, which is not in the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.projection import ProjectionTerms, Scored
from dualsft.algorithm.selection import rescore
from dualsft.data.examples import IGNORE, Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassSettings
from dualsft.errors import ConfigError, RunError
from dualsft.model.delta import written_whole
from dualsft.model.load import find_candidates
from dualsft.model.sharded import device_of
from dualsft.storage.manifest import FORMAT_VERSION, MANIFEST, damage, jsonable, read_manifest, seal
from dualsft.storage.tensor_files import TensorFile
from dualsft.storage.vectors import ParamVector
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter

ROWS, VECTORS = "scores.parquet", "vectors.safetensors"
SAME_WEIGHTS = 1e-9
"""Relative difference allowed between the norms of θ̄ and of a model given to `Scores.load`."""


@dataclass(frozen=True)
class Scores:
    """s_D with a bound per example, u and G; s_θ is u ⊙ G."""

    example_scores: np.ndarray
    """⟨U₀, g_n⟩ · eta_sc, within `bound` of the exact ⟨u, g_n⟩; or the calibrated scores."""
    bound: np.ndarray
    """Error bound of the one-pass direction plus, in half precision, the measured rounding."""
    losses: np.ndarray
    grad_sum: ParamVector
    val_grad: ParamVector
    prior_grad: ParamVector
    projection: ParamVector
    """u / eta_sc."""
    eta_sc: float
    pool: Sequence[Example] = field(repr=False)
    ties: np.ndarray
    """Tie-breaking order of equal scores: the indices of the examples."""
    summary: dict[str, Any] = field(repr=False)
    """Norms, cosines and self-checks, as in 4_scores/summary.json."""
    scored: Scored = field(repr=False)
    rescore: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    """Exact scores of the pool examples at these positions (one pass over them)."""
    val_quantile: np.ndarray | None = None
    """Calibrated form: the share of validation examples with a lower score, by pool example."""
    say: Callable[[str], None] = field(repr=False, default=lambda _: None)
    theta_bar: Mapping[str, Any] = field(repr=False, default_factory=dict)
    """What identifies θ̄ and its passes in a file: `described`."""

    def __repr__(self) -> str:
        form = self.summary.get("form", "literal")
        return (
            f"Scores({len(self.pool):,} examples, {form}, "
            f"{self.grad_sum.num_entries:,} candidate entries)"
        )

    def to_table(self, selection: Selection | None = None, tokenizer: Any = None) -> pa.Table:
        """One row per pool example, in the order of the pool: id, index, score, bound, loss.

        Calibrated scores also have `val_quantile`. With the result of `select` also `selected`;
        with the tokenizer also `prompt` and `response`, decoded with their special tokens.
        """
        columns: dict[str, Any] = {
            "id": [example.id for example in self.pool],
            "index": [example.index for example in self.pool],
            "score": self.example_scores,
            "bound": self.bound,
            "loss": self.losses,
        }
        if self.val_quantile is not None:
            columns["val_quantile"] = self.val_quantile
        if selection is not None:
            columns["selected"] = np.isin(np.arange(len(self.pool)), selection.data_subset)
        if tokenizer is not None:
            for name, inside in (("prompt", False), ("response", True)):
                tokens = [
                    [t for t, label in pairs if (label != IGNORE) == inside]
                    for pairs in (zip(e.input_ids, e.labels, strict=True) for e in self.pool)
                ]
                columns[name] = tokenizer.batch_decode(tokens, skip_special_tokens=False)
        return pa.table(columns)

    def to_pandas(self, selection: Selection | None = None, tokenizer: Any = None) -> Any:
        """`to_table` as a pandas DataFrame; needs pandas."""
        if find_spec("pandas") is None:
            raise ConfigError("to_pandas: pandas is not installed; install it, or use to_table")
        return self.to_table(selection, tokenizer).to_pandas()

    def save(self, folder: str | Path) -> None:
        """Write the scores to a new folder, which takes 12 to 20 bytes per candidate entry."""
        out, terms = Path(folder), self.scored.terms
        if os.path.lexists(out):
            raise ConfigError(f"{out}: exists; give the name of a new folder")
        tokens = {
            "source": [example.source for example in self.pool],
            "input_ids": pa.array([e.input_ids for e in self.pool], pa.list_(pa.int32())),
            "labels": pa.array([e.labels for e in self.pool], pa.list_(pa.int32())),
        }
        rows = self.to_table()
        for name, column in tokens.items():
            rows = rows.append_column(name, column if isinstance(column, pa.Array) else [column])
        vectors = {"grad_sum": self.grad_sum, "val_grad": self.val_grad}
        vectors |= {"projection": self.projection}
        vectors |= {"prior_grad": self.prior_grad} if self.prior_grad.norm() else {}
        vectors |= {} if terms.curvature is None else {"curvature": terms.curvature.held()}
        numbers = {name: getattr(terms, name) for name in _NUMBERS}
        body = {"format_version": FORMAT_VERSION, "kind": "scores", "terms": numbers}
        body |= {"summary": self.summary, "theta_bar": dict(self.theta_bar)}
        out.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(out) as part:
            part.mkdir()
            pq.write_table(rows, part / ROWS, compression="zstd")
            tensors = {f"{k}/{name}": t.cpu() for k, v in vectors.items() for name, t in v.items()}
            ParamVector(tensors).write(part / VECTORS, {})
            seal(RunPath(part), jsonable(body))

    @classmethod
    def load(cls, folder: str | Path, model: PreTrainedModel | None = None) -> Scores:
        """Read what `save` wrote. `model` is θ̄, with its weights at the time of scoring; without
        it, a selection that has to score examples exactly is refused."""
        path = RunPath(Path(folder))
        manifest, wrong = read_manifest(path / MANIFEST)
        problems = [wrong] if wrong else []
        if manifest and manifest.get("kind") != "scores":
            problems = [f"{MANIFEST} is not that of saved scores"]
        if problems := problems or damage(path, manifest)[0]:
            raise ConfigError(
                [f"{folder}: {p}" for p in problems] + ["score again, or copy the folder again"]
            )
        try:
            return cls._read(path, manifest, model)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RunError) as problem:
            raise ConfigError(f"{folder}: is not what save wrote: {problem!r}") from problem

    @classmethod
    def _read(
        cls, path: RunPath, manifest: Mapping[str, Any], model: PreTrainedModel | None
    ) -> Scores:
        rows = (path / ROWS).read_table()
        device = "cpu" if model is None else device_of(model)
        held: dict[str, dict[str, Tensor]] = {}
        for key, t in TensorFile(path / VECTORS).tensors().items():
            kind, _, name = key.partition("/")
            held.setdefault(kind, {})[name] = t.to(device)
        order = manifest["theta_bar"]["names"]  # files are not in the order of the parameters
        vectors = {k: ParamVector({name: v[name] for name in order}) for k, v in held.items()}
        prior_grad = vectors.get("prior_grad") or ParamVector.zeros(vectors["grad_sum"])
        val_grad, numbers = vectors["val_grad"], manifest["terms"]
        lam = numbers["lam_effective"]
        terms = ProjectionTerms(
            val_grad=val_grad,
            v_val=val_grad.plus(prior_grad, lam) if lam else val_grad,
            curvature=vectors.get("curvature"),
            preconditioner=None,
            **numbers,
        )
        scored = Scored(terms, vectors["grad_sum"], prior_grad, vectors["projection"])
        columns = {name: rows[name].to_pylist() for name in _EXAMPLE}
        pool = [Example(*fields) for fields in zip(*columns.values(), strict=True)]
        how, say = manifest["theta_bar"], Reporter()
        again = _no_model if model is None else _rescoring(model, pool, scored, how, say)
        values = {name: rows[name].to_numpy() for name in rows.column_names if name in _VALUES}
        return cls(
            example_scores=values["score"],
            bound=values["bound"],
            losses=values["loss"],
            grad_sum=vectors["grad_sum"],
            val_grad=val_grad,
            prior_grad=prior_grad,
            projection=vectors["projection"],
            eta_sc=terms.eta_sc,
            pool=pool,
            ties=np.array(columns["index"]),
            summary=manifest["summary"],
            scored=scored,
            rescore=again,
            val_quantile=values.get("val_quantile"),
            say=say.say,
            theta_bar=how,
        )


_NUMBERS = ("curvature_scale", "eta_ft", "n_sc", "lam_effective")
_EXAMPLE = ("id", "index", "input_ids", "labels", "source")
_VALUES = ("score", "bound", "loss", "val_quantile")


def described(engine: GhostEngine, passes: PassSettings) -> dict[str, Any]:
    """The candidates of θ̄ and the norm of their weights, and how its passes run."""
    found = engine.candidates
    norm = ParamVector({name: p.detach() for name, p in found.items()}).norm()
    facts = {"candidates": found.spec, "names": found.names, "norm": norm}
    return facts | {"batch_tokens": passes.batch_tokens, "precision": passes.precision}


def _no_model(rows: np.ndarray) -> np.ndarray:
    raise ConfigError(
        f"{len(rows):,} examples near the boundary must be scored exactly, at θ̄: give it as "
        "Scores.load(folder, model=theta_bar), or select before saving"
    )


def _rescoring(
    model: PreTrainedModel,
    pool: Sequence[Example],
    scored: Scored,
    how: Mapping[str, Any],
    say: Reporter,
) -> Callable[[np.ndarray], np.ndarray]:
    model.eval()
    engine = GhostEngine(model, find_candidates(model, how["candidates"]))
    passes = PassSettings(
        batch_tokens=how["batch_tokens"],
        pad_id=0,
        padding_side="right",
        precision=how["precision"],
    )
    now = described(engine, passes)
    if now["names"] != how["names"] or abs(now["norm"] / how["norm"] - 1) > SAME_WEIGHTS:
        raise ConfigError(
            f"model: its candidates have the norm {now['norm']:.9g}, and those of θ̄ had "
            f"{how['norm']:.9g}; give the model that was scored, with its weights of that time"
        )
    return lambda rows: rescore(engine, [pool[i] for i in rows], scored, passes, say)


@dataclass(frozen=True)
class Selection:
    """The mask as sorted flat indices by parameter, the subset as positions in the pool."""

    param_mask: dict[str, Tensor]
    data_subset: np.ndarray
    num_rescored: int
    rows: list[int]
    """The subset as `Example.index`: row numbers in the data that the pool was taken from."""

    def __repr__(self) -> str:
        entries = sum(len(index) for index in self.param_mask.values())
        return (
            f"Selection({len(self.rows):,} examples, {entries:,} weight entries "
            f"in {len(self.param_mask)} parameters)"
        )
