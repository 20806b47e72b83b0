"""Test programs and packages that were saved by other versions of the source."""

import io
import os
import subprocess
import sys

import pytest
import torch
from torch.export import Dim

import lik_ops

from ..ops.stack.test_compile import copied_package
from .test_export import DATA, SIZES, arguments, assert_same, targets


class Layouts(torch.nn.Module):
    """Module with all functions that `test_ragged_stack.py` and `test_retrieve.py` export."""

    def forward(self, Q, D, cu_q, cu_d, pairs):
        options = {"cu_seqlens_q": cu_q, "cu_seqlens_d": cu_d, "max_seqlen_q": 64}
        return (
            lik_ops.maxsim_varlen(Q, D, cu_q, cu_d, normalize=True),
            lik_ops.maxsim_candidates_varlen(Q, D, cu_d[pairs], cu_d[pairs + 1] - cu_d[pairs], cu_seqlens_q=cu_q),
            lik_ops.maxsim_pair_list(Q, D, pairs, **options),
            *lik_ops.retrieve(Q[:6].unflatten(0, (2, 3)), D, 2, cu_seqlens_d=cu_d),
        )


def packed(q_lengths=(3, 4, 5), d_lengths=(6, 1, 9, 2)):
    generator = torch.Generator().manual_seed(sum(q_lengths))
    Q, D = (torch.randn(sum(n), 8, generator=generator) for n in (q_lengths, d_lengths))
    pairs = torch.randint(0, min(len(q_lengths), len(d_lengths)), (len(q_lengths), 2), generator=generator)
    return Q, D, *(torch.tensor([0, *n]).cumsum(0) for n in (q_lengths, d_lengths)), pairs


def exported_layouts():
    queries = Dim("Nq", min=2)
    axes = [{0: Dim("Tq", min=6)}, {0: Dim("Td")}, {0: queries + 1}, {0: Dim("ends", min=4)}, {0: queries}]
    shapes = dict(zip(("Q", "D", "cu_q", "cu_d", "pairs"), axes, strict=True))
    program = torch.export.export(Layouts(), packed(), dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # holds paths of the exporting machine
    return program


def test_programs_of_other_layouts_are_saved_and_score():
    """Test the program as exported now, and as saved with torch 2.13 while 0.1.0 was the latest release.

    The file was written by ``python -c "from tests.export import test_saved_programs as t;
    t.torch.export.save(t.exported_layouts(), FILE)"``.
    """
    buffer = io.BytesIO()
    torch.export.save(exported_layouts(), buffer)
    buffer.seek(0)
    programs = [torch.export.load(buffer)]
    if torch.__version__ >= "2.13":
        programs.append(torch.export.load(DATA / "layouts-after-0.1.0.pt2"))
    for program in programs:
        ours = [t for t in targets(program) if t.startswith("lik")]
        assert ours == ["lik.maxsim_ragged_fwd.default"] * 3 + ["lik.maxsim_topk.default"]
        for lengths in (((3, 4, 5), (6, 1, 9, 2)), ((7, 0), (2, 2, 70)), ((1, 1, 30, 5), (4, 0, 8, 3, 5))):
            assert_same(program.module()(*packed(*lengths)), Layouts()(*packed(*lengths)))


SAVE = """
import sys, torch, lik_ops
from torch.export import Dim
kind, path = sys.argv[1:]

class Scores(torch.nn.Module):
    def forward(self, Q, D, d_mask):
        return lik_ops.maxsim(Q, D, None, d_mask, normalize=True)

document = {0: Dim("Nd"), 1: Dim("Ld")}
shapes = {"Q": {0: Dim("Nq"), 1: Dim("Lq")}, "D": document, "d_mask": document}
example = torch.randn(3, 4, 8), torch.randn(5, 6, 8), torch.ones(5, 6, dtype=torch.bool)
if kind == "program":
    torch.export.save(torch.export.export(Scores(), example, dynamic_shapes=shapes), path)
else:
    lik_ops.export.package(Scores(), example, path, dynamic_shapes=shapes)
print(lik_ops.__version__, lik_ops.__file__)
"""


@pytest.mark.parametrize("kind", ["program", pytest.param("package", marks=pytest.mark.slow)])
def test_programs_and_packages_of_another_version_score(kind, tmp_path):
    """The program was saved by another version of lik_ops, with equal schemas but different operator bodies."""
    body = copied_package(tmp_path)
    source = body.read_text()
    edited = source.replace("    check_dense(op, Q, D,", "    Q = Q + 0\n    check_dense(op, Q, D,")
    assert edited != source
    body.write_text(edited)
    (tmp_path / "lik_ops" / "_version.py").write_text('__version__ = "0.0.9"\n')
    path = tmp_path / "saved.pt2"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SAVE, kind, str(path)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-2:] == ["0.0.9", str(tmp_path / "lik_ops" / "__init__.py")]
    load = torch._inductor.aoti_load_package if kind == "package" else lambda p: torch.export.load(p).module()
    module = load(str(path))
    for sizes in SIZES:
        Q, D, _, d_mask, _ = (t.nan_to_num() for t in arguments("cross", sizes))
        expected = lik_ops.maxsim(Q, D, None, d_mask, normalize=True)
        assert_same(module(Q, D, d_mask), expected, exact=kind == "program")
