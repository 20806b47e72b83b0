"""Test that each error names the function and the argument, and suggests the call that was probably intended."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import lik_ops

from .test_bad_input import CALLS as TABLE
from .test_bad_input import CODED, CU_D, CU_Q, D3, D4, LISTED, MASKS, PAIRS, Q3, WARM, WEIGHT, _callable, _tensor, d

CODEC = lik_ops.ResidualCodec.train(D3, nbits=4, n_centroids=2)
CODES, RESIDUALS = CODEC.encode(D3)
LIST = [D3[0], D3[1, :2]]
SCORER, IDS = lik_ops.MaxSimScorer(pad_id=0), {"Q": CU_Q[:2, None].expand(2, 4), "D": CU_D[:3, None].expand(3, 5)}

# More valid calls for the table: without optional arguments, with one query, with lists, and with codes.
MORE: dict[str, list[dict]] = {
    "maxsim": [{"Q": Q3[0], "D": D3[0]}, {"Q": LIST, "D": D3}, {"Q": Q3, "D": CODED}, {"Q": Q3, "D": D4[:2]}],
    "maxsim_pairs": [{"Q": LIST, "D": D3[:2]}],
    "maxsim_with_argmax": [{"Q": Q3[0], "D": LIST, "d_mask": None}, {"Q": LIST, "D": D3[0]}],
    "maxsim_varlen": [
        {"Q": Q3[0], "D": D3.flatten(0, 1), "cu_seqlens_d": CU_D, "q_weight": WEIGHT["q_weight"][0]},
        {"Q": Q3, "D": D3, "q_weight": None},
        {"Q": LIST, "D": LIST, "q_weight": [torch.ones(5), torch.ones(2)]},
    ],
    "maxsim_candidates_varlen": [
        {"Q": Q3[0], "D": D3.flatten(0, 1), **{name: x[0] for name, x in LISTED.items()}},
        {"Q": LIST, "D": D3.flatten(0, 1), **LISTED},
    ],
    "maxsim_pair_list": [{"Q": LIST, "D": LIST, "pairs": PAIRS["pairs"].clamp(max=1)}],
    "maxsim_padded": [{"Q": Q3, "D": D4, "query_lengths": CU_Q[:2], "doc_lengths": LISTED["doc_lengths"]}],
    "maxsim_soft": [{"Q": Q3, "D": D4, "temperature": 1.0}],
    "maxsim_cross_entropy": [{"Q": Q3, "D": D4}, {"Q": Q3, "D": D3}],
    "maxsim_from_hidden": [{"Q": Q3[0], "H": D3[0], "W": torch.eye(d)}],
    "maxsim_token_topk": [{"Q": Q3, "D": D4, "top_k": 2}],
    "maxsim_xtr": [{"Q": Q3[0], "D": D3[0], "top_k": 2}],
    "chamfer_distance": [{"P": Q3[0], "R": D3[0]}],
    "retrieve": [{"Q": Q3[0], "D": D3, "top_k": 1}, {"Q": Q3, "D": LIST, "top_k": 1}],
    "maxsim_streamed": [{"Q": Q3[0], "D": D3}, {"Q": Q3, "D": LIST}],
    "quantize": [{"D": D3[0], "format": "uint8"}, {"D": D3, "format": CODEC}],
    "Quantized": [{"data": D3[0].char(), "scale": D3[0, :, 0], "format": "int8", "d": d, "dtype": torch.float32}],
    "ResidualCodec": [{"centroids": D3[0], "weights": torch.ones(4), "cutoffs": torch.ones(3), "bit_order": "big"}],
    "ResidualCodec.train": [{"tokens": D3, "nbits": 4, "n_centroids": 2, "seed": 0}],
    "encode": [{"tokens": D3}],
    "decode": [{"codes": CODES, "residuals": RESIDUALS, "dtype": torch.float32}],
    "scales": [{"codes": CODES, "residuals": RESIDUALS}],
    "score": [{"Q": Q3, "D": D3, **MASKS}],
    "forward_with_ids": [{"Q": Q3, "D": D3, "q_ids": IDS["Q"], "d_ids": IDS["D"]}],
    "Quantized.of_codes": [{"codes": CODES, "residuals": RESIDUALS, "codec": CODEC, "dtype": torch.float32}],
    "Quantized.dequantize": [{"dtype": torch.float16}],
    "Index": [{"documents": lik_ops.quantize(D3.flatten(0, 1)), "cu_seqlens": CU_D}],
}
METHODS = {
    "ResidualCodec.train": lik_ops.ResidualCodec.train,
    "encode": CODEC.encode,
    "decode": CODEC.decode,
    "scales": CODEC.scales,
    "score": SCORER.score,
    "forward_with_ids": SCORER.forward_with_ids,
    "Quantized.of_codes": lik_ops.Quantized.of_codes,
    "Quantized.dequantize": CODED.dequantize,
}
PREFIX = {name: (f"ResidualCodec.{name}: ",) for name in ("encode", "decode", "scales")}
PREFIX |= dict.fromkeys(("MaxSimScorer.forward", "score", "forward_with_ids"), ("maxsim: ", "forward_with_ids: "))
SKIPPED = ("use_backend", "checks", "norm_warning")  # context managers
CALLS = {
    name: [*TABLE.get(name, []), *MORE.get(name, [])] for name in dict.fromkeys([*TABLE, *MORE]) if name not in SKIPPED
}
for twin in ("varlen", "candidates_varlen", "pair_list", "padded"):
    CALLS[f"maxsim_{twin}_with_argmax"] = CALLS[f"maxsim_{twin}"]


def _call(function, right, **changes):
    found = METHODS[function] if function in METHODS else _callable(function)
    return found(**{**right, **changes})


def _error(function, right, **changes):
    with pytest.raises((TypeError, ValueError)) as raised:
        _call(function, right, **changes)
    return str(raised.value)


def _of_rank(rank):
    def change(x):
        while x.dim() > rank:
            x = x[0]
        return x[(None,) * (rank - x.dim())].contiguous()

    return change


def _longer(axis):
    return lambda x: torch.cat([x, x.narrow(axis, 0, 1)], axis) if x.dim() > axis else x


def _matrix(x):
    return x.flatten(0, -2) if x.dim() > 1 else x.view(1, -1)


CHANGES = {
    **{f"{rank} axes": _of_rank(rank) for rank in range(6)},
    **{f"longer in axis {axis}": _longer(axis) for axis in range(3)},
    "longer in d": lambda x: torch.cat([x, x[..., :1]], -1) if x.dim() else x,
    "no rows": lambda x: x[:0] if x.dim() else x,
    "no features": lambda x: x[..., :0] if x.dim() else x,
    "floats": lambda x: x.float(),
    "doubles": lambda x: x.double(),
    "COO": lambda x: x.to_sparse(),
    "CSR": lambda x: x.to_sparse_csr() if x.dim() > 1 else _matrix(x).to_sparse_csr(),
    "CSR matrix": lambda x: _matrix(x).to_sparse_csr(),
    "CSC matrix": lambda x: _matrix(x).to_sparse_csc(),
    "BSR matrix": lambda x: _matrix(x).to_sparse_bsr((1, 1)),
    "oneDNN": lambda x: x.float().to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor(list(_matrix(x))),
    "jagged": lambda x: torch.nested.nested_tensor(list(_matrix(x)), layout=torch.jagged),
    "nested matrices": lambda x: torch.nested.nested_tensor([_matrix(x), _matrix(x)]),
    "meta": lambda x: x.to("meta"),
    "on the meta device": lambda x: _of_rank(3)(x).to("meta"),
    "list of vectors": lambda x: list(_matrix(x)),
    "list of matrices": lambda x: [_matrix(x), _matrix(x)[:1]],
    "0": lambda x: 0,
    "2^61": lambda x: 2**61,
    "an empty string": lambda x: "",
    "a path": lambda x: Path("somewhere"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", CALLS)
def test_every_error_begins_with_the_function(function):
    """Invalid layouts, ranks, sizes, and types of every argument never raise an error of torch or of an operator."""
    wrong, prefixes = [], PREFIX.get(function, (f"{function}: ",))
    for number, right in enumerate(CALLS[function]):
        _call(function, right)
        for name, (kind, change) in ((name, x) for name in right for x in CHANGES.items()):
            try:
                value = change(_tensor(right[name]))
            except RuntimeError:
                continue  # torch cannot change this tensor in this way
            try:
                _call(function, right, **{name: value})
            except (TypeError, ValueError) as error:
                if not str(error).startswith(prefixes) or len(str(error)) > 300:
                    wrong.append(f"{name}[{number}], {kind}: {error}")
            except Exception as error:
                wrong.append(f"{name}[{number}], {kind}: {type(error).__name__}: {error}"[:200])
    assert not wrong


TAKES_ARRAYS = {
    "plaid_approx_score",
    *("maxsim", "maxsim_with_argmax", "maxsim_pairs", "maxsim_soft", "maxsim_cross_entropy", "maxsim_token_topk"),
    *(
        "maxsim_xtr",
        "maxsim_from_hidden",
        "similarity_map",
        "retrieve",
        "maxsim_streamed",
        "MaxSimScorer.forward",
        "score",
    ),
}


@pytest.mark.parametrize("function", sorted(CALLS.keys() - TAKES_ARRAYS))
def test_array_error_suggests_from_numpy(function):
    for right in CALLS[function]:
        for name, x in right.items():
            if not isinstance(x, torch.Tensor):
                continue
            assert "got ndarray: convert it with torch.from_numpy" in _error(function, right, **{name: x.numpy()}), name
    lists = [(right, name) for right in CALLS[function] for name in right if isinstance(right[name], list)]
    for right, name in lists:
        message = _error(function, right, **{name: [x.numpy() for x in right[name]]})
        assert f"{name}[0]: expected a Tensor, got ndarray: convert it with torch.from_numpy" in message


def test_other_type_errors_do_not_suggest_from_numpy():
    for x in ([1.0], "text", np.ma.masked_array(np.ones((2, 3))), None):
        assert "from_numpy" not in _error("maxsim_soft", {"Q": Q3, "D": x, "temperature": 1.0})


@pytest.mark.parametrize("name", ("q_mask", "d_mask"))
@pytest.mark.parametrize("function", [name for name, rights in CALLS.items() if any("d_mask" in x for x in rights)])
def test_float_mask_error_suggests_comparison_with_zero(function, name):
    for right in CALLS[function]:
        if not isinstance(right.get(name), torch.Tensor):
            continue
        for dtype in (torch.float32, torch.bfloat16):
            message = _error(function, right, **{name: right[name].to(dtype)})
            assert message.endswith(f"got {dtype}: for a mask of ones and zeros pass {name} != 0")


@pytest.mark.parametrize("given", ("float16", "torch.float16", "half", np.float16, np.dtype("float16")))
def test_dtype_error_suggests_torch_dtype(given, tmp_path):
    calls = {
        "warmup": lambda: lik_ops.warmup(**{**WARM, "dtype": given}),
        "Quantized": lambda: lik_ops.Quantized(D3.char(), D3[..., 0], "int8", d, given),
        "Quantized.of_codes": lambda: lik_ops.Quantized.of_codes(CODES, RESIDUALS, CODEC, given),
        "Quantized.dequantize": lambda: CODED.dequantize(given),
        "ResidualCodec.decode": lambda: CODEC.decode(CODES, RESIDUALS, given),
        "Corpus.create": lambda: lik_ops.Corpus.create(tmp_path / "corpus", d, dtype=given),
    }
    for function, call in calls.items():
        with pytest.raises(TypeError, match=f"^{function}: dtype: expected float16, .*: pass torch.float16$"):
            call()
    with pytest.raises(TypeError, match=r"got str$"):
        lik_ops.warmup(**{**WARM, "dtype": "int8"})


@pytest.mark.parametrize("function", ("maxsim_varlen", "maxsim_pair_list"))
@pytest.mark.parametrize("twin", ("", "_with_argmax"))
def test_shape_error_mentions_cu_seqlens(function, twin):
    function, more = function + twin, PAIRS if "pair" in function else {}
    with pytest.raises(ValueError, match=re.escape("expected [Nd, Ld, d], or [Td, d] with cu_seqlens_d, got [15, 8]")):
        getattr(lik_ops, function)(Q3, D3.flatten(0, 1), **more)
    with pytest.raises(ValueError, match=re.escape("or [Tq, d] with cu_seqlens_q, got [1, 2, 4, 8]")):
        getattr(lik_ops, function)(Q3[None], D3, **more)
    with pytest.raises(ValueError, match=re.escape("D: expected [Td, d] with cu_seqlens_d, got [3, 5, 8]")):
        getattr(lik_ops, function)(Q3, D3, cu_seqlens_d=CU_D, **more)


def test_dense_function_errors_do_not_mention_cu_seqlens():
    for function in (lik_ops.maxsim, lik_ops.maxsim_pairs, lik_ops.maxsim_with_argmax):
        with pytest.raises(ValueError, match="D: expected") as raised:
            function(LIST, D3[None, None])
        assert "cu_seqlens" not in str(raised.value)


LISTS = {
    "maxsim": {},
    "maxsim_pairs": {},
    "maxsim_with_argmax": {},
    "maxsim_varlen": {},
    "maxsim_pair_list": PAIRS,
    "retrieve": {"top_k": 1},
    "maxsim_streamed": {},
}


@pytest.mark.parametrize("function", LISTS)
def test_wrong_d_error_shows_original_list_shapes(function):
    """The caller does not know the shape of the packed tensor, so the error must not show it."""
    call, more = getattr(lik_ops, function), LISTS[function]
    wide = [torch.randn(3, 9), torch.randn(4, 9)]
    jagged = torch.nested.nested_tensor(wide, layout=torch.jagged)
    searches = function in ("retrieve", "maxsim_streamed")
    for Q in (Q3,) if searches else (Q3, LIST):
        with pytest.raises(ValueError, match=re.escape(f"{function}: D[0]: expected d = {d} as in Q, got [3, 9]")):
            call(Q, wide, **more)
        expected = f"{function}: D: expected d = {d} as in Q, got a nested tensor [N, L, 9]"
        with pytest.raises(ValueError, match=re.escape(expected)):
            call(Q, jagged, **more)
    if not searches:
        with pytest.raises(ValueError, match=re.escape(f"{function}: Q[0]: expected d = {d} as in D, got [3, 9]")):
            call(wide, D3, **more)


def test_packed_weight_error_shows_original_shape():
    for weight in (torch.ones(3), torch.ones(2, 4)):
        expected = f"maxsim: q_weight: expected a list like Q, or packed [Tq] = [7], got {list(weight.shape)}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            lik_ops.maxsim(LIST, D3, q_weight=weight)


@pytest.mark.parametrize("function", ("retrieve", "maxsim_streamed"))
def test_path_error_suggests_corpus_open(function):
    for path in ("somewhere", Path("somewhere")):
        with pytest.raises(TypeError, match=rf"{function}: D: .*: open a corpus with lik_ops\.Corpus\.open$"):
            getattr(lik_ops, function)(Q3, path, *[3] * (function == "retrieve"))


def test_doc_offsets_error_shows_the_expected_shape():
    with pytest.raises(ValueError, match=re.escape("doc_offsets: expected [Nq, K] = [2, *], got [1, 3]")):
        lik_ops.maxsim_candidates_varlen(Q3, D3.flatten(0, 1), *[x[:1] for x in LISTED.values()])


def test_top_k_of_zero_returns_no_documents():
    """`top_k=0`, which docs/retrieval.md allows."""
    for options in ({}, {"largest": False}, {"coarse": lik_ops.quantize(D3)}):
        scores, indices = lik_ops.retrieve(Q3, D3, 0, **options)[:2]
        assert scores.shape == indices.shape == (2, 0) and indices.dtype == torch.int64


def test_lengths_to_mask_rejects_sizes_beyond_memory():
    with pytest.raises(ValueError, match=r"^lengths_to_mask: L: expected sizes that fit memory"):
        lik_ops.lengths_to_mask(torch.tensor([1]), 2**61)
    assert lik_ops.lengths_to_mask(torch.empty(0, dtype=torch.long), 3).shape == (0, 3)
    mask = torch.compile(lambda x: lik_ops.lengths_to_mask(x, x.shape[0]), backend="eager", dynamic=True)
    assert mask(torch.arange(3)).shape == (3, 3)


def test_codec_training_rejects_meta_tokens():
    with pytest.raises(ValueError, match=r"^ResidualCodec\.train: tokens: expected values"):
        lik_ops.ResidualCodec.train(D3.to("meta"))


def test_falsy_dtype_is_rejected():
    with pytest.raises(TypeError, match=r"^Quantized\.of_codes: dtype: expected float16, .* got int$"):
        lik_ops.Quantized.of_codes(CODES, RESIDUALS, CODEC, 0)


def test_float_ids_are_rejected():
    with pytest.raises(TypeError, match=r"^forward_with_ids: q_ids: expected .*, got torch\.float32$"):
        SCORER.forward_with_ids(Q3, D3, IDS["Q"].float(), IDS["D"])


def test_sparse_index_is_rejected():
    with pytest.raises(
        TypeError, match=r"^Quantized: index: expected a dense \(strided\) tensor, got layout torch.sparse"
    ):
        CODED[torch.ones(2, dtype=torch.long).to_sparse()]
