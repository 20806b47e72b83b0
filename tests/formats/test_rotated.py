"""Test the rotated formats: the rotation, the codes, the scales, and errors on tokens with unequal features."""

import pytest
import torch

import lik_ops
from lik_ops.formats import rotation, table

FORMATS = {"rq4": 4, "rq2": 2, "rq1": 1}
every_format = pytest.mark.parametrize(("format", "nbits"), FORMATS.items())
FIRST_ROWS = {3: [0.9267766952966371, -0.021446609406726245, -0.375], 4: [0.5, -0.5, -0.5, 0.5]}
# Relative L2 errors of the best uniform quantizers of Gaussian features (Max, 1960), rounded up.
LARGEST_ERRORS = {"rq4": 0.108, "rq2": 0.346, "rq1": 0.605}


def test_rotation_is_orthogonal_with_fixed_values():
    for d in (1, 2, 3, 20, 96, 128, 144):
        R = rotation.make_rotation(d, torch.device("cpu"))
        torch.testing.assert_close(R @ R.T, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-14)
        assert rotation.make_rotation(d, torch.device("cpu")) is R
        x = torch.randn(3, 2, d)
        torch.testing.assert_close(rotation.rotate(rotation.rotate(x), inverse=True), x)
    # Stored documents depend on these values.
    expected = torch.tensor(FIRST_ROWS[4], dtype=torch.float64)
    torch.testing.assert_close(rotation.make_rotation(4, torch.device("cpu"))[0], expected)
    expected = torch.tensor(FIRST_ROWS[3], dtype=torch.float64)
    torch.testing.assert_close(rotation.make_rotation(3, torch.device("cpu"))[0], expected)


@every_format
@pytest.mark.parametrize("d", [20, 128])
def test_codes_are_the_nearest_odd_numbers(format, nbits, d):
    D = torch.randn(50, d)
    made = lik_ops.quantize(D, format)
    assert made.data.shape == (50, -(-d * nbits // 8)) and made.scale.dtype == torch.bfloat16
    codes = [(made.data >> shift) % 2**nbits for shift in range(0, 8, nbits)]
    codes = torch.stack(codes, -1).flatten(-2)[:, :d].double()
    rotated = D.double() @ rotation.make_rotation(d, D.device)
    levels = torch.arange(1 - 2**nbits, 2**nbits, 2).double()
    off = (rotated / made.scale.double()[:, None]).unsqueeze(-1) - levels
    assert (off.abs().argmin(-1) == codes).float().mean() > 0.999  # fp32 may round differently between two numbers
    x = (2 * codes - (2**nbits - 1)) * made.scale.double()[:, None] @ rotation.make_rotation(d, D.device).T
    torch.testing.assert_close(made.dequantize(torch.float64), x, rtol=0, atol=1e-5)


@every_format
def test_scales_have_nearly_the_least_error(format, nbits):
    x = torch.randn(200, 128).double()
    scale = table.compute_scales(*table.compute_extremes(x, format), format)
    found = (x - table.decode_tokens(table.encode_tokens(x, scale, None, format), scale, None, format, 128)).norm(dim=1)
    best = torch.full_like(found, torch.inf)
    for factor in torch.linspace(0.7, 1.4, 71):
        s = scale.double() * factor
        y = table.decode_tokens(table.encode_tokens(x, s, None, format), s.float(), None, format, 128)
        best = torch.minimum(best, (x - y).norm(dim=1))
    assert (found / best).mean() < 1.04 and (found / best).max() < 1.25


@every_format
def test_errors_do_not_depend_on_the_distribution_of_features(format, nbits):
    tokens = {
        "gaussian": torch.randn(500, 96),
        "few large features": torch.randn(500, 96) * torch.where(torch.arange(96) < 3, 30.0, 1.0),
        "one feature": torch.nn.functional.one_hot(torch.arange(500) % 96, 96).float(),
        "far from zero": torch.randn(500, 96) + 5,
    }
    for name, x in tokens.items():
        off = (lik_ops.quantize(x, format).dequantize() - x).norm(dim=-1) / x.norm(dim=-1)
        assert off.mean() < 1.05 * LARGEST_ERRORS[format], name
    plain = lik_ops.quantize(tokens["few large features"], "binary").dequantize() - tokens["few large features"]
    assert (plain.norm(dim=-1) / tokens["few large features"].norm(dim=-1)).mean() > 0.8  # without a rotation


@every_format
def test_huge_and_tiny_tokens_keep_their_scale(format, nbits):
    x = torch.randn(6, 32)
    expected = lik_ops.quantize(x, format).dequantize()
    for power in (100, -100):
        found = lik_ops.quantize(x * 2.0**power, format).dequantize()
        assert torch.equal(found, expected * 2.0**power)


def test_rotated_queries_have_full_precision_on_cpu():
    Q, D = torch.randn(4, 5, 128).half(), torch.randn(6, 7, 128)
    made = lik_ops.quantize(D, "rq4")
    expected = lik_ops.reference.maxsim(Q.double(), made.dequantize(torch.float64))
    torch.testing.assert_close(lik_ops.maxsim(Q, made).double(), expected, rtol=1e-5, atol=1e-5)


@every_format
def test_compiled_quantize_matches_eager(format, nbits):
    D = torch.randn(20, 24)
    whole = torch.compile(lambda D: lik_ops.quantize(D, format).dequantize(), fullgraph=True, backend="eager")
    rotation._cached.clear()
    assert torch.equal(whole(D), lik_ops.quantize(D, format).dequantize())
    assert all(type(x) is torch.Tensor for x in rotation._cached.values())
