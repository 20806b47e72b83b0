"""Copies of corpus parts to a device, overlapped with scoring.

Two slots of device memory alternate. While one part is scored, the next part is copied. Stream order ensures that a
slot is written again only after its previous part was scored. The host waits only for a staging buffer that is still
being read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from .sources import DocumentPart
from .store.layout import join_pieces

_ALIGNMENT_BYTES = 256  # bytes, of each tensor of a part; a part has up to three tensors


class CopyLanes:
    """Copies to a device that need no synchronization, and the interface of devices that need it.

    Slots are identified by their numbers.
    """

    def staging(self, nbytes: int) -> Tensor:
        """Allocate host memory that the device copies from."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def wait_for_staging(self, slot: int) -> None:
        """Wait until the staging buffer of `slot` may be written."""

    def copy(self, slot: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Start the copies ``(target, source)`` into `slot` after the previous part in `slot` was scored."""
        for target, source in pairs:
            target.copy_(source)

    def wait_for_copy(self, slot: int) -> None:
        """Make later work on the current stream wait for the copy into `slot`."""

    def scored(self, slot: int) -> None:
        """Record that `slot` is not read by work after this point."""

    def close(self) -> None:
        """Make later work on the current stream wait for all copies, because it may reuse the memory of the slots."""


class CudaLanes(CopyLanes):
    """Copies on a second CUDA stream, ordered by events."""

    def __init__(self, device: torch.device) -> None:
        self.computing = torch.cuda.current_stream(device)
        self.copying = torch.cuda.Stream(device)
        self.copied: dict[int, Any] = {}
        self.read: dict[int, Any] = {}

    def staging(self, nbytes: int) -> Tensor:
        """Allocate pinned host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def wait_for_staging(self, slot: int) -> None:
        """Wait on the host until the last copy from the staging buffer of `slot` has finished."""
        if slot in self.copied:
            self.copied[slot].synchronize()

    def copy(self, slot: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Start asynchronous copies on the second stream after the previous part in `slot` was scored."""
        with torch.cuda.stream(self.copying):
            if slot in self.read:
                self.copying.wait_event(self.read[slot])
            else:  # earlier work may still use the memory of the slot
                self.copying.wait_stream(self.computing)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self.copied[slot] = self.copying.record_event()

    def wait_for_copy(self, slot: int) -> None:
        """Make the current stream wait for the copy into `slot`."""
        self.computing.wait_event(self.copied[slot])

    def scored(self, slot: int) -> None:
        """Record an event after the work that reads `slot`."""
        self.read[slot] = self.computing.record_event()

    def close(self) -> None:
        """Make the current stream wait for the second stream."""
        self.computing.wait_stream(self.copying)


class DoubleBuffer:
    """Two slots on `device` for parts of up to `nbytes`, and staging buffers for parts that are not pinned."""

    def __init__(self, device: torch.device, nbytes: int, lanes: CopyLanes) -> None:
        self.lanes = lanes
        size = nbytes + 2 * _ALIGNMENT_BYTES
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self.staged: list[Tensor | None] = [None, None]

    def copy(self, parts: Iterable[DocumentPart]) -> Iterator[DocumentPart]:
        """Yield each part on the device.

        The caller must launch the scoring of a part before requesting the next part.
        """
        started = ((i % 2, self._start(i % 2, part)) for i, part in enumerate(parts))
        try:
            current = next(started, None)
            while current is not None:
                following = next(started, None)  # starts the next copy before the current part is scored
                slot, part = current
                self.lanes.wait_for_copy(slot)
                yield part
                self.lanes.scored(slot)
                current = following
        finally:
            self.lanes.close()

    def _start(self, slot: int, part: DocumentPart) -> DocumentPart:
        """Start the copy of a part into `slot`, and return the part on the device."""
        offset, pairs = 0, []

        def allocate(pieces: list[Tensor]) -> Tensor:
            nonlocal offset
            shape = (sum(len(x) for x in pieces), *pieces[0].shape[1:])
            byte_range = slice(offset, offset + prod(shape) * pieces[0].element_size())
            target = self.slots[slot][byte_range].view(pieces[0].dtype).view(shape)
            pairs.append((target, self._source(slot, byte_range, shape, pieces)))
            offset = -(-byte_range.stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            return target

        D = join_pieces([part.D, *part.more_pieces], allocate)
        d_mask = None if part.d_mask is None else allocate([part.d_mask])
        self.lanes.copy(slot, pairs)
        return DocumentPart(D, d_mask, part.cu_seqlens)

    def _source(self, slot: int, byte_range: slice, shape: tuple[int, ...], pieces: list[Tensor]) -> Tensor:
        """Return all rows of `pieces` in memory that the device can copy from without blocking the host."""
        x = pieces[0]
        if len(pieces) == 1 and (x.device.type != "cpu" or (x.is_contiguous() and x.is_pinned())):
            return x
        buffer = self.staged[slot]
        if buffer is None:
            buffer = self.staged[slot] = self.lanes.staging(self.slots[slot].shape[0])
        self.lanes.wait_for_staging(slot)
        target = buffer[byte_range].view(x.dtype).view(shape)
        for rows, piece in zip(target.split([len(piece) for piece in pieces]), pieces, strict=True):
            rows.copy_(piece)
        return target


def iterate_on_device(parts: Iterable[DocumentPart], device: torch.device, nbytes: int) -> Iterable[DocumentPart]:
    """Return parts of up to `nbytes`, which are on the CPU, on `device`. For a CPU, the parts are not copied."""
    if device.type == "cpu":
        return (part.join_pieces() for part in parts)
    lanes = CudaLanes(device) if device.type == "cuda" else CopyLanes()
    return DoubleBuffer(device, nbytes, lanes).copy(parts)
