"""dualsft: fine-tune on the best 10 % of the data and the best 5 % of the weights, chosen together.

    import dualsft
    config = dualsft.Config(
        model=dualsft.ModelConfig(path="my-model"), data=dualsft.DataConfig(path="my.jsonl")
    )
    dualsft.run(config, out="runs/mine")

Symbols of the paper and their names here:

    θ_old theta_old   θ̄ theta_bar        ĉ curvature     G grad_sum        v_new val_grad
    v_prior prior_grad   u projection    s_θ param_scores   s_D example_scores
    m_θ param_mask    D_sel data_subset  η_sc eta_sc     N_sc n_sc
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dualsft.config.methods import add_part
from dualsft.config.settings import (
    Config,
    DataConfig,
    EvaluationConfig,
    FinetuneConfig,
    ModelConfig,
    ScoreConfig,
    SelectConfig,
    SplitConfig,
    WarmupConfig,
    load,
)
from dualsft.errors import ConfigError, DataError, DualsftError, RunError

if TYPE_CHECKING:
    from dualsft.api import score, score_trainer, select, warmup
    from dualsft.data.examples import encode
    from dualsft.integrations.scores import Scores, Selection
    from dualsft.integrations.transformers import DualSFTCallback, restrict
    from dualsft.lab.estimate.estimate import estimate
    from dualsft.lab.explain import explain
    from dualsft.model.delta import apply_delta, combine_deltas, extract_delta
    from dualsft.runs.pipeline import run
    from dualsft.train.optimizer import SparseAdamW

__version__ = "0.1.0"

# Register parts that lower layers use but must not import. The core works without `lab`.
add_part("methods", "dualsft.runs:ENTRIES")
add_part("checks", "dualsft.integrations.trackers:tracker_problems")
add_part("trackers", "dualsft.integrations.trackers:tracked")
if find_spec("dualsft.lab") is not None:
    add_part("methods", "dualsft.lab.methods.table:ENTRIES")
    add_part("stages", "dualsft.lab.evaluation.stage:STAGE")
    add_part("report", "dualsft.lab.report.markdown:write_report")
    add_part("ending", "dualsft.lab.report.ending:ending")
    add_part("checks", "dualsft.lab.evaluation.tasks:task_problems")

_LAZY = {
    "run": "dualsft.runs.pipeline",
    "score": "dualsft.api",
    "score_trainer": "dualsft.api",
    "select": "dualsft.api",
    "Scores": "dualsft.integrations.scores",
    "Selection": "dualsft.integrations.scores",
    "DualSFTCallback": "dualsft.integrations.transformers",
    "restrict": "dualsft.integrations.transformers",
    "warmup": "dualsft.api",
    "encode": "dualsft.data.examples",
    "SparseAdamW": "dualsft.train.optimizer",
    "apply_delta": "dualsft.model.delta",
    "combine_deltas": "dualsft.model.delta",
    "extract_delta": "dualsft.model.delta",
    "estimate": "dualsft.lab.estimate.estimate",
    "explain": "dualsft.lab.explain",
}

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "DataError",
    "DualSFTCallback",
    "DualsftError",
    "EvaluationConfig",
    "FinetuneConfig",
    "ModelConfig",
    "RunError",
    "ScoreConfig",
    "Scores",
    "SelectConfig",
    "Selection",
    "SparseAdamW",
    "SplitConfig",
    "WarmupConfig",
    "apply_delta",
    "combine_deltas",
    "encode",
    "estimate",
    "explain",
    "extract_delta",
    "load",
    "restrict",
    "run",
    "score",
    "score_trainer",
    "select",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """Import torch-dependent names on first use, to keep `import dualsft` fast."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dualsft' has no attribute {name!r}")
