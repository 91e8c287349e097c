"""Registry entries (`config/methods.py`) of the baseline methods that DualSFT is compared with."""

from __future__ import annotations

from dualsft.lab.methods.data_table import DATA
from dualsft.lab.methods.params_table import PARAMS
from dualsft.lab.methods.training_table import AFTER, WEIGHTS

ENTRIES = (*DATA, *PARAMS, *WEIGHTS, *AFTER)
