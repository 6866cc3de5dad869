"""Parameters that the model keeps in fp8 (``fp8_param_gather``).

ALTO steps Megatron's float32 shards, and Megatron quantizes them for the model. The shards begin with the weights from
before quantization, where the model has kept them; Megatron takes them from there, and then they are gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from megatron.core import fp8_utils


def initial_weights(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.Tensor, torch.Tensor]:
    """Of each parameter in fp8: what its shards will be made from. To be called before Megatron builds them."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for chunk in model_chunks:
        for param in chunk.parameters():
            if fp8_utils.is_float8tensor(param):
                precise = getattr(param, "get_high_precision_init_val", lambda: None)()
                found[param] = param.detach().float() if precise is None else precise
    if found:
        warnings.warn(
            f"{len(found)} parameters are kept in fp8 (--fp8-param-gather). ALTO steps their float32 weights, and "
            "Megatron quantizes them; this has been tested without TransformerEngine only",
            stacklevel=4,
        )
    return found
