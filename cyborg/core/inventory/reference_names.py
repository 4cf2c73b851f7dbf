# SPDX-License-Identifier: Apache-2.0
"""Traits and resource classes of OpenStack Cyborg, for clouds that were migrated from it.

Source: the drivers of the releases 12 to 17 (``cyborg/accelerator/drivers``), and
``CUSTOM_GPU_NVIDIA`` and ``CUSTOM_GPU_PRODUCT_ID_...`` of earlier ones, which profiles still have.

A provider has further traits, but only one resource class: its handles cannot be sold under two
classes. Where OpenStack Cyborg has another class, the provider has that one. Allocations of the
servers that run since before the migration have it too, so that Placement would not let it go.

``CUSTOM_FPGA_XILINX`` is not published: a group that requires it has two handles, of which the
management function is not offered here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cyborg.core import naming
from cyborg.core.inventory.device import Deployable, Device, DeviceType

# The releases whose names can be published.
RELEASES = tuple(range(12, 18))

_FIRST_WITH_PCI = 14
_PCI_CLASS = "CUSTOM_PCI"
_PRODUCT = re.compile(r"CUSTOM_PCI_PRODUCT_([0-9A-F]{4})_([0-9A-F]{4})")
_PHYSNET = "CUSTOM_PHYSNET_"
_VENDORS: Mapping[str, str] = {
    "10DE": "NVIDIA",
    "102B": "MATROX",
    "8086": "INTEL",
    "1BD4": "INSPUR",
    "10EE": "XILINX",
    "19E5": "HUAWEI",
}
_NVIDIA, _INTEL, _INSPUR, _XILINX = "10DE", "8086", "1BD4", "10EE"
_QAT_PRODUCTS = frozenset({"37C8", "37C9"})  # C62x, and its virtual function
_NIC_PRODUCTS = frozenset({"158A", "158B", "1572", "154C"})  # 154C: their virtual function
_PAC_ARRIA_10 = frozenset({"09C4", "09C5"})
# Resource classes here, by those of OpenStack Cyborg.
_CLASSES: Mapping[str, str] = {"CUSTOM_QAT": "CUSTOM_CRYPTO", "CUSTOM_SSD": "CUSTOM_NVME"}

# Traits that no device has, whatever the release.
UNPUBLISHED = frozenset({"CUSTOM_FPGA_XILINX"})

_COUNTERPARTS: tuple[tuple[str, str], ...] = (
    ("CUSTOM_GPU_NVIDIA", "CUSTOM_PCI_VENDOR_10DE"),
    ("CUSTOM_(?:NVIDIA|GPU_PRODUCT_ID)_([0-9A-F]{4})", r"CUSTOM_PCI_PRODUCT_10DE_\1"),
    ("CUSTOM_NVIDIA_([0-9A-F]{4})_.+", r"CUSTOM_PCI_PRODUCT_10DE_\1 and CUSTOM_MDEV_<TYPE>"),
    ("CUSTOM_FPGA_INTEL_PAC_ARRIA10", "CUSTOM_FPGA_INTEL_PAC_ARRIA_10"),
    ("CUSTOM_FPGA_(REGION|FUNCTION)(?:_ID)?_INTEL_(.+)", r"CUSTOM_FPGA_\1_\2"),
    (
        "CUSTOM_FPGA_PRODUCT_ID_([0-9A-F]{4})",
        r"CUSTOM_PCI_PRODUCT_10EE_\1 or CUSTOM_PCI_PRODUCT_1BD4_\1",
    ),
    ("CUSTOM_SSD_PRODUCT_ID_([0-9A-F]{4})", r"CUSTOM_PCI_PRODUCT_1BD4_\1"),
    ("CUSTOM_PCI_PRODUCT_ID_([0-9A-F]{4})", r"CUSTOM_PCI_PRODUCT_<VENDOR>_\1"),
    *(
        (f"CUSTOM_(?:FPGA|SSD|PCI)_{name}", f"CUSTOM_PCI_VENDOR_{vendor}")
        for vendor, name in _VENDORS.items()
    ),
    ("CUSTOM_([PV]F)", r"CUSTOM_NIC_\1"),
    ("CUSTOM_PCI", "the resource class of the rule that selects the device"),
    *_CLASSES.items(),
)


def add_reference_names(device: Device, release: int) -> Device:
    """Return a device with the traits and the resource classes of a release as well.

    ``release`` is one of ``RELEASES``. The traits of this service stay.
    """
    # By device, and not by class: a cloud may have drives of other vendors, which keep their class.
    reference_classes = {  # by class of this service
        own: reference for reference, own in _CLASSES.items() if _has_class(device, reference)
    }

    def rename(resource_class: str) -> str:
        return reference_classes.get(resource_class, resource_class)

    return replace(
        device,
        layouts=tuple(
            replace(layout, offers={rename(c): n for c, n in layout.offers.items()})
            for layout in device.layouts
        ),
        deployables=tuple(
            _add_names(
                device,
                replace(deployable, resource_class=rename(deployable.resource_class)),
                release,
            )
            for deployable in device.deployables
        ),
    )


def find_counterpart(name: str) -> str | None:
    """Return what a trait or resource class of OpenStack Cyborg is called here, None for others."""
    for pattern, ours in _COUNTERPARTS:
        if (found := re.fullmatch(pattern, name)) is not None:
            return found.expand(ours)
    return None


def describe_remedy(name: str) -> str | None:
    """Return what to do about a trait or class of OpenStack Cyborg, None for another name."""
    if (ours := find_counterpart(name)) is None:
        return None
    profile = f"make a profile with {ours}"
    if name in UNPUBLISHED:
        return f"a name of OpenStack Cyborg: {profile}"
    return (
        f"a name of OpenStack Cyborg: set [conductor] reference_traits to its release, or {profile}"
    )


def _has_class(device: Device, name: str) -> bool:
    """Return whether OpenStack Cyborg has a device with a resource class of its own."""
    products = {found for d in device.deployables for found in _products(device, d)}
    if name == "CUSTOM_QAT":
        return any(vendor == _INTEL and product in _QAT_PRODUCTS for vendor, product in products)
    return any(vendor == _INSPUR for vendor, _ in products)


def _products(device: Device, deployable: Deployable) -> set[tuple[str, str]]:
    """Return vendor and product id of the functions of a deployable, in upper case."""
    found = {m.group(1, 2) for trait in deployable.traits if (m := _PRODUCT.fullmatch(trait))}
    info = device.std_board_info
    ids = (info.get("vendor_id", "").upper(), info.get("product_id", "").upper())
    return {(str(vendor), str(product)) for vendor, product in found or {ids}}


def _add_names(device: Device, deployable: Deployable, release: int) -> Deployable:
    names = {
        name
        for vendor, product in _products(device, deployable)
        for name in _names(device, deployable, vendor, product, release)
        # A product id or the name of a vGPU may have characters that no trait has.
        if naming.is_trait(name)
    }
    return replace(deployable, traits=deployable.traits | names)


def _names(
    device: Device, deployable: Deployable, vendor: str, product: str, release: int
) -> Iterator[str]:
    """Yield the traits of a deployable whose function has these ids."""
    if deployable.resource_class == _PCI_CLASS:
        if release >= _FIRST_WITH_PCI:
            yield f"CUSTOM_PCI_PRODUCT_ID_{product}"
            if vendor in _VENDORS:
                yield f"CUSTOM_PCI_{_VENDORS[vendor]}"
    elif device.type is DeviceType.GPU and vendor == _NVIDIA:
        yield from _gpu_names(deployable, product)
    elif device.type is DeviceType.FPGA:
        yield from _fpga_names(deployable, vendor, product)
    elif device.type is DeviceType.SSD and vendor == _INSPUR:
        yield "CUSTOM_SSD_INSPUR"
        yield f"CUSTOM_SSD_PRODUCT_ID_{product}"
    elif device.type is DeviceType.NIC and vendor == _INTEL and product in _NIC_PRODUCTS:
        for trait in deployable.traits:
            if trait in ("CUSTOM_NIC_PF", "CUSTOM_NIC_VF"):
                yield trait.replace("NIC_", "")
            elif trait.startswith(_PHYSNET):
                yield f"CUSTOM_{trait.removeprefix(_PHYSNET)}"


def _fpga_names(deployable: Deployable, vendor: str, product: str) -> Iterator[str]:
    """Yield the traits of an FPGA card or region."""
    if vendor in (_INSPUR, _XILINX):
        yield f"CUSTOM_FPGA_PRODUCT_ID_{product}"
    if vendor == _INSPUR:
        yield "CUSTOM_FPGA_INSPUR"
    elif vendor == _XILINX and re.fullmatch("[0-9A-F]{4}", product):
        # OpenStack Cyborg took the id of the management function, which is one less.
        yield f"CUSTOM_FPGA_PRODUCT_ID_{int(product, 16) - 1:04X}"
    elif vendor == _INTEL:
        yield "CUSTOM_FPGA_INTEL"
        if product in _PAC_ARRIA_10:
            yield "CUSTOM_FPGA_INTEL_PAC_ARRIA10"
        for key, name in (("function_id", "FUNCTION_ID"), ("region_id", "REGION")):
            if plain := deployable.attributes.get(key, "").replace("-", "").upper():
                yield f"CUSTOM_FPGA_{name}_INTEL_{plain}"


def _gpu_names(deployable: Deployable, product: str) -> Iterator[str]:
    """Yield the traits of an NVIDIA GPU, or those of its vGPUs."""
    if "mdev_type" not in deployable.attributes:
        yield f"CUSTOM_NVIDIA_{product}"
        yield "CUSTOM_GPU_NVIDIA"
        yield f"CUSTOM_GPU_PRODUCT_ID_{product}"
    # The name of a vGPU is such as "GRID T4-2B": the trait has its second word.
    elif len(words := deployable.attributes.get("mdev_name", "").split()) > 1:
        yield f"CUSTOM_NVIDIA_{product}_{words[1].replace('-', '_').upper()}"
