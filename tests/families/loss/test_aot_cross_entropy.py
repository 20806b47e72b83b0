"""Test that the contrastive loss kernels compile for every architecture without a GPU and do not spill."""

import re

import pytest
from triton.compiler import ASTSource

from lik_ops.csrc_triton.loss import kernels as loss_kernels
from lik_ops.families.loss.gpu import BLOCK_SCORES, LAUNCH_OPTIONS
from lik_ops.gpu.tuning.architectures import ARCHITECTURES

from ...support.machine_code import compile_as_launched, cuda_resources, target

ARGUMENTS = {
    "count": {"count": "*i64", "rows": "i32"},
    "losses": {"scores": "*fp32", "losses": "*fp32", "lse": "*fp32", "columns": "i32", "temperature": "fp32"},
    "gradients": {
        "scores": "*fp32",
        "gradients": "*fp32",
        "upstream": "*fp32",
        "upstream_stride": "i32",
        "count": "*i64",
        "lse": "*fp32",
        "columns": "i32",
        "begin": "i32",
        "temperature": "fp32",
    },
}


KERNELS = {
    "count": loss_kernels.maxsim_count_labels,
    "losses": loss_kernels.maxsim_label_losses,
    "gradients": loss_kernels.maxsim_label_gradients,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ARGUMENTS)
def test_kernels_compile_to_one_layout_without_spills(kernel, name):
    """Alignment and label dtype do not change the layout, which determines the order of a sum."""
    arch, layouts = ARCHITECTURES[name], set()
    for labels, is_aligned in (("*i64", True), ("*i32", False)):
        function = KERNELS[kernel]
        given = ARGUMENTS[kernel] | {
            "labels": labels,
            "label_stride": "i32",
            "IGNORED": "constexpr",
            "BLOCK": "constexpr",
        }
        arguments = {name: given[name] for name in function.arg_names}
        names = list(arguments)
        constants = {(names.index("IGNORED"),): -100, (names.index("BLOCK"),): BLOCK_SCORES}
        aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(arguments.values()) if kind[0] == "*"}
        source = ASTSource(function, arguments, constants, aligned if is_aligned else {})
        found = compile_as_launched(source, target(arch), LAUNCH_OPTIONS)
        layouts.add(tuple(re.findall(r"#blocked.* = .*", found.asm["ttgir"])))
        if not arch.is_amd:
            registers, spills = cuda_resources(found.asm["cubin"])
            assert spills == 0 and registers <= 128, registers
    assert len(layouts) == 1 and len(layouts.pop()) == 1
