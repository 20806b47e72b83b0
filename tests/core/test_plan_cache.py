"""Test the plan cache: which entries it keeps, its bound, and its behavior with threads."""

import threading

import pytest
import torch

import lik_ops
from lik_ops.core import plan_cache
from lik_ops.core.plan_cache import PlanCache, plans
from lik_ops.ops.fast_path import eager


def test_hot_entries_survive_many_rotating_keys():
    cache, built = PlanCache(plan_cache.MAX_PLANS), {}

    def call(key):
        if cache.get(key) is None:
            built[key] = built.get(key, 0) + 1
            cache.store(key, object())

    hot = [f"hot {n}" for n in range(100)]
    for turn in range(3 * 10_000):
        call(turn % 10_000)
        call(hot[turn % 100])
        assert len(cache) <= cache.capacity
    assert all(built[key] == 1 for key in hot)


def test_rotating_keys_within_capacity_are_built_once():
    cache = PlanCache(8192)
    for turn in range(5 * 4000):
        if cache.get(turn % 4000) is None:
            assert turn < 4000
            cache.store(turn, object())


def test_recent_entries_survive_new_entries():
    cache = PlanCache(100)
    for n in range(1000):
        cache.store(n, object())
        assert all(cache.get(m) is not None for m in range(max(0, n - 40), n + 1))


def test_store_replaces_entries_and_accepts_false():
    cache = PlanCache(4)
    for n in range(3):
        cache.store(n, False)
    assert cache.get(0) is False and cache.get(9) is None
    assert sorted(cache) == [0, 1, 2] and len(cache) == len(cache.values()) == 3
    cache.store(0, True)
    assert cache.get(0) is True and sorted(cache) == [0, 1, 2]


def test_threads_share_a_cache():
    cache, errors = PlanCache(16), []

    def work(seed):
        for n in range(3000):
            key = (n * seed) % 50
            found = cache.get(key)
            if found is None:
                found = cache.store(key, ("plan", key))
            if found != ("plan", key) or len(cache) > 3 * cache.capacity:
                errors.append(found)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("call", [lik_ops.maxsim, lambda Q, D: lik_ops.maxsim_soft(Q, D, 0.1)])
def test_clearing_drops_every_plan(call):
    call(torch.randn(2, 3, 4), torch.randn(5, 6, 4))
    assert len(plans)
    eager.clear_call_caches()
    assert not len(plans) and not list(plans) and not plans.values()
