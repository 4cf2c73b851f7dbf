# SPDX-License-Identifier: Apache-2.0
"""What an import takes from rows of OpenStack Cyborg, and why it drops the others."""

import json
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import DeviceType, HandleType
from cyborg.core.migration import import_plan
from cyborg.core.migration.host_plan import ImportPlanner
from cyborg.core.migration.import_plan import (
    ArqRow,
    AttributeRow,
    ControlPathRow,
    DeployableRow,
    DeviceRow,
    HandleRow,
    HostImport,
    HostRows,
    ProfileRow,
    UnknownUse,
    parse_pci_info,
    plan_profiles,
)

HOST = "compute-1"
INFO = json.dumps({"domain": "0000", "bus": "3b", "device": "00", "function": "0"})


def make_uuid(number: int) -> str:
    return str(UUID(int=number))


DEVICE = DeviceRow(
    1, make_uuid(1), "GPU", "10de", "T4", '{"product_id": 1}', "text", HOST, "enabled", None
)
PATH = ControlPathRow(7, make_uuid(7), 1, INFO)
DEPLOYABLE = DeployableRow(2, make_uuid(2), 1, None, f"{HOST}_0000:3b:00.0", make_uuid(20), None)
ATTRIBUTES = (
    AttributeRow(30, make_uuid(30), 2, "rc", "PGPU"),
    AttributeRow(31, make_uuid(31), 2, "trait0", "OWNER_CYBORG"),
    AttributeRow(32, make_uuid(32), 2, "trait1", "CUSTOM_T4"),
    AttributeRow(33, make_uuid(33), 2, "site", "row 7"),
)
HANDLE = HandleRow(4, make_uuid(4), 2, "PCI", INFO)
ARQ = ArqRow(5, make_uuid(5), "project-1", "Bound", 6, 0, HOST, make_uuid(50), 4)
ROWS = HostRows((DEVICE,), (PATH,), (DEPLOYABLE,), ATTRIBUTES, (HANDLE,), (ARQ,))
PROFILE = ProfileRow(6, make_uuid(6), "gpu", None, '{"groups": [{"resources:PGPU": "1"}]}')


def plan(rows: HostRows = ROWS, profile: ProfileRow = PROFILE) -> HostImport:
    profiles, _ = plan_profiles([profile])
    return ImportPlanner(profiles).plan(HOST, rows)


def reasons(found: HostImport) -> dict[str, str]:
    """Return the reasons of the dropped objects by kind."""
    return {drop.kind: drop.reason for drop in found.drops}


def test_rows_become_what_an_agent_reports() -> None:
    found = plan()
    assert found.drops == ()
    (device,) = found.devices
    assert (device.uuid, device.status, device.dirty) == (make_uuid(1), "enabled", False)
    assert (device.value.address, device.value.type) == ("0000:3b:00.0", DeviceType.GPU)
    assert device.value.std_board_info == {"product_id": "1"}
    assert device.value.vendor_board_info == {"info": "text"}
    (value,) = device.value.deployables
    assert (value.address, value.resource_class) == ("0000:3b:00.0", "PGPU")
    assert value.traits == {"CUSTOM_T4"}, "the publisher adds OWNER_CYBORG itself"
    (handle,) = value.handles
    assert (handle.address, handle.type) == ("0000:3b:00.0", HandleType.PCI)
    identity = device.deployables["0000:3b:00.0"]
    assert (identity.uuid, identity.provider) == (make_uuid(2), make_uuid(20))
    assert [(a.uuid, a.key, a.value) for a in identity.attributes] == [
        (make_uuid(33), "site", "row 7")
    ]
    (arq,) = found.arqs
    assert (arq.handle, arq.provider, arq.instance) == (make_uuid(4), make_uuid(20), make_uuid(50))
    assert (arq.profile, arq.resource_class, arq.group.to_dict()) == (
        "gpu",
        "PGPU",
        {"resources:PGPU": "1"},
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id": 2}, "no row in controlpath_ids"),
        ({"type": "TPU"}, "its type 'TPU' is unknown"),
        ({"status": "broken"}, "its status 'broken' is unknown, expected enabled or maintaining"),
        ({"uuid": "x"}, "'x' is not a uuid"),
    ],
)
def test_device_that_cannot_be_taken_is_dropped_with_its_parts(
    changes: dict[str, Any], reason: str
) -> None:
    found = plan(replace(ROWS, devices=(replace(DEVICE, **changes),)))
    assert (found.devices, found.arqs) == ((), ())
    assert reason in reasons(found)[import_plan.DEVICE]
    assert set(reasons(found)) == set(import_plan.KINDS) - {import_plan.PROFILE}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "other_0000:3b:00.0"}, "does not begin with 'compute-1_'"),
        ({"provider": None}, "no resource provider in Placement"),
        ({"provider": "x"}, "'x' is not a uuid"),
    ],
)
def test_deployable_that_cannot_be_taken_is_dropped_with_its_handles(
    changes: dict[str, Any], reason: str
) -> None:
    found = plan(replace(ROWS, deployables=(replace(DEPLOYABLE, **changes),)))
    (device,) = found.devices
    assert (device.value.deployables, device.handles, found.arqs) == ((), {}, ())
    assert reason in reasons(found)[import_plan.DEPLOYABLE]
    assert "was not taken" in reasons(found)[import_plan.HANDLE]
    assert f"its attach handle {HANDLE.uuid} was not taken" in reasons(found)[import_plan.ARQ]


def test_deployable_without_resource_class_is_dropped() -> None:
    found = plan(replace(ROWS, attributes=ATTRIBUTES[1:]))
    assert "no resource class" in reasons(found)[import_plan.DEPLOYABLE]


def test_invalid_trait_is_dropped_alone() -> None:
    attributes = (*ATTRIBUTES, AttributeRow(34, make_uuid(34), 2, "trait2", "no trait"))
    found = plan(replace(ROWS, attributes=attributes))
    assert reasons(found) == {import_plan.ATTRIBUTE: "'no trait' is no trait of Placement"}
    assert len(found.arqs) == 1


def test_long_attribute_is_dropped_alone() -> None:
    attributes = (*ATTRIBUTES, AttributeRow(34, make_uuid(34), 2, "note", "x" * 256))
    found = plan(replace(ROWS, attributes=attributes))
    assert set(reasons(found)) == {import_plan.ATTRIBUTE}
    assert "expected a string of 1 to 255" in reasons(found)[import_plan.ATTRIBUTE]


def test_mediated_device_is_dropped_with_its_request() -> None:
    found = plan(replace(ROWS, handles=(replace(HANDLE, type="MDEV"),)))
    assert "uuid of a mediated device" in reasons(found)[import_plan.HANDLE]
    assert found.arqs == ()


def test_second_object_at_an_address_is_dropped() -> None:
    second = replace(DEVICE, id=11, uuid=make_uuid(11))
    copy = replace(HANDLE, id=14, uuid=make_uuid(14))
    path = replace(PATH, id=17, uuid=make_uuid(17), device_id=11)
    found = plan(
        replace(
            ROWS,
            devices=(second, DEVICE),
            control_paths=(PATH, path),
            handles=(copy, HANDLE),
        )
    )
    assert [device.uuid for device in found.devices] == [DEVICE.uuid], "a server uses it"
    assert reasons(found) == {
        kind: f"its PCI address 0000:3b:00.0 is that of {kind} {uuid} of host {HOST} as well"
        for kind, uuid in ((import_plan.DEVICE, DEVICE.uuid), (import_plan.HANDLE, HANDLE.uuid))
    } | {import_plan.CONTROL_PATH: f"its device {second.uuid} was not taken"}


@pytest.mark.parametrize("state", ["Initial", "BindStarted", "BindFailed", "Unbound", "Deleting"])
def test_request_that_is_not_bound_is_dropped(state: str) -> None:
    found = plan(replace(ROWS, arqs=(replace(ARQ, state=state),)))
    assert found.arqs == ()
    assert f"its state is {state}" in reasons(found)[import_plan.ARQ]


def test_profile_that_is_not_valid_is_dropped_with_its_requests() -> None:
    profile = replace(PROFILE, text='{"groups": [{"resources:PGPU": "0"}]}')
    _, drops = plan_profiles([profile])
    assert [drop.name for drop in drops] == ["gpu"]
    assert "its device profile was not taken" in reasons(plan(profile=profile))[import_plan.ARQ]


def test_device_of_a_bound_request_that_is_dropped_is_closed() -> None:
    """Its server still has the handle, which is free here."""
    second = replace(ARQ, id=8, uuid=make_uuid(8), group_id=3)
    found = plan(replace(ROWS, arqs=(second,)))
    assert [device.status for device in found.devices] == ["maintaining"]
    assert "a server may use its attach handle" in reasons(found)[import_plan.ARQ]
    found = plan(replace(ROWS, handles=(replace(HANDLE, type="MDEV"),)))
    assert [device.status for device in found.devices] == ["maintaining"], "the host reports it"
    found = plan(replace(ROWS, arqs=(ARQ, second)))
    assert [device.status for device in found.devices] == ["enabled"], "another request has it"


def test_bound_request_of_a_dropped_device_names_the_server() -> None:
    """The agent adds the device later, as a free one."""
    address = "0000:3b:00.0"
    found = plan(replace(ROWS, devices=(replace(DEVICE, type="TPU"),)))
    assert found.devices == ()
    assert found.unknown_uses == (UnknownUse(ARQ.uuid, HOST, address, ARQ.instance),)
    found = plan(replace(ROWS, control_paths=()))
    assert [use.address for use in found.unknown_uses] == [address], "the one of the handle"
    found = plan(replace(ROWS, devices=(), deployables=(), handles=()))
    assert [use.address for use in found.unknown_uses] == [None]
    assert plan().unknown_uses == ()
    second = replace(ARQ, id=8, uuid=make_uuid(8), group_id=3)
    assert plan(replace(ROWS, arqs=(second,))).unknown_uses == (), "its device is closed"


@pytest.mark.parametrize(
    ("state", "dirty"), [("available", False), ("cleaning", True), ("error", True), (None, False)]
)
def test_device_that_may_have_data_is_dirty(state: str | None, dirty: bool) -> None:
    (device,) = plan(replace(ROWS, devices=(replace(DEVICE, state=state),))).devices
    assert device.dirty is dirty


def test_child_of_a_dropped_deployable_has_no_parent() -> None:
    parent = replace(DEPLOYABLE, id=12, uuid=make_uuid(12), name=f"{HOST}_card", provider=None)
    child = replace(DEPLOYABLE, parent_id=12)
    found = plan(replace(ROWS, deployables=(parent, child)))
    (value,) = found.devices[0].value.deployables
    assert value.parent is None


@given(
    st.text(max_size=30) | st.dictionaries(st.text(max_size=8), st.text(max_size=8)).map(json.dumps)
)
def test_any_text_is_a_pci_address_or_invalid(text: str) -> None:
    try:
        address = parse_pci_info(text)
    except Invalid:
        return
    assert json.loads(text).keys() >= {"domain", "bus", "device", "function"}, address


@given(
    st.lists(
        st.tuples(st.sampled_from(["PCI", "MDEV", "X"]), st.sampled_from([INFO, "{}", "no"])),
        max_size=4,
    ),
    st.sampled_from(["Bound", "Unbound"]),
)
def test_each_handle_and_request_is_taken_or_dropped(
    kinds: list[tuple[str, str]], state: str
) -> None:
    handles = tuple(
        HandleRow(100 + n, str(uuid4()), 2, kind, info) for n, (kind, info) in enumerate(kinds)
    )
    arqs = tuple(
        replace(ARQ, id=200 + n, uuid=str(uuid4()), handle_id=handle.id, state=state)
        for n, handle in enumerate(handles)
    )
    found = plan(replace(ROWS, handles=handles, arqs=arqs))
    taken = {uuid for device in found.devices for uuid in device.handles.values()}
    dropped = {drop.name for drop in found.drops}
    assert {h.uuid for h in handles} == taken | (dropped & {h.uuid for h in handles})
    assert {arq.handle for arq in found.arqs} <= taken
    assert {a.uuid for a in arqs} == {a.uuid for a in found.arqs} | (
        dropped & {a.uuid for a in arqs}
    )
