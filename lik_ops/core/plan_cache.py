"""The cache of plans and decisions about calls, by dispatch key, in bounded memory.

A key contains the name of the function or plan that it belongs to, and everything that the entry depends on: metadata
of tensors, options and settings. Values and addresses of tensors are not part of a key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

MAX_PLANS = 8192

_lock = threading.Lock()


class PlanCache:
    """A bounded dictionary that drops the entries that were not used for the longest time.

    Stored entries are young. If the young generation is full, it becomes the old generation, and the previous old
    generation is dropped. A hit in the old generation moves the entry to the young one. A hit in the young generation
    writes nothing, so it costs one lookup and needs no lock.

    An entry is dropped only after `capacity` / 2 other entries were stored or moved since its last use.
    """

    __slots__ = ("_old", "_young", "capacity")

    def __init__(self, capacity: int) -> None:
        """Create an empty cache of at most `capacity` entries."""
        self.capacity = capacity
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        """Return the entry of `key`, or None."""
        entry = self._young.get(key)
        return self._promote(key) if entry is None else entry

    def _promote(self, key: Any) -> Any:
        """Move an old entry to the young generation and return it, or return None."""
        if key not in self._old and key not in self._young:
            return None
        with _lock:
            if key in self._old:
                return self._insert(key, self._old[key])
            return self._young.get(key)  # another thread has moved the entry

    def store(self, key: Any, entry: Any) -> Any:
        """Store an entry, which must not be None, and return it."""
        with _lock:
            return self._insert(key, entry)

    def _insert(self, key: Any, entry: Any) -> Any:
        """Add an entry to the young generation and return it. Start a new generation if the young one is full."""
        if len(self._young) >= max(self.capacity // 2, 1) and key not in self._young:
            self._old, self._young = self._young, {}
        self._old.pop(key, None)
        self._young[key] = entry
        return entry

    def clear(self) -> None:
        """Drop all entries."""
        with _lock:
            self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def values(self) -> list:
        """Return all entries."""
        return [*self._old.values(), *self._young.values()]

    def __iter__(self) -> Iterator:
        """Return the keys of all entries."""
        return iter([*self._old, *self._young])


plans = PlanCache(MAX_PLANS)
