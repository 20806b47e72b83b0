"""Bit-exact numpy encoder and decoder of residual codes, codecs for any tokens, and an index of fast-plaid."""

from pathlib import Path

import numpy as np
import torch

import lik_ops
from lik_ops import ResidualCodec
from lik_ops.formats.table import RESIDUAL_FORMATS

# Six documents of an index that fast-plaid 1.7 built from random unit tokens, with 4 bits for each of 128 features.
# `centroids` are the used ones of 512, with renumbered codes. `codes` and `residuals` are stored as in its files, next
# to `bucket_cutoffs` and `lookup_bucket_weights`. `tokens` are the originals. `decoded` and the `scores` of `queries`
# are the results of fast-plaid.
GOLDEN = Path(__file__).parents[1] / "data/fast_plaid.npz"
NBITS = (1, 2, 4, 8)
FORMATS = tuple(RESIDUAL_FORMATS)


def packed(buckets, nbits, order="plaid"):
    """Return buckets ``[n, d]`` as bytes, cut from one bit stream."""
    place = np.arange(nbits) if order != "big" else np.arange(nbits)[::-1]  # of the bits of a bucket, in the stream
    bits = ((buckets[:, :, None] >> place) & 1).reshape(len(buckets), buckets.shape[1] * nbits)
    return np.packbits(bits.astype(np.uint8), axis=1, bitorder=_get_byte_order(order))


def unpacked(data, nbits, d, order="plaid"):
    """Invert `packed`."""
    place = np.arange(nbits) if order != "big" else np.arange(nbits)[::-1]
    bits = np.unpackbits(data, axis=1, bitorder=_get_byte_order(order))[:, : d * nbits].reshape(-1, d, nbits)
    return (bits.astype(np.int64) << place).sum(-1)


def _get_byte_order(order):
    return "little" if order == "little" else "big"


def encoded(x, codec):
    """Return codes, and buckets ``[n, d]``."""
    centroids, cutoffs = codec.centroids.double().numpy(), codec.cutoffs.double().numpy()
    codes = (x @ centroids.T).argmax(1)
    off = x - centroids[codes]
    return codes, (off[:, :, None] > cutoffs).sum(-1)  # a value equal to a cutoff is below it


def decoded(codes, buckets, codec):
    """Return the tokens of codes and buckets in fp64."""
    x = codec.centroids.double().numpy()[codes] + codec.weights.double().numpy()[buckets]
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) if codec.normalize else x


def random_codec(d, nbits, n_centroids=7, **options):
    """Return unit centroids and uneven buckets, so that no two bucket orders are alike."""
    generator = torch.Generator().manual_seed(nbits)
    centroids = torch.nn.functional.normalize(torch.randn(n_centroids, d, generator=generator), dim=-1)
    cutoffs = (torch.randn(2**nbits - 1, generator=generator) * 0.3 / d**0.5).sort().values
    ends = torch.cat([cutoffs[:1] - 0.4 / d**0.5, cutoffs, cutoffs[-1:] + 0.5 / d**0.5])
    return ResidualCodec(centroids, torch.lerp(ends[:-1], ends[1:], 0.4), cutoffs, **options)


def quantize(D, format="int8", scale="token", **options):
    """Call `lik_ops.quantize`, and support residual codes with a random codec."""
    if format not in RESIDUAL_FORMATS:
        return lik_ops.quantize(D, format, scale, **options)
    assert scale == "token"
    return lik_ops.quantize(D, random_codec(D.shape[-1], RESIDUAL_FORMATS[format].nbits).to(D.device), **options)


def golden():
    """Return the arrays of `GOLDEN` as tensors, and their codec."""
    found = {name: torch.from_numpy(x) for name, x in np.load(GOLDEN).items()}
    return found, ResidualCodec(found["centroids"], found["bucket_weights"], found["bucket_cutoffs"])
