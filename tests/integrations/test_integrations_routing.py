"""Test `enable` and `disable` on synthetic hosts: what they replace, restore, count, and warn about."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

import lik_ops
from lik_ops.integrations import _routing, colpali, pylate
from lik_ops.integrations import sentence_transformers as st

ROOT = Path(__file__).parents[2]
close = torch.testing.assert_close


class LIKUnsupported(Exception):
    pass


def _host(name: str, version: str, modules: dict[str, dict], monkeypatch) -> None:
    for path, names in modules.items():
        module = types.ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
    found = importlib.metadata.version

    def versions(distribution):
        return version if distribution == name else found(distribution)

    monkeypatch.setattr(importlib.metadata, "version", versions)


def _refuse(*arguments, **options):
    raise LIKUnsupported("the host's own")


def _stack(x):
    return x if isinstance(x, torch.Tensor) else torch.stack(x)


class _Scorer:
    """Stand-in for a host's XTR scorer."""

    def __init__(self, k=256):
        self.k = k

    def _score(self, queries, documents, queries_mask=None, documents_mask=None):
        return _refuse()


@pytest.fixture
def pylate_host(monkeypatch):
    names = ("colbert_scores_lik", "colbert_scores_pairwise_lik", "colbert_kd_scores_lik")
    backend = dict.fromkeys(names, _refuse) | {"LIKUnsupported": LIKUnsupported}
    modules = {"pylate": {}, "pylate.scores": {}, "pylate.scores._lik_backend": backend}
    modules["pylate.scores.colbert"] = {"_try_lik": lambda backend, *tensors: False, "convert_to_tensor": _stack}
    modules["pylate.scores.xtr"] = {"XTRScores": type("XTRScores", (_Scorer,), {"_score": _Scorer._score})}
    modules |= {"pylate.utils": {}, "pylate.utils.tensor": {"convert_to_tensor": _stack}}
    _host("pylate", "1.6.0", modules, monkeypatch)
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    monkeypatch.delenv("LIK_OPS_INTEGRATIONS", raising=False)
    yield sys.modules["pylate.scores._lik_backend"]
    pylate.disable()


def call_without_warnings(function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function()


def test_enable_replaces_and_disable_restores_functions(pylate_host):
    before = dict(vars(pylate_host))
    routing = call_without_warnings(pylate.enable)
    tries = sys.modules["pylate.scores.colbert"]._try_lik
    assert routing.not_reached == () and tries("auto", []) and tries("lik") and not tries("torch")
    Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    close(pylate_host.colbert_scores_lik(Q, D), pylate.colbert_scores(Q, D))
    close(
        pylate_host.colbert_scores_pairwise_lik([D[0], D[1, :2]], list(D[:2])),
        pylate.colbert_scores_pairwise([D[0], D[1, :2]], D[:2]),
    )
    K = torch.randn(2, 3, 5, 8)
    close(pylate_host.colbert_kd_scores_lik(Q, K), pylate.colbert_kd_scores(Q, K))
    assert routing.calls == {f"colbert_{n}_lik": 1 for n in ("scores", "scores_pairwise", "kd_scores")}
    kept = pylate_host.colbert_scores_lik
    pylate.disable()
    assert vars(pylate_host) == before
    with pytest.raises(LIKUnsupported):
        kept(Q, D)  # a stored reference to our function calls the host's again


def test_calls_that_lik_ops_rejects_are_not_counted(pylate_host):
    """PyLate catches the first error and computes the scores itself."""
    routing = pylate.enable()
    Q, D = torch.ones(1, 2, 8, dtype=torch.int32), torch.ones(1, 3, 8, dtype=torch.int32)
    with pytest.raises(LIKUnsupported, match="tensors of one dtype"):
        pylate_host.colbert_scores_lik(Q, D)
    with pytest.raises(ValueError, match="d = 8"):
        pylate_host.colbert_scores_lik(Q.float(), D.float()[..., :4])
    scorer = sys.modules["pylate.scores.xtr"].XTRScores()
    with pytest.raises(LIKUnsupported, match="the host's own"):
        scorer._score(Q, D[:, None])
    assert not routing.calls
    pylate_host.colbert_scores_lik(Q.float(), D.float())
    assert routing.calls == {"colbert_scores_lik": 1}


def test_pylate_lists_of_several_lengths(pylate_host):
    names = sys.modules["pylate.scores.colbert"]
    ragged, D = [torch.randn(n, 8) for n in (2, 5)], torch.randn(3, 4, 8)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        names.convert_to_tensor(ragged)
    routing = pylate.enable()
    found = names.convert_to_tensor(ragged)
    assert names._try_lik("auto", found, D)
    close(pylate_host.colbert_scores_lik(found, D), pylate.colbert_scores(ragged, D))
    arrays = names.convert_to_tensor([t.numpy() for t in ragged])
    close(pylate_host.colbert_scores_lik(D, arrays), pylate.colbert_scores(D, ragged))
    assert routing.calls == {"colbert_scores_lik": 2}
    assert names.convert_to_tensor(list(D)).shape == (3, 4, 8)  # equal lengths go to the host
    refused = [
        lambda: names._try_lik("torch", found, D),
        lambda: found.shape,
        lambda: pylate_host.colbert_kd_scores_lik(found, D[None].expand(2, 3, 4, 8)),
        lambda: pylate_host.colbert_scores_lik(found, D.double()),
    ]
    for call in refused:
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            call()
    assert sum(routing.calls.values()) == 2
    pylate.disable()
    assert names.convert_to_tensor is _stack


def test_pylate_xtr_scores(pylate_host):
    scorer = sys.modules["pylate.scores.xtr"].XTRScores(5)
    Q, D, mask = torch.randn(2, 3, 8), torch.randn(2, 3, 4, 8), torch.rand(2, 3, 4) > 0.3
    with pylate.enable() as routing:
        found = scorer._score(Q, D, torch.ones(2, 3), mask)
    close(found, pylate.XTRScores(5)(Q, D, None, mask))
    assert routing.calls == {"_score": 1}
    with pytest.raises(LIKUnsupported):
        scorer._score(Q, D)


def test_missing_host_module_warns(pylate_host, monkeypatch):
    monkeypatch.delitem(sys.modules, "pylate.scores.xtr")
    with pytest.warns(UserWarning, match=r"in pylate: pylate\.scores\.xtr:XTRScores\._score"):
        routing = pylate.enable()
    assert routing.not_reached == ("pylate.scores.xtr:XTRScores._score",)


def test_enable_and_disable_are_idempotent(pylate_host):
    first = pylate.enable()
    ours = pylate_host.colbert_scores_lik
    second = pylate.enable()
    assert pylate_host.colbert_scores_lik is ours
    with second:
        pylate_host.colbert_scores_lik(torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    assert pylate_host.colbert_scores_lik is ours, "what it did not begin it does not end"
    assert first.calls == second.calls == {"colbert_scores_lik": 1}
    pylate.disable()
    pylate.disable()
    assert pylate_host.colbert_scores_lik is _refuse


def test_context_manager_restores_functions_on_exit(pylate_host):
    with pytest.raises(KeyError), pylate.enable() as routing:
        assert isinstance(routing, pylate.Routing)
        assert pylate_host.colbert_scores_lik is not _refuse
        raise KeyError
    assert pylate_host.colbert_scores_lik is _refuse
    with pylate.enable():
        assert pylate_host.colbert_scores_lik is not _refuse


def test_the_environment_is_read_at_every_call(pylate_host, monkeypatch):
    routing = pylate.enable()
    arguments = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    monkeypatch.setenv("LIK_OPS_INTEGRATIONS", "0")
    with pytest.raises(LIKUnsupported):
        pylate_host.colbert_scores_lik(*arguments)
    assert not routing.calls
    monkeypatch.setenv("LIK_OPS_INTEGRATIONS", "1")
    pylate_host.colbert_scores_lik(*arguments)
    monkeypatch.setenv("LIK_OPS_INTEGRATIONS", "off")
    with pytest.raises(ValueError, match="LIK_OPS_INTEGRATIONS: expected 0 or 1, got 'off'"):
        pylate_host.colbert_scores_lik(*arguments)


def test_compiled_code_ignores_later_environment_changes(pylate_host, monkeypatch):
    pylate_host.colbert_scores_lik = lambda Q, D: Q.new_full((1, 1), -7.0)  # the host's own function
    routing = pylate.enable()
    Q, D = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    ours, held = lik_ops.maxsim(Q, D), pylate_host.colbert_scores_lik

    def traced():
        torch.compiler.reset()
        return torch.compile(lambda Q, D: held(Q, D), backend="eager", fullgraph=True)

    routed = traced()
    assert torch.equal(routed(Q, D), ours) and not routing.calls
    monkeypatch.setenv("LIK_OPS_INTEGRATIONS", "0")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(routed(Q, D), ours)
    assert traced()(Q, D) == -7
    monkeypatch.delenv("LIK_OPS_INTEGRATIONS")
    assert torch.equal(traced()(Q, D), ours)
    pylate.disable()
    assert traced()(Q, D) == -7


def test_mixed_dtypes_are_left_to_the_host(pylate_host):
    pylate.enable()
    with pytest.raises(LIKUnsupported, match="one dtype"):
        pylate_host.colbert_scores_lik(torch.randn(1, 2, 8), torch.randn(1, 2, 8).double())


def test_enable_warns_about_unreachable_functions(pylate_host, monkeypatch):
    del pylate_host.colbert_kd_scores_lik
    with pytest.warns(UserWarning, match=r"in pylate: pylate\.scores\._lik_backend\.colbert_kd_scores_lik"):
        routing = pylate.enable()
    assert routing.not_reached == ("pylate.scores._lik_backend.colbert_kd_scores_lik",)
    pylate.disable()
    pylate_host.colbert_kd_scores_lik = _refuse
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    with pytest.warns(UserWarning, match="PYLATE_SCORES_BACKEND=torch"):
        pylate.enable()
    pylate.disable()
    monkeypatch.delenv("PYLATE_SCORES_BACKEND")
    monkeypatch.setenv("LIK_OPS_INTEGRATIONS", "0")
    with pytest.warns(UserWarning, match="any call, while LIK_OPS_INTEGRATIONS=0"):
        pylate.enable()


def test_old_host_version_warns_and_is_not_patched(pylate_host, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.4.0")
    with pytest.warns(UserWarning, match=r"any function, of 1\.4\.0: .* 1\.5\.1"):
        pylate.enable()
    assert pylate_host.colbert_scores_lik is _refuse


def test_disable_keeps_functions_replaced_by_other_code(pylate_host):
    pylate.enable()
    pylate_host.colbert_scores_lik = mine = lambda *_: None
    with pytest.warns(UserWarning, match="other code has replaced"):
        pylate.disable()
    assert pylate_host.colbert_scores_lik is mine and pylate_host.colbert_kd_scores_lik is _refuse


@pytest.mark.parametrize("adapter", [st, pylate, colpali])
def test_enable_raises_if_host_is_not_installed(adapter, monkeypatch):
    def missing(distribution):
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    name = adapter._HOST.distribution
    with pytest.raises(ImportError, match=f"enable: {name} is not installed: pip install '") as raised:
        adapter.enable()
    adapter.disable()
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    extra = name.removesuffix("-engine")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = " ".join(f"'{x}'" for x in project["optional-dependencies"][extra])
    assert f"pip install {packages}, or in a checkout of lik_ops pip install '.[{extra}]'" in str(raised.value)


class _Loss:
    """Stand-in for a loss of colpali-engine: similarities, then their maximum and sum."""

    tau = 0.1

    def _aggregate(self, scores_raw, use_smooth_max, dim_max, dim_sum):
        if use_smooth_max:
            return (self.tau * torch.logsumexp(scores_raw / self.tau, dim=dim_max)).sum(dim=dim_sum)
        return scores_raw.amax(dim=dim_max).sum(dim=dim_sum)

    def scores(self, equation, Q, D, smooth):
        raw = sys.modules[COLPALI_LOSSES].torch.einsum(equation, Q, D)
        dims = (3, 2) if len(equation.partition("->")[2]) == 4 else (2, 1)
        return self._aggregate(raw, smooth, *dims)


COLPALI = "colpali_engine.utils._lik_backend"
COLPALI_LOSSES = "colpali_engine.loss.late_interaction_losses"
EQUATIONS = {  # of colpali-engine 0.3.17 and 0.3.18, and the shape of documents
    "bnd,csd->bcns": (4, 5, 8),
    "bnd,bsd->bns": (3, 5, 8),
    "bnd,bld->bnl": (3, 5, 8),
    "bnd,blsd->blns": (3, 2, 5, 8),
    "bnd,bsld->bsnl": (3, 2, 5, 8),
}


@pytest.fixture
def colpali_host(monkeypatch):
    names = {"maxsim_inbatch_lik": _refuse, "maxsim_kd_lik": _refuse}
    loss = type("ColbertModule", (_Loss,), {"_aggregate": _Loss._aggregate})
    modules = {"colpali_engine": {}, "colpali_engine.utils": {}, "colpali_engine.loss": {}}
    modules |= {
        COLPALI: names | {"LIKUnsupportedError": LIKUnsupported},
        "colpali_engine.utils.maxsim": {"_resolve_backend": lambda: os.environ.get("COLPALI_SCORES_BACKEND", "auto")},
        COLPALI_LOSSES: {"torch": torch, "ColbertModule": loss},
    }
    pooling = "colpali_engine.compression.token_pooling"
    modules |= {"colpali_engine.compression": {}, pooling: {}}
    modules[f"{pooling}.base_token_pooling"] = {"BaseTokenPooler": type("Pooler", (), {"pool_embeddings": _refuse})}
    _host("colpali-engine", "0.3.18", modules, monkeypatch)
    monkeypatch.delenv("COLPALI_SCORES_BACKEND", raising=False)
    monkeypatch.delenv("LIK_OPS_INTEGRATIONS", raising=False)
    yield sys.modules[COLPALI]
    colpali.disable()


def test_colpali_backend(colpali_host, monkeypatch):
    Q, D = torch.randn(2, 3, 8), torch.randn(2, 4, 5, 8)
    with call_without_warnings(colpali.enable) as routing:
        close(colpali_host.maxsim_inbatch_lik(Q, D[0]), colpali.maxsim_inbatch(Q, D[0]))
        close(colpali_host.maxsim_kd_lik(Q, D), colpali.maxsim_kd(Q, D))
        with pytest.raises(LIKUnsupported, match="one dtype"):
            colpali_host.maxsim_kd_lik(Q, D.double())
    assert sum(routing.calls.values()) == 2 and colpali_host.maxsim_kd_lik is _refuse
    monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
    with pytest.warns(UserWarning, match="COLPALI_SCORES_BACKEND=torch"), colpali.enable():
        pass


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_colpali_loss_scores_match_the_host(colpali_host, equation, smooth, monkeypatch):
    loss, Q = sys.modules[COLPALI_LOSSES].ColbertModule(), torch.randn(3, 4, 8, requires_grad=True)
    D = torch.randn(EQUATIONS[equation], requires_grad=True)

    def scored():
        found = loss.scores(equation, Q, D, smooth)
        return found, torch.autograd.grad(found.sum(), (Q, D))

    expected = scored()
    with call_without_warnings(colpali.enable) as routing:
        found = scored()
        assert routing.calls == {"_aggregate": 1}
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
        close(scored(), expected, rtol=0, atol=0)
        monkeypatch.delenv("COLPALI_SCORES_BACKEND")
        assert routing.calls == {"_aggregate": 1}
    close(found, expected, rtol=1e-5, atol=1e-5)
    assert sys.modules[COLPALI_LOSSES].torch is torch


def test_colpali_smooth_scores_equal_maxsim_soft(colpali_host):
    loss, Q, D = sys.modules[COLPALI_LOSSES].ColbertModule(), torch.randn(3, 4, 8), torch.randn(5, 6, 8)
    loss.tau = 0.05
    with call_without_warnings(colpali.enable):
        found = loss.scores("bnd,csd->bcns", Q, D, True)
    assert torch.equal(found, lik_ops.maxsim_soft(Q, D, 0.05))


def test_colpali_leaves_other_uses_of_similarities_to_the_host(colpali_host):
    losses, Q, D = sys.modules[COLPALI_LOSSES], torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    loss, raw = losses.ColbertModule(), torch.einsum("bnd,csd->bcns", Q, D)
    with call_without_warnings(colpali.enable) as routing:
        similarities = losses.torch.einsum("bnd,csd->bcns", Q, D)
        close(similarities.amax(3), raw.amax(3))
        close(similarities / 2, raw / 2)
        close(torch.logsumexp(similarities, dim=3), torch.logsumexp(raw, dim=3))
        close(loss._aggregate(similarities, False, 2, 2), raw.amax(2).sum(2))
        close(loss._aggregate(raw, False, 3, 2), raw.amax(3).sum(2))
        loss.tau = -0.1
        close(loss._aggregate(similarities, True, 3, 2), loss._aggregate(raw, True, 3, 2))
        for equation, x, y in (
            ("ij,jk->ik", Q[0], D[0].T),
            ("bnd,csd->bcns", Q.int(), D.int()),
            ("bnd,bsd->bns", Q[:1], D),  # one query for all documents
        ):
            close(losses.torch.einsum(equation, x, y), torch.einsum(equation, x, y))
    assert not routing.calls


def test_sentence_transformers_scoring(monkeypatch):
    class MultiVectorEncoder:
        similarity_fn_name = "maxsim"

        def similarity(self, *arguments, **options):
            return _refuse()

        similarity_pairwise = similarity

    path = "sentence_transformers.util.similarity"
    names = {"_maxsim_score_documents": _refuse, "_maxsim_score_pairs": _refuse}
    model_path = "sentence_transformers.multi_vector_encoder.model"
    packages = {"sentence_transformers": {}, "sentence_transformers.util": {}}
    packages["sentence_transformers.multi_vector_encoder"] = {}
    scoring = "sentence_transformers.multi_vector_encoder.scoring"
    modules = packages | {path: names, model_path: {"MultiVectorEncoder": MultiVectorEncoder}}
    modules |= {module: {"xtr_scores": _refuse} for module in (scoring, f"{scoring}.xtr")}
    pooling = type("BaseTokenPooling", (), {"pool": _refuse, "forward": _refuse})
    modules[st._POOLING] = {"BaseTokenPooling": pooling}
    modules[st._POOLING.rpartition(".")[0]] = {}
    _host("sentence-transformers", "6.2.0", modules, monkeypatch)
    model, Q = MultiVectorEncoder(), torch.randn(2, 3, 8)
    D = [torch.randn(n, 8) for n in (4, 2)]
    with call_without_warnings(st.enable) as routing:
        close(model.similarity(Q, D), st.maxsim(Q, D))
        close(model.similarity_pairwise(Q, D, length_normalize=True), st.mean_maxsim_pairwise(Q, D))
        MultiVectorEncoder.similarity_fn_name = "meanmaxsim"
        close(model.similarity(Q, D), st.mean_maxsim(Q, D))
        MultiVectorEncoder.similarity_fn_name = "xtr"
        with pytest.raises(ValueError, match="expected maxsim or meanmaxsim, got 'xtr'"):
            model.similarity(Q, D)
        similarity = sys.modules[path]
        mask = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
        scores = similarity._maxsim_score_documents(Q, Q, None, mask)
        close(scores, torch.stack([(Q @ Q[0, 0]).sum(-1), torch.full((2,), -1e9)], dim=1))
        close(similarity._maxsim_score_pairs(Q, Q, None, mask), scores.diagonal())
        assert (similarity._maxsim_score_documents(Q, Q[:, :0], None, mask[:, :0]) == -1e9).all()
        assert similarity._maxsim_score_pairs(Q.double(), Q.double(), None, None).dtype == torch.float64
        groups = torch.randn(2, 3, 4, 8)
        for module in (scoring, f"{scoring}.xtr"):
            score = sys.modules[module].xtr_scores
            close(score(Q, groups, top_k=5), st.xtr_scores(Q, groups, top_k=5))
            for top_k in (0, True, 2.0):
                with pytest.raises(LIKUnsupported):  # the host reports the error
                    score(Q, groups, top_k=top_k)
        assert routing.calls["xtr_scores"] == 2
    assert routing.calls["similarity"] == 2 and routing.not_reached == ()
    with pytest.raises(LIKUnsupported):
        model.similarity(Q, D)
    assert not _routing._active
