"""Validity and preference of the sm_90 kernels for a forward call.

A `supports_...` function returns None if a kernel computes a call correctly, else the reason why not. It is the only
statement of validity. A `prefers_...` function returns None if the kernel is expected to be faster than the generic
kernel, else the reason why not. ``LIK_OPS_KERNEL=sm90`` ignores preferences. All kernels give the same bits, so
preferences may depend on any size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.settings import get_forced_kernel
from ..csrc_triton.common.arguments import SizeArgs, Sm90Config
from ..csrc_triton.formats.bits import get_code_bits, is_rotated
from .runtime.arguments import (
    choose_row_offset_width,
    get_feature_reach,
    make_size_args,
    supports_descriptor,
    supports_query_descriptor,
)
from .runtime.gluon import load_kernels, load_module
from .tuning import sm90_configs
from .tuning.architectures import Architecture, supports_vector_loads
from .tuning.sm90_configs import RowMaximaChoice, Sm90Choice
from .tuning.tables import HALF_DTYPES

SOFT_MODULE = "soft.backward_sm90"  # module of `csrc_triton` with the kernels of soft gradients
_PAIRS = "(row tile, document) pairs"
_NO_GLUON = "the installed Triton has no tested Gluon"
_NO_DESCRIPTOR = "TMA cannot read D: it is not contiguous, or rows are no multiples of 16 bytes"


def _find_reason(*checks: tuple[Any, str]) -> str | None:
    """Return the text of the first check whose condition holds, or None."""
    return next((text for condition, text in checks if condition), None)


def supports_sm90_call(Q: Tensor, D: Tensor, arch: Architecture) -> str | None:
    """Return the reason why no sm_90 kernel of dense tensors can serve a call, or None.

    Args:
        Q: query tokens `[Nq, Lq, d]`.
        D: document tokens, or their encoding.
        arch: architecture that runs the kernel.
    """
    if arch.name != "sm_90":  # import no Gluon
        return f"the architecture is {arch.name}, not sm_90"
    return _find_reason(
        (D.dim() != 3, "each query has its own candidates"),
        (not (Q.numel() and D.numel()), "Q or D is empty"),
        (D.shape[-1] and not has_int32_features(Q, D), "features of a token span more than 2^31 elements"),
        (load_kernels() is None, _NO_GLUON),
    )


def has_int32_features(Q: Tensor, D: Tensor) -> bool:
    """Return whether 32-bit offsets reach all features of a token, as the Gluon kernels require."""
    return choose_row_offset_width(get_feature_reach(Q, D)) < 2


def supports_sm90(Q: Tensor, D: Tensor, normalize: bool, argmax: bool, choice: Sm90Choice) -> str | None:
    """Return the reason why a kernel of half-precision documents without a mask cannot serve a call, or None.

    The kernels are `maxsim_forward_sm90` up to 128 features, and `maxsim_forward_sm90_large_d` for more. The call fits
    `supports_sm90_call`.
    """
    (Nq, K, Lq, Ld), d, C = make_size_args(Q, D), Q.shape[-1], choice.config
    rows = Nq * choice.parts * C.ROWS_PER_QUERY
    odd_rows = normalize and (Q.stride(-1) != 1 or any(n % 16 for n in Q.stride()[:-1]))
    return _find_reason(
        (Q.dtype not in HALF_DTYPES, f"the dtype is {Q.dtype}"),
        # `maxsim_forward` adds in another order.
        ((normalize or d > 128) and not supports_vector_loads(d, 0), "d is no multiple of 16"),
        (odd_rows, "`normalize` with strides of Q that are no multiples of 16"),
        (d > 128 and normalize and Nq * Lq > sm90_configs.MAX_QUERY_NORMS, "d > 128 with too many query norms"),
        (Lq < 2, "Lq < 2"),
        (d <= 128 and Ld < C.BN, f"documents have fewer than {C.BN} tokens"),
        (max(choice.row_tiles * K, rows) >= 2**31, "2^31 or more query rows or (row tile, document) pairs"),
        (not supports_descriptor(D), _NO_DESCRIPTOR),
        (choice.has_large_d and not supports_query_descriptor(Q), "TMA cannot read Q"),
    )


def prefers_sm90(sizes: SizeArgs, d: int, normalize: bool, arch: Architecture, choice: Sm90Choice) -> str | None:
    """Return the reason why the generic kernel is faster than the kernel of `supports_sm90`, or None."""
    Nq, K, Lq, Ld = sizes
    rows = Nq * choice.parts * choice.config.ROWS_PER_QUERY
    tile = sm90_configs.LARGE_D_TILE_ROWS if d > 128 else sm90_configs.SM90_TILE_ROWS
    # The generic kernel computes norms between its products. This kernel computes norms during its products.
    row_limit = 0 if choice.is_small_m else tile // 4 if normalize and d <= 128 else tile // 2
    one_is_enough = Lq > sm90_configs.MAX_WHOLE_QUERY_TOKENS or (d > 128 and Ld >= sm90_configs.MIN_LARGE_D_TOKENS)
    pairs = int(arch.processors * sm90_configs.MIN_PAIRS_PER_SM)
    return _prefer(
        (rows <= row_limit, f"slower for at most {row_limit} query rows, padded to tiles"),
        (not one_is_enough and choice.row_tiles * K < pairs, f"slower for fewer than {pairs} {_PAIRS}"),
    )


def _prefer(*checks: tuple[Any, str]) -> str | None:
    """Return the text of the first check whose condition holds, or None. A forced kernel has no preferences."""
    return None if get_forced_kernel() == "sm90" else _find_reason(*checks)


def supports_fp32_split(Q: Tensor, D: Tensor, splits: bool, has_options: bool, choice: Sm90Choice) -> str | None:
    """Return the reason why `maxsim_forward_sm90` cannot serve an fp32 call, or None.

    Args:
        Q: query tokens.
        D: document tokens.
        splits: whether the generic kernel splits the rows of this call into fp16 terms.
        has_options: whether the call has a document mask, an argmax, or `normalize`.
        choice: the configuration of the kernel.
    """
    (Nq, K, Lq, Ld), C = make_size_args(Q, D), choice.config
    counts = choice.row_tiles * K, Nq * choice.parts * C.ROWS_PER_QUERY, K * Ld
    return _find_reason(
        (not splits, "fp32 rows are not split into fp16 terms (alignment)"),
        (has_options and choice.is_small_m, "few query rows of fp32 with a document mask, an argmax, or `normalize`"),
        (Lq < 2, "Lq < 2"),
        (Ld < C.BN, f"documents have fewer than {C.BN} tokens"),
        (Q.shape[-1] > 128, "fp32 with d > 128"),
        (max(counts) >= 2**31, "2^31 or more rows, tokens, or (row tile, document) pairs"),
        (choice.is_small_m and not supports_descriptor(D), _NO_DESCRIPTOR),
    )


def prefers_fp32_split(sizes: SizeArgs, arch: Architecture, choice: Sm90Choice) -> str | None:
    """Return the reason why the generic kernel is faster than the kernel of `supports_fp32_split`, or None."""
    row_limit, pairs = sm90_configs.SM90_TILE_ROWS // 2, arch.processors // 2
    padded_rows = sizes.Nq * choice.parts * choice.config.ROWS_PER_QUERY
    return _prefer(
        (
            not choice.is_small_m and padded_rows <= row_limit,
            f"slower for 33 to {row_limit} query rows, padded to powers of two",
        ),
        (choice.row_tiles * sizes.K < pairs, f"slower for fewer than {pairs} {_PAIRS}"),
    )


def supports_row_maxima(D: Tensor, rows: int, arch: Architecture, choice: RowMaximaChoice) -> str | None:
    """Return the reason why `maxsim_row_maxima_sm90` cannot serve contiguous document tokens, or None.

    Documents may have masks or any length.

    Args:
        D: document tokens.
        rows: number of query tokens of all queries.
        arch: architecture that runs the kernel.
        choice: the configuration of the kernel.
    """
    d = D.shape[-1]
    if arch.name != "sm_90":  # import no Gluon
        return f"the architecture is {arch.name}, not sm_90"
    return _find_reason(
        (D.dtype not in HALF_DTYPES, f"the dtype is {D.dtype}"),
        (d > 128, "d > 128"),
        (d * D.element_size() % 16, "rows are no multiples of 16 bytes"),
        (not 0 < D.numel() // d < 2**31, "D has no tokens, or 2^31 or more"),
        (choice.pairs >= 2**31, "2^31 or more " + _PAIRS),
        (rows > sm90_configs.MAX_WORKSPACE_ROWS, "the row maxima of one document exceed the workspace"),
        (load_kernels() is None, _NO_GLUON),
    )


def prefers_row_maxima(rows: int, Lq: int, arch: Architecture, choice: RowMaximaChoice) -> str | None:
    """Return the reason why the generic kernel is faster than `maxsim_row_maxima_sm90`, or None."""
    row_limit, pairs = sm90_configs.SM90_TILE_ROWS // 2, arch.processors // 2
    one_is_enough = Lq > sm90_configs.MAX_WHOLE_QUERY_TOKENS
    return _prefer(
        (rows <= row_limit, f"slower for at most {row_limit} query rows"),
        (not one_is_enough and choice.pairs < pairs, f"slower for fewer than {pairs} {_PAIRS}"),
    )


def copies_token_scales(C: Sm90Config) -> bool:
    """Return whether TMA copies scales of the tokens of encoded documents, as `copies_scales` of the kernels says."""
    if get_code_bits(C.ENCODING):
        return C.SMALL_M and not is_rotated(C.ENCODING)
    return C.ENCODING in ("", "fp8_fp8")


def supports_encoded(Q: Tensor, data: Tensor, scale: Tensor, choice: Sm90Choice) -> str | None:
    """Return the reason why `maxsim_forward_sm90` cannot serve dense int8, FP8 or code documents, or None.

    The documents have no mask. The call neither normalizes nor returns an argmax, and fits `supports_sm90_call`. TMA
    reads scales of single tokens, so they have to exist for all tokens. FP8 scales may have any strides, and so may
    scales of code documents with many query rows.

    Args:
        Q: query tokens `[Nq, Lq, d]`.
        data: encoded documents `[Nd, Ld, d]`, or the bytes or words of codes.
        scale: scales `[Nd, Ld]`, with sizes of 1 for a scale that tokens share.
        choice: the configuration of the kernel.
    """
    (Nq, K, Lq, Ld), d, C = make_size_args(Q, data), Q.shape[-1], choice.config
    assert isinstance(C, Sm90Config)
    nbits = get_code_bits(C.ENCODING)
    has_fp8 = C.ENCODING != "" and not nbits
    each_token = scale.shape[1] > 1 and copies_token_scales(C)
    odd_scales = each_token and (scale.shape[0] != data.shape[0] or not scale.is_contiguous())
    counts = choice.row_tiles * K, Nq * choice.parts * C.ROWS_PER_QUERY, K * Ld
    return _find_reason(
        (has_fp8 and Q.dtype not in HALF_DTYPES, f"FP8 documents with {Q.dtype} queries"),
        (odd_scales, "scales of tokens that are not contiguous, or that documents share"),
        (each_token and Ld % 4, "scales of tokens with Ld no multiple of 4"),
        (Lq < 2, "Lq < 2"),
        (Ld < C.BN, f"documents have fewer than {C.BN} tokens"),
        (d > 128, "d > 128"),
        (d % 16, "d is no multiple of 16"),
        (nbits and d != 128, "codes with d != 128"),
        (max(counts) >= 2**31, "2^31 or more rows, tokens, or (row tile, document) pairs"),
        (4 * nbits * K * Ld >= 2**31, "2^31 or more words of codes"),  # TMA has 32-bit coordinates of words
        (not supports_descriptor(data), "TMA cannot read D: it is not contiguous"),
    )


def prefers_encoded(K: int, arch: Architecture, choice: Sm90Choice) -> str | None:
    """Return the reason why `maxsim_forward_packed` is preferred for dense int8, FP8 or code documents, or None."""
    pair_limit = arch.processors // 2
    return _prefer((choice.row_tiles * K < pair_limit, f"slower for fewer than {pair_limit} {_PAIRS}"))


def supports_soft_gradients(
    Q: Tensor, D: Tensor, d_mask: Tensor | None, normalize: bool, arch: Architecture
) -> str | None:
    """Return the reason why the sm_90 kernels of soft gradients cannot serve a call, or None."""
    return supports_sm90_call(Q, D, arch) or _find_reason(
        (Q.dtype != torch.bfloat16, f"the dtype is {Q.dtype}, not bf16"),
        (Q.shape[-1] > 128, "d > 128"),
        (normalize, "`normalize`"),
        (d_mask is not None, "documents have a mask"),
        (not supports_descriptor(D), _NO_DESCRIPTOR),
        (D.data_ptr() % 16, "D does not start at a multiple of 16 bytes"),
        (load_module(SOFT_MODULE) is None, _NO_GLUON),
    )


def supports_soft_tokens(Q: Tensor, q_mask: Tensor | None) -> str | None:
    """Return the reason why the sm_90 kernel of soft document gradients cannot read the queries, or None."""
    return _find_reason(
        (q_mask is not None, "queries have a mask"),
        (not supports_descriptor(Q) or Q.data_ptr() % 16, "TMA cannot read Q"),
    )
