# SPDX-License-Identifier: Apache-2.0
"""ARQs and device contexts, as the REST API shows them."""

from typing import Any

from hypothesis import strategies as st

from cyborg.core.address import MdevAddress, PciAddress
from cyborg.tests.fixtures.hosts import strategies

ARQ = "c2f0c1b0-2c4b-4f59-8f39-0d6d1d2f7c11"
OTHER_ARQ = "9b1d4b0e-6f7e-4f0f-a7c2-5b8f0f9c4d22"
MORE_ARQS = ("1f0e2d3c-4b5a-4697-8879-6a5b4c3d2e99", "2e1f3c4d-5a6b-4798-8968-7b4a5d2c3faa")
HANDLE = "3f1c7c46-13ad-4e0b-9a38-5f1d5b6a7e33"
INSTANCE = "e9f1a2b3-4c5d-4e6f-8a9b-0c1d2e3f4a44"
PROVIDER = "0b5c6d7e-8f90-4a1b-9c2d-3e4f5a6b7c55"
OTHER_PROVIDER = "7a6b5c4d-3e2f-4190-8a7b-6c5d4e3f2a66"
CARD = PciAddress.parse("0000:3d:01.1")


def make_arq(handle_type: str = "PCI", /, **fields: Any) -> dict[str, Any]:
    """Return a bound ARQ; ``fields`` replace its own."""
    return {
        "uuid": ARQ,
        "state": "Bound",
        "device_profile_name": "gzip",
        "device_profile_group_id": 0,
        "hostname": "compute-1",
        "device_rp_uuid": PROVIDER,
        "instance_uuid": INSTANCE,
        "project_id": "f0c1",
        "attach_handle_type": handle_type,
        "attach_handle_uuid": HANDLE,
        "attach_handle_info": MdevAddress(CARD, "nvidia-35", HANDLE).attach_info()
        if handle_type == "MDEV"
        else CARD.attach_info(),
        "created_at": "2026-03-02T10:00:00+00:00",
        "updated_at": None,
        "links": [],
        **fields,
    }


def make_context(**fields: Any) -> dict[str, Any]:
    """Return a context whose groups have one and three ARQs; ``fields`` replace its own."""
    return {
        "uuid": "5d4c3b2a-1f0e-4d9c-8b7a-695847362577",
        "groups": [
            {"resources:FPGA": "1", "trait:CUSTOM_GZIP": "required", "accel:function_id": "gzip"},
            {
                "resources:CUSTOM_QAT": "2",
                "resources:PGPU": "1",
                "trait:CUSTOM_B": "required",
                "trait:CUSTOM_A": "forbidden",
            },
        ],
        "arqs": [
            {"uuid": ARQ, "device_profile_group_id": 0},
            *({"uuid": uuid, "device_profile_group_id": 1} for uuid in (OTHER_ARQ, *MORE_ARQS)),
        ],
        **fields,
    }


def make_mappings(**groups: Any) -> dict[str, Any]:
    """Return the mappings of the groups of ``make_context``; ``groups`` replace or add some."""
    return {"device_profile_0": [PROVIDER], "device_profile_1": [OTHER_PROVIDER], **groups}


def is_attachable(address: PciAddress) -> bool:
    """Return whether the address is none of a host bridge."""
    return bool(address.domain or address.bus or address.device)


pci_arqs = st.builds(
    lambda kind, uuid, address: make_arq(kind, uuid=uuid, attach_handle_info=address.attach_info()),
    st.sampled_from(["PCI", "TEST_PCI", "VFIO"]),
    st.uuids().map(str),
    strategies.pci_addresses.filter(is_attachable),
)
mdev_arqs = st.builds(
    lambda uuid, address, has_address: make_arq(
        "MDEV",
        uuid=uuid,
        attach_handle_uuid=address.uuid,
        attach_handle_info=address.attach_info()
        if has_address
        else {"parent": "mtty", "asked_type": address.asked_type},
    ),
    st.uuids().map(str),
    strategies.mdev_addresses,
    st.booleans(),
)
arqs = st.one_of(pci_arqs, mdev_arqs)
