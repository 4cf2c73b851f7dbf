# SPDX-License-Identifier: Apache-2.0
"""The names of OpenStack Cyborg that devices have in addition."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.binding.profile import parse_groups
from cyborg.core.inventory.device import (
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Layout,
)
from cyborg.core.inventory.reference_names import (
    RELEASES,
    UNPUBLISHED,
    add_reference_names,
    describe_remedy,
    find_counterpart,
)
from cyborg.core.migration.import_plan import find_unserved_names

ADDRESS = "0000:3b:00.0"
AFU = "d8424dc4a4a3c413f89e433683f9040b"


def make_device(
    type_: DeviceType,
    ids: str,
    resource_class: str,
    *traits: str,
    **attributes: str,
) -> Device:
    """Return a card as our drivers report it; ``ids`` is like 10DE_1EB8."""
    vendor, product = ids.lower().split("_")
    deployable = Deployable(
        ADDRESS,
        resource_class,
        frozenset({f"CUSTOM_PCI_PRODUCT_{ids}", f"CUSTOM_PCI_VENDOR_{ids[:4]}", *traits}),
        (AttachHandle(ADDRESS, HandleType.PCI),),
        attributes,
    )
    info = {"vendor_id": vendor, "product_id": product}
    return Device(ADDRESS, type_, vendor, "model", "b", info, deployables=(deployable,))


CASES: list[tuple[Device, str, set[str]]] = [
    (
        make_device(DeviceType.GPU, "10DE_2BB5", "PGPU"),
        "PGPU",
        {"CUSTOM_NVIDIA_2BB5", "CUSTOM_GPU_NVIDIA", "CUSTOM_GPU_PRODUCT_ID_2BB5"},
    ),
    (
        make_device(
            DeviceType.GPU, "10DE_1EB8", "VGPU", mdev_type="nvidia-223", mdev_name="GRID T4-2B"
        ),
        "VGPU",
        {"CUSTOM_NVIDIA_1EB8_T4_2B"},
    ),
    (make_device(DeviceType.GPU, "1002_74A1", "PGPU"), "PGPU", set()),
    (
        make_device(DeviceType.FPGA, "8086_09C4", "FPGA", function_id=AFU, region_id=AFU),
        "FPGA",
        {
            *("CUSTOM_FPGA_INTEL", "CUSTOM_FPGA_INTEL_PAC_ARRIA10"),
            f"CUSTOM_FPGA_FUNCTION_ID_INTEL_{AFU.upper()}",
            f"CUSTOM_FPGA_REGION_INTEL_{AFU.upper()}",
        },
    ),
    (
        make_device(DeviceType.FPGA, "1BD4_A115", "FPGA"),
        "FPGA",
        {"CUSTOM_FPGA_INSPUR", "CUSTOM_FPGA_PRODUCT_ID_A115"},
    ),
    (
        make_device(DeviceType.FPGA, "10EE_5001", "FPGA"),
        "FPGA",
        {"CUSTOM_FPGA_PRODUCT_ID_5001", "CUSTOM_FPGA_PRODUCT_ID_5000"},
    ),
    (make_device(DeviceType.QAT, "8086_37C9", "CUSTOM_CRYPTO"), "CUSTOM_QAT", set()),
    (make_device(DeviceType.QAT, "8086_4941", "CUSTOM_CRYPTO"), "CUSTOM_CRYPTO", set()),
    (
        make_device(DeviceType.SSD, "1BD4_1003", "CUSTOM_NVME"),
        "CUSTOM_SSD",
        {"CUSTOM_SSD_INSPUR", "CUSTOM_SSD_PRODUCT_ID_1003"},
    ),
    (make_device(DeviceType.SSD, "144D_A808", "CUSTOM_NVME"), "CUSTOM_NVME", set()),
    (
        make_device(
            DeviceType.NIC, "8086_1572", "CUSTOM_NIC", "CUSTOM_NIC_VF", "CUSTOM_PHYSNET_NET1"
        ),
        "CUSTOM_NIC",
        {"CUSTOM_VF", "CUSTOM_NET1"},
    ),
    (
        make_device(DeviceType.OTHER, "19E5_D100", "CUSTOM_PCI"),
        "CUSTOM_PCI",
        {"CUSTOM_PCI_HUAWEI", "CUSTOM_PCI_PRODUCT_ID_D100"},
    ),
    (
        make_device(DeviceType.OTHER, "1234_D100", "CUSTOM_PCI"),
        "CUSTOM_PCI",
        {"CUSTOM_PCI_PRODUCT_ID_D100"},
    ),
]


@pytest.mark.parametrize(("device", "resource_class", "traits"), CASES)
def test_device_has_both_names(device: Device, resource_class: str, traits: set[str]) -> None:
    (before,) = device.deployables
    changed = add_reference_names(device, RELEASES[-1])
    (after,) = changed.deployables
    assert after.resource_class == resource_class
    assert after.traits == before.traits | traits
    assert replace(after, traits=before.traits, resource_class=before.resource_class) == before
    assert add_reference_names(changed, RELEASES[-1]) == changed, "a second time changes nothing"
    for name in (traits - {"CUSTOM_NET1"}) | ({resource_class} - {before.resource_class}):
        assert "reference_traits" in (describe_remedy(name) or ""), name


def test_release_without_the_driver_has_no_names_of_it() -> None:
    device = make_device(DeviceType.OTHER, "19E5_D100", "CUSTOM_PCI")
    assert add_reference_names(device, 13) == device


def test_layouts_offer_the_other_class() -> None:
    device = replace(
        make_device(DeviceType.QAT, "8086_37C8", "CUSTOM_CRYPTO"),
        layouts=(Layout("vfs-0", {"CUSTOM_CRYPTO": 1}), Layout("vfs-16", {"CUSTOM_CRYPTO": 16})),
    )
    layouts = add_reference_names(device, 17).layouts
    assert [layout.offers for layout in layouts] == [{"CUSTOM_QAT": 1}, {"CUSTOM_QAT": 16}]


def test_card_without_traits_of_its_functions_is_known_by_its_board() -> None:
    device = make_device(DeviceType.GPU, "10DE_1EB8", "PGPU")
    (plain,) = device.deployables
    (found,) = add_reference_names(
        replace(device, deployables=(replace(plain, traits=frozenset()),)), 17
    ).deployables
    assert "CUSTOM_NVIDIA_1EB8" in found.traits


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("CUSTOM_NVIDIA_1EB8", "CUSTOM_PCI_PRODUCT_10DE_1EB8"),
        ("CUSTOM_GPU_PRODUCT_ID_2BB5", "CUSTOM_PCI_PRODUCT_10DE_2BB5"),
        ("CUSTOM_NVIDIA_1EB8_T4_2B", "CUSTOM_PCI_PRODUCT_10DE_1EB8 and CUSTOM_MDEV_<TYPE>"),
        (f"CUSTOM_FPGA_FUNCTION_ID_INTEL_{AFU.upper()}", f"CUSTOM_FPGA_FUNCTION_{AFU.upper()}"),
        (f"CUSTOM_FPGA_REGION_INTEL_{AFU.upper()}", f"CUSTOM_FPGA_REGION_{AFU.upper()}"),
        ("CUSTOM_FPGA_XILINX", "CUSTOM_PCI_VENDOR_10EE"),
        ("CUSTOM_QAT", "CUSTOM_CRYPTO"),
        ("CUSTOM_SSD", "CUSTOM_NVME"),
        ("CUSTOM_VF", "CUSTOM_NIC_VF"),
        ("CUSTOM_PCI_VENDOR_10DE", None),
        ("CUSTOM_NVME", None),
        ("PGPU", None),
    ],
)
def test_counterpart_is_the_name_of_this_service(name: str, ours: str | None) -> None:
    assert find_counterpart(name) == ours


@given(st.from_regex(r"CUSTOM_[A-Z0-9_]{0,30}", fullmatch=True))
def test_counterpart_of_any_name_is_none_or_text(name: str) -> None:
    assert find_counterpart(name) != ""


GROUPS = parse_groups(
    [
        {
            "resources:CUSTOM_QAT": "1",
            "trait:CUSTOM_FPGA_XILINX": "required",
            "trait:CUSTOM_A": "required",
        }
    ]
)


@pytest.mark.parametrize(
    ("offered", "reported", "release", "missing"),
    [
        ({"CUSTOM_QAT", "CUSTOM_A"}, set(), None, {"CUSTOM_QAT", "CUSTOM_FPGA_XILINX"}),
        ({"CUSTOM_QAT", "CUSTOM_A"}, set(), 17, {"CUSTOM_FPGA_XILINX"}),
        ({"CUSTOM_QAT", "CUSTOM_FPGA_XILINX"}, set(), 17, {"CUSTOM_FPGA_XILINX", "CUSTOM_A"}),
        (set(), {"CUSTOM_QAT", "CUSTOM_FPGA_XILINX", "CUSTOM_A"}, None, set()),
    ],
)
def test_profile_names_what_no_device_has(
    offered: set[str], reported: set[str], release: int | None, missing: set[str]
) -> None:
    found = find_unserved_names(GROUPS, offered, reported, release)
    assert set(found) == missing
    assert all(found.values())
    assert "reference_traits" not in found.get(next(iter(UNPUBLISHED)), "")
