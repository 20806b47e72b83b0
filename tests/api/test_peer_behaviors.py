"""Test behaviors that other MaxSim libraries get wrong or pin in their own tests, on every layout.

Tests named ``test_defect_*`` cover defects of peers. Tests named ``test_pinned_*`` cover requirements of the peers' own
tests. Both kinds for serving are in `test_peer_serving`. Other test modules cover these behaviors:

| behavior | tests |
| --- | --- |
| no frozen side costs a buffer or a kernel | `test_portable`, `test_training_cost`: ``test_a_frozen_side_costs_*`` |
| no size triggers another compilation | `test_launches_gpu`: ``test_other_sizes_do_not_recompile``; `test_compile` |
| calls and steps capture in CUDA graphs | `test_launches_gpu`, `test_stack`: ``*cuda_graph*`` |
| opcheck of every operator | ``python -m lik_ops.opcheck``, `opcheck/tests` |
| random configurations of every entry point and dtype | `test_semantics`, `test_ragged`: hypothesis |
| invalid values and types of every ragged argument | `test_ragged_fuzz`, `test_checks` |
| the last document of a dense tensor beyond 2^31 elements | `test_semantics` |

Some peers differ from the contract of `docs/semantics.md`. A NaN among kept similarities gives NaN here and -inf there.
Empty documents score -inf here, and 0 or an error there. Argmax values are int64 and -1 for padding here, int32 and 0
there. Document formats are tested in `test_quantized` and `test_residual`.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize as normalized

import lik_ops
from lik_ops import reference

from ..support.ragged import DEVICES, INF


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def entry_points(Q: Tensor, D: Tensor, **options) -> dict[str, Tensor]:
    """Return the scores ``[Nq, Nd]`` of dense tokens from every function that computes them, by name."""
    (Nq, Lq, d), (Nd, Ld) = Q.shape, D.shape[:2]
    cu_q, cu_d = (torch.arange(n + 1, device=Q.device) * length for n, length in ((Nq, Lq), (Nd, Ld)))
    at = cu_d[:-1].expand(Nq, -1)
    pairs = torch.cartesian_prod(torch.arange(Nq), torch.arange(Nd)).view(-1, 2).to(Q.device)
    packed_q, packed_d = Q.reshape(-1, d), D.reshape(-1, d)
    lengths = torch.full((Nq,), Lq, device=Q.device), torch.full((Nq, Nd), Ld, device=Q.device)
    cu = {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d}
    found = {
        "maxsim": lik_ops.maxsim(Q, D, **options),
        "with_argmax": lik_ops.maxsim_with_argmax(Q, D, **options)[0],
        "candidates": lik_ops.maxsim(Q, D.expand(Nq, -1, -1, -1), **options),
        "varlen": lik_ops.maxsim_varlen(packed_q, packed_d, cu_q, cu_d, **options),
        "candidates_varlen": lik_ops.maxsim_candidates_varlen(Q, packed_d, at, torch.full_like(at, Ld), **options),
        "pair_list": lik_ops.maxsim_pair_list(packed_q, packed_d, pairs, **cu, max_seqlen_q=Lq, **options).view(Nq, Nd),
        "padded": lik_ops.maxsim_padded(Q, D.expand(Nq, -1, -1, -1), *lengths, **options),
    }
    if Nq and Nd:
        found["lists"] = lik_ops.maxsim(list(Q), list(D), **options)
    return found


# Defects: precision.


def test_defect_fp32_scores_have_fp32_accuracy(device):
    """Peers have errors of 1.7e-4 from half precision, and return NaN and 0 for large and small inputs."""
    for scale in (1.0, 1e6, 1e-8):
        Q, D = (
            normalized(torch.randn(n, length, 128, device=device), dim=-1) * scale for n, length in ((2, 9), (3, 70))
        )
        expected = reference.maxsim(Q.double(), D.double())
        for name, scores in entry_points(Q, D).items():
            torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_defect_gradients_match_fp32_across_upstream_scales(dtype, device):
    """Half-precision gradients are the fp32 result rounded once. A peer loses 1e-7 and overflows at 1e5."""
    Q, D = (torch.randint(-2, 3, shape, device=device).float() for shape in ((2, 9, 16), (3, 20, 16)))
    exact = []
    for x in (Q, D), (Q.to(dtype), D.to(dtype)):
        leaves = [t.clone().requires_grad_() for t in x]
        for scale in (1e-9, 1e-7, 1.0, 1e5):
            for name, scores in entry_points(*leaves).items():
                if name in ("candidates", "padded"):
                    continue  # torch sums the gradients of expanded tensors, in their own dtype
                found = torch.autograd.grad(scores, leaves, torch.full_like(scores, scale), retain_graph=True)
                exact.append([g.double() for g in found])
    count = len(exact) // 2
    for fp32, half in zip(exact[:count], exact[count:], strict=True):
        for e, h in zip(fp32, half, strict=True):
            torch.testing.assert_close(
                h,
                e.to(dtype).double(),
                rtol=2**-7 if dtype == torch.bfloat16 else 2**-10,
                atol=1e-7 if dtype == torch.float16 else 0,
            )


def test_defect_entry_points_agree(device):
    """A peer's packed scores are NaN for bf16 tokens of 1e5, although its padded scores are correct."""
    for dtype, scale in ((torch.bfloat16, 1e5), (torch.float16, 60.0), (torch.float32, 1.0)):
        Q, D = (torch.randn(n, 11, 32, device=device).mul(scale).to(dtype) for n in (3, 4))
        for normalize in (False, True):
            found = entry_points(Q, D, normalize=normalize)
            expected = found.pop("maxsim")
            assert expected.isfinite().all()
            for name, scores in found.items():
                tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-5 * scale**2}
                torch.testing.assert_close(scores, expected, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_defect_gradients_accumulate_in_fp32(dtype, device):
    """4096 queries each add 1 to one token. Half-precision sums stop at 2048 or 256."""
    Q = torch.ones(4096, 1, 16, dtype=dtype, device=device)
    D = torch.ones(1, 1, 16, dtype=dtype, device=device, requires_grad=True)
    for name, scores in entry_points(Q, D).items():
        (grad,) = torch.autograd.grad(scores.sum(), D)
        assert grad.eq(4096).all(), name


# Defects: offsets.


def test_defect_offsets_beyond_32_bits(device):
    """Score the last document of a store beyond 2^31 rows. The store is an expanded row and needs no memory."""
    rows = 2**31 + 50
    store = torch.randn(1, 8, device=device).expand(rows, 8)
    Q = torch.randn(2, 3, 8, device=device)
    at = torch.tensor([[rows - 5, 0], [rows - 9, rows - 4]], device=device)
    length = torch.tensor([[5, 5], [9, 5]], device=device)
    scores, argmax = lik_ops.maxsim_candidates_varlen_with_argmax(Q, store, at, length)
    expected = lik_ops.maxsim(Q, store[:5])
    torch.testing.assert_close(scores[:, 0], expected)
    assert scores[1, 1].isnan() and argmax[0].eq(0).all() and argmax[1, 1].eq(-1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["varlen", "candidates", "pair_list"])
def test_defect_the_last_packed_document_beyond_2_31_elements(name):
    """Peers access memory illegally at 100k x 180 x 128."""
    Nd, Ld, d = 95_000, 180, 128
    D = torch.randn(Nd * Ld, d, device="cuda", dtype=torch.bfloat16)
    assert D.numel() > 2**31
    Q, cu_d = torch.randn(1, 32, d, device="cuda", dtype=torch.bfloat16), torch.arange(Nd + 1, device="cuda") * Ld
    if name == "varlen":
        scores = lik_ops.maxsim_varlen(Q, D, None, cu_d)[0]
    elif name == "candidates":
        scores = lik_ops.maxsim_candidates_varlen(Q, D, cu_d[None, :-1], torch.full_like(cu_d[None, :-1], Ld))[0]
    else:
        documents = torch.arange(Nd, device="cuda")
        scores = lik_ops.maxsim_pair_list(Q, D, torch.stack([documents * 0, documents], 1), cu_seqlens_d=cu_d)
    for j in (0, Nd // 2, Nd - 2, Nd - 1):
        expected = reference.maxsim(Q[0].double(), D[j * Ld : (j + 1) * Ld].double())
        torch.testing.assert_close(scores[j].double(), expected, rtol=1e-5, atol=1e-4)


# Defects: masks and lengths.


def test_defect_masks_with_holes(device):
    """An adapter passes mask sums to a peer as lengths and gets 9.479 instead of 9.238."""
    Q, D = torch.randn(2, 5, 8, device=device), torch.randn(3, 9, 8, device=device)
    q_mask, d_mask = (torch.arange(n, device=device) % 3 != 1 for n in (5, 9))
    q_mask, d_mask = q_mask.expand(2, -1), d_mask.expand(3, -1)
    kept = lik_ops.maxsim(
        [q[m] for q, m in zip(Q, q_mask, strict=True)], [x[m] for x, m in zip(D, d_mask, strict=True)]
    )
    pairs = torch.cartesian_prod(torch.arange(2), torch.arange(3)).to(device)
    torch.testing.assert_close(lik_ops.maxsim(Q, D, q_mask, d_mask), kept)
    torch.testing.assert_close(lik_ops.maxsim_pair_list(Q, D, pairs, q_mask, d_mask).view(2, 3), kept)


@pytest.mark.parametrize("Lq", [9, 130])
def test_defect_query_lengths_hold_at_every_batch_size(Lq, device):
    """A peer ignores lengths below 500 pairs and above 128 tokens, so results change with the batch size."""
    Q, D = torch.randn(1, Lq, 8, device=device), torch.randn(600, 5, 8, device=device)
    lengths, one = torch.tensor([4], device=device), torch.full((1, 600), 5, device=device)
    expected = lik_ops.maxsim(Q[:, :4].contiguous(), D)
    for count in (1, 3, 499, 600):
        scores = lik_ops.maxsim_padded(Q, D[None, :count], lengths, one[:, :count])
        torch.testing.assert_close(scores, expected[:, :count])


def test_defect_masks_do_not_broadcast(device):
    """A peer reads outside a mask of [1, Ld]."""
    Q, D = torch.randn(2, 5, 8, device=device), torch.randn(3, 9, 8, device=device)
    ones = torch.ones(1, 9, dtype=torch.bool, device=device)
    for function in (lik_ops.maxsim, lik_ops.maxsim_with_argmax):
        with pytest.raises(ValueError, match=r"d_mask: expected shape \[3, 9\] to match D \[3, 9, 8\], got \[1, 9\]"):
            function(Q, D, None, ones)
    with pytest.raises(ValueError, match=r"d_mask: expected shape \[3, 9\]"):
        lik_ops.maxsim_pair_list(Q, D, torch.tensor([[0, 0]], device=device), None, ones)


def test_defect_integer_masks_work_and_float_masks_raise(device):
    """A peer casts masks to int8, which inverts additive masks and treats 256 as masked."""
    Q, D = torch.randn(2, 5, 8, device=device), torch.randn(3, 9, 8, device=device)
    keep = torch.rand(3, 9, device=device) < 0.5
    expected = lik_ops.maxsim(Q, D, None, keep)
    torch.testing.assert_close(lik_ops.maxsim(Q, D, None, keep * 256), expected)
    pairs = torch.tensor([[1, 2]], device=device)
    torch.testing.assert_close(lik_ops.maxsim_pair_list(Q, D, pairs, None, keep * 256)[0], expected[1, 2])
    for mask in (torch.zeros(3, 9, device=device).masked_fill(~keep, -INF), keep.half()):
        for call in (lik_ops.maxsim, lambda q, x, *m: lik_ops.maxsim_pair_list(q, x, pairs, *m)):
            with pytest.raises(TypeError, match=r"d_mask: expected bool \(True = keep\) or an integer dtype"):
                call(Q, D, None, mask)


def test_defect_padding_does_not_clamp_scores_at_zero(device):
    Q, D = torch.ones(2, 3, 8, device=device), torch.full((3, 70, 8), -1.0, device=device)
    for name, scores in entry_points(Q, D).items():
        assert scores.eq(-24).all(), name
    ragged = lik_ops.maxsim(list(Q), [D[0], D[1, :1], D[2, :33]])
    assert ragged.eq(-24).all()


# Defects: bad input.


def test_defect_mismatched_d_raises(device):
    """Peers return garbage for mismatched feature sizes."""
    Q, D = torch.randn(2, 5, 8, device=device), torch.randn(2, 9, 16, device=device)
    index = torch.zeros(2, 2, dtype=torch.int64, device=device)
    for call in (
        lambda: lik_ops.maxsim(Q, D),
        lambda: lik_ops.maxsim_with_argmax(Q, D),
        lambda: lik_ops.maxsim_pairs(Q, D),
        lambda: lik_ops.maxsim_varlen(Q, D),
        lambda: lik_ops.maxsim_candidates_varlen(Q, D.flatten(0, 1), index, index),
        lambda: lik_ops.maxsim_pair_list(Q, D, index),
        lambda: lik_ops.maxsim_padded(Q, D[:, None], index[0], index[:, :1]),
        lambda: lik_ops.maxsim(list(Q), list(D)),
        lambda: lik_ops.retrieve(Q, D, 1),
        lambda: lik_ops.similarity_map(Q, D),
    ):
        with pytest.raises(ValueError, match=r"D(\[0\])?: expected d = 8 as in Q"):
            call()


ASCENDING = r"cu_seqlens_[qd]: expected ascending rows of [QD]"
BAD_LENGTHS = {
    "over-long": ([0, 3, 9], [0, 4, 8]),
    "negative": ([-1, 3, 6], [0, 4, 8]),
    "miscounted": ([0, 3, 6], [0, 4, 9]),
    "not monotonic": ([0, 3, 6], [5, 4, 8]),
}


@pytest.mark.parametrize("bad", BAD_LENGTHS)
def test_defect_invalid_offsets_score_nan_and_checks_raise(bad, device):
    """Peers read neighbors or past buffers. Here the score is NaN, and `checks` names the entry in an error."""
    cu_q, cu_d = (torch.tensor(x, device=device) for x in BAD_LENGTHS[bad])
    Q, D = torch.ones(6, 8, device=device), torch.ones(8, 8, device=device)
    scores = lik_ops.maxsim_varlen(Q, D, cu_q, cu_d)
    assert scores.isnan().any() and scores.eq(24).any()
    # Offsets that do not begin at 0 are reported as probable lengths first.
    is_gap = bad == "not monotonic"
    message = r"cu_seqlens_d: expected offsets from 0 to 8, the rows of D" if is_gap else ASCENDING
    with lik_ops.checks(), pytest.raises(ValueError, match=message):
        lik_ops.maxsim_varlen(Q, D, cu_q, cu_d)


def test_defect_invalid_pairs_dtypes_and_devices_raise(device):
    Q, D, pairs = (
        torch.randn(2, 5, 8, device=device),
        torch.randn(3, 9, 8, device=device),
        torch.tensor([[0, 3], [2, 0]]),
    )
    pairs = pairs.to(device)
    assert lik_ops.maxsim_pair_list(Q, D, pairs).isnan().all()
    for call, error, message in (
        (lambda: lik_ops.maxsim_pair_list(Q, D, pairs), ValueError, "pairs: expected a document, 0 <= j < 3, got 3"),
        (lambda: lik_ops.maxsim_pair_list(Q, D, pairs.float()), TypeError, "pairs: expected int32 or int64"),
        (lambda: lik_ops.maxsim(Q, D.half()), TypeError, "D: expected the dtype of Q"),
        (lambda: lik_ops.maxsim(Q.int(), D.int()), TypeError, "Q: expected float16, bfloat16, float32 or float64"),
        (lambda: lik_ops.maxsim(Q, D.to("meta")), ValueError, "D: expected the device of Q"),
    ):
        with lik_ops.checks(), pytest.raises(error, match=re.escape(message)):
            call()


def test_defect_strided_documents_match_the_reference(device):
    """A peer is off by 48.9 for non-contiguous tokens."""
    Q, D = torch.randn(2, 5, 16, device=device), torch.randn(3, 9, 16, device=device)
    wide = torch.randn(9, 3, 32, device=device)
    wide[:, :, ::2] = D.transpose(0, 1)
    expected = reference.maxsim(Q.double(), D.double())
    for scores in entry_points(Q, wide[:, :, ::2].transpose(0, 1)).values():
        torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_defect_chunk_below_one_raises(device):
    """A peer returns (None, None) for a chunk below one."""
    for chunk in (-1, 0):
        with pytest.raises(ValueError, match="chunk: expected 1 or more"):
            lik_ops.retrieve(torch.randn(2, 3, 8, device=device), torch.randn(4, 5, 8, device=device), 2, chunk=chunk)


def test_defect_backend_errors_propagate(monkeypatch):
    """A peer returns no hits if its kernel fails."""

    def fails(*args):
        raise RuntimeError("the kernel failed")

    from lik_ops.portable import backend as portable

    monkeypatch.setattr(portable, "forward_ragged", fails)
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    for call in (
        lambda: lik_ops.maxsim_varlen(Q, D),
        lambda: lik_ops.maxsim(list(Q), D),
        lambda: lik_ops.retrieve(Q, D.flatten(0, 1), 2, cu_seqlens_d=torch.arange(5) * 5),
    ):
        with pytest.raises(RuntimeError, match="the kernel failed"):
            call()


# Defects: empty sizes and limits.


@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (0, 0, 0, 0)])
def test_defect_empty_sizes_work(sizes, device):
    """Nq, Nd (B, C, K, P), Lq, or Ld of 0 work in forward and backward. Peers divide by zero, crash, or abort."""
    Nq, Nd, Lq, Ld = sizes
    Q, D = torch.randn(Nq, Lq, 8, device=device), torch.randn(Nd, Ld, 8, device=device)
    Q.requires_grad_(), D.requires_grad_()
    expected = torch.full((Nq, Nd), -INF if Lq and not Ld else 0.0, device=device)
    for name, scores in entry_points(Q, D).items():
        assert scores.shape == (Nq, Nd) and scores.dtype == torch.float32, name
        if not (Lq and Ld):
            assert torch.equal(scores, expected), name
        for x, g in zip((Q, D), torch.autograd.grad(scores, (Q, D), torch.ones_like(scores)), strict=True):
            assert g.shape == x.shape and g.eq(0).all(), name


def test_defect_every_argmax_element_is_written(device):
    """A peer writes gradients to garbage rows for d > 512 with query lengths."""
    Q, D = torch.randn(2, 9, 520, device=device), torch.randn(2, 3, 7, 520, device=device)
    lengths = torch.tensor([4, 0], device=device), torch.tensor([[7, 0, 2]] * 2, device=device)
    _, argmax = lik_ops.maxsim_padded_with_argmax(Q, D, *lengths)
    kept = torch.zeros(2, 3, 9, dtype=torch.bool, device=device)
    kept[0, ::2, :4] = True
    assert argmax[kept].ge(0).all() and argmax[~kept].eq(-1).all()
    assert (argmax.amax(-1) < lengths[1].clamp(min=1)).all()


@pytest.mark.parametrize("Lq", [1, 17, 31, 80, 81, 128, 129, 512, 1024])
def test_defect_any_number_of_query_tokens(Lq, device):
    """Peers fail at 17 to 31, above 80, and from 128 query tokens."""
    Q, D = (
        torch.randint(-2, 3, (2, Lq, 8), device=device).float(),
        torch.randint(-2, 3, (3, 19, 8), device=device).float(),
    )
    expected = reference.maxsim(Q, D)
    for name, scores in entry_points(Q, D).items():
        assert torch.equal(scores, expected), name


@pytest.mark.parametrize("d", [1, 8, 24, 48, 96, 130, 768, 2050])
def test_defect_any_number_of_features(d, device):
    """Peers fail to compile at 8 features, return garbage at 96, and run out of shared memory at 2050."""
    Q, D = (
        torch.randint(-2, 3, (2, 5, d), device=device).float(),
        torch.randint(-2, 3, (3, 19, d), device=device).float(),
    )
    expected = reference.maxsim(Q, D)
    for name, scores in entry_points(Q, D).items():
        assert torch.equal(scores, expected), name


def test_defect_2d_query_drops_the_query_axis(device):
    Q, D = torch.randn(5, 8, device=device), torch.randn(3, 9, 8, device=device)
    assert lik_ops.maxsim(Q, D).shape == reference.maxsim(Q, D).shape == lik_ops.MaxSimScorer()(Q, D).shape == (3,)
    assert lik_ops.maxsim(Q, list(D)).shape == (3,)
    assert [x.shape for x in lik_ops.maxsim_with_argmax(Q, D)] == [(3,), (3, 5)]
    assert [x.shape for x in lik_ops.maxsim_with_argmax(Q, list(D))] == [(3,), (3, 5)]
    assert [x.shape for x in lik_ops.retrieve(Q, D, 2)] == [(2,), (2,)]


# Defects: autograd.


def test_defect_gradients_are_bitwise_reproducible(device):
    """Peers ignore the deterministic flag or use atomic additions by default."""
    Q, D = (
        torch.randn(40, 32, 16, device=device, requires_grad=True),
        torch.randn(3, 50, 16, device=device, requires_grad=True),
    )
    for name in entry_points(Q, D):
        first, second = (torch.autograd.grad(entry_points(Q, D)[name].sum(), (Q, D)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), name
    if device == "cuda":
        torch.use_deterministic_algorithms(True)  # `tests/conftest.py` resets it
        scores = lik_ops.maxsim_varlen(Q, D, backward="unified")
        with pytest.raises(RuntimeError, match="deterministic"):
            scores.sum().backward()


@pytest.mark.parametrize("normalize", [False, True])
def test_defect_second_derivatives_raise(normalize, device):
    """A peer drops the term of D with normalize=True, and another peer returns a gradient without a graph."""
    Q, D = (torch.randn(n, 5, 8, device=device, requires_grad=True) for n in (2, 3))
    for name, scores in entry_points(Q, D, normalize=normalize).items():
        (grad,) = torch.autograd.grad(scores.sum(), Q, create_graph=True)
        with pytest.raises(NotImplementedError, match="no double backward"):
            grad.sum().backward()
            pytest.fail(name)


def test_defect_forward_mode_raises(device):
    """A peer's tangent is None."""
    Q, D = (torch.randn(n, 5, 8, device=device) for n in (2, 3))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, torch.ones_like(Q))
        for call in (lik_ops.maxsim, lik_ops.maxsim_varlen, lambda q, x: lik_ops.maxsim(q, list(x))):
            with pytest.raises(NotImplementedError, match="forward-mode AD"):
                call(dual, D)


@pytest.mark.parametrize("Lq", [16, 17])
def test_defect_no_grad_calls_skip_the_argmax(Lq, monkeypatch):
    """A peer keeps the argmax at Lq = 16."""
    from lik_ops.portable import backend as portable

    kept = []

    def watched(name):
        original = getattr(portable, name)

        def forward(*args):
            result = original(*args)
            kept.append(result[1].numel())
            return result

        return forward

    for name in ("forward", "forward_ragged"):
        monkeypatch.setattr(portable, name, watched(name))
    Q, D = torch.randn(2, Lq, 8, requires_grad=True), torch.randn(3, 5, 8)
    del (found := entry_points(Q, D))["with_argmax"]
    assert kept.count(0) == 0 and len(kept) == len(found) + 1
    kept.clear()
    with torch.no_grad():
        entry_points(Q, D)
    assert len(kept) - kept.count(0) == 1  # the one of `maxsim_with_argmax`
