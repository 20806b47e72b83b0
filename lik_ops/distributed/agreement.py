"""The first message of a distributed call, which checks that all processes make the same call.

One collective exchanges a few integers of each process. If the arguments do not agree, the processes exchange objects
to build the error message, which is raised on all of them.
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

_WORDS = 16  # integers of each rank's message, for all functions: unequal lengths would break the group or be misread

_group_backends: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def resolve_group(group: Any) -> Any:
    """Return the group, or the default group if `group` is None."""
    return dist.group.WORLD if group is None else group


def check_group(op: str, group: Any) -> None:
    """Raise unless this process belongs to `group`, or to an initialized default group if `group` is None."""
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(f"{op}: call torch.distributed.init_process_group() first, in every process")
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: group: expected a group that this process belongs to")
    elif not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{op}: group: expected a ProcessGroup or None, got {type(group).__name__}")


def _get_group_backends(group: Any) -> dict[str, str]:
    """Return the backend of each device type that the group sends from. It is the same on all ranks."""
    group = resolve_group(group)
    backends = _group_backends.get(group)
    if backends is None:
        backends = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).lower().split(","))
        _group_backends[group] = backends
    return backends


def _supports_device(device: torch.device, group: Any) -> bool:
    """Return whether the group sends from this device without a copy through the host."""
    backend = _get_group_backends(group).get(device.type)
    return backend is not None and (device.type == "cpu" or backend not in ("gloo", "mpi"))


def choose_wire_device(group: Any, device: torch.device, everywhere: bool) -> torch.device:
    """Return the device from which the group sends tensors that were computed on `device`: that, the CPU, or the GPU.

    `everywhere` says whether the tensors of all ranks are on devices of this type. Otherwise ranks of a group with a
    backend for each device type would use different backends.
    """
    if _supports_device(device, group) and (everywhere or not is_host_group(group)):
        return device
    return torch.device("cpu") if is_host_group(group) else get_current_device(group)


def is_host_group(group: Any) -> bool:
    """Return whether the group can send from host memory. If so, `Agreement` needs no GPU."""
    return "cpu" in _get_group_backends(group)


def get_current_device(group: Any) -> torch.device:
    """Return the default device of this process: the current GPU if the group has NCCL, else the CPU."""
    has_nccl = "nccl" in _get_group_backends(group).values()
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")


def _choose_first_wire(group: Any, tensors: tuple) -> torch.device:
    """Return the device that the first message is sent from. All ranks select the same type of device."""
    if is_host_group(group):
        return torch.device("cpu")
    device = get_current_device(group)
    devices = [x.device for x in tensors if isinstance(x, (Tensor, Index, Quantized)) and x.device.type == device.type]
    return devices[0] if devices else device


def all_gather(received: Tensor, sent: Tensor, group: Any) -> None:
    """Gather `sent` of all ranks into `received`, in the order of ranks. Both tensors are flat."""
    # torch 2.13 renamed the function and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group)


@cache
def _make_side_stream(device: torch.device, group: int) -> torch.cuda.Stream:
    """Return a stream on which the message waits neither for the current stream nor for another group."""
    return torch.cuda.Stream(device)


def _hash_description(described: dict[str, Any]) -> int:
    """Return a 64-bit hash of the described arguments."""
    text = repr(sorted(described.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class Agreement:
    """The first message of a call, sent by the constructor and received by `wait`.

    A group that can send from the host sends the message at once, independent of the GPU. It is sent after kernels were
    launched. Otherwise the message is sent from a GPU. The host then waits only for this message, which waits only for
    earlier messages of the group. Kernels that are launched before the wait overlap with it. The message must be
    launched before those kernels, because a full GPU would delay it.
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
        """Send the message of this rank.

        Args:
            op: the name of the function. It must be the same on all ranks.
            group: the processes.
            tensors: arguments of the call. One of them may determine the GPU of this process.
            alike: arguments that must be the same on all ranks.
            numbers: integers that are sent to all ranks.
            error: the error in the arguments of this rank, or None.
        """
        self.op, self.group, self.alike, self.error = op, group, {"function": op} | alike, error
        self.count = len(numbers)
        words = [int(error is not None), _hash_description(self.alike), *numbers]
        words += [0] * (_WORDS - len(words))
        device, world = _choose_first_wire(group, tensors), dist.get_world_size(group)
        self.copied: torch.cuda.Event | None = None
        if device.type != "cuda":
            self.rows = torch.empty((world, len(words)), dtype=torch.int64, device=device)
            all_gather(self.rows.view(-1), copy_from_host(words, device), group)
            return
        with torch.cuda.stream(_make_side_stream(device, id(group))):
            message = copy_from_host(words, device)
            messages = torch.empty(world * len(words), dtype=torch.int64, device=device)
            all_gather(messages, message, group)
            self.rows = torch.empty((world, len(words)), dtype=torch.int64, device="cpu", pin_memory=True)
            self.rows.view(-1).copy_(messages, non_blocking=True)
            self.copied = torch.cuda.current_stream(device).record_event()

    def wait(self) -> list[list[int]]:
        """Return the numbers of each rank.

        Raises:
            Exception: an error of one rank, or a disagreement between ranks. It is raised on all ranks.
        """
        if self.copied is not None:
            self.copied.synchronize()
        rows = self.rows.tolist()
        if any(has_failed or digest != rows[0][1] for has_failed, digest, *_ in rows):
            self.compare(self.alike)
            raise RuntimeError(f"{self.op}: the ranks were called with different arguments")
        return [numbers[: self.count] for _, _, *numbers in rows]

    def compare(self, described: dict[str, Any]) -> None:
        """Raise the error of a rank, or an error that lists the arguments that differ.

        All ranks must call this function.
        """
        descriptions: list[Any] = [None] * dist.get_world_size(self.group)
        error = None if self.error is None else str(self.error)
        dist.all_gather_object(descriptions, (self.op, described, error), group=self.group)
        functions = [op for op, _, _ in descriptions]
        if len(set(functions)) > 1:
            raise ValueError(f"{self.op}: function: expected the same on all ranks, got {functions}") from self.error
        if self.error is not None:
            raise self.error
        for rank, (_, _, other) in enumerate(descriptions):
            if other is not None:
                raise ValueError(f"{self.op}: rank {rank}: {other}")
        for name in described:
            values = [other.get(name) for _, other, _ in descriptions]
            if any(x != values[0] for x in values):
                raise ValueError(f"{self.op}: {name}: expected the same on all ranks, got {values}")
