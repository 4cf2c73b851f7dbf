# SPDX-License-Identifier: Apache-2.0
"""Names in Placement: of our resource providers, custom traits and custom resource classes."""

import re
import uuid

import os_resource_classes
import os_traits

from cyborg.core.errors import Invalid

OWNER_TRAIT: str = os_traits.OWNER_CYBORG
# The limit of Placement for the names of traits and resource classes.
MAX_NAME = 255

# A namespace of our own: the uuid of a deployable's provider stays the same after restarts and
# database rebuilds, and when two conductors add the same device at once (uuid5 of RFC 9562).
_PROVIDERS = uuid.UUID("6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11")
_CUSTOM = re.compile(r"^CUSTOM_[A-Z0-9_]+$")
_NUMA_NODE = re.compile(r"^CUSTOM_NUMA_NODE_([0-9]{1,9})$")


def provider_name(host: str, address: str) -> str:
    """Return the provider name that existing deployments use: ``<host>_<bus address>``."""
    return f"{host}_{address}"


def provider_uuid(host: str, address: str) -> str:
    """Return the uuid of a deployable's provider; it depends on host and address alone."""
    return str(uuid.uuid5(_PROVIDERS, provider_name(host, address)))


def handle_uuid(host: str, deployable: str, handle: str) -> str:
    """Return the uuid of an attach handle whose mediated device has the same uuid.

    It depends on the host and the two addresses alone: the agent knows it without a database, and
    no two hosts share one. Nova uses ``attach_handle_uuid`` as the uuid of the mediated device.
    """
    return str(uuid.uuid5(uuid.UUID(provider_uuid(host, deployable)), handle))


def make_custom_name(text: str) -> str:
    """Return free text as a CUSTOM_ name of Placement: ``gzip-v2`` -> ``CUSTOM_GZIP_V2``.

    Raise Invalid if the text has no letter or digit, or if the name is too long.
    """
    plain = re.sub(r"[^A-Z0-9]+", "_", text.upper()).strip("_").removeprefix("CUSTOM_")
    if not plain:
        raise Invalid(f"{text!r} has no letter or digit, which a CUSTOM_ name needs", field="name")
    name = f"CUSTOM_{plain}"
    if len(name) > MAX_NAME:
        raise Invalid(f"{name[:40]}... is longer than {MAX_NAME} characters", field="name")
    return name


def numa_trait(node: int) -> str:
    """Return the trait of a device on a NUMA node; os-traits has none."""
    return f"CUSTOM_NUMA_NODE_{node}"


def parse_numa_trait(trait: str) -> int | None:
    """Return the NUMA node of which a trait is, None for any other trait."""
    match = _NUMA_NODE.fullmatch(trait)
    return None if match is None else int(match[1])


def is_resource_class(name: str) -> bool:
    """Return whether Placement accepts the resource class: a standard class or CUSTOM_*."""
    return len(name) <= MAX_NAME and (
        name in os_resource_classes.STANDARDS or bool(_CUSTOM.fullmatch(name))
    )


def is_accelerator_class(name: str) -> bool:
    """Return whether a device can have this resource class: an accelerator class or CUSTOM_*."""
    # The other standard classes (VCPU, MEMORY_MB, DISK_GB, PCI_DEVICE, ...) belong to Nova, Neutron
    # or Cinder: our inventory of such a class would be scheduled as theirs.
    return name in ACCELERATOR_CLASSES or (
        name not in os_resource_classes.STANDARDS and is_resource_class(name)
    )


def is_trait(name: str) -> bool:
    """Return whether Placement accepts the trait: a standard trait or CUSTOM_*."""
    return len(name) <= MAX_NAME and (bool(_CUSTOM.fullmatch(name)) or name in _TRAITS)


# The standard resource classes of Placement that stand for accelerators.
ACCELERATOR_CLASSES = frozenset({"FPGA", "PGPU", "VGPU"})

_TRAITS = frozenset(os_traits.get_traits())
