"""Test that each invalid argument of each public function raises a short error that names the argument."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import lik_ops

Nq, Nd, K, Lq, Ld, d = 2, 3, 3, 4, 5, 8
Q3, D3, D4 = torch.randn(Nq, Lq, d), torch.randn(Nd, Ld, d), torch.randn(Nq, K, Ld, d)
CU_Q, CU_D = torch.arange(Nq + 1) * Lq, torch.arange(Nd + 1) * Ld
MASKS = {"q_mask": torch.ones(Nq, Lq, dtype=torch.bool), "d_mask": torch.ones(Nd, Ld, dtype=torch.bool)}
WEIGHT = {"q_weight": torch.ones(Nq, Lq)}
OPTIONS = {"normalize": False, "backward": "auto"}
DENSE = {"Q": Q3, "D": D3, **MASKS, **WEIGHT, **OPTIONS, "recompute": False}
SAVE = {**DENSE, "save": None}
FORMULA = {name: value for name, value in DENSE.items() if name not in ("backward", "recompute")}
PACKED = {"Q": Q3.flatten(0, 1), "D": D3.flatten(0, 1), "q_weight": torch.ones(Nq * Lq), **OPTIONS}
BOUNDS = {"cu_seqlens_q": CU_Q, "cu_seqlens_d": CU_D}
LISTED = {"doc_offsets": torch.zeros(Nq, K, dtype=torch.long), "doc_lengths": torch.ones(Nq, K, dtype=torch.long)}
PAIRS = {"pairs": torch.tensor([[0, 0], [1, 2]])}
PADDED = {"query_lengths": torch.tensor([1, Lq]), "doc_lengths": torch.ones(Nq, K, dtype=torch.long)}
PADDED |= {"Q": Q3, "D": D4, **WEIGHT, **OPTIONS}
STREAM = {"chunk": None, "normalize": False, "progress": None}
SEARCH = {"top_k": 2, **STREAM, "largest": True, "sorted": True}
WARM = {"device": "cpu", "dtype": torch.float32, "d": 4, "Lq": 3, "Nq": 1, "Ld": 4, "Nd": 2, "top_k": 1}
POOLING = {"method": "hierarchical", "metric": "rows", "num_protected": 1, "normalize": True}
HEAD = {"H": torch.randn(Nd, Ld, 6), "W": torch.randn(d, 6), "b": torch.randn(d)}
CODED = lik_ops.quantize(D3, lik_ops.ResidualCodec.train(D3, nbits=4, n_centroids=2))
FLAGS = ("candidates", "q_mask", "d_mask", "q_weight", "normalize", "argmax", "training", "ragged")

# Valid calls. Together they pass every argument of every function.
CALLS: dict[str, list[dict]] = {
    "maxsim": [SAVE],
    "maxsim_pairs": [{**SAVE, "D": D3[:Nq], "d_mask": MASKS["d_mask"][:Nq]}],
    "maxsim_with_argmax": [DENSE],
    "maxsim_soft": [{**FORMULA, "temperature": 0.5}, {**FORMULA, "temperature": torch.tensor(0.5)}],
    "maxsim_cross_entropy": [
        {**FORMULA, "labels": torch.tensor([2, 0]), "temperature": tau, "ignore_index": -100, "reduction": "mean"}
        for tau in (0.5, torch.tensor(0.5))
    ],
    "maxsim_from_hidden": [{"Q": Q3, **HEAD, **MASKS, **WEIGHT, "normalize": True}],
    "maxsim_varlen": [PACKED | BOUNDS],
    "maxsim_candidates_varlen": [{**PACKED, **LISTED, "cu_seqlens_q": CU_Q}],
    "maxsim_pair_list": [
        {**PACKED, **PAIRS, **BOUNDS, "max_seqlen_q": Lq},
        {"Q": Q3, "D": D3, **PAIRS, **MASKS, **WEIGHT, **OPTIONS},
    ],
    "maxsim_padded": [PADDED],
    "pack": [{"sequences": [Q3[0], D3[0]]}],
    "unpack": [{"packed": Q3.flatten(0, 1), "cu_seqlens": CU_Q}],
    "pack_padded": [{name: PADDED[name] for name in ("Q", "D", "query_lengths", "doc_lengths")}],
    "lengths_to_mask": [{"lengths": CU_Q, "L": 3}],
    "maxsim_token_topk": [{"Q": Q3, "D": D3, "top_k": 2, **MASKS, **WEIGHT, "normalize": False, "reduction": "mean"}],
    "maxsim_xtr": [{"Q": Q3, "D": D3, "top_k": 2, **MASKS, **WEIGHT, "normalizer": "positive"}],
    "chamfer_distance": [
        {
            **{"P": Q3, "R": D3[:Nq], "metric": "l1", "p_weight": torch.ones(Nq, Lq), "r_weight": torch.ones(Nq, Ld)},
            **{"p_lengths": torch.tensor([1, Lq]), "r_lengths": torch.tensor([Ld, 0])},
        }
    ],
    "pool_tokens": [
        {"D": D3, "factor": 2, "d_mask": MASKS["d_mask"], **POOLING},
        {"D": D3, "factor": 2.5, "doc_lengths": torch.full((Nd,), Ld), **POOLING},
        {"D": D3.flatten(0, 1), "factor": 3, "cu_seqlens_d": CU_D, **POOLING},
    ],
    "similarity_map": [
        {"Q": Q3[0], "D": D3, "q_mask": MASKS["q_mask"][0], "d_mask": MASKS["d_mask"], "normalize": False}
    ],
    "retrieve": [
        {"subset": torch.tensor([True] * Nd), "return_argmax": False, "Q": Q3, "D": D3, **MASKS, **WEIGHT, **SEARCH},
        {"Q": Q3, "D": D3.flatten(0, 1), "cu_seqlens_d": CU_D, **SEARCH},
        {"Q": Q3, "D": D3.numpy(), **MASKS, **WEIGHT, **SEARCH},
        {"Q": Q3, "D": D3.flatten(0, 1).numpy(), "cu_seqlens_d": CU_D, **SEARCH},
        {"Q": Q3, "D": lik_ops.quantize(D3), **MASKS, **WEIGHT, **SEARCH},
        {"Q": Q3, "D": CODED, **WEIGHT, "top_k": 2, "n_probe": 1, "n_candidates": 2},
        {"Q": Q3, "D": D3, **MASKS, **WEIGHT, **SEARCH, "coarse": lik_ops.quantize(D3), "n_candidates": 2},
    ],
    "plaid_approx_score": [
        {"Q": Q3, "D": CODED, **MASKS, **WEIGHT, "normalize": False, "n_probe": 1},
        {"Q": Q3, "D": CODED[torch.ones(D3.shape[:2], dtype=torch.bool)], "cu_seqlens_d": CU_D},
    ],
    "quantize": [
        {"D": D3, "format": "int8", "scale": "token", "d_mask": MASKS["d_mask"], "query": "int8"},
        {"D": D3.flatten(0, 1), "format": "binary", "scale": "document", "cu_seqlens_d": CU_D},
    ],
    "Quantized": [
        {
            **{"data": D3.byte(), "scale": D3[..., 0], "format": "uint8", "d": D3.shape[-1], "dtype": torch.float32},
            **{"minimum": D3[..., 0], "error": D3[:, 0, 0], "norm": D3[:, 0, 0]},
        },
        {name: getattr(CODED, name) for name in ("data", "scale", "format", "d", "dtype", "codes", "codec")},
        {
            **{"data": D3.char(), "scale": D3[..., 0], "format": "int8", "d": D3.shape[-1], "dtype": torch.float32},
            "query": "int8",
        },
    ],
    "maxsim_streamed": [
        {"Q": Q3, "D": D3, **MASKS, **WEIGHT, **STREAM},
        {"Q": Q3, "D": D3.flatten(0, 1), "cu_seqlens_d": CU_D, **STREAM},
        {"Q": Q3, "D": D3.numpy(), **MASKS, **WEIGHT, **STREAM},
        {"Q": Q3, "D": D3.flatten(0, 1).numpy(), "cu_seqlens_d": CU_D, **STREAM},
    ],
    "warmup": [{**WARM, **dict.fromkeys(FLAGS, False), "backward": "auto"}],
    "use_backend": [{"name": "portable"}],
    "checks": [{"enabled": True}],
    "norm_warning": [{"enabled": True}],
    "MaxSimScorer": [{"normalize": False, "backward": "auto", "recompute": False, "save": None, "pad_id": 0}],
    "MaxSimScorer.forward": [{"Q": Q3, "D": D3, **MASKS, **WEIGHT}],
}
for twin in ("varlen", "candidates_varlen", "pair_list", "padded"):
    CALLS[f"maxsim_{twin}_with_argmax"] = CALLS[f"maxsim_{twin}"]


class Sized:
    """Sized object whose `__len__` raises."""

    def __len__(self) -> int:
        raise RuntimeError("no length")


WRONG = {
    "None": lambda right: None,
    "str": lambda right: "no",
    "numbers": lambda right: [0, 3],
    "dict": lambda right: {"a": 1},
    "generator": lambda right: (x for x in ()),
    "array": lambda right: np.ones(_shape(right), dtype=np.float32),
    "long array": lambda right: np.arange(5000),
    "masked array": lambda right: np.ma.masked_array(np.ones(_shape(right), dtype=bool)),
    "masked array of floats": lambda right: np.ma.masked_array(np.ones(_shape(right), dtype=np.float32)),
    "float": lambda right: 1.5,
    "negative": lambda right: -1,
    "huge": lambda right: 10**30,
    "bool": lambda right: True,
    "complex": lambda right: torch.ones(_shape(right), dtype=torch.complex64),
    "bool tensor": lambda right: torch.ones(_shape(right), dtype=torch.bool),
    "sparse": lambda right: _tensor(right).to_sparse(),
    "quantized": lambda right: torch.quantize_per_tensor(torch.ones(_shape(right)), 0.1, 0, torch.qint8),
    "meta": lambda right: _tensor(right).to("meta"),
    "other dtype": lambda right: torch.ones(_shape(right), dtype=torch.float8_e5m2),
    "0-dim": lambda right: _tensor(right).new_zeros(()),
    "6-dim": lambda right: _tensor(right)[(None,) * (6 - _tensor(right).dim())],
    "no length": lambda right: Sized(),
    "empty list of lists": lambda right: [[]],
    "list of arrays": lambda right: [np.ones((4, 8), dtype=np.float32)],
}


def _tensor(right):
    return right if isinstance(right, torch.Tensor) else torch.ones(2, 3)


def _shape(right):
    return tuple(_tensor(right).shape)


# Values that are valid after all, keyed by argument name, or by function and argument name.
FLAG, OPTIONAL = {"bool"}, {"None"}
DENSE = (  # functions of tokens that may be arrays or lists
    *("maxsim", "maxsim_with_argmax", "maxsim_pairs", "maxsim_soft", "maxsim_cross_entropy", "maxsim_token_topk"),
    *("maxsim_xtr", "maxsim_from_hidden", "similarity_map", "retrieve", "maxsim_streamed", "MaxSimScorer.forward"),
    "plaid_approx_score",
)
ALLOWED: dict[str | tuple[str, str], set[str]] = {
    **{name: {"None", "bool tensor"} for name in ("q_mask", "d_mask")},
    **{name: OPTIONAL for name in ("q_weight", "save", "cu_seqlens_q", "cu_seqlens_d", "chunk", "max_seqlen_q")},
    "temperature": {"float", "huge", "0-dim"},
    **{name: FLAG for name in ("normalize", "recompute", "enabled", "largest", "sorted")},
    **{("warmup", name): FLAG for name in FLAGS},
    ("maxsim_cross_entropy", "labels"): OPTIONAL,
    ("maxsim_cross_entropy", "ignore_index"): {"negative"},
    "b": OPTIONAL,
    ("MaxSimScorer", "pad_id"): OPTIONAL,
    **{("Quantized", name): OPTIONAL for name in ("error", "norm")},
    **{("retrieve", name): OPTIONAL for name in ("coarse", "n_candidates", "n_probe")},
    ("plaid_approx_score", "n_probe"): OPTIONAL | {"huge"},
    **{("chamfer_distance", f"{x}_{name}"): OPTIONAL for x in "pr" for name in ("weight", "lengths")},
    ("retrieve", "subset"): OPTIONAL | {"bool tensor"},
    ("retrieve", "return_argmax"): FLAG,
    ("pool_tokens", "factor"): {"float", "huge"},
    ("pool_tokens", "doc_lengths"): OPTIONAL,
    ("quantize", "D"): {"meta"},
    **{(name, "progress"): FLAG | OPTIONAL for name in ("retrieve", "maxsim_streamed")},
    **{(name, x): {"array", "list of arrays"} for name in DENSE for x in "QDH"},
    **{(name, "W"): {"array"} for name in DENSE},
    **{(name, x): OPTIONAL | {"array", "long array"} for name in DENSE for x in ("b", "q_weight", "cu_seqlens_d")},
    **{(name, "D"): {"array"} for name in ("retrieve", "maxsim_streamed")},
    **{(name, "Q"): {"meta", "array", "list of arrays"} for name in ("retrieve", "maxsim_streamed")},
    ("unpack", "packed"): {"complex", "bool tensor", "quantized", "meta", "other dtype"},
    ("pack", "sequences"): {"complex", "bool tensor", "quantized", "meta", "other dtype", "6-dim"},
    ("lengths_to_mask", "lengths"): {"meta", "0-dim", "6-dim"},
}


def _callable(function):
    if function == "MaxSimScorer.forward":
        return lik_ops.MaxSimScorer().forward
    return getattr(lik_ops, function)


def _calls(function, right, **changes):
    found = _callable(function)(**{**right, **changes})
    if function in ("checks", "norm_warning", "use_backend"):
        with found:
            pass


CASES = [
    (function, number, name) for function, rights in CALLS.items() for number, x in enumerate(rights) for name in x
]


def test_every_argument_of_every_function_is_in_the_table():
    # Invalid corpora, codecs, and indexes have their own tests: `test_residual` and `test_index_files`.
    elsewhere = {"Corpus", "ResidualCodec", "Index", "read_index", "write_index"}
    functions = {n for n in lik_ops.__all__ if callable(getattr(lik_ops, n))} - elsewhere
    assert functions == {name for name in CALLS if "." not in name}
    for name, rights in CALLS.items():
        assert set(inspect.signature(_callable(name)).parameters) == {n for right in rights for n in right}, name


@pytest.mark.parametrize("function", CALLS)
def test_table_calls_are_valid(function):
    for right in CALLS[function]:
        _calls(function, right)


def _describe_problem(function, right, name, value, is_allowed):
    """Return a description of the problem if `value` raises no error or an unclear one, else None."""
    try:
        _calls(function, right, **{name: value})
    except (TypeError, ValueError) as error:
        message, prefix = str(error), "maxsim: " if function == "MaxSimScorer.forward" else f"{function}: "
        named = message.startswith(prefix) and (is_allowed or name in message)  # else it may name a conflicting one
        return None if named and len(message) < 300 else f"{type(error).__name__}: {message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if is_allowed else "accepted"


@pytest.mark.parametrize("function, number, name", CASES)
def test_invalid_value_error_is_short_and_names_argument(function, number, name):
    right = CALLS[function][number]
    allowed = ALLOWED.get((function, name), ALLOWED.get(name, set()))
    found = {
        kind: _describe_problem(function, right, name, make(right[name]), kind in allowed)
        for kind, make in WRONG.items()
    }
    assert not {kind: x[:150] for kind, x in found.items() if x is not None}


BROADCAST = {
    "a row": lambda right: _tensor(right)[:1],
    "a column": lambda right: _tensor(right)[..., :1],
    "one less axis": lambda right: _tensor(right)[0],
}
REFERENCE = {
    "maxsim": FORMULA,
    "maxsim_with_argmax": FORMULA,
    "maxsim_pairs": {**FORMULA, "D": D3[:Nq], "d_mask": MASKS["d_mask"][:Nq]},
    "maxsim_soft": {**FORMULA, "temperature": torch.tensor(0.5)},
    "maxsim_from_hidden": {"Q": Q3, **HEAD, **MASKS, **WEIGHT, "normalize": True},
    "maxsim_at": {
        "Q": Q3,
        "D": D3,
        "argmax": torch.zeros(Nq, Nd, Lq, dtype=torch.long),
        **WEIGHT,
        "normalize": False,
    },
}


@pytest.mark.parametrize("function", REFERENCE)
def test_reference_rejects_invalid_arguments(function):
    right, score = REFERENCE[function], getattr(lik_ops.reference, function)
    score(**right)
    for name, value in right.items():
        for kind, make in {**WRONG, **BROADCAST}.items():
            if kind in ALLOWED.get(name, ()):
                continue
            with pytest.raises(Exception):  # noqa: B017  (torch's own where there is one)
                score(**{**right, name: make(value)})
                pytest.fail(f"{name}: {kind}")


def test_maxsim_functions_reject_corpus(tmp_path):
    pytest.importorskip("safetensors")
    corpus = lik_ops.Corpus.create(tmp_path / "corpus", d, torch.float32)
    for function in (lik_ops.maxsim, lik_ops.maxsim_pairs, lik_ops.maxsim_with_argmax, lik_ops.maxsim_varlen):
        with pytest.raises(TypeError, match=rf"^{function.__name__}: D: expected a Tensor, got Corpus"):
            function(Q3, corpus)
