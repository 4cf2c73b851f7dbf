# SPDX-License-Identifier: Apache-2.0
"""FPGA cards, network cards and functions of replayed hosts that break, in the whole service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.core.capture.model import parse_fault
from cyborg.testing import captures
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.hosts.replayed_day import FUNCTIONS
from cyborg.tests.fixtures.hosts.replayed_hosts import Refused, ReplayedCloud, Server, running
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.functional.test_replay import FAULTS, HOSTS, events_of

pytestmark = pytest.mark.slow

FPGA, OTHER_FPGA = "0000:3d:00.0", "0000:b1:00.0"  # the other one has a virtual function
NIC, OTHER_NIC = "0000:c1:00.0", "0000:e1:00.0"
FACTORY = "f7df405cbd7acf7222f144b0b93acd18"
NETWORK = "CUSTOM_NIC"
STUCK, VF_CARD, VF = "stuck", "0000:18:00.0", "CUSTOM_VF"
REASONS = {"eio": "the state 'write error'", "stuck_reset": "is in reset"}  # of the health
NOVA = FakeNova()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayedCloud]:
    """Yield a cloud with a host for each fault, which affects a card of each family."""
    faults = {host: f"{FPGA}:{fault}@program,{NIC}:{fault}@create" for host, fault in HOSTS.items()}
    families = ("fpga", "nic")
    with (
        serve_nova(NOVA),
        running(
            tmp_path_factory.mktemp("broken"),
            list(HOSTS),
            capture=captures.load_all(["pac-d5005", "connectx-6"]),
            faults=faults,
            drivers={family: captures.DRIVERS[family] for family in families},
            resource_classes={family: captures.RESOURCE_CLASSES[family] for family in families},
            nova_url=NOVA.url,
        ) as cloud,
    ):
        for function in FUNCTIONS:
            cloud.add_image(function)
        yield cloud


def host_of(fault: str) -> str:
    return next(host for host, name in HOSTS.items() if name == fault)


def check_errors(cloud: ReplayedCloud, card: str, other: str, fault: str) -> None:
    """Check that a card shows its last error unless it has disappeared, and the other one none."""
    errors = {device["address"]: device["job_errors"] for device in cloud.devices(host_of(fault))}
    assert errors[other] == []
    if fault != "disappears":
        assert FAULTS[fault] in " ".join(errors[card])


def bind_when_clean(cloud: ReplayedCloud, host: str, profile: str) -> Server:
    """Bind the working FPGA card when its last server has been cleaned up."""

    def bind() -> Server | None:
        try:
            return cloud.bind(host, OTHER_FPGA, "FPGA", profile)
        except Refused as exc:
            if "being cleaned" not in str(exc):
                raise
            return None

    server: Server = wait_until("the card is clean", bind)
    return server


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS)
def test_fpga_card_that_breaks_fails_the_bind_with_its_reason(
    broken: ReplayedCloud, fault: str
) -> None:
    host, (first, second) = host_of(fault), (f"FPGA-{function}" for function in FUNCTIONS)
    earlier = {job["uuid"] for job in broken.jobs(host)}
    with pytest.raises(Refused, match=FAULTS[fault]):
        broken.bind(host, FPGA, "FPGA", first)
    jobs = [job for job in broken.jobs(host) if job["uuid"] not in earlier]
    (instance,) = [job["subject"] for job in jobs if job["kind"] == "prepare"]
    wait_until("Nova has the event", lambda: instance in events_of(NOVA, "failed"))
    assert instance not in events_of(NOVA, "completed")
    check_errors(broken, FPGA, OTHER_FPGA, fault)
    if fault == "ebusy":
        assert broken.shown_function(host, FPGA) == FACTORY
    elif fault in REASONS:
        # The port stays in reset: the card is not given to another server.
        assert broken.shown_function(host, FPGA) is None
        wait_until(
            "it is unhealthy",
            lambda: REASONS[fault] in str(broken.device(host, FPGA)["health_reason"]),
            300,
        )
        wait_until("it is reserved", lambda: broken.free_units(host, FPGA, "FPGA") == 0)
    for profile, function in zip((first, second), FUNCTIONS, strict=True):
        server = bind_when_clean(broken, host, profile)
        assert broken.shown_function(host, OTHER_FPGA) == function
        broken.release(server)


@pytest.mark.matrix
def test_fpga_card_that_is_busy_keeps_the_function_of_its_last_image(broken: ReplayedCloud) -> None:
    host, (first, second) = "ebusy", (f"FPGA-{function}" for function in FUNCTIONS)
    broken.release(bind_when_clean(broken, host, first))
    broken.kernel(host).add_fault(parse_fault(f"{OTHER_FPGA}:ebusy=1@program"))
    with pytest.raises(Refused, match="Device or resource busy; the region is unchanged"):
        bind_when_clean(broken, host, second)
    assert broken.shown_function(host, OTHER_FPGA) == FUNCTIONS[0]
    server = bind_when_clean(broken, host, second)
    assert broken.shown_function(host, OTHER_FPGA) == FUNCTIONS[1]
    broken.release(server)


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS)
def test_network_card_that_breaks_fails_the_layout_with_its_reason(
    broken: ReplayedCloud, fault: str
) -> None:
    host = host_of(fault)
    broken.release(broken.bind(host, NIC, NETWORK))
    job = broken.set_layout(host, NIC, "vfs-2")
    assert job["state"] == "failed"
    assert FAULTS[fault] in str(job["error"])
    check_errors(broken, NIC, OTHER_NIC, fault)
    # Its virtual functions were removed first: none of them is given to a server.
    wait_until("nothing is offered", lambda: broken.free_units(host, NIC, NETWORK) == 0)
    with pytest.raises(Refused):
        broken.bind(host, NIC, NETWORK)
    assert broken.set_layout(host, OTHER_NIC, "vfs-2")["state"] == "done"
    wait_until("two are offered", lambda: broken.free_units(host, OTHER_NIC, NETWORK) == 2)
    servers = [broken.bind(host, OTHER_NIC, NETWORK) for _ in range(2)]
    assert {server.handle for server in servers} == {"0000:e1:00.1", "0000:e1:00.2"}
    for server in servers:
        broken.release(server)


@pytest.mark.matrix
def test_function_that_cannot_be_reset_is_not_given_to_another_server_until_it_can(
    tmp_path: Path,
) -> None:
    drivers = {"generic": {**captures.DRIVERS["generic"], "reset": "required"}}
    with running(
        tmp_path,
        [STUCK],
        capture=captures.load("nic-vfs"),
        drivers=drivers,
        resource_classes={"generic": VF},
        release_timeout=1.0,
    ) as cloud:
        units = cloud.free_units(STUCK, VF_CARD, VF)
        server = cloud.bind(STUCK, VF_CARD, VF)
        kernel = cloud.kernel(STUCK)
        kernel.add_fault(parse_fault(f"{server.handle}:stuck_reset@reset"))
        cloud.unbind(server)
        arq = f"accelerator_requests/{server.arq}"
        wait_until(
            "it is UnbindFailed", lambda: cloud.call("GET", arq)["state"] == "UnbindFailed", 60
        )
        wait_until(
            "one is reserved", lambda: cloud.free_units(STUCK, VF_CARD, VF) == units - 1, 120
        )
        path, text = f"devices/{cloud.device(STUCK, VF_CARD)['uuid']}", FAULTS["stuck_reset"]
        # On a busy machine, the deadline may pass before the host has answered.
        wait_until(
            "its reason is shown", lambda: text in str(cloud.call("GET", path)["job_errors"]), 60
        )
        shown = cloud.call("GET", path)
        (error,) = shown["job_errors"]
        assert error.startswith(f"handle {server.handle}, release job ")
        assert error.endswith(f": {server.handle} could not be reset: {text}")
        assert shown["state"] == "ready", "its other functions can be used"
        others = [cloud.bind(STUCK, VF_CARD, VF) for _ in range(units - 1)]
        assert server.handle not in {other.handle for other in others}

        with kernel.lock:
            kernel._faults.clear()  # its reset works from now on
        wait_until("it is Unbound", lambda: cloud.call("GET", arq)["state"] == "Unbound")
        wait_until("none is reserved", lambda: cloud.free_units(STUCK, VF_CARD, VF) == units)
        assert cloud.device(STUCK, VF_CARD)["job_errors"] == []
        assert cloud.bind(STUCK, VF_CARD, VF).handle == server.handle
