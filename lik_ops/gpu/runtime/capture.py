"""Capture and replay of calls: allocations and launches are recorded once and repeated with new pointers.

A backend's work depends only on the metadata of its tensors. A second call with the same metadata therefore allocates
the same memory and launches the same kernels, with different pointers. The second call is captured, and later calls
replay it with little host time. A captured call becomes a generated Python function, which costs half the time of
interpreting the recorded steps. Code in `lik_ops.gpu` does not run in a replay, so breakpoints there are not hit.
A call within a captured call is part of it.
``LIK_OPS_CAPTURE=0`` turns capture off, and every call then runs this code.

Captured are allocations through PyTorch, fills of whole new tensors, and direct launches. A launch keeps its compiled
kernel, its grid, and its arguments. Each pointer is kept as a tensor of the call and an offset, and each TMA descriptor
as its shape and strides. Captured calls are results of `Calls.run`, by key.

A call is captured only if these conditions hold. Otherwise it runs as usual:

- Every operation is an allocation, a fill of a whole tensor that the call allocated, a view, or a direct launch.
- Inputs do not overlap in memory and start at multiples of 16 bytes, so that a pointer identifies its tensor.
- Each pointer argument points into exactly one tensor, and each result has memory that the call allocated.
- No launch hook is set, as profilers do.

A replay is valid for every call with the same key. It returns None if an input does not start at a multiple of
16 bytes, if another device is current, or if a launch hook is set. The call then runs as usual. The key holds
everything else that affects a call: shapes, strides, dtypes, options, and global settings such as TF32. `Calls.forget`
drops all captured calls. A replay allocates memory again, so no recorded address is used later. Encoded descriptors are
cached by the address of their tensor.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.plan_cache import PlanCache
from ...core.settings import is_capturing
from . import launcher
from .arguments import current_device
from .memory import is_deterministic, makers, raw_stream

_log = logging.getLogger("lik_ops")
_MAX_CALLS = 1024
_MAX_DESCRIPTORS = 64  # cached for each launch
_aten = torch.ops.aten
_EMPTY_OPS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_ZERO_OPS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_FILL_OPS = {_aten.zero_.default, _aten.fill_.Scalar}

Tensors = Sequence[Tensor | None]
# Replays a call for other tensors of the same metadata. Returns the results, or None if the call has to run in full. In
# that case nothing was launched.
Replay = Callable[[Tensors], Any]


class _Allocation(NamedTuple):
    """A tensor that a call allocates, and its fill value, if any."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    value: float | None = None


def _get_memory_range(x: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's memory and the address after its end."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def _can_record(tensors: Tensors) -> bool:
    """Return whether pointers identify the tensors and have the usual 16-byte alignment.

    Pointers identify tensors if no two tensors overlap in memory.
    """
    spans = sorted(_get_memory_range(x) for x in tensors if x is not None and x.numel())
    is_disjoint = all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    return is_disjoint and all(x is None or x.data_ptr() % 16 == 0 for x in tensors)


class _RecordedFill(NamedTuple):
    """A fill of a tensor that the call allocated."""

    slot: int
    value: float


class _PointerOffset(NamedTuple):
    """The tensor that an argument points into, and the offset from its start in bytes."""

    slot: int
    offset: int


class _DescriptorTemplate(NamedTuple):
    """A tensor descriptor without its tensor, and earlier encodings by the tensor's address."""

    n: int  # position among the descriptors
    slot: int
    offset: int  # of the descriptor's first element from the tensor's, in bytes
    make_descriptor: Callable[[Tensor], Any]
    bound: launcher.CompiledKernel
    encoded: dict[int, tuple]

    def encode(self, pointer: int, tensor: Tensor) -> tuple:
        """Encode the descriptor of `tensor` and cache the result."""
        if len(self.encoded) >= _MAX_DESCRIPTORS:
            self.encoded.clear()
        if self.offset:
            tensor = tensor.as_strided((1,), (1,), tensor.storage_offset() + self.offset // tensor.itemsize)
        encoding = self.encoded[pointer] = self.bound.encoded(self.n, self.make_descriptor(tensor))
        return encoding


class _RecordedLaunch(NamedTuple):
    """A launch, with a `_PointerOffset` or `_DescriptorTemplate` for each argument that points into a tensor."""

    bound: launcher.CompiledKernel
    grid: tuple[int, int, int]
    values: list  # arguments, groups as lists
    last: list[int]  # slots of memory that no later launch uses

    def slots(self) -> set[int]:
        """Return the slots of all tensors that the arguments point into."""
        members = itertools.chain.from_iterable(x if isinstance(x, list) else [x] for x in self.values)
        return {x.slot for x in members if isinstance(x, (_PointerOffset, _DescriptorTemplate))}


def _is_constant(x: Any) -> bool:
    """Return whether a recorded argument or group contains no pointer."""
    if isinstance(x, list):
        return all(map(_is_constant, x))
    return not isinstance(x, (_PointerOffset, _DescriptorTemplate))


class _CallRecorder:
    """Recorder of a call's allocations, fills, and launches.

    The handler of PyTorch operators is in this base class, not in the mode itself. A mode that defines the handler
    imports `torch._dynamo`, sympy, and FSDP at its first operator, which costs seconds.
    """

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.has_input = [x is not None for x in inputs]
        self.count = len(inputs)
        self.steps: list[_Allocation | _RecordedFill | _RecordedLaunch] = []
        # Address range of each live slot.
        self.spans = {slot: _get_memory_range(x) for slot, x in enumerate(inputs) if x is not None and x.numel()}
        self.allocation_count = 0
        self.obstacle = ""  # why the call cannot be replayed

    def _refuse(self, reason: str) -> None:
        """Note that the call cannot be replayed. The first reason is kept."""
        self.obstacle = self.obstacle or reason

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and record it or note that it prevents replay."""
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY_OPS or func in _ZERO_OPS:
            self._make(result, 0 if func in _ZERO_OPS else None)
        elif func in _FILL_OPS:
            self._fill(*args)
        elif not func.is_view:
            self._refuse(f"{func} is not an allocation")
        return result

    def _make(self, x: Tensor, value: float | None) -> None:
        """Record an allocation."""
        begin = x.data_ptr()
        end = begin + x.untyped_storage().nbytes()
        # Slots whose memory overlaps the new tensor have been freed.
        self.spans = {slot: span for slot, span in self.spans.items() if span[1] <= begin or end <= span[0]}
        self.spans[self.count + self.allocation_count] = begin, end
        self.allocation_count += 1
        self.steps.append(_Allocation(tuple(x.shape), x.stride(), x.dtype, value))

    def _fill(self, x: Tensor, value: float = 0) -> None:
        """Record a fill of a whole tensor."""
        if x.numel():
            begin = x.data_ptr()
            tensor_span = begin, begin + x.numel() * x.element_size()
            slots = [slot for slot, span in self.spans.items() if span == tensor_span and slot >= self.count]
            if len(slots) == 1:
                self.steps.append(_RecordedFill(slots[0], value))
            else:
                self._refuse("only part of a tensor is filled")

    def _pointer(self, x: Tensor) -> _PointerOffset:
        """Return the tensor and offset of an argument."""
        pointer = x.data_ptr()
        offsets = [
            _PointerOffset(slot, pointer - begin) for slot, (begin, end) in self.spans.items() if begin <= pointer < end
        ]
        if len(offsets) != 1:
            self._refuse(f"an argument points into {len(offsets)} of the call's tensors")
            return _PointerOffset(0, 0)
        return offsets[0]

    def record_launch(
        self, bound: launcher.CompiledKernel | None, grid: tuple[int, ...], args: tuple, values: list
    ) -> None:
        """Record a kernel launch on behalf of `launcher.launch`."""
        if bound is None or bound.direct is None:
            self._refuse("not launched directly")
            return
        template = list(values)
        descriptors = 0
        for n, x in enumerate(args):
            if isinstance(x, Tensor):
                template[n] = self._pointer(x)
            elif isinstance(template[n], list):
                template[n] = [self._pointer(y) if isinstance(y, Tensor) else y for y in x]
            elif launcher.is_descriptor(x):
                template[n] = self._descriptor(descriptors, x, bound)
                descriptors += 1
        x, y, z = (*grid, 1, 1)[:3]
        self.steps.append(_RecordedLaunch(bound, (x, y, z), template, []))

    def _descriptor(self, n: int, descriptor: Any, bound: launcher.CompiledKernel) -> _DescriptorTemplate:
        """Return the template of a descriptor argument."""
        slot, offset = self._pointer(descriptor.base)
        kind: Any = type(descriptor)
        field_values = {f.name: getattr(descriptor, f.name) for f in fields(descriptor) if f.name != "base"}
        return _DescriptorTemplate(n, slot, offset, partial(kind, **field_values), bound, {})

    def replay(self, outputs: Sequence[Tensor], device: torch.device) -> Replay | None:
        """Return a function that replays the call, or None if the call cannot be replayed."""
        if not any(isinstance(step, _RecordedLaunch) for step in self.steps):
            self._refuse("nothing was launched")
        slots: list[int] = []
        for x in outputs:
            slots.append(self._output(x, slots))
        if self.obstacle:
            _log.debug("a call is not replayed: %s", self.obstacle)
            return None
        later_slots = set(slots)
        for step in reversed(self.steps):
            if isinstance(step, _RecordedLaunch):
                step_slots = step.slots()
                step.last.extend(slot for slot in step_slots - later_slots if slot >= self.count)
                later_slots |= step_slots
        return _ReplayWriter(self.has_input, device).write_function(self.steps, slots)

    def _output(self, x: Tensor, taken: list[int]) -> int:
        """Return the slot of a result that the call allocated."""
        metadata = tuple(x.shape), x.stride(), x.dtype
        memory = [step for step in self.steps if isinstance(step, _Allocation)]
        for n in reversed(range(self.allocation_count)):
            span = self.spans.get(self.count + n)
            is_result = span is not None and span[0] == x.data_ptr() and memory[n][:3] == metadata
            if is_result and self.count + n not in taken:
                return self.count + n
        self._refuse("a result has no memory of its own")
        return 0


class RecordingMode(_CallRecorder, TorchDispatchMode):
    """The mode that observes a call: allocations through PyTorch, launches through `launcher`."""

    def __enter__(self):
        launcher.thread_state.active_recorder = self
        return super().__enter__()

    def __exit__(self, *error):
        launcher.thread_state.active_recorder = None
        return super().__exit__(*error)


@lru_cache(maxsize=256)
def _compile_source(source: str) -> CodeType:
    """Compile the source of a replay function."""
    return compile(source, "<replay>", "exec")


class _ReplayWriter:
    """Generator of the function that replays a call.

    All values, including numbers, are named constants. Calls that differ only in numbers therefore have the same
    source. For slot n, the tensor is ``t<n>`` and its pointer is ``p<n>``.
    """

    def __init__(self, has_input: list[bool], device: torch.device) -> None:
        self.has_input = has_input
        self.constants: list = []
        values = device.index, current_device, launcher.has_launch_hooks, raw_stream, is_deterministic, *makers(device)
        self.index, self.current_device, self.hooks_set, self.raw_stream, *self.making = map(
            self._keep_constant, values
        )

    def write_function(self, steps: list, outputs: list[int]) -> Replay:
        """Return the replay function for the recorded steps and the slots of the results."""
        slots = [n for n, is_given in enumerate(self.has_input) if is_given]
        body = [f"{', '.join(f't{n}' for n in range(len(self.has_input)))}, = given"] if self.has_input else []
        body += [f"p{n} = t{n}.data_ptr()" for n in slots]
        pointer_bits = " | ".join(f"p{n}" for n in slots) or "0"
        body += [
            f"if ({pointer_bits}) & 15 or {self.current_device}() != {self.index} or {self.hooks_set}():",
            "    return None",
            "stream, new = {0}({1}), {4} if {2}() else {3}".format(self.raw_stream, self.index, *self.making),
        ]
        next_slot = len(self.has_input)
        for step in steps:
            if isinstance(step, _RecordedLaunch):
                body += self._launch(step)
            elif isinstance(step, _Allocation):
                body += self._memory(next_slot, step)
                next_slot += 1
            else:
                body.append(f"t{step.slot}.fill_({self._keep_constant(step.value)})")
        body.append(f"return ({''.join(f't{n}, ' for n in outputs)})")
        names = ", ".join(f"c{n}" for n in range(len(self.constants)))
        lines = [f"def make({names}):", "    def again(given):", *(f"        {x}" for x in body), "    return again"]
        namespace: dict[str, Any] = {}
        exec(_compile_source("\n".join(lines)), namespace)
        return namespace["make"](*self.constants)

    def _keep_constant(self, constant: Any) -> str:
        """Store a constant and return its name."""
        self.constants.append(constant)
        return f"c{len(self.constants) - 1}"

    def _memory(self, slot: int, memory: _Allocation) -> list[str]:
        """Return the lines that allocate a tensor."""
        shape, strides, dtype, value = memory
        lines = [
            f"t{slot} = new({self._keep_constant(shape)}, {self._keep_constant(strides)}, {self._keep_constant(dtype)})"
        ]
        if value is not None:
            lines.append(f"t{slot}.fill_({self._keep_constant(value)})")
        return [*lines, f"p{slot} = t{slot}.data_ptr()"]

    def _launch(self, launch: _RecordedLaunch) -> list[str]:
        """Return the lines that launch a kernel."""
        lines = []
        for x in launch.values:
            if isinstance(x, _DescriptorTemplate):
                get_encoding, encode = self._keep_constant(x.encoded.get), self._keep_constant(x.encode)
                lines.append(f"e{x.n} = {get_encoding}(p{x.slot}) or {encode}(p{x.slot}, t{x.slot})")
        grid = ", ".join(map(self._keep_constant, launch.grid))
        lines.append(f"{self._keep_constant(launch.bound.direct)}({grid}, stream, {self._list(launch.values)})")
        # Free memory after the last launch that uses it.
        return lines + [f"t{slot} = None" for slot in launch.last]

    def _list(self, values: list) -> str:
        """Return a list expression of recorded arguments."""
        parts: list[str] = []
        for is_constant, group in itertools.groupby(values, _is_constant):
            if is_constant:
                parts.append(f"*{self._keep_constant(tuple(group))}")
            else:
                parts += map(self._argument, group)
        return f"[{', '.join(parts)}]"

    def _argument(self, x: Any) -> str:
        """Return the expression of a recorded argument that is not constant."""
        if isinstance(x, list):
            return self._list(x)
        if isinstance(x, _DescriptorTemplate):
            return f"*e{x.n}"
        return f"p{x.slot} + {self._keep_constant(x.offset)}" if x.offset else f"p{x.slot}"


class Calls:
    """Captured calls of one function, keyed by everything that affects the call except tensor addresses."""

    every: ClassVar[weakref.WeakSet[Calls]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._found = PlanCache(_MAX_CALLS)  # a `Replay`, True after the first call, False if calls cannot be replayed
        Calls.every.add(self)

    def run(self, key: tuple, tensors: Tensors, device: torch.device, function: Callable, *arguments: Any) -> Any:
        """Return the result of ``function(*arguments)``, replayed if a call with this key was captured.

        Args:
            key: everything that affects the call except tensor addresses.
            tensors: the input tensors.
            device: device of the tensors.
            function: the function to run, which returns a sequence of newly allocated tensors.
            *arguments: arguments of `function`.
        """
        entry = self._found.get(key)
        if callable(entry):
            results = entry(tensors)
            return function(*arguments) if results is None else results
        if entry is None:
            if launcher.thread_state.dry_run is None:
                self._found.store(key, True)
            return launcher.run_first(partial(function, *arguments), function, *arguments)
        if entry and is_capturing() and not launcher.has_launch_hooks() and _can_record(tensors):
            with RecordingMode(tensors) as recorder:
                results = function(*arguments)
            self._found.store(key, recorder.replay(results, device) or False)
            return results
        return function(*arguments)

    def replay(self, key: tuple) -> Replay | None:
        """Return the replay function for `key`, or None if no call was captured."""
        entry = self._found.get(key)
        return entry if callable(entry) else None

    @classmethod
    def forget(cls) -> None:
        """Drop all captured calls."""
        for calls in cls.every:
            calls._found.clear()
