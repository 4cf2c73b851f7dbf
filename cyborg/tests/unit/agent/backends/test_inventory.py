# SPDX-License-Identifier: Apache-2.0
"""The merged inventory of several backends."""

from dataclasses import replace

import pytest

from cyborg.agent.backends.backend import MAX_ERROR, BackendSnapshot
from cyborg.agent.backends.inventory import collect
from cyborg.core.inventory import report
from cyborg.core.inventory.device import AttachHandle, HandleType
from cyborg.core.inventory.report import BackendState, BackendStatus, Report
from cyborg.tests.fixtures.hosts.scripted_driver import card

A, B = "0000:01:00.0", "0000:02:00.0"


def snapshot(
    name: str, *addresses: str, status: BackendStatus = BackendStatus.READY
) -> BackendSnapshot:
    return BackendSnapshot(
        BackendState(name, "puppet", status), tuple(card(a, name) for a in addresses)
    )


def test_collect_without_backends_has_digest() -> None:
    nothing = collect([])
    assert (nothing.states, nothing.devices) == ((), ())
    assert nothing.digest == report.digest([], [])


def test_collect_all_discovering_has_no_digest() -> None:
    looking = snapshot("b0", status=BackendStatus.DISCOVERING)
    assert collect([looking]).digest is None
    assert collect([looking, snapshot("b1", A)]).digest is not None
    assert collect([looking, snapshot("b1", status=BackendStatus.ERROR)]).digest is not None


def test_collect_same_device_belongs_to_first_backend() -> None:
    merged = collect([snapshot("b0", A), snapshot("b1", A, B)])
    assert [(d.address, d.backend) for d in merged.devices] == [(A, "b0"), (B, "b1")]
    assert merged.states[0].error is None
    assert merged.states[1].error == f"{A} is ignored: backend b0 already reports it"
    assert merged.states[1].status is BackendStatus.READY


def test_collect_same_deployable_address_belongs_to_first_backend() -> None:
    other = BackendSnapshot(
        BackendState("b1", "puppet", BackendStatus.READY),
        (card("0000:09:00.0", "b1"), card(B, "b1")),
    )
    same_part = card("0000:09:00.0").deployables
    first = BackendSnapshot(
        BackendState("b0", "puppet", BackendStatus.READY),
        (replace(card(A, "b0"), deployables=same_part),),
    )
    merged = collect([first, other])
    assert [d.address for d in merged.devices] == [A, B]
    Report("h", "e", 1, str(merged.digest), merged.states, merged.devices)


@pytest.mark.parametrize("type_", [HandleType.PCI, HandleType.VFIO])
def test_collect_same_pci_function_belongs_to_first_backend(type_: HandleType) -> None:
    """Otherwise a faulty driver could allocate a function of another backend."""
    function = AttachHandle(A, type_)
    views = [
        BackendSnapshot(
            BackendState(name, "puppet", BackendStatus.READY),
            (card(at, name, handles=(function,)),),
        )
        for name, at in (("b0", B), ("b1", "0000:09:00.0"))
    ]
    merged = collect([*views, snapshot("b2", A)])
    assert [(d.address, d.backend) for d in merged.devices] == [(B, "b0")]
    assert merged.states[1].error == "0000:09:00.0 is ignored: backend b0 already reports it"
    assert merged.states[2].error == f"{A} is ignored: backend b0 already reports it"


def test_collect_long_error_is_truncated() -> None:
    many = [f"0000:{n:02x}:00.0" for n in range(100)]
    merged = collect([snapshot("b0", *many), snapshot("b1", *many)])
    assert len(str(merged.states[1].error)) == MAX_ERROR


def test_digest_depends_on_devices_and_states() -> None:
    digests = {
        collect([snapshot("b0", A)]).digest,
        collect([snapshot("b0", A, B)]).digest,
        collect([snapshot("b0", A, status=BackendStatus.ERROR)]).digest,
        collect([snapshot("b1", A)]).digest,
    }
    assert len(digests) == 4
    assert collect([snapshot("b0", A)]).digest in digests
