"""Test the adapters inside the installed hosts: signatures, losses, and models. See also tests/hosts."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import lik_ops
from lik_ops.integrations import colpali, pylate
from lik_ops.integrations import sentence_transformers as st

close = torch.testing.assert_close


ADAPTERS = {"sentence_transformers": st, "pylate": pylate, "colpali_engine": colpali}


def host(name: str):
    """Return a module of an installed host, and skip if the host is older than the adapter requires."""
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
    *(
        (st, n, "sentence_transformers.multi_vector_encoder.scoring.xtr")
        for n in ("xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise", "XTRScores", "XTRKDScores")
    ),
    *((pylate, f"colbert_{n}", "pylate.scores.colbert") for n in ("scores", "scores_pairwise", "kd_scores")),
    *((pylate, n, "pylate.scores.xtr") for n in ("xtr_scores", "xtr_kd_scores", "XTRScores", "XTRKDScores")),
    *((colpali, n, "colpali_engine.utils.maxsim") for n in ("maxsim_inbatch", "maxsim_kd")),
]


@pytest.mark.parametrize(("adapter", "name", "module"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else "")
def test_signatures_match_the_host(adapter, name, module):
    def arguments(function):
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    assert arguments(getattr(adapter, name)) == arguments(getattr(host(module), name))


def test_colpali_processor_signature_matches_the_host():
    processor = host("colpali_engine.utils.processing_utils").BaseVisualRetrieverProcessor
    theirs = inspect.signature(processor.score_multi_vector).parameters
    ours = inspect.signature(colpali.score_multi_vector).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


class Encoder(torch.nn.Module):
    """Stand-in for a multi-vector model of sentence-transformers in a loss: embeddings and a scoring mask."""

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
def test_losses_match_sentence_transformers(name, route):
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
    """The exit status says whether the losses of every step equal the host's torch code.

    The host is also told to use its own kernels.
    """
    module, *size = EXAMPLES[name]
    if name == "colpali" and options:
        pytest.skip("colpali-engine has no loss that caches gradients")
    host(module)
    if name == "sentence_transformers":
        pytest.importorskip("datasets", reason="the trainer needs datasets")
        pytest.importorskip("accelerate", reason="the trainer needs accelerate")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(f"{name.upper()}_SCORES_BACKEND", "lik")
    example = importlib.import_module(f"train_{name}")
    assert example.main(["--steps", "3", *size, *options]) == 0, capsys.readouterr().out


def test_pylate_scores_match_its_own():
    scores = host("pylate.scores.colbert")
    torch.manual_seed(0)
    Q, D = (torch.nn.functional.normalize(torch.randn(shape), dim=-1) for shape in ((4, 5, 16), (4, 2, 9, 16)))
    mask = torch.rand(4, 2, 9) > 0.3
    mask[..., 0] = True
    D = D.abs()
    close(pylate.ColBERTScores()(Q.abs(), D, None, mask), scores.ColBERTScores()(Q.abs(), D, None, mask))
    close(pylate.colbert_kd_scores(Q.abs(), D, None, mask), scores.colbert_kd_scores(Q.abs(), D, None, mask))


def tokens(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.functional.normalize(torch.randn(shape), dim=-1).to(dtype).requires_grad_() for shape in shapes]


XTR_MASKS = {
    "none": (None, None),
    "bool": (torch.tensor([[1, 1, 0]] * 4).bool(), torch.arange(7).lt(5).expand(4, 2, 7)),
    "numbers": (torch.tensor([[1.0, 0.5, 0.0]] * 4), torch.arange(7).lt(5).long().expand(4, 2, 7)),
}


@pytest.mark.parametrize("masks", XTR_MASKS)
@pytest.mark.parametrize("name", ["XTRScores", "XTRKDScores"])
@pytest.mark.parametrize("adapter", [st, pylate], ids=["sentence_transformers", "pylate"])
def test_xtr_scores_match_the_host(adapter, name, masks):
    theirs = host(
        "pylate.scores.xtr" if adapter is pylate else "sentence_transformers.multi_vector_encoder.scoring.xtr"
    )
    x, masks = tokens((4, 3, 16), (4, 2, 7, 16)), XTR_MASKS[masks]

    def step(scorer):
        scores = scorer(12)(*x, *masks)
        return scores, torch.autograd.grad(scores.square().sum(), x)

    expected, ours = step(getattr(theirs, name)), step(getattr(adapter, name))
    with adapter.enable() as routing:
        routed = step(getattr(theirs, name))
    assert sum(routing.calls.values()) == 1 and routing.not_reached == ()
    close(ours, expected, rtol=1e-5, atol=1e-6)
    close(routed, ours, rtol=0, atol=0)


def test_xtr_losses_match_sentence_transformers():
    """Every token is retrieved: this model repeats tokens, and the host retrieves one of several equal tokens."""
    losses = host("sentence_transformers.multi_vector_encoder.losses")
    scoring = host("sentence_transformers.multi_vector_encoder.scoring")
    model, columns = Encoder(), features(3, 6, 9)
    name, cached = "MultiVectorMultipleNegativesRankingLoss", "CachedMultiVectorMultipleNegativesRankingLoss"

    def found(scorer, name=name, **options):
        return step(getattr(losses, name)(model, similarity_fct=scorer, **options), columns, None)

    expected = found(scoring.XTRScores(1000))
    close(found(st.XTRScores(1000)), expected, rtol=1e-5, atol=1e-6)
    close(found(st.XTRScores(1000), cached, mini_batch_size=2), expected, rtol=1e-5, atol=1e-6)
    with st.enable() as routing:
        close(found(scoring.XTRScores(1000)), expected, rtol=1e-5, atol=1e-6)
    assert routing.calls["xtr_scores"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes_match_sentence_transformers(dtype):
    """The host's own scores are fp64 too, unless a mask of another dtype turns them into fp32."""
    util = host("sentence_transformers.util.similarity")
    Q, D = (x.detach() for x in tokens((3, 4, 16), (5, 7, 16), dtype=dtype))
    for x, y in ((Q, D), (list(Q), list(D))):
        expected = util.maxsim(x, y)
        with st.enable() as routing:
            found = util.maxsim(x, y)
        assert sum(routing.calls.values()) == 1 and found.dtype == expected.dtype == lik_ops.maxsim(Q, D).dtype
        close(found, expected, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)


def test_pylate_scores_lists_of_several_lengths():
    scores = host("pylate.scores.colbert")
    D = [x.detach() for x in tokens((7, 16), (3, 16), (5, 16))]
    Q = [x.detach() for x in tokens((4, 16), (2, 16))]
    for x, y in ((Q, D), ([t.numpy() for t in Q], D), (Q, [t.numpy() for t in D])):
        with pylate.enable() as routing:
            found = scores.colbert_scores(x, y)
        assert routing.calls == {"colbert_scores_lik": 1}
        close(found, torch.stack([torch.stack([(q @ d.T).amax(-1).sum() for d in D]) for q in Q]))
    calls = [
        lambda: scores.colbert_scores(Q, D, backend="torch"),
        lambda: scores.colbert_scores(Q, [d.double() for d in D]),
        lambda: scores.colbert_kd_scores(Q, torch.randn(2, 3, 5, 16)),
        lambda: scores.ColBERTScores()(Q, D),
    ]
    for call in calls:
        with pylate.enable() as routing, pytest.raises(RuntimeError, match="stack expects each tensor to be equal"):
            call()
        assert not routing.calls


def test_pylate_calls_that_the_host_answers_are_not_counted():
    scores = host("pylate.scores.colbert")
    Q, D = torch.ones(2, 3, 8, dtype=torch.int32), torch.ones(4, 5, 8, dtype=torch.int32)
    with pylate.enable() as routing:
        found = scores.colbert_scores(Q, D)
    assert not found.is_floating_point() and (found == 24).all() and not routing.calls


HOST_SCORES = {
    "pylate": ("pylate.scores.colbert", "colbert_scores", pylate.colbert_scores),
    "sentence_transformers": ("sentence_transformers.util.similarity", "maxsim", st.maxsim),
    "colpali": ("colpali_engine.utils.maxsim", "_torch_maxsim", colpali.maxsim_inbatch),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HOST_SCORES)
def test_half_gradients_are_closer_to_fp64_than_the_hosts(name, dtype, monkeypatch):
    """The pages of the hosts give the figures. The hosts round similarities before the maximum."""
    module, function, ours = HOST_SCORES[name]
    theirs = getattr(host(module), function)
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    x = tokens((16, 32, 128), (16, 180, 128), dtype=dtype)

    def grads(score, *x):
        loss = torch.nn.functional.cross_entropy(score(*x).to(torch.promote_types(x[0].dtype, torch.float32)), labels)
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, x)])

    labels = torch.arange(16)
    exact = grads(lik_ops.maxsim, *(t.detach().double().requires_grad_() for t in x))
    off, off_ours = ((grads(score, *x) - exact).norm() / exact.norm() for score in (theirs, ours))
    assert off_ours < (3e-4 if dtype == torch.float16 else 2.5e-3) and off > 30 * off_ours


COLPALI_LOSSES = {  # whether the loss accepts negatives, and the number of score matrices of lik_ops
    "ColbertLoss": (False, 1),
    "ColbertPairwiseCELoss": (False, 1),
    "ColbertSigmoidLoss": (False, 1),
    "ColbertNegativeCELoss": (True, 3),
    "ColbertPairwiseNegativeCELoss": (True, 3),
}


@pytest.mark.parametrize("smooth", [False, True], ids=["max", "smooth max"])
@pytest.mark.parametrize("name", COLPALI_LOSSES)
def test_losses_match_colpali(name, smooth, monkeypatch):
    losses = host("colpali_engine.loss.late_interaction_losses")
    monkeypatch.delenv("COLPALI_SCORES_BACKEND", raising=False)
    negatives, count = COLPALI_LOSSES[name]
    x = tokens((4, 5, 16), (4, 9, 16), *([(4, 2, 7, 16)] if negatives else []))
    loss = getattr(losses, name)(use_smooth_max=smooth, pos_aware_negative_filtering=True)

    def grads():
        value = loss(*x)
        return value, torch.autograd.grad(value, x)

    expected = grads()
    with colpali.enable() as routing:
        found = grads()
        assert sum(routing.calls.values()) == count and routing.not_reached == ()
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
        close(grads(), expected, rtol=0, atol=0)
    assert sum(routing.calls.values()) == count and losses.torch is torch
    close(found, expected, rtol=1e-5, atol=1e-5)


def test_losses_match_colpali_with_documents_of_other_ranks():
    losses = host("colpali_engine.loss.late_interaction_losses")
    x = tokens((3, 5, 16), (9, 8, 16), (3, 2, 7, 16))
    for smooth in (False, True):
        loss = losses.ColbertNegativeCELoss(use_smooth_max=smooth, normalize_scores=False)
        expected = loss(*x, offset=4)
        with colpali.enable() as routing:
            close(loss(*x, offset=4), expected)
        assert sum(routing.calls.values()) == 3


def test_compiled_losses_match_colpali():
    """Routed code compiles without a graph break if the host's does, without the check of normalized scores."""
    losses = host("colpali_engine.loss.late_interaction_losses")
    x = tokens((4, 5, 16), (4, 9, 16), (4, 2, 7, 16))
    for smooth in (False, True):
        loss = losses.ColbertPairwiseNegativeCELoss(use_smooth_max=smooth, normalize_scores=False)
        expected = loss(*x)
        with colpali.enable():
            torch.compiler.reset()
            close(torch.compile(loss, backend="eager", fullgraph=True)(*x), expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()
