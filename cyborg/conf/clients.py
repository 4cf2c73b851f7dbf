# SPDX-License-Identifier: Apache-2.0
"""Sections of the clients of Nova, Placement and Glance."""

from oslo_config import cfg

from cyborg.conf.sections import REQUEST_TIMEOUT, ClientSection, OptionalClientSection

GIB = 1 << 30
NOVA = ClientSection(
    "nova",
    "compute",
    cfg.BoolOpt(
        "send_events",
        default=True,
        help="Whether to send an event to Nova for each bound accelerator request. Set it to "
        "false in an installation without Nova; no events are recorded then.",
    ),
    # Off by default: the queue needs a broker user with rights on Nova's exchange.
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
    # A name of our own, so that two clouds on one broker do not share a queue.
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
    REQUEST_TIMEOUT,
)

PLACEMENT = ClientSection("placement", "placement", REQUEST_TIMEOUT)

GLANCE = OptionalClientSection(
    "glance",
    "image",
    REQUEST_TIMEOUT,
    # The bitstreams of today's cards have some 100 MB.
    cfg.IntOpt(
        "max_image_size",
        default=GIB,
        min=1,
        help="Maximum size in bytes of an image that is loaded into a device. A larger one is "
        "refused before anything is downloaded.",
    ),
    # For the whole download, unlike request_timeout: a job waits for it.
    cfg.FloatOpt(
        "download_timeout",
        default=180.0,
        min=0.1,
        help="Maximum seconds until an image is available on the host, including repeated "
        "attempts. It should be less than [conductor] prepare_timeout, so that the reason of a "
        "failure is shown. During a download request_timeout is the maximum time without data.",
    ),
    cfg.IntOpt(
        "retries",
        default=2,
        min=0,
        help="How often a failed request is repeated, within download_timeout, if Glance cannot be "
        "reached, fails, or the connection breaks.",
    ),
    cfg.StrOpt(
        "spool_directory",
        default="",
        sample_default="$state_path/agent/images-$host",
        help="The directory of downloaded images, on a local disk. It belongs to one agent, which "
        "creates it with mode 0700. Empty selects agent/images-<host> in state_path.",
    ),
    cfg.IntOpt(
        "cache_size",
        default=4 * GIB,
        min=1,
        help="Maximum size in bytes of all images in spool_directory. The images that were not "
        "used for the longest time are removed first; an image in use is never removed. Must be "
        "at least max_image_size.",
    ),
    cfg.ListOpt(
        "trusted_projects",
        default=[],
        help="Ids of the projects whose images may be selected by a property, such as "
        "accel:function_id, in addition to public images and those of the agent's own project. "
        "An image that a device profile names by its uuid may be of any project.",
    ),
    # Off by default: it needs barbican, which most clouds do not have.
    cfg.BoolOpt(
        "require_signature",
        default=False,
        help="Whether each image must have a valid signature in its properties img_signature*. "
        "Needs the extra 'signatures', and the sections [key_manager] and [barbican] of "
        "castellan. If false, signatures are ignored.",
    ),
    cfg.ListOpt(
        "trusted_certificates",
        default=[],
        help="Uuids of the certificates in the key manager that must have issued the certificate "
        "of a signature, directly or by others of this list. Mandatory with require_signature.",
    ),
)
