"""Split D_full into val, anchor, warm and pool (Algorithm 1, inputs and line 2).

D_train is everything but val and anchor, D_warm a part of it, and D_pool = D_train \\ D_warm.
Budgets refer to |D_full|, the usable rows of the corpus and of data.val_path (`full_size`). Roles
are assigned by hashing (seed, text), so they do not depend on the order of the file. Examples with
identical tokens get the same role.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from dualsft.config.settings import DataConfig, SplitConfig
from dualsft.data.examples import Example, digest
from dualsft.data.layouts import counted
from dualsft.errors import ConfigError

ROLES = ("val", "anchor", "warm", "pool")

_PAPER = {"val": (1024, Decimal("0.1")), "anchor": (2048, Decimal("0.2"))}
"""The paper's sizes, and the maximum share of a small corpus (ours)."""


@dataclass(frozen=True, slots=True)
class Split:
    """Role of every example, in the order of the examples, and notes for the user."""

    roles: list[str]
    counts: dict[str, int]
    notes: list[str]


def resolve_budget(budget: int | float, total: int, name: str = "budget") -> int:
    """A budget as a count: an int is a count, a float a fraction of `total`, rounded down, >= 1.

    `name` is the configuration key for error messages.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ConfigError(f"{name}: {budget!r} is not a number; use a count or a fraction")
    if isinstance(budget, int):
        if budget < 0:
            raise ConfigError(f"{name}: {budget} is negative; use a count or a fraction in (0, 1]")
        return budget
    if not 0 < budget <= 1:
        raise ConfigError(
            f"{name}: {budget} is not in (0, 1]; write a fraction, or a count without a point"
        )
    return max(1, int(Decimal(repr(budget)) * total))  # decimal: 0.29 of 100 is 29, not 28


def full_size(counts: Mapping[str, int], data: DataConfig) -> int:
    """|D_full|, from the number of examples of each role.

    Rows of data.anchor_path are no part of it: they may be of another kind, and are never trained
    on, so they do not change what a share of the corpus means.
    """
    return sum(counts.values()) - (0 if data.anchor_path is None else counts["anchor"])


def divide(
    examples: Sequence[Example],
    trusted: Sequence[Example],
    seed: int,
    sizes: SplitConfig,
    anchors: Sequence[Example] = (),
) -> tuple[list[Example], Split]:
    """(all examples, role of each): the corpus, then the trusted rows (D_val), then the anchors.

    Trusted rows count in |D_full|, anchors do not. A text in several sources stays in one: that of
    a trusted row in D_val, that of an anchor in D_anchor; the other rows are dropped, with a note.
    """
    notes: list[str] = []

    def without(
        rows: Sequence[Example], key: str, owners: Sequence[Example], owner: str
    ) -> list[Example]:
        """The rows of `key` whose text is not that of a row of `owner`."""
        texts = {example.key for example in owners}
        kept = [example for example in rows if example.key not in texts]
        if len(kept) < len(rows):
            count = len(rows) - len(kept)
            have, are = ("has", "is") if count == 1 else ("have", "are")
            notes.append(
                f"{counted(count, 'row')} of {key} {have} the text of a row of {owner} and {are} "
                "left out"
            )
        return kept

    kept = without(examples, "data.path", trusted, "data.val_path")
    held = without(anchors, "data.anchor_path", trusted, "data.val_path")
    if anchors and not held:
        raise ConfigError(
            "data.anchor_path: every row has the text of a row of data.val_path, which leaves no "
            "anchors; give rows of the behaviour to keep"
        )
    kept = without(kept, "data.path", held, "data.anchor_path")
    split = assign_roles(
        kept, seed, sizes.val, sizes.anchor, sizes.warm, len(trusted), has_anchors=bool(held)
    )
    added = {"val": len(trusted), "anchor": len(held)}
    counts = {role: count + added.get(role, 0) for role, count in split.counts.items()}
    roles = [*split.roles, *["val"] * len(trusted), *["anchor"] * len(held)]
    return [*kept, *trusted, *held], Split(roles, counts, [*split.notes, *notes])


def assign_roles(
    examples: Sequence[Example],
    seed: int,
    val: int | float | None = None,
    anchor: int | float | None = None,
    warm: int | float = 0.05,
    num_trusted: int = 0,
    has_anchors: bool = False,
) -> Split:
    """Assign a role to every example; None means the paper's size, less for a small corpus.

    `num_trusted` rows outside the corpus are already D_val and count in |D_full|. With
    `has_anchors`, rows outside the corpus are D_anchor, and none is taken from it.
    """
    total, notes = len(examples) + num_trusted, []
    wanted: dict[str, int] = {}
    for role, budget in (("val", val), ("anchor", anchor), ("warm", warm)):
        if (role == "val" and num_trusted) or (role == "anchor" and has_anchors):
            wanted[role] = 0
        elif budget is None:
            wanted[role] = _default_count(role, total, notes)
        else:
            wanted[role] = resolve_budget(budget, total, f"split.{role}")
    _check_counts(wanted, len(examples), num_trusted > 0)

    groups: dict[str, list[int]] = defaultdict(list)
    for i, example in enumerate(examples):
        groups[example.key].append(i)
    order = sorted(groups, key=lambda key: digest(seed, key))
    roles = ["pool"] * len(examples)
    for role, count in wanted.items():
        left, passed_over = count, []
        for key in order:
            if len(groups[key]) > left:
                passed_over.append(key)
                continue
            left -= len(groups[key])
            for i in groups[key]:
                roles[i] = role
        order = passed_over
        if left:
            notes.append(
                f"split.{role}: {count - left:,} of {counted(count, 'example')}, because "
                "identical texts stay together and no group of them fits the rest"
            )
    counts = {role: roles.count(role) for role in ROLES}
    _check_filled(counts, wanted, len(groups))
    return Split(roles, counts, notes)


def _default_count(role: str, total: int, notes: list[str]) -> int:
    paper, share = _PAPER[role]
    count = min(paper, max(1, int(share * total)))
    if count < paper:
        notes.append(
            f"split.{role}: {counted(count, 'example')} instead of the paper's {paper:,}: at most "
            f"{share:.0%} of the {counted(total, 'usable row')}"
        )
    return count


def _check_counts(wanted: dict[str, int], total: int, has_val: bool) -> None:
    asked = ", ".join(f"split.{role}={count:,}" for role, count in wanted.items())
    if wanted["val"] == 0 and not has_val:
        raise ConfigError("split.val: 0 leaves nothing to take v_new from; use 1 or more")
    if sum(wanted.values()) >= total:
        raise ConfigError(
            f"{asked}: together {sum(wanted.values()):,} of {counted(total, 'usable row')}, which "
            "leaves no pool to select from; lower split.val, split.anchor or split.warm, or bring "
            "more data"
        )


def _check_filled(counts: dict[str, int], wanted: dict[str, int], num_texts: int) -> None:
    empty = [
        f"split.{role}={wanted[role]:,}" for role in wanted if wanted[role] > counts[role] == 0
    ]
    if empty:
        got = ", ".join(f"{role} {count:,}" for role, count in counts.items())
        raise ConfigError(
            f"{', '.join(empty)} cannot be filled ({got}): the {sum(counts.values()):,} usable "
            f"rows hold only {num_texts:,} different texts, and identical ones stay together; "
            "change split.val, split.anchor or split.warm, or bring more varied data"
        )
    assert counts["pool"], "no role may hold more than was asked for"
