"""The first message of a call that all processes of a group make: whether they mean the same call.

A few integers of each process go round in one collective. Objects follow only where something is wrong, for the words
of the error that is then raised in all.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..api.packing import copy_from_host
from ..formats.index import Index
from ..formats.quantized import Quantized

_WORDS = 16  # of each rank's message, whatever it calls: messages of other lengths would end a group or be misread

_group_backends: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def resolve_group(group: Any) -> Any:
    """The group itself, where None is all processes."""
    return dist.group.WORLD if group is None else group


def check_group(op: str, group: Any) -> None:
    """Raise unless this process is one of `group`, or of an initialised default group if it is None."""
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(f"{op}: call torch.distributed.init_process_group() first, in every process")
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: group: expected a group that this process belongs to")
    elif not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: group: expected a ProcessGroup or None, got {type(group).__name__}")


def _get_group_backends(group: Any) -> dict[str, str]:
    """The backend of each type of device that the group sends from: the same on all ranks."""
    group = resolve_group(group)
    found = _group_backends.get(group)
    if found is None:
        found = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).lower().split(","))
        _group_backends[group] = found
    return found


def _supports_device(device: torch.device, group: Any) -> bool:
    """Whether the group sends from there, and not by a copy on the host that it makes itself."""
    backend = _get_group_backends(group).get(device.type)
    return backend is not None and (device.type == "cpu" or backend not in ("gloo", "mpi"))


def choose_wire_device(group: Any, device: torch.device, everywhere: bool) -> torch.device:
    """From where the group takes tensors that were computed on `device`.

    `everywhere`: on all ranks on a device of this type; else ranks of a group with a backend for each would not meet.
    """
    if _supports_device(device, group) and (everywhere or not is_host_group(group)):
        return device
    return torch.device("cpu") if is_host_group(group) else get_current_device(group)


def get_device_code(device: torch.device) -> int:
    """A number of the type of a device."""
    return int(device.type != "cpu")


def is_host_group(group: Any) -> bool:
    """Whether the group sends from the memory of the host: then `Agreement` needs nothing of a GPU."""
    return "cpu" in _get_group_backends(group)


def get_current_device(group: Any) -> torch.device:
    """Where tensors of this process are if none says so: the current GPU where the group has NCCL, else the CPU."""
    has_nccl = "nccl" in _get_group_backends(group).values()
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")


def _choose_first_wire(group: Any, tensors: tuple) -> torch.device:
    """As `choose_wire_device`, of a kind that all ranks choose, whatever they were called with."""
    if is_host_group(group):
        return torch.device("cpu")
    at = get_current_device(group)
    devices = [x.device for x in tensors if isinstance(x, (Tensor, Index, Quantized)) and x.device.type == at.type]
    return devices[0] if devices else at


def all_gather(received: Tensor, sent: Tensor, group: Any) -> None:
    """`sent` of all ranks into `received`, one after another; both flat."""
    # The name since torch 2.13, which warns of the older one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group)


@cache
def _make_side_stream(device: torch.device, group: int) -> torch.cuda.Stream:
    """A stream on which the message does not wait for what the current one has still to do, nor for another group."""
    return torch.cuda.Stream(device)


def _hash_description(described: dict[str, Any]) -> int:
    text = repr(sorted(described.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class Agreement:
    """The message on its way; `wait` for what the others say.

    A group that sends from the host makes it at once, whatever a GPU does meanwhile: it comes after what is launched.

    On a GPU the host waits for this message alone, which of all earlier work follows only the group's messages; what is
    launched before the wait runs meanwhile. The message has to be launched first: a GPU that is full would let it wait.
    """

    def __init__(
        self,
        op: str,
        group: Any,
        tensors: tuple,
        alike: dict[str, Any],
        numbers: Sequence[int],
        error: Exception | None,
    ) -> None:
        """`alike` has to be the same on all ranks, and so has `op`; `numbers` are told; so is that there was `error`.

        `tensors`: arguments of the call, one of which may say which GPU is this process's.
        """
        self.op, self.group, self.alike, self.error = op, group, {"function": op} | alike, error
        self.count = len(numbers)
        words = [int(error is not None), _hash_description(self.alike), *numbers]
        words += [0] * (_WORDS - len(words))
        at, world = _choose_first_wire(group, tensors), dist.get_world_size(group)
        self.copied: torch.cuda.Event | None = None
        if at.type != "cuda":
            self.rows = torch.empty((world, len(words)), dtype=torch.int64, device=at)
            all_gather(self.rows.view(-1), copy_from_host(words, at), group)
            return
        with torch.cuda.stream(_make_side_stream(at, id(group))):
            sent = copy_from_host(words, at)
            received = torch.empty(world * len(words), dtype=torch.int64, device=at)
            all_gather(received, sent, group)
            self.rows = torch.empty((world, len(words)), dtype=torch.int64, device="cpu", pin_memory=True)
            self.rows.view(-1).copy_(received, non_blocking=True)
            self.copied = torch.cuda.current_stream(at).record_event()

    def wait(self) -> list[list[int]]:
        """The numbers of each rank; an error of one of them, or what they do not agree on, is raised in all."""
        if self.copied is not None:
            self.copied.synchronize()
        rows = self.rows.tolist()
        if any(failed or digest != rows[0][1] for failed, digest, *_ in rows):
            self.compare(self.alike)
            raise RuntimeError(f"{self.op}: the ranks were called with different arguments")
        return [numbers[: self.count] for _, _, *numbers in rows]

    def compare(self, described: dict[str, Any]) -> None:
        """Raise what is wrong with a rank's call, or what differs, by name and value. All ranks have to ask."""
        told: list[Any] = [None] * dist.get_world_size(self.group)
        error = None if self.error is None else str(self.error)
        dist.all_gather_object(told, (self.op, described, error), group=self.group)
        functions = [op for op, _, _ in told]
        if len(set(functions)) > 1:
            raise ValueError(f"{self.op}: function: expected the same on all ranks, got {functions}") from self.error
        if self.error is not None:
            raise self.error
        for rank, (_, _, other) in enumerate(told):
            if other is not None:
                raise ValueError(f"{self.op}: rank {rank}: {other}")
        for name in described:
            found = [other.get(name) for _, other, _ in told]
            if any(x != found[0] for x in found):
                raise ValueError(f"{self.op}: {name}: expected the same on all ranks, got {found}")


def view_as_bytes(x: Tensor) -> Tensor:
    """A view as bytes, because not every backend knows every dtype."""
    return x.view(-1).view(torch.uint8)
