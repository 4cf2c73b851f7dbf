# SPDX-License-Identifier: Apache-2.0
"""/v2/summary: the state of the whole cloud in one small answer, for views that refresh."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from cyborg.api import types
from cyborg.api.controller import ApiContext, RequestContext, Resource
from cyborg.api.operation import operation
from cyborg.core.hosts import AGENT, Liveness
from cyborg.core.inventory.device import Health
from cyborg.db.handles import usage
from cyborg.db.services import read as services
from cyborg.db.totals import read as totals
from cyborg.db.totals.read import Counts, HandleUse, Totals
from cyborg.threads.locks import CachedValue

# Maximum number of objects in each list of objects.
MAX_NAMED = 16
# Seconds for which an answer is used again.
CACHE_SECONDS = 1.0


class HostCounts(types.JsonObject, counts=("up", "late", "down", "cordoned")):
    """The numbers of hosts by the liveness of their agents; ``cordoned`` hosts get no new ARQs."""


class ServiceCount(types.JsonObject):
    """The number of daemons of a kind with the same liveness."""

    binary = types.required(str)
    state = types.required(types.Enum(*Liveness))
    count = types.required(int)


class DownService(types.JsonObject, row=services.DownServiceRow):
    """A daemon that is down, and its last heartbeat."""


class ClassHandles(
    types.JsonObject,
    row=usage.ClassUseRow,
    only=("resource_class", "total", *usage.USES, "undeliverable"),
):
    """The handles of one resource class by use; each handle counts once.

    ``undeliverable`` are those of the ``cordoned`` handles whose devices cannot be attached to an
    instance.
    """


class DeviceCounts(
    types.JsonObject,
    counts=("total", "disabled", "unhealthy", "undeliverable", "failing", "maintenance"),
):
    """The numbers of devices: all, and those that need attention.

    ``undeliverable`` devices have handles and cannot be attached to an instance; ``failing`` ones
    are closed for a time, because their last prepare jobs failed.
    """


class UnhealthyDevice(types.JsonObject, row=totals.UnhealthyRow):
    """An unhealthy device, and since when it is unhealthy."""


class OpenJobs(types.JsonObject, row=totals.JobCountRow):
    """The open jobs of one kind: all, those past their deadline, and the creation of the oldest."""


class MessageCount(types.JsonObject, row=totals.OutboxCountRow):
    """The messages of the outbox of one kind and state, and the creation of the oldest."""

    state = types.required(types.Enum("pending", "dead"))


class ProviderCounts(types.JsonObject, counts=("total", "stale", "failing")):
    """The resource providers: all, those to publish, and those whose last publishing failed."""


class Summary(types.JsonObject):
    """The state of the whole cloud.

    The numbers of handles, devices, providers, accelerator requests, device contexts and
    attachments are ``count_age`` seconds old, the others are those at ``read_at``, a time of the
    database. ``guest_devices_missing`` is the number of devices that agents cannot attach to
    running guests: ``attach_error`` of their accelerator requests. ``down_services`` and
    ``unhealthy_devices`` have up to 16 objects, those that are down or unhealthy for longest.
    """

    hosts = types.required(HostCounts)
    services = types.required([ServiceCount])
    down_services = types.required([DownService])
    resource_classes = types.required([ClassHandles])
    devices = types.required(DeviceCounts)
    unhealthy_devices = types.required([UnhealthyDevice])
    guest_devices_missing = types.required(int)
    accelerator_requests = types.required({str: int})
    device_contexts = types.required({str: int})
    attachments = types.required({str: int})
    jobs = types.required([OpenJobs])
    outbox = types.required([MessageCount])
    providers = types.required(ProviderCounts)
    read_at = types.required(datetime)
    count_age = types.required(int)


class Controller(Resource):
    """The operation on the summary."""

    def __init__(self, context: ApiContext) -> None:
        super().__init__(context)
        # Views refresh it every second or two, and there may be many of them.
        self._summary = CachedValue(self._read, CACHE_SECONDS)

    @operation("GET summary", "cyborg:summary:get", since=(2, 6), answer=Summary)
    def show(self, request: RequestContext) -> Any:
        """Show the numbers of all objects of the cloud, and what needs attention.

        The size of the answer does not grow with the cloud, except with its resource classes. The
        answer may be one second old: ``read_at`` is the time at which it was read.
        """
        return self._summary.get()

    def _read(self) -> Any:
        # The clock of the database: liveness compares with times that it wrote.
        now = self.read_clock()
        # Before the connection: counting may wait, and takes one of its own.
        counts, age = self.context.counts.read()
        with self.context.reader.connect() as connection:
            found = totals.read(connection, now=now, max_unhealthy=MAX_NAMED)
            down = services.find_down(connection, now=now, limit=MAX_NAMED)
        more = {"down_services": down, "read_at": now, "count_age": round(age)}
        return types.serialize(Summary, {**_make_fields(counts, found), **more})


def _make_fields(counts: Counts, totals: Totals) -> dict[str, Any]:
    """Return the fields of the summary that the cached counts and the totals give."""
    hosts = {state: totals.services.get((AGENT, state), 0) for state in Liveness}
    devices = counts.devices
    return {
        "hosts": {**hosts, "cordoned": totals.hosts_cordoned},
        "services": [
            {"binary": binary, "state": state, "count": count}
            for (binary, state), count in sorted(totals.services.items())
        ],
        "unhealthy_devices": totals.unhealthy,
        "guest_devices_missing": totals.guest_devices_missing,
        "jobs": totals.jobs,
        "outbox": totals.outbox,
        # The fields below are from the cached counts, except those that ``totals`` has.
        "resource_classes": list(_classes(counts)),
        "devices": {
            "total": sum(devices.values()),
            "disabled": sum(n for (status, _), n in devices.items() if status != "enabled"),
            "unhealthy": _count_unhealthy(counts, totals),
            "undeliverable": counts.devices_undeliverable,
            "failing": totals.devices_failing,
            "maintenance": totals.maintenance_windows,
        },
        "accelerator_requests": counts.arqs,
        "device_contexts": counts.device_contexts,
        "attachments": counts.attachments,
        "providers": {
            "total": counts.providers,
            "stale": totals.providers_stale,
            "failing": totals.providers_failing,
        },
    }


def _count_unhealthy(counts: Counts, totals: Totals) -> int:
    """Return the number of unhealthy devices.

    The cached count may be older than the list: it is used only if the list has not all of them.
    """
    if len(totals.unhealthy) < MAX_NAMED:
        return len(totals.unhealthy)
    counted = sum(n for (_, health), n in counts.devices.items() if health == Health.UNHEALTHY)
    return max(len(totals.unhealthy), counted)


def _classes(counts: Counts) -> Iterable[dict[str, Any]]:
    for name in sorted({key.resource_class for key in counts.handles}):
        uses = {use: counts.handles.get(HandleUse(name, use), 0) for use in usage.USES}
        undeliverable = counts.handles_undeliverable.get(name, 0)
        total = sum(uses.values())
        yield {"resource_class": name, "total": total, **uses, "undeliverable": undeliverable}
