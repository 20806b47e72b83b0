"""Emulate the few inline PTX instructions of the kernels on numpy arrays, for Triton's interpreter."""

import re

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def _prmt(a, b, selector):
    pool, out = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros(np.broadcast(a, selector).shape)
    out = out.astype(np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (pool >> (8 * (nibble & 7)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & 128, 255, 0).astype(np.uint32)
        out |= np.where(nibble & 8, sign, byte).astype(np.uint32) << np.uint32(8 * i)
    return out


def _lop3(a, b, c, table):
    out = np.zeros_like(a)
    for i in range(8):
        if int(table.flat[0]) >> i & 1:
            x, y, z = (v if i >> n & 1 else ~v for v, n in ((a, 2), (b, 1), (c, 0)))
            out |= x & y & z
    return out


def _halves(x):
    return (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def _pair(low, high):
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def _round_to_half(x, kind):
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    return torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)


def _add_pairs(a, b):
    pairs = zip(_halves(a), _halves(b), strict=True)
    return _pair(*((x.view(np.float16) + y.view(np.float16)).view(np.uint16) for x, y in pairs))


def _fma_pairs(a, b, c, kind):
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    a, b, c = ([torch.from_numpy(h.view(np.int16)).view(dtype).double().numpy() for h in _halves(x)] for x in (a, b, c))
    return _pair(*(_round_to_half(x * y + z, kind) for x, y, z in zip(a, b, c, strict=True)))


OPERATIONS = {
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "shl.b32": lambda a, n: a << n,
    "shr.b32": lambda a, n: a >> n,
    "or.b32": lambda a, b: a | b,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "add.rn.f16x2": _add_pairs,
    "fma.rn.f16x2": lambda a, b, c: _fma_pairs(a, b, c, "f16x2"),
    "fma.rn.bf16x2": lambda a, b, c: _fma_pairs(a, b, c, "bf16x2"),
    "mul.rn.f32": lambda a, b: a * b,
    "cvt.f32.f16": lambda a: a.view(np.float16).astype(np.float32),
    "cvt.rn.f16x2.f32": lambda high, low: _pair(_round_to_half(low, "f16x2"), _round_to_half(high, "f16x2")),
    "cvt.rn.bf16x2.f32": lambda high, low: _pair(_round_to_half(low, "bf16x2"), _round_to_half(high, "bf16x2")),
}


def run(asm, registers):
    """Run the instructions on `registers`, arrays by name, which they modify."""
    for line in re.sub(r"^\s*\{|\}\s*$", "", asm).split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        if name == "mov.b32" and rest.startswith("{"):
            into, source = re.fullmatch(r"\{(.*)\}, (\w+)", rest).groups()
            for target, half in zip(into.split(","), _halves(registers[source]), strict=True):
                registers[target.strip()] = half
            continue
        target, *sources = (x.strip() for x in rest.split(","))
        values = [registers[x] if x in registers else np.full(1, int(x, 0), np.uint32) for x in sources]
        registers[target] = OPERATIONS[name](*np.broadcast_arrays(*values))


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """Emulate `triton.language.inline_asm_elementwise` for single elements and 32-bit results."""
    asm, constraints = (getattr(x, "value", x) for x in (asm, constraints))
    outputs = constraints.count("=")
    arrays = np.broadcast_arrays(*(x.handle.data for x in args))
    registers = {
        f"${outputs + n}": x if x.dtype == np.float32 else x.astype(np.int32).view(np.uint32).copy()
        for n, x in enumerate(np.ascontiguousarray(x) for x in arrays)
    }
    run(asm, registers)
    shape = list(arrays[0].shape)
    found = [
        tl.tensor(TensorHandle(registers[f"${n}"].view(np.int32), tl.int32), tl.block_type(tl.int32, shape))
        for n in range(outputs)
    ]
    return found[0] if outputs == 1 else tuple(found)
