# SPDX-License-Identifier: Apache-2.0
"""Lookup of drivers that were installed while the agents run: agents rescan on demand.

A request queries the agents that are up and lack the driver, in parallel, within a bounded time.
Found drivers are stored immediately; the next report of each such agent has its complete driver
list.
"""

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.core.drivers import registry
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.core.validation import check_text
from cyborg.db.drivers import write as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI
from cyborg.threads.calls import FanOut

LOG = get_logger(__name__)

# Seconds that a request waits for the answers of agents. An operator waits too: an agent that hangs
# must not use up the time of the request.
MAX_SECONDS = 5.0
# Share of [rpc] timeout, which limits the whole request of the API. The rest is for the
# transactions before and after the queries.
_SHARE = 0.5


@dataclass(eq=False)
class DriverLookup:
    """Lookup of a driver on hosts where the database does not have it."""

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    agents: AgentAPI

    def __post_init__(self) -> None:
        self._seconds = min(MAX_SECONDS, _SHARE * self.conf.rpc.timeout)
        self._calls = FanOut("driver-lookup")

    def find(self, key: str, hosts: Collection[str] | None) -> list[str]:
        """Query agents for a driver, by name or uuid; return the hosts that have it.

        ``hosts`` limits the query, None is all hosts. Hosts that are down, or that have already
        reported the driver, are not queried. An agent that fails or does not answer in time is
        treated as if its host did not have the driver.
        """
        agent_ids = self.uow.run(lambda tx: _find_agents_without_driver(tx, key, hosts))
        if not agent_ids:
            return []
        entries_by_host = self._query_agents(key, agent_ids.keys())
        if entries_by_host:
            entries = {agent_ids[host]: entry for host, entry in entries_by_host.items()}
            self.uow.run(lambda tx: store.add(tx, entries))
            LOG.info(
                "Driver lookup found the driver on %d hosts",
                len(entries_by_host),
                driver=key,
                host=sorted(entries_by_host),
            )
        return sorted(entries_by_host)

    def stop(self) -> None:
        """Start no more calls."""
        self._calls.stop()

    def _query_agents(self, key: str, hosts: Collection[str]) -> dict[str, registry.DriverEntry]:
        """Query agents in parallel; return the driver entries of the answers that came in time."""
        entries: dict[str, registry.DriverEntry] = {}
        pending, timed_out = len(hosts), False
        changed = threading.Condition()

        def query(host: str) -> None:
            nonlocal pending
            # The threads are limited in number: this one may be free only after the timeout.
            entry = None if timed_out else self._query_agent(key, host)
            with changed:
                pending -= 1
                if entry is not None and not timed_out:
                    entries[host] = entry
                changed.notify_all()

        # In parallel, in threads that may outlive the request: an agent that hangs must not delay
        # the answer of the others.
        self._calls.submit(query, sorted(hosts))
        end = time.monotonic() + self._seconds
        with changed:
            while pending and (remaining := end - time.monotonic()) > 0:
                changed.wait(remaining)
            # Set under the lock: an answer that comes later must not change the result that is
            # returned.
            timed_out = True
            if pending:
                LOG.warning(
                    "Driver lookup: %d of %d agents did not answer within %.1f s, their hosts "
                    "are treated as without the driver",
                    pending,
                    len(hosts),
                    self._seconds,
                    driver=key,
                )
            return dict(entries)

    def _query_agent(self, key: str, host: str) -> registry.DriverEntry | None:
        """Return the driver on a host, None if the host does not have it or does not answer."""
        try:
            body = self.agents.find_driver(host=host, driver=key)["driver"]
            if body is None:
                return None
            (entry,) = registry.load([body])
        except (CyborgError, KeyError, TypeError, ValueError, AttributeError) as exc:
            # An agent of another release may answer in another form: its host counts as without the
            # driver.
            LOG.info("Driver lookup failed on a host: %s", exc, host=host, driver=key)
            return None
        except Exception:
            LOG.exception("Unexpected error in a driver lookup", host=host, driver=key)
            return None
        if key not in (entry.name, registry.driver_uuid(entry.name)):
            LOG.warning(
                "Driver lookup: agent answered about driver %s instead, answer ignored",
                entry.name,
                host=host,
                driver=key,
            )
            return None
        return entry


def _find_agents_without_driver(
    tx: sa.Connection, key: str, hosts: Collection[str] | None
) -> dict[str, int]:
    """Return the row ids, by host, of agents that are up and lack a driver.

    Raise Invalid if ``key`` cannot be a name.
    """
    check_text("driver", key, registry.MAX_NAME)
    # The key is the name of the driver unless it is the uuid that follows from a known name.
    name = next((known for known in store.names(tx) if key == registry.driver_uuid(known)), key)
    installed = store.installations(tx, name)
    return {
        row["host"]: row["id"]
        for row in store.agents(tx)
        if row["down_since"] is None
        and row["id"] not in installed
        and (hosts is None or row["host"] in hosts)
    }
