"""What the property tests share: properties written once, and inputs to try them on.

A property is registered by `Properties.holds` and tried on 100 generated inputs by `make test`, on
2,000 by `make test-all`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_tokenizers import SPECIALS
from torch import Tensor

from dualsft.algorithm.topk_reading import ScoreSource
from dualsft.data.examples import IGNORE, Example

Check = Callable[..., None]


class Properties(dict[str, tuple[Check, dict[str, Any]]]):
    """Properties by name: the check, and what it is to be tried on."""

    def holds(self, **inputs: Any) -> Callable[[Check], Check]:
        """Register a property."""

        def register(check: Check) -> Check:
            self[check.__name__] = (check, inputs)
            return check

        return register

    def try_out(self, name: str, max_examples: int) -> None:
        check, inputs = self[name]
        fine = [HealthCheck.too_slow, HealthCheck.filter_too_much]
        options = settings(max_examples=max_examples, deadline=None, suppress_health_check=fine)
        options(given(**inputs)(check))()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one trial."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


texts = st.text(max_size=20).filter(lambda text: not any(name in text for name in SPECIALS))
seeds = st.integers(0, 2**32 - 1)
randoms = st.randoms(use_true_random=False)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
token_lists = st.lists(st.integers(0, 500), min_size=2, max_size=12)


def example(ids: list[int], prompt: int, index: int) -> Example:
    """An example whose first tokens, at least one, are not trained."""
    cut = 1 + prompt % (len(ids) - 1)
    return Example(f"{index:016x}-{index}", index, ids, [IGNORE] * cut + ids[cut:])


examples = st.lists(st.tuples(token_lists, st.integers(0, 11)), min_size=1, max_size=20).map(
    lambda drawn: [example(ids, prompt, i) for i, (ids, prompt) in enumerate(drawn)]
)


def chunked(tensors: Mapping[str, Tensor], chunk: int = 1 << 22) -> ScoreSource:
    """A source for scores in memory."""

    def read() -> Iterator[tuple[str, int, Tensor]]:
        for name, tensor in tensors.items():
            flat = tensor.detach().view(-1)
            for start in range(0, max(flat.numel(), 1), chunk):
                yield name, start, flat[start : start + chunk]

    return read
