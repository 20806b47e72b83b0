"""The measurements of each published table, and the published column that each of them stands for.

`plan_of` returns the plan of a table, or the reason that the table is not run. `spec_of` returns the measurement of
one row. Two rows with equal measurements are measured once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..support.common import Case
from .rows import PaperRow

OURS, LATE, FLASH = "lik_ops", "late-interaction-kernels", "flash-maxsim"
LOWMEM, UNIFIED = f"{OURS} lowmem", f"{OURS} unified"
LATE_LOWMEM, LATE_UNIFIED = f"{LATE} lowmem", f"{LATE} unified"
FLASH_CSR, FLASH_ATOMIC, FLASH_UNIFIED = (f"{FLASH} {kind}" for kind in ("CSR", "atomic", "unified"))
OURS_NORMALIZED, LATE_NORMALIZED = f"{OURS}, F.normalize before", f"{LATE}, F.normalize before"
OURS_HALF, OURS_INT8, OURS_INT8_DOCUMENT, OURS_FP8 = OURS, f"{OURS} int8", f"{OURS} int8 document", f"{OURS} fp8"
FLASH_INT8, LATE_FP8, FAST_PLAID = f"{FLASH} int8", f"{LATE} fp8", "fast-plaid"
OURS_PADDED, FLASH_PADDED = f"{OURS} padded", f"{FLASH} padded"
UNFUSED, LATE_UNFUSED = f"{OURS} unfused", f"{LATE} unfused"

EAGER, EAGER_FP32, EAGER_TF32 = "eager", "eager fp32, cast timed", "eager TF32"
EAGER_TF32_CAST, CHUNKED = "eager TF32, cast timed", "eager chunked"
EAGER_IN_DTYPE = "eager, summed in the input dtype"
AUTOGRAD, CHECKPOINTED = "eager TF32, autograd", "eager TF32, checkpointed"
MINI_BATCHES = "eager, 32 x 32 mini-batches"
DEQUANTIZED, PADDED_FP32 = "dequantize, then eager", "padded eager fp32"
COMPILED_REDUCE = "compiled reduce-overhead, fp32"
COMPILED_MAX, COMPILED_NO_GRAPHS = "compiled max-autotune, TF32", "compiled max-autotune-no-cudagraphs"
COMPILED_MINI, COMPILED_CDIST = "compiled, 32 x 32 mini-batches", "compiled cdist"

PEERS = (LATE, FLASH, FAST_PLAID)
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
PAGE = {"Lq": 1024, "Ld": 1024}
COMPILED_CLOUDS = (2048, 10_000, 32_768)
COLPALI_LIMIT_BYTES = int(42.4e9)  # an A100-40GB


@dataclass(frozen=True)
class Quantity:
    """One figure of a table: what is measured, of which contenders, and the published column of each contender."""

    title: str
    measure: str  # "PART CLOCK", where the clock is cold, warm or wall; or "PART peak"; or the name of a value
    columns: Mapping[str, str] = field(default_factory=dict)  # contender: published column
    ours: str = OURS
    unit: str = "ms"
    only: tuple[str, ...] = ()  # the contenders to show, in this order; empty shows all
    with_inputs: bool = False  # a peak that includes the tensors that exist before the call
    rows: tuple[int, ...] = ()  # the rows that the figure is of; empty for all
    is_higher_better: bool = False

    @property
    def is_speed(self) -> bool:
        return self.unit in ("ms", "s")


@dataclass(frozen=True)
class Spec:
    """One measurement: the kind of problem, its size, and the contenders."""

    kind: str
    case: Case
    contenders: tuple[str, ...]
    compiled: tuple[str, ...] = ()  # contenders that compile for long, measured after all rows
    parts: tuple[str, ...] = ("forward",)
    clocks: tuple[str, ...] = ("cold",)
    options: tuple[tuple[str, object], ...] = ()
    limit_bytes: int = 0  # device memory that this process may use; 0 for all

    def option(self, name: str) -> object:
        return dict(self.options)[name]

    def number(self, name: str) -> int:
        value = self.option(name)
        assert isinstance(value, int)
        return value


@dataclass(frozen=True)
class TablePlan:
    """How a table is run."""

    build: Callable[[PaperRow], Spec | str]  # a text is the reason for not running the row
    quantities: tuple[Quantity, ...]
    shape: tuple[str, ...]  # columns that describe the row
    not_measured: Mapping[str, str] = field(default_factory=dict)  # published column: reason
    note: str = ""  # assumptions, and differences from the published protocol


def dense(row: PaperRow, *contenders: str, dtype: str = "", **more: object) -> Spec:
    """Return a dense spec with the shape of the row's columns."""
    given = {"Nq": 1, "Nd": 0, "Lq": 1024, "Ld": 1024, "d": 128}
    shape = {name: row.number(name, default) for name, default in given.items()}
    in_case = {name: more.pop(name) for name in list(more) if name in Case.__dataclass_fields__}
    case = Case(row.name, **{**shape, **in_case}, dtype=dtype or DTYPES[row.table.dtype])  # type: ignore[arg-type]
    return Spec("dense", case, contenders, **more)  # type: ignore[arg-type]


FORWARD = "forward cold"
EAGERS = {EAGER: "eager_fp16", EAGER_TF32: "eager_tf32"}
COMPILED = {COMPILED_MAX: "compile_ma", COMPILED_NO_GRAPHS: "compile_nocg"}


def _five_shapes(row: PaperRow) -> Spec:
    return dense(row, OURS, LATE, FLASH, *EAGERS, compiled=tuple(COMPILED), dtype="float16")


def _square(row: PaperRow, *contenders: str, **more: object) -> Spec:
    B = row.number("B")
    return dense(row, *contenders, dtype="float16", **{"Nq": B, "Nd": B, **more})


STEP_FLASH = (FLASH_CSR, FLASH_ATOMIC, FLASH_UNIFIED)


def _lowmem_case(row: PaperRow) -> Spec:
    case = str(row["case"])
    found = re.fullmatch(r"B(\d+)(?: x (\d+) negatives)?, (?:Lq )?(\d+), (?:Ld )?(\d+)", case)
    assert found, case
    B, negatives, Lq, Ld = (int(x) if x else 0 for x in found.groups())
    sizes = {"Nq": B, "Nd": negatives or B, "Lq": Lq, "Ld": Ld, "candidates": bool(negatives)}
    contenders = LOWMEM, UNIFIED, LATE_LOWMEM, LATE_UNIFIED
    return dense(row, *contenders, parts=("backward", "step"), **sizes)


def _pylate(row: PaperRow) -> Spec:
    bs = row.number("bs")
    return dense(row, OURS, LATE, FLASH, EAGER, parts=("step",), Nq=bs, Nd=bs * (1 + row.number("negatives")), **SHORT)


SHORT = {"Lq": 32, "Ld": 300}


def _cached(row: PaperRow) -> Spec:
    bs = row.number("bs")
    options = {"compiled": (COMPILED_MINI,), "parts": ("step",)}
    return dense(row, OURS, LATE, FLASH, MINI_BATCHES, Nq=bs, Nd=bs, Lq=128, **options)


def _scaling(row: PaperRow) -> Spec:
    compiled = (COMPILED_MAX, COMPILED_NO_GRAPHS) if row.number("Nd") in (1000, 5000, 10_000) else ()
    spec = dense(row, OURS, LATE, FLASH, EAGER, EAGER_TF32, compiled=compiled)
    return replace(spec, limit_bytes=COLPALI_LIMIT_BYTES)


def _quantized(row: PaperRow, *contenders: str, dtype: str) -> Spec:
    return replace(dense(row, *contenders, dtype=dtype), kind="quantized")


INT8 = (OURS, OURS_INT8, OURS_INT8_DOCUMENT, FLASH, FLASH_INT8, EAGER_TF32_CAST)


def _residual(row: PaperRow) -> Spec:
    case = Case(row.name, 1, row.number("Nd"), 32, row.number("max_Ld"), dtype="float16")
    parts = ("full", "partial", "search")
    options = (("nbits", row.number("nbits")), ("kept", 4096))
    return Spec("residual", case, (OURS, LATE, FAST_PLAID), parts=parts, clocks=("wall",), options=options)


def _ragged(row: PaperRow) -> Spec:
    case = Case(row.name, 1, row.number("Nd"), row.number("Lq"), row.number("max_Ld"), dtype="float16")
    contenders = (OURS, OURS_PADDED, LATE, FLASH, FLASH_PADDED, PADDED_FP32)
    return Spec("ragged", case, contenders, options=(("lengths", row["distribution"]),))


def _head(row: PaperRow) -> Spec:
    spec = dense(row, OURS, UNFUSED, LATE, LATE_UNFUSED, parts=("step",), clocks=("cold", "wall"), what="step")
    return replace(spec, kind="head", options=(("width", row.number("d_model")),))


def _chamfer(row: PaperRow) -> Spec:
    N, metric = row.number("N"), {"l2_sq": "sqeuclidean", "l1": "l1"}[str(row["metric"])]
    parts = ("forward", "step") if metric == "sqeuclidean" else ("forward",)
    case = Case(row.name, 1, 1, N, N, d=row.number("d"), dtype="float32")
    compiled = (COMPILED_CDIST,) if N in COMPILED_CLOUDS and metric == "sqeuclidean" else ()
    return Spec("chamfer", case, (OURS, FLASH, EAGER), compiled, parts, options=(("metric", metric),))


def _streamed(row: PaperRow) -> Spec:
    case = Case(row.name, 1, row.number("pages"), **PAGE, dtype="float16")
    return Spec("streamed", case, (OURS, FLASH), parts=(), clocks=())


def _correctness(row: PaperRow) -> Spec:
    Lq = 32 if row["shape"] == "long-doc" else 1024
    case = Case(row.name, 4, 4, Lq, 1024, dtype=DTYPES[str(row["dtype"])])
    return Spec("correctness", case, (OURS, LATE, FLASH, EAGER_IN_DTYPE), (), (), (), (("draw", row["draw"]),))


def _parity(row: PaperRow) -> Spec:
    case = Case("Fig3/0", 64, 64, **PAGE, dtype="float16", what="step")
    return Spec("parity", case, (EAGER_IN_DTYPE, OURS, FLASH), (), (), (), (("steps", 500),))


def _analytic(row: PaperRow) -> Spec:
    if "B" in row.table.columns:
        B = row.number("B")
        case = Case(row.name, B, B, **PAGE, dtype="float16", what="winners")
    else:
        case = Case(row.name, 1, row.number("Nd"), row.number("Lq"), row.number("Ld"), dtype="float16")
    return Spec("analytic", case, (OURS, FLASH, EAGER), (), (), ())


MODEL_DATA = "Needs trained encoders and the passages or pages of the data set, which no package contains."
NOT_RUN = {
    "S6a": "Needs the LateOn-Code-edge model and MS MARCO, which no package contains.",
    "Tab25": MODEL_DATA,
    "Tab26": MODEL_DATA,
    "Tab27+28": MODEL_DATA,
    "Tab29": MODEL_DATA,
}
OWN_KERNEL = "A variant of the kernel of flash-maxsim that version 0.3.0 does not offer."
OWN_PART = "A part of the backward of flash-maxsim that none of its functions runs alone."
FEATURES = "A100 column. No A100 is available."

TABLES: dict[str, TablePlan] = {
    "S1": TablePlan(
        lambda row: dense(row, OURS, LATE, FLASH, EAGER_FP32, compiled=(COMPILED_REDUCE,), clocks=("warm", "cold")),
        (
            Quantity(
                "forward, warm L2", "forward warm", {LATE: "lik", EAGER_FP32: "eager_fp32", COMPILED_REDUCE: "compile"}
            ),
            Quantity("forward, cold L2", FORWARD),
        ),
        ("Nq", "Nd", "Lq", "Ld", "d"),
        note="The published times of the first rows are host time.",
    ),
    "Tab1+4+21 H100": TablePlan(
        _five_shapes,
        (Quantity("forward, cold L2", FORWARD, {**EAGERS, **COMPILED, FLASH: "flash"}),),
        ("Nd", "Lq", "Ld", "d"),
    ),
    "Tab1+4+21 A100": TablePlan(
        _five_shapes,
        (Quantity("forward, cold L2", FORWARD, {**EAGERS, **COMPILED, FLASH: "flash"}),),
        ("Nd", "Lq", "Ld", "d"),
        note="Published on an A100. The measured figures are the same as in the table above.",
    ),
    "Tab8": TablePlan(
        lambda row: dense(row, OURS, LATE, FLASH, EAGER_TF32_CAST),
        (Quantity("forward, cold L2", FORWARD, {FLASH: "flash", EAGER_TF32_CAST: "naive"}),),
        ("Nd", "Lq", "Ld", "Nq"),
    ),
    "Tab2+6": TablePlan(
        lambda row: dense(row, OURS, LATE, FLASH, EAGER, CHUNKED),
        (
            Quantity("forward, cold L2", FORWARD, {EAGER: "vanilla_ms", CHUNKED: "chunked_ms", FLASH: "flash_ms"}),
            Quantity(
                "peak with the inputs",
                "forward peak",
                {EAGER: "vanilla_GB", CHUNKED: "chunked_GB", FLASH: "flash_GB"},
                unit="GB",
                with_inputs=True,
            ),
        ),
        ("Nd", "Lq", "Ld"),
    ),
    "S9": TablePlan(
        lambda row: dense(
            row, OURS, OURS_NORMALIZED, LATE, LATE_NORMALIZED, FLASH, clocks=("warm", "cold"), normalize=True
        ),
        (
            Quantity("normalize inside, warm L2", "forward warm", {LATE: "fused", LATE_NORMALIZED: "explicit"}),
            Quantity("normalize inside, cold L2", FORWARD),
        ),
        ("Nq", "Nd", "Lq", "Ld", "d"),
        note="flash-maxsim has no such option and gets normalized tokens. The time of `F.normalize` is included.",
    ),
    "S10": TablePlan(
        lambda row: dense(row, OURS, LATE, FLASH, EAGER_FP32, clocks=("warm", "cold")),
        (
            Quantity("forward, warm L2", "forward warm", {LATE: "lik", EAGER_FP32: "eager"}),
            Quantity("forward, cold L2", FORWARD),
        ),
        ("Nq", "Nd", "Lq", "Ld", "d"),
    ),
    "S5": TablePlan(
        lambda row: _quantized(row, OURS, OURS_FP8, LATE, LATE_FP8, dtype="bfloat16"),
        (
            Quantity("bf16", FORWARD, {LATE: "bf16"}, only=(OURS, LATE)),
            Quantity("fp8", FORWARD, {LATE_FP8: "fp8"}, ours=OURS_FP8, only=(OURS_FP8, LATE_FP8)),
        ),
        ("Nq", "Nd", "Lq", "Ld", "d"),
        note=(
            "Both libraries round queries and documents to FP8 per token. late-interaction-kernels rounds the queries"
            " before the timed call, lik_ops inside."
        ),
    ),
    "Tab13": TablePlan(
        lambda row: _quantized(row, *INT8, dtype="float16"),
        (
            Quantity("fp16", FORWARD, {EAGER_TF32_CAST: "naive", FLASH: "fp16"}, only=(OURS, FLASH, EAGER_TF32_CAST)),
            Quantity(
                "int8", FORWARD, {FLASH_INT8: "int8"}, OURS_INT8, only=(OURS_INT8, OURS_INT8_DOCUMENT, FLASH_INT8)
            ),
            Quantity(
                "Spearman correlation of int8",
                "spearman",
                {FLASH_INT8: "rho"},
                OURS_INT8,
                "",
                (OURS_INT8, FLASH_INT8),
                is_higher_better=True,
            ),
            Quantity(
                "share of the best 20 that int8 finds",
                "top20",
                {FLASH_INT8: "top20"},
                OURS_INT8,
                "",
                (OURS_INT8, FLASH_INT8),
                is_higher_better=True,
            ),
        ),
        ("Nd", "Lq", "Ld"),
        note=(
            "Random tokens. Both libraries round queries and documents to int8 per token. flash-maxsim rounds the query"
            " before the timed call, lik_ops inside."
        ),
    ),
    "Tab14": TablePlan(
        lambda row: _quantized(row, *INT8, DEQUANTIZED, dtype="float16"),
        (
            Quantity("fp16", FORWARD, {EAGER_TF32_CAST: "naive", FLASH: "fp16"}, only=(OURS, FLASH, EAGER_TF32_CAST)),
            Quantity(
                "int8",
                FORWARD,
                {DEQUANTIZED: "dequant", FLASH_INT8: "int8"},
                OURS_INT8,
                only=(OURS_INT8, OURS_INT8_DOCUMENT, FLASH_INT8, DEQUANTIZED),
            ),
        ),
        ("Nd",),
    ),
    "Tab15+16": TablePlan(
        lambda row: dense(row, OURS, LATE, FLASH, EAGER, dtype="float16", Nd=128),
        (Quantity("forward, cold L2", FORWARD, {FLASH: "H100_split"}),),
        ("d",),
        {"H100_oneshot": OWN_KERNEL, "A100_oneshot": OWN_KERNEL, "A100_split": FEATURES},
    ),
    "Tab12": TablePlan(
        _ragged,
        (Quantity("forward, cold L2", FORWARD, {PADDED_FP32: "naive", FLASH: "flash"}),),
        ("distribution", "Nd", "Lq", "max_Ld", "fill"),
        note="lik_ops, late-interaction-kernels and flash-maxsim read packed tokens.",
    ),
    "S7": TablePlan(
        lambda row: dense(row, OURS, LATE, EAGER_FP32, parts=("forward", "training forward"), clocks=()),
        (
            Quantity("forward, peak beyond the inputs", "forward peak", {EAGER_FP32: "naive", LATE: "fwd"}, unit="KiB"),
            Quantity(
                "forward of a training step, peak beyond the inputs",
                "training forward peak",
                {LATE: "fwd_bwd"},
                unit="KiB",
            ),
        ),
        ("Nq", "Nd", "Lq", "Ld", "d"),
    ),
    "Tab21 peaks": TablePlan(
        lambda row: dense(row, OURS, LATE, FLASH, EAGER, EAGER_FP32, clocks=()),
        (
            Quantity(
                "peak with the inputs",
                "forward peak",
                {EAGER: "eager_fp16", EAGER_FP32: "eager_fp32", FLASH: "flash"},
                unit="GB",
                with_inputs=True,
            ),
        ),
        ("Nd", "Lq", "Ld"),
    ),
    "S8": TablePlan(
        _lowmem_case,
        (
            Quantity(
                "lowmem backward",
                "backward cold",
                {LATE_LOWMEM: "lowmem_ms"},
                LOWMEM,
                only=(LOWMEM, LATE_LOWMEM),
            ),
            Quantity(
                "unified backward",
                "backward cold",
                {LATE_UNIFIED: "unified_ms"},
                UNIFIED,
                only=(UNIFIED, LATE_UNIFIED),
            ),
            Quantity(
                "lowmem step, peak with the inputs",
                "step peak",
                {LATE_LOWMEM: "lowmem_MB"},
                LOWMEM,
                "MB",
                (LOWMEM, LATE_LOWMEM),
                True,
            ),
            Quantity(
                "unified step, peak with the inputs",
                "step peak",
                {LATE_UNIFIED: "unified_MB"},
                UNIFIED,
                "MB",
                (UNIFIED, LATE_UNIFIED),
                True,
            ),
        ),
        ("case",),
    ),
    "S11": TablePlan(
        lambda row: dense(row, OURS, LATE, FLASH, EAGER, parts=("training forward", "backward", "step")),
        (
            Quantity("forward of a training step", "training forward cold", {LATE: "fwd", EAGER: "fwd_naive"}),
            Quantity("backward", "backward cold", {LATE: "bwd", EAGER: "bwd_naive"}),
            Quantity(
                "step, peak with the inputs",
                "step peak",
                {LATE: "peak_MB", EAGER: "peak_naive_MB"},
                unit="MB",
                with_inputs=True,
            ),
        ),
        ("Nq", "Nd", "Lq", "Ld", "d"),
    ),
    "S12": TablePlan(
        _pylate,
        (Quantity("scoring, forward and backward", "step cold", {EAGER: "vanilla", LATE: "lik"}),),
        ("bs", "negatives"),
        note=(
            "The source gives no lengths. Queries of 32 tokens and documents of 300 tokens are assumed. `eager` is the"
            " formula of PyLate, without its cross entropy."
        ),
    ),
    "S2": TablePlan(
        _cached,
        (
            Quantity(
                "scoring, forward and backward",
                "step cold",
                {MINI_BATCHES: "vanilla", COMPILED_MINI: "compile", LATE: "lik"},
            ),
        ),
        ("bs", "Ld"),
        note="The formula of PyLate runs in the mini-batches of the source. The others score all pairs in one call.",
    ),
    "S4": TablePlan(
        _head,
        (
            Quantity("step, device time", "step cold"),
            Quantity("step, wall clock", "step wall", {LATE_UNFUSED: "unfused", LATE: "fused"}),
            Quantity(
                "step, peak with the inputs",
                "step peak",
                {LATE_UNFUSED: "peak_unfused", LATE: "peak_fused"},
                unit="MB",
                with_inputs=True,
            ),
        ),
        ("Nq", "Nd", "Lq", "Ld", "d_model", "d"),
        note="A step computes the gradients of queries, hidden states, projection and bias.",
    ),
    "Tab3": TablePlan(
        lambda row: _square(
            row, OURS, LATE, FLASH_CSR, FLASH_UNIFIED, AUTOGRAD, CHECKPOINTED, parts=("step",), what="step"
        ),
        (
            Quantity(
                "step",
                "step cold",
                {
                    AUTOGRAD: "naive_ms",
                    CHECKPOINTED: "recompute_ms",
                    FLASH_UNIFIED: "unified_ms",
                    FLASH_CSR: "csr_ms",
                },
            ),
            Quantity(
                "step, peak beyond the inputs",
                "step peak",
                {
                    AUTOGRAD: "naive_GB",
                    CHECKPOINTED: "recompute_GB",
                    FLASH_UNIFIED: "unified_GB",
                    FLASH_CSR: "csr_GB",
                },
                unit="GB",
            ),
        ),
        ("B",),
    ),
    "Tab10": TablePlan(
        lambda row: _square(row, OURS, UNIFIED, LATE, *STEP_FLASH, parts=("step",), what="step"),
        (
            Quantity("step", "step cold", {FLASH_CSR: "csr", FLASH_ATOMIC: "atomic", FLASH_UNIFIED: "unified"}),
            Quantity(
                "step, peak beyond the inputs",
                "step peak",
                {FLASH_CSR: "csr_GB", FLASH_ATOMIC: "atomic_GB", FLASH_UNIFIED: "unified_GB"},
                unit="GB",
            ),
        ),
        ("B", "Lq", "Ld"),
        note="The published step also creates its inputs. The measured step does not.",
    ),
    "Tab11": TablePlan(
        lambda row: _square(row, OURS, LATE, FLASH_CSR, parts=("training forward", "backward"), Nq=1, what="step"),
        (
            Quantity("forward of a training step", "training forward cold", {FLASH_CSR: "fwd"}),
            Quantity("backward", "backward cold", {FLASH_CSR: "autograd"}),
        ),
        ("B", "Lq", "Ld"),
        {"csr": OWN_PART, "dQ": OWN_PART, "dD": OWN_PART, "pieces": OWN_PART},
    ),
    "Fig3": TablePlan(
        _parity,
        (
            Quantity("500 steps of Adam", "seconds", {EAGER_IN_DTYPE: "naive", FLASH: "flash"}, unit="s", rows=(2,)),
            Quantity("peak", "peak", {EAGER_IN_DTYPE: "naive", FLASH: "flash"}, unit="GB", rows=(1,)),
            Quantity("largest difference from the loss of `eager`", "drift", {FLASH: "flash"}, unit="", rows=(0,)),
        ),
        ("what",),
        note="64 random queries and pages of 1,024 tokens are the parameters. The three rows are one run.",
    ),
    "Tab22": TablePlan(
        _analytic,
        (Quantity("bytes read and written", "traffic", {EAGER: "naive_GB", FLASH: "flash_GB"}, unit="GB"),),
        ("Nd", "Lq", "Ld"),
        note=(
            "By formula: inputs, scores, and the similarities in fp32 written and read once for `eager`. No counter of"
            " the GPU was read."
        ),
    ),
    "Tab24": TablePlan(
        _analytic,
        (
            Quantity("similarities", "S", {EAGER: "S"}, unit="GB", only=(OURS, EAGER)),
            Quantity("gradient of the similarities", "dS", {EAGER: "dS"}, unit="GB", only=(OURS, EAGER)),
            Quantity("argmax", "argmax", {FLASH: "winners_MB"}, unit="MB", only=(OURS, FLASH)),
        ),
        ("B",),
        note="By formula.",
    ),
    "S3": TablePlan(
        _residual,
        (
            Quantity("all documents", "full wall", {LATE: "full"}, only=(OURS, LATE)),
            Quantity("4,096 candidates", "partial wall", {LATE: "partial"}, only=(OURS, LATE)),
            Quantity("staged search", "search wall", {FAST_PLAID: "search"}, only=(OURS, FAST_PLAID)),
        ),
        ("Nd", "max_Ld", "nbits"),
        note=(
            "Random codes. late-interaction-kernels reads the bits of a residual in another order than PLAID writes"
            " them, so only its times are valid. The candidates are the first 4,096 documents. fast-plaid is measured"
            " in the version that is installed. The staged search of lik_ops has 8 probes and keeps 4,096 documents."
        ),
    ),
    "Fig1+Tab5+23": TablePlan(
        _scaling,
        (
            Quantity(
                "forward, cold L2",
                FORWARD,
                {
                    EAGER: "naive_fp16_ms",
                    EAGER_TF32: "naive_fp32_ms",
                    COMPILED_MAX: "compile_fp32_ms",
                    COMPILED_NO_GRAPHS: "compile_fp16_ms",
                    FLASH: "flash_ms",
                },
            ),
            Quantity(
                "peak with the inputs",
                "forward peak",
                {EAGER: "naive_fp16_GB", FLASH: "flash_GB"},
                unit="GB",
                only=(OURS, LATE, FLASH, EAGER),
                with_inputs=True,
            ),
        ),
        ("Nd",),
        note=(
            "The process may use 42.4 GB, as on an A100-40GB. Compiled PyTorch is measured for 1,000, 5,000 and 10,000"
            " pages only."
        ),
    ),
    "AppD": TablePlan(
        _chamfer,
        (Quantity("forward, cold L2", FORWARD), Quantity("step", "step cold", rows=tuple(range(8)))),
        ("N", "d", "metric"),
        note="The sources publish no figures for these rows. pytorch3d has no package for this Python and torch.",
    ),
    "s5.5": TablePlan(
        _correctness,
        (Quantity("largest absolute error", "max_error", {EAGER_IN_DTYPE: "naive", FLASH: "flash"}, unit=""),),
        ("shape", "dtype", "draw"),
        note=(
            "The source does not define its draws. Light tokens are normal, heavy tokens have Student's t distribution"
            " with three degrees of freedom, and both have unit norm."
        ),
    ),
    "AppB": TablePlan(
        _five_shapes,
        (
            Quantity(
                "forward, cold L2",
                FORWARD,
                {COMPILED_MAX: "compile", FLASH: "flash"},
                only=(OURS, LATE, FLASH, COMPILED_MAX),
            ),
        ),
        ("Nd",),
    ),
    "Tab7": TablePlan(
        lambda row: dense(row, OURS, LATE, FLASH, EAGER_TF32_CAST),
        (Quantity("forward, cold L2", FORWARD, {EAGER_TF32_CAST: "naive", FLASH: "chunk"}),),
        ("Nd", "Lq", "Ld"),
        {"fused": OWN_KERNEL},
        note="An ablation of flash-maxsim. Its version 0.3.0 always splits long queries.",
    ),
    "S6b": TablePlan(
        lambda row: dense(
            row,
            OURS,
            LATE,
            EAGER,
            parts=("step",),
            clocks=(),
            what="step",
            Lq=32,
            Ld=768,
            Nq=row.number("batch"),
            Nd=row.number("batch"),
        ),
        (Quantity("step, peak beyond the inputs", "step peak", {EAGER: "vanilla_MiB", LATE: "lik_MiB"}, unit="MiB"),),
        ("batch",),
        note=(
            "Without the model. The source gives no token counts. Queries of 32 and pages of 768 tokens are assumed,"
            " so the published figures are not comparable."
        ),
    ),
    "000 chart": TablePlan(
        lambda row: dense(
            row, OURS, EAGER, clocks=(), dtype="float16", Nq=64, Nd=64, Lq=row.number("L"), Ld=row.number("L")
        ),
        (Quantity("peak beyond the inputs", "forward peak", unit="MiB"),),
        ("L",),
        note="The source shows a chart without figures.",
    ),
    "Tab9": TablePlan(
        _streamed,
        (
            Quantity("one query, wall clock", "search wall", {FLASH: "s"}, unit="s"),
            Quantity("peak", "search peak", {FLASH: "peak_GB"}, unit="GB"),
        ),
        ("pages", "GB"),
        {"docs_s": "The number of pages divided by the seconds."},
        note="Pageable memory. A row needs its size in host memory, and the row says so if the machine has less.",
    ),
}  # in the order of measurement: the peers' own speed tables first


def plan_of(table: str) -> TablePlan | str:
    """Return the plan of a table, or the reason for not running it.

    Raises:
        KeyError: the table is unknown.
    """
    return NOT_RUN[table] if table in NOT_RUN else TABLES[table]


def spec_of(row: PaperRow) -> Spec | str:
    """Return the measurement of a row, or the reason for not running it."""
    plan = plan_of(row.table.id)
    return plan if isinstance(plan, str) else plan.build(row)


def measured_with(spec: Spec) -> Spec:
    """Return the spec without the name of its row. Specs that are equal then are measured once."""
    return replace(spec, case=replace(spec.case, name=""))
