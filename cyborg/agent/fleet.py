# SPDX-License-Identifier: Apache-2.0
"""The backends of this host, which come and go while others look at them."""

import threading
from collections.abc import Iterator, Sequence
from typing import overload

from cyborg.agent.backend import Backend


class Fleet(Sequence[Backend]):
    """A sequence that is replaced as a whole: who goes through it sees one moment's.

    The order decides which backend has a device that two of them see, and so it does not depend on
    when one came: those of ``first`` in their order, others by name, then those of ``last``.
    """

    def __init__(self, first: Sequence[str] = (), last: Sequence[str] = ()) -> None:
        self._first = {name: number for number, name in enumerate(first)}
        self._last = {name: number for number, name in enumerate(last)}
        self._lock = threading.Lock()
        self._now: tuple[Backend, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Backend: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Backend]: ...

    def __getitem__(self, index: int | slice) -> Backend | Sequence[Backend]:
        return self._now[index]

    def __len__(self) -> int:
        return len(self._now)

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._now)

    def get(self, name: str) -> Backend | None:
        """Return the backend of a name."""
        return next((backend for backend in self if backend.name == name), None)

    def put(self, backend: Backend) -> Backend | None:
        """Take a backend in; return the one of its name whose place it takes."""
        with self._lock:
            old = self.get(backend.name)
            others = [one for one in self._now if one is not old]
            self._now = tuple(sorted([*others, backend], key=self._rank))
        return old

    def remove(self, name: str) -> Backend | None:
        """Give a backend up, and return it."""
        with self._lock:
            old = self.get(name)
            self._now = tuple(one for one in self._now if one is not old)
        return old

    def _rank(self, backend: Backend) -> tuple[int, int, str]:
        name = backend.name
        if name in self._first:
            return 0, self._first[name], name
        return (2, self._last[name], name) if name in self._last else (1, 0, name)
