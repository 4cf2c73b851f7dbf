# SPDX-License-Identifier: Apache-2.0
"""Options of the conductor."""

from typing import Any

from oslo_config import cfg

GROUP = "conductor"
OPTIONS = [
    cfg.IntOpt("workers", default=1, min=1, help="How many conductor processes to fork."),
    cfg.FloatOpt(
        "hello_interval",
        default=10.0,
        min=0.1,
        help="Seconds between two hellos of an agent; the conductor tells the agents.",
    ),
    cfg.IntOpt("late_after", default=2, min=1, help="Missed hellos after which a service is late."),
    cfg.IntOpt("down_after", default=6, min=2, help="Missed hellos after which a service is down."),
    cfg.FloatOpt(
        "reconnect_grace",
        default=75.0,
        min=0.0,
        help="Seconds that agents may take to find their way back to a message broker that was "
        "away: until so much more than the time after which a service is down has passed, in which "
        "a conductor's own hellos came back by the broker without a break, it holds no agent for "
        "down.",
    ),
    cfg.FloatOpt(
        "publish_interval",
        default=5.0,
        min=0.1,
        help="Seconds between two looks for resource providers that Placement must be told of. A "
        "report is published at once; this is for what failed or was left by another conductor.",
    ),
    cfg.FloatOpt(
        "audit_interval",
        default=600.0,
        min=1.0,
        help="Seconds after which a resource provider that has not changed is compared with "
        "Placement again and repaired, whoever changed or deleted it there.",
    ),
    cfg.FloatOpt(
        "outbox_interval",
        default=5.0,
        min=0.1,
        help="Seconds between two looks for messages that could not be delivered at once.",
    ),
    cfg.FloatOpt(
        "lease",
        default=60.0,
        min=1.0,
        help="Seconds for which a conductor owns a piece of work before another may take it over.",
    ),
    cfg.IntOpt(
        "outbox_attempts",
        default=30,
        min=1,
        help="Deliveries that are tried before a message of the outbox is put aside as dead. With "
        "30, an event is tried for more than 6 minutes, of which nova-compute waits for 5, and a "
        "notification for more than 100 minutes.",
    ),
    cfg.FloatOpt(
        "outbox_keep",
        default=2592000.0,
        min=1.0,
        help="Seconds for which dead messages are kept for the operator, 30 days by default.",
    ),
    cfg.FloatOpt(
        "jobs_interval",
        default=5.0,
        min=0.1,
        help="Seconds between two looks for host work that its agent must be asked about. New work "
        "is begun at once; this is for what was lost or left by another conductor.",
    ),
    cfg.FloatOpt(
        "driver_timeout",
        default=150.0,
        min=1.0,
        help="Seconds that an agent may take to enable, change or give up a backend, its setup and "
        "first discovery included, before that counts as failed and is taken back. More than twice "
        "[agent] discovery_timeout and a hello_interval.",
    ),
    cfg.FloatOpt(
        "prepare_timeout",
        default=240.0,
        min=1.0,
        help="Seconds that a host may take to prepare the devices of an instance before the bind "
        "is undone and Nova is told that it failed. Nova waits 300 s by itself.",
    ),
    cfg.FloatOpt(
        "program_timeout",
        default=1800.0,
        min=1.0,
        help="Seconds that a host may take to load an image into a device.",
    ),
    cfg.FloatOpt(
        "reconcile_interval",
        default=300.0,
        min=0.0,
        help="Seconds between two rounds in which every bound request is held against Placement's "
        "allocations; the conductors take turns. 0 is never.",
    ),
    cfg.FloatOpt(
        "orphan_grace",
        min=0.0,
        sample_default=600.0,
        help="Seconds for which a bound request may lack an allocation before it is unbound and "
        "its device freed, and after a bind before it is suspected at all. Nova deletes "
        "allocations and requests one after the other, so that a request without an allocation "
        "need not be an orphan yet. 0 reports orphans and frees none. Unset, it is 600, and where "
        "[nova] notify is false no orphans are looked for: without Nova nobody allocates.",
    ),
    cfg.FloatOpt(
        "unbound_ttl",
        default=0.0,
        min=0.0,
        help="Seconds after which a request is deleted that is Initial, Unbound or BindFailed and "
        "that nobody has touched, such as one whose maker died before it was bound. Make it longer "
        "than a server may take to be built. 0 keeps them for ever.",
    ),
    cfg.FloatOpt(
        "remember",
        default=2592000.0,
        min=0.0,
        help="Seconds for which a device that has gone from its host is remembered, 30 days by "
        "default. One that returns in that time to the same address has its uuid again, the status "
        "that an operator gave it, and an operator's attributes. 0 forgets at once.",
    ),
    cfg.PortOpt(
        "metrics_port",
        default=0,
        help="The port on which the conductor answers Prometheus at /metrics, over HTTP and "
        "without authentication; 0 is none. Of several workers on a host one does.",
    ),
    cfg.HostAddressOpt(
        "metrics_listen",
        default="127.0.0.1",
        help="The address on which the conductor answers Prometheus.",
    ),
    cfg.IntOpt(
        "max_report_bytes",
        default=16777216,
        min=65536,
        help="The largest report of a host that is read.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
