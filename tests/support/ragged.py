"""Random ragged batches for tests, and the reference of each of their pairs alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lik_ops import reference
from lik_ops.core.segments import RaggedArgs

NAN, INF = float("nan"), float("inf")
KINDS = ("cross", "candidates", "pairs")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LENGTHS = (3, 0, 40, 1, 7), (5, 0, 1, 70, 2, 31)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def dtypes_of(device):
    """Return the tested dtypes of a device."""
    return (torch.bfloat16, torch.float32, torch.float64) if device == "cpu" else (torch.bfloat16, torch.float32)


@dataclass
class Batch:
    """Packed queries and documents, with the pairs that `kind` selects."""

    Q: Tensor
    D: Tensor
    cu_q: Tensor
    cu_d: Tensor
    q_mask: Tensor | None
    d_mask: Tensor | None
    weight: Tensor | None
    kind: str
    chosen: Tensor  # documents of each query [Nq, K], or pairs [P, 2]
    normalize: bool

    @property
    def offsets(self) -> Tensor:
        """Return the first row of each document in the layout."""
        return self.cu_d[:-1][self.chosen] if self.kind == "candidates" else self.cu_d[:-1]

    @property
    def lengths(self) -> Tensor:
        """Return the length of each document in the layout."""
        return self.cu_d.diff()[self.chosen] if self.kind == "candidates" else self.cu_d.diff()

    def ragged(self) -> RaggedArgs:
        """Return the batch as operator arguments."""
        pairs = self.chosen if self.kind == "pairs" else None
        tensors = self.cu_q, self.offsets, self.lengths, pairs, self.q_mask, self.d_mask, self.weight
        return RaggedArgs(self.Q, self.D, *tensors)

    def call(self, argmax_dtype=torch.int32, **changes) -> tuple[Tensor, Tensor]:
        """Return the scores and argmax of the forward operator, with `changes` to its arguments."""
        tensors = self.ragged()._replace(**changes)
        longest = int(self.cu_q.diff().max()) if self.cu_q.numel() > 1 else 0
        return torch.ops.lik.maxsim_ragged_fwd(*tensors, self.normalize, argmax_dtype, longest, "auto")

    def cells(self):
        """Return the index, query, and document of each score."""
        if self.kind == "pairs":
            return [((p,), int(i), int(j)) for p, (i, j) in enumerate(self.chosen)]
        if self.kind == "candidates":
            return [((i, k), i, int(j)) for i, own in enumerate(self.chosen) for k, j in enumerate(own)]
        return [((i, j), i, j) for i in range(self.cu_q.numel() - 1) for j in range(self.cu_d.numel() - 1)]

    def leaves(self) -> list[Tensor]:
        """Return the tensors that may have a gradient."""
        return [t for t in (self.Q, self.D, self.weight) if t is not None]

    def alone(self, i: int, j: int, Q: Tensor, D: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the reference of one pair of fp64 tokens."""
        q, x = slice(self.cu_q[i], self.cu_q[i + 1]), slice(self.cu_d[j], self.cu_d[j + 1])
        masks = [None if m is None else m[part] for m, part in ((self.q_mask, q), (self.d_mask, x))]
        weight = None if weight is None else weight[q]
        return reference.maxsim_with_argmax(Q[q], D[x], *masks, q_weight=weight, normalize=self.normalize)

    def clean(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tokens and weights in fp64, with masked ones set to zero."""
        Q, D = self.Q.detach().double(), self.D.detach().double()
        weight = None if self.weight is None else self.weight.detach().double()
        if self.q_mask is not None:
            Q = torch.where(self.q_mask[:, None], Q, 0)
            weight = None if weight is None else torch.where(self.q_mask, weight, 0)
        return Q, D if self.d_mask is None else torch.where(self.d_mask[:, None], D, 0), weight


def build(
    q_lengths,
    d_lengths,
    kind="cross",
    d=16,
    dtype=torch.float32,
    device="cpu",
    options=True,
    normalize=False,
    exact=True,
) -> Batch:
    """Return a batch from torch's seed. Masked tokens and weights hold NaN and inf."""

    def draw(rows: int) -> Tensor:
        return (torch.randint(-2, 3, (rows, d)).double() if exact else torch.randn(rows, d).double()).to(dtype)

    Nq, Nd = len(q_lengths), len(d_lengths)
    Q, D = draw(sum(q_lengths)), draw(sum(d_lengths))
    cu_q, cu_d = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (q_lengths, d_lengths))
    chosen = torch.zeros(0, 2, dtype=torch.int64)
    if kind == "candidates":
        chosen = torch.randint(0, max(Nd, 1), (Nq, 5 if Nd else 0))
    elif kind == "pairs" and Nq and Nd:
        chosen = torch.stack([torch.randint(0, n, (20,)) for n in (Nq, Nd)], 1)
    masks = [None, None]
    weight = None
    if options:
        masks = [torch.rand(x.shape[0]) < 0.7 for x in (Q, D)]
        weight = torch.randint(-2, 4, Q.shape[:1]).to(torch.float64 if dtype == torch.float64 else torch.float32)
        for x, mask in zip((Q, D), masks, strict=True):
            x[~mask] = NAN
            x[::2][~mask[::2]] = INF
        weight[~masks[0]] = NAN
    moved = [None if t is None else t.to(device) for t in (Q, D, cu_q, cu_d, *masks, weight)]
    return Batch(*moved, kind, chosen.to(device), normalize)


def winners_of(b: Batch, argmax: Tensor, index: tuple[int, ...], i: int) -> Tensor:
    """Return the argmax of a cell from the operator's layout."""
    first, last = int(b.cu_q[i]), int(b.cu_q[i + 1])
    return argmax[index[-1], : last - first] if b.kind == "pairs" else argmax[index[-1], first:last]


def same_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert equal values, with NaN equal to NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
