# SPDX-License-Identifier: Apache-2.0
"""Signatures of images: a real cursive and castellan, with a key manager in the process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from castellan.common.objects.opaque_data import OpaqueData
from castellan.key_manager import key_manager_opts
from keystoneauth1 import noauth
from oslo_config import cfg

from cyborg.agent.images.signature import Signatures
from cyborg.agent.images.store import GlanceImageStore
from cyborg.core.errors import DriverFailed, Unavailable
from cyborg.testing.fake_glance import FakeGlance
from cyborg.tests.fixtures.hosts import key_manager
from cyborg.tests.fixtures.hosts.image_store import make_store
from cyborg.tests.fixtures.hosts.key_manager import (
    SECRETS,
    Certificate,
    TestKeyManager,
    serve_barbican,
)

DATA = bytes(range(256)) * 100

Make = Callable[..., GlanceImageStore]


@pytest.fixture(autouse=True)
def castellan() -> Iterator[None]:
    """Select the key manager; castellan reads the global configuration."""
    cfg.CONF.register_opts(key_manager_opts, group="key_manager")
    backend = f"{key_manager.__name__}.{TestKeyManager.__name__}"
    cfg.CONF.set_override("backend", backend, group="key_manager")
    yield
    cfg.CONF.clear_override("backend", group="key_manager")
    cfg.CONF.reset()
    SECRETS.clear()


@pytest.fixture
def authority() -> Certificate:
    return Certificate("authority")


@pytest.fixture
def signer(authority: Certificate) -> Certificate:
    return Certificate("signer", authority)


@pytest.fixture
def store(glance: FakeGlance, tmp_path: Path, authority: Certificate) -> Iterator[GlanceImageStore]:
    with ExitStack() as stack:
        signatures = Signatures(noauth.NoAuth(), (authority.uuid,))
        store = make_store(glance, tmp_path, signatures=signatures)
        stack.callback(store.close)
        yield store


def fetch(store: GlanceImageStore, uuid: str) -> bytes:
    with store.open(uuid) as image:
        return image.path.read_bytes()


def test_signed_image_is_fetched_and_verified_again_in_the_cache(
    glance: FakeGlance, store: GlanceImageStore, signer: Certificate
) -> None:
    uuid = glance.add_image(DATA, **signer.sign(DATA))
    assert fetch(store, uuid) == fetch(store, uuid) == DATA
    assert glance.downloads == [uuid]
    glance.images[uuid] |= signer.sign(DATA[1:])
    with pytest.raises(DriverFailed, match="the signature does not fit the data"):
        fetch(store, uuid)
    assert glance.downloads == [uuid]


def test_signature_of_other_data_is_refused(
    glance: FakeGlance, store: GlanceImageStore, signer: Certificate, tmp_path: Path
) -> None:
    uuid = glance.add_image(DATA, **signer.sign(DATA[1:]))
    with pytest.raises(DriverFailed, match=f"image {uuid}: the signature does not fit the data"):
        fetch(store, uuid)
    assert not (tmp_path / "spool" / uuid).exists()


def test_image_without_signature_is_refused(
    glance: FakeGlance, store: GlanceImageStore, signer: Certificate
) -> None:
    properties = signer.sign(DATA)
    for name in properties:
        others: dict[str, Any] = {key: value for key, value in properties.items() if key != name}
        uuid = glance.add_image(DATA, **others)
        with pytest.raises(DriverFailed, match=r"has no signature, which .*require_signature"):
            fetch(store, uuid)
    assert glance.downloads == []


def test_signature_of_untrusted_certificate_is_refused(
    glance: FakeGlance, store: GlanceImageStore, authority: Certificate
) -> None:
    other = Certificate("authority")  # the same name, another key
    for certificate in (
        other,
        Certificate("signer", other),
        Certificate("signer", authority, expired=True),
    ):
        uuid = glance.add_image(DATA, **certificate.sign(DATA))
        with pytest.raises(DriverFailed, match=r"cannot be verified with certificate .*ertificate"):
            fetch(store, uuid)
    assert glance.downloads == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("img_signature", "abc"),
        ("img_signature_hash_method", "MD5"),
        ("img_signature_key_type", "RSA-PSS"),
        ("img_signature_key_type", "unknown"),
        ("img_signature_certificate_uuid", "8a0f0b1e-7f2f-4d5b-9c1a-2b3c4d5e6f70"),
        ("img_signature_certificate_uuid", "../secrets"),
    ],
)
def test_malformed_signature_is_refused(
    name: str, value: str, glance: FakeGlance, store: GlanceImageStore, signer: Certificate
) -> None:
    properties: dict[str, Any] = {**signer.sign(DATA), name: value}
    with pytest.raises(DriverFailed, match="cannot be verified with certificate"):
        fetch(store, glance.add_image(DATA, **properties))
    assert glance.downloads == []


def test_certificates_are_read_from_barbican(
    glance: FakeGlance, store: GlanceImageStore, signer: Certificate, tmp_path: Path
) -> None:
    uuid = glance.add_image(DATA, **signer.sign(DATA))
    config = tmp_path / "cyborg.conf"
    cfg.CONF.clear_override("backend", group="key_manager")
    with serve_barbican() as url:
        config.write_text(f"[barbican]\nbarbican_endpoint = {url}\n")
        cfg.CONF([], project="cyborg", default_config_files=[str(config)], default_config_dirs=[])
        assert fetch(store, uuid) == DATA
        del SECRETS[signer.uuid]
        with pytest.raises(DriverFailed, match="Certificate not found"):
            fetch(store, uuid)
    with pytest.raises(Unavailable, match=r"key manager does not answer: .*retrieve certificate"):
        fetch(store, uuid)


def test_secret_that_is_no_certificate_is_refused(
    glance: FakeGlance, store: GlanceImageStore, signer: Certificate
) -> None:
    uuid = glance.add_image(DATA, **signer.sign(DATA))
    SECRETS[signer.uuid] = OpaqueData(b"a password")
    with pytest.raises(DriverFailed, match="cannot be verified with certificate"):
        fetch(store, uuid)
