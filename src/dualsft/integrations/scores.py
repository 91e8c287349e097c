"""`Scores` and `Selection`, which `dualsft.score` and `dualsft.select` give, as tables and files.

A saved `Scores` is a folder: scores.parquet (one row per pool example, with its tokens),
vectors.safetensors (u, G, v_new, v_prior and ĉ over the candidates) and manifest.json (the numbers,
and a hash of each file). Nothing is pickled; a damaged file is refused. Selecting from loaded
scores gives what selecting before saving gave. Where a selection has to score examples exactly
(literal scores near the boundary), it needs θ̄, which is not in the folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.projection import ProjectionTerms, Scored
from dualsft.algorithm.selection import rescore
from dualsft.data.examples import IGNORE, Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.passes import Precision
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
        try:
            if problems := problems or damage(path, manifest)[0]:
                cure = "score again, or copy the folder again"
                raise ConfigError([*(f"{folder}: {p}" for p in problems), cure])
            return cls._read(path, manifest, model)
        except ConfigError:
            raise
        except _UNREADABLE as problem:
            raise ConfigError(
                f"{folder}: is not what save wrote: {problem!r:.300}; save the scores again"
            ) from problem

    @classmethod
    def _read(
        cls, path: RunPath, manifest: Mapping[str, Any], model: PreTrainedModel | None
    ) -> Scores:
        rows = (path / ROWS).read_table()
        _check_rows(path / ROWS, rows)
        _check_numbers(path / MANIFEST, manifest, len(rows))
        device = "cpu" if model is None else device_of(model)
        order = manifest["theta_bar"]["names"]  # files are not in the order of the parameters
        vectors = {
            kind: ParamVector({name: held[name].to(device) for name in order})
            for kind, held in _read_vectors(path / VECTORS, order).items()
        }
        prior_grad = vectors.get("prior_grad") or ParamVector.zeros(vectors["grad_sum"])
        val_grad, numbers = vectors["val_grad"], manifest["terms"]
        lam = numbers["lam_effective"]
        terms = ProjectionTerms(
            val_grad=val_grad,
            v_val=val_grad.plus(prior_grad, lam) if lam else val_grad,
            curvature=vectors.get("curvature"),
            preconditioner=None,
            **{name: numbers[name] for name in _NUMBERS},
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


_UNREADABLE = (
    *(KeyError, TypeError, ValueError, AttributeError, ArithmeticError, OSError),
    *(RecursionError, RunError, pa.ArrowException),
)
_NUMBERS = ("curvature_scale", "eta_ft", "n_sc", "lam_effective")
_EXAMPLE = ("id", "index", "input_ids", "labels", "source")
_VALUES = ("score", "bound", "loss", "val_quantile")


_VECTORS = ("grad_sum", "val_grad", "projection", "prior_grad", "curvature")
"""Vectors of a file; the last two may be missing."""


# --- what a file may hold ------------------------------------------------------------------------


def _require(right: bool, file: RunPath, name: str, allowed: str) -> None:
    if not right:
        raise ConfigError(f"{file}: {name} must be {allowed}; save the scores again")


def _is_number(value: Any) -> bool:
    """Whether it is a finite number that is a float, too; a bool is none."""
    most = sys.float_info.max
    return type(value) in (int, float) and -most <= value <= most


def _check_numbers(file: RunPath, manifest: Mapping[str, Any], num_rows: int) -> None:
    parts: dict[str, dict[str, Any]] = {}
    for part in ("terms", "theta_bar", "summary"):
        _require(isinstance(manifest.get(part), dict), file, part, "an object")
        parts[part] = manifest[part]
    terms, how = parts["terms"], parts["theta_bar"]
    for name in _NUMBERS:
        _require(_is_number(terms.get(name)), file, f"terms.{name}", "a finite number")
    _require(terms["eta_ft"] > 0, file, "terms.eta_ft", "above 0")
    _require(terms["n_sc"] == num_rows, file, "terms.n_sc", f"the {num_rows:,} rows of {ROWS}")
    names, size, norm = how.get("names"), how.get("batch_tokens"), how.get("norm")
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    once = isinstance(names, list) and texts and 0 < len(names) == len(set(names))
    _require(once, file, "theta_bar.names", "a list of names")
    _require(isinstance(how.get("candidates"), str), file, "theta_bar.candidates", "text")
    positive = norm is not None and _is_number(norm) and norm > 0
    _require(positive, file, "theta_bar.norm", "a number above 0")
    _require(type(size) is int and 0 < size < 1 << 31, file, "theta_bar.batch_tokens", "a count")
    levels = get_args(Precision)
    _require(how.get("precision") in levels, file, "theta_bar.precision", " or ".join(levels))
    form, forms = parts["summary"].get("form", "literal"), ("literal", "calibrated")
    _require(form in forms, file, "summary.form", " or ".join(forms))


def _check_rows(file: RunPath, rows: pa.Table) -> None:
    _require(len(rows) > 0, file, "the table", "one with rows")
    for name in (*_EXAMPLE, *_VALUES):
        count = rows.column_names.count(name)
        if name == "val_quantile" and not count:
            continue
        _require(count == 1, file, f"column {name}", "there once")
        column, shown, entries = rows[name], f"column {name}", rows[name]
        if name in ("input_ids", "labels"):
            is_list = pa.types.is_list(column.type) and column.type.value_type == pa.int32()
            _require(is_list, file, shown, "lists of 32-bit integers")
            entries = _arrow.list_flatten(column)
        else:
            allowed = _TYPES.get(name, (pa.float64(), pa.float32()))
            _require(column.type in allowed, file, shown, f"of type {allowed[0]}")
        _require(not column.null_count + entries.null_count, file, shown, "without nulls")
        if name in ("id", "source"):
            continue
        values = entries.to_numpy()
        low, high = _LIMITS.get(name, (-sys.float_info.max, sys.float_info.max))
        inside = (values >= low) & (values <= high)
        if name == "labels":
            inside |= values == IGNORE
        _require(bool(inside.all()), file, shown, f"from {low:.4g} to {high:.4g}")
    lengths, others = (_arrow.list_value_length(rows[name]) for name in ("input_ids", "labels"))
    _require(lengths.equals(others), file, "column labels", "as long as input_ids")
    _require(bool((lengths.to_numpy() > 0).all()), file, "column input_ids", "without empty lists")


_arrow: Any = pc  # its functions are made at run time
_TYPES = {"id": (pa.string(),), "source": (pa.string(),), "index": (pa.int64(),)}
"""Allowed types of a column; of all others, a float."""
_LIMITS: dict[str, tuple[float, float]] = {
    "index": (0, 2**63 - 1),
    "input_ids": (0, 2**31 - 1),
    "labels": (0, 2**31 - 1),
    "bound": (0, sys.float_info.max),
    "val_quantile": (0, 1),
}
"""Least and largest value of a column; of all others, any finite number."""


def _read_vectors(path: RunPath, names: list[str]) -> dict[str, dict[str, Tensor]]:
    """The vectors of a file, which agree with each other in names, shapes and dtype."""
    held: dict[str, dict[str, Tensor]] = {}
    for key, t in TensorFile(path).tensors().items():
        kind, _, name = key.partition("/")
        held.setdefault(kind, {})[name] = t
    for kind in (*_VECTORS[:3], *held):
        _require(kind in held and kind in _VECTORS, path, kind, f"one of {', '.join(_VECTORS)}")
        own, users = held[kind], kind == "curvature"
        # ĉ is the user's: it may be over more parameters, and of another float dtype
        agrees = own.keys() >= set(names) if users else own.keys() == set(names)
        _require(agrees, path, kind, f"over the {len(names):,} theta_bar.names of {MANIFEST}")
        dtype = (own if users else held["grad_sum"])[names[0]].dtype
        right = dtype.is_floating_point if users else dtype in (torch.float32, torch.float64)
        for name in names:
            t, shape = own[name], held["grad_sum"][name].shape
            same = right and t.dtype == dtype and t.shape == shape
            _require(same, path, f"{kind}/{name}", f"of one float dtype and the shape {[*shape]}")
            _require(bool(torch.isfinite(t).all()), path, f"{kind}/{name}", "finite")
    return held


# --- exact scores at θ̄ ---------------------------------------------------------------------------


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
    vocabulary = len(model.get_input_embeddings().get_parameter("weight"))
    if any(max(*example.input_ids, *example.labels) >= vocabulary for example in pool):
        raise ConfigError(
            f"{ROWS}: has tokens outside the model's vocabulary of {vocabulary:,}; save the scores "
            "again"
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
