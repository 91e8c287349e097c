"""Exceptions raised by the package.

Two kinds of failure with two exit codes: invalid settings or data (`ConfigError`, `DataError`;
exit 2), and a run that failed (`RunError`; exit 1). Each message names what is wrong, where, what
is allowed and the cure. Problems are collected, so one attempt reports all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class DualsftError(Exception):
    """Base class of all errors that the command line prints without a traceback."""

    exit_code = 1


class _UserError(DualsftError, ValueError):
    """One or more problems in the settings or the data."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(_UserError):
    """An invalid setting, path or model: field, value, what is allowed, the cure.

    `usable` holds the settings that are valid on their own, so the files and models they name can
    be checked in the same attempt.
    """

    usable: Mapping[str, Any] = {}


class DataError(_UserError):
    """Invalid rows or files of the corpus: file, 1-based line, field, the cure."""


class RunError(DualsftError, RuntimeError):
    """A run failed: a self-check, a non-finite number, a run folder that does not verify."""


class CheckError(RunError):
    """A self-check failed or a number is not finite. The model, the data, or a file of an earlier
    stage can be the cause; the command line adds the files that were read."""
