# SPDX-License-Identifier: Apache-2.0
"""Names of this host in Nova, by which the conductor finds its compute node provider."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from oslo_config import cfg

from cyborg.core import errors, hosts, log

LOG = log.get_logger(__name__)

# Seconds that the first call waits for the resolver, which may hang for minutes.
RESOLVER_TIMEOUT = 1.0

MAX_COMPUTE_ID = 1024  # characters of a compute_id file; nova writes 36


class HostIdentityProvider:
    """Provider of the host's names and compute id.

    The resolver of DNS names is called once. Until it has answered, the identity lacks the FQDN.
    The compute id file is read each time, because nova-compute may write it after the agent has
    started.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        *,
        hostname: Callable[[], str] = socket.gethostname,
        resolve: Callable[[], str] = socket.getfqdn,
        timeout: float = RESOLVER_TIMEOUT,
    ) -> None:
        """``timeout`` limits the wait for the resolver, in seconds.

        Raise Misconfigured if an option of the group ``agent`` is not valid.
        """
        options = conf.agent
        self._provider: str | None = (options.resource_provider or "").strip() or None
        self._compute_id_file: str | None = options.compute_id_file or None
        if options.replay:
            # The names of this machine would put the replayed devices below its compute node.
            self._compute_id_file = None
            hostname = resolve = lambda: str(conf.host)
        self._timeout = timeout
        self._last_error: str | None = None
        self._fqdn: str | None = None
        self._resolver = resolve
        self._hostname = hostname()
        try:
            # Only checked here: the names of the host are known later.
            hosts.Identity(self._provider)
        except errors.Invalid as exc:
            raise errors.Misconfigured(
                f"[agent] resource_provider: {exc.message}", option="agent.resource_provider"
            ) from exc
        self._resolver_thread: threading.Thread | None = None

    def identity(self) -> hosts.Identity:
        """Return the names of this host that are known now."""
        if self._resolver_thread is None:
            thread = threading.Thread(target=self._resolve_fqdn, name="resolver", daemon=True)
            thread.start()
            # Not before: if it cannot start, the next report tries again.
            self._resolver_thread = thread
            # The join has a timeout: a resolver that hangs only delays the first answer.
            thread.join(self._timeout)
        # The resolver and the kernel may return anything; one bad name must not refuse the report.
        names = [name for name in (self._hostname, self._fqdn) if name and _is_name(name)]
        return hosts.Identity(self._provider, self._compute_id(), hosts.name_variants(names))

    def _resolve_fqdn(self) -> None:
        try:
            self._fqdn = self._resolver()
        except (OSError, UnicodeError) as exc:
            LOG.info("Cannot resolve this host's FQDN: %s", exc)

    def _compute_id(self) -> str | None:
        """Return the content of the compute id file; None if the file is missing or invalid."""
        if self._compute_id_file is None:
            return None
        try:
            with Path(self._compute_id_file).open(encoding="ascii") as file:
                # Limited: the option may name any file, such as a device without an end.
                compute_id = file.read(MAX_COMPUTE_ID).strip()
            # Identity checks it.
            return hosts.Identity(compute_id=compute_id).compute_id
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError, errors.Invalid) as exc:
            error = f"[agent] compute_id_file {self._compute_id_file} cannot be used: {exc}"
        # The file is read for each heartbeat, and a wrong one stays wrong for days.
        if error != self._last_error:
            self._last_error = error
            LOG.warning("%s; searching the host's compute node by name", error)
        return None


def _is_name(name: str) -> bool:
    return len(name) <= hosts.MAX_NAME and name.isprintable()
