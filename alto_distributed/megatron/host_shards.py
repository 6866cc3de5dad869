"""Shards in host memory: their copies from and to the device, and a kernel that steps them in waves meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..diagnostics import Diagnostics
from ..kernels import Batch, FlatShard, Kernel
from ..optimizer import ALTO
from ..sharding.norms import NormTable


@dataclass
class HostShard:
    """A shard in host memory, and what stands for it on the device."""

    model_param: torch.Tensor
    shard: torch.Tensor
    on_device: torch.Tensor
    """Of the same shape, in the memory of one element. It holds the gradient until the step."""
    gradient: torch.Tensor
    """Host memory for the gradient."""
    wave: int
    """Number of the wave in which it is stepped."""
    weights: torch.Tensor = field(init=False)
    """Host memory for the weights in the precision of the model: the shard itself, or the gradient's, used again."""

    def __post_init__(self) -> None:
        same = self.model_param.dtype == self.shard.dtype
        self.weights = self.shard if same else self.gradient.view(self.model_param.dtype)[: self.shard.numel()]


class Copies:
    """Gradients on their way to the host, and weights on their way back, beside the device's other work.

    Args:
        on_host: the shards.
        device: where copies come from and go to. If that is the host, they are done at once.
    """

    def __init__(self, on_host: Mapping[torch.Tensor, HostShard], device: torch.device) -> None:
        self._on_host = on_host
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.Stream(device)
        self._under_way: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        """By wave: the event after its gradients, and what they are copied from, whose memory must stay until then."""

    def fetch(self) -> None:
        """Start copying all gradients, after what the device has to do so far. What stood in for shards loses them."""
        self.follow()
        waves: dict[int, list[HostShard]] = {}
        for one in self._on_host.values():
            waves.setdefault(one.wave, []).append(one)
        for wave, shards in waves.items():
            sources = []
            with self._beside():
                for one in shards:
                    gradient, one.on_device.grad, one.shard.grad = one.on_device.grad, None, None
                    if gradient is not None:
                        one.gradient.copy_(gradient, non_blocking=True)
                        one.shard.grad = one.gradient
                        sources.append(gradient)
            self._under_way[wave] = None if self._stream is None else self._stream.record_event(), sources

    def waves_of(self, shards: Sequence[FlatShard]) -> Iterator[tuple[int, Batch]]:
        """Shards of a step by the number of their wave, in order; each batch keeps what kernels know of it.

        Where the host is the device, those that stay there are a wave too, the first.
        """
        kept = shards.kept if isinstance(shards, Batch) else {}
        waves: dict[int, Batch] = {}
        for shard in shards:
            wave = self._on_host[shard.param].wave if shard.param in self._on_host else -1
            if wave not in waves:
                waves[wave] = Batch((), kept.setdefault(("wave", wave), {}))
            waves[wave].append(shard)
        return iter(sorted(waves.items()))

    def wait(self, wave: int) -> None:
        """Until the gradients of a wave have arrived."""
        arrived, _ = self._under_way.pop(wave, (None, []))
        if arrived is not None:
            arrived.synchronize()

    def wait_for_all(self) -> None:
        for wave in list(self._under_way):
            self.wait(wave)

    def send(self, shards: Iterable[HostShard], target_of: Callable[[HostShard], torch.Tensor]) -> None:
        """Start copying weights to the model."""
        with self._beside():
            for one in shards:
                if one.weights is not one.shard:
                    one.weights.copy_(one.shard)
                target_of(one).copy_(one.weights, non_blocking=True)

    def follow(self) -> None:
        """The copies to come start after what the device has to do so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self._device))

    def join(self) -> None:
        """What the device has to do from here on comes after all copies. The host does not wait."""
        if self._stream is not None:
            self._module.current_stream(self._device).wait_stream(self._stream)

    def _beside(self) -> Any:
        return nullcontext() if self._stream is None else self._module.stream(self._stream)


class InWaves:
    """A kernel of the host that steps each wave when its gradients are there, and sends its weights away.

    Args:
        kernel: does the arithmetic.
        copies: of the shards.
        send: is told of shards whose weights are new.
    """

    def __init__(self, kernel: Kernel, copies: Copies, send: Callable[[Iterable[torch.Tensor]], None]) -> None:
        self._kernel, self._copies, self._send = kernel, copies, send

    def phase_one(self, shards: Sequence[FlatShard], sums: torch.Tensor) -> list[tuple[Batch, Any]]:
        prepared = []
        for wave, batch in self._copies.waves_of(shards):
            self._copies.wait(wave)
            prepared.append((batch, self._kernel.phase_one(batch, sums)))
        return prepared

    def phase_two(
        self, shards: Sequence[FlatShard], step_sizes: torch.Tensor, prepared: list[tuple[Batch, Any]] | None = None
    ) -> None:
        for batch, before in prepared or [(batch, None) for _, batch in self._copies.waves_of(shards)]:
            self._kernel.phase_two(batch, step_sizes, before)
            self._send(shard.param for shard in batch)


class OffloadedALTO(ALTO):
    """An ALTO becomes one by its ``__class__``: gradients on the host may be under way when its step begins."""

    _copies: Copies | None = None
    _send: Callable[[Iterable[torch.Tensor]], None]

    def step_in_waves(self, copies: Copies, send: Callable[[Iterable[torch.Tensor]], None]) -> None:
        self._copies, self._send = copies, send
        self._diagnostics = WaitingDiagnostics(self._diagnostics.every, copies)

    def _kernel_on(self, device: torch.device, skip: torch.Tensor | None) -> Kernel:
        kernel = super()._kernel_on(device, skip)
        if device.type != "cpu" or self._copies is None:
            return kernel
        return InWaves(kernel, self._copies, self._send)


class WaitingDiagnostics(Diagnostics):
    """A step that is measured reads all gradients first."""

    def __init__(self, every: int, copies: Copies) -> None:
        super().__init__(every)
        self._copies = copies

    def before(self, shards: Mapping[torch.device, Sequence[FlatShard]], table: NormTable) -> None:
        self._copies.wait_for_all()
        super().before(shards, table)
