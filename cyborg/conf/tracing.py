# SPDX-License-Identifier: Apache-2.0
"""Options of tracing."""

from typing import Any

from oslo_config import cfg

GROUP = "tracing"
OPTIONS = [
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
    cfg.IntOpt(
        "queue_size",
        default=2048,
        min=1,
        max=65536,
        help="Spans of a process that can wait for their export, about 2 KiB each. If the queue is "
        "full, the oldest are dropped.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
