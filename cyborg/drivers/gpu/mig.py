# SPDX-License-Identifier: Apache-2.0
"""Layouts of a GPU in MIG mode: the maximum number of GPU instances of one profile.

A server does not get a GPU instance, but a mediated device (MIG-backed vGPU) that uses a GPU
instance. NVIDIA documents this in "Configuring a GPU for MIG-Backed vGPUs" of the NVIDIA AI
Enterprise and Virtual GPU Software guides, and the profiles in the NVML API Reference Guide, "Multi
Instance GPU Management".
"""

from collections import Counter
from collections.abc import Mapping

from cyborg.core.inventory.device import Layout
from cyborg.core.naming import make_custom_name
from cyborg.drivers.kernel.nvml import GpuFacts

FIXED = "fixed"
"""Name of the only layout of a card that is not in MIG mode."""

NONE = "none"
"""Name of the layout without GPU instances."""

OTHER = "other"
"""Name of all layouts that the driver does not offer, such as instances of several profiles."""


def is_enabled(facts: GpuFacts) -> bool:
    """Return whether a card is in MIG mode and its MIG profiles are known."""
    return facts.mig == "enabled" and bool(facts.mig_profiles)


def layout_of(profile: str, count: int) -> str:
    """Return the name of a layout, such as ``7x1g.10gb``."""
    return f"{count}x{profile}"


def current_layout(facts: GpuFacts) -> str:
    """Return the name of the current layout of a card in MIG mode."""
    present = {profile: count for profile, count in facts.mig_instances.items() if count}
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
    facts: GpuFacts, parents: Mapping[str, tuple[str, frozenset[str]]], offers: Mapping[str, int]
) -> list[Layout]:
    """Return the layouts of a card in MIG mode that offer handles, and the current layout.

    ``parents`` maps the address of each parent of mediated devices to the resource class of the
    parent and the MIG profiles of its enabled types. ``offers`` is the current number of
    handles by resource class.
    """
    layouts: dict[str, Layout] = {}
    for profile, count in facts.mig_profiles.items():
        classes = [
            resource_class
            for _, (resource_class, profiles) in sorted(parents.items())
            if profile in profiles
        ]
        name = layout_of(profile, count)
        if classes:
            layouts[name] = Layout(
                name, dict(Counter(classes[:count])), frozenset({trait_of(name)})
            )
    # With what it offers now, which may be less than it could: that is how it is recognised.
    current = current_layout(facts)
    layouts[current] = Layout(current, offers, frozenset({trait_of(current)}))
    return list(layouts.values())
