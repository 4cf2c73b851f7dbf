# SPDX-License-Identifier: Apache-2.0
"""The backends of this host, which may change while other threads read them."""

import threading
from collections.abc import Iterator, Sequence
from typing import overload

from cyborg.agent.backends.backend import Backend


class BackendRegistry(Sequence[Backend]):
    """Ordered backends. Each change replaces the whole tuple, so an iteration is consistent.

    If two backends find the same device, the first one owns it. So the order must not depend on
    when a backend was added: the backends named in ``first`` come first, then all others by name,
    then the backends named in ``last``. ``first`` and ``last`` are ordered.
    """

    def __init__(self, first: Sequence[str] = (), last: Sequence[str] = ()) -> None:
        self._first = {name: number for number, name in enumerate(first)}
        self._last = {name: number for number, name in enumerate(last)}
        self._lock = threading.Lock()
        self._current: tuple[Backend, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Backend: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Backend]: ...

    def __getitem__(self, index: int | slice) -> Backend | Sequence[Backend]:
        return self._current[index]

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._current)

    def get(self, name: str) -> Backend | None:
        """Return the backend of this name, or None."""
        return next((backend for backend in self if backend.name == name), None)

    def replace(self, backend: Backend) -> Backend | None:
        """Add a backend; return the backend of the same name that it replaces, or None."""
        with self._lock:
            old = self.get(backend.name)
            others = [other for other in self._current if other is not old]
            self._current = tuple(sorted([*others, backend], key=self._rank))
        return old

    def remove(self, name: str) -> Backend | None:
        """Remove a backend and return it, or None if there is none."""
        with self._lock:
            old = self.get(name)
            self._current = tuple(other for other in self._current if other is not old)
        return old

    def _rank(self, backend: Backend) -> tuple[int, int, str]:
        name = backend.name
        if name in self._first:
            return 0, self._first[name], name
        return (2, self._last[name], name) if name in self._last else (1, 0, name)
