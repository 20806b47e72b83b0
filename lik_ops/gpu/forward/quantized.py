"""Quantized documents on a GPU.

The kernel of packed tokens reads encoded documents and multiplies similarities by scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.segments import PackedArgs
from ...core.settings import get_forced_kernel, require_unforced
from ...csrc_triton.common.arguments import CodecDequantArgs, DequantArgs, KernelConfig
from ...csrc_triton.formats.encoded import maxsim_keep_int8, maxsim_unit_counts
from ...formats.table import FP8_QUERIES, OPERAND_FORMATS, EncodedTokens
from .. import choose
from ..runtime import launcher
from ..runtime.arguments import (
    architecture,
    check_grid,
    choose_row_offset_width,
    get_feature_reach,
    is_tf32_allowed,
    make_document_args,
    make_packed_document_args,
    use_device,
)
from ..runtime.capture import Calls
from ..tuning.architectures import Architecture, cdiv, next_power_of_2
from ..tuning.forward_configs import MAX_INT8_FEATURES
from . import sm90_quantized
from .packed import ragged_plan
from .query_rotation import transform_queries

_TILE_TOKENS, _TILE_FEATURES = 32, 64
# The integers that hold eight features, by the bits of a feature.
_WORD_DTYPES = {"1": torch.int8, "2": torch.int16, "4": torch.int32}
_captured_calls = Calls()
FP8_ARCHITECTURES = ("sm_89", "sm_90", "sm_100", "sm_120")


def forward_quantized(
    tensors: Sequence, stored: EncodedTokens, normalize: bool, argmax_dtype: torch.dtype | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Return the scores and the argmax of a ragged operator.

    Args:
        tensors: the tensors of the operator. D is a placeholder that only carries the token count.
        stored: the encoded documents with one token axis.
        normalize: whether tokens are normalized.
        argmax_dtype: dtype of the argmax, or None without an argmax.
        max_seqlen_q: maximum number of tokens of a query.
    """
    data = stored.data.view(*tensors[1].shape[:-1], stored.data.shape[1])
    c = PackedArgs.from_tensors((transform_queries(stored, tensors[0]), data, *tensors[2:]), max_seqlen_q).for_kernel()
    scores, argmax = _run_packed(c, stored, normalize, argmax_dtype)
    return scores, c.Q.new_empty(0, dtype=torch.int32) if argmax is None else argmax


def find_quantized_plan(c: PackedArgs, stored: EncodedTokens, normalize: bool, argmax_dtype: torch.dtype | None) -> Any:
    """Return the plan of a dense kernel for a packed call, or False if no dense kernel supports the call."""
    if stored.format not in choose.DENSE_FORMATS or c.candidates or normalize or argmax_dtype:
        return False
    if not (c.cu_seqlens_q is None and c.offsets is None and c.pairs is None and c.d_mask is None):
        return False
    return sm90_quantized.find_plan(c, stored)


def forward_quantized_cut(
    c: PackedArgs, stored: EncodedTokens, normalize: bool, argmax_dtype: torch.dtype | None, plan: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Return scores, and the argmax or None, of a packed call.

    Args:
        c: the call. Its D is the encoded data.
        stored: the encoded documents with their axes.
        normalize: whether tokens are normalized.
        argmax_dtype: dtype of the argmax, or None without an argmax.
        plan: the result of `find_quantized_plan`, if known.
    """
    if plan is None:
        plan = find_quantized_plan(c, stored, normalize, argmax_dtype)
    if plan:
        scores = plan.forward(c.Q, stored, c.q_mask, c.q_weight)
        if scores is not None:
            return scores, None
    Q = transform_queries(stored, c.Q)  # before the capture: with many rows, PyTorch rotates them
    c = c if Q is c.Q else c._replace(Q=Q)
    if c.candidates or c.pairs is not None:  # few calls have the same number of candidates or pairs
        return _run_packed(c, stored, normalize, argmax_dtype)
    scales = stored.scale, stored.minimum, *stored[4:]
    key = (*c.metadata(*scales), stored.format, normalize, argmax_dtype, is_tf32_allowed(c.Q.dtype))
    outputs = _captured_calls.run(
        key, (*c.tensors, *scales), c.Q.device, _run_forward, c, stored, normalize, argmax_dtype
    )
    return outputs[0], outputs[1] if argmax_dtype else None


def _run_forward(
    c: PackedArgs, stored: EncodedTokens, normalize: bool, argmax_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Return the scores and, if requested, the argmax, as a sequence of new tensors."""
    scores, argmax = _run_packed(c, stored, normalize, argmax_dtype)
    return (scores,) if argmax is None else (scores, argmax)


def _run_packed(
    c: PackedArgs, stored: EncodedTokens, normalize: bool, argmax_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return scores and argmax of the packed kernel."""
    if get_forced_kernel() == "sm90":
        call = choose.QuantizedChoiceArgs(c, stored, normalize, bool(argmax_dtype), architecture(c.Q.device))
        choose.apply_rules(choose.QUANTIZED_RULES, call)
        require_unforced("a tensor does not start at a multiple of 16 bytes, or the kernel does not compile")
    stored = _choose_query_format(stored.flatten(), c.Q)
    data, encoding = view_for_kernel(c.D, stored.format, architecture(c.Q.device))
    c, counts = c._replace(D=data), make_dequant_args(stored)
    if normalize:
        counts = _normalize_dequant_args(c, counts, encoding)
    if (words := _view_words(stored, c, encoding)) is not None:
        c, encoding = c._replace(D=words[0]), words[1]
    return ragged_plan(c, normalize, argmax_dtype, encoding, counts).forward(c, counts)


def _choose_query_format(stored: EncodedTokens, Q: Tensor) -> EncodedTokens:
    """Return the tokens in a format whose kernel reads Q."""
    if stored.format != FP8_QUERIES or choose.rounds_to_fp8(stored.format, Q):
        return stored
    return stored._replace(format="fp8_e4m3")


def view_for_kernel(data: Tensor, format: str, arch: Architecture) -> tuple[Tensor, Any]:
    """Return the encoded data as the kernel reads it, and `KernelConfig.ENCODING`."""
    operand = OPERAND_FORMATS[format]
    if operand.dtype.is_floating_point and arch.name in FP8_ARCHITECTURES:
        return data.view(operand.dtype), "fp8_fp8" if format == FP8_QUERIES else "fp8"
    return data, operand.kernel


def _supports_prmt(device: torch.device) -> bool:
    """Return whether kernels can contain `prmt` as inline assembly."""
    return architecture(device).name.startswith("sm_")


def _view_words(stored: EncodedTokens, c: PackedArgs, encoding: Any) -> tuple[Tensor, str] | None:
    """Return codes as words of eight features each and their encoding, or None if the kernel reads bytes.

    See `csrc_triton.formats.residual` and `csrc_triton.formats.bits`.
    """
    (Q, data), centroids, mma = c[:2], stored.centroids, architecture(c.Q.device).unit == "mma"
    name, nbits, query = _split_encoding(encoding)
    if Q.shape[-1] > MAX_INT8_FEATURES:
        query = ""  # rows stay whole
    word = _WORD_DTYPES.get(nbits)
    if word is None or not data.numel() or not _supports_prmt(Q.device):
        return None
    if Q.shape[-1] % 8 or not data.is_contiguous() or data.data_ptr() % word.itemsize:
        return None
    if not query:
        if Q.dtype not in (torch.float16, torch.bfloat16):
            return None
        if name == "codes" and not _has_centroid_pairs(centroids):
            return None
        # Triton orders the terms of mma.sync by the narrowest loaded type, and here the order would differ from bytes.
        if name == "bits" and nbits == "1" and mma:
            return None
    return data.view(word), ("words" if name == "codes" else "bitwords") + nbits + query


def _split_encoding(encoding: Any) -> tuple[str, str, str]:
    """Return the name of a code, its bits, and the suffix for query rows of int8 terms, such as "_half", if any."""
    for name in ("bits", "codes"):
        if isinstance(encoding, str) and encoding.startswith(name):
            return name, encoding[len(name)], encoding[len(name) + 1 :]
    return "", "", ""


def _has_centroid_pairs(centroids: Tensor | None) -> bool:
    """Return whether centroids can be read as pairs of fp16 numbers."""
    if centroids is None or not len(centroids):
        return False
    return centroids.dtype == torch.float16 and centroids.data_ptr() % 4 == 0


def make_dequant_args(stored: EncodedTokens) -> DequantArgs | CodecDequantArgs:
    """Return the dequantization arguments, which must be contiguous."""
    scale, minimum = stored.scale.contiguous(), None if stored.minimum is None else stored.minimum.contiguous()
    args = DequantArgs(
        scale, int(scale.shape[0] != 1), minimum, None if minimum is None else int(minimum.shape[0] != 1)
    )
    if stored.codes is None or stored.centroids is None or stored.weights is None:
        return args
    codes, centroids, weights = (x.contiguous() for x in (stored.codes, stored.centroids, stored.weights))
    return CodecDequantArgs(*args, codes, centroids, len(centroids), weights)


def make_token_config(d: int, wide: int, encoding: Any = "", *, normalize: bool) -> KernelConfig:
    """Return the configuration of `maxsim_unit_counts`, or without `normalize` of `maxsim_keep_int8`."""
    BD = min(max(next_power_of_2(d), 16), _TILE_FEATURES)
    rows = KernelConfig(BM=16, BN=_TILE_TOKENS, BD=BD, ROWS_PER_QUERY=16, SINGLE_STEP=d <= BD)
    return rows._replace(NORMALIZE=normalize, WIDE_OFFSETS=wide, ENCODING=encoding)


def _normalize_dequant_args(
    c: PackedArgs, counts: DequantArgs | CodecDequantArgs, encoding: Any
) -> DequantArgs | CodecDequantArgs:
    """Return the dequantization arguments divided by the norms of the tokens."""
    scales = [None if x is None else x.new_empty(c.Td, dtype=torch.float32) for x in (counts.scale, counts.minimum)]
    d = c.Q.shape[-1]
    wide = choose_row_offset_width(get_feature_reach(c.Q, c.D))
    config = make_token_config(d, wide, encoding, normalize=True)
    if c.Td:
        with use_device(c.Q.device):
            grid = check_grid(cdiv(c.Td, _TILE_TOKENS))
            args = (make_packed_document_args(c), counts, *scales, c.Td, d, config)
            launcher.launch(maxsim_unit_counts, grid, args, {"num_warps": 4})
    return counts._replace(
        scale=scales[0], scale_stride=1, minimum=scales[1], minimum_stride=None if scales[1] is None else 1
    )


def keep_int8(D: Tensor) -> tuple[Tensor, Tensor]:
    """Return document tokens ``[Nd, Ld, d]`` or ``[Nq, K, Ld, d]`` as int8, and the scale of each token."""
    data = torch.empty(D.shape, dtype=torch.int8, device=D.device)
    scale = torch.empty(D.shape[:-1], dtype=torch.float32, device=D.device)
    if scale.numel():
        K, Ld, d = D.shape[-3:]
        config = make_token_config(d, choose_row_offset_width(get_feature_reach(D, D)), normalize=False)
        args = make_document_args(D, None), data, scale, scale.numel() // Ld, K, Ld, d, config
        with use_device(D.device):
            launcher.launch(maxsim_keep_int8, check_grid(cdiv(scale.numel(), _TILE_TOKENS)), args, {"num_warps": 4})
    return data, scale
