"""The adapters inside their hosts, of those that are installed: signatures, losses, models. See also tests/hosts."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from lik_ops.integrations import colpali, pylate
from lik_ops.integrations import sentence_transformers as st

close = torch.testing.assert_close


ADAPTERS = {"sentence_transformers": st, "pylate": pylate, "colpali_engine": colpali}


def host(name: str):
    """A module of a host that is installed in a version with the functions that the adapter knows."""
    known = ADAPTERS[name.partition(".")[0]]._HOST
    try:
        version = importlib.metadata.version(known.distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{known.distribution} is not installed")
    if TorchVersion(version) < TorchVersion(known.at_least):
        pytest.skip(f"{known.distribution} {version} is older than {known.at_least}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        pytest.skip(f"{name} needs torchvision, which is not installed")


SIGNATURES = [
    *((st, n, "sentence_transformers.util.similarity") for n in ("maxsim", "maxsim_pairwise")),
    *(
        (st, f"colbert_{n}", "sentence_transformers.multi_vector_encoder.scoring.colbert")
        for n in ("scores", "scores_pairwise", "kd_scores")
    ),
    *((pylate, f"colbert_{n}", "pylate.scores.colbert") for n in ("scores", "scores_pairwise", "kd_scores")),
    *((colpali, n, "colpali_engine.utils.maxsim") for n in ("maxsim_inbatch", "maxsim_kd")),
]


@pytest.mark.parametrize(("adapter", "name", "module"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else "")
def test_signatures(adapter, name, module):
    def arguments(function):
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    assert arguments(getattr(adapter, name)) == arguments(getattr(host(module), name))


def test_colpali_processor_signature():
    processor = host("colpali_engine.utils.processing_utils").BaseVisualRetrieverProcessor
    theirs = inspect.signature(processor.score_multi_vector).parameters
    ours = inspect.signature(colpali.score_multi_vector).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


class Encoder(torch.nn.Module):
    """What a multi-vector model of sentence-transformers does in a loss: tokens to embeddings and a scoring mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 16)
        self.device = torch.device("cpu")

    def forward(self, features, task=None):
        tokens = torch.nn.functional.normalize(self.embedding(features["input_ids"]), dim=-1)
        return {"token_embeddings": tokens, "attention_mask": features["attention_mask"]}

    preprocess = tokenize = None


def features(columns: int, batch: int, length: int):
    torch.manual_seed(1)
    found = []
    for column in range(columns):
        width = length if column else 4
        mask = (torch.arange(width) < torch.randint(1, width + 1, (batch, 1))).long()
        found.append({"input_ids": torch.randint(0, 50, (batch, width)), "attention_mask": mask})
    return found


def step(loss, *arguments):
    model = loss.model
    model.zero_grad()
    value = loss(*arguments)
    value.backward()
    return value.detach(), model.embedding.weight.grad.clone()


LOSSES = {
    "MultiVectorMultipleNegativesRankingLoss": ({}, st.colbert_scores, None),
    "CachedMultiVectorMultipleNegativesRankingLoss": ({"mini_batch_size": 2}, st.colbert_scores, None),
    "MultiVectorDistillKLDivLoss": ({}, st.colbert_kd_scores, torch.rand(6, 2)),
    "MultiVectorMarginMSELoss": ({}, st.colbert_scores_pairwise, torch.rand(6)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("route", ["argument", "enable"])
def test_losses_of_sentence_transformers(name, route):
    losses = host("sentence_transformers.multi_vector_encoder.losses")
    options, similarity_fct, labels = LOSSES[name]
    model, columns = Encoder(), features(3, 6, 9)
    expected = step(getattr(losses, name)(model, **options), columns, labels)
    if route == "argument":
        loss = getattr(losses, name)(model, similarity_fct=similarity_fct, **options)
        assert loss.get_config_dict()["similarity_fct"] == similarity_fct.__name__
        found = step(loss, columns, labels)
    else:
        with st.enable() as routing:
            found = step(getattr(losses, name)(model, **options), columns, labels)
        assert sum(routing.calls.values()) and routing.not_reached == ()
    close(found, expected, rtol=1e-5, atol=1e-6)


EXAMPLES = {
    "sentence_transformers": ("sentence_transformers.multi_vector_encoder.losses", "--batch-size", "8"),
    "pylate": ("pylate.losses", "--batch-size", "8"),
    "colpali": ("colpali_engine.loss.late_interaction_losses", "--pages", "8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--cached"]], ids=["plain", "cached"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_training_in_the_host(name, options, monkeypatch, capsys):
    """The example says by its exit whether the losses of every step are equal: to those of the host's torch code, also
    where the host is told to take its kernels."""
    module, *size = EXAMPLES[name]
    if name == "colpali" and options:
        pytest.skip("colpali-engine has no loss that caches gradients")
    host(module)
    if name == "sentence_transformers":
        pytest.importorskip("datasets", reason="the trainer needs datasets")
        pytest.importorskip("accelerate", reason="the trainer needs accelerate")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(f"{name.upper()}_SCORES_BACKEND", "lik")
    example = importlib.import_module(f"train_{name}")
    assert example.main(["--steps", "3", *size, *options]) == 0, capsys.readouterr().out


def test_losses_of_pylate_take_the_callables():
    scores = host("pylate.scores.colbert")
    torch.manual_seed(0)
    Q, D = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for shape in ((4, 5, 16), (4, 2, 9, 16)))
    mask = torch.rand(4, 2, 9) > 0.3
    mask[..., 0] = True
    D = D.abs()
    close(pylate.ColBERTScores()(Q.abs(), D, None, mask), scores.ColBERTScores()(Q.abs(), D, None, mask))
    close(pylate.colbert_kd_scores(Q.abs(), D, None, mask), scores.colbert_kd_scores(Q.abs(), D, None, mask))


@pytest.mark.parametrize("name", ["ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss"])
def test_losses_of_colpali(name):
    losses = host("colpali_engine.loss.late_interaction_losses")
    torch.manual_seed(0)
    tensors = [torch.nn.functional.normalize(torch.randn(4, n, 16), dim=-1).requires_grad_() for n in (5, 9)]
    loss = getattr(losses, name)(pos_aware_negative_filtering=True)

    def grads():
        value = loss(*tensors)
        return value, torch.autograd.grad(value, tensors)

    expected = grads()
    with colpali.enable() as routing:
        found = grads()
    assert routing.calls["maxsim_inbatch_lik"] == 1
    close(found, expected, rtol=1e-5, atol=1e-6)
