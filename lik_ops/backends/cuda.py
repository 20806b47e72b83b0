"""The Triton backend: turns tensors into kernel arguments, picks configurations and launches.

Runs on CUDA and ROCm GPUs, and on CPU tensors under Triton's interpreter (``TRITON_INTERPRET=1``), which the tests use.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .._layout import metadata
from ..csrc_triton import backward_lowmem as lowmem_kernels
from ..csrc_triton import backward_unified as unified_kernels
from ..csrc_triton import forward as forward_kernels
from ..csrc_triton.arguments import Config, Documents, Queries, Sizes, Specialization, Upstream
from . import configs, launcher
from .configs import ARCHITECTURES, INTERPRETER, Architecture, Launch

_log = logging.getLogger("lik_ops")
_INT32_MAX = 2**31 - 1
_SCATTER_PROGRAMS = 4096  # enough to fill any GPU several times
_MOST_PLANS = 4096
_MOST_TILES = 64  # tensor descriptors that a plan keeps
_NO_STRIDES = (None, None, None)
# None where torch was built without CUDA and ROCm.
_current_device: Callable = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]
_raw_stream: Callable = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
# What inductor's code calls, microseconds quicker than torch.empty; it fills no memory for deterministic algorithms.
_empty_cuda = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


def _interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)


def unavailable(device: torch.device) -> str | None:
    """None if the kernels can run on `device`, else the reason why not."""
    if device.type == "cpu" and _interpreting():
        return None
    if device.type != "cuda":
        return f"the Triton kernels run on CUDA and ROCm devices, not on {device.type}"
    return None


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """The entry of the configuration table for `device`; a GPU that has none gets its own shared memory size."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return ARCHITECTURES.get(name, Architecture(name, 64 * 1024, wavefront=properties.warp_size))
    name = f"sm_{properties.major}{properties.minor}"
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in torch's stubs
    return ARCHITECTURES.get(name, Architecture(name, shared_memory))


def on_device(device: torch.device):
    """Make the tensors' device the current one for a launch: Triton launches on the current device."""
    if device.index is not None and device.index != _current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def _strides(per_token: Tensor | None) -> tuple[int | None, ...]:
    return (None, None) if per_token is None else per_token.stride()


def queries_of(Q: Tensor, mask: Tensor | None, weight: Tensor | None) -> Queries:
    return Queries._make((Q, *Q.stride(), mask, *_strides(mask), weight, *_strides(weight)))


def _owned_strides(x: Tensor | None, candidates: bool) -> tuple[int | None, ...]:
    """Strides beginning with that of the owner, which is 0 in the cross product."""
    if x is None:
        return _NO_STRIDES
    return x.stride() if candidates else (0, *x.stride())


def _documents(D: Tensor, mask: Tensor | None) -> Documents:
    candidates = D.dim() == 4
    return Documents._make((D, *_owned_strides(D, candidates), mask, *_owned_strides(mask, candidates)))


def _upstream(grad_scores: Tensor, argmax: Tensor) -> Upstream:
    stride_q, stride_k = grad_scores.stride()
    return Upstream(grad_scores, stride_q, stride_k, argmax.contiguous())


def sizes(Q: Tensor, D: Tensor) -> Sizes:
    return Sizes(Q.shape[0], D.shape[-3], Q.shape[1], D.shape[-2])


def _wide(Q: Tensor, D: Tensor) -> int:
    """`Config.WIDE`: whether offsets of a document's tokens, or even of a token's features, may exceed 32 bits."""
    features = D.shape[-1] * max(abs(Q.stride(-1)), abs(D.stride(-1)))
    if features > _INT32_MAX:
        return 2
    return 1 if (D.shape[-2] + 64) * abs(D.stride(-2)) + features > _INT32_MAX else 0


def _descriptor(D: Tensor, config: Config) -> TensorDescriptor | None:
    """All document tokens as rows for the tensor memory access unit, or None where it cannot read them."""
    if not describable(D, config) or D.data_ptr() % 16:
        return None
    d = D.shape[-1]
    return TensorDescriptor(D, [D.numel() // d, d], [d, 1], [config.BN, config.BD])


def describable(D: Tensor, config: Config | Specialization) -> bool:
    """Whether the tensor memory access unit can read the document tokens, if they begin at a multiple of 16 bytes."""
    rows, d = D.numel() // D.shape[-1], D.shape[-1]
    return D.shape[-2] >= config.BN and d * D.element_size() % 16 == 0 and rows <= _INT32_MAX and D.is_contiguous()


def _check_grid(programs: int) -> tuple[int]:
    if programs > _INT32_MAX:
        raise ValueError(f"lik_ops: {programs} programs in one launch; a CUDA grid holds {_INT32_MAX}: score in parts")
    return (programs,)


def allow_tf32() -> bool:
    """Whether the user allowed TF32 for matrix products of fp32 inputs, by any of torch's settings.

    The older `allow_tf32` follows this one, and raises once a newer setting was used.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


class Plan(Protocol):
    """A forward call of given metadata: what follows from that alone is worked out once."""

    scores_shape: tuple[int, int]

    def new_argmax(self) -> Tensor:
        """Winners to be filled by `scores`, of size [0] if none are asked for."""

    def scores(
        self,
        shape: tuple[int, ...],
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        argmax: Tensor | None,
    ) -> Tensor:
        """The scores as `shape`, which differs from [Nq, K] in axes of size 1 only; winners go to `argmax`."""


class ForwardPlan:
    """What a forward call needs and what follows from the metadata of its arguments alone: worked out once for each.

    Made from arguments with all their axes; called also with the 2-D tensors that these axes were added to.
    """

    def __init__(
        self,
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        normalize: bool,
        argmax_dtype: torch.dtype | None,
    ) -> None:
        self.device, self.index, self.arch = Q.device, Q.device.index, architecture(Q.device)
        self.sizes, self.d, candidates = sizes(Q, D), Q.shape[-1], D.dim() == 4
        Nq, K, Lq, _ = self.sizes
        self.scores_shape, self.argmax_dtype = (Nq, K), argmax_dtype
        self.argmax_shape = (Nq, K, Lq) if candidates else (K, Nq, Lq)
        self.is_trivial = Nq * K == 0 or Lq == 0
        # Once known: what launches tensors that begin at multiples of 16 bytes.
        self.bound: launcher.Bound | None = None
        self.direct: Callable | None = None
        if self.is_trivial:
            return
        launch = configs.forward(
            self.arch,
            Q.dtype,
            Nq,
            Lq,
            self.d,
            candidates=candidates,
            normalize=normalize,
            wide=_wide(Q, D),
            tf32=allow_tf32(),
            documents=K * (Nq if candidates else 1),
        )
        self.reads_tiles = self.arch.has_descriptors and describable(D, launch.config)
        if argmax_dtype is not None or not self.reads_tiles:
            launch = launch.visiting()
        self.launch, self.config, self.options = launch, launch.config, launch.options(self.arch)
        self.grid = (*_check_grid(launch.programs(Nq, K)), 1, 1)
        self.kernel = forward_kernels.maxsim_forward
        self.query_strides = Q.stride(), _strides(q_mask), _strides(q_weight)
        self.document_strides = _owned_strides(D, candidates), _owned_strides(d_mask, candidates)
        self.tiles: dict[int, tuple] = {}
        self.score_strides = (K, 1)
        self.constants = (None, *self.sizes, self.d, self.config)
        self.has_per_token = not (q_mask is None and d_mask is None and q_weight is None)
        queries, documents = self._grouped(None, None, None, None, None)
        self.query_rest, self.document_rest = queries[1:], documents[1:]
        _log.debug("maxsim_forward on %s for %s: %s", self.arch.name, self.sizes, launch)

    def new_argmax(self) -> Tensor:
        if self.argmax_dtype is None:
            return torch.empty(0, dtype=torch.int32, device=self.device)
        return torch.empty(self.argmax_shape, dtype=self.argmax_dtype, device=self.device)

    def scores(
        self,
        shape: tuple[int, ...],
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        argmax: Tensor | None,
    ) -> Tensor:
        """The scores as `shape`, which differs from [Nq, K] in axes of size 1 only; winners go to `argmax`."""
        direct = self.direct
        if direct is None or _current_device() != self.index or launcher.hooks_set():
            return self._scores_by_launcher(shape, Q, D, q_mask, d_mask, q_weight, argmax)
        q, d = Q.data_ptr(), D.data_ptr()
        if self.has_per_token:
            per_token = [0 if t is None else t.data_ptr() for t in (q_mask, d_mask, q_weight)]
            q_kept, d_kept, weight = per_token
            aligned = not (q | d | q_kept | d_kept | weight) & 15
            queries, documents = self._grouped(q, d, q_kept, d_kept, weight)
        else:
            aligned = not (q | d) & 15
            queries, documents = (q, *self.query_rest), (d, *self.document_rest)
        if not aligned:
            return self._scores_by_launcher(shape, Q, D, q_mask, d_mask, q_weight, argmax)
        if _empty_cuda is None or torch.are_deterministic_algorithms_enabled():
            scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        else:
            scores = _empty_cuda(shape, self.score_strides[-len(shape) :] if shape else (), torch.float32)
        tiles = (self.tiles.get(d) or self._new_tiles(D, d)) if self.reads_tiles else (None,)
        winners = None if argmax is None else argmax.data_ptr()
        args = (queries, documents, *tiles, scores.data_ptr(), winners, *self.constants)
        direct(*self.grid, _raw_stream(self.index), args)
        return scores

    def _scores_by_launcher(
        self,
        shape: tuple[int, ...],
        Q: Tensor,
        D: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        argmax: Tensor | None,
    ) -> Tensor:
        if self.is_trivial:
            return torch.zeros(shape, dtype=torch.float32, device=self.device)
        scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        queries, documents = self._grouped(Q, D, q_mask, d_mask, q_weight)
        groups = Queries._make(queries), Documents._make(documents)
        tiles = _descriptor(D, self.config) if self.reads_tiles else None
        grid, config = self.grid, self.config
        if tiles is None and config.WALK:  # D begins where no descriptor can
            launch = self.launch.visiting()
            grid, config = (*_check_grid(launch.programs(*self.scores_shape)), 1, 1), launch.config
        args = (*groups, tiles, scores, argmax, None, *self.sizes, self.d, config)
        with on_device(self.device):
            bound = launcher.launch(self.kernel, grid, args, self.options)
        aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (Q, D, q_mask, d_mask, q_weight))
        if aligned and bound is not None and bound.direct is not None:
            self.bound, self.direct = bound, bound.direct
        return scores

    def _grouped(self, q, d, q_mask, d_mask, weight) -> tuple[tuple, tuple]:
        """Tensors or pointers grouped with their strides, in the order of `Queries` and `Documents`."""
        (a, b, c), (e, f) = self.query_strides, self.document_strides
        return (q, *a, q_mask, *b, weight, *c), (d, *e, d_mask, *f)

    def _new_tiles(self, D: Tensor, pointer: int) -> tuple:
        """The descriptor of `D` as the kernel takes it: it depends on nothing but the plan and where D begins."""
        if len(self.tiles) >= _MOST_TILES:
            self.tiles.clear()
        assert self.bound is not None
        found = self.tiles[pointer] = self.bound.encoded(0, _descriptor(D, self.config))
        return found


_plans: dict[tuple, Plan] = {}


def forward_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> Plan:
    """The plan for validated arguments that have all their axes."""
    tf32 = Q.dtype == torch.float32 and allow_tf32()
    key = (*metadata(Q, D, q_mask, d_mask, q_weight), normalize, argmax_dtype, tf32)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _new_plan(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype)
    return plan


def _new_plan(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> Plan:
    plan: Plan | None
    if Q.device.type == "cuda" and d_mask is None and not normalize:
        from .cuda_specialized import specialized_plan  # it is built upon this module

        plan = specialized_plan(Q, D, q_mask, q_weight, argmax_dtype)
        if plan is not None:
            return plan
    if Q.dtype == torch.float32 and not normalize:
        from .cuda_split import split_plan

        plan = split_plan(Q, D, argmax_dtype)
        if plan is not None:
            return plan
    return ForwardPlan(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype)


def forward(
    Q: Tensor,
    D: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Scores [Nq, Nd] or [Nq, K] in fp32, and the winners (an empty tensor if `argmax_dtype` is None)."""
    plan = forward_plan(Q, D, q_mask, d_mask, q_weight, normalize, argmax_dtype)
    argmax = plan.new_argmax()
    wanted = None if argmax_dtype is None else argmax
    return plan.scores(plan.scores_shape, Q, D, q_mask, d_mask, q_weight, wanted), argmax


def _outputs(Q: Tensor, D: Tensor, needs: list[bool]) -> list[Tensor]:
    """A gradient for each of Q, D, q_weight: zeros where nothing can flow, [0] where not needed."""
    empty = Q.numel() == 0 or D.numel() == 0
    new = torch.zeros if empty else torch.empty
    shapes, dtypes = (Q.shape, D.shape, Q.shape[:2]), (Q.dtype, D.dtype, torch.float32)
    return [
        new(shape if need else (0,), dtype=dtype, device=Q.device)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    ]


@functools.cache
def _gather(*args, **kwargs) -> Launch:
    return configs.gather(*args, **kwargs)


@functools.cache
def _grad_documents(*args, **kwargs) -> Launch:
    return configs.grad_documents(*args, **kwargs)


def forget() -> None:
    """Drop what was worked out from the table of configurations."""
    _plans.clear()
    _gather.cache_clear()
    _grad_documents.cache_clear()


class _Backward(NamedTuple):
    """What the launches of one backward share."""

    queries: Queries
    documents: Documents
    up: Upstream
    sizes: Sizes
    d: int
    arch: Architecture
    candidates: bool
    normalize: bool
    wide: int

    @staticmethod
    def of(
        grad_scores: Tensor,
        Q: Tensor,
        D: Tensor,
        argmax: Tensor,
        q_mask: Tensor | None,
        d_mask: Tensor | None,
        q_weight: Tensor | None,
        normalize: bool,
    ) -> _Backward:
        return _Backward(
            queries_of(Q, q_mask, q_weight),
            _documents(D, d_mask),
            _upstream(grad_scores, argmax),
            sizes(Q, D),
            Q.shape[-1],
            architecture(Q.device),
            D.dim() == 4,
            normalize,
            _wide(Q, D),
        )

    @property
    def inputs(self) -> tuple[Queries, Documents, Upstream]:
        """What most kernels take first."""
        return self.queries, self.documents, self.up

    def gather(self) -> Launch:
        return _gather(self.d, candidates=self.candidates, normalize=self.normalize, wide=self.wide)

    def launch(self, kernel, grid: tuple[int, ...], launch: Launch, *args, sizes: Sizes | None = None, more=()) -> None:
        """Launch a kernel that takes `args`, sizes, d, `more` and the configuration."""
        args = (*args, *(sizes or self.sizes), self.d, *more, launch.config)
        launcher.launch(kernel, grid, args, launch.options(self.arch))


def backward_lowmem(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight, each element summed in a fixed order by the program that owns it."""
    grad_Q, grad_D, grad_weight = outputs = _outputs(Q, D, needs)
    if Q.numel() == 0 or D.numel() == 0:
        return grad_Q, grad_D, grad_weight
    call = _Backward.of(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize)
    Nq, K, Lq, Ld = call.sizes
    wanted = [g if need else None for g, need in zip(outputs, needs, strict=True)]
    with on_device(Q.device):
        if needs[0] or needs[2]:
            launch = call.gather()
            grid = _check_grid(Nq * triton.cdiv(Lq, launch.config.BM))
            call.launch(lowmem_kernels.maxsim_grad_queries, grid, launch, *call.inputs, wanted[0], wanted[2])
        if needs[1]:
            launch = _grad_documents(call.arch, call.d, candidates=call.candidates, normalize=normalize, wide=call.wide)
            grid = _check_grid((Nq * K if call.candidates else K) * triton.cdiv(Ld, launch.config.BN))
            call.launch(lowmem_kernels.maxsim_grad_documents, grid, launch, *call.inputs, grad_D)
    return grad_Q, grad_D, grad_weight


def _require_nondeterminism_allowed() -> None:
    """Do as torch's own atomic operations under `torch.use_deterministic_algorithms`: raise, or warn if told to."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "lik::maxsim_bwd_unified adds atomically and does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. Use backward='lowmem', or 'auto'."
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def _finish(
    call: _Backward, X: Tensor, queries: Queries, sums: Tensor, grad: Tensor | None, grad_weight: Tensor | None
) -> None:
    """Write the gradient of the rows ``X [N, K, L, d]`` from their sums, and of their weights."""
    sizes = Sizes(X.shape[0], X.shape[1], X.shape[2], 0)
    launch = _gather(call.d, candidates=False, normalize=call.normalize, wide=_wide(X, X))
    grid = _check_grid(sizes.Nq * sizes.K * triton.cdiv(sizes.Lq, launch.config.BM))
    args = (_documents(X, None), queries, sums, grad, grad_weight)
    call.launch(unified_kernels.maxsim_finish, grid, launch, *args, sizes=sizes)


def backward_unified(
    grad_scores: Tensor,
    Q: Tensor,
    D: Tensor,
    argmax: Tensor,
    q_mask: Tensor | None,
    d_mask: Tensor | None,
    q_weight: Tensor | None,
    normalize: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of Q, D and q_weight in one pass over the winners, through fp32 sums and atomic adds.

    Raises:
        RuntimeError: under `torch.use_deterministic_algorithms(True)`.
    """
    _require_nondeterminism_allowed()
    grad_Q, grad_D, grad_weight = outputs = _outputs(Q, D, needs)
    if Q.numel() == 0 or D.numel() == 0:
        return grad_Q, grad_D, grad_weight
    call = _Backward.of(grad_scores, Q, D, argmax, q_mask, d_mask, q_weight, normalize)
    wanted = [g if need else None for g, need in zip(outputs, needs, strict=True)]
    sum_Q = torch.zeros(Q.shape, dtype=torch.float32, device=Q.device) if needs[0] or needs[2] else None
    sum_D = torch.zeros(D.shape, dtype=torch.float32, device=Q.device) if needs[1] else None
    launch = call.gather()
    row_tiles = call.sizes.Nq * triton.cdiv(call.sizes.Lq, launch.config.BM)
    K_per_program = max(1, triton.cdiv(call.sizes.K * row_tiles, _SCATTER_PROGRAMS))
    grid = (*_check_grid(row_tiles), triton.cdiv(call.sizes.K, K_per_program))
    with on_device(Q.device):
        scatter = unified_kernels.maxsim_scatter
        call.launch(scatter, grid, launch, *call.inputs, sum_Q, sum_D, more=(K_per_program,))
        if sum_Q is not None:
            _finish(call, Q.unsqueeze(1), call.queries, sum_Q, wanted[0], wanted[2])
        if sum_D is not None:
            documents = D if call.candidates else D.unsqueeze(0)
            unweighted = call.queries._replace(weight=None, weight_stride_n=None, weight_stride_l=None)
            _finish(call, documents, unweighted, sum_D, grad_D, None)
    return grad_Q, grad_D, grad_weight
