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
        "options of that driver. What an operator changes over the API comes before this.",
    ),
    cfg.ListOpt(
        "enabled_drivers",
        default=[],
        help="The short form: entry points of cyborg.accelerator.driver, one backend for each, "
        "configured in the section of the same name.",
    ),
    cfg.StrOpt(
        "resource_provider",
        help="The resource provider of this host's compute node, by its uuid or exact name, for "
        "where Nova's name for the host cannot be found by itself; nothing else is tried then.",
    ),
    cfg.StrOpt(
        "compute_id_file",
        default="/var/lib/nova/compute_id",
        help="The file in which nova-compute keeps the uuid of its compute node, which is that of "
        "the node's resource provider. It need not be there. Empty looks for none.",
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
        help="Seconds that one discovery, or the setup of a driver, may take before its backend "
        "shows ERROR. A change at run time that takes longer is given up.",
    ),
    cfg.BoolOpt(
        "watch",
        default=True,
        help="Discover at once when the kernel says by a uevent that a device came, went or "
        "changed, for drivers that this concerns; discovery_interval is kept as well.",
    ),
    cfg.FloatOpt(
        "health_interval",
        default=10.0,
        min=0.1,
        help="Seconds between two measurements of the health of a backend's devices, if its driver "
        "can measure.",
    ),
    cfg.FloatOpt(
        "health_quiet",
        default=60.0,
        min=0.0,
        help="Seconds for which a device that was unhealthy must measure well, without a break, "
        "before it counts as healthy again.",
    ),
    cfg.IntOpt(
        "jobs_at_once",
        default=8,
        min=1,
        help="How many jobs (preparing, releasing and programming devices) the agent works on at "
        "the same time. One whose driver does not return in time no longer counts.",
    ),
    cfg.StrOpt(
        "socket_dir",
        default="",
        help="The directory of the sockets by which the agent and drivers in processes of their "
        "own speak. It must be there, of mode 0700 or 0750; its owner and root may speak. Empty "
        "has no such drivers.",
    ),
    cfg.ListOpt(
        "socket_drivers",
        default=[],
        help="The drivers in processes of their own that may say hello: each is a backend of that "
        "name, and listens in socket_dir at <name>.sock.",
    ),
    cfg.FloatOpt(
        "socket_timeout",
        default=10.0,
        min=0.1,
        help="Seconds that a driver in a process of its own may take to answer one call. A "
        "discovery is up to three.",
    ),
    cfg.FloatOpt(
        "socket_work_timeout",
        default=200.0,
        min=0.1,
        help="Seconds that such a driver may take to prepare or release a handle, or to load an "
        "image.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
