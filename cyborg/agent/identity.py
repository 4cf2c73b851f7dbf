# SPDX-License-Identifier: Apache-2.0
"""By which names this host may be known to Nova, whose compute node our providers hang below."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from oslo_config import cfg
from oslo_log import log

from cyborg.core.errors import Invalid, Misconfigured
from cyborg.core.identity import MAX_NAME, Identity, spellings

LOG = log.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that the first answer waits for the resolver, which may hang for minutes."""

MAX_ID = 1024  # characters of a compute_id file; nova writes 36


class Names:
    """Asks the system once, and nova's file each time: nova-compute may write it after our start.

    A name that the resolver tells late is in a later answer.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        *,
        hostname: Callable[[], str] = socket.gethostname,
        resolve: Callable[[], str] = socket.getfqdn,
        patience: float = PATIENCE,
    ) -> None:
        """``patience`` is in seconds. Raises Misconfigured."""
        ours = conf.agent
        self._provider: str | None = (ours.resource_provider or "").strip() or None
        self._file: str | None = ours.compute_id_file or None
        self._patience = patience
        self._said: str | None = None
        self._full: str | None = None
        self._resolve = resolve
        self._name = hostname()
        try:
            Identity(self._provider)
        except Invalid as bad:
            raise Misconfigured(
                f"[agent] resource_provider: {bad.message}", option="agent.resource_provider"
            ) from bad
        self._asked: threading.Thread | None = None

    def identity(self) -> Identity:
        """Return what is known now."""
        if self._asked is None:
            # Nobody waits for this thread: a resolver that hangs costs the first answer a second.
            self._asked = threading.Thread(target=self._ask, name="resolver", daemon=True)
            self._asked.start()
            self._asked.join(self._patience)
        told = [name for name in (self._name, self._full) if name and _is_name(name)]
        return Identity(self._provider, self._compute_id(), spellings(told))

    def _ask(self) -> None:
        try:
            self._full = self._resolve()
        except (OSError, UnicodeError) as bad:
            LOG.info("The resolver does not know this host in full: %s", bad)

    def _compute_id(self) -> str | None:
        """Return what nova's file says, None when it is not there or cannot be used."""
        if self._file is None:
            return None
        try:
            with Path(self._file).open(encoding="ascii") as file:
                found = file.read(MAX_ID).strip()
            return Identity(compute_id=found).compute_id
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError, Invalid) as bad:
            said = f"[agent] compute_id_file {self._file} cannot be used: {bad}"
        if said != self._said:
            self._said = said
            LOG.warning("%s; the host's compute node is looked for by name", said)
        return None


def _is_name(name: str) -> bool:
    return len(name) <= MAX_NAME and name.isprintable()
