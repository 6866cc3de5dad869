"""Where the tensors of a shard are, for kernels that go by addresses."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch

from ..spans import PLAIN


class Memory(NamedTuple):
    """What the tensors of a shard are made of, and where those begin that stay from step to step."""

    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype | None]
    """Of param, grad, exp_avg, exp_avg_sq and grad_ema; None for one that is not there."""
    addresses: tuple[int, int, int, int]
    """Of param, exp_avg, exp_avg_sq and grad_ema; 0 for one that is not there."""


def memory_of(
    param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, u: torch.Tensor | None
) -> Memory | None:
    """None unless all are of one shape on one device, with their elements side by side in their own memory."""
    shape, device = param.shape, param.device
    for t in (param, m, v) if u is None else (param, m, v, u):
        if not (type(t) in PLAIN and t.is_contiguous()) or t.shape != shape or t.device != device:
            return None
    if param.is_neg() or not _fits(grad, shape, device):
        return None
    return Memory(
        device,
        (param.dtype, grad.dtype, m.dtype, v.dtype, None if u is None else u.dtype),
        (param.data_ptr(), m.data_ptr(), v.data_ptr(), 0 if u is None else u.data_ptr()),
    )


def _fits(grad: torch.Tensor, shape: torch.Size, device: torch.device) -> bool:
    return (
        type(grad) in PLAIN
        and grad.layout is torch.strided  # a sparse tensor cannot be asked whether it is contiguous
        and grad.is_contiguous()
        and grad.shape == shape
        and grad.device == device
        and not grad.is_neg()  # then the elements are not there as their values
    )


class Known:
    """The memory of a parameter and its states, which :func:`memory_of` found fit, for as long as it stays as it is.

    For many small tensors most of a step's time goes into such questions. So a step asks only what can change: all
    about the gradient, where the parameter's memory is and how large, and whether the states are the same tensors in
    the same place. Nothing here keeps a tensor alive.
    """

    __slots__ = ("_bytes", "_first", "_second", "_shape", "_third", "memory")

    def __init__(
        self, memory: Memory, param: torch.Tensor, m: torch.Tensor, v: torch.Tensor, u: torch.Tensor | None
    ) -> None:
        self.memory = memory
        self._shape = param.shape
        self._bytes = param.untyped_storage().nbytes()
        self._first, self._second = ref(m), ref(v)
        self._third = _nothing if u is None else ref(u)

    def again(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        m: torch.Tensor | None,
        v: torch.Tensor | None,
        u: torch.Tensor | None,
    ) -> Memory | None:
        """The same memory; None if it has to be looked at anew.

        Args:
            param: of the same shape as before.
            grad: what it has now.
            m: exp_avg.
            v: exp_avg_sq.
            u: grad_ema, if there is one.
        """
        device, dtypes, (p_at, m_at, v_at, u_at) = self.memory
        if (
            m is not None
            and v is not None
            and self._first() is m
            and self._second() is v
            and self._third() is u
            and m.data_ptr() == m_at
            and v.data_ptr() == v_at
            and (u is None or u.data_ptr() == u_at)
            and param.data_ptr() == p_at
            and param.dtype is dtypes[0]
            and param.is_contiguous()
            and param.untyped_storage().nbytes() == self._bytes
            and grad.dtype is dtypes[1]
            and _fits(grad, self._shape, device)
        ):
            return self.memory
        return None


def _nothing() -> None:
    """A reference to no tensor."""
