"""Test that each invalid corpus manifest raises a ValueError with its path and the field."""

import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lik_ops import Corpus

from .test_corpus import draw

pytest.importorskip("safetensors", reason="pip install '.[retrieval]'")


def edited(path, edit):
    """Change the manifest and update its checksum."""
    at = path / "manifest.json"
    content = json.loads(at.read_text())
    del content["sha256"]
    edit(content)
    body = json.dumps(content, sort_keys=True)
    at.write_text(json.dumps({**content, "sha256": hashlib.sha256(body.encode()).hexdigest()}))


def shard_field(name, value):
    return lambda content: content["shards"][0].__setitem__(name, value)


WRONG = {
    "outside": (shard_field("file", "../shard.safetensors"), r"shards\[0\].file: expected a .safetensors file in"),
    "absolute": (shard_field("file", "/tmp/shard.safetensors"), r"shards\[0\].file: expected"),
    "backslash": (shard_field("file", "..\\shard.safetensors"), r"shards\[0\].file: expected"),
    "null": (shard_field("file", "a\0.safetensors"), r"shards\[0\].file: expected"),
    "long": (shard_field("file", "/" * 9999), r"shards\[0\].file: expected .{,99}$"),
    "no string": (shard_field("file", 3), r"shards\[0\].file: expected str, got int"),
    "bytes": (shard_field("bytes", "3"), r"shards\[0\].bytes: expected int, got str"),
    "fraction": (shard_field("tokens", 3.0), r"shards\[0\].tokens: expected int, got float"),
    "truth": (shard_field("documents", True), r"shards\[0\].documents: expected int, got bool"),
    "negative": (shard_field("documents", -1), r"shards\[0\].documents: expected 0 or more"),
    "huge": (shard_field("tokens", 1 << 70), r"shards\[0\].tokens: expected 0 or more, below 2\^63"),
    "checksum": (shard_field("sha256", None), r"shards\[0\].sha256: expected str, got NoneType"),
    "more": (shard_field("more", 1), r"shards\[0\]: expected an object of file, bytes, sha256, documents, tokens"),
    "no object": (lambda c: c.update(shards=[3]), r"shards\[0\]: expected an object"),
    "no list": (lambda c: c.update(shards={}), "shards: expected list, got dict"),
    "twice": (lambda c: c.update(shards=c["shards"] * 2), "shards: expected files of different names"),
    "count": (lambda c: c.update(documents=7), "documents: expected the sum over all shards, 2, got 7"),
    "d": (lambda c: c.update(d="8"), "d: expected int, got str"),
    "no d": (lambda c: c.pop("d"), "d: expected int, got nothing"),
    "zero": (lambda c: c.update(d=0), "d: expected 1 or more"),
    "dtype": (
        lambda c: c.update(dtype="load"),
        "dtype: expected one of float16, bfloat16, float32, float64, got 'load'",
    ),
    "dtype type": (lambda c: c.update(dtype=["float16"]), "dtype: expected str, got list"),
    "has_ids": (lambda c: c.update(has_ids=0), "has_ids: expected bool, got int"),
    "version": (lambda c: c.update(version="1"), "version: expected int, got str"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_manifest_error_names_path_and_field(case, tmp_path):
    edit, message = WRONG[case]
    Corpus.create(tmp_path, 8, torch.float32).append(draw([3, 4]))
    edited(tmp_path, edit)
    with pytest.raises(ValueError, match=rf"{tmp_path}/manifest.json: the manifest is truncated or corrupt: {message}"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "3", "null", "", "\xff"])
def test_malformed_manifest_error_names_the_file(text, tmp_path):
    Corpus.create(tmp_path, 8, torch.float32)
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"manifest.json: the manifest is truncated or corrupt"):
        Corpus.open(tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(("file", "bytes", "d")), x, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(("d", "dtype", "documents", "has_ids", "shards", "version", "format")), value=values)
def test_any_manifest_value_opens_or_raises_value_error(tmp_path_factory, name, value):
    path = tmp_path_factory.mktemp("corpus")
    Corpus.create(path, 8, torch.float32).append(draw([3, 4]))
    edited(path, lambda content: content.__setitem__(name, value))
    try:
        found = Corpus.open(path)
    except ValueError as error:
        assert "manifest.json" in str(error) or "shard-" in str(error)
    else:
        assert len(found) in (0, 2)
