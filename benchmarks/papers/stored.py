"""Documents that are stored in fewer bytes or in several lengths: int8 and FP8, residual codes, packed tokens."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import lik_ops
from lik_ops import reference

from ..operators import quantized
from ..retrieval import fidelity, staged
from ..support import common
from . import plan
from .dense import Dense, eager_fp32
from .problem import (
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    PaperContender,
    Problem,
    inside,
    missing,
    products_in,
)

TOP = 20
TOP_K = 10
PROBES = 8
PEER_SECONDS, PEER_ROUNDS = 90, 10


class QuantizedDocuments(Dense):
    """A dense forward, with documents in full precision, int8 or FP8."""

    def make(self, name: str) -> PaperContender | str:
        call = self._quantized(name)
        if call is None:
            return super().make(name)
        if isinstance(call, str):
            return call
        score = inside(torch.no_grad, call)
        return PaperContender(
            {"forward": lambda: score}, partial(self._quality, score), QUANTIZED_TOLERANCE, (self.x.Q, self.x.D)
        )

    def _quantized(self, name: str) -> Callable[[], Tensor] | str | None:
        """Return the call of a contender with quantized documents, None for other contenders."""
        Q, D = self.x.Q, self.x.D
        ours = {
            plan.OURS_INT8: ("int8", "token", "int8"),
            plan.OURS_INT8_DOCUMENT: ("int8", "document", "int8"),
            plan.OURS_FP8: ("fp8_e4m3", "token", "fp8"),
        }
        if name in ours:
            kept, scale, query = ours[name]
            made = lik_ops.quantize(D, kept, scale, query=query)  # type: ignore[arg-type]
            return lambda: lik_ops.maxsim(Q, made)
        if name == plan.DEQUANTIZED:
            made = lik_ops.quantize(D, "int8")
            with_tf32 = partial(products_in, True)
            return inside(with_tf32, lambda: eager_fp32(Q, made.dequantize(torch.float32)))  # type: ignore[return-value]
        if name == plan.FLASH_INT8:
            if why := missing("flash_maxsim"):
                return why
            flash = importlib.import_module("flash_maxsim.flash_maxsim_quant")
            data, scales = flash.quantize_int8_symmetric(D.half())
            query = flash.quantize_query_int8(Q[0])
            return lambda: flash.flash_maxsim_int8x8(Q[0], data, scales, *query)[None]
        if name == plan.LATE_FP8:
            if why := missing("late_interaction_kernels"):
                return why
            fp8 = importlib.import_module("late_interaction_kernels.fp8")
            (Q8, scale_Q), (D8, scale_D) = fp8.quantize_fp8_per_token(Q), fp8.quantize_fp8_per_token(D)
            return lambda: fp8.maxsim_inference_fp8(Q8, D8, scale_Q=scale_Q, scale_D=scale_D)
        return None

    def _quality(self, call: Callable[[], object]) -> dict[str, float]:
        """Return the error, and the rank quality among the documents of the first query."""
        scores, exact = call(), quantized.exact_scores(self.x)
        assert isinstance(scores, Tensor)
        first = scores[:1, : exact.shape[1]].double()
        found = {"error": common.error_of(self.x, scores), "spearman": fidelity.spearman(first, exact)}
        return {**found, f"top{TOP}": fidelity.recall(first, exact, TOP)}


class ResidualDocuments(Problem):
    """Packed documents of random residual codes, searched by one query for the best 10."""

    def __init__(self, spec: plan.Spec, device: str) -> None:
        super().__init__(spec, device)
        case, nbits = spec.case, spec.number("nbits")
        generator = torch.Generator(device).manual_seed(0)
        lengths = torch.randint(case.Ld // 2, case.Ld + 1, (case.Nd,), generator=generator, device=device)
        self.lengths = lengths.int()
        self.bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        tokens = int(self.bounds[-1])
        centroids = 2 ** int(math.log2(16 * math.sqrt(tokens)))  # as fast-plaid chooses them
        drawn = torch.randn(centroids, case.d, generator=generator, device=device)
        weights = torch.linspace(-0.08, 0.08, 2**nbits, device=device)
        cutoffs = (weights[1:] + weights[:-1]) / 2
        codec = lik_ops.ResidualCodec(normalize(drawn, dim=-1).half(), weights, cutoffs)
        codes = torch.randint(centroids, (tokens,), generator=generator, device=device, dtype=torch.int32)
        shape = tokens, codec.width
        data = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
        self.documents = lik_ops.Quantized.of_codes(codes, data, codec, torch.float16)
        query = torch.randn(1, case.Lq, case.d, generator=generator, device=device)
        self.Q = normalize(query, dim=-1).half()
        self.some = torch.arange(min(spec.number("kept"), case.Nd), device=device)

    def make(self, name: str) -> PaperContender | str:
        if name == plan.OURS:
            return self._ours()
        return self._late() if name == plan.LATE else self._fast_plaid()

    def _ours(self) -> PaperContender:
        Q, D, bounds, kept = self.Q, self.documents, self.bounds, self.spec.number("kept")

        def search(**options: Any) -> Any:
            return lik_ops.retrieve(Q, D, TOP_K, cu_seqlens_d=bounds, **options)

        parts = {
            "full": lambda: search,
            "partial": lambda: lambda: search(subset=self.some),
            "search": lambda: lambda: search(n_probe=PROBES, n_candidates=kept),
        }

        def check() -> dict[str, float]:
            last = slice(max(0, len(self.lengths) - 8), len(self.lengths))
            scores = lik_ops.maxsim_varlen(Q, D, cu_seqlens_d=bounds)[:, last]
            tokens = D.dequantize(torch.float32).double()
            begins, ends = bounds[:-1][last].tolist(), bounds[1:][last].tolist()
            expected = [
                reference.maxsim(Q.double(), tokens[a:b][None])[:, 0] for a, b in zip(begins, ends, strict=True)
            ]
            return {"error": common.relative_error(scores, torch.stack(expected, 1))}

        return PaperContender(parts, check, TOLERANCE)

    def _late(self) -> PaperContender | str:
        if why := missing("late_interaction_kernels"):
            return why
        plaid = importlib.import_module("late_interaction_kernels.plaid")
        codec, codes, data = self.documents.codec, self.documents.codes, self.documents.data
        assert codec is not None and codes is not None
        fixed = codec.centroids.half(), codec.weights.half(), codec.nbits

        def best(n: int) -> object:
            bounds = self.bounds[: n + 1]
            end = int(ends[n])
            scores = plaid.maxsim_residual_varlen(
                self.Q, codes[:end], data[:end], bounds, *fixed, max_seqlen_d=self.spec.case.Ld
            )
            return scores.topk(TOP_K)

        ends = {n: self.bounds[n].item() for n in (len(self.lengths), len(self.some))}
        parts = {
            "full": lambda: lambda: best(len(self.lengths)),
            "partial": lambda: lambda: best(len(self.some)),
        }
        return PaperContender(parts, dict, math.inf)  # its order of bits is not PLAID's

    def _fast_plaid(self) -> PaperContender | str:
        """Return the median of a search in a process of its own, which may fail."""
        if common._version(plan.FAST_PLAID) is None:
            return "not installed"
        with tempfile.TemporaryDirectory() as path:
            lik_ops.write_index(Path(path) / "index", lik_ops.Index(self.documents, self.bounds))
            torch.save(self.Q.float().cpu(), Path(path) / "queries.pt")
            options = ["--peer", path, "--device", self.device, "--rounds", str(PEER_ROUNDS)]
            command = [sys.executable, "-m", staged.PEER_MODULE, *options]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_SECONDS, check=False)
            if done.returncode != 0:
                return f"status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"[:200]
            searches = json.loads((Path(path) / "found.json").read_text())
        found = next(of for name, of in searches.items() if f"{PROBES} probes" in name)
        return PaperContender({}, dict, math.inf, values={"search wall": found["ms1"]})


def draw_lengths(distribution: str, count: int, longest: int, device: str) -> Tensor:
    """Return the lengths of documents of a published distribution.

    Raises:
        KeyError: the distribution is unknown.
    """
    generator = torch.Generator(device).manual_seed(0)
    low, parameters = {
        "uniform randint[256,512]": (256, None),
        "LogNormal(4.6,.7) clamp[10,512]": (10, (4.6, 0.7)),
        "LogNormal(3.9,.9) clamp[10,512]": (10, (3.9, 0.9)),
    }[distribution]
    if parameters is None:
        low = min(low, longest)
        return torch.randint(low, longest + 1, (count,), generator=generator, device=device)
    mean, sigma = parameters
    normal = torch.randn(count, generator=generator, device=device)
    return (mean + sigma * normal).exp().long().clamp(min(low, longest), longest)


class RaggedDocuments(Problem):
    """One query and documents of several lengths, packed or padded."""

    def __init__(self, spec: plan.Spec, device: str) -> None:
        super().__init__(spec, device)
        case = spec.case
        self.x = common.Inputs(case, device)
        lengths = draw_lengths(str(spec.option("lengths")), case.Nd, case.Ld, device)
        self.lengths, self.Q = lengths.int(), self.x.Q
        self.mask = lik_ops.lengths_to_mask(self.lengths, case.Ld)
        self.padded = self.x.D * self.mask[..., None]
        self.packed = self.x.D[self.mask]
        self.bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()

    def make(self, name: str) -> PaperContender | str:
        call, held = self._call(name)
        if isinstance(call, str):
            return call
        score = inside(torch.no_grad, call)

        def check() -> dict[str, float]:
            scores, last = score(), slice(-64, None)
            assert isinstance(scores, Tensor)
            expected = reference.maxsim(self.Q.double(), self.padded[last].double(), None, self.mask[last])
            return {"error": common.relative_error(scores.reshape(1, -1)[:, last], expected)}

        return PaperContender({"forward": lambda: score}, check, TOLERANCE, (self.Q, held))

    def _call(self, name: str) -> tuple[Callable[[], object] | str, Tensor]:
        Q, packed, padded, bounds, Ld = self.Q, self.packed, self.padded, self.bounds, self.spec.case.Ld
        if name == plan.OURS:
            return lambda: lik_ops.maxsim_varlen(Q, packed, cu_seqlens_d=bounds), packed
        if name == plan.OURS_PADDED:
            return lambda: lik_ops.maxsim(Q, padded, None, self.mask), padded
        if name == plan.PADDED_FP32:
            eager = lambda: common.eager(Q.float(), padded.float(), None, self.mask)  # noqa: E731
            return inside(partial(products_in, True), eager), padded
        module = "late_interaction_kernels" if name == plan.LATE else "flash_maxsim"
        if why := missing(module):
            return why, padded
        peer = importlib.import_module(module)
        if name == plan.LATE:
            bounds_q = torch.tensor([0, Q.shape[1]], dtype=torch.int32, device=Q.device)
            return lambda: peer.maxsim_varlen(Q[0], packed, bounds_q, bounds, Q.shape[1], Ld), packed
        if name == plan.FLASH:
            return lambda: peer.flash_maxsim_packed(Q[0], packed, bounds, Ld), packed
        return lambda: peer.flash_maxsim(Q[0], padded, doc_lengths=self.lengths), padded
