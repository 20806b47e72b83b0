"""Parts of a corpus on a device: each is copied there while the one before it is scored.

Two slots of memory take turns. A slot is written again only after the scoring of what it held, by the order of streams;
the host waits only for a staging buffer that is still being read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from .sources import DocumentPart
from .store.layout import join_pieces

_ALIGNMENT_BYTES = 256  # bytes, of each tensor of a part, of which there are up to three


class CopyLanes:
    """What a device needs to copy beside its computing. Slots are told by their numbers.

    This one is of devices that copy when they are told: nothing to wait for.
    """

    def staging(self, nbytes: int) -> Tensor:
        """Memory of the host that the device copies from."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def wait_for_staging(self, slot: int) -> None:
        """Return when the staging buffer of `slot` may be written."""

    def copy(self, slot: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Start copies, each ``(target, source)``, once the scoring of what `slot` held before is over."""
        for target, source in pairs:
            target.copy_(source)

    def wait_for_copy(self, slot: int) -> None:
        """Let what is computed from now on wait for the copy into `slot`."""

    def scored(self, slot: int) -> None:
        """What is computed so far is all that reads `slot`."""

    def close(self) -> None:
        """Let what is computed from now on, in memory that slots gave back, wait for all copies."""


class CudaLanes(CopyLanes):
    """A stream of copies beside the current one, and events between the two."""

    def __init__(self, device: torch.device) -> None:
        self.computing = torch.cuda.current_stream(device)
        self.copying = torch.cuda.Stream(device)
        self.copied: dict[int, Any] = {}
        self.read: dict[int, Any] = {}

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def wait_for_staging(self, slot: int) -> None:
        if slot in self.copied:
            self.copied[slot].synchronize()

    def copy(self, slot: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self.copying):
            if slot in self.read:
                self.copying.wait_event(self.read[slot])
            else:  # the slot may be memory that earlier work still uses
                self.copying.wait_stream(self.computing)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self.copied[slot] = self.copying.record_event()

    def wait_for_copy(self, slot: int) -> None:
        self.computing.wait_event(self.copied[slot])

    def scored(self, slot: int) -> None:
        self.read[slot] = self.computing.record_event()

    def close(self) -> None:
        self.computing.wait_stream(self.copying)


class DoubleBuffer:
    """Two slots on `device` for parts of up to `nbytes`, and staging buffers for what is not pinned."""

    def __init__(self, device: torch.device, nbytes: int, lanes: CopyLanes) -> None:
        self.lanes = lanes
        size = nbytes + 2 * _ALIGNMENT_BYTES
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self.staged: list[Tensor | None] = [None, None]

    def copied(self, parts: Iterable[DocumentPart]) -> Iterator[DocumentPart]:
        """Each part on the device. What scores a part has to be launched before the next one is asked for."""
        try:
            before: tuple[int, DocumentPart] | None = None
            for i, part in enumerate(parts):
                started = (i % 2, self._start(i % 2, part))
                if before is not None:
                    yield from self._hand_out(*before)
                before = started
            if before is not None:
                yield from self._hand_out(*before)
        finally:
            self.lanes.close()

    def _hand_out(self, slot: int, part: DocumentPart) -> Iterator[DocumentPart]:
        self.lanes.wait_for_copy(slot)
        yield part
        self.lanes.scored(slot)

    def _start(self, slot: int, part: DocumentPart) -> DocumentPart:
        offset, pairs = 0, []

        def placed(pieces: list[Tensor]) -> Tensor:
            nonlocal offset
            shape = (sum(len(x) for x in pieces), *pieces[0].shape[1:])
            place = slice(offset, offset + prod(shape) * pieces[0].element_size())
            target = self.slots[slot][place].view(pieces[0].dtype).view(shape)
            pairs.append((target, self._source(slot, place, shape, pieces)))
            offset = -(-place.stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            return target

        D = join_pieces([part.D, *part.rest], placed)
        d_mask = None if part.d_mask is None else placed([part.d_mask])
        self.lanes.copy(slot, pairs)
        return DocumentPart(D, d_mask, part.cu_seqlens)

    def _source(self, slot: int, place: slice, shape: tuple[int, ...], pieces: list[Tensor]) -> Tensor:
        """All rows of `pieces` where the device can copy from without the host waiting."""
        x = pieces[0]
        if len(pieces) == 1 and (x.device.type != "cpu" or (x.is_contiguous() and x.is_pinned())):
            return x
        staged = self.staged[slot]
        if staged is None:
            staged = self.staged[slot] = self.lanes.staging(self.slots[slot].shape[0])
        self.lanes.wait_for_staging(slot)
        target = staged[place].view(x.dtype).view(shape)
        for rows, piece in zip(target.split([len(piece) for piece in pieces]), pieces, strict=True):
            rows.copy_(piece)
        return target


def iterate_on_device(parts: Iterable[DocumentPart], device: torch.device, nbytes: int) -> Iterable[DocumentPart]:
    """The parts, of up to `nbytes` each, on `device`; on a CPU they are there."""
    if device.type == "cpu":
        return (part.whole() for part in parts)
    lanes = CudaLanes(device) if device.type == "cuda" else CopyLanes()
    return DoubleBuffer(device, nbytes, lanes).copied(parts)
