"""Which classes DeepSpeed's checkpoints hold beside tensors and containers: all of them hold values and run nothing."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import numpy
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from .. import safe_load

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


def only_data(*allowed: Any) -> contextlib.AbstractContextManager[None]:
    """``with only_data(): engine.load_checkpoint(...)`` runs no code from the checkpoint; a file that needs it raises.

    DeepSpeed loads pickles with ``weights_only=False``. In here they are loaded as data.

    Args:
        *allowed: classes and functions that the checkpoint may use besides those of DeepSpeed's own checkpoints.
    """
    return safe_load.only_data((*CLASSES, *allowed))
