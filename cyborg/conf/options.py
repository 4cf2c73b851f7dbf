# SPDX-License-Identifier: Apache-2.0
"""The sections of the configuration with their options, of which ``help.ini`` has the help."""

import configparser
import functools
import socket
from importlib import resources
from typing import Any

from oslo_config import cfg

from cyborg.core.inventory.reference_names import RELEASES


@functools.cache
def _read_help() -> configparser.ConfigParser:
    """Return the help of the options by section and name."""
    # [DEFAULT] has help of its own here; configparser would give its entries to all sections.
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), default_section="every section"
    )
    parser.read_string(resources.files(__package__).joinpath("help.ini").read_text("utf-8"))
    return parser


class Section:
    """A section with options of this project."""

    def __init__(self, name: str, *options: cfg.Opt) -> None:
        self.name = name
        self.options = options

    def register(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of this section."""
        # oslo.config knows the section DEFAULT as "no group".
        conf.register_opts(self.options, group=None if self.name == "DEFAULT" else self.name)

    def list_opts(self) -> list[tuple[str, list[Any]]]:
        """Return the options with their help, for the sample file and the documentation."""
        # Only here: a service that starts needs no help of its options.
        for option in self.options:
            option.help = _read_help()[self.name][option.name].replace("\n", " ")
        return [(self.name, list(self.options))]


class ClientSection(Section):
    """A section of the client of a service, which also has the options of keystoneauth."""

    def __init__(self, name: str, service_type: str, *options: cfg.Opt) -> None:
        super().__init__(name, *options)
        self.service_type = service_type

    def register(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of this section and those of keystoneauth."""
        # A late import: an agent without an image service does not need it.
        from keystoneauth1 import loading

        loading.register_session_conf_options(conf, self.name)
        loading.register_auth_conf_options(conf, self.name)
        loading.register_adapter_conf_options(conf, self.name)
        super().register(conf)
        conf.set_default("service_type", self.service_type, group=self.name)

    def list_opts(self) -> list[tuple[str, list[Any]]]:
        """Return all options of this section for the sample file and the documentation."""
        from keystoneauth1 import loading

        shared = [
            *loading.get_session_conf_options(),
            *loading.get_auth_common_conf_options(),
            *loading.get_auth_plugin_conf_options("password"),
            *loading.get_adapter_conf_options(include_deprecated=False),
        ]
        ((name, own),) = super().list_opts()
        return [(name, [*own, *shared])]


class OptionalClientSection(ClientSection):
    """A section whose client a process may not need: only ``register_client`` imports libraries."""

    def register(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of this section without those of keystoneauth."""
        Section.register(self, conf)

    def register_client(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of keystoneauth too."""
        super().register(conf)


class DatabaseSection(Section):
    """The options of oslo.db, which is imported late: an agent does not need it."""

    # Connections in the pool of a process: half of the concurrent calls of oslo.messaging.
    POOL = 32
    # Connections beyond those of the pool, which are closed after use.
    OVERFLOW = 8

    def register(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of oslo.db with defaults for this service."""
        from oslo_db import options

        conf.register_opts(options.database_opts, group=self.name)
        # With oslo.db's default of 5, a conductor with 64 concurrent calls would open and close
        # connections all the time. The pool opens a connection only when it is needed. With the 50
        # of oslo.db beyond that, two conductors under load could exceed the 151 connections that
        # MariaDB accepts by default, and calls would fail that only have to wait for a few
        # milliseconds.
        options.set_defaults(conf, max_pool_size=self.POOL, max_overflow=self.OVERFLOW)

    def list_opts(self) -> list[tuple[str, list[Any]]]:
        """Return the options for the sample file and the documentation."""
        from oslo_db import options

        return [(self.name, list(options.database_opts))]


REQUEST_TIMEOUT = cfg.FloatOpt("request_timeout", default=30.0, min=0.1)

DEFAULT = Section(
    "DEFAULT",
    cfg.HostAddressOpt(
        "host", default=socket.gethostname(), sample_default="<this machine's host name>"
    ),
    cfg.StrOpt("state_path", default="/var/lib/cyborg"),
    cfg.StrOpt(
        "auth_strategy",
        default="keystone",
        choices=[
            ("keystone", "every request needs a valid keystone token"),
            (
                "noauth",
                "every request has administrator rights; only loopback connections are accepted",
            ),
        ],
    ),
)

DATABASE = DatabaseSection("database")

RPC = Section(
    "rpc",
    cfg.StrOpt("topic", default="cyborg", regex=r"^[A-Za-z0-9_.-]{1,64}$"),
    cfg.FloatOpt("timeout", default=30.0, min=0.1),
    # Empty by default: the services of most clouds share one broker user.
    cfg.ListOpt("allowed_users", default=[]),
)

# Not of the section [rpc]: OpenStack services have their pins in this section.
UPGRADE_LEVELS = Section(
    "upgrade_levels",
    cfg.StrOpt("agent", regex=r"^[0-9]{1,4}\.[0-9]{1,4}$"),
    cfg.StrOpt("conductor", regex=r"^[0-9]{1,4}\.[0-9]{1,4}$"),
)

STANDALONE = Section(
    "standalone",
    cfg.HostAddressOpt("listen", default="127.0.0.1"),
    cfg.PortOpt("port", default=6666),
    cfg.IntOpt("threads", default=8, min=1),
    cfg.PortOpt("placement_port", default=0),
)

TRACING = Section(
    "tracing",
    cfg.BoolOpt("enabled", default=False),
    cfg.URIOpt(
        "otlp_endpoint", default="http://127.0.0.1:4318/v1/traces", schemes=["http", "https"]
    ),
    cfg.StrOpt("cafile"),
    # By the trace id, so that all services keep or drop the same traces.
    cfg.FloatOpt("sample_ratio", default=1.0, min=0.0, max=1.0),
    cfg.FloatOpt("timeout", default=5.0, min=0.1, max=60.0),
    # When the collector is down, the memory of the process is worth more than old spans.
    cfg.IntOpt("queue_size", default=2048, min=1, max=65536),
)

AGENT = Section(
    "agent",
    cfg.ListOpt("enabled_backends", default=[]),
    cfg.ListOpt("enabled_drivers", default=[]),
    cfg.ListOpt("device_sets", default=[]),
    cfg.BoolOpt("allow_reference_drivers", default=False),
    # No default: a wrong one would put the devices below the compute node of another host.
    cfg.StrOpt("resource_provider"),
    cfg.StrOpt("compute_id_file", default="/var/lib/nova/compute_id"),
    cfg.FloatOpt("discovery_interval", default=60.0, min=0.1),
    # As long as the interval: a driver that needs more than that would never be idle.
    cfg.FloatOpt("discovery_timeout", default=60.0, min=0.1),
    cfg.BoolOpt("watch_uevents", default=True),
    # Not at the first failure: a tool of a vendor may be busy for a moment, and each change of a
    # cordon costs calls to Placement for all devices of the backend.
    cfg.IntOpt("cordon_after", default=3, min=0),
    cfg.FloatOpt("health_interval", default=10.0, min=0.1),
    # An unhealthy device often works for some seconds after a reset. Without this time it would be
    # offered and withdrawn again and again.
    cfg.FloatOpt("health_recovery_time", default=60.0, min=0.0),
    # Jobs wait for hardware and use little CPU; the limit is for the host's memory and its PCI
    # buses.
    cfg.IntOpt("max_concurrent_jobs", default=8, min=1),
    cfg.StrOpt("replay", default=""),
    cfg.ListOpt("replay_faults", default=[]),
    cfg.StrOpt("external_driver_dir", default=""),
    cfg.ListOpt("external_drivers", default=[]),
    cfg.FloatOpt("external_driver_timeout", default=10.0, min=0.1),
    cfg.FloatOpt("external_driver_work_timeout", default=200.0, min=0.1),
)

LIBVIRT = Section(
    "libvirt",
    cfg.BoolOpt("live_attach", default=False),
    cfg.BoolOpt("read_domains", default=True),
    cfg.StrOpt("connection_uri", default="qemu:///system"),
    cfg.FloatOpt("request_timeout", default=30.0, min=1.0),
    # The kernel of a guest answers within seconds. One that boots, or has crashed, does not answer
    # at all, and the request is repeated.
    cfg.FloatOpt("detach_timeout", default=20.0, min=1.0),
    cfg.FloatOpt("reassert_interval", default=60.0, min=1.0),
    cfg.FloatOpt("attach_timeout", default=60.0, min=1.0),
)

API = Section(
    "api",
    cfg.HostAddressOpt("host_ip", default="127.0.0.1"),
    cfg.PortOpt("port", default=6666),
    cfg.IntOpt("workers", default=2, min=1, deprecated_name="api_workers"),
    cfg.IntOpt("threads", default=8, min=1),
    cfg.StrOpt("public_endpoint"),
    cfg.IntOpt("max_limit", default=1000, min=1),
    cfg.IntOpt("max_body_size", default=1048576, min=1024),
    cfg.FloatOpt("database_timeout", default=3.0, min=0.5),
    # A page on the Internet could make a browser on this host send requests to a service on
    # loopback, by a name of its own that resolves to 127.0.0.1.
    cfg.ListOpt("server_names", default=[]),
    cfg.BoolOpt("console", default=False),
    cfg.StrOpt("audit_map_file"),
    cfg.ListOpt("audit_ignored_methods", default=["GET", "HEAD"]),
    cfg.FloatOpt("body_timeout", default=30.0, min=1.0),
    cfg.PortOpt("metrics_port", default=0),
    cfg.HostAddressOpt("metrics_listen", default="127.0.0.1"),
    cfg.StrOpt("metrics_directory", default="$state_path/metrics/api"),
)

GIB = 1 << 30
NOVA = ClientSection(
    "nova",
    "compute",
    cfg.BoolOpt("send_events", default=True),
    # Off by default: the queue needs a broker user with rights on Nova's exchange.
    cfg.BoolOpt("notifications", default=False),
    cfg.StrOpt("notification_url", secret=True),
    cfg.StrOpt("notification_exchange", default="nova", regex=r"^[A-Za-z0-9_.-]{1,255}$"),
    cfg.StrOpt(
        "notification_topic", default="versioned_notifications", regex=r"^[A-Za-z0-9_.-]{1,200}$"
    ),
    # A name of our own, so that two clouds on one broker do not share a queue.
    cfg.StrOpt(
        "notification_pool",
        default="${rpc.topic}.nova_notifications",
        sample_default="cyborg.nova_notifications",
        regex=r"^[A-Za-z0-9_.-]{0,255}$",
    ),
    REQUEST_TIMEOUT,
)

PLACEMENT = ClientSection("placement", "placement", REQUEST_TIMEOUT)

GLANCE = OptionalClientSection(
    "glance",
    "image",
    REQUEST_TIMEOUT,
    # The bitstreams of today's cards have some 100 MB.
    cfg.IntOpt("max_image_size", default=GIB, min=1),
    # For the whole download, unlike request_timeout: a job waits for it.
    cfg.FloatOpt("download_timeout", default=180.0, min=0.1),
    cfg.IntOpt("retries", default=2, min=0),
    cfg.StrOpt("spool_directory", default="", sample_default="$state_path/agent/images-$host"),
    cfg.IntOpt("cache_size", default=4 * GIB, min=1),
    cfg.ListOpt("trusted_projects", default=[]),
    # Off by default: it needs barbican, which most clouds do not have.
    cfg.BoolOpt("require_signature", default=False),
    cfg.ListOpt("trusted_certificates", default=[]),
)

CONDUCTOR = Section(
    "conductor",
    cfg.IntOpt("workers", default=1, min=1),
    cfg.FloatOpt("hello_interval", default=10.0, min=0.1),
    cfg.FloatOpt("max_hello_interval", default=30.0, min=0.1),
    # One missed heartbeat is normal: a conductor that restarts may lose it.
    cfg.IntOpt("late_heartbeats", default=2, min=1),
    cfg.IntOpt("down_heartbeats", default=6, min=2),
    # 75 s: an agent needs up to twice the heartbeat of its broker connection to notice that this is
    # dead, and reconnects within some seconds.
    cfg.FloatOpt("broker_reconnect_grace", default=75.0, min=0.0),
    cfg.FloatOpt("database_timeout", default=10.0, min=2.0),
    # Short, because a request that hangs delays the other providers of its host; a repetition is
    # cheap, as each write is checked by a generation.
    cfg.FloatOpt("publish_timeout", default=4.0, min=0.1),
    # Not the way of a change, which wakes the publisher: this is for what failed or was left over.
    cfg.FloatOpt("publish_interval", default=5.0, min=0.1),
    cfg.FloatOpt("placement_verify_interval", default=600.0, min=1.0),
    cfg.IntOpt("max_placement_calls", default=4, min=1),
    cfg.FloatOpt("compute_node_interval", default=30.0, min=0.0),
    cfg.FloatOpt("outbox_interval", default=5.0, min=0.1),
    # Longer than the slowest transaction and the stop of a process: a lease that ends under work in
    # progress makes two conductors repeat each other's calls.
    cfg.FloatOpt("lease_timeout", default=60.0, min=1.0),
    # More than the 5 minutes that nova-compute waits: later the event is of no use to anybody.
    cfg.IntOpt("outbox_attempts", default=30, min=1),
    # Long enough for an operator who looks once a month: each is a message that somebody lacks.
    cfg.FloatOpt("dead_letter_ttl", default=2592000.0, min=1.0),
    cfg.FloatOpt("jobs_interval", default=5.0, min=0.1),
    # Setup and first discovery, each up to [agent] discovery_timeout, and the way of the result.
    cfg.FloatOpt("driver_timeout", default=150.0, min=1.0),
    # Less than the 300 s of nova-compute, which must get the failure before it gives up.
    cfg.FloatOpt("prepare_timeout", default=240.0, min=1.0),
    cfg.FloatOpt("drain_timeout", default=86400.0, min=1.0),
    cfg.FloatOpt("release_timeout", default=600.0, min=1.0),
    cfg.FloatOpt("max_maintenance", default=2592000.0, min=1.0),
    cfg.FloatOpt("attachment_timeout", default=900.0, min=1.0),
    cfg.FloatOpt("program_timeout", default=1800.0, min=1.0),
    cfg.IntOpt("device_cordon_after", default=3, min=0),
    cfg.FloatOpt("cordon_grace", default=600.0, min=0.0),
    cfg.FloatOpt("device_cordon_time", default=600.0, min=1.0),
    cfg.FloatOpt("orphan_scan_interval", default=300.0, min=0.0),
    cfg.FloatOpt("orphan_grace", min=0.0, sample_default=600.0),
    cfg.FloatOpt("unbound_ttl", default=86400.0, min=0.0),
    cfg.FloatOpt("dropped_ttl", default=300.0, min=0.0),
    # Far more than the instances of a project need: it stops a client that creates without end.
    cfg.IntOpt("max_project_arqs", default=1000, min=-1),
    cfg.StrOpt(
        "reference_traits",
        default="none",
        choices=[
            ("none", "The names of this service only."),
            *((str(n), f"Also those of OpenStack Cyborg {n}.") for n in RELEASES),
        ],
    ),
    cfg.FloatOpt("tombstone_ttl", default=2592000.0, min=0.0),
    # A host in repair returns within weeks, and must find the row of its agent.
    cfg.FloatOpt("service_ttl", default=2592000.0, min=0.0),
    cfg.FloatOpt("custody_seal_interval", default=5.0, min=0.1),
    cfg.StrOpt("custody_key_file"),
    cfg.IntOpt("custody_retention", default=400, min=0, max=36500),
    # Off by default, because the metrics are served without authentication.
    cfg.PortOpt("metrics_port", default=0),
    cfg.HostAddressOpt("metrics_listen", default="127.0.0.1"),
    cfg.StrOpt("metrics_directory", default="$state_path/metrics/conductor"),
    # After an outage all agents report at once. Memory is the limit, not time.
    cfg.IntOpt("max_concurrent_reports", default=4, min=1),
    cfg.IntOpt("max_report_bytes", default=16777216, min=65536),
)


def reference_release(conf: cfg.ConfigOpts) -> int | None:
    """Return the release whose names are published in addition, None for none."""
    value: str = conf.conductor.reference_traits
    return None if value == "none" else int(value)


NONE, STATIC, UNIFIED = "none", "static", "unified"
QUOTA = Section(
    "quota",
    cfg.StrOpt(
        "driver",
        default=NONE,
        choices=[
            (NONE, "no limits"),
            (STATIC, "the limits of default_limits and project_limits"),
            (
                UNIFIED,
                "the registered limits and project limits of keystone; needs the extra 'limits' "
                "and the section [oslo_limit]",
            ),
        ],
    ),
    cfg.DictOpt("default_limits", default={}, sample_default="FPGA:8,CUSTOM_QAT:16"),
    cfg.ListOpt(
        "project_limits", default=[], sample_default="5f3a7c0b9a0e4b46a0d5c2a6cf0f2a11:FPGA:32"
    ),
    cfg.FloatOpt("cache_time", default=60.0, min=0.0),
    # While keystone is down, old limits are better than none: without them nobody could create
    # anything.
    cfg.FloatOpt("max_cache_age", default=3600.0, min=0.0),
)

ATTACHMENTS = Section("attachments", cfg.IntOpt("max_per_project", default=1000, min=-1))

DEVICE_CONTEXTS = Section(
    "device_contexts",
    cfg.FloatOpt("unbound_ttl", default=86400.0, min=0.0),
    cfg.IntOpt("lease_ttl", default=600, min=1),
    cfg.IntOpt("max_lease", default=3600, min=1),
    cfg.IntOpt("max_per_project", default=1000, min=-1),
)
