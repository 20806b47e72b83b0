"""Problems with quantized documents and the error bounds of their scores, for kernel tests."""

import dataclasses

import torch

from lik_ops import reference
from lik_ops.core.segments import RaggedArgs
from lik_ops.formats.rotation import make_rotation
from lik_ops.formats.table import (
    ALL_FORMATS,
    FP8_QUERIES,
    INT8_QUERIES,
    OPERAND_FORMATS,
    RESIDUAL_FORMATS,
    EncodedTokens,
    decode_tokens,
    lookup_bucket_weights,
)
from lik_ops.gpu import backend
from lik_ops.portable import backend as portable

from .common import INTERPRETING
from .residual import quantize

# The interpreter computes an argmax one element at a time.
QUERIES, DOCUMENTS = ((3, 0, 18), (5, 0, 9, 20)) if INTERPRETING else ((3, 1, 0, 20, 70, 33), (5, 0, 1, 40, 170, 2))
ROUNDING = 1e-6
# Rounding of residual code tokens and of rotated queries to the query dtype on a GPU. With fp16 centroids, sums and
# weights are rounded before.
HALVES = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0, torch.float64: 0.0}
TERMS = 1 / (2 * 127 * 254)  # half a step of two terms, relative to the largest feature of a query row, see `stored`
ONE_TERM = (1 + 2.0**-12) / (2 * 127)  # half a step of one term; rounding itself is off by 2^-22 of 127 steps


@dataclasses.dataclass
class Problem:
    """Packed queries, quantized documents, and the scored pairs."""

    r: RaggedArgs
    stored: EncodedTokens
    meetings: list  # (query, document, position among the scores)

    def forward(self, of=backend, normalize=False, argmax_dtype=torch.int32):
        """Return the scores and argmax of a backend."""
        most = int(self.r.cu_seqlens_q.diff().max()) if self.r.pairs is not None else 0
        return of.forward_quantized(self.r, self.stored, normalize, argmax_dtype, most)

    def to(self, device):
        """Return the problem on another device."""
        r, stored = ([x.to(device) if isinstance(x, torch.Tensor) else x for x in y] for y in (self.r, self.stored))
        return Problem(RaggedArgs(*r), EncodedTokens(*stored), self.meetings)

    def numbers(self):
        """Return the stored codes of all tokens in fp64."""
        s, d = self.stored, self.r.Q.shape[1]
        if s.codes is not None:
            codes = torch.where((s.codes >= 0) & (s.codes < len(s.centroids)), s.codes, 0).long()
            return (
                s.centroids[codes].double()
                + lookup_bucket_weights(s.data, s.weights, RESIDUAL_FORMATS[s.format].nbits)[:, :d]
            )
        one = torch.ones(1, device=self.stored.data.device)
        return decode_tokens(s.data, one, None, s.format, d).double()

    def tokens(self):
        """Return the dequantized tokens in fp64."""
        s = self.stored
        x = self.numbers() * s.scale.double()[:, None]
        if OPERAND_FORMATS[s.format].rotated:
            return x @ make_rotation(x.shape[1], x.device).T
        return x if s.minimum is None else x + s.minimum.double()[:, None]

    def part(self, i, j):
        """Return the slices of a query and a document."""
        first, last = (int(n) for n in self.r.cu_seqlens_q[i : i + 2])
        begin, length = int(self.r.d_offsets.view(-1)[j]), int(self.r.d_lengths.view(-1)[j])
        return slice(first, last), slice(begin, begin + length)

    def winners(self, argmax, i, at):
        """Return the argmax of query `i` for the score at `at`."""
        rows, _ = self.part(i, 0)
        return argmax[at, : rows.stop - rows.start] if self.r.pairs is not None else argmax[at[1], rows]


def as_stored(made):
    """Return the encoded tokens with byte data in the dtype that kernels read."""
    return made.to_flat_encoded()._replace(data=made.data.view(ALL_FORMATS[made.format].bytes))


def spread(packed, rows, total):
    """Return token data at `rows` of `total` rows. Rows between them would make scores NaN or wrong."""
    if packed is None or (packed.shape[0] == 1 and packed.dim() == 1 and len(rows) != 1):
        return packed
    fill = float("nan") if packed.dtype.is_floating_point else 127
    out = torch.full((total, *packed.shape[1:]), fill, dtype=packed.dtype, device=packed.device)
    out[rows] = packed
    return out


def problem(mode, dtype, d, format, scale="token", options=False, queries=QUERIES, documents=DOCUMENTS):
    """Return a random problem of a layout and a document format."""
    Q, D = torch.randn(sum(queries), d), torch.randn(sum(documents), d) * (0.2 + torch.rand(sum(documents), 1))
    q_mask, d_mask = (torch.rand(len(x)) > 0.3 if options else None for x in (Q, D))
    cu = torch.tensor([0, *documents]).cumsum(0)
    scale = "token" if format in RESIDUAL_FORMATS else scale
    s = as_stored(quantize(D, format, scale, d_mask=d_mask, cu_seqlens_d=cu))
    # Two tokens before each document and after the last belong to no document.
    gap = torch.cat([torch.arange(2, n + 2) + int(cu[j]) + 2 * j for j, n in enumerate(documents)])
    total = sum(documents) + 2 * (len(documents) + 1)
    offsets, lengths = cu[:-1] + 2 * torch.arange(1, len(documents) + 1), cu.diff()
    if options:
        Q[~q_mask] = float("nan")
        data, one = s.data.clone(), s.scale.numel() == 1
        data[~d_mask] = 127
        per_token = [x if x is None or one else x.masked_fill(~d_mask, torch.nan) for x in (s.scale, s.minimum)]
        codes = None if s.codes is None else s.codes.masked_fill(~d_mask, -5)
        d_mask = spread(d_mask.to(torch.uint8), gap, total) != 0  # tokens outside documents are not masked
        s = s._replace(data=data, scale=per_token[0], minimum=per_token[1], codes=codes)
    each = {name: spread(getattr(s, name), gap, total) for name in ("data", "scale", "minimum", "codes")}
    stored = s._replace(**each)
    weight, pairs = torch.randn(len(Q)) if options else None, None
    if mode == "cross":
        meetings = [(i, j, (i, j)) for i in range(len(queries)) for j in range(len(documents))]
    elif mode == "candidates":
        chosen = torch.randint(len(documents), (len(queries), 3))
        offsets, lengths = offsets[chosen], lengths[chosen]
        meetings = [(i, 3 * i + k, (i, k)) for i in range(len(queries)) for k in range(3)]
    else:
        pairs = torch.stack([torch.randint(len(n), (9,)) for n in (queries, documents)], 1)
        meetings = [(i, j, n) for n, (i, j) in enumerate(pairs.tolist())]
    bounds, D = torch.tensor([0, *queries]).cumsum(0), torch.empty(()).to(dtype).expand(total, d)
    r = RaggedArgs(Q.to(dtype), D, bounds, offsets, lengths, pairs, q_mask, d_mask, weight)
    return Problem(r, stored, meetings)


def get_query_step_bound(p):
    """Return the error bound of query features relative to the largest feature of a row."""
    steps = {"int8": TERMS, INT8_QUERIES: ONE_TERM, "bits1_half": TERMS, "bits1_int8": ONE_TERM}
    steps |= {f"bits{nbits}_rotated": TERMS for nbits in (1, 2, 4)}
    return steps.get(OPERAND_FORMATS[p.stored.format].kernel, 0) if p.r.Q.shape[1] <= 256 else 0


def bounds_of(p, q, x, tokens, normalize):
    """Return the error bound of the similarity of each row and token."""
    s = p.stored
    scale, minimum = (None if y is None else y.double().expand(len(p.r.D))[tokens] for y in (s.scale, s.minimum))
    n, rotated = p.numbers()[tokens].abs(), OPERAND_FORMATS[s.format].rotated
    if rotated:
        q = q @ make_rotation(q.shape[1], q.device)
    sizes = q.abs() @ (n * scale[:, None]).T
    if minimum is not None:
        sizes = sizes + q.abs().sum(1)[:, None] * minimum.abs()
    bound = (ROUNDING + (HALVES[p.r.Q.dtype] if s.codes is not None or rotated else 0)) * sizes
    if s.codes is not None and s.centroids.dtype == torch.float16:
        largest = s.weights.double().abs().amax()
        bound = bound + 2.0**-11 * (q.abs() @ ((n + largest) * scale[:, None]).T)
    if s.format == FP8_QUERIES and p.r.Q.dtype != torch.float32 and q.shape[1] <= 128:
        # Half a step of 4 bits, or of the smallest numbers, and sums of 14 bits on FP8 tensor cores.
        bound = bound + sizes * (1 / 16 + 1 / 64) + q.abs().amax(1, keepdim=True) * (n.sum(1) * scale) * 2.0**-17
    if step := get_query_step_bound(p):
        bound = bound + step * q.abs().amax(1, keepdim=True) * (n.sum(1) * scale)
    if normalize:
        bound = bound / q.norm(dim=1).clamp_min(1e-12)[:, None] / x.norm(dim=1).clamp_min(1e-12)
    return bound


def dtypes(place):
    """Return the dtypes of a place without fp64."""
    return [dtype for dtype in place.dtypes if dtype != torch.float64]


def assert_right(p, scores, argmax, normalize):
    """Assert that scores are within the rounding of the formula, and each argmax within rounding of the best."""
    tokens, r, nothing = p.tokens(), p.r, torch.zeros(())
    for i, j, at in p.meetings:
        rows, part = p.part(i, j)
        q, x = r.Q[rows].double(), tokens[part]
        q_keep, x_keep = (None if m is None else m[n] for m, n in ((r.q_mask, rows), (r.d_mask, part)))
        q, x = (y if m is None else torch.where(m[:, None], y, 0) for y, m in ((q, q_keep), (x, x_keep)))
        weight = None if r.q_weight is None else r.q_weight[rows].double()
        score, won = reference.maxsim_with_argmax(q, x, q_keep, x_keep, q_weight=weight, normalize=normalize)
        if not score.isfinite() or not len(q) or not len(x):
            assert scores[at].item() == score.item(), (i, j)
            continue
        off = bounds_of(p, q, x, part, normalize)
        if x_keep is not None:
            off = off.where(x_keep, 0)
        off = off.amax(1)
        counted = off if weight is None else off * weight.abs()
        allowed = counted.where(q_keep, nothing.to(off)).sum() if q_keep is not None else counted.sum()
        error = (scores[at].double() - score).abs() / (allowed + ROUNDING * score.abs() + 1e-30)
        assert error <= 1, (i, j, float(scores[at]), float(score), float(error))
        if argmax is None:
            continue
        found = p.winners(argmax, i, at).long()
        assert torch.equal(found < 0, won < 0), (i, j)
        if normalize:
            q, x = (y / y.norm(dim=1, keepdim=True).clamp_min(1e-12) for y in (q, x))
        S, kept = q @ x.T, won >= 0
        gap = S.gather(1, won.clamp(min=0)[:, None]) - S.gather(1, found.clamp(min=0)[:, None])
        assert (gap[kept, 0] <= 2 * off[kept]).all(), (i, j)


def assert_near_portable(p, scores, normalize):
    """Assert equal NaN and infinities. Other tests check the accuracy of other scores."""
    p = p.to("cpu")
    expected, _ = p.forward(portable, normalize)
    within = 0.05
    if OPERAND_FORMATS[p.stored.format].rotated and p.r.Q.dtype in HALVES:  # rotated queries are rounded
        sizes = [x.double().nan_to_num(0, 0, 0).norm(dim=1).max() for x in (p.r.Q, p.tokens())]
        within += len(p.r.Q) * HALVES[p.r.Q.dtype] * float(sizes[0] * sizes[1])
    torch.testing.assert_close(scores.cpu(), expected, rtol=1e-4, atol=within, equal_nan=True)
