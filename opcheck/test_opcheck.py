"""`torch.library.opcheck` of every operator over its sample inputs."""

import pytest
import torch

from .samples import OPERATORS

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLACES = [
    *(pytest.param("cpu", dtype, id=f"cpu-{str(dtype)[6:]}") for dtype in CPU_DTYPES),
    *(pytest.param("cuda", dtype, id=f"cuda-{str(dtype)[6:]}", marks=pytest.mark.gpu) for dtype in GPU_DTYPES),
]


def _check(op: str, device: str, dtype: torch.dtype, take: slice) -> None:
    overload = getattr(torch.ops.lik, op).default
    samples = list(OPERATORS[op](dtype, device))[take]
    assert samples
    # Atomic adds may round differently from run to run: the outputs of two runs are compared by opcheck.
    for sample in samples:
        try:
            torch.library.opcheck(overload, sample.args, sample.kwargs)
        except Exception as error:
            raise AssertionError(f"lik::{op}, sample {sample}: {error}") from error


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck_of_a_sample(op, device, dtype):
    _check(op, device, dtype, slice(None, None, 5 if dtype == torch.float32 else 11))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck_of_every_sample(op, device, dtype):
    _check(op, device, dtype, slice(None))


def test_every_operator_has_samples():
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("lik::")
    }
    assert registered == set(OPERATORS)
