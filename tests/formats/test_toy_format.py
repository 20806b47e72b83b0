"""Test a format that lik_ops lacks, with two features in a byte, with the steps of CONTRIBUTING.md."""

import pytest
import torch

import lik_ops
from lik_ops import reference
from lik_ops.formats import table as format_table

from ..support.common import PLACE_IDS, PLACES

triton = pytest.importorskip("triton", reason="its device code is in Triton")
pytest.importorskip("safetensors", reason="corpora are files of it")
import triton.language as tl  # noqa: E402

from lik_ops.csrc_triton.common.primitives import load_tokens  # noqa: E402


@triton.jit
def load_nibbles(ptr, t, c0, d, D, C: tl.constexpr):
    """Load features from c0 on of tokens `t`. The first feature of a byte is in the lower half."""
    x = load_tokens(ptr, t, t >= 0, c0 // 2 + tl.arange(0, C.BD // 2), tl.cdiv(d, 2), D, C.WIDE_OFFSETS)
    x = (x[:, :, None] >> (4 * tl.arange(0, 2)).to(tl.uint8)[None, None, :]) & 15
    return tl.reshape(x, (t.shape[0], C.BD)).to(tl.int8) - 8


def encode(x, inverse):
    numbers = torch.nn.functional.pad((x * inverse).nan_to_num(0).round() + 8, (0, x.shape[-1] % 2), value=8)
    low, high = numbers.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def decode(data, d):
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)[..., :d].to(torch.int8) - 8, 1.0


NIBBLES = format_table.Format(torch.uint8, 7, features_per_element=2, kernel=load_nibbles, encode=encode, decode=decode)


@pytest.mark.parametrize("place", PLACES, ids=PLACE_IDS)
@pytest.mark.parametrize(("d", "normalize"), [(24, False), (33, True), (144, False)])
def test_format_added_to_the_table_scores_and_searches(place, d, normalize, monkeypatch, tmp_path):
    monkeypatch.setitem(format_table.FORMATS, "nibbles", NIBBLES)
    Q, D = torch.randn(3, 5, d, device=place.device), torch.randn(4, 9, d, device=place.device)
    made = lik_ops.quantize(D, "nibbles")
    assert made.data.shape == (4, 9, (d + 1) // 2) and (made.dequantize() - D).abs().max() <= D.abs().max() / 13
    expected, winners = reference.maxsim_with_argmax(Q.double(), made.dequantize(torch.float64), normalize=normalize)
    ends = torch.arange(0, 37, 9, device=place.device)
    corpus = lik_ops.Corpus.create(tmp_path / "corpus", d=d, dtype=torch.float32, format="nibbles")
    corpus.append(list(D.cpu()))
    with place.use(), torch.no_grad():
        scores, argmax = lik_ops.maxsim_with_argmax(Q, made, normalize=normalize)
        packed = lik_ops.quantize(D.flatten(0, 1), "nibbles", cu_seqlens_d=ends)
        again = lik_ops.maxsim_varlen(Q, packed, None, ends, normalize=normalize)
        found = [lik_ops.retrieve(Q, documents, 2, normalize=normalize) for documents in (made, corpus)]
    torch.testing.assert_close(scores, expected.float())
    assert torch.equal(argmax, winners) and torch.equal(again, scores)
    assert all(
        torch.equal(best, scores.gather(1, at)) and torch.equal(best, scores.topk(2).values) for best, at in found
    )
