# SPDX-License-Identifier: Apache-2.0
"""Counts of the free PCIe ports of running guests, before a bind.

A guest with too few ports should claim no device. The count is no condition: the agent counts the
ports again before it plugs a device. So a count that no agent answers is given up, and the bind
goes on. An agent is asked in a thread of its own: the conductor works on all attachments in one
thread, in which the others would wait for an agent that does not answer.
"""

from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.rpc.agent_api import AgentAPI
from cyborg.threads.calls import start_call

LOG = get_logger(__name__)

ANSWER_SECONDS = 0.2  # for which the caller waits: most agents answer in a few milliseconds
MAX_COUNTS = 16  # in progress; each one is a thread until the call ends


class PortCount(NamedTuple):
    """Free PCIe ports of a running guest; ``free`` is None if only an attach can tell."""

    free: int | None


_UNKNOWN = PortCount(None)


@dataclass(eq=False, slots=True)
class GuestPorts:
    """Counts in progress. Not thread-safe: the thread that works on attachments uses it."""

    agents: AgentAPI
    _counts: "dict[str, Future[int | None]]" = field(default_factory=dict)  # by attachment
    _late: "list[Future[int | None]]" = field(default_factory=list)  # those that nobody waits for

    def count(self, attachment: str, host: str, instance: str) -> PortCount | None:
        """Return the number of free ports of a guest; None if its agent has not answered yet.

        Call this again then: it waits for the same call, and starts no other. The number is unknown
        if the agent cannot be asked, or answers an error.
        """
        call = self._counts.get(attachment)
        if call is None:
            call = self._start(attachment, host, instance)
            if call is None:
                return _UNKNOWN
            wait([call], ANSWER_SECONDS)
        if not call.done():
            return None
        del self._counts[attachment]
        try:
            return PortCount(call.result())
        except CyborgError as exc:
            LOG.info("Cannot count the PCIe ports of the guest before the bind: %s", exc.message)
            return _UNKNOWN

    def give_up(self, attachment: str) -> None:
        """Ignore the answer for an attachment; its call counts for MAX_COUNTS until it ends."""
        call = self._counts.pop(attachment, None)
        if call is not None:
            # It is in progress until its time limit, and has a thread.
            self._late.append(call)
            LOG.info("The PCIe ports of the guest are not counted before the bind: no answer yet")

    def _start(self, attachment: str, host: str, instance: str) -> "Future[int | None] | None":
        """Ask an agent; return None if that is not possible now."""
        # Nothing fetches the answers for attachments that another conductor has leased since.
        self._counts = {key: call for key, call in self._counts.items() if not call.done()}
        self._late = [call for call in self._late if not call.done()]
        if len(self._counts) + len(self._late) >= MAX_COUNTS:
            return None
        try:
            call = start_call("ports", partial(self._ask, host, instance))
        except RuntimeError as exc:  # no more threads can start
            LOG.info("Cannot count the PCIe ports of the guest before the bind: %s", exc)
            return None
        self._counts[attachment] = call
        return call

    def _ask(self, host: str, instance: str) -> int | None:
        free: int | None = self.agents.count_free_ports(host, instance)["free"]
        return free
