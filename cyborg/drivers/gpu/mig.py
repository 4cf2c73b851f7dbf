# SPDX-License-Identifier: Apache-2.0
"""Facts of NVML about GPUs, and the layouts of a GPU in MIG mode.

A layout is the maximum number of GPU instances of one profile. A server does not get a GPU
instance, but a mediated device (MIG-backed vGPU) that uses a GPU instance. NVIDIA documents this in
"Configuring a GPU for MIG-Backed vGPUs" of the NVIDIA AI Enterprise and Virtual GPU Software
guides, and the profiles in the NVML API Reference Guide, "Multi Instance GPU Management".
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from cyborg.core.inventory.device import Device, Layout
from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import Memory, load_record
from cyborg.drivers.kernel.nvml import ENABLED, KERNEL_DRIVER, NVIDIA, GpuFacts, ReadFacts
from cyborg.drivers.pci import topology
from cyborg.drivers.sysfs import PciFunction

# Key of the board info with the MIG mode.
BOARD_INFO = "mig"

# Name of the only layout of a card that is not in MIG mode.
FIXED = "fixed"

# Name of the layout without GPU instances.
NONE = "none"

# Name of all layouts that the driver does not offer, such as instances of several profiles.
OTHER = "other"


def is_enabled(facts: GpuFacts) -> bool:
    """Return whether a card is in MIG mode and its MIG profiles are known."""
    return facts.in_mig_mode and bool(facts.mig_profiles)


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


def topology_of(facts: GpuFacts) -> dict[str, str]:
    """Return the entries of the topology of a card that NVML knows."""
    found = {
        topology.MODULE_ID: str(facts.module or ""),
        topology.NVLINK_PEERS: ",".join(facts.nvlinks),
        topology.NVLINK_LINKS: ",".join(map(str, facts.nvlinks.values())),
        topology.NVLINK_MBPS: str(facts.nvlink_speed or ""),
    }
    return {key: value for key, value in found.items() if value}


def _load(memory: Memory, name: str) -> GpuFacts:
    return load_record(GpuFacts, memory.get(name)) or GpuFacts()


def _add_types(facts: GpuFacts, others: GpuFacts) -> GpuFacts:
    """Return the facts with types of vGPUs and profiles that only the other facts have."""
    return replace(
        facts,
        max_vgpus={**others.max_vgpus, **facts.max_vgpus},
        mig_profiles={**others.mig_profiles, **facts.mig_profiles},
        vgpu_profiles={**others.vgpu_profiles, **facts.vgpu_profiles},
        vgpus_per_instance={**others.vgpus_per_instance, **facts.vgpus_per_instance},
        vgpu_names={**others.vgpu_names, **facts.vgpu_names},
        vgpu_memory={**others.vgpu_memory, **facts.vgpu_memory},
    )


class FactsReader:
    """Reader that reads the facts about each GPU once while its kernel driver is bound.

    While a server uses a GPU, NVML does not show the GPU. The reader then returns the last facts
    except ``max_vgpus``, also after a restart of the agent. With ``keeps_types`` it also returns
    what the GPU can have. A GPU with an owner that is bound again, because the server is stopped,
    is not opened: the server may start.

    NVML may list the types and profiles of the current MIG mode only. If ``keeps_types`` is True,
    the facts also have those of the other mode, from the last time that the GPU was in it.
    """

    def __init__(
        self,
        read_facts: ReadFacts,
        is_readable: Callable[[str], bool] = lambda address: True,
        has_owner: Callable[[str], bool] = lambda address: False,
    ) -> None:
        """``is_readable`` returns whether NVML shows the GPU at an address now.

        ``has_owner`` returns whether a server has it as a whole.
        """
        self.keeps_types = False
        self._read_facts = read_facts
        self._is_readable = is_readable
        self._has_owner = has_owner
        self._facts: dict[tuple[str, str], GpuFacts] = {}  # by address and product id
        self._current: set[tuple[str, str]] = set()  # read since they were bound
        self._forgotten: set[str] = set()  # addresses

    def read(self, card: PciFunction, memory: Memory) -> GpuFacts:
        """Return the facts about a card; a card of another vendor has no facts."""
        if card.vendor != NVIDIA or card.physfn is not None:
            return GpuFacts()
        key = card.address, card.product
        name = f"gpu {card.address} {card.product}"
        if card.kernel_driver != KERNEL_DRIVER:
            self._current.discard(key)
        elif self._is_due(key) and (found := self._read_facts(card.address)) is not None:
            self._current.add(key)
            self._forgotten.discard(card.address)
            found = self._keep_links(found, self._facts.get(key) or _load(memory, name))
            if self.keeps_types and found.mig is not None:
                memory.put(f"{name} {found.mig}", json.dumps(found.to_dict()))
                other = "disabled" if found.in_mig_mode else "enabled"
                found = _add_types(found, _load(memory, f"{name} {other}"))
            self._facts[key] = found
            # Types and profiles may be many, and are read again with the card.
            kept = replace(found, max_vgpus={}, mig_profiles={}, mig_instances={}, vgpu_profiles={})
            memory.put(name, json.dumps(kept.to_dict()))
        if key not in self._facts:
            self._facts[key] = self._load_last(memory, name)
        return self._facts[key]

    def _is_due(self, key: tuple[str, str]) -> bool:
        address = key[0]
        if key in self._current:
            return False
        return address in self._forgotten or not self._has_owner(address)

    def _load_last(self, memory: Memory, name: str) -> GpuFacts:
        """Return the stored facts about a card that cannot be read."""
        found = _load(memory, name)
        if self.keeps_types and found.mig is not None:
            for mode in (found.mig, "disabled" if found.in_mig_mode else "enabled"):
                found = _add_types(found, _load(memory, f"{name} {mode}"))
        return found

    def _keep_links(self, facts: GpuFacts, previous: GpuFacts) -> GpuFacts:
        """Return the facts with the previous NVLinks to GPUs that NVML does not show now."""
        # The link to a GPU that a server uses is down as seen from here, and the bridge is there.
        if facts.uuid != previous.uuid:
            return facts
        hidden = {a: n for a, n in previous.nvlinks.items() if not self._is_readable(a)}
        speed = facts.nvlink_speed or (previous.nvlink_speed if hidden else None)
        links = dict(sorted({**hidden, **facts.nvlinks}.items()))
        return replace(facts, nvlinks=links, nvlink_speed=speed)

    def forget(self, address: str) -> None:
        """Make the next call of ``read`` read a card again, because its facts have changed."""
        self._forgotten.add(address)
        self._current = {key for key in self._current if key[0] != address}
