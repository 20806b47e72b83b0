"""lik_ops inside other libraries: one module a library, none of them imported, or needed, before it is asked for."""
