# SPDX-License-Identifier: Apache-2.0
"""Sources of device sets: their options and the sets that they report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import NOT_OFFERED, AttachHandle, Device, HandleType
from cyborg.core.inventory.device_set import OfferMode, SetKind
from cyborg.drivers.device_sets.driver import DeviceSetDriver
from cyborg.drivers.gpu.facts import UNREAD
from cyborg.tests.unit.drivers.device_sets.members import (
    divided,
    in_mig_mode,
    make_device,
    slot,
    unread,
)

SWITCH = "00:01.0/15:00.0/16"


def make_source(devices: Mapping[str, Sequence[Device]], **more: Any) -> DeviceSetDriver:
    source = DeviceSetDriver("sets", {"kind": "numa", "members": list(devices), **more})

    def read(backend: str) -> Sequence[Device]:
        return devices[backend]

    source.read_devices = read
    return source


def describe(source: DeviceSetDriver) -> dict[str, tuple[int, str | None]]:
    """Return size and obstacle of each set, by the address of its deployable."""
    (device,) = source.discover()
    sets = {part.address: part.device_set for part in device.deployables}
    return {a: (found.size, found.obstacle) for a, found in sets.items() if found is not None}


def test_discover_reports_one_device_with_a_deployable_each_set() -> None:
    traits = ["CUSTOM_NUMA_NODE_1", "CUSTOM_H100"]
    gpus = [make_device(slot(n), numa=1, traits=[*traits, f"CUSTOM_{n}"]) for n in range(2)]
    options = {
        "sizes": ["1", "2"],
        "traits": ["CUSTOM_RACK_7"],
        "wanted": ["2:1"],
        "group": "row7",
    }
    source = make_source({"gpu": gpus}, **options)
    (device,) = source.discover()
    assert (device.address, device.backend, device.type) == ("sets", "sets", gpus[0].type)
    assert (device.vendor, device.numa_node) == ("10de", 1)
    pair, *singles = device.deployables
    assert [part.address for part in singles] == [f"sets:1-{slot(n)}" for n in range(2)]
    assert (pair.address, pair.handles) == (f"sets:2-{slot(0)}", ())
    assert pair.resource_class == "PGPU"
    assert pair.traits == {*traits, "CUSTOM_RACK_7", "CUSTOM_SET_NUMA", "CUSTOM_SET_SIZE_2"}
    assert pair.attributes == {"members": f"{slot(0)}, {slot(1)}"}
    found = pair.device_set
    assert found is not None
    assert (found.kind, found.mode, found.group) == (SetKind.NUMA, OfferMode.DISJOINT, "row7")
    assert (found.wanted, found.obstacle) == ({"2": 1}, None)
    assert [m.handle for m in found.members] == [slot(0), slot(1)]
    # What the agent requires of each device of a driver.
    assert Device.from_dict(json.loads(json.dumps(device.to_dict()))) == device
    assert source.grouped.devices == {slot(0), slot(1)}
    assert (source.abilities, source.remarks) == (frozenset(), ())


def test_discover_withholds_devices_without_a_set() -> None:
    gpus = [make_device(slot(n), numa=0) for n in range(3)]
    found = describe(make_source({"gpu": gpus}, sizes=["2"]))
    reason = "no set of kind numa and size 2 has it"
    assert found == {f"sets:2-{slot(0)}": (2, None), f"sets:1-{slot(2)}": (1, reason)}


def test_discover_mixed_withholds_only_devices_of_the_first_backend() -> None:
    gpus = [make_device(slot(n), f"{SWITCH}:0{n}.0" if n else "") for n in range(3)]
    nic = make_device(
        "0000:60:00.0",
        f"{SWITCH}:1f.0",
        backend="nic",
        resource_class="CUSTOM_NIC",
        functions=[f"0000:60:00.{n}" for n in range(1, 4)],
    )
    options = {"kind": "pcie", "members": ["gpu:1", "nic:1"], "resource_class": "CUSTOM_GPU_NIC"}
    source = make_source({"gpu": gpus, "nic": [nic]}, **options)
    found = describe(source)
    assert found.pop(f"sets:2-{slot(1)}") == found.pop(f"sets:2-{slot(2)}") == (2, None)
    ((address, (size, obstacle)),) = found.items()
    assert (address, size) == (f"sets:1-{slot(0)}", 1)
    assert obstacle is not None
    assert "near" in obstacle
    (device,) = source.discover()
    assert {part.resource_class for part in device.deployables} == {"CUSTOM_GPU_NIC"}


def test_discover_nvlink_pairs() -> None:
    gpus = [make_device(slot(n), nvlink_peers=slot(n ^ 1), nvlink_links="12") for n in range(4)]
    speeds = ("26562", "25781", "26562", "")
    gpus = [
        replace(gpu, topology={**gpu.topology, "nvlink_mbps": speed})
        for gpu, speed in zip(gpus, speeds, strict=True)
    ]
    source = make_source({"gpu": gpus}, kind="nvlink", sizes=["2"])
    (device,) = source.discover()
    assert [part.attributes["nvlinks"] for part in device.deployables] == ["12", "12"]
    assert all("CUSTOM_SET_NVLINK" in part.traits for part in device.deployables)
    # The slower one of a pair, and the known one of the other pair.
    found = [part.attributes["nvlink_mbps"] for part in device.deployables]
    assert found == ["25781", "26562"]
    traits = [{t for t in part.traits if "MBPS" in t} for part in device.deployables]
    assert traits == [{f"CUSTOM_NVLINK_{speed}_MBPS"} for speed in found]


@pytest.mark.parametrize("hidden", [True, False])
def test_discover_nvlink_pair_with_a_gpu_in_mig_mode_is_withheld(hidden: bool) -> None:
    """A card with one MIG-backed vGPU is offered alone: it uses no link then."""
    gpus = [make_device(slot(n), nvlink_peers=slot(n ^ 1)) for n in range(4)]
    source = make_source({"gpu": gpus}, kind="nvlink", sizes=["1", "2"])
    usual = describe(source)
    gpus[1] = in_mig_mode(gpus[1], hidden=hidden)
    found = describe(source)
    assert found.keys() == usual.keys()
    withheld = [name for name, (_, obstacle) in found.items() if obstacle is not None]
    (pair,) = (name for name in usual if name.startswith(f"sets:2-{slot(0)}"))
    assert set(withheld) == ({pair, f"sets:1-{slot(1)}"} if hidden else {pair})
    assert all("is in MIG mode" in str(found[name][1]) for name in withheld)


def test_discover_nvlink_pair_with_a_divided_gpu_is_withheld() -> None:
    gpus = [make_device(slot(n), nvlink_peers=slot(n ^ 1)) for n in range(4)]
    source = make_source({"gpu": gpus}, kind="nvlink", sizes=["1", "2"])
    usual = describe(source)
    gpus[1] = divided(gpus[1], 2)
    found = describe(source)
    assert found.keys() == usual.keys()
    withheld = {name for name, (_, obstacle) in found.items() if obstacle is not None}
    (pair,) = (name for name in usual if name.startswith(f"sets:2-{slot(0)}"))
    assert withheld == {pair, f"sets:1-{slot(1)}"}
    assert {found[name][1] for name in withheld} == {
        f"device {slot(1)} is divided into 2: apply another layout"
    }


@pytest.mark.parametrize("kind", ["nvlink", "numa"])
def test_discover_set_with_a_gpu_that_was_not_read_is_withheld(kind: str) -> None:
    """Without the GPU, sets of others would be found, which the next discovery removes."""
    gpus = [make_device(slot(n), numa=1, nvlink_peers=slot(n ^ 1)) for n in range(4)]
    source = make_source({"gpu": gpus}, kind=kind, sizes=["1", "2"])
    usual = describe(source)
    gpus[1] = unread(gpus[1])
    found = describe(source)
    assert found.keys() == usual.keys()
    withheld = {name for name, (_, obstacle) in found.items() if obstacle is not None}
    (pair,) = (name for name in usual if name.startswith(f"sets:2-{slot(0)}"))
    assert withheld == {pair, f"sets:1-{slot(1)}"}
    assert {found[name][1] for name in withheld} == {f"device {slot(1)} is withheld: {UNREAD}"}


def test_discover_gpu_that_was_not_read_without_a_set_has_this_reason() -> None:
    gpus = [make_device(slot(0)), unread(make_device(slot(1)))]
    found = describe(make_source({"gpu": gpus}, kind="nvlink", sizes=["2"]))
    assert found[f"sets:1-{slot(1)}"][1] == f"device {slot(1)} is withheld: {UNREAD}"


def used(device: Device) -> Device:
    """Return a GPU that offers nothing because the host uses it."""
    return replace(device, vendor_board_info={NOT_OFFERED: "the host uses it"}, deployables=())


def make_again(source: DeviceSetDriver, devices: Sequence[Device]) -> DeviceSetDriver:
    """Return the source after a restart of the agent, with other devices of the backend gpu."""
    again = DeviceSetDriver("sets", source.options)
    again.memory, again.read_devices = source.memory, lambda backend: devices
    return again


def test_discover_gpus_that_were_not_read_are_withheld_if_no_other_is_offered() -> None:
    """Their class and traits are those of the last GPU of their model that was offered."""
    whole = [make_device(slot(n), numa=1, traits=["CUSTOM_H100"]) for n in range(4)]
    gpus = [whole[0], *map(unread, whole[1:])]
    source = make_source({"gpu": gpus}, sizes=["1", "2"])
    describe(source)
    source = make_again(source, [used(gpus[0]), *gpus[1:]])
    found = describe(source)
    assert set(found) == {f"sets:2-{slot(1)}", *(f"sets:1-{slot(n)}" for n in range(1, 4))}
    assert all(UNREAD in str(obstacle) for _, obstacle in found.values())
    (device,) = source.discover()
    assert {part.resource_class for part in device.deployables} == {"PGPU"}
    assert all("CUSTOM_H100" in part.traits for part in device.deployables)


def test_discover_gpu_of_a_model_that_was_never_offered_is_left_out() -> None:
    gpus = [make_device(slot(0), numa=1), unread(make_device(slot(1), numa=1, model="A40"))]
    assert set(describe(make_source({"gpu": gpus}, sizes=["1"]))) == {f"sets:1-{slot(0)}"}


@given(
    st.sampled_from(["numa", "nvlink"]),
    st.lists(st.sampled_from([None, unread, in_mig_mode, used]), min_size=4, max_size=4),
)
def test_discover_shows_each_hidden_gpu_of_a_known_model_in_withheld_sets(
    kind: str, changes: list[Callable[[Device], Device] | None]
) -> None:
    whole = [
        make_device(slot(n), numa=1, nvlink_peers=",".join(slot(m) for m in range(4) if m != n))
        for n in range(4)
    ]
    source = make_source({"gpu": whole}, kind=kind, sizes=["1", "2"])
    source.discover()
    hides = {unread, in_mig_mode} if kind == "nvlink" else {unread}
    states = {gpu.address: change for gpu, change in zip(whole, changes, strict=True)}
    gpus = [gpu if (change := states[gpu.address]) is None else change(gpu) for gpu in whole]
    parts = [part for device in make_again(source, gpus).discover() for part in device.deployables]
    sets = [part.device_set for part in parts if part.device_set is not None]
    found = {member.device for each in sets for member in each.members}
    assert found == {address for address, state in states.items() if state in {None, *hides}}
    for each in sets:
        is_free = all(states[member.device] is None for member in each.members)
        assert (each.obstacle is None) is is_free


def test_discover_gpu_in_mig_mode_without_a_set_has_this_reason() -> None:
    gpus = [make_device(slot(n), nvlink_peers=slot(n ^ 1)) for n in range(3)]
    gpus[2] = in_mig_mode(gpus[2])
    found = describe(make_source({"gpu": gpus}, kind="nvlink", sizes=["2"]))
    assert "is in MIG mode" in str(found[f"sets:1-{slot(2)}"][1])
    gpus[2] = make_device(slot(2))
    found = describe(make_source({"gpu": gpus}, kind="nvlink", sizes=["2"]))
    assert "no set of kind nvlink" in str(found[f"sets:1-{slot(2)}"][1])


def test_discover_set_below_a_switch_ignores_the_mig_mode() -> None:
    gpus = [make_device(slot(n), numa=1, functions=[slot(n)]) for n in range(2)]
    gpus[0] = in_mig_mode(gpus[0], hidden=False)
    found = describe(make_source({"gpu": gpus}, sizes=["2"]))
    assert [obstacle for _, obstacle in found.values()] == [None]


def test_discover_single_gpu_has_no_speed_of_its_links() -> None:
    gpus = [make_device(slot(n), nvlink_peers=slot(n ^ 1), nvlink_mbps="5") for n in range(2)]
    (device,) = make_source({"gpu": gpus}, kind="nvlink", sizes=["1"]).discover()
    assert [part.attributes.get("nvlink_mbps") for part in device.deployables] == [None, None]
    assert not {t for part in device.deployables for t in part.traits if "MBPS" in t}


def test_discover_without_members_returns_nothing_and_warns() -> None:
    mediated = replace(
        make_device(slot(0)).deployables[0], handles=(AttachHandle("a", HandleType.MDEV),)
    )
    source = make_source({"gpu": [replace(make_device(slot(0)), deployables=(mediated,))]})
    assert source.discover() == []
    assert source.remarks == ("no device can be a member of a set of kind numa",)


def test_discover_before_the_members_fails_and_keeps_what_it_grouped() -> None:
    source = make_source({"gpu": [make_device(slot(0))]})
    source.discover()

    def fail(backend: str) -> Sequence[Device]:
        raise DriverFailed(f"backend {backend} has not discovered yet")

    source.read_devices = fail
    with pytest.raises(DriverFailed, match="backend gpu has not discovered yet"):
        source.discover()
    assert source.grouped.devices == {slot(0)}


@pytest.mark.parametrize("kind", ["numa", "nvlink"])
def test_discover_too_many_sets_fails(kind: str) -> None:
    peers = ",".join(slot(n) for n in range(33))
    gpus = [make_device(slot(n), numa=n, nvlink_peers=peers) for n in range(65)]
    source = make_source({"gpu": gpus}, kind=kind, sizes=["1", "2"])
    with pytest.raises(DriverFailed, match=r"at most 64 are allowed; choose fewer sizes"):
        source.discover()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": ""}, r"\[sets\] kind: found ''; expected one of fabric, nvlink, pcie, numa"),
        ({"members": []}, r"members: found ''; expected names of backends"),
        ({"members": ["gpu", "gpu"]}, "members: found 'gpu'"),
        ({"members": ["gpu", "nic:1"]}, "members: found 'gpu, nic:1'"),
        ({"members": ["gpu:0"]}, "members: found 'gpu:0'"),
        ({"members": ["gpu:3"]}, "found 'gpu:3'; expected 1, 2, 4, 8 or 16 as the number"),
        ({"members": ["gpu:8", "nic:9"]}, "at most 16 in all"),
        ({"kind": "nvlink", "members": ["gpu:1"]}, "members without numbers for the kind nvlink"),
        ({"members": ["gpu:1"], "sizes": ["1"]}, "sizes: .*expected no sizes, because"),
        ({"sizes": ["1", "3"]}, r"\[sets\] sizes: found '3'; expected some of 1, 2, 4, 8, 16"),
        ({"offer": "some"}, "offer: found 'some'; expected one of disjoint, all"),
        ({"wanted": ["4"]}, "wanted: found '4'; expected SIZE:NUMBER"),
        ({"wanted": ["4:1", "4:2"]}, "wanted: found '4:2'"),
        ({"wanted": ["4:1"], "sizes": ["2"]}, "wanted: found '4'; expected sizes among 2"),
        ({"wanted": ["4:1"], "offer": "all"}, "expected nothing with the offer all"),
        ({"resource_class": "VCPU"}, "resource_class: found 'VCPU'"),
        ({"traits": ["FAST"]}, "traits: found 'FAST'"),
        ({"group": "a\nb"}, "group: found"),
        ({"modules": ["0000:1b:00.0=1"]}, "modules: .*expected nothing for the kind numa"),
        ({"kind": "fabric", "modules": ["0000:1b:00.0=0"]}, "found '0000:1b:00.0=0'; expected ADD"),
        ({"kind": "fabric", "modules": ["1b:00.0=1", "0000:1b:00.0=2"]}, "found '0000:1b:00.0=2'"),
        ({"kind": "fabric", "modules": ["1b=1"]}, "modules: found '1b=1'"),
    ],
)
def test_options_invalid_value_raises_misconfigured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Misconfigured, match=message):
        make_source({"gpu": []}, **options)


def test_options_of_mixed_members_want_their_number() -> None:
    source = make_source({}, members=["gpu:2", "nic:1"], wanted=["3:4"])
    assert source.source.wanted == {"3": 4}
    assert source.member_backends == {"gpu", "nic"}
