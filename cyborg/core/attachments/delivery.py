# SPDX-License-Identifier: Apache-2.0
"""Whether running guests have the devices that the agent attaches to them.

Nova attaches the devices of most ARQs when it starts a guest. The agent attaches those of VFIO
handles, and of attachments in the mode live that Nova ignores, after each start of the guest, and
also those that Nova forgets, as at the boot of a host. It reports a device that it has attached,
and one that a running guest still lacks after a time. That is an error to act on: so it ends when
the guest has the device, and also when the guest does not run any more. The agent attaches the
device at the next start, and reports again if that fails. The conductor tells the agent what it has
recorded, so that neither a restart of the agent nor a lost report leaves a wrong record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cyborg.core.codec import Serializable, wire
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize
from cyborg.core.validation import malformed, parse_uuid

MAX_DELIVERIES = 512  # in one report, which then is below the limit of a message
MAX_ERROR = 1000  # characters
# Error of a report about a guest that does not run, for conductors that do not know this report.
NOT_RUNNING = "the guest does not run: the agent attaches the device at its next start"


@dataclass(frozen=True, slots=True)
class Delivery(Serializable):
    """What the agent knows of the device of an ARQ: the running guest has it, or why it has not.

    If the guest does not run, it lacks nothing, whatever ``error`` is.
    """

    arq: str = field(metadata=wire(load=lambda value: parse_uuid(value, "devices['arq']")))
    error: str | None = None
    is_running: bool = field(default=True, metadata=wire(omit=bool))

    def __post_init__(self) -> None:
        if self.error is not None:
            text = sanitize(self.error, MAX_ERROR) or "no reason is known"
            object.__setattr__(self, "error", text)


def load_deliveries(devices: Any) -> dict[str, Delivery]:
    """Return the deliveries of a report by the uuids of their ARQs. Raise Invalid."""
    if not isinstance(devices, list) or len(devices) > MAX_DELIVERIES:
        raise Invalid(
            f"devices must be a list of at most {MAX_DELIVERIES} objects", field="devices"
        )
    with malformed("device", "devices"):
        deliveries = [Delivery.from_dict(device) for device in devices]
    return {delivery.arq: delivery for delivery in deliveries}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one check of a device.

    ``is_attached`` is None if nothing is known, such as while the hypervisor does not answer;
    ``error`` then is the reason. ``is_new`` is whether the check has attached the device. Without
    ``is_running``, the guest is known not to run.
    """

    is_attached: bool | None
    error: str = ""
    is_new: bool = False
    is_running: bool = True

    @property
    def is_complete(self) -> bool:
        """Return whether the guest certainly lacks nothing."""
        return self.is_attached is True or not self.is_running


# Outcome of the device of a guest that does not run.
STOPPED = Outcome(is_attached=False, is_running=False)


class RecordedDelivery(NamedTuple):
    """What the conductor has recorded of an ARQ: whether the guest has the device, and an error."""

    is_attached: bool
    error: str | None


class DeliveryRecord:
    """What the agent has to report of the devices of its guests. Not thread-safe.

    A running guest may lack a device for ``timeout`` seconds before that is an error.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._missing_since: dict[str, float] = {}
        self._unconfirmed: dict[str, Delivery] = {}

    def update(
        self,
        recorded: Mapping[str, RecordedDelivery],
        outcomes: Mapping[str, Outcome],
        now: float,
    ) -> list[Delivery]:
        """Return what to report after a check at ``now``, in monotonic seconds.

        ``recorded`` and ``outcomes`` are by the uuid of the ARQ. ``outcomes`` has no device that
        the guest must not have any more.
        """
        for by_arq in (self._missing_since, self._unconfirmed):
            for released_arq in by_arq.keys() - recorded.keys():
                del by_arq[released_arq]
        for arq, (was_attached, error) in recorded.items():
            outcome = outcomes.get(arq)
            if outcome is None or not outcome.is_running:
                self._missing_since.pop(arq, None)
                self._unconfirmed.pop(arq, None)
                if outcome is not None and error is not None:
                    self._unconfirmed[arq] = Delivery(arq, NOT_RUNNING, is_running=False)
                continue
            if (report := self._unconfirmed.get(arq)) is not None and not report.is_running:
                del self._unconfirmed[arq]  # the guest runs again
            if outcome.is_attached:
                self._missing_since.pop(arq, None)
                if outcome.is_new or not was_attached or error is not None:
                    self._unconfirmed[arq] = Delivery(arq)
            # A guest that had its device keeps it while the hypervisor does not answer.
            elif outcome.is_attached is not None or not was_attached:
                since = self._missing_since.setdefault(arq, now)
                failure = Delivery(arq, outcome.error)
                if now >= since + self._timeout and failure.error != error:
                    self._unconfirmed[arq] = failure
        return list(self._unconfirmed.values())

    def confirm(self) -> None:
        """Note that the conductor has the last report."""
        self._unconfirmed.clear()

    def next_deadline(self, now: float) -> float | None:
        """Return the seconds until another device is missing for too long, None if none will be."""
        left = [since + self._timeout - now for since in self._missing_since.values()]
        return min((seconds for seconds in left if seconds > 0), default=None)
