# SPDX-License-Identifier: Apache-2.0
"""Options of the agent's image store and of its Glance client."""

from typing import Any

from oslo_config import cfg

from cyborg.conf import keystoneauth

GROUP = "glance"
GIB = 1 << 30
OPTIONS = [
    keystoneauth.TIMEOUT,
    cfg.IntOpt(
        "max_image_size",
        default=GIB,
        min=1,
        help="Maximum size in bytes of an image that is loaded into a device. A larger one is "
        "refused before anything is downloaded.",
    ),
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
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section without those of keystoneauth.

    An agent without an image service does not import keystoneauth.
    """
    conf.register_opts(OPTIONS, group=GROUP)


def register_keystoneauth(conf: cfg.ConfigOpts) -> None:
    """Register the options of keystoneauth too."""
    keystoneauth.register(conf, GROUP, "image", OPTIONS)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return keystoneauth.list_opts(GROUP, OPTIONS)
