"""``alto_skip_nonfinite``: in bf16 and float32 Megatron steps whatever the gradients are; here it asks first.

With a loss scaler (fp16) Megatron looks for infinities itself and skips the step. Without one, the same place is used:
when gradients are ready and nothing has been clipped or stepped, ``prepare_grads`` says whether to go on. Megatron's
wrappers for dense and for expert parameters are asked together, so that a step is skipped by both or by none.

The ranks agree over the group in which Megatron itself agrees under fp16: those that share a copy of the model, with
all of its data-parallel shards under the distributed optimizer. Copies have the same gradients.

The host reads the answer, at a place where it waits for the gradient's norm anyway if gradients are clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..nonfinite import flag_over
from ..sharding.collective import everyone
from ..sharding.dtensor import local


def skip_nonfinite(wrapper: Any) -> None:
    """Have a wrapper of Megatron's skip steps with gradients that are not finite. On every rank, a stub included."""
    if getattr(wrapper, "grad_scaler", None) is not None:
        return
    # On the object, not in a class: a stub, which has no parameters on this rank, keeps Megatron's own.
    wrapper.prepare_grads = _asking(wrapper, wrapper.prepare_grads)


def _asking(wrapper: Any, prepare_grads: Callable[[], bool]) -> Callable[[], bool]:
    @torch.no_grad()
    def prepare() -> bool:
        found = bool(prepare_grads())
        gradients = (local(p.grad) for p in wrapper.get_parameters() if p.grad is not None)
        flag = flag_over(everyone(wrapper.get_grad_stats_parallel_group()), gradients)
        return found or bool(flag.item())

    return prepare
