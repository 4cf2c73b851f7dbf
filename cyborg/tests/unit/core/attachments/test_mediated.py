# SPDX-License-Identifier: Apache-2.0
"""The proof that no guest will get a released device, against a model of Nova's libvirt driver."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.attachments import server as core
from cyborg.core.attachments.attachment import Mode
from cyborg.core.attachments.server import (
    Action,
    Event,
    Server,
    check_exchangeable,
    check_mode,
    has_mediated_device,
    kept_error,
)
from cyborg.core.errors import Conflict

# Operations of a server; ``soft`` is a soft reboot, ``user`` a reboot by another user, ``failed`` a
# rebuild that fails before it has begun.
OPERATIONS = ("reboot", "soft", "user", "stop", "start", "rebuild", "shelve", "unshelve", "failed")


@dataclass
class Nova:
    """A server of Nova 34 with libvirt, whose accelerator requests are not found any more.

    ``defined`` is whether the definition of the guest has the device: at each reboot and start,
    Nova adds the mediated devices of the old definition to the new one, and no other devices.
    """

    mediated: bool
    status: str = "ACTIVE"
    defined: bool = True
    actions: list[tuple[Action, Event]] = field(default_factory=list)

    def run(self, operation: str) -> None:
        """Run an operation, if the state of the server allows it."""
        before = {"start": "SHUTOFF", "unshelve": "SHELVED_OFFLOADED"}.get(operation, "ACTIVE")
        if operation in ("rebuild", "failed", "shelve") and self.status == "SHUTOFF":
            before = "SHUTOFF"
        if self.status != before:
            return
        if operation in ("reboot", "user", "start"):
            self.defined = self.defined and self.mediated
        elif operation in ("rebuild", "shelve"):
            self.defined = False
        if operation in ("stop", "start", "shelve", "unshelve"):
            self.status = {"stop": "SHUTOFF", "shelve": "SHELVED_OFFLOADED"}.get(
                operation, "ACTIVE"
            )
        name = {"soft": "reboot", "user": "reboot", "failed": "rebuild"}.get(operation, operation)
        user = "cyborg" if operation == "reboot" else "user"
        result = "Error" if operation == "failed" else "Success"
        action = Action(name, f"req-{len(self.actions)}", user)
        self.actions.insert(0, (action, Event(f"compute_{name}_instance", True, result)))

    def proves_release(self) -> bool:
        """Return whether the decisions allow the release of the device."""
        host = None if self.status == "SHELVED_OFFLOADED" else "compute-1"
        server = Server("u", self.status, "p", host, host, None, False, "profile")
        if core.has_no_guest(server, keeps_devices=self.mediated):
            return True
        found = [action for action, _ in self.actions]
        renewing = core.renewing_actions(found, "", "cyborg", keeps_devices=self.mediated)
        events = dict(self.actions)
        return any(core.has_renewed(action, [events[action]]) for action in renewing)


@given(st.booleans(), st.lists(st.sampled_from(OPERATIONS), max_size=8), st.data())
def test_release_is_proved_only_if_no_later_start_gives_the_device_back(
    mediated: bool, operations: list[str], data: st.DataObject
) -> None:
    nova = Nova(mediated)
    for operation in operations:
        nova.run(operation)
    if not nova.proves_release():
        return
    # The guest may have been stopped with the device: then its next start must be without it.
    later = data.draw(st.lists(st.sampled_from(OPERATIONS), max_size=8))
    for operation in later:
        nova.run(operation)
        is_started = nova.status == "ACTIVE" and operation in ("start", "reboot", "user")
        assert not (is_started and nova.defined), (operations, later)


@pytest.mark.parametrize(
    ("operation", "mediated", "proved"),
    [
        ("reboot", False, True),
        ("reboot", True, False),
        ("user", False, False),
        ("stop", False, True),
        ("stop", True, False),
        ("rebuild", False, True),
        ("rebuild", True, True),
        ("failed", True, False),
        ("shelve", True, True),
    ],
)
def test_release_after_an_operation_depends_on_the_kind_of_device(
    operation: str, mediated: bool, proved: bool
) -> None:
    nova = Nova(mediated)
    nova.run(operation)
    assert nova.proves_release() is proved


def test_start_after_a_stop_proves_nothing_for_a_mediated_device() -> None:
    nova = Nova(mediated=True)
    nova.run("stop")
    nova.run("start")
    assert not nova.proves_release()
    assert nova.defined


def test_mode_next_boot_of_a_mediated_device_is_refused_with_the_other_mode() -> None:
    with pytest.raises(Conflict, match="use the mode live") as found:
        check_mode({"PCI", "MDEV"}, Mode.NEXT_BOOT, "profile vgpu")
    assert found.value.details["field"] == "mode"
    with pytest.raises(Conflict, match=r"the agent attaches.*use the mode live") as found:
        check_mode({"PCI", "VFIO"}, Mode.NEXT_BOOT, "profile vgpu")
    assert found.value.details["field"] == "mode"
    check_mode({"PCI", "TEST_PCI"}, Mode.NEXT_BOOT, "profile fpga")
    check_mode(set(), Mode.NEXT_BOOT, "profile fpga")
    for mode in (Mode.LIVE, Mode.HOST):
        check_mode({"MDEV", "VFIO"}, mode, "profile vgpu")


def test_successor_of_a_mediated_device_is_refused() -> None:
    with pytest.raises(Conflict, match="gets no successor"):
        check_exchangeable({"MDEV"}, "c")
    with pytest.raises(Conflict, match=r"the agent attaches.* it gets no successor"):
        check_exchangeable({"VFIO"}, "c")
    check_exchangeable({"PCI"}, "c")
    assert (
        has_mediated_device(()),
        has_mediated_device({"PCI"}),
        has_mediated_device({"MDEV"}),
    ) == (False, False, True)
    assert "rebuild, shelve or delete" in kept_error("u")
