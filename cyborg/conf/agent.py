# SPDX-License-Identifier: Apache-2.0
"""Options of the agent."""

from typing import Any

from oslo_config import cfg

GROUP = "agent"
OPTIONS = [
    cfg.ListOpt(
        "enabled_backends",
        default=[],
        help="The backends of this host: names of sections, each with a 'driver' option and the "
        "options of that driver.",
    ),
    cfg.ListOpt(
        "enabled_drivers",
        default=[],
        help="The short form: entry points of cyborg.accelerator.driver, one backend for each, "
        "configured in the section of the same name.",
    ),
    cfg.FloatOpt(
        "discovery_interval",
        default=60.0,
        min=0.1,
        help="Seconds between two discoveries of one backend.",
    ),
    cfg.FloatOpt(
        "discovery_timeout",
        default=60.0,
        min=0.1,
        help="Seconds that one discovery may take before its backend shows ERROR.",
    ),
    cfg.IntOpt(
        "jobs_at_once",
        default=8,
        min=1,
        help="How many jobs (preparing, releasing and programming devices) the agent works on at "
        "the same time. One whose driver does not return in time no longer counts.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
