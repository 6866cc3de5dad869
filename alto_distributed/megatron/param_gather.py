"""Weights that wait for the next forward pass, and how to have them now.

With ``overlap_param_gather`` a step writes only this rank's shard of the weights. The next forward pass gathers the
shards of the others. Until then the model mixes the weights of two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

WARNING = (
    "with overlap_param_gather the model's weights mix two steps until the next forward pass. To save them, first call "
    "start_param_sync(force_sync=True) on every model chunk, on all ranks; then model.state_dict() is right"
)


def is_outstanding(chunk: Any) -> bool:
    """Whether the next forward pass of a model chunk would gather weights. All data-parallel ranks answer alike."""
    if not chunk.ddp_config.overlap_param_gather:
        return False  # gathered by the step itself
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    return any(not group.param_gather_dispatched or group.param_gather_handle is not None for group in groups)


@torch.no_grad()
def finish_param_gather(model_chunks: Sequence[Any]) -> None:
    """Gather what the next forward pass would, or wait for it where it is under way. Called by all ranks.

    Tensors that a ``state_dict`` of the model holds already are those of the model, and change with it.
    """
    for chunk in model_chunks:
        if is_outstanding(chunk):
            chunk.start_param_sync(force_sync=True)
