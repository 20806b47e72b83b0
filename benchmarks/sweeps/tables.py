"""The sweeps: cases, calls, and alternatives to the built-in tables of `lik_ops`.

A patch maps the name of a table entry or function, relative to `lik_ops`, to a function that returns its replacement
for the present value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

import lik_ops
from lik_ops.families.head import configs as head_configs
from lik_ops.gpu.tuning.architectures import MEASURED_SMS
from lik_ops.gpu.tuning.forward_configs import MAX_INT8_FEATURES, TileConfig
from lik_ops.gpu.tuning.sm90_configs import Sm90Tile
from lik_ops.gpu.tuning.tables import UNLIMITED, Override, at_most

from ..operators import forward, head, soft
from ..support import contenders
from ..support.common import Case, Inputs

Patches: TypeAlias = dict[str, Callable[[Any], Any]]
Call: TypeAlias = Callable[[], Tensor]


class Sweep(NamedTuple):
    """Cases by name, the call of a case, and the patches of each alternative."""

    cases: Callable[[], dict[str, Any]]
    call: Callable[[Any], Call]
    alternatives: Callable[[Any], dict[str, Patches]]
    exact: bool = True  # all alternatives give the bits of the table


def put(value: Any) -> Callable[[Any], Any]:
    """Return a patch that replaces a table entry by `value`."""
    return lambda present: value


def change(
    warps: int | None = None, stages: int | None = None, registers: int | None = None, walkers: int = 0, **config: int
) -> Callable[[Any], Any]:
    """Return a patch of a function that returns a `LaunchConfig`. None and 0 keep a value of the table."""

    def patch(present: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*args: Any, **kwargs: Any) -> Any:
            found = present(*args, **kwargs)
            options = {"num_warps": warps, "num_stages": stages, "max_registers": registers, "walkers": walkers}
            options = {name: value for name, value in options.items() if value}
            return replace(found, config=found.config._replace(**config), **options)

        return choose

    return patch


# forward: tiles of `maxsim_forward`, and the numbers of its persistent programs.
_FORWARD = "gpu.tuning.forward_configs.select_tiles"
_NO_SM90 = {"gpu.choose.get_forced_kernel": put(lambda: "generic")}
ROWS, TOKENS, WARPS, STAGES = (16, 32, 64, 128, 256), (64, 128), (4, 8), (1, 2, 3, 4, 5)
WALKERS = (0, 264, 396, 528)


def forward_cases() -> dict[str, Case]:
    return {case.name: case for case in forward.CASES if case.dtype == "bfloat16"}


def forward_call(case: Case) -> Call:
    function: Any = contenders.forward(case, Inputs(case, "cuda"))["lik_ops"]

    def scores() -> Tensor:
        out = function()
        return out[0] if isinstance(out, tuple) else out

    return scores


def forward_tiles(case: Case) -> dict[str, Patches]:
    """Return tiles whose first dimension gives each warp 16 or 32 rows and that are at least half full."""
    rows, found = case.Lq * (1 if case.candidates else case.Nq), {}
    for tokens_first, BM, BN, warps, stages in itertools.product((False, True), ROWS, TOKENS, WARPS, STAGES):
        first, least = (BN, 16) if tokens_first else (BM, 64)
        if (least == BM or 2 * rows >= BM) and first >= 64 and 16 <= first // warps <= 32:
            for walkers in WALKERS:
                tile = TileConfig(BM, BN, 128, warps, stages, tokens_first=tokens_first, walkers=walkers)
                found[str(tile._asdict())] = {_FORWARD: put(lambda *_, tile=tile: (tile,)), **_NO_SM90}
    return found


# few: (tokens, stages) of the small-M kernel.
_SMALL_M = "gpu.tuning.sm90_configs.SMALL_M_TILES"
FEW_TILES = ((64, 1), (64, 2), (64, 3), (64, 4), (64, 6), (64, 10), (128, 1), (128, 2), (128, 3))
FEW_SHAPES = ((1, 1000, 300), (2, 1000, 300), (4, 1000, 300), (1, 1000, 1024), (1, 100_000, 180))  # Nq, Nd, Ld
# The document format or the requested result, and the counts of 32-token queries that are few rows for it.
FEW_KEPT = {"normalize": 4, "winners": 1, "fp32": 1, "fp8_e4m3": 4, "int8 token": 2, "int8 document": 2}


def few_cases() -> dict[str, tuple]:
    return {
        f"{kept}, {Nq} x {Nd}, Ld {Ld}": (kept, Nq, Nd, Ld)
        for kept, most in FEW_KEPT.items()
        for Nq, Nd, Ld in FEW_SHAPES
        if Nq <= most and (kept != "fp32" or Nd <= 1000)
    }


def few_call(case: tuple) -> Call:
    kept, Nq, Nd, Ld = case
    x = Inputs(Case("few", Nq, Nd, 32, Ld, dtype="float32" if kept == "fp32" else "bfloat16"), "cuda")
    if kept == "normalize":
        return lambda: lik_ops.maxsim(x.Q, x.D, normalize=True)
    if kept == "winners":
        return lambda: torch.cat([t.flatten().float() for t in lik_ops.maxsim_with_argmax(x.Q, x.D)])
    D: Any = x.D if kept == "fp32" else lik_ops.quantize(x.D, *kept.split())
    return lambda: lik_ops.maxsim(x.Q, D)


def few_tiles(case: tuple) -> dict[str, Patches]:
    def patches(tile: Sm90Tile) -> Patches:
        return {_SMALL_M: lambda present: dict.fromkeys(present, (tile,))}

    return {f"{tokens} x {stages}": patches(Sm90Tile(tokens, stages)) for tokens, stages in FEW_TILES}


# encoded: tiles in the pipeline, and programs of an SM, of the sm_90 kernels of binary documents and of FP8 queries.
ENCODED_SHAPES = ((1, 100_000, 32, 180), (1, 1000, 32, 300), (16, 1000, 32, 300), (1, 1000, 1024, 1024))
ENCODED_SHAPES += ((64, 64, 1024, 1024),)  # Nq, Nd, Lq, Ld
# Format, query, scale.
ENCODED = (
    *(("binary", query, scale) for query in ("half", "int8", "binary") for scale in ("document", "token")),
    *(("fp8_e4m3", "fp8", scale) for scale in ("document", "token")),
)
_FEW_STAGES, _MANY_STAGES = {"binary": (8, 16, 32), "fp8_e4m3": (3, 6, 10)}, (4, 6, 8)
_PREFERRED: Patches = {"gpu.supports.prefers_encoded": put(lambda *_: None)}
_PACKED: Patches = {"gpu.supports.prefers_encoded": put(lambda *_: "the sweep compares the packed kernel")}


def encoded_cases() -> dict[str, tuple]:
    return {f"{' '.join(how)} {shape}": (*how, *shape) for how, shape in itertools.product(ENCODED, ENCODED_SHAPES)}


def score_encoded(shape: Case, kept: Any, scale: Any = "token", query: Any = "half") -> Call:
    """Return a call with documents in the format `kept`."""
    x = Inputs(shape, "cuda")
    D = lik_ops.quantize(x.D, kept, scale, query=query)
    return lambda: lik_ops.maxsim(x.Q, D)


def encoded_call(case: tuple) -> Call:
    kept, query, scale, *shape = case
    return score_encoded(Case("encoded", *shape), kept, scale, query)


def encoded_tiles(case: tuple) -> dict[str, Patches]:
    def programs(n: int) -> Callable[[Any], Any]:
        def patch(present: Callable[..., Any]) -> Callable[..., Any]:
            def choose(arch: Any, *args: Any, **kwargs: Any) -> Any:
                found = present(arch, *args, **kwargs)
                config = found.config._replace(PROGRAMS_PER_SM=n)
                return found._replace(config=config, programs=min(found.programs, n * arch.processors))

            return choose

        return patch

    kept, _, _, Nq, _, Lq, _ = case
    if Nq * Lq > 32:
        tiles = {stages: Sm90Tile(64, stages, in_registers=True) for stages in _MANY_STAGES}
        return {"packed kernel": _PACKED} | {
            f"{stages} stages": {**_PREFERRED, "gpu.tuning.sm90_configs._INT8_TILE": put(tile)}
            for stages, tile in tiles.items()
        }
    found: dict[str, Patches] = {"packed kernel": _PACKED}
    for stages, n in itertools.product(_FEW_STAGES[kept], (1, 2) if kept == "binary" else (1,)):
        tile = {"bits" if kept == "binary" else "int8": (Sm90Tile(64, stages),)}
        found[f"{stages} stages, {n} programs"] = _PREFERRED | {
            _SMALL_M: lambda present, tile=tile: present | tile,
            "gpu.tuning.sm90_configs.configure_int8": programs(n),
        }
    return found


# turns: whether consumer warp groups issue their products in turns.
TURN_SHAPES = ((16, 1000, 32, 300), (16, 1000, 32, 1024), (1, 1000, 1024, 1024))  # Nq, Nd, Lq, Ld
# A dtype with an option, or a format with its scale and query.
TURN_INPUTS = (
    *(("bfloat16", option) for option in ("", "normalize", "argmax")),
    *(("float32", precision) for precision in ("tf32", "ieee")),
    *(("int8", scale, query) for scale in ("document", "token") for query in ("half", "int8")),
    ("fp8_e4m3", "token", "half"),
    *(("fp8_e4m3", scale, "fp8") for scale in ("document", "token")),
    *(("binary", "document", query) for query in ("half", "int8")),
)


def turn_cases() -> dict[str, tuple]:
    return {f"{' '.join(how)} {shape}": (how, shape) for how, shape in itertools.product(TURN_INPUTS, TURN_SHAPES)}


def turn_call(case: tuple) -> Call:
    (kind, *rest), (Nq, Nd, Lq, Ld) = case
    dtype = kind if kind in ("bfloat16", "float32") else "bfloat16"
    x = Inputs(Case("turns", Nq, Nd, Lq, Ld, dtype=dtype), "cuda")
    if rest == ["argmax"]:
        return lambda: torch.cat([t.flatten().float() for t in lik_ops.maxsim_with_argmax(x.Q, x.D)])
    if kind == "float32":
        torch.backends.cuda.matmul.allow_tf32 = rest == ["tf32"]
    D: Any = x.D if dtype == kind else lik_ops.quantize(x.D, kind, rest[0], query=rest[1])
    return lambda: lik_ops.maxsim(x.Q, D, normalize=rest == ["normalize"])


def turn_alternatives(case: tuple) -> dict[str, Patches]:
    def without_turns(present: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: present(*args, **options)._replace(PING_PONG=False)

    return {"without turns": {"gpu.tuning.sm90_configs._make_config": without_turns}}


# narrow: tiles of one query and few features, (tokens, warps, stages).
NARROW_SHAPES = (
    (4000, 2048, 48),
    (1000, 4096, 48),
    (10_000, 300, 64),
    (1000, 4096, 64),
    (16_000, 512, 64),
)  # Nd, Ld, d
NARROW_TILES = (*((64, 4, stages) for stages in (1, 2, 3, 4)), *((128, 4, stages) for stages in (1, 2, 3)), (128, 8, 2))


def narrow_cases() -> dict[str, Case]:
    names = {f"1 x {Nd}, Ld {Ld}, d {d}": (Nd, Ld, d) for Nd, Ld, d in NARROW_SHAPES}
    return {name: Case(name, 1, Nd, 32, Ld, d=d) for name, (Nd, Ld, d) in names.items()}


def narrow_tiles(case: Case) -> dict[str, Patches]:
    def patches(tokens: int, warps: int, stages: int) -> Patches:
        tile = TileConfig(32, tokens, 128, warps, stages, tokens_first=True)
        return {_FORWARD: put(lambda *_: (tile,)), **_NO_SM90}

    return {
        f"{tokens} tokens, {warps} warps, {stages} stages": patches(tokens, warps, stages)
        for tokens, warps, stages in NARROW_TILES
    }


# wide_fp32: tiles of fp32 tokens with more than 128 features, (rows, tokens, features, warps, stages), with TF32 and
# exact. Some tiles spill with exact products.
WIDE_FP32_SHAPES = (
    *((Nq, 1000, 32, 300, 320) for Nq in (1, 4, 16)),
    (64, 64, 32, 300, 320),
    (32, 64, 1024, 300, 256),
    (16, 200, 32, 1024, 1024),
    (256, 8, 32, 2048, 1024),
    (1, 8, 32, 512, 1024),
    (32, 1, 8, 777, 1024),
    (1, 200, 32, 1024, 2560),
    (16, 16, 1024, 1024, 320),
    (64, 1000, 32, 180, 768),
)  # Nq, Nd, Lq, Ld, d
WIDE_FP32_TILES = (
    *((64, 64, 32, 4, stages) for stages in (3, 4)),
    *((64, 128, 32, 4, 3), (64, 64, 64, 4, 2), (64, 64, 64, 4, 3)),
    *((128, 64, 32, 8, stages) for stages in (3, 4)),
    *((128, 128, 32, 8, stages) for stages in (3, 4)),
    (128, 64, 64, 8, 2),
    (128, 64, 64, 8, 3),
)
WIDE_FP32_FEW_TILES = ((32, 64, 32, 4, 3), (32, 128, 32, 4, 2))  # tokens are the first operand


def wide_fp32_cases() -> dict[str, tuple[bool, Case]]:
    found: dict[str, tuple[bool, Case]] = {}
    for allowed, (Nq, Nd, Lq, Ld, d) in itertools.product((True, False), WIDE_FP32_SHAPES):
        name = f"{'tf32' if allowed else 'exact'}, {Nq} x {Nd}, {Lq}/{Ld}, d {d}"
        found[name] = allowed, Case(name, Nq, Nd, Lq, Ld, d=d, dtype="float32")
    for d in (64, 128, 320):
        name = f"normalize, 16 x 1000, 32/300, d {d}"
        found[name] = False, Case(name, 16, 1000, 32, 300, d=d, dtype="float32", normalize=True)
    return found


def wide_fp32_call(case: tuple[bool, Case]) -> Call:
    torch.backends.cuda.matmul.allow_tf32 = case[0]
    return dense_call(case[1])


def wide_fp32_tiles(case: tuple[bool, Case]) -> dict[str, Patches]:
    rows = case[1].Nq * case[1].Lq

    def patches(*tile: int, tokens_first: bool = False) -> Patches:
        tiles = (TileConfig(*tile, tokens_first=tokens_first),)
        return {_FORWARD: put(lambda *_: tiles), "gpu.tuning.forward_configs._TF32_TILE": put(10**9)}

    found = {str(tile): patches(*tile) for tile in WIDE_FP32_TILES if tile[0] <= max(64, 2 * rows)}
    if case[1].normalize:
        return {name: found[name] for name in ("(64, 64, 32, 4, 3)", "(64, 64, 32, 4, 4)", "(64, 64, 64, 4, 2)")}
    if rows <= 32:
        found |= {f"{tile}, tokens first": patches(*tile, tokens_first=True) for tile in WIDE_FP32_FEW_TILES}
    return found | {"split": {"gpu.choose.has_long_documents": put(lambda *_: True)}}


# wide_splits: whether a few documents of many features are worth splitting.
WIDE_SPLIT_SHAPES = tuple(itertools.product((320, 1024), (1, 4, 32), (8, 32, 100, 300), (300, 1024)))  # d, Nq, Nd, Ld
WIDE_SPLIT_SIDES = {
    name: {
        f"gpu.choose.{rule}": put(lambda *_, chosen=chosen: chosen) for rule in ("has_long_documents", "has_idle_sms")
    }
    for name, chosen in (("split", True), ("whole", False))
}


def wide_split_cases() -> dict[str, Case]:
    found = [
        Case(f"{dtype}, {Nq} x {Nd}, 32/{Ld}, d {d}", Nq, Nd, 32, Ld, d=d, dtype=dtype)
        for dtype, (d, Nq, Nd, Ld) in itertools.product(("bfloat16", "float32"), WIDE_SPLIT_SHAPES)
    ]
    return {case.name: case for case in found}


# encoded_splits: whether a few encoded documents are worth splitting.
ENCODED_SPLIT_FORMATS = ("int8", "uint8", "fp8_e4m3", "binary", "rq4")
ENCODED_SPLIT_SHAPES = (
    *itertools.product((64, 320), (1,), (1, 8, 32), (32,), (300, 512, 1024, 2048)),
    *itertools.product((64, 320), (4,), (1, 8), (1024,), (300, 1024, 8192)),
    *((1024, 1, Nd, 32, Ld) for Nd, Ld in ((1, 512), (8, 512), (8, 2048))),
)  # d, Nq, Nd, Lq, Ld


def name_encoded(formats: Iterable[str], shapes: Iterable[tuple]) -> dict[str, tuple[str, Case]]:
    """Return cases (format, shape) by name, for shapes (d, Nq, Nd, Lq, Ld)."""
    found = {}
    for kept, (d, *shape) in itertools.product(formats, shapes):
        case = Case(f"{kept}, {shape[0]} x {shape[1]}, {shape[2]}/{shape[3]}, d {d}", *shape, d=d)
        found[case.name] = kept, case
    return found


def encoded_shape_call(case: tuple[str, Case]) -> Call:
    kept, _, query = case[0].partition(" x ")
    return score_encoded(case[1], kept, query=query or "half")


# wide_encoded: tiles of encoded documents that are converted for each row tile, mostly with more than 128 features,
# (rows, tokens, features, warps, stages, registers). int8 terms need all features.
WIDE_ENCODED_SHAPES = ((16, 1000, 32, 300), (2, 1000, 32, 300), (64, 200, 64, 64), (16, 64, 1024, 64))  # Nq, Nd, Lq, Ld
WIDE_ENCODED_TILES = (
    (128, 64, 128, 8, 2, 128),
    (128, 64, 64, 8, 2, 128),
    (128, 64, 64, 8, 3, 128),
    (128, 32, 128, 8, 3, 128),
    (128, 64, 128, 8, 2, 255),
    (64, 128, 128, 4, 3, 255),
    (64, 64, 128, 4, 2, 255),
    (64, 64, 128, 4, 3, 168),
    (64, 64, 64, 4, 3, 168),
)


def wide_encoded_cases() -> dict[str, tuple[str, Case]]:
    shapes = [(d, *shape) for d, shape in itertools.product((160, 320), WIDE_ENCODED_SHAPES)]
    few = [(64, *shape) for shape in WIDE_ENCODED_SHAPES]
    return name_encoded(("uint8",), few) | name_encoded(("int8", "uint8", "fp8_e4m3", "binary"), shapes)


def encoded_tile_patches(tiles: Iterable[tuple[int, int, int, int, int, int]]) -> dict[str, Patches]:
    """Return patches of the tiles (rows, tokens, features, warps, stages, registers) of encoded documents."""

    def override(rows: int, tokens: int, features: int, warps: int, stages: int, registers: int) -> Override:
        sizes = {"BM": rows, "BN": tokens, "ROWS_PER_QUERY": at_most("ROWS_PER_QUERY", rows), "TOKENS_FIRST": False}
        sizes["BD"] = lambda call, x: x.config.BD if call.terms else min(x.config.BD, features)
        launch = {"num_warps": warps, "num_stages": stages, "max_registers": registers}
        return Override(when=lambda call, x: bool(call.encoding), change=sizes | launch)

    def patch(tile: tuple[int, int, int, int, int, int]) -> Patches:
        added = override(*tile)
        return {"gpu.tuning.forward_configs._PACKED_OVERRIDES": lambda present: (*present, added)}

    return {str(tile): patch(tile) for tile in tiles}


# short_encoded: the same for documents that are shorter than a tile, and the tiles that the table has for any length.
SHORT_ENCODED_SHAPES = ((32, 10_000, 32, 1), (32, 10_000, 32, 20), (8, 500, 1024, 64))  # Nq, Nd, Lq, Ld
SHORT_ENCODED_TILES = (
    (64, 64, 128, 4, 3, 255),
    (64, 64, 128, 4, 2, 168),
    (64, 32, 128, 4, 3, 168),
    (64, 32, 128, 4, 2, 128),
    (64, 16, 128, 4, 3, 128),
    (128, 32, 128, 8, 3, 128),
)


def short_encoded_cases() -> dict[str, tuple[str, Case]]:
    formats = ("int8", "int8 x int8", "uint8", "fp8_e4m3", "binary", "rq4")
    found = name_encoded(formats, [(128, *shape) for shape in SHORT_ENCODED_SHAPES])
    found |= name_encoded(("int8 x int8", "binary"), [(192, *shape) for shape in SHORT_ENCODED_SHAPES])
    return found | name_encoded(("uint8", "fp8_e4m3", "binary"), [(320, *shape) for shape in SHORT_ENCODED_SHAPES])


def short_encoded_tiles(case: tuple[str, Case]) -> dict[str, Patches]:
    features = 128 if case[1].d <= MAX_INT8_FEATURES else 64
    tiles = encoded_tile_patches([(*tile[:2], features, *tile[3:]) for tile in SHORT_ENCODED_TILES])
    return {"for any length": {"gpu.forward.packed.choose_tile_tokens": put(lambda *_: UNLIMITED)}} | tiles


# short: tiles of documents that are shorter than a tile, (rows, tokens, warps, stages, registers, programs per SM).
SHORT_SHAPES = ((32, 10_000, 32, 1), (32, 10_000, 32, 20), (8, 1000, 1024, 20), (16, 256, 128, 20))  # Nq, Nd, Lq, Ld
SHORT_TILES = (
    (256, 32, 8, 3, 128, 2),
    (256, 32, 8, 2, 255, 1),
    (128, 32, 4, 4, None, 2),
    (128, 32, 8, 3, 128, 2),
    (64, 32, 4, 4, 128, 4),
    (64, 32, 4, 2, 128, 0),
    (128, 16, 4, 4, 168, 3),
    (64, 16, 4, 4, 128, 4),
    (64, 16, 4, 2, 128, 0),
)


def short_cases() -> dict[str, Case]:
    found = [
        Case(f"{option}{Nq} x {Nd}, {Lq}/{Ld}, d {d}", Nq, Nd, Lq, Ld, d=d, what=what, normalize=option == "normalize ")
        for option, what in (("", "scores"), ("argmax ", "argmax"), ("normalize ", "scores"))
        for d, (Nq, Nd, Lq, Ld) in itertools.product((64, 128), SHORT_SHAPES)
    ]
    return {case.name: case for case in found}


def short_call(case: Case) -> Call:
    x = Inputs(case, "cuda")
    if case.what == "argmax":
        return lambda: lik_ops.maxsim_with_argmax(x.Q, x.D)[0]
    return lambda: lik_ops.maxsim(x.Q, x.D, **x.options)


def short_tiles(case: Case) -> dict[str, Patches]:
    def patch(rows: int, tokens: int, warps: int, stages: int, registers: int | None, programs: int) -> Patches:
        tile = TileConfig(rows, tokens, 128, warps, stages, registers, walkers=programs * MEASURED_SMS)
        return {_FORWARD: put(lambda *_: (tile,))}

    return {str(tile): patch(*tile) for tile in SHORT_TILES}


# pairs: the pair count from which a Gluon kernel is faster, and the documents that are worth splitting.
_NEVER = 10**9
_PER_SM, _WHOLE, _LARGE_D = (
    f"gpu.tuning.sm90_configs.{name}" for name in ("MIN_PAIRS_PER_SM", "MAX_WHOLE_QUERY_TOKENS", "MIN_LARGE_D_TOKENS")
)
_GENERIC = {_PER_SM: put(_NEVER), _WHOLE: put(_NEVER), _LARGE_D: put(_NEVER)}
PAIR_SIDES: dict[str, Patches] = {
    "generic": _GENERIC | {"gpu.generic_choices._MIN_LONG_DOCUMENT_TOKENS": put(_NEVER)},
    "gluon": {_PER_SM: put(0), "gpu.generic_choices._MAX_GLUON_PAIRS_PER_SM": put(0)},
    "split": _GENERIC,
}
_FEW_PAIRS = ((4, 32), (8, 32), (32, 32), (2, 128), (1, 300), (1, 1024))  # Nq, Lq
# Prefix of the name, options, d, (Nq, Lq), Nd, Ld. The calls have fewer (row tile, document) pairs than SMs.
PAIR_CASES: tuple[tuple[str, dict, tuple, tuple, tuple, tuple], ...] = (
    ("", {}, (128, 256, 768), _FEW_PAIRS, (4, 8, 16, 32), (180, 1024)),
    ("mask: ", {"mask": "prefix"}, (128,), ((32, 32), (1, 300), (1, 1024)), (4, 16, 32), (180, 1024)),
    ("normalize: ", {"normalize": True}, (128,), ((32, 32), (1, 300), (1, 1024)), (4, 16, 32), (180, 1024)),
    ("long: ", {}, (64, 128, 256, 768), ((1, 32), (4, 32), (1, 1024)), (4, 16, 48), (2048, 3000, 8192)),
)


def pair_cases() -> dict[str, Case]:
    found = [
        Case(f"{what}{Nq} x {Nd}, {Lq}/{Ld}, d {d}", Nq, Nd, Lq, Ld, d=d, **options)
        for what, options, *sizes in PAIR_CASES
        for d, (Nq, Lq), Nd, Ld in itertools.product(*sizes)
    ]
    return {case.name: case for case in found}


def dense_call(case: Case) -> Call:
    x = Inputs(case, "cuda")
    return lambda: lik_ops.maxsim(x.Q, x.D, **x.options)


# head: (tokens, hidden features of a step, warps, stages, programs per SM, registers) of the fused kernel.
HEAD_TILES = (
    (256, 64, 8, 4, 1, None),
    (256, 64, 8, 3, 1, None),
    (256, 32, 8, 9, 1, None),
    (256, 64, 16, 4, 1, None),
    (256, 128, 8, 2, 1, None),
    (128, 64, 4, 3, 2, None),
    (128, 64, 8, 3, 2, 128),
    (128, 128, 8, 3, 1, None),
    (128, 64, 8, 6, 1, None),
)
HEAD_NARROW_TILES = ((256, 64, 16, 5, 1, None), (256, 32, 8, 10, 1, None), (128, 64, 4, 4, 2, None))  # d <= 64


def head_cases() -> dict[str, head.Head]:
    """Return the cases that are fused on an H100 or H200."""
    most = head_configs.MAX_QUERY_ROWS
    cases = (c for c in head.CASES if c.what == "scores" and c.dtype == "bfloat16")
    return {c.name: c for c in cases if c.Nq * c.Lq <= most and c.Nd >= 264}


def head_call(case: head.Head) -> Call:
    torch.backends.cuda.matmul.allow_tf32 = case.tf32
    x = head.Inputs(case)
    Q, H, W, b = x.tensors
    return lambda: lik_ops.maxsim_from_hidden(Q, H, W, b, d_mask=x.d_mask, normalize=x.unit)


def head_tiles(case: head.Head) -> dict[str, Patches]:
    processors = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1

    def patches(BN: int, BK: int, warps: int, stages: int, programs: int, registers: int | None) -> Patches:
        changed = change(warps, stages, registers, programs * processors, BN=BN, BK=BK)
        return {"families.head.configs.configure_scores": changed}

    return {str(tile): patches(*tile) for tile in HEAD_TILES + (HEAD_NARROW_TILES if case.d <= 64 else ())}


# head_fp32: (tokens, features, hidden features of a step, warps, stages) of the kernel that stores tokens.
HEAD_FP32_TILES = (
    (128, 128, 32, 8, 2),
    (128, 128, 32, 8, 3),
    (128, 128, 32, 8, 4),
    (128, 64, 32, 8, 4),
    (64, 64, 32, 4, 4),
    (64, 128, 32, 4, 2),
    (64, 128, 16, 4, 3),
    (64, 128, 16, 4, 4),
)
HEAD_TF32_TILES = ((256, 128, 32, 8, 3), (256, 128, 32, 8, 4), (256, 128, 16, 8, 4))


def head_fp32_tiles(case: head.Head) -> dict[str, Patches]:
    def patches(BN: int, BD: int, BK: int, warps: int, stages: int) -> Patches:
        return {"families.head.configs.configure_tokens": change(warps, stages, BN=BN, BD=BD, BK=BK)}

    return {str(tile): patches(*tile) for tile in HEAD_FP32_TILES + (HEAD_TF32_TILES if case.tf32 else ())}


# soft: (BM, BN, warps, stages, registers) of the generic kernels.
SOFT_TILES = {
    "forward": (
        *((64, 64, 4, *rest) for rest in ((2, None), (2, 96), (3, 128))),
        *((128, 64, 4, *rest) for rest in ((2, None), (2, 128), (3, None))),
        *((128, 64, 8, *rest) for rest in ((2, None), (3, 80), (3, 128))),
    ),
    "queries": (
        *((64, 64, 4, *rest) for rest in ((3, None), (2, 128))),
        *((128, 64, 8, *rest) for rest in ((2, None), (3, 128), (2, 128))),
        *((64, 128, 4, 2, None), (128, 128, 8, 2, None), (128, 32, 8, 3, 128)),
    ),
    "documents": (
        *((64, 64, 4, *rest) for rest in ((3, None), (2, 160))),
        *((128, 64, 8, *rest) for rest in ((2, None), (3, None))),
        *((64, 128, 4, 2, None), (128, 128, 8, 2, None)),
    ),
}


def soft_cases() -> dict[str, tuple[str, Case]]:
    sizes: dict[str, tuple[int, dict[str, Any]]] = {"256x256": (256, soft.SHORT), "pages 32x32": (32, soft.PAGES)}
    shapes = [Case(name, n, n, **lengths) for name, (n, lengths) in sizes.items()]
    return {f"{case.name}, {part}": (part, case) for case in shapes for part in SOFT_TILES}


def soft_call(case: tuple[str, Case]) -> Call:
    """Return a part of a call. A backward receives freshly computed soft maxima."""
    part, x = case[0], Inputs(case[1], "cuda")
    rest = None, None, None, None, soft.TAU, False
    if part == "forward":
        return lambda: torch.ops.lik.maxsim_soft_fwd(x.Q, x.D, *rest, False)[0]
    lse = torch.ops.lik.maxsim_soft_fwd(x.Q, x.D, *rest, True)[1]
    needs = [part == "queries", part == "documents", False, False]
    return lambda: torch.ops.lik.maxsim_soft_bwd(x.grad_scores, x.Q, x.D, lse, *rest, needs)[needs.index(True)]


def soft_tiles(case: tuple[str, Case]) -> dict[str, Patches]:
    name = f"families.soft.configs.configure_soft_{'forward' if case[0] == 'forward' else 'backward'}"
    generic = {"families.soft.gpu_sm90.get_forced_kernel": put(lambda: "generic")}

    def rows(present: Callable[..., Any], BM: int) -> Callable[..., Any]:
        """Patch the forward so that a query longer than a tile is processed tile by tile."""

        def choose(*args: Any, **kwargs: Any) -> Any:
            found = present(*args, **kwargs)
            each, long = min(found.config.ROWS_PER_QUERY, BM), found.config.ROWS_PER_QUERY > BM
            long = long or found.config.LONG_QUERIES
            return replace(found, config=found.config._replace(ROWS_PER_QUERY=each, LONG_QUERIES=long))

        return choose if case[0] == "forward" else present

    def patches(BM: int, BN: int, warps: int, stages: int, registers: int | None) -> Patches:
        changed = change(warps, stages, registers, BM=BM, BN=BN)
        return {name: lambda present: rows(changed(present), BM), **generic}

    return {str(tile): patches(*tile) for tile in SOFT_TILES[case[0]]}


# backward: (BM, BN, warps, stages, registers) of the gradients, (BM, warps) of the lists of bucketed rows, and
# (BN, tokens of a program, warps) of the sparse kernel. Long documents with few rows compare the kernel that sums hit
# tokens, with each tile, to the kernel that sums all tokens. fp32 compares three TF32 products to fp16 terms.
GATHER_TILES = (
    *((8, 16, 4, None, registers) for registers in (128, 112)),
    *((8, 4, 4, None, 64), (16, 8, 4, None, 128), (4, 16, 2, None, 128), (8, 32, 4, None, 255), (4, 32, 2, None, 255)),
)
PRODUCT_TILES = (
    *((64, 16, 4, *rest) for rest in ((3, 168), (3, 128), (4, 168))),
    *((64, 32, 4, 3, 168), (128, 16, 4, 3, 168)),
)
FP32_PRODUCT_TILES = ((32, 16, 4, 1, 255), (32, 16, 4, 2, 255), (32, 16, 4, 3, 255), (32, 32, 8, 2, 255))
# Tiles without lists, whose products contain all query rows.
FEW_ROWS_TILES = (
    *((64, 32, 4, *rest) for rest in ((3, 168), (2, 168), (3, 255))),
    *((64, 64, 4, 2, 255), (64, 64, 8, 2, 128), (64, 64, 8, 2, 168), (64, 128, 8, 2, 255), (128, 64, 8, 2, 128)),
    *((128, 32, 4, 2, 168), (128, 32, 4, 2, 255)),
)
FEW_ROWS_FP32_TILES = (
    (32, 32, 4, 2, 255),
    (32, 32, 8, 2, 128),
    (32, 64, 8, 2, 255),
    (32, 64, 8, 1, 128),
    (64, 32, 8, 2, 255),
)
_UNLISTED: Patches = {"gpu.tuning.backward_configs.MIN_LISTED_BYTES": put(2**62)}
FP32_TERMS = {
    "TF32 products": {"gpu.backward.documents._MIN_SPLIT_ROWS_PER_TOKEN": put(2**31)},
    "fp16 terms": {"gpu.backward.documents._MIN_SPLIT_ROWS_PER_TOKEN": put(0)},
}
LISTS = ((1024, 4), (512, 2))
SPARSE_TILES = ((32, 1024, 4), (16, 1024, 4), (32, 512, 4), (32, 256, 4), (32, 1024, 8), (32, 1024, 2))
LONG_TILES = (128, 256, 512)
_BACKWARD_CASES = (
    Case("in-batch 256", 256, 256, 32, 300),
    Case("in-batch long", 128, 128, 32, 1024),
    Case("pages", 128, 128, 1024, 1024),
    Case("candidates", 256, 16, 32, 1024, candidates=True),
    Case("small", 32, 32, 32, 300),
    Case("small fp32", 64, 64, 32, 180, dtype="float32"),
    Case("in-batch 256 fp32", 256, 256, 32, 300, dtype="float32"),
    Case("in-batch long fp32", 128, 128, 32, 1024, dtype="float32"),
    Case("pages fp32", 16, 16, 1024, 1024, dtype="float32"),
    *(Case(f"in-batch {n}, d 320", n, n, 32, 300, d=320) for n in (64, 256)),
    Case("in-batch 256, d 256", 256, 256, 32, 300, d=256),
    *(Case(f"in-batch 64 fp32, d {d}", 64, 64, 32, 300, d=d, dtype="float32") for d in (256, 320)),
    Case("pages, d 320", 16, 16, 1024, 1024, d=320),
    *(Case(f"few rows, 4 x 1000, 64/128, d {d}", 4, 1000, 64, 128, d=d) for d in (128, 320)),
    Case("few rows, 8 x 200, 32/300, d 128", 8, 200, 32, 300),
    Case("few rows, 16 x 64, 32/180, d 128", 16, 64, 32, 180),
    Case("few rows, 16 x 64, 32/180, d 320", 16, 64, 32, 180, d=320),
    Case("few rows, 4 x 32, 128/180, d 512", 4, 32, 128, 180, d=512),
    Case("few rows fp32, 64 x 256, 8/100, d 128", 64, 256, 8, 100, dtype="float32"),
    Case("few rows fp32, 16 x 64, 32/180, d 128", 16, 64, 32, 180, dtype="float32"),
    Case("few rows fp32, 8 x 200, 32/300, d 128", 8, 200, 32, 300, dtype="float32"),
    Case("long", 16, 32, 32, 8192),
    Case("long few", 8, 16, 32, 2048),
)


def draw_argmax(case: Case, kind: str) -> Tensor:
    """Draw an argmax: "uniform", "zipf" (a few tokens win most query tokens, as in text), or "one" token."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (case.Nq, case.Nd, case.Lq) if case.candidates else (case.Nd, case.Nq, case.Lq)
    uniform = torch.rand(shape, generator=generator, device="cuda")
    if kind == "one":
        index = torch.full(shape, case.Ld // 3, device="cuda")
    elif kind == "zipf":  # the n-th most frequent token, chosen at random, wins a share of about 1 / n
        order = torch.randperm(case.Ld, generator=generator, device="cuda")
        index = order[(uniform.mul_(torch.tensor(case.Ld + 1.0).log()).exp_() - 1).long().clamp_(0, case.Ld - 1)]
    else:
        index = (uniform * case.Ld).long().clamp_(max=case.Ld - 1)
    return index.to(torch.int16)


def backward_cases() -> dict[str, tuple[str, str, Case]]:
    drawn = itertools.product(_BACKWARD_CASES, ("uniform", "zipf", "one"), ("queries", "documents"))
    return {f"{case.name}, {kind}, {part}": (part, kind, case) for case, kind, part in drawn}


def backward_call(case: tuple[str, str, Case]) -> Call:
    part, kind, shape = case
    x, argmax = Inputs(shape, "cuda"), draw_argmax(shape, kind)
    needs = [part == "queries", part == "documents", False]
    args = x.grad_scores, x.Q, x.D, argmax, None, None, None, False, needs
    return lambda: torch.ops.lik.maxsim_bwd_lowmem(*args)[needs.index(True)]


def backward_tiles(case: tuple[str, str, Case]) -> dict[str, Patches]:
    part, kind, shape = case
    table = "gpu.tuning.backward_configs.configure"
    if part == "documents" and shape.name.startswith("long"):
        every = {"all tokens": {"gpu.backward.documents._MIN_TOKENS_PER_ROW": put(10**9)}}
        chooser = "gpu.tuning.backward_configs.choose_long_tile_tokens"
        return every | {f"tiles of {n}": {chooser: put(lambda *_, n=n: n)} for n in LONG_TILES}
    terms = FP32_TERMS if part == "documents" and shape.dtype == "float32" else {}
    if kind != "uniform":
        return terms

    def tiles(name: str, choices: tuple) -> dict[str, Patches]:
        return {str(c): {f"{table}_{name}": change(*c[2:], BM=c[0], BN=c[1])} for c in choices}

    if part == "queries":
        limits = {f"{n} registers": {f"{table}_query_gradients": change(registers=n)} for n in (128, 168)}
        return tiles("gather", GATHER_TILES) | limits
    if shape.candidates:
        most = "gpu.backward.documents._MAX_PROGRAM_TOKENS"
        changed = partial(change, stages=1, registers=255)
        return {
            str((BN, tokens, warps)): {f"{table}_sparse_documents": changed(warps, BN=BN), most: put(tokens)}
            for BN, tokens, warps in SPARSE_TILES
        }
    if shape.name.startswith("few rows"):
        unlisted = tiles("documents", FEW_ROWS_TILES if shape.dtype == "bfloat16" else FEW_ROWS_FP32_TILES)
        return {"no lists": _UNLISTED} | {name: patches | _UNLISTED for name, patches in unlisted.items()}
    lists = {f"lists {BM} x {warps}": {f"{table}_buckets": change(warps, 1, BM=BM)} for BM, warps in LISTS}
    return terms | tiles("documents", PRODUCT_TILES if shape.dtype == "bfloat16" else FP32_PRODUCT_TILES) | lists


# query_parts: query gradients over many documents without parts, and with other parts.
QUERY_PART_CASES = (
    Case("2 x 500, 32/1, d 512", 2, 500, 32, 1, d=512),
    Case("1 x 1000, 64/64, d 320", 1, 1000, 64, 64, d=320),
    Case("8 x 10000, 8/1, fp32", 8, 10000, 8, 1, dtype="float32"),
    Case("1 x 400, 32/180", 1, 400, 32, 180),
    Case("16 x 1000, 32/300", 16, 1000, 32, 300),
    Case("16 x 1000, 32/300, normalize", 16, 1000, 32, 300, normalize=True),
    Case("64 x 400, 32/300", 64, 400, 32, 300),
    Case("64 x 400, 1024/64", 64, 400, 1024, 64),
    Case("512 x 512, 32/180", 512, 512, 32, 180),
    Case("512 x 512, 32/180, normalize", 512, 512, 32, 180, normalize=True),
    Case("1024 x 1024, 32/64", 1024, 1024, 32, 64),
)
QUERY_PARTS: dict[str, Patches] = {
    "no parts": {"gpu.backward.call._MIN_DOCUMENTS": put(2**31)},
    "parts added": {"gpu.backward.call._FULL_SM": put(0)},
    "parts stored": {"gpu.backward.call._FULL_SM": put(2**31)},
    "parts of 32": {"gpu.backward.call._PART_DOCUMENTS": put(32)},
    "parts of 64": {"gpu.backward.call._PART_DOCUMENTS": put(64)},
    "at most 16": {"gpu.backward.call._MAX_PARTS": put(16)},
    "168 registers": {"gpu.tuning.backward_configs.configure_query_gradients": change(registers=168)},
}


def query_gradient_call(case: Case) -> Call:
    """Return a call of a query gradient. Normalized queries also have weights and masks."""
    x, argmax = Inputs(case, "cuda"), draw_argmax(case, "uniform")
    mask = weight = None
    if case.normalize:
        mask, weight = torch.rand((2, case.Nq, case.Lq), device="cuda").unbind()
        mask = mask > 0.1
    args = x.grad_scores, x.Q, x.D, argmax, mask, None, weight, case.normalize, [True, False, False]
    return lambda: torch.ops.lik.maxsim_bwd_lowmem(*args)[0]


SWEEPS = {
    "forward": Sweep(forward_cases, forward_call, forward_tiles),
    "few": Sweep(few_cases, few_call, few_tiles),
    "encoded": Sweep(encoded_cases, encoded_call, encoded_tiles),
    "turns": Sweep(turn_cases, turn_call, turn_alternatives),
    "narrow": Sweep(narrow_cases, dense_call, narrow_tiles),
    "wide_fp32": Sweep(wide_fp32_cases, wide_fp32_call, wide_fp32_tiles, exact=False),
    "wide_splits": Sweep(
        wide_split_cases,
        dense_call,
        lambda case: WIDE_SPLIT_SIDES,
        exact=False,
    ),
    "encoded_splits": Sweep(
        lambda: name_encoded(ENCODED_SPLIT_FORMATS, ENCODED_SPLIT_SHAPES),
        encoded_shape_call,
        lambda case: WIDE_SPLIT_SIDES,
    ),
    "wide_encoded": Sweep(
        wide_encoded_cases, encoded_shape_call, lambda case: encoded_tile_patches(WIDE_ENCODED_TILES)
    ),
    "short": Sweep(short_cases, short_call, short_tiles, exact=False),
    "short_encoded": Sweep(short_encoded_cases, encoded_shape_call, short_encoded_tiles),
    "pairs": Sweep(pair_cases, dense_call, lambda case: PAIR_SIDES),
    "head": Sweep(head_cases, head_call, head_tiles),
    "head_fp32": Sweep(
        lambda: {c.name: c for c in head.CASES if c.dtype == "float32"}, head_call, head_fp32_tiles, exact=False
    ),
    "soft": Sweep(soft_cases, soft_call, soft_tiles, exact=False),
    "backward": Sweep(backward_cases, backward_call, backward_tiles, exact=False),
    "query_parts": Sweep(
        lambda: {case.name: case for case in QUERY_PART_CASES},
        query_gradient_call,
        lambda case: QUERY_PARTS,
        exact=False,
    ),
}
