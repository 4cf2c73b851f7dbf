# SPDX-License-Identifier: Apache-2.0
"""Conformance kit for external drivers: the kit takes the place of the agent.

All rules apply except those that inspect a Python class. Side effects of the driver process are not
detected; its vendor must verify that it only reads.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cyborg.agent.external.driver import ExternalDriver, ExternalDriverHost
from cyborg.agent.external.server import owner_uid
from cyborg.core import external as protocol
from cyborg.core.errors import TimedOut
from cyborg.core.external import Hello
from cyborg.drivers.base import Driver

_INTERVAL = 60.0  # seconds between heartbeats that the kit requests


class _Listener(ExternalDriver):
    """External driver that stores its last hello message."""

    hello: Hello | None = None

    def register(self, hello: Hello) -> bool:
        """Store the message and register the driver."""
        self.hello = hello
        return super().register(hello)


@contextmanager
def connect_external(
    folder: str, name: str, limit: float, registration_timeout: float
) -> Iterator[type[Driver]]:
    """Yield a class whose objects call the external driver at ``<folder>/<name>.sock``.

    ``limit`` is the timeout of a call and ``registration_timeout`` the timeout of the driver's
    hello message, in seconds. Raise Misconfigured if an agent would reject the folder, or if an
    agent is using it. Raise TimedOut if the driver does not register.
    """
    uid = owner_uid(folder)
    # Longer than the limit of the kit, so that a rule can report the timeout.
    seconds = 2 * limit
    listener = _Listener(name, folder, uid, seconds, seconds)
    registered = threading.Event()
    agent = ExternalDriverHost(folder, {name: listener}, uid, _INTERVAL)
    agent.start(lambda _: registered.set())

    class Process(ExternalDriver):
        """Proxy of the external driver; all objects call the same process."""

        def __init__(
            self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
        ) -> None:
            super().__init__(name, folder, uid, seconds, seconds)
            self.backend = backend
            if listener.hello is not None:
                self.register(listener.hello)

    try:
        if not registered.wait(registration_timeout):
            path = protocol.socket_path(folder, protocol.AGENT_SOCKET)
            raise TimedOut(
                f"driver {name} did not register at {path} within {registration_timeout:g} s"
            )
        yield Process
    finally:
        agent.stop()
