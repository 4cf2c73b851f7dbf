# SPDX-License-Identifier: Apache-2.0
"""The layouts of a GPU in MIG mode, and what its facts say about them.

A layout is the maximum number of GPU instances of one profile. A server does not get a GPU
instance, but a mediated device (MIG-backed vGPU) that uses a GPU instance. NVIDIA documents this in
"Configuring a GPU for MIG-Backed vGPUs" of the NVIDIA AI Enterprise and Virtual GPU Software
guides, and the profiles in the NVML API Reference Guide, "Multi Instance GPU Management".
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from cyborg.core.inventory.device import Device, Layout
from cyborg.core.naming import make_custom_name
from cyborg.drivers.kernel.nvml import ENABLED, GpuFacts
from cyborg.drivers.pci import topology

# Key of the board info with the MIG mode.
BOARD_INFO = "mig"

# Name of the only layout of a card that is not in MIG mode.
FIXED = "fixed"

# Name of the layout without GPU instances.
NONE = "none"

# Name of all layouts that the driver does not offer, such as instances of several profiles.
OTHER = "other"


class Parent(NamedTuple):
    """A parent of mediated devices: its resource class, the MIG profiles of its enabled types."""

    resource_class: str
    profiles: frozenset[str]


def is_enabled(facts: GpuFacts) -> bool:
    """Return whether a card is in MIG mode, and its MIG profiles and GPU instances are known."""
    return facts.in_mig_mode and bool(facts.mig_instances)


def is_shown_enabled(device: Device) -> bool:
    """Return whether the board info of a device says that it is in MIG mode."""
    return device.std_board_info.get(BOARD_INFO) == ENABLED


def layout_of(profile: str, count: int) -> str:
    """Return the name of a layout, such as ``7x1g.10gb``."""
    return f"{count}x{profile}"


def current_layout(facts: GpuFacts) -> str:
    """Return the name of the current layout of a card in MIG mode."""
    present = facts.present_instances
    if not present:
        return NONE
    profile, count = next(iter(present.items()))
    full = facts.mig_profiles.get(profile) == count
    return layout_of(profile, count) if len(present) == 1 and full else OTHER


def profile_of(facts: GpuFacts, layout: str) -> str | None:
    """Return the MIG profile of the layout with this name; None for an unknown name."""
    found = (p for p, count in facts.mig_profiles.items() if layout_of(p, count) == layout)
    return next(found, None)


def trait_of(layout: str) -> str:
    """Return the trait of a layout, such as ``CUSTOM_MIG_7X1G_10GB``."""
    return make_custom_name(f"MIG_{layout}")


def possible_layouts(
    facts: GpuFacts, parents: Mapping[str, Parent], offers: Mapping[str, int]
) -> list[Layout]:
    """Return the layouts of a card in MIG mode that offer handles, and the current layout.

    ``parents`` are by address. ``offers`` is the current number of handles by resource class.
    """
    layouts: dict[str, Layout] = {}
    for profile, count in facts.mig_profiles.items():
        usable = [parent for _, parent in sorted(parents.items()) if profile in parent.profiles]
        name = layout_of(profile, count)
        if usable:
            # Each device needs an instance: only the first parents get one.
            handles = Counter(parent.resource_class for parent in usable[:count])
            layouts[name] = Layout(name, dict(handles), frozenset({trait_of(name)}))
    # The current one with what it offers now, which may be less than it could: it is recognised by
    # that (``Layout.matches``).
    current = current_layout(facts)
    layouts[current] = Layout(current, offers, frozenset({trait_of(current)}))
    return list(layouts.values())


def topology_of(facts: GpuFacts) -> dict[str, str]:
    """Return the entries of the topology of a card that NVML knows."""
    found = {
        topology.MODULE_ID: str(facts.module or ""),
        topology.NVLINK_PEERS: ",".join(facts.nvlinks),
        topology.NVLINK_LINKS: ",".join(map(str, facts.nvlinks.values())),
        topology.NVLINK_MBPS: str(facts.nvlink_speed or ""),
    }
    return {key: value for key, value in found.items() if value}
