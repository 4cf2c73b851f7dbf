# SPDX-License-Identifier: Apache-2.0
"""Serialisation of reports for the bus."""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import (
    Ability,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
)
from cyborg.core.inventory.plan import flatten
from cyborg.core.inventory.report import BackendState, BackendStatus, Report, digest
from cyborg.core.validation import MAX_GENERATION
from cyborg.tests.fixtures.hosts import strategies

REPORT = Report(
    host="compute-1",
    epoch="0f0e0d0c-0b0a-4908-8706-050403020100",
    generation=7,
    digest="0" * 64,
    backends=(
        BackendState("gen0", "generic", BackendStatus.READY),
        BackendState("fake", "fake", BackendStatus.ERROR, "discovery timed out"),
    ),
    devices=(
        Device(
            address="0000:3d:00.0",
            type=DeviceType.QAT,
            vendor="8086",
            model="C62x",
            backend="gen0",
            std_board_info={"class": "0b4000"},
            vendor_board_info={"firmware": "4.1"},
            numa_node=0,
            serial="s1",
            abilities=frozenset({Ability.PROGRAMS, Ability.PREPARES}),
            deployables=(
                Deployable(
                    address="0000:3d:00.0",
                    resource_class="CUSTOM_QAT",
                    traits=frozenset({"CUSTOM_B", "CUSTOM_A"}),
                    attributes={"kernel_driver": "vfio-pci"},
                    bitstream_id="b1",
                    handles=(AttachHandle("0000:3d:01.0", HandleType.PCI, {"domain": "0000"}),),
                ),
                Deployable(address="0000:3d:00.0/1", resource_class="FPGA", parent="0000:3d:00.0"),
            ),
        ),
    ),
)


def golden(name: str) -> dict[str, Any]:
    """Return a golden message of a released version."""
    text = resources.files("cyborg.tests.unit.core.inventory").joinpath("golden", name).read_text()
    message: dict[str, Any] = json.loads(text)
    return message


def test_dump_format_1_matches_golden() -> None:
    assert REPORT.dump() == golden("report-1.json")


def test_load_format_1_golden() -> None:
    assert Report.load(golden("report-1.json")) == REPORT


@given(strategies.reports())
def test_report_round_trip(report: Report) -> None:
    assert Report.load(json.loads(json.dumps(report.dump()))) == report


def test_load_ignores_unknown_keys() -> None:
    body = golden("report-1.json")
    for part in (body, body["devices"][0], body["devices"][0]["deployables"][0]):
        part["new"] = {"from": "the future"}
    body["devices"][0]["deployables"][0]["handles"][0]["new"] = 1
    assert Report.load(body) == REPORT


def test_load_ignores_unknown_abilities() -> None:
    body = golden("report-1.json")
    body["devices"][0]["abilities"].append("levitates")
    assert Report.load(body) == REPORT


def test_load_without_abilities() -> None:
    body = golden("report-1.json")
    del body["devices"][0]["abilities"]
    assert Report.load(body).devices[0].abilities == frozenset()


def test_load_optional_keys() -> None:
    body = golden("report-1.json")
    for key in ("numa_node", "serial", "health", "setup_required", "vendor_board_info"):
        del body["devices"][0][key]
    assert Report.load(body).devices[0].serial is None


@pytest.mark.parametrize("number", [0, 2, -1, "x", "1", None, True, 1.0, float("inf")])
def test_load_unknown_format_is_rejected(number: object) -> None:
    with pytest.raises(Invalid):
        Report.load({**golden("report-1.json"), "format": number})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("setup_required", "false"),
        ("reboot_required", 1),
        ("numa_node", "0"),
        ("numa_node", 0.5),
        ("numa_node", float("inf")),
        ("numa_node", True),
        ("serial", 7),
        ("health", "fine"),
        ("type", "TOASTER"),
        ("deployables", "none"),
        ("std_board_info", {"class": 7}),
        ("abilities", "prepares"),
        ("abilities", [7]),
        ("deliverable", 1),
        ("deliverable", None),
        ("undeliverable_reason", 7),
        ("topology", {"link_width": 8}),
        ("topology", "0000:00"),
    ],
)
def test_load_wrong_type_is_rejected(key: str, value: Any) -> None:
    body = golden("report-1.json")
    body["devices"][0][key] = value
    with pytest.raises(Invalid):
        Report.load(body)


@given(st.data())
def test_load_damaged_gives_report_or_invalid(data: st.DataObject) -> None:
    body = golden("report-1.json")
    part: Any = body
    while True:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        key = data.draw(st.sampled_from(keys))
        if not part[key] or not isinstance(part[key], dict | list) or data.draw(st.booleans()):
            break
        part = part[key]
    part[key] = data.draw(
        st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.just([{}])
    )
    try:
        Report.load(body)
    except Invalid as exc:
        assert exc.message


@given(strategies.hosts(), st.randoms(use_true_random=False))
def test_digest_ignores_order(host: tuple[Device, ...], order: Any) -> None:
    def shuffled(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(order.sample(values, len(values)))

    other = [
        replace(
            device,
            deployables=shuffled(
                [replace(p, handles=shuffled(p.handles)) for p in device.deployables]
            ),
        )
        for device in shuffled(host)
    ]
    backends = [BackendState(n, "fake", BackendStatus.READY) for n in ("a", "b", "c")]
    assert digest(host, backends) == digest(other, shuffled(backends))


@pytest.mark.slow
@given(strategies.hosts(), strategies.hosts())
def test_digest_differs_by_host(left: tuple[Device, ...], right: tuple[Device, ...]) -> None:
    same = flatten(left) == flatten(right)
    assert (digest(left, []) == digest(right, [])) == same


def test_digest_covers_backends() -> None:
    ready = BackendState("a", "fake", BackendStatus.READY)
    failed = BackendState("a", "fake", BackendStatus.ERROR, "x")
    assert digest([], [ready]) != digest([], [failed])


GEN0 = REPORT.backends[0]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (replace(REPORT, host="h" * 256), "host"),
        (replace(REPORT, host="a\tb"), "host"),
        (replace(REPORT, digest="0" * 65), "digest"),
        (replace(REPORT, generation=-1), "generation"),
        (replace(REPORT, generation=MAX_GENERATION + 1), "generation"),
        (replace(REPORT, host="h" * 200), "provider name"),
        (replace(REPORT, backends=(GEN0, GEN0)), "drivers"),
        (replace(REPORT, backends=(replace(GEN0, name="n" * 256),)), "backend name"),
        (replace(REPORT, backends=(replace(GEN0, driver="n" * 256),)), "driver name"),
        (replace(REPORT, backends=(replace(GEN0, remarks=("x",) * 65),)), "backends"),
        (replace(REPORT, backends=(replace(GEN0, remarks=("x" * 4097,)),)), "remark"),
    ],
)
def test_check_limits_names_the_field(changed: Report, field: str) -> None:
    REPORT.check_limits()
    replace(REPORT, generation=MAX_GENERATION).check_limits()
    with pytest.raises(Invalid) as exc:
        changed.check_limits()
    assert exc.value.details["field"] == field
