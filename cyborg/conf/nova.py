# SPDX-License-Identifier: Apache-2.0
"""Options of the Nova client."""

from typing import Any

from oslo_config import cfg

from cyborg.conf import keystoneauth

GROUP = "nova"
OPTIONS = [
    cfg.BoolOpt(
        "send_events",
        default=True,
        help="Whether to send an event to Nova for each bound accelerator request. Set it to "
        "false in an installation without Nova; no events are recorded then.",
    ),
    cfg.BoolOpt(
        "notifications",
        default=False,
        help="Whether the conductors receive Nova's versioned notifications, to release the "
        "devices of a deleted or shelved instance within seconds. Without them, only the orphan "
        "collector finds what Nova has left. Requires send_events, [conductor] orphan_grace other "
        "than 0, and RabbitMQ.",
    ),
    cfg.StrOpt(
        "notification_url",
        secret=True,
        help="Transport URL of the message broker of Nova's notifications. By default that of "
        "[DEFAULT] transport_url; other options, such as TLS, are those of "
        "[oslo_messaging_rabbit].",
    ),
    cfg.StrOpt(
        "notification_exchange",
        default="nova",
        regex=r"^[A-Za-z0-9_.-]{1,255}$",
        help="Exchange of Nova's notifications: [DEFAULT] control_exchange of Nova.",
    ),
    cfg.StrOpt(
        "notification_topic",
        default="versioned_notifications",
        regex=r"^[A-Za-z0-9_.-]{1,200}$",
        help="Topic of Nova's notifications, one of [notifications] "
        "versioned_notifications_topics of Nova.",
    ),
    cfg.StrOpt(
        "notification_pool",
        default="${rpc.topic}.nova_notifications",
        sample_default="cyborg.nova_notifications",
        regex=r"^[A-Za-z0-9_.-]{0,255}$",
        help="Queue that the conductors share. The exchange copies each notification to it, so "
        "that no message is taken from another consumer of the topic. By default, [rpc] topic "
        "followed by .nova_notifications. Empty means the topic's own queue, for a topic that no "
        "other service consumes.",
    ),
    keystoneauth.TIMEOUT,
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section, including those of keystoneauth."""
    keystoneauth.register(conf, GROUP, "compute", OPTIONS)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return keystoneauth.list_opts(GROUP, OPTIONS)
