"""Checks of every ``lik::`` operator against the installed torch: ``python -m lik_ops.opcheck [--device cuda]``.

Needs only the dependencies of lik_ops. `samples.table.OPERATORS` is the one table to which a new operator is added.
"""
