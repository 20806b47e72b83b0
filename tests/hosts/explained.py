"""Expected failures in the hosts' suites: (adapter, routing or "any", end of the test name) -> reason."""

_CPU = "asserts that a backend refuses the CPU; lik_ops scores there"
_SHAPE = "asserts that features no multiple of 8 are refused; lik_ops scores them"
_FP32 = "asserts scores in the input's half type; these are fp32, as from the host's own kernel backend"
_BITS = "asserts the bits of the host's own scoring, which a callable cannot be switched to"
_CHUNKS = "watches the host's padded chunks; the adapter's callable makes none"
_WORDS = "asserts the words of the host's message; the adapter raises the same type in its own"
_ORDER = "compares clusters in the host's order; lik_ops returns them in the order of their first tokens"
_ALONE = "fails as the suite is"
_HUB = "needs files of the hub; fails as the suite is"

_COLPALI = "tests/utils/test_maxsim.py::"
_COLPALI_GPU = "tests/utils/test_maxsim_cuda.py::"
_SIMILARITY = "tests/util/test_similarity.py::"
_MODEL = "tests/multi_vector_encoder/test_model.py::"

EXPLAINED = {
    ("pylate", "enabled", "::test_backend_lik_without_accelerator_raises"): _CPU,
    ("pylate", "enabled", "::test_lik_unsupported_strict_propagates"): _SHAPE,
    **{
        ("colpali", "enabled", f"{_COLPALI}TestStrictLikModeOnCpu::test_maxsim_{name}_raises"): _CPU
        for name in ("inbatch", "kd")
    },
    **{
        ("colpali", "callables", f"{_COLPALI}TestStrictLikModeOnCpu::test_maxsim_{name}_raises"): _CPU
        for name in ("inbatch", "kd")
    },
    **{
        ("colpali", routed, f"{_COLPALI}test_maxsim_{name}_matches_einsum_baseline[{dtype}]"): _FP32
        for routed in ("enabled", "callables")
        for name in ("inbatch", "kd")
        for dtype in ("dtype1", "dtype2")
    },
    ("colpali", "callables", f"{_COLPALI_GPU}test_strict_lik_mode_runs_on_cuda"): _BITS,
    **{
        ("colpali", "callables", f"{_COLPALI_GPU}test_{name}_parity_cuda[{dtype}]"): _BITS
        for name in ("forward", "maxsim_kd_forward")
        for dtype in ("dtype0", "dtype1", "dtype2")
    },
    **{
        ("sentence_transformers", "callables", f"{_SIMILARITY}test_maxsim_{name}"): _CHUNKS
        for name in (
            "pairwise_never_pads_the_batch_to_the_global_width",
            "budget_bounds_the_live_chunk_elements",
            "pairwise_budget_counts_the_padded_queries",
        )
    },
    **{
        ("sentence_transformers", "callables", f"{_SIMILARITY}test_maxsim_{name}"): _WORDS
        for name in ("narrow_mask_raises_value_error", "pairwise_length_mismatch_raises")
    },
    **{
        ("sentence_transformers", "any", f"{_MODEL}{name}"): _HUB
        for name in (
            "test_bare_checkpoint_gets_no_expansion",
            "test_resolve_retrieval_model_class_from_peft_config",
            "test_loads_native_retriever_archetype",
            "test_conversion_ignores_prompts_from_sparse_save",
        )
    },
    ("sentence_transformers", "any", f"{_SIMILARITY}test_pairwise_angle_sim_even_and_odd_sparse_embeddings"): _HUB,
    ("sentence_transformers", "any", f"{_MODEL}test_media_counts_run_under_eval_mode"): _ALONE,
    ("sentence_transformers", "any", "::test_pooled_rows_are_cluster_means"): _ALONE,
    ("sentence_transformers", "enabled", "::test_class_pool_matches_module_helper_directly"): _ORDER,
}
