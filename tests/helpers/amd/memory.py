"""What a kernel can reach: the process's own memory, but of it the tensors that are alive, and nothing beside them."""

from __future__ import annotations

import bisect
import ctypes
import gc
from collections.abc import Iterable, Iterator

import numpy as np
import torch

_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Fault(Exception):
    """An access that no GPU would forgive, or that reads what lies beside a tensor."""


def live_tensors() -> Iterator[torch.Tensor]:
    """All CPU tensors there are: kernels read addresses from tables, so a launch uses more than its arguments."""
    for thing in gc.get_objects():
        # The type itself: among all objects are some that do not bear being asked.
        if type(thing) in _TENSORS and thing.layout == torch.strided and thing.device.type == "cpu":
            yield thing


class Memory:
    """Bytes at addresses.

    Args:
        owners: tensors or bytearrays. Kernels can reach the whole storage of a tensor.
    """

    def __init__(self, owners: Iterable[torch.Tensor | bytearray]) -> None:
        self._owners = list(owners)  # which must outlive this object
        self._regions: dict[int, np.ndarray] = {}
        for owner in self._owners:
            address, size = self._range(owner)
            if size > len(self._regions.get(address, ())):
                self._regions[address] = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        self._starts = sorted(self._regions)

    @staticmethod
    def _range(owner: torch.Tensor | bytearray) -> tuple[int, int]:
        if isinstance(owner, bytearray):
            return ctypes.addressof(ctypes.c_uint8.from_buffer(owner)), len(owner)
        storage = owner.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def address_of(self, owner: torch.Tensor | bytearray) -> int:
        return self._range(owner)[0]

    def region(self, address: int) -> tuple[int, np.ndarray]:
        """Where the region that holds an address begins, and its bytes."""
        place = bisect.bisect_right(self._starts, address) - 1
        if place >= 0:
            start = self._starts[place]
            found = self._regions[start]
            if address < start + len(found):
                return start, found
        raise Fault(f"no tensor has the address {address:#x}")

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The little-endian words of ``size`` bytes (1, 2, 4 or 8) at each of the addresses."""
        return self._access(addresses, size, None)

    def store(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        self._access(addresses, size, values)

    def _access(self, addresses: np.ndarray, size: int, values: np.ndarray | None) -> np.ndarray:
        start, region = self.region(int(addresses.min()))
        offsets = addresses - np.uint64(start)
        if (offsets % np.uint64(size)).any():
            raise Fault(f"an access of {size} bytes that is not aligned")
        inside = offsets + np.uint64(size) <= len(region)
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
        words = region[: len(region) // size * size].view(kind)
        index = offsets // np.uint64(size)
        if not inside.all():
            return self._access_several(addresses, size, values, inside)
        if values is None:
            return words[index]
        words[index] = values
        return values

    def _access_several(
        self, addresses: np.ndarray, size: int, values: np.ndarray | None, first: np.ndarray
    ) -> np.ndarray:
        """The lanes of one instruction reach different tensors."""
        if not first.any():
            raise Fault(f"an access of {size} bytes reaches over the end of a tensor")
        result = np.zeros(len(addresses), {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])
        for some in (first, ~first):
            result[some] = self._access(addresses[some], size, None if values is None else values[some])
        return result
