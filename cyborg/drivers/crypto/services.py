# SPDX-License-Identifier: Apache-2.0
"""Sets of services of a QAT device: the values of its attribute ``qat/cfg_services``.

``Documentation/ABI/testing/sysfs-driver-qat`` of Linux describes the attribute: services are
separated by ``;``, their order has no meaning, a 4xxx device has at most two, and ``dcc`` is never
combined. ``adf_cfg_services.c`` and ``adf_cfg_strings.h`` of
``drivers/crypto/intel/qat/qat_common`` have all names, ``decomp`` too.
"""

from collections.abc import Mapping

from cyborg.core.naming import make_custom_name

SERVICES = frozenset({"sym", "asym", "dc", "dcc", "decomp"})

LAYOUTS: Mapping[str, str] = {
    "asym": "asym",
    "asym;dc": "asym;dc",
    # The first kernels with the attribute (Linux 6.0) accept only "sym;asym" and "dc"
    # (services_operations of adf_sysfs.c).
    "asym;sym": "sym;asym",
    "dc": "dc",
    "dc;sym": "dc;sym",
    "dcc": "dcc",
    "sym": "sym",
}
"""The layouts of a 4xxx device: names with sorted services, and the values that are written."""


def parse(text: str | None) -> tuple[str, ...]:
    """Return the sorted services of a value; an empty tuple if any of them is unknown."""
    found = frozenset((text or "").split(";"))
    return tuple(sorted(found)) if found <= SERVICES else ()


def layout_of(services: tuple[str, ...]) -> str:
    """Return the name of the layout with these services."""
    return ";".join(services)


def trait_of(layout: str) -> str:
    """Return the trait of a layout, such as ``CUSTOM_CRYPTO_SERVICES_ASYM_SYM``."""
    return make_custom_name(f"CRYPTO_SERVICES_{layout}")


def functions_of(services: tuple[str, ...]) -> tuple[str, ...]:
    """Return the capabilities of these services: ``dcc`` also compresses like ``dc``."""
    return tuple(sorted({*services, *(["dc"] if "dcc" in services else [])}))
