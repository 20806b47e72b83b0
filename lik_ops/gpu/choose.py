"""Choice of the kernel for a forward call, for launches, `lik_ops.info`, and the tests.

`DENSE_RULES`, `PACKED_RULES`, and `QUANTIZED_RULES` are ordered lists. The first rule that returns a choice decides.
The function of a rule returns the reason if its kernel cannot serve a call or is slower. `lik_ops.gpu.supports` has
these reasons for the sm_90 kernels, and ``python -m lik_ops.info --explain`` prints them. ``LIK_OPS_KERNEL`` skips the
rules of other families.

The functions read only the metadata of tensors, except that a rule of packed calls reads the alignment of D. An `arch`
argument replaces the architecture of the tensors' device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.segments import PackedArgs
from ..core.settings import KERNEL_VARIABLE, get_forced_kernel
from ..csrc_triton.formats.bits import get_code_bits
from ..csrc_triton.formats.residual import get_bucket_bits
from ..formats.table import FP8_QUERIES, OPERAND_FORMATS, EncodedTokens
from . import generic_choices, supports
from .generic_choices import SHORT_DOCUMENTS_REASON, GenericChoice, SplitChoice, has_idle_sms, has_long_documents
from .runtime.arguments import architecture, drop_single_query, has_even_stride, make_size_args, supports_descriptor
from .tuning import architectures, forward_configs, sm90_configs
from .tuning.architectures import Architecture
from .tuning.sm90_configs import RowMaximaChoice, Sm90Choice

_ONE_QUERY = "each document is scored against one query"
# Formats with a kernel for dense documents.
DENSE_FORMATS = frozenset(
    name
    for name, format in OPERAND_FORMATS.items()
    if format.kernel in forward_configs.INT8_TERMS_BY_ENCODING or format.dtype.is_floating_point
)
_MAX_FP8_QUERY_FEATURES = 128
Choice = GenericChoice | Sm90Choice | RowMaximaChoice | SplitChoice


class Rule(NamedTuple):
    """A kernel of an ordered list of rules, and the function that chooses it.

    `family` is the value of ``LIK_OPS_KERNEL`` that forces the rule, or "split". A split rule is only for speed, and no
    value forces it. `choose` returns the choice, or the reason why not.
    """

    kernel: str
    family: str
    choose: Callable[[Any], Any]

    def apply(self, args: Any) -> Any:
        """Return the choice for a call, or the reason why the kernel is not chosen."""
        forced_kernel = get_forced_kernel()
        return self.choose(args) if forced_kernel in ("auto", self.family) else f"{KERNEL_VARIABLE}={forced_kernel}"


def apply_rules(rules: tuple[Rule, ...], args: Any) -> Any:
    """Return the choice of the first rule that serves a call.

    Raises:
        ValueError: ``LIK_OPS_KERNEL`` forces a kernel that cannot serve the call.
    """
    reasons = []
    for rule in rules:
        choice = rule.apply(args)
        if not isinstance(choice, str):
            return choice
        reasons.append((rule, choice))
    forced_kernel = get_forced_kernel()
    explanation = "; ".join(f"{rule.kernel}: {reason}" for rule, reason in reasons if rule.family == forced_kernel)
    raise ValueError(f"lik_ops: {KERNEL_VARIABLE}={forced_kernel} cannot serve this call: {explanation}")


class DenseChoiceArgs(NamedTuple):
    """Everything that the choice for a dense call depends on. `make_dense_args` makes it of tensors with all axes."""

    Q: Tensor
    D: Tensor
    d_mask: Tensor | None
    normalize: bool
    argmax: bool
    arch: Architecture


def make_dense_args(
    Q: Tensor, D: Tensor, d_mask: Tensor | None, normalize: bool, argmax: bool, arch: Architecture
) -> DenseChoiceArgs:
    """Return the arguments of the rules in `DENSE_RULES`, with the candidates of a single query as documents."""
    return DenseChoiceArgs(Q, *drop_single_query(D, d_mask), normalize, argmax, arch)


def choose_dense(
    Q: Tensor,
    D: Tensor,
    d_mask: Tensor | None,
    normalize: bool,
    argmax_dtype: torch.dtype | None,
    arch: Architecture | None = None,
) -> Choice:
    """Choose the kernel for a call of dense tensors that have all their axes.

    Args:
        Q: query tokens `[Nq, Lq, d]`.
        D: document tokens `[Nd, Ld, d]` or `[Nq, K, Ld, d]`.
        d_mask: document mask, or None.
        normalize: whether tokens are normalized.
        argmax_dtype: dtype of the argmax, or None without an argmax.
        arch: architecture to choose for, or None for the architecture of the device of Q.
    """
    call = make_dense_args(Q, D, d_mask, normalize, argmax_dtype is not None, arch or architecture(Q.device))
    return apply_rules(DENSE_RULES, call)


def _choose_dense_splits(a: DenseChoiceArgs) -> SplitChoice | str:
    """Choose splits of documents if no sm_90 kernel keeps the SMs busy, or return the reason why not."""
    Q, D = a.Q, a.D
    if D.dim() != 3:
        return "each query has its own candidates"
    if not (Q.numel() and D.numel()):
        return "Q or D is empty"
    if not supports.has_int32_features(Q, D):
        return "features of a token span more than 2^31 elements"
    if not all(x is None or has_even_stride(x) for x in (Q, D, a.d_mask)):
        return "rows of Q, D, or the document mask are not evenly spaced"
    cut = generic_choices.make_cut(Q, D, None, a.d_mask)
    if not has_long_documents(cut, a.normalize):
        return SHORT_DOCUMENTS_REASON
    choice: Sm90Choice | RowMaximaChoice | str = choose_sm90(a)
    if isinstance(choice, str):
        choice = choose_masked(a)
    if not isinstance(choice, str) and not has_idle_sms(choice, Q.shape[1], D.shape[1], a.arch):
        return f"{choice.kernel} keeps enough SMs busy"
    return generic_choices.choose_document_splits(cut, a.normalize, a.argmax, a.arch)


def choose_sm90(a: DenseChoiceArgs) -> Sm90Choice | str:
    """Choose an sm_90 kernel for documents without a mask or with many features, or return the reason why not."""
    Q, D, d_mask, normalize, argmax, arch = a
    d, is_masked, is_fp32 = Q.shape[-1], d_mask is not None, Q.dtype == torch.float32
    if is_masked and d <= 128 and not is_fp32:
        return "half-precision documents have a mask, and d <= 128"
    if reason := supports.supports_sm90_call(Q, D, arch):
        return reason
    sizes = make_size_args(Q, D)
    if is_fp32:
        terms = generic_choices.choose_generic(Q, D, normalize, argmax, arch).launch.config.FP32_TERMS
        has_options = normalize or argmax or is_masked
        first = has_options or not supports_descriptor(D)
        options = {"normalize": normalize, "argmax": argmax, "masked": is_masked, "first": first}
        choice = sm90_configs.configure_fp32_split(arch, sizes, d, terms=terms or 2, **options)
        reason = supports.supports_fp32_split(Q, D, terms > 0, has_options, choice)
        return reason or supports.prefers_fp32_split(sizes, arch, choice) or choice
    choice = sm90_configs.configure_sm90(arch, sizes, d, normalize=normalize, argmax=argmax, masked=is_masked)
    reason = supports.supports_sm90(Q, D, normalize, argmax, choice)
    return reason or supports.prefers_sm90(sizes, d, normalize, arch, choice) or choice


def choose_masked(a: DenseChoiceArgs) -> RowMaximaChoice | str:
    """Choose the row maxima kernel for documents with a mask, or return the reason why not."""
    reason = supports.supports_sm90_call(a.Q, a.D, a.arch)
    if reason or a.d_mask is None:
        return reason or "documents have no mask"
    if a.normalize or not a.D.is_contiguous():
        return "`normalize`" if a.normalize else "D is not contiguous"
    Nq, K, Lq, _ = make_size_args(a.Q, a.D)
    return choose_row_maxima(a.D, Nq * Lq, K, Lq, a.argmax, True, a.arch)


def choose_row_maxima(
    D: Tensor, rows: int, K: int, Lq: int, argmax: bool, dense: bool, arch: Architecture
) -> RowMaximaChoice | str:
    """Choose the row maxima kernel for contiguous document tokens, or return the reason why not.

    Args:
        D: document tokens.
        rows: number of query tokens of all queries.
        K: number of documents.
        Lq: mean number of tokens of a query.
        argmax: whether the call returns an argmax.
        dense: whether each query has exactly `Lq` tokens.
        arch: architecture that runs the kernel.
    """
    choice = sm90_configs.configure_row_maxima(arch, D.dtype, rows, K, Lq, D.shape[-1], argmax=argmax, dense=dense)
    reason = supports.supports_row_maxima(D, rows, arch, choice)
    return reason or supports.prefers_row_maxima(rows, Lq, arch, choice) or choice


def choose_int8(
    Q: Tensor, data: Tensor, scale: Tensor, terms: int, arch: Architecture, encoding: str = ""
) -> Sm90Choice | str:
    """Choose an sm_90 kernel for dense int8 or code documents, or return the reason why not.

    Args:
        Q: query tokens `[Nq, Lq, d]`.
        data: int8 documents `[Nd, Ld, d]`, or the bytes or words of codes.
        scale: scales `[Nd, Ld]`, with sizes of 1 for a scale that tokens share.
        terms: number of int8 terms of a query row.
        arch: architecture that runs the kernel.
        encoding: encoding of codes, else "".
    """
    configure = partial(sm90_configs.configure_int8, arch, Q.dtype, terms=terms, encoding=encoding)
    return _choose_dense_encoded(Q, data, scale, arch, configure)


def choose_fp8(Q: Tensor, data: Tensor, scale: Tensor, encoding: str, arch: Architecture) -> Sm90Choice | str:
    """Choose an sm_90 kernel for dense FP8 documents, as bytes of `encoding`, or return the reason why not."""
    return _choose_dense_encoded(Q, data, scale, arch, partial(sm90_configs.configure_fp8, arch, encoding=encoding))


def _choose_dense_encoded(
    Q: Tensor, data: Tensor, scale: Tensor, arch: Architecture, configure: Callable[..., Sm90Choice]
) -> Sm90Choice | str:
    """Choose the kernel that `configure` returns for the sizes of a call, or return the reason why not."""
    if reason := supports.supports_sm90_call(Q, data, arch):
        return reason
    sizes = make_size_args(Q, data)
    choice = configure(sizes, Q.shape[-1], each_token=scale.shape[1] > 1)
    reason = supports.supports_encoded(Q, data, scale, choice)
    return reason or supports.prefers_encoded(sizes.K, arch, choice) or choice


class PackedChoiceArgs(NamedTuple):
    """Everything that the choice for a packed call depends on. `stored` is `KernelConfig.ENCODING`."""

    c: PackedArgs
    normalize: bool
    argmax: bool
    stored: Any
    arch: Architecture


def supports_packed_splits(a: PackedChoiceArgs) -> str | None:
    """Return the reason why splits cannot serve packed documents, by metadata without sizes, or None."""
    if get_bucket_bits(a.stored):
        return "documents are residual codes, which persistent programs decode"
    return _ONE_QUERY if a.c.candidates or a.c.pairs is not None else None


def supports_packed_row_maxima(a: PackedChoiceArgs) -> str | None:
    """Return the reason why `maxsim_row_maxima_sm90` cannot serve packed documents, or None.

    Only metadata without sizes decides.
    """
    c = a.c
    if a.stored:
        return "documents are encoded"
    if reason := supports_packed_splits(a):
        return reason
    if a.normalize or c.d_mask is not None or c.q_lengths is not None:
        return "`normalize`" if a.normalize else "documents have a mask, or queries have lengths"
    if not generic_choices.supports_packed_descriptor(c, a.arch):
        return "TMA cannot read D: rows are not contiguous, or no multiples of 16 bytes"
    return None if supports.has_int32_features(c.Q, c.D) else "features of a token span more than 2^31 elements"


def _choose_packed_row_maxima(a: PackedChoiceArgs) -> RowMaximaChoice | str:
    """Choose the row maxima kernel for a cross product of packed tokens, or return the reason why not.

    If D has 1 to 2^31 - 1 aligned rows, the choice depends only on the numbers of queries, documents, and query tokens.
    """
    c = a.c
    if reason := supports_packed_row_maxima(a):
        return reason
    if 0 in (c.queries, c.columns, c.Tq) or not 0 < c.Td < 2**31:
        return "there are no tokens, or 2^31 or more document tokens"
    if c.D.data_ptr() % 16:
        return "D does not start at a multiple of 16 bytes"
    mean = architectures.cdiv(c.Tq, c.queries)
    return choose_row_maxima(c.D, c.Tq, c.columns, mean, a.argmax, c.cu_seqlens_q is None, a.arch)


def _choose_packed_splits(a: PackedChoiceArgs) -> SplitChoice | str:
    """Choose splits of packed documents if `maxsim_row_maxima_sm90` leaves SMs idle, or return the reason why not."""
    c = a.c
    if reason := supports_packed_splits(a):
        return reason
    if not has_long_documents(c, a.normalize, a.stored):
        return SHORT_DOCUMENTS_REASON
    choice = _choose_packed_row_maxima(a)
    mean = c.Tq // max(c.queries, 1), c.Td // max(c.columns, 1)
    if not isinstance(choice, str) and not has_idle_sms(choice, *mean, a.arch):
        return f"{choice.kernel} keeps enough SMs busy"
    return generic_choices.choose_document_splits(c, a.normalize, a.argmax, a.arch, a.stored)


class QuantizedChoiceArgs(NamedTuple):
    """Everything that the choice for quantized documents depends on. `c.D` has the encoded documents of `stored`."""

    c: PackedArgs
    stored: EncodedTokens
    normalize: bool
    argmax: bool
    arch: Architecture


def rounds_to_fp8(format: str, Q: Tensor) -> bool:
    """Return whether kernels round the queries of documents in a format to FP8.

    They only round half-precision rows of few features, and only with `FP8_QUERIES`.
    """
    return format == FP8_QUERIES and Q.dtype != torch.float32 and Q.shape[-1] <= _MAX_FP8_QUERY_FEATURES


def _choose_encoded(a: QuantizedChoiceArgs) -> Sm90Choice | str:
    """Choose an sm_90 kernel for encoded documents, or return the reason why not."""
    c, data, scale, format = a.c, a.stored.data, a.stored.scale, a.stored.format
    kernel = OPERAND_FORMATS[format].kernel
    terms = forward_configs.INT8_TERMS_BY_ENCODING.get(kernel)
    if format not in DENSE_FORMATS:
        return f"documents are encoded as {format}"
    if any(x is not None for x in (c.cu_seqlens_q, c.offsets, c.pairs)) or c.candidates:
        return "tokens are packed, or each query has its own candidates"
    if c.d_mask is not None or a.normalize or a.argmax:
        return "documents have a mask" if c.d_mask is not None else "`normalize`" if a.normalize else "argmax"
    if terms:
        return choose_int8(c.Q, data, scale, terms, a.arch, kernel if get_code_bits(kernel) else "")
    if data.dtype != torch.int8:
        data = data.view(torch.int8)
    encoding = "fp8_fp8" if rounds_to_fp8(format, c.Q) else kernel.removesuffix("_fp8")
    return choose_fp8(c.Q, data, scale, encoding, a.arch)


def _choose_encoded_splits(a: QuantizedChoiceArgs) -> SplitChoice | str:
    """Choose splits of encoded documents, or return the reason why not."""
    kernel = OPERAND_FORMATS[a.stored.format].kernel
    return _choose_packed_splits(PackedChoiceArgs(a.c, a.normalize, a.argmax, kernel, a.arch))


def _choose_generic(a: DenseChoiceArgs) -> GenericChoice:
    """Choose the launch of the generic kernel."""
    return generic_choices.choose_generic(a.Q, a.D, a.normalize, a.argmax, a.arch)


# The tile of `maxsim_forward_packed` depends on more sizes than the rules: see `generic_choices.choose_packed`.
# The choice of the rule is therefore None.
_PACKED = Rule("maxsim_forward_packed", "generic", lambda a: None)
DENSE_RULES = (
    Rule("maxsim_forward_packed on splits of documents", "split", _choose_dense_splits),
    Rule("maxsim_forward_sm90 or maxsim_forward_sm90_large_d", "sm90", choose_sm90),
    Rule("maxsim_row_maxima_sm90", "sm90", choose_masked),
    Rule("maxsim_forward", "generic", _choose_generic),
)
PACKED_RULES = (
    Rule("maxsim_forward_packed on splits of documents", "split", _choose_packed_splits),
    Rule("maxsim_row_maxima_sm90", "sm90", _choose_packed_row_maxima),
    _PACKED,
)
QUANTIZED_RULES = (
    Rule("maxsim_forward_sm90", "sm90", _choose_encoded),
    Rule("maxsim_forward_packed on splits of documents", "split", _choose_encoded_splits),
    _PACKED,
)
