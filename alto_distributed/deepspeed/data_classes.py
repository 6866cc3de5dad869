"""Which classes DeepSpeed's checkpoints hold beside tensors and containers: all of them hold values and run nothing."""

from __future__ import annotations

import argparse
from typing import Any

import numpy
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

_scalar: Any = numpy.float64(0).__reduce__()[0]  # its module has another name in each version of numpy
_SCALARS = tuple(type(numpy.dtype(kind)) for kind in ("bool", "int32", "int64", "float32", "float64"))

CLASSES: tuple[Any, ...] = (
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
    argparse.Namespace,  # Megatron-DeepSpeed's arguments
    # A learning rate or a step count that numpy has computed.
    _scalar,
    numpy.dtype,
    *_SCALARS,
)
