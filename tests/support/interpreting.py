"""Make Triton's interpreter faster and order its sums, because the tests spend most of their time in it.

The results of the interpreter do not change.
"""

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def order_dot_products():
    """Sum products in one order.

    On some processors BLAS has one order for each shape. Tests check which bits of a score may depend on kernel tiles.
    """

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = (t.data.astype(d.data.dtype) for t in (a, b))
        total = np.zeros_like(d.data)
        for k in range(x.shape[-1]):
            total += x[..., k, None] * y[..., k, None, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def reduce_by_slices():
    """Reduce slice by slice, not number by number, in the same order."""
    by_numbers = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self, inputs):
        if self.axis is None:
            return by_numbers(self, inputs)
        slices = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        total, *others = (
            tuple(self.to_tensor(x[n], y.dtype) for x, y in zip(slices, inputs, strict=True))
            for n in range(len(slices[0]))
        )
        for other in others:
            total = self.combine_fn.fn(*total, *other)
            total = total if isinstance(total, tuple) else (total,)
        found = [x.handle.data.reshape(slices[0].shape[1:]) for x in total]
        if self.keep_dims:
            found = [np.expand_dims(x, self.axis) for x in found]
        return [self.to_tensor(x, y.dtype) for x, y in zip(found, inputs, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce


def patch_language_once():
    """Patch the language once per launch instead of once per function call."""
    patch, run, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_lang(fn):
        languages = frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)
        if languages in patched:
            return None
        patched.add(languages)
        return patch(fn)

    def call(self, *args, **kwargs):
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


def check_overflow_only_in_debug():
    """Skip overflow checks of sums outside debug mode, because Triton drops their result there."""
    by_triton = TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            by_triton(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = sanitize


def cache_types():
    """Cache block type attributes by shape and numpy types by name, and broadcast only different shapes."""
    block_type, broadcast, numpy_type = (
        core.block_type.__init__,
        TritonSemantic.broadcast_impl_value,
        interpreter._get_np_dtype,
    )
    by_sizes, by_shape, types = {}, {}, {}

    def initialize_block_type(self, element_ty, shape):
        found = by_shape.get(id(shape))
        if found is None:
            sizes = tuple(n.value if isinstance(n, core.constexpr) else n for n in shape)
            found = by_sizes.get(sizes)
        if found is None:
            block_type(self, element_ty, shape)
            of_tensors = core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(self.numel)
            # Keep the shape so that no other shape gets its id.
            by_sizes[sizes] = by_shape[id(self.shape)] = self.shape, self.numel, of_tensors
            return
        self.element_ty = element_ty
        self.shape, self.numel, _ = found
        self.name = f"<{self.shape}, {element_ty}>"

    of_scalars = core.tuple([]), core.constexpr(1)

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = by_shape[id(type.shape)][2] if type.is_block() else of_scalars

    def broadcast_impl_value(self, lhs, rhs):
        x, y = lhs.type, rhs.type
        if x.is_block() == y.is_block() and (not x.is_block() or x.shape is y.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def get_np_dtype(kind):
        kind = kind.element_ty if isinstance(kind, core.block_type) else kind
        found = types.get(kind.name)
        if found is None:
            found = types[kind.name] = numpy_type(kind)
        return found

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = (
        initialize_block_type,
        tensor,
        get_np_dtype,
    )
    TritonSemantic.broadcast_impl_value = broadcast_impl_value


def patch():
    """Apply all patches in an interpreting process."""
    for change in (
        order_dot_products,
        patch_language_once,
        reduce_by_slices,
        check_overflow_only_in_debug,
        cache_types,
    ):
        change()
