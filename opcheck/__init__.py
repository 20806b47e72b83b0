"""Checks of every ``lik::`` operator against the torch build at hand: ``python -m lik_ops.opcheck [--device cuda]``.

Needs nothing beyond what lik_ops needs. `samples.OPERATORS` is the one table that a new operator is entered in.
"""
