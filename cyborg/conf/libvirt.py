# SPDX-License-Identifier: Apache-2.0
"""Options of the agent for the guests of its host."""

from typing import Any

from oslo_config import cfg

GROUP = "libvirt"
OPTIONS = [
    cfg.BoolOpt(
        "live_attach",
        default=False,
        help="Whether this agent attaches devices to running guests, and detaches them, for "
        "attachments in the mode live. Needs the extra 'live' of the package, and an agent whose "
        "user may change all domains of libvirt.",
    ),
    cfg.BoolOpt(
        "read_domains",
        default=True,
        help="Whether this agent reads the domains of libvirt, running or only defined, and offers "
        "no PCI function that a domain has without an accelerator request. It needs libvirt's "
        "Python binding (the extra 'live' of the package) and libvirt's read-only socket; without "
        "the binding nothing is read. Disable this on a host without libvirt.",
    ),
    cfg.StrOpt(
        "connection_uri",
        default="qemu:///system",
        help="The libvirt connection that nova-compute uses ([libvirt] connection_uri of Nova).",
    ),
    cfg.FloatOpt(
        "request_timeout",
        default=30.0,
        min=1.0,
        help="Maximum seconds for one call to libvirt. While a call that took longer has not "
        "returned, all further calls fail and are retried.",
    ),
    cfg.FloatOpt(
        "detach_timeout",
        default=20.0,
        min=1.0,
        help="Seconds in which a guest must release a device that is being detached. The request "
        "is then repeated, until the guest has released the device.",
    ),
    cfg.FloatOpt(
        "reassert_interval",
        default=60.0,
        min=1.0,
        help="Seconds between two checks whether the running guests have their devices. A start "
        "of a guest is checked at once.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
