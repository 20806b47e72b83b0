"""Adapters for other libraries, one module for each, imported only on request."""
