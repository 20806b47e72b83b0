"""`enable` and `disable`: what they replace, give back, count and warn of, on hosts made for the test."""

from __future__ import annotations

import importlib.metadata
import sys
import types
import warnings

import pytest
import torch

import lik_ops
from lik_ops.integrations import _routing, colpali, pylate
from lik_ops.integrations import sentence_transformers as st

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


@pytest.fixture
def pylate_host(monkeypatch):
    names = ("colbert_scores_lik", "colbert_scores_pairwise_lik", "colbert_kd_scores_lik")
    backend = dict.fromkeys(names, _refuse) | {"LIKUnsupported": LIKUnsupported}
    modules = {"pylate": {}, "pylate.scores": {}, "pylate.scores._lik_backend": backend}
    modules["pylate.scores.colbert"] = {"_try_lik": lambda backend, *tensors: False}
    _host("pylate", "1.6.0", modules, monkeypatch)
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    monkeypatch.delenv("LIK_OPS_INTEGRATIONS", raising=False)
    yield sys.modules["pylate.scores._lik_backend"]
    pylate.disable()


def silently(function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function()


def test_functions_are_replaced_and_given_back(pylate_host):
    before = dict(vars(pylate_host))
    routing = silently(pylate.enable)
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
        kept(Q, D)  # who had taken ours gets the host's again


def test_twice_is_once(pylate_host):
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


def test_as_a_context_manager(pylate_host):
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


def test_compiled_code_keeps_what_it_was_traced_with(pylate_host, monkeypatch):
    pylate_host.colbert_scores_lik = lambda Q, D: Q.new_full((1, 1), -7.0)  # the host's own
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


def test_what_the_host_should_compute_itself(pylate_host):
    pylate.enable()
    with pytest.raises(LIKUnsupported, match="one dtype"):
        pylate_host.colbert_scores_lik(torch.randn(1, 2, 8), torch.randn(1, 2, 8).double())


def test_warnings_name_what_is_not_reached(pylate_host, monkeypatch):
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


def test_versions_without_the_functions(pylate_host, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.4.0")
    with pytest.warns(UserWarning, match=r"any function, of 1\.4\.0: .* 1\.5\.1"):
        pylate.enable()
    assert pylate_host.colbert_scores_lik is _refuse


def test_functions_that_others_replaced_since(pylate_host):
    pylate.enable()
    pylate_host.colbert_scores_lik = mine = lambda *_: None
    with pytest.warns(UserWarning, match="others replaced"):
        pylate.disable()
    assert pylate_host.colbert_scores_lik is mine and pylate_host.colbert_kd_scores_lik is _refuse


@pytest.mark.parametrize("adapter", [st, pylate, colpali])
def test_hosts_that_are_not_installed(adapter, monkeypatch):
    def missing(distribution):
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="is not installed: pip install '"):
        adapter.enable()
    adapter.disable()


def test_colpali_backend(monkeypatch):
    names = {"maxsim_inbatch_lik": _refuse, "maxsim_kd_lik": _refuse}
    path = "colpali_engine.utils._lik_backend"
    modules = {"colpali_engine": {}, "colpali_engine.utils": {}, path: names | {"LIKUnsupportedError": LIKUnsupported}}
    _host("colpali-engine", "0.3.18", modules, monkeypatch)
    monkeypatch.delenv("COLPALI_SCORES_BACKEND", raising=False)
    backend, Q, D = sys.modules[path], torch.randn(2, 3, 8), torch.randn(2, 4, 5, 8)
    with silently(colpali.enable) as routing:
        close(backend.maxsim_inbatch_lik(Q, D[0]), colpali.maxsim_inbatch(Q, D[0]))
        close(backend.maxsim_kd_lik(Q, D), colpali.maxsim_kd(Q, D))
        with pytest.raises(LIKUnsupported, match="one dtype"):
            backend.maxsim_kd_lik(Q, D.double())
    assert sum(routing.calls.values()) == 3 and backend.maxsim_kd_lik is _refuse
    monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
    with pytest.warns(UserWarning, match="COLPALI_SCORES_BACKEND=torch"), colpali.enable():
        pass


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
    modules = packages | {path: names, model_path: {"MultiVectorEncoder": MultiVectorEncoder}}
    _host("sentence-transformers", "6.2.0", modules, monkeypatch)
    model, Q = MultiVectorEncoder(), torch.randn(2, 3, 8)
    D = [torch.randn(n, 8) for n in (4, 2)]
    with silently(st.enable) as routing:
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
    assert routing.calls["similarity"] == 3 and routing.not_reached == ()
    with pytest.raises(LIKUnsupported):
        model.similarity(Q, D)
    assert not _routing._active
