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
        help="Seconds between two looks for events that could not be delivered at once.",
    ),
    cfg.FloatOpt(
        "lease",
        default=60.0,
        min=1.0,
        help="Seconds for which a conductor owns a piece of work before another may take it over.",
    ),
    cfg.IntOpt(
        "outbox_attempts",
        default=8,
        min=1,
        help="Deliveries that are tried before an event is put aside as dead.",
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
