# SPDX-License-Identifier: Apache-2.0
import pytest

from cyborg.core.attachments.attachment import (
    ATTACH_STEPS,
    FLOWS,
    RELEASE_STEPS,
    Mode,
    Step,
    describe_target,
    find_step,
    first_detach_step,
    first_undo_step,
    next_step,
    parse_mode,
    parse_target,
    request_key,
)
from cyborg.core.attachments.server import (
    RENEWING_EVENTS,
    Action,
    Event,
    Server,
    has_no_guest,
    has_renewed,
    is_pending,
    latest_marker,
    may_have_composed,
    newer_actions,
    renewing_actions,
)
from cyborg.core.errors import Invalid, Unavailable


def walk(step: Step | None, mode: Mode = Mode.NEXT_BOOT, *, reboot: bool = False) -> list[Step]:
    found = []
    while step is not None:
        found.append(step)
        step = next_step(step, mode, reboot=reboot)
    return found


def test_steps_follow_each_other() -> None:
    in_guest = {Step.PLUG, Step.UNPLUG}
    attach = [step for step in ATTACH_STEPS if step not in in_guest]
    assert walk(Step.ALLOCATE, reboot=True) == attach
    assert walk(Step.ALLOCATE) == attach[:-1]
    assert walk(Step.HIDE, reboot=True) == [step for step in RELEASE_STEPS if step not in in_guest]
    assert {*ATTACH_STEPS, *RELEASE_STEPS} == set(Step)


def test_only_steps_of_the_mode_are_found() -> None:
    assert find_step("reboot", Mode.NEXT_BOOT) is Step.REBOOT
    assert find_step("unplug", Mode.LIVE) is Step.UNPLUG
    for step, mode in (("reboot", Mode.LIVE), ("plug", Mode.NEXT_BOOT), ("hide", Mode.HOST)):
        assert find_step(step, mode) is None
    assert find_step("fly", Mode.HOST) is None


@pytest.mark.parametrize("reboot", [False, True])
def test_live_attachment_is_plugged_and_never_rebooted(reboot: bool) -> None:
    steps = walk(Step.ALLOCATE, Mode.LIVE, reboot=reboot)
    assert steps == [step for step in ATTACH_STEPS if step is not Step.REBOOT]
    assert steps.index(Step.PREPARE) < steps.index(Step.PLUG)
    steps = walk(Step.HIDE, Mode.LIVE, reboot=reboot)
    assert steps == list(RELEASE_STEPS)
    assert steps.index(Step.GUEST) < steps.index(Step.UNPLUG) < steps.index(Step.RELEASE)


@pytest.mark.parametrize("failed", ATTACH_STEPS)
def test_undo_releases_the_allocation_at_the_end(failed: Step) -> None:
    if failed is not Step.PLUG:
        steps = walk(first_undo_step(failed, Mode.NEXT_BOOT))
        assert set(steps) <= set(RELEASE_STEPS)
        assert steps[-1] is Step.SHRINK
        # Only from this step on can a guest have the devices.
        assert (Step.GUEST in steps) == (failed is Step.REBOOT)
    if failed is not Step.REBOOT:
        steps = walk(first_undo_step(failed, Mode.LIVE), Mode.LIVE)
        assert steps[-1] is Step.SHRINK
        may_have_devices = failed in (Step.PLUG, Step.EXPOSE)
        assert (Step.UNPLUG in steps) == may_have_devices


def test_host_has_no_step_of_a_guest() -> None:
    assert walk(Step.ALLOCATE, Mode.HOST) == [Step.ALLOCATE, Step.BIND, Step.PREPARE]
    steps = [Step.RELEASE, Step.CLEAN, Step.SHRINK]
    assert walk(first_detach_step(Mode.HOST), Mode.HOST) == steps
    assert walk(first_undo_step(Step.PREPARE, Mode.HOST), Mode.HOST) == steps
    for failed in (Step.ALLOCATE, Step.BIND):
        assert walk(first_undo_step(failed, Mode.HOST), Mode.HOST) == [Step.SHRINK]
    assert {first_detach_step(mode) for mode in Mode if mode is not Mode.HOST} == {Step.HIDE}


@pytest.mark.parametrize("mode", Mode)
def test_undo_is_the_rest_of_the_detach(mode: Mode) -> None:
    flow = FLOWS[mode]
    undos = [flow.detach.index(undo) for undo in flow.attach.values()]
    assert undos == sorted(undos, reverse=True), "a later step has more to undo"
    assert walk(flow.detach[0], mode) == list(flow.detach)


def test_target_is_an_instance_or_a_host() -> None:
    uuid = "0f4b1d5e-6c0a-4b7e-9d3a-2f8c1e7a9b60"
    assert parse_target({"instance_uuid": uuid.upper()}) == (uuid, None)
    assert parse_target({"hostname": "compute-1", "instance_uuid": None}) == (None, "compute-1")
    assert describe_target(uuid, "compute-1") == f"server {uuid}"
    assert describe_target(None, "compute-1") == "host compute-1"
    for request, field in (
        ({}, "instance_uuid"),
        ({"hostname": "a", "instance_uuid": uuid}, "instance_uuid"),
        ({"instance_uuid": "a"}, "instance_uuid"),
        ({"hostname": "a" * 256}, "hostname"),
        ({"hostname": ["a"]}, "hostname"),
    ):
        with pytest.raises(Invalid) as found:
            parse_target(request)
        assert found.value.details["field"] == field


def test_key_of_a_request_tells_targets_and_selected_things_apart() -> None:
    keys = [
        request_key("0f4b1d5e-6c0a-4b7e-9d3a-2f8c1e7a9b60", None, "a"),
        request_key(None, "compute-1", "a"),
        request_key(None, "compute-1", "b"),
        request_key(None, "x" * 255, "a"),
        request_key(None, "x" * 254, "y" * 255),
    ]
    assert len(set(keys)) == len(keys)
    assert max(map(len, keys)) <= 300  # the column


def test_mode() -> None:
    assert parse_mode(None, for_host=True) is parse_mode("host", for_host=True) is Mode.HOST
    for value, for_host in (("host", False), ("live", True), ("next-boot", True), ([], True)):
        with pytest.raises(Invalid, match=r"mode: .* expected"):
            parse_mode(value, for_host=for_host)
    assert parse_mode(None) is parse_mode("next-boot") is Mode.NEXT_BOOT
    assert parse_mode("live") is Mode.LIVE
    for wrong in ("Live", "", 1, ["next-boot"]):
        with pytest.raises(Invalid) as found:
            parse_mode(wrong)
        assert found.value.details["field"] == "mode"


def actions(*names: str, user: str = "user") -> list[Action]:
    """Return actions, the newest first; the request of each is its number from the oldest."""
    oldest = [Action(name, f"req-{n}", user) for n, name in enumerate(names)]
    return oldest[::-1]


def test_actions_since_a_marker() -> None:
    found = actions("create", "stop", "start")
    assert [action.name for action in newer_actions(found, "req-0")] == ["start", "stop"]
    assert newer_actions(found, latest_marker(found)) == []
    assert newer_actions(found, "req-lost") == found
    assert latest_marker([]) == ""


@pytest.mark.parametrize(
    ("names", "composed", "renewed"),
    [
        ((), False, False),
        (("stop",), False, False),
        (("lock", "unlock", "pause", "unpause"), False, False),
        (("reboot",), True, False),
        (("stop", "start"), True, True),
        (("rebuild",), True, True),
        (("resume",), True, False),
    ],
)
def test_guest_has_the_devices_of_its_last_start(
    names: tuple[str, ...], composed: bool, renewed: bool
) -> None:
    found = actions("create", *names)
    assert may_have_composed(found, "req-0") is composed
    assert bool(renewing_actions(found, "req-0", "cyborg")) is renewed


def test_only_own_reboots_are_certainly_hard() -> None:
    found = actions("create", "reboot", user="cyborg")
    assert renewing_actions(found, "req-0", "cyborg") == found[:1]
    assert not renewing_actions(found, "req-0", "other")
    assert not renewing_actions(found, "req-0", None)
    assert not renewing_actions(found, "req-1", "cyborg")


def test_missing_marker_proves_no_start() -> None:
    found = actions("create", "start", "reboot", user="cyborg")
    assert not renewing_actions(found, "req-lost", "cyborg")
    assert may_have_composed(found, "req-lost")
    assert len(renewing_actions(found, "", "cyborg")) == 2


@pytest.mark.parametrize(
    ("event", "renewed", "pending"),
    [
        (Event("compute_reboot_instance", True, "Success"), True, False),
        (Event("compute_reboot_instance", True, "Error"), False, False),
        (Event("compute_reboot_instance", False, None), False, True),
        (Event("conductor_reboot_instance", True, "Success"), False, True),
        (None, False, True),
    ],
)
def test_only_the_event_of_the_host_proves_a_start(
    event: Event | None, renewed: bool, pending: bool
) -> None:
    action, events = Action("reboot", "req-1", "cyborg"), [event] if event else []
    assert has_renewed(action, events) is renewed
    assert is_pending(action, events) is pending
    assert not has_renewed(Action("lock", "req-1", "cyborg"), events)
    assert "evacuate" not in RENEWING_EVENTS


def server(status: str, host: str | None, visible: bool = True) -> Server:
    return Server("u", status, "p", host, host, None, False, "profile", visible)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (server("ACTIVE", "n"), False),
        (server("SHUTOFF", "n"), True),
        (server("SHELVED_OFFLOADED", None), True),
        (server("ERROR", None), True),
        (server("ACTIVE", None, visible=False), None),
        (server("UNKNOWN", None), None),
    ],
)
def test_hidden_host_is_not_the_absence_of_a_guest(shown: Server, expected: bool | None) -> None:
    if expected is None:
        with pytest.raises(Unavailable, match="does not show"):
            has_no_guest(shown)
    else:
        assert has_no_guest(shown) is expected
