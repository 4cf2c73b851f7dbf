# SPDX-License-Identifier: Apache-2.0
"""The key ``accel:attach_target`` of a device profile: who uses the device.

============  ====================================================================================
value         meaning
============  ====================================================================================
``instance``  a device of the flavor, the default: any handle fits
``port``      a Neutron port: Nova reads ``physical_network`` in the handle's info, and fails with
              a KeyError while it builds the server if there is none
``host``      a program of the host: the device is attached to its host, no server can have it
============  ====================================================================================

A bind refuses other values. Before version 2.5 of the API, the value of each ``accel:`` key is free
text, so an older profile can have such a value.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from cyborg.core.binding.profile import Group
from cyborg.core.errors import Conflict, Invalid

KEY = "attach_target"


class AttachTarget(StrEnum):
    """Values of ``accel:attach_target``."""

    INSTANCE = "instance"
    PORT = "port"
    HOST = "host"


REQUIRED_INFO: Mapping[AttachTarget, tuple[str, ...]] = {
    AttachTarget.INSTANCE: (),
    AttachTarget.PORT: ("physical_network",),
    AttachTarget.HOST: (),
}
"""Keys that the info of a handle must have."""

_EXPECTED = " or ".join(AttachTarget)
_ACCEL_KEY = f"accel:{KEY}"


def check_targets(groups: Iterable[Group]) -> None:
    """Raise Invalid if a group of a new profile has an unknown target."""
    for number, group in enumerate(groups):
        if group.accel.get(KEY, AttachTarget.INSTANCE) not in list(AttachTarget):
            where = f"groups[{number}]['accel:{KEY}']"
            raise Invalid(
                f"{where}: unknown value {group.accel[KEY]!r:.60}, expected {_EXPECTED}",
                field=where,
            )


def find_target(group: Group, profile: str) -> AttachTarget:
    """Return the target of a group of a profile. Raise Conflict if it is unknown."""
    value = group.accel.get(KEY, AttachTarget.INSTANCE)
    try:
        return AttachTarget(value)
    except ValueError:
        raise Conflict(
            f"accel:{KEY} of device profile {profile}: unknown value {value!r:.60}, expected "
            f"{_EXPECTED}; create another profile for the flavor or port",
            device_profile=profile,
        ) from None


def is_for_host(group: Mapping[str, str]) -> bool:
    """Return whether the device of an ARQ is for its host; ``group`` is the group of the ARQ."""
    return group.get(_ACCEL_KEY) == AttachTarget.HOST


def check_user(targets: Iterable[AttachTarget], profile: str, *, for_host: bool) -> None:
    """Raise Conflict unless devices with these targets can be attached to a host, or to a server.

    ``profile`` is the name of their device profile.
    """
    wrong = sorted(target for target in targets if (target is AttachTarget.HOST) != for_host)
    if not wrong:
        return
    if for_host:
        text = (
            f"is for a server: only devices of a profile or context with {_ACCEL_KEY}=host can be "
            "attached to a host"
        )
    else:
        text = (
            f"is for the host itself, because its {_ACCEL_KEY} is host: attach it with "
            "cyborg attach-host, or use another profile for the server"
        )
    raise Conflict(f"device profile {profile} {text}", device_profile=profile)


def explain_missing_info(
    target: AttachTarget, info: Mapping[str, str], device: str, requester: str
) -> str | None:
    """Return why a handle of a device does not fit a target; None if it fits.

    ``requester`` is the object with the target: ``core.arq.device_contexts.describe_profile``.
    """
    missing = [key for key in REQUIRED_INFO[target] if not info.get(key)]
    if not missing:
        return None
    return (
        f"handles of device {device} have no {', '.join(missing)}, which accel:{KEY}={target} of "
        f"{requester} needs: set physical_networks in the section of its driver nic, "
        "or require the trait CUSTOM_PHYSNET_<NETWORK> in the profile"
    )
