"""The operators of the ``lik::`` library. Importing this package registers them, once per process."""

from . import maxsim  # noqa: F401
