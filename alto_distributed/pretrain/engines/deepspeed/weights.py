"""The weights in a checkpoint of the DeepSpeed engine, whole, in one process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ....deepspeed.data_classes import CLASSES
from ....safe_load import only_data
from ...checkpoint.safe_load import refuse_code_alone
from ...config.settings import Run
from .checkpoint import TAG

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def read(run: Run, directory: Path) -> dict[str, torch.Tensor]:
    """See :func:`alto_distributed.pretrain.engines.base.read_weights`."""
    refuse_code_alone(directory, (directory / TAG).glob("*.pt"), CLASSES)
    whole = directory / TAG / "mp_rank_00_model_states.pt"
    with only_data(CLASSES):
        if whole.is_file():
            found: dict[str, Any] = torch.load(whole, map_location="cpu", weights_only=True)["module"]
        else:  # stage 3 saves the pieces of master weights
            with contextlib.redirect_stdout(io.StringIO()):
                found = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=TAG)
    dtype = _DTYPES[run.training.precision]
    return {name: tensor.to(dtype) for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
