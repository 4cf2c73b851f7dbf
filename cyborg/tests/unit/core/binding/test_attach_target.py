# SPDX-License-Identifier: Apache-2.0
"""The key ``accel:attach_target`` of a device profile."""

import re

import pytest

from cyborg.core.binding import profile
from cyborg.core.binding.profile import (
    REQUIRED_INFO,
    AttachTarget,
    check_targets,
    check_user,
    explain_missing_info,
    find_target,
    is_for_host,
    parse_group,
)
from cyborg.core.errors import Conflict, Invalid

DEVICE, PROFILE = "0000:3b:00.0", "sriov"


@pytest.mark.parametrize(
    ("accel", "target"),
    [
        ({}, AttachTarget.INSTANCE),
        ({"accel:attach_target": "instance"}, AttachTarget.INSTANCE),
        ({"accel:attach_target": "port"}, AttachTarget.PORT),
        ({"accel:attach_target": "host"}, AttachTarget.HOST),
    ],
)
def test_known_target_is_found(accel: dict[str, str], target: AttachTarget) -> None:
    group = parse_group({"resources:CUSTOM_NIC": "1", **accel}, "group")
    check_targets([group])
    assert find_target(group, PROFILE) is target
    assert is_for_host(group.to_dict()) is (target is AttachTarget.HOST)


@pytest.mark.parametrize("value", ["Host", "Port", "x" * 255])
def test_unknown_target_is_refused_with_the_profile_and_the_values(value: str) -> None:
    group = parse_group({"resources:CUSTOM_NIC": "1", "accel:attach_target": value}, "group")
    expected = re.escape(repr(value)[:60]) + ", expected instance or port or host"
    with pytest.raises(Conflict, match=f"profile sriov: unknown value {expected}"):
        find_target(group, PROFILE)
    with pytest.raises(Invalid, match=rf"groups\[0\].*unknown value {expected}"):
        check_targets([group])


def test_handle_without_network_does_not_fit_a_port() -> None:
    network = {"physical_network": "physnet1"}
    assert explain_missing_info(AttachTarget.INSTANCE, {}, DEVICE, "context c") is None
    assert explain_missing_info(AttachTarget.PORT, network, DEVICE, "context c") is None
    for info in ({}, {"physical_network": ""}):
        reason = explain_missing_info(AttachTarget.PORT, info, DEVICE, "context c") or ""
        for part in (DEVICE, "of context c needs", "no physical_network", "set physical_networks"):
            assert part in reason


@pytest.mark.parametrize("target", AttachTarget)
def test_host_and_server_get_the_devices_for_them(target: AttachTarget) -> None:
    for_host = target is AttachTarget.HOST
    check_user([target], PROFILE, for_host=for_host)
    with pytest.raises(Conflict, match=f"device profile {PROFILE} is for ") as raised:
        check_user([target], PROFILE, for_host=not for_host)
    assert ("attach-host" in raised.value.message) is for_host


@pytest.mark.static
def test_each_target_is_documented() -> None:
    assert set(REQUIRED_INFO) == set(AttachTarget)
    for target in AttachTarget:
        assert f"\n``{target}``" in (profile.__doc__ or "")
