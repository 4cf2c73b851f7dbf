# SPDX-License-Identifier: Apache-2.0
"""Signatures of images, verified by cursive with certificates of the key manager.

Glance's and Nova's documentation describes how an image is signed. Its properties
``img_signature*`` have the signature, the names of the hash method and key type, and the uuid of
the certificate. castellan reads the certificate from the key manager (barbican). This module needs
the extra ``signatures``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from castellan.common.exception import CastellanException, KeyManagerError
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cursive import certificate_utils, signature_utils
from cursive.exception import CursiveException
from keystoneauth1.exceptions import ClientException
from oslo_context.context import RequestContext

from cyborg.agent.images.store import Signature
from cyborg.core import errors, validation
from cyborg.core.image import ImageMetadata


class _Context(RequestContext):
    """Context of castellan's calls, with the credentials of section ``[glance]``."""

    def __init__(self, auth: Any) -> None:
        super().__init__()
        self._auth = auth

    # castellan would otherwise need a section of credentials of its own.
    def get_auth_plugin(self) -> Any:
        """Return the authentication plug-in; castellan calls this."""
        return self._auth


class Signatures:
    """Verification of the signatures of images."""

    def __init__(self, auth: Any, trusted_certificates: tuple[str, ...]) -> None:
        """``auth`` is a keystoneauth plug-in; ``trusted_certificates`` are barbican uuids."""
        self._context = _Context(auth)
        self._trusted = trusted_certificates

    def load(self, image: ImageMetadata) -> Callable[[], Signature]:
        """Read and check the certificate of an image; return a function that creates verifiers.

        castellan has no timeout. Raise DriverFailed, and Unavailable if the key manager or keystone
        cannot be reached.
        """
        properties = image.properties
        # False unless the image has all four properties that are read below.
        if not signature_utils.should_create_verifier(properties):
            raise errors.DriverFailed(
                f"image {image.uuid} has no signature, which [glance] require_signature demands: "
                "sign it and set its properties img_signature*"
            )
        certificate = properties[signature_utils.CERT_UUID]
        try:
            # castellan puts the uuid into a URL, which another text could lead elsewhere.
            certificate = validation.parse_uuid(certificate, signature_utils.CERT_UUID)
            certificate_utils.verify_certificate(self._context, certificate, self._trusted)
            value = signature_utils.get_signature(properties[signature_utils.SIGNATURE])
            method = signature_utils.get_hash_method(properties[signature_utils.HASH_METHOD])
            kind = signature_utils.SignatureKeyType.lookup(properties[signature_utils.KEY_TYPE])
            key = signature_utils.get_public_key(self._context, certificate, kind)
        except ClientException as exc:
            # Not unusable: keystone may answer at the next attempt.
            raise errors.Unavailable(f"the key manager cannot be reached: {exc}") from exc
        except (errors.Invalid, CursiveException, CastellanException) as exc:
            if _is_outage(exc):
                raise errors.Unavailable(f"the key manager does not answer: {exc}") from exc
            raise _unusable(image, certificate, exc) from exc
        except (UnsupportedAlgorithm, ValueError, TypeError, AttributeError) as exc:
            # cursive expects that the secret is a well-formed certificate.
            raise _unusable(image, certificate, exc) from exc

        def make() -> Signature:
            return _ImageSignature(image, kind.create_verifier(value, method, key))

        return make


@dataclass(frozen=True, slots=True)
class _ImageSignature:
    image: ImageMetadata
    verifier: Any

    def update(self, chunk: bytes) -> None:
        """Add data of the image."""
        self.verifier.update(chunk)

    def verify(self) -> None:
        """Raise DriverFailed if the signature is not valid for the data."""
        try:
            self.verifier.verify()
        except InvalidSignature as exc:
            raise errors.DriverFailed(
                f"image {self.image.uuid}: the signature does not fit the data and the "
                "certificate; sign the image again, with the key of the certificate"
            ) from exc


def _is_outage(exc: BaseException | None) -> bool:
    """Return whether the key manager did not answer, or with a status of 500 or more.

    cursive has one error for every reason: the errors that caused it tell more. A status below 500,
    such as a missing certificate, is the same at the next attempt.
    """
    is_of_manager = False
    while exc is not None:
        if 400 <= getattr(exc, "status_code", 0) < 500:
            return False
        is_of_manager |= isinstance(exc, KeyManagerError)
        exc = exc.__cause__ or exc.__context__
    return is_of_manager


def _unusable(image: ImageMetadata, certificate: str, exc: Exception) -> errors.DriverFailed:
    return errors.DriverFailed(
        f"image {image.uuid}: the signature cannot be verified with certificate "
        f"{certificate:.40}: {exc}; check the properties img_signature*, the key manager, and "
        "[glance] trusted_certificates"
    )
