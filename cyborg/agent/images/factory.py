# SPDX-License-Identifier: Apache-2.0
"""The image store of an agent, according to its configuration."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from oslo_config import cfg

from cyborg.conf import glance as options
from cyborg.core.errors import Misconfigured
from cyborg.drivers.images import ImageStore, NoImageStore

if TYPE_CHECKING:
    from cyborg.agent.images.signature import Signatures


class ClosableImageStore(ImageStore, Protocol):
    """Image store that can be closed."""

    def close(self) -> None:
        """Stop the downloads and release the files."""


class _NoImageStore(NoImageStore):
    def close(self) -> None:
        """Do nothing."""


def make_image_store(conf: cfg.ConfigOpts) -> ClosableImageStore:
    """Return the store of section ``[glance]``, or an empty store if it names no service.

    Raise Misconfigured.
    """
    # Without the section keystoneauth is not imported.
    if options.GROUP not in map(str.lower, conf.list_all_sections()):
        return _NoImageStore()
    options.register_keystoneauth(conf)
    section = conf[options.GROUP]
    if not section.auth_type and not section.endpoint_override:
        return _NoImageStore()

    from cyborg.agent.images.spool import Spool
    from cyborg.agent.images.store import GlanceImageStore, Limits
    from cyborg.clients import glance

    if section.cache_size < section.max_image_size:
        raise Misconfigured(
            f"[glance] cache_size: found {section.cache_size}; expected at least max_image_size, "
            f"which is {section.max_image_size}",
            option="glance.cache_size",
        )
    client = glance.make(conf)
    signatures = _make_signatures(client.auth, section) if section.require_signature else None
    # An agent of the same name that manages this machine has another spool.
    folder = Path(conf.state_path, "agent", "replay" if conf.agent.replay else "")
    default = folder / f"images-{conf.host}"
    spool = Spool(Path(section.spool_directory or default), section.cache_size)
    spool.open()
    limits = Limits(section.max_image_size, section.download_timeout, section.retries)
    return GlanceImageStore(client, spool, limits, tuple(section.trusted_projects), signatures)


def _make_signatures(auth: Any, section: Any) -> "Signatures":
    if not section.trusted_certificates:
        raise Misconfigured(
            "[glance] trusted_certificates: found none; expected the uuids of certificates, which "
            "require_signature needs",
            option="glance.trusted_certificates",
        )
    try:
        from cyborg.agent.images.signature import Signatures
    except ModuleNotFoundError as exc:
        raise Misconfigured(
            "[glance] require_signature: found true; expected false, or pip install "
            f"'cyborg[signatures]': {exc}",
            option="glance.require_signature",
        ) from exc
    return Signatures(auth, tuple(section.trusted_certificates))
