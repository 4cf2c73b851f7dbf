# SPDX-License-Identifier: Apache-2.0
"""The names this service gives: of resource providers, of traits and classes of its own."""

import re
import uuid

import os_resource_classes
import os_traits

from cyborg.core.errors import Invalid

OWNER_TRAIT: str = os_traits.OWNER_CYBORG
MAX_NAME = 255

# A namespace of our own, so that a deployable's provider keeps its uuid through restarts, database
# rebuilds and two conductors that meet the same new device at once (uuid5 of RFC 9562).
_PROVIDERS = uuid.UUID("6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11")
_CUSTOM = re.compile(r"^CUSTOM_[A-Z0-9_]+$")


def provider_name(host: str, address: str) -> str:
    """Return the provider name that existing deployments know: ``<host>_<bus address>``."""
    return f"{host}_{address}"


def provider_uuid(host: str, address: str) -> str:
    """Return the one uuid that this deployable's provider ever has."""
    return str(uuid.uuid5(_PROVIDERS, provider_name(host, address)))


def custom(text: str) -> str:
    """Normalise free text to a CUSTOM_ name of Placement: ``gzip-v2`` -> ``CUSTOM_GZIP_V2``.

    Raises Invalid when nothing is left or the name is too long.
    """
    plain = re.sub(r"[^A-Z0-9]+", "_", text.upper()).strip("_").removeprefix("CUSTOM_")
    if not plain:
        raise Invalid(f"{text!r} has no letter or digit to make a CUSTOM_ name from", field="name")
    name = f"CUSTOM_{plain}"
    if len(name) > MAX_NAME:
        raise Invalid(f"{name[:40]}... is longer than {MAX_NAME} characters", field="name")
    return name


def is_resource_class(name: str) -> bool:
    """Tell whether Placement takes the name: a standard class or CUSTOM_*."""
    return len(name) <= MAX_NAME and (
        name in os_resource_classes.STANDARDS or bool(_CUSTOM.fullmatch(name))
    )


def is_trait(name: str) -> bool:
    """Tell whether Placement takes the name: a standard trait or CUSTOM_*."""
    return len(name) <= MAX_NAME and (bool(_CUSTOM.fullmatch(name)) or name in _TRAITS)


_TRAITS = frozenset(os_traits.get_traits())
