"""Device code of lik_ops: Triton kernels and the helpers they inline. Imported as `lik_ops.csrc_triton`."""
