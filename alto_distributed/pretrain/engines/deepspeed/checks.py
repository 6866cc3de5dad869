"""What can be refused before DeepSpeed is imported."""

from __future__ import annotations

from ...config.settings import Run
from .config import deepspeed_config


def check(run: Run, data_parallel: int) -> None:
    """Raise a ValueError if the run's JSON cannot be read or says something else than the run."""
    deepspeed_config(run, data_parallel)
