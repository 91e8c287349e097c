"""Data embedded in report.html: every example with its text, and a downsampled mask.

Reads 1_split (ids, roles, tokens), 4_scores and 5_selection (scores, selected ids) and the mask.
Computes ranks, the examples near the selection boundary, the cut-off score, and the density of the
mask in each matrix. Text is decoded from the run's tokens, with template and special tokens, so it
shows what the model was trained on. Data is embedded as base64 of deflated JSON, in columns and in
chunks of text: a page with 100,000 examples opens without delay, and no row can inject HTML. Not
part of Algorithm 1.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dualsft.model.load import locate
from dualsft.runs.decisions import STATES, ranks_of, scores_of, states_of
from dualsft.runs.preflight import reading
from dualsft.runs.stages.selection import check_indices
from dualsft.storage.tensor_files import TensorFile
from dualsft.system.paths import RunPath

CHUNK_ROWS = 200
MAX_CHUNK_TEXT = 64 << 20
"""Maximum characters of a chunk: a token of a stranger's tokenizer may be of any length."""
TOKEN_BUDGET = 16_000_000
"""Maximum tokens of text in a page, about 64 MB before compression. The longest rows are truncated
first."""
MAX_SWITCHES = 32
"""Maximum number of prompt/response boundaries marked in one example."""
GRID = 24
MANY_TENSORS, SMALL_GRID = 1000, 8


def pack(value: Any) -> str:
    """Encode a value as base64 of deflated JSON, which needs no HTML escaping."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 6)).decode("ascii")


def unpack(text: str) -> Any:
    """Inverse of `pack`."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


@dataclass(frozen=True)
class Examples:
    """All examples of the run, in columns. Texts are packed in chunks of `CHUNK_ROWS`."""

    columns: dict[str, list[Any]]
    chunks: list[str]
    token_cap: int | None
    """Texts are truncated to this many tokens. None: not truncated."""
    no_text: str
    """Why text is not available. Empty if it is."""

    @property
    def count(self) -> int:
        return len(self.columns["id"])

    def numbers(self, name: str) -> np.ndarray:
        """A column as floats; missing values are nan."""
        return np.array([np.nan if v is None else v for v in self.columns[name]], dtype=np.float64)

    def in_state(self, name: str) -> np.ndarray:
        return np.array(self.columns["state"]) == STATES.index(name)


def collect_examples(
    run: RunPath, facts: Mapping[str, Any], tokenizer: Any, why: str = ""
) -> Examples:
    """All rows of 1_split with their scores, state and text.

    `why` is the reason given in the page when `tokenizer` is None.
    """
    tokens = run / "1_split/tokens.parquet"
    head = tokens.read_table(["id", "role"])
    ids, roles = head["id"].to_pylist(), head["role"].to_pylist()
    split = (run / "1_split/split.parquet").read_table(["id", "index"])
    lines = dict(zip(split["id"].to_pylist(), split["index"].to_pylist(), strict=True))
    counts, answers = _lengths(tokens)
    score, bound, loss = scores_of(run, facts, ids)
    state = states_of(run, facts, ids, roles)
    chosen = np.array([s == "selected" for s in state])
    offered = np.array([s in ("selected", "rejected", "pool") for s in state])
    rank, near = ranks_of(score, chosen, offered)
    cap = token_cap(counts)
    columns = {
        "id": ids,
        "line": [lines[i] for i in ids],
        "state": [STATES.index(s) for s in state],
        "score": _plain(score),
        "bound": _plain(bound),
        "loss": _plain(loss),
        "response": answers.tolist(),
        "tokens": counts.tolist(),
        "rank": [None if r == 0 else int(r) for r in rank],
        "near": np.flatnonzero(near).tolist(),
    }
    limit = cap if cap is not None else int(counts.max(initial=0))
    if tokenizer is None:
        return Examples(columns, [], None, why)
    try:
        chunks = [pack(rows) for rows in texts_of(_batches(tokens), tokenizer, limit)]
        return Examples(columns, chunks, cap, "")
    except Exception as problem:  # third-party tokenizer code may raise anything; skip the text
        reason = f"{type(problem).__name__}: {problem}"
        return Examples(
            columns, [], None, f"the tokenizer cannot decode the run's tokens ({reason})"
        )


def token_cap(counts: np.ndarray, budget: int = TOKEN_BUDGET) -> int | None:
    """Length to which texts are truncated so that all fit the budget. None: they fit whole."""
    if counts.sum() <= budget:
        return None
    # Rows are truncated to one common length. `before` is the tokens of the shorter rows, which
    # stay whole; the first row that does not fit decides the length.
    rising = np.sort(counts)
    before = np.concatenate([[0], np.cumsum(rising)[:-1]])
    left = len(rising) - np.arange(len(rising))
    first_cut = int(np.flatnonzero(before + rising * left > budget)[0])
    return max(16, int((budget - before[first_cut]) // left[first_cut]))


def _plain(values: np.ndarray) -> list[float | None]:
    """Floats with nine significant digits; None for nan and infinity, which JSON does not have."""
    return [float(f"{v:.9g}") if np.isfinite(v) else None for v in values]


def _lengths(tokens: RunPath) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, predicted response tokens) per row."""
    counts, answers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for offsets, _, marked in _batches(tokens, with_ids=False):
        marked[offsets[:-1][offsets[:-1] < offsets[1:]]] = False  # the first token is not predicted
        running = np.concatenate([[0], np.cumsum(marked)])
        counts.append(np.diff(offsets))
        answers.append(running[offsets[1:]] - running[offsets[:-1]])
    return np.concatenate(counts), np.concatenate(answers)


Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Row offsets, token ids, mask of response tokens."""


def _batches(tokens: RunPath, with_ids: bool = True) -> Iterator[Batch]:
    names = ["input_ids", "labels"] if with_ids else ["labels"]
    for batch in tokens.read_batches(CHUNK_ROWS, names):
        if not batch.num_rows:
            continue
        labels = batch.column("labels")
        offsets = labels.offsets.to_numpy().astype(np.int64)
        start = offsets[0]
        values = labels.values.to_numpy()[start : offsets[-1]]
        ids = values
        if with_ids:
            rows = batch.column("input_ids")
            own = rows.offsets.to_numpy()
            ids = rows.values.to_numpy()[own[0] : own[-1]]
        yield offsets - start, ids, values != -100


def texts_of(batches: Iterable[Batch], tokenizer: Any, cap: int) -> Iterator[list[list[str]]]:
    """Batches of rows. A row is a list of texts that alternate: prompt, response, prompt, ..."""
    vocabulary = tokenizer.get_vocab()
    lengths = np.zeros(max(vocabulary.values(), default=0) + 1, np.int64)
    lengths[list(vocabulary.values())] = [len(text) for text in vocabulary]
    for offsets, ids, marked in batches:
        wanted: list[list[int]] = []
        text_length = 0
        plan: list[tuple[bool, int]] = []
        for start, stop in zip(offsets[:-1], offsets[1:], strict=True):
            row, mark = ids[start : min(stop, start + cap)], marked[start : min(stop, start + cap)]
            turns = (np.flatnonzero(mark[1:] != mark[:-1]) + 1)[:MAX_SWITCHES]
            plan.append((bool(len(mark) and mark[0]), len(turns) + 1))
            # Decode prefixes, not pieces: some tokenizers decode a token differently at the start
            # of a sequence, and a character may span several tokens.
            wanted += [row[:turn].tolist() for turn in turns] + [row.tolist()]
            known = row[(row >= 0) & (row < len(lengths))]
            text_length += int(lengths[known].sum()) * (len(turns) + 1)
        if text_length > MAX_CHUNK_TEXT:
            raise ValueError(f"{text_length:,} characters of text in {CHUNK_ROWS} rows")
        texts = tokenizer.batch_decode(
            wanted, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        rows, at = [], 0
        for starts_inside, pieces in plan:
            parts, done = [""] if starts_inside else [], 0
            for text in texts[at : at + pieces]:
                end = max(done, min(len(text), len(texts[at + pieces - 1])))
                parts.append(texts[at + pieces - 1][done:end])
                done = end
            rows.append(parts)
            at += pieces
        yield rows


def cut_off(chosen: np.ndarray, rest: np.ndarray) -> float | None:
    """Score midway between the selected and the rejected. None if their ranges overlap."""
    if not len(chosen) or not len(rest):
        return None
    for low, high in ((rest, chosen), (chosen, rest)):
        if low.max() <= high.min():
            return float(low.max() + high.min()) / 2
    return None


def collect_mask(run: RunPath, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per parameter of the mask: layer, module, shape, selected entries, and density on a grid."""
    if "selection" not in facts["manifests"] or "k" not in facts["selection"]:
        return []
    final = facts["selection"]["final"]
    path = run / "5_selection" / final / "mask.safetensors"
    shapes = parameter_shapes(run, facts)
    cells = []
    file, cpu = TensorFile(path), torch.device("cpu")
    modules = list(facts["selection"]["per_module"])  # in model order
    names = sorted(file.forms, key=lambda name: _place(name, modules))
    side = GRID if len(names) <= MANY_TENSORS else SMALL_GRID
    for name in names:
        found = file.piece(name, 0, file.forms[name].num_entries, cpu)
        shape = shapes.get(name)
        if found.numel():
            with reading(path):
                check_indices(name, found.view(file.forms[name].shape), shape)
        index = found.numpy()
        layer, module = locate(name)
        cell = {
            "name": name,
            "layer": "other" if layer is None else str(layer),
            "module": module,
            "count": int(index.size),
            "shape": shape,
            "grid": density(index, shape, side) if shape and index.size else None,
        }
        cells.append(cell)
    return cells


def _place(name: str, modules: list[str]) -> tuple[int, int, str]:
    layer, module = locate(name)
    at = modules.index(module) if module in modules else len(modules)
    return (1 << 30 if layer is None else layer, at, name)


def density(index: np.ndarray, shape: list[int], side: int) -> list[list[float]]:
    """Share of selected entries in each block of a grid of at most `side` × `side` blocks."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = int(np.prod(shape)) // rows
    high, wide = min(rows, side), min(columns, side)
    counts = np.zeros(high * wide, np.int64)
    for start in range(0, len(index), 1 << 22):
        piece = index[start : start + (1 << 22)]
        block = (piece // columns) * high // rows * wide + (piece % columns) * wide // columns
        counts += np.bincount(block, minlength=high * wide)
    tall = np.bincount(np.arange(rows) * high // rows, minlength=high)
    broad = np.bincount(np.arange(columns) * wide // columns, minlength=wide)
    shares = counts.reshape(high, wide) / np.outer(tall, broad)
    return [[round(float(v), 5) for v in row] for row in shares]


def parameter_shapes(run: RunPath, facts: Mapping[str, Any]) -> dict[str, list[int]]:
    """Parameter shapes, from the headers of the run's tensor files."""
    files: list[RunPath] = []
    if "finetune" in facts["manifests"]:
        files += (run / "6_finetune/model").glob("*.safetensors")
    if "gradients" in facts["manifests"]:
        files += (run / "3_gradients").glob("grad_sum.safetensors")
    shapes: dict[str, list[int]] = {}
    for path in files:
        shapes |= {name: list(form.shape) for name, form in TensorFile(path).forms.items()}
    return shapes
