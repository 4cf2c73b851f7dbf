# SPDX-License-Identifier: Apache-2.0
"""Decision whether a PCI function can be attached to an instance."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory.delivery import FunctionFacts, GroupMember, find_obstacle, is_vfio
from cyborg.core.inventory.device import MAX_TEXT

GOOD = FunctionFacts("7", host_has_iommu=True, host_has_vfio=True)
AUDIO = GroupMember("0000:3b:00.1", "040300", "snd_hda_intel", same_card=True)
OTHER = GroupMember("0000:3c:00.0", "020000")
USED = GroupMember("0000:3c:00.0", "020000", "igb")
PORT = GroupMember("0000:3a:00.0", "060400", "pcieport")


def test_find_obstacle_function_with_own_group_has_none() -> None:
    assert find_obstacle(GOOD) is None


def test_find_obstacle_order_of_reasons() -> None:
    """Each reason is shown until its remedy is applied, then the next one."""
    worst = FunctionFacts(
        None,
        host_has_iommu=False,
        host_has_vfio=False,
        others=(USED,),
        host_use="vda holds the root file system",
        denied=True,
        direct_mapped=True,
    )
    grouped = replace(worst, iommu_group="7", host_has_iommu=True)
    denied = replace(grouped, host_has_vfio=True)
    mapped = replace(denied, denied=False)
    loaded = replace(mapped, direct_mapped=False)
    alone = replace(loaded, others=())
    expected = {
        worst: "the host has no IOMMU: enable VT-d",
        replace(worst, host_has_iommu=True): "the IOMMU does not cover this function: use another",
        grouped: "the kernel driver vfio-pci is neither loaded nor installed: install the package",
        denied: "vfio-pci refuses this model by its denylist: use another device, or load",
        mapped: "the firmware requires a direct mapping of memory for IOMMU group 7 (RMRR or IVMD)",
        loaded: "it shares IOMMU group 7 with 0000:3c:00.0 (igb): use another slot, or one",
        alone: "the host uses it: vda holds the root file system; free it on the host",
    }
    for facts, start in expected.items():
        assert (find_obstacle(facts) or "").startswith(start)
    assert find_obstacle(replace(alone, host_use=None)) is None


@pytest.mark.parametrize(
    ("other", "blocks"),
    [
        (AUDIO, True),
        (replace(AUDIO, kernel_driver=None), False),
        (replace(AUDIO, kernel_driver="vfio-pci"), False),
        (replace(AUDIO, kernel_driver="pci-stub"), False),
        (replace(AUDIO, kernel_driver="vfio-pci", offered=True), True),
        (OTHER, False),
        (replace(OTHER, kernel_driver="vfio-pci"), False),
        (replace(OTHER, kernel_driver="igb"), True),
        (replace(OTHER, offered=True), True),
        (replace(OTHER, used=True), False),
        (replace(OTHER, guest=True), True),
        (replace(OTHER, kernel_driver="vfio-pci", guest=True), True),
        (replace(OTHER, kernel_driver="vfio-pci", offered=True), True),
        (GroupMember("2490000.ethernet", ""), False),
        (GroupMember("2490000.ethernet", "", "dwc-eth-dwmac"), True),
        (GroupMember("2490000.ethernet", "", "vfio-platform"), False),
        (PORT, False),
        (replace(PORT, kernel_driver="shpchp"), False),
        (GroupMember("0000:00:1f.0", "060100", "lpc_ich"), True),
        (GroupMember("0000:00:1f.0", "060100"), False),
    ],
)
def test_find_obstacle_other_function_of_group(other: GroupMember, blocks: bool) -> None:
    reason = find_obstacle(replace(GOOD, others=(other,)))
    assert (reason is not None) is blocks
    assert reason is None or other.address in reason


def test_find_obstacle_names_drivers_and_the_first_functions() -> None:
    others = [replace(USED, address=f"0000:3c:0{n}.0") for n in range(5)]
    assert find_obstacle(replace(GOOD, others=tuple(others))) == (
        "it shares IOMMU group 7 with 0000:3c:00.0 (igb), 0000:3c:01.0 (igb), 0000:3c:02.0 (igb), "
        "2 more: use another slot, or one with ACS"
    )
    offered = replace(AUDIO, kernel_driver=None, offered=True)
    assert find_obstacle(replace(GOOD, others=(offered,))) == (
        "it shares IOMMU group 7 with 0000:3b:00.1 (offered too): bind these to vfio-pci and do "
        "not offer them, or use a slot with ACS"
    )
    used = replace(offered, used=True)
    assert find_obstacle(replace(GOOD, others=(used,))) == (
        "it shares IOMMU group 7 with 0000:3b:00.1 (offered too): use another slot, or one with ACS"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, False),
        ("nvme", False),
        ("vfio-pci", True),
        ("mlx5_vfio_pci", True),
        ("xe-vfio-pci", True),
    ],
)
def test_is_vfio(name: str | None, expected: bool) -> None:
    assert is_vfio(name) is expected
    unloaded = replace(GOOD, host_has_vfio=False, kernel_driver=name)
    assert (find_obstacle(unloaded) is None) is expected, "a variant serves its device"
    denied = replace(GOOD, denied=True, kernel_driver=name)
    assert (find_obstacle(denied) is None) is expected, "it has accepted the device"
    mapped = replace(GOOD, direct_mapped=True, kernel_driver=name)
    assert find_obstacle(mapped) is not None, "the kernel refuses to open it"


@given(
    st.builds(
        FunctionFacts,
        st.none() | st.just("123456"),
        st.booleans(),
        st.booleans(),
        st.none() | st.just("nvme"),
        st.lists(st.sampled_from([AUDIO, OTHER, USED, PORT]), max_size=5).map(tuple),
        st.none() | st.just("x" * 30),
        st.booleans(),
        st.booleans(),
    )
)
def test_find_obstacle_reason_fits_its_column(facts: FunctionFacts) -> None:
    assert len(find_obstacle(facts) or "") <= MAX_TEXT
