# SPDX-License-Identifier: Apache-2.0
"""Sections of the agent: agent and libvirt."""

from oslo_config import cfg

from cyborg.conf.sections import Section

AGENT = Section(
    "agent",
    cfg.ListOpt(
        "enabled_backends",
        default=[],
        help="The backends of this host: names of configuration sections, each with a 'driver' "
        "option and the options of that driver. Changes that an operator makes over the API "
        "take precedence.",
    ),
    cfg.ListOpt(
        "enabled_drivers",
        default=[],
        help="Short form of enabled_backends: names of entry points of "
        "cyborg.accelerator.driver. Each is one backend, configured in the section of the "
        "same name.",
    ),
    cfg.BoolOpt(
        "allow_reference_drivers",
        default=False,
        help="Whether drivers with support level 'reference', such as fake, can be installed "
        "over the API. If false, only this file can name them as backends.",
    ),
    # No default: a wrong one would put the devices below the compute node of another host.
    cfg.StrOpt(
        "resource_provider",
        help="The uuid or exact name of the resource provider of this host's compute node. Set "
        "it if the conductor does not find the compute node by the names of the host; no other "
        "name is tried then.",
    ),
    cfg.StrOpt(
        "compute_id_file",
        default="/var/lib/nova/compute_id",
        help="The file in which nova-compute stores the uuid of its compute node, which is also "
        "the uuid of its resource provider. A missing file is ignored. Empty disables the "
        "lookup.",
    ),
    cfg.FloatOpt(
        "discovery_interval",
        default=60.0,
        min=0.1,
        help="Seconds between two discoveries of one backend.",
    ),
    # As long as the interval: a driver that needs more than that would never be idle.
    cfg.FloatOpt(
        "discovery_timeout",
        default=60.0,
        min=0.1,
        help="Maximum seconds for one discovery, or for the setup of a driver, before its "
        "backend has status ERROR. A change at run time that takes longer fails.",
    ),
    cfg.BoolOpt(
        "watch_uevents",
        default=True,
        help="Whether to run a discovery as soon as the kernel reports by a uevent that a device "
        "was added, removed or changed, for drivers that support it. discovery_interval "
        "remains in effect.",
    ),
    # Not at the first failure: a tool of a vendor may be busy for a moment, and each change of a
    # cordon costs calls to Placement for all devices of the backend.
    cfg.IntOpt(
        "cordon_after",
        default=3,
        min=0,
        help="Number of consecutive failed discoveries of a backend, including its setup, after "
        "which the backend is cordoned: its devices that need work on the host before or "
        "after their use accept no new requests. The next successful discovery uncordons "
        "it. 0 disables this.",
    ),
    cfg.FloatOpt(
        "health_interval",
        default=10.0,
        min=0.1,
        help="Seconds between two health measurements of a backend's devices, if its driver "
        "supports them.",
    ),
    # An unhealthy device often works for some seconds after a reset. Without this time it would be
    # offered and withdrawn again and again.
    cfg.FloatOpt(
        "health_recovery_time",
        default=60.0,
        min=0.0,
        help="Recovery time in seconds: an unhealthy device must measure healthy for this long "
        "without interruption before it counts as healthy again.",
    ),
    # Jobs wait for hardware and use little CPU; the limit is for the host's memory and its PCI
    # buses.
    cfg.IntOpt(
        "max_concurrent_jobs",
        default=8,
        min=1,
        help="Maximum number of jobs (prepare, release and program devices) that the agent runs "
        "at the same time. A timed-out job does not count.",
    ),
    cfg.StrOpt(
        "replay",
        default="",
        help="A capture file of cyborg-capture: the agent runs as the captured host. It reads "
        "nothing of this machine and changes nothing on it: host work changes a private copy of "
        "the capture. Only drivers whose host work is simulated run, and no external drivers. "
        "Its devices exist in no machine, so do not use it in a cloud with users. Empty disables "
        "it.",
    ),
    cfg.ListOpt(
        "replay_faults",
        default=[],
        help="Faults of the replayed host: ADDRESS:FAULT[=COUNT][@OPERATION], such as "
        "'0000:3b:00.0:eio=2@erase'. Faults: eio, ebusy, stuck_reset (the device does not come "
        "back from a reset), disappears (it is removed from its slot during the work). Operations: "
        "create, remove (mediated devices, virtual functions), erase (drives), configure (crypto "
        "accelerators), reset (functions), program (FPGA cards); without one, each is affected. "
        "Without a count, the fault is permanent.",
    ),
    cfg.StrOpt(
        "external_driver_dir",
        default="",
        help="The directory of the sockets for external drivers, which run in their own "
        "processes. It must exist with mode 0700 or 0750; only its owner and root may "
        "connect. An agent that does not run as root must be the owner. Empty disables external "
        "drivers.",
    ),
    cfg.ListOpt(
        "external_drivers",
        default=[],
        help="The external drivers that may register: each is a backend of the same name and "
        "listens on <name>.sock in external_driver_dir.",
    ),
    cfg.FloatOpt(
        "external_driver_timeout",
        default=10.0,
        min=0.1,
        help="Maximum seconds for an external driver to answer one call. A discovery needs up to "
        "three calls.",
    ),
    cfg.FloatOpt(
        "external_driver_work_timeout",
        default=200.0,
        min=0.1,
        help="Maximum seconds for an external driver to prepare or release a handle, or to load "
        "an image.",
    ),
)

LIBVIRT = Section(
    "libvirt",
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
    # The kernel of a guest answers within seconds. One that boots, or has crashed, does not answer
    # at all, and the request is repeated.
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
)
