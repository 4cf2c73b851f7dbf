# SPDX-License-Identifier: Apache-2.0
"""The metrics that processes count themselves: names, labels and buckets.

The values of a label are from a fixed set, such as the routes of the API: no client can add series.
"""

from dataclasses import dataclass

_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STAGES = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_DELIVERY = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 300.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: a histogram if it has buckets, a counter if its name ends with ``_total``.

    Otherwise it is a gauge, of which the greatest value of all workers is shown. ``buckets`` are
    upper limits in seconds.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def is_gauge(self) -> bool:
        """Return whether the metric is a gauge."""
        return not self.buckets and not self.name.endswith("_total")

    @property
    def width(self) -> int:
        """Return the number of stored values: the buckets, the last one and the sum; else 1."""
        return len(self.buckets) + 2 if self.buckets else 1


API_REQUESTS = Family(
    "cyborg_api_requests_total",
    "Requests to the REST API; the route - is an unknown path.",
    ("method", "route", "status"),
)
API_SECONDS = Family(
    "cyborg_api_request_seconds",
    "Duration of requests to the REST API in seconds.",
    ("method", "route"),
    _QUICK,
)
RPC_CLIENT_CALLS = Family(
    "cyborg_rpc_client_calls_total",
    "RPC calls of this service, by called method and result: ok or the code of the error.",
    ("method", "result"),
)
RPC_CLIENT_SECONDS = Family(
    "cyborg_rpc_client_seconds",
    "Duration of RPC calls of this service in seconds, until the answer.",
    ("method",),
    _QUICK,
)
RPC_SERVER_CALLS = Family(
    "cyborg_rpc_server_calls_total",
    "RPC calls that this service has answered, by result: ok or the code of the error.",
    ("method", "result"),
)
RPC_SERVER_SECONDS = Family(
    "cyborg_rpc_server_seconds",
    "Duration of the work for an RPC call in seconds, without the time in queues.",
    ("method",),
    _QUICK,
)
BINDS = Family(
    "cyborg_binds_total",
    "Ended binds: bound, prepare_failed if the host failed, else the code of the error.",
    ("outcome",),
)
BIND_SECONDS = Family(
    "cyborg_bind_stage_seconds",
    "Duration of the stages of binds in seconds: owner, claim and, with host work, prepare.",
    ("stage",),
    _STAGES,
)
DELIVERY_SECONDS = Family(
    "cyborg_outbox_delivery_seconds",
    "Seconds from the commit of an outbox message to its delivery.",
    ("kind",),
    _DELIVERY,
)
LOOP_OVERDUE = Family(
    "process_loop_overdue_seconds",
    "Seconds since the last round of a blocked loop of a worker began, 0 if it is not blocked.",
    ("loop",),
)
NOTIFICATIONS = Family(
    "process_nova_notifications_total",
    "Notifications of Nova that the conductors of this host have received.",
    ("result",),
)

FAMILIES = {
    family.name: family
    for family in (
        API_REQUESTS,
        API_SECONDS,
        RPC_CLIENT_CALLS,
        RPC_CLIENT_SECONDS,
        RPC_SERVER_CALLS,
        RPC_SERVER_SECONDS,
        BINDS,
        BIND_SECONDS,
        DELIVERY_SECONDS,
        LOOP_OVERDUE,
        NOTIFICATIONS,
    )
}
"""All of these metrics by name."""
