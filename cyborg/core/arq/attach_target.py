# SPDX-License-Identifier: Apache-2.0
"""The key ``accel:attach_target`` of a device profile: what Nova attaches a device with.

============  ====================================================================================
value         meaning
============  ====================================================================================
``instance``  a device of the flavor, the default: any handle fits
``port``      a Neutron port: Nova reads ``physical_network`` in the handle's info, and fails with
              a KeyError while it builds the server if there is none
============  ====================================================================================

Other values are refused by a bind: Nova attaches the device of each ARQ to the guest, so that no
device can be for the host itself. A profile can have them if it was created before version 2.5 of
the API, in which each value of an ``accel:`` key is free text.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from cyborg.core.arq.profile import Group
from cyborg.core.errors import Conflict, Invalid

KEY = "attach_target"


class AttachTarget(StrEnum):
    """Values of ``accel:attach_target``."""

    INSTANCE = "instance"
    PORT = "port"


REQUIRED_INFO: Mapping[AttachTarget, tuple[str, ...]] = {
    AttachTarget.INSTANCE: (),
    AttachTarget.PORT: ("physical_network",),
}
"""Keys that the info of a handle must have."""

_EXPECTED = " or ".join(AttachTarget)


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


def explain_missing_info(
    target: AttachTarget, info: Mapping[str, str], device: str, profile: str
) -> str | None:
    """Return why a handle of a device does not fit a target; None if it fits."""
    missing = [key for key in REQUIRED_INFO[target] if not info.get(key)]
    if not missing:
        return None
    return (
        f"handles of device {device} have no {', '.join(missing)}, which accel:{KEY}={target} of "
        f"device profile {profile} needs: set physical_networks in the section of its driver nic, "
        "or require the trait CUSTOM_PHYSNET_<NETWORK> in the profile"
    )
