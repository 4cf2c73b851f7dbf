# SPDX-License-Identifier: Apache-2.0
"""Images of the image service: their metadata, and the decisions about them.

The metadata come from Glance's Images API v2 (https://docs.openstack.org/api-ref/image/v2/). It
shows the custom properties of an image on the same level as its own attributes.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.core import errors, validation

# Digests without known collisions. Glance uses sha512 unless an operator changes it.
ALGORITHMS = frozenset(
    {"sha256", "sha384", "sha512", "sha3_256", "sha3_384", "sha3_512", "blake2b", "blake2s"}
)

MAX_NAMED = 3  # images that an error names

# Of the schema of Glance: all other keys of an image are its properties.
_ATTRIBUTES = frozenset(
    {
        *("id", "name", "status", "visibility", "protected", "owner", "tags", "self", "file"),
        *("container_format", "disk_format", "created_at", "updated_at", "min_ram", "min_disk"),
        *("schema", "size", "virtual_size", "checksum", "direct_url", "locations", "os_hidden"),
        *("os_hash_algo", "os_hash_value", "stores"),
    }
)


@dataclass(frozen=True, slots=True)
class ImageMetadata:
    """Metadata of an image.

    ``digest`` is the hash of the image's data in hexadecimal, ``algorithm`` the name of the hash
    algorithm. ``size`` is in bytes. Attributes are None if the image service does not show them, as
    for an image without data. ``properties`` are the custom properties.
    """

    uuid: str
    status: str
    size: int | None
    container_format: str | None
    disk_format: str | None
    algorithm: str | None
    digest: str | None
    visibility: str | None
    owner: str | None
    properties: Mapping[str, str]


def parse_metadata(body: Any) -> ImageMetadata:
    """Parse the metadata of an image from a response of Glance. Raise Invalid if malformed."""
    if not isinstance(body, Mapping):
        raise errors.Invalid(f"expected an image as an object, found {type(body).__name__}")
    size = body.get("size")
    # A boolean is an integer for Python.
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise errors.Invalid(f"size: invalid value {str(size)[:60]!r}, expected an integer")
    digest = _text(body, "os_hash_value")
    return ImageMetadata(
        uuid=validation.parse_uuid(body.get("id"), "id"),
        status=_text(body, "status") or "unknown",
        size=size,
        container_format=_text(body, "container_format"),
        disk_format=_text(body, "disk_format"),
        algorithm=_text(body, "os_hash_algo"),
        digest=digest.lower() if digest else None,
        visibility=_text(body, "visibility"),
        owner=_text(body, "owner"),
        properties={
            str(name): value
            for name, value in body.items()
            # Properties are texts; a value of another type is an attribute of a newer Glance.
            if name not in _ATTRIBUTES and isinstance(value, str)
        },
    )


def ensure_loadable(image: ImageMetadata, max_size: int) -> None:
    """Raise DriverFailed with the reason and the remedy if an image must not be downloaded."""
    if (reason := _reject(image, max_size)) is not None:
        raise errors.DriverFailed(f"image {image.uuid} {reason}")


def select_image(
    images: Iterable[ImageMetadata], properties: Mapping[str, str], projects: Sequence[str]
) -> str:
    """Return the uuid of the only trusted, active image that has these properties.

    An image is trusted if it is public or belongs to one of ``projects``. Properties prove nothing,
    because all users can set any property of their own images. Raise DriverFailed if there is no
    such image, or more than one.
    """
    # A set: the searches for public images and for those of a project may find the same image.
    uuids = sorted(
        {
            image.uuid
            for image in images
            if image.status == "active"
            and properties.items() <= image.properties.items()
            and (image.visibility == "public" or image.owner in projects)
        }
    )
    text = ", ".join(f"{name}={value}" for name, value in sorted(properties.items()))
    if not uuids:
        raise errors.DriverFailed(
            f"there is no active image with {text}: upload one as a public image, or in a project "
            "that the agent trusts ([glance] trusted_projects)"
        )
    if len(uuids) > 1:
        names = ", ".join(uuids[:MAX_NAMED]) + (", ..." if len(uuids) > MAX_NAMED else "")
        raise errors.DriverFailed(
            f"several images have {text}: {names}; deactivate all but one, or name one by its uuid"
        )
    return uuids[0]


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the cache; ``used_at`` is the time of its last use in nanoseconds."""

    uuid: str
    size: int
    used_at: int
    in_use: bool


def plan_evictions(files: Sequence[CachedFile], to_free: int) -> list[str] | None:
    """Return the uuids of the files to remove to free ``to_free`` bytes, the oldest use first.

    A file in use is never removed. Return None if the other files have fewer bytes.
    """
    evictions: list[str] = []
    for file in sorted(files, key=lambda file: file.used_at):
        if to_free <= 0:
            break
        if not file.in_use:
            evictions.append(file.uuid)
            to_free -= file.size
    return evictions if to_free <= 0 else None


def _reject(image: ImageMetadata, max_size: int) -> str | None:
    """Return why an image must not be downloaded, None if it may be."""
    if image.status != "active":
        return f"has status {image.status}, expected active: upload its data or activate it"
    if not image.size:
        return "has no data: upload them"
    if image.size > max_size:
        return (
            f"has {image.size} bytes, more than the maximum of {max_size}: check that it is the "
            "intended image, or raise [glance] max_image_size on this host"
        )
    if image.container_format != "bare":
        return (
            f"has container format {image.container_format}, expected bare: upload the file "
            "itself, without an archive around it"
        )
    if not image.algorithm or not image.digest:
        return "has no os_hash_value: upload it again, with a Glance of release Rocky or later"
    if image.algorithm not in ALGORITHMS:
        return (
            f"has a digest of {image.algorithm:.20}, which is too weak or unknown: set "
            "hashing_algorithm of Glance to sha512, and upload it again"
        )
    # A digest of another length could never be equal: the download would be in vain.
    expected = hashlib.new(image.algorithm).digest_size * 2
    if len(image.digest) != expected or not set(image.digest) <= set("0123456789abcdef"):
        return f"has a malformed os_hash_value, expected {expected} hexadecimal digits"
    return None


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise errors.Invalid(f"{name}: expected a string, found {type(value).__name__}")
    return value
