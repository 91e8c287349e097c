"""The errors a user can meet.

Two classes of failure, two exit codes: what the user wrote or brought is wrong (`ConfigError`,
`DataError`; exit 2), or the work itself failed (`RunError`; exit 1). Each message says what is
wrong, where, what is allowed and the cure; problems are collected, so one attempt shows them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class DualsftError(Exception):
    """Base of every error that the command line prints without a traceback."""

    exit_code = 1


class _UserError(DualsftError, ValueError):
    """One or more problems in what the user wrote or brought."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(_UserError):
    """A setting, a path or a model that cannot be used: field, value, what is allowed, the cure.

    `usable` holds the settings that are right by themselves, so that what they name can be checked
    in the same attempt.
    """

    usable: Mapping[str, Any] = {}


class DataError(_UserError):
    """Rows or files of the corpus that cannot be used: file, 1-based line, field, the cure."""


class RunError(DualsftError, RuntimeError):
    """The work failed: a self-check, a non-finite number, a run folder that does not verify."""
