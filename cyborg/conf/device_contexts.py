# SPDX-License-Identifier: Apache-2.0
"""Options of device contexts."""

from typing import Any

from oslo_config import cfg

GROUP = "device_contexts"
OPTIONS = [
    cfg.FloatOpt(
        "unbound_ttl",
        default=86400.0,
        min=0.0,
        help="Seconds after which the conductors delete a device context that was never bound, "
        "with its accelerator requests and its hidden device profile, one day by default. The time "
        "begins when the context is created, and again when its accelerator requests are "
        "requested for a server or its lease ends without a bind; its project can "
        "set another time of expiry. A changed value is used for the next of these events. 0 means "
        "that contexts do not expire.",
    ),
    cfg.IntOpt(
        "lease_ttl",
        default=600,
        min=1,
        help="Seconds for which pre_bind reserves the handles of a device context, unless the call "
        "has lease_seconds; at most max_lease.",
    ),
    cfg.IntOpt(
        "max_lease",
        default=3600,
        min=1,
        help="Maximum of lease_seconds in a call of pre_bind. A lease can be renewed before it "
        "ends, any number of times.",
    ),
    cfg.IntOpt(
        "max_per_project",
        default=1000,
        min=-1,
        help="Maximum number of device contexts of one project, in any state; further ones are "
        "rejected with 403. Their accelerator requests also count for [conductor] "
        "max_project_arqs. Concurrent calls cannot exceed the limit. -1 disables the limit.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
