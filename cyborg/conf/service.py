# SPDX-License-Identifier: Apache-2.0
"""Sections that several processes read: DEFAULT, database, rpc, standalone and tracing."""

import socket

from oslo_config import cfg

from cyborg.conf.sections import DatabaseSection, Section

DEFAULT = Section(
    "DEFAULT",
    cfg.HostAddressOpt(
        "host",
        default=socket.gethostname(),
        sample_default="<this machine's host name>",
        help="The name of this host. On a host with accelerators it should be the name of its "
        "compute node in Placement (the hypervisor host name of nova-compute). Names of resource "
        "providers start with it.",
    ),
    cfg.StrOpt(
        "state_path",
        default="/var/lib/cyborg",
        help="The directory for files that must survive a restart.",
    ),
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
        help="How the API authenticates requests.",
    ),
)

DATABASE = DatabaseSection("database")

RPC = Section(
    "rpc",
    cfg.StrOpt(
        "topic",
        default="cyborg",
        regex=r"^[A-Za-z0-9_.-]{1,64}$",
        help="Prefix of the names of the message queues. Installations that share a broker need "
        "different prefixes.",
    ),
    cfg.FloatOpt(
        "timeout", default=30.0, min=0.1, help="Seconds to wait for the response to an RPC call."
    ),
    # Empty by default: the services of most clouds share one broker user.
    cfg.ListOpt(
        "allowed_users",
        default=[],
        help="The broker users whose calls this daemon accepts, as authenticated by RabbitMQ. "
        "Empty accepts all users. An agent that lists only the conductors' user rejects "
        "calls from a compromised host.",
    ),
)

STANDALONE = Section(
    "standalone",
    cfg.HostAddressOpt("listen", default="127.0.0.1", help="The address on which the API listens."),
    cfg.PortOpt(
        "port", default=6666, help="The port on which the API listens; 0 selects a free port."
    ),
    cfg.IntOpt(
        "threads",
        default=8,
        min=1,
        help="Maximum number of requests that the API processes at the same time.",
    ),
    cfg.PortOpt(
        "placement_port",
        default=0,
        help="The port on which the embedded Placement listens for inspection; 0 selects a free "
        "port.",
    ),
)

TRACING = Section(
    "tracing",
    cfg.BoolOpt(
        "enabled",
        default=False,
        help="Whether to record traces with OpenTelemetry. It needs the extra: pip install "
        "'cyborg[tracing]'.",
    ),
    cfg.URIOpt(
        "otlp_endpoint",
        default="http://127.0.0.1:4318/v1/traces",
        schemes=["http", "https"],
        help="The URL at which a collector accepts spans: OTLP over HTTP, protobuf. While it does "
        "not answer, spans are dropped; no request waits for it.",
    ),
    cfg.StrOpt(
        "cafile",
        help="File with the certificates of the authorities that sign the certificate of the "
        "collector. By default those that the library requests trusts.",
    ),
    # By the trace id, so that all services keep or drop the same traces.
    cfg.FloatOpt(
        "sample_ratio",
        default=1.0,
        min=0.0,
        max=1.0,
        help="The share of traces that are recorded. Of the traces of clients that send the "
        "header traceparent with the flag sampled, the same share: those whose id is in it, as "
        "in clients with the same ratio.",
    ),
    cfg.FloatOpt(
        "timeout",
        default=5.0,
        min=0.1,
        max=60.0,
        help="Seconds for one export, including its retries; the spans are then dropped.",
    ),
    # When the collector is down, the memory of the process is worth more than old spans.
    cfg.IntOpt(
        "queue_size",
        default=2048,
        min=1,
        max=65536,
        help="Spans of a process that can wait for their export, about 2 KiB each. If the queue is "
        "full, the oldest are dropped.",
    ),
)
