# SPDX-License-Identifier: Apache-2.0
"""Crypto accelerators: PCI ids, how the kernel of the host uses each family, services of QAT.

Sources of the ids, and of the names of the kernel drivers:

* Intel QAT: ``drivers/crypto/intel/qat/qat_common/adf_accel_devices.h`` and
  ``include/linux/pci_ids.h`` of Linux. The ids of 200xx and d15xx, which Linux does not support,
  are those of Intel's own driver (``adf_accel_devices.h``), and of DPDK for their virtual functions
  (``drivers/common/qat/qat_device.c``);
* virtio-crypto: device type 20 of the virtio specification 1.2, section 5, and of
  ``include/uapi/linux/virtio_ids.h``; its PCI id is 0x1040 plus the type, section 4.1.2;
* AMD CCP and PSP: the table in ``drivers/crypto/ccp/sp-pci.c`` of Linux.

The names of modules are those of the Makefiles of these drivers, the names of algorithms their
``cra_driver_name`` (``qat_algs.c`` and ``qat_asym_algs.c``, ``virtio_crypto_skcipher_algs.c`` and
``virtio_crypto_akcipher_algs.c``, ``ccp-crypto-*.c``). 4949 is in pci.ids.

The services of a QAT device are the value of its attribute ``qat/cfg_services``, which
``Documentation/ABI/testing/sysfs-driver-qat`` of Linux describes: services are
separated by ``;``, their order has no meaning, a 4xxx device has at most two, and ``dcc`` is never
combined. ``adf_cfg_services.c`` and ``adf_cfg_strings.h`` of
``drivers/crypto/intel/qat/qat_common`` have all names, ``decomp`` too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cyborg.core.inventory.device import DeviceType
from cyborg.core.naming import make_custom_name
from cyborg.drivers.sysfs import PciFunction


@dataclass(frozen=True, slots=True)
class Family:
    """A family of accelerators with the same kernel module.

    ``kernel_drivers`` are names of drivers of the PCI bus. The host's kernel can compute with a PCI
    function that is bound to one of them. The algorithms have the module ``module`` in
    ``/proc/crypto``; if the module is built in, they have the module ``kernel`` and a name that
    matches ``algorithms``.
    """

    type: DeviceType
    kernel_drivers: frozenset[str]
    module: str
    algorithms: re.Pattern[str]


QAT = Family(
    DeviceType.QAT,
    frozenset(
        {
            *("dh895xcc", "dh895xccvf", "c6xx", "c6xxvf", "c3xxx", "c3xxxvf"),
            *("200xx", "200xxvf", "d15xx", "d15xxvf", "4xxx", "4xxxvf", "420xx", "420xxvf"),
            "6xxx",
        }
    ),
    "intel_qat",
    re.compile(r"qat[-_][a-z0-9_-]+"),
)
VIRTIO = Family(
    DeviceType.CRYPTO,
    frozenset({"virtio-pci"}),
    "virtio_crypto",
    re.compile(r"virtio[-_](crypto[-_][a-z0-9_-]+|pkcs1-rsa)"),
)
CCP = Family(
    DeviceType.CRYPTO,
    frozenset({"ccp"}),
    "ccp_crypto",
    re.compile(r"[a-z0-9-]+-ccp"),
)

# Product ids of physical functions with the attributes of ``sysfs-driver-qat``: 4xxx, 420xx, 6xxx.
QAT_CONFIGURABLE = frozenset({"4940", "4942", "4944", "4946", "4948"})

_QAT_IDS = (
    *("0435", "0443"),  # dh895xcc and its virtual function
    *("37c8", "37c9"),  # c62x
    *("19e2", "19e3"),  # c3xxx
    *("18ee", "18ef"),  # 200xx
    *("6f54", "6f55"),  # d15xx
    *("4940", "4941"),  # 4xxx
    *("4942", "4943"),  # 401xx
    *("4944", "4945"),  # 402xx
    *("4946", "4947"),  # 420xx
    *("4948", "4949"),  # 6xxx
)
# The first two are crypto engines alone, the others have the security processor too.
_CCP_IDS = (
    *("1537", "1468"),
    *("1456", "1486", "15df", "14ca", "15c7", "1649", "1134", "17e0", "156e", "17d8"),
    "115a",
)
# Families by vendor id and product id.
FAMILIES: Mapping[tuple[str, str], Family] = {
    **{("8086", product): QAT for product in _QAT_IDS},
    ("1af4", "1054"): VIRTIO,
    **{("1022", product): CCP for product in _CCP_IDS},
}


def family_of(function: PciFunction) -> Family | None:
    """Return the family of a PCI function; None if it is not a known crypto accelerator."""
    return FAMILIES.get((function.vendor, function.product))


QAT_SERVICES = frozenset({"sym", "asym", "dc", "dcc", "decomp"})

# The layouts of a 4xxx device: names with sorted services, and the values that are written.
QAT_LAYOUTS: Mapping[str, str] = {
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


def parse_services(text: str | None) -> tuple[str, ...]:
    """Return the sorted services of a value; an empty tuple if any of them is unknown."""
    found = frozenset((text or "").split(";"))
    return tuple(sorted(found)) if found <= QAT_SERVICES else ()


def join_services(services: tuple[str, ...]) -> str:
    """Return the name of the layout with these services."""
    return ";".join(services)


def services_trait(layout: str) -> str:
    """Return the trait of a layout, such as ``CUSTOM_CRYPTO_SERVICES_ASYM_SYM``."""
    return make_custom_name(f"CRYPTO_SERVICES_{layout}")


def service_functions(services: tuple[str, ...]) -> tuple[str, ...]:
    """Return the capabilities of these services: ``dcc`` also compresses like ``dc``."""
    return tuple(sorted({*services, *(["dc"] if "dcc" in services else [])}))
