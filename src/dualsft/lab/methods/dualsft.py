"""DualSFT's own two sides, and their reverses as controls: Algorithm 1 lines 9 to 11."""

from __future__ import annotations

from dualsft.data.examples import Example
from dualsft.runs.method import DataChoice, DataMethod, Job, ParamChoice, ParamMethod
from dualsft.runs.stages.selection import Scoring


def scoring(job: Job) -> Scoring:
    """u, G and the engine, read once for both sides."""
    return job.shared("scoring", lambda job: Scoring.of(job.ctx))


class DualData(DataMethod):
    """The b largest signed scores, exact: the certificate, then re-scoring what it leaves open."""

    pool_roles = ("pool",)
    reverse = False

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        found = scoring(job)
        data = found.choose_examples(b, self.reverse)
        job.accounts.backward_examples += len(data.rescored)
        return DataChoice(data.positions, found.describe(job.part, data, b))


class ReversedData(DualData):
    """The b smallest."""

    reverse = True


class DualParams(ParamMethod):
    """The k largest signed scores over all candidates."""

    reverse = False

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        mask = scoring(job).choose_entries(k, self.reverse)
        return ParamChoice(mask.indices, scoring(job).describe_entries(mask))


class ReversedParams(DualParams):
    """The k smallest."""

    reverse = True
