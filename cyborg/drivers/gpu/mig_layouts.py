# SPDX-License-Identifier: Apache-2.0
"""Layouts of cards whose vGPUs are mediated devices: the GPU instances of a card in MIG mode."""

from collections.abc import Callable, Mapping, Sequence

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Device, Layout, count_handles
from cyborg.drivers.gpu import mig
from cyborg.drivers.kernel.nvml import GpuFacts

# Return the parents of mediated devices of a card, by address.
FindParents = Callable[[str], Mapping[str, mig.Parent]]


class MigLayouts:
    """Layouts of all other devices; a device that is not in MIG mode has one.

    ``described`` returns the facts about a card at its last discovery, ``read_facts`` those of now,
    read again after ``forget_facts``.
    """

    def __init__(
        self,
        described: Callable[[str], GpuFacts],
        find_parents: FindParents,
        set_instances: Callable[[str, Mapping[str, int]], None],
        read_facts: Callable[[str], GpuFacts],
        forget_facts: Callable[[str], None],
    ) -> None:
        self._described = described
        self._find_parents = find_parents
        self._set_instances = set_instances
        self._read_facts = read_facts
        self._forget_facts = forget_facts

    def has_layouts(self, address: str) -> bool:
        """Return True: each device has a layout."""
        return True

    def of_device(self, device: Device) -> Sequence[Layout]:
        """Return the layouts of a card; a layout ``fixed`` for devices without others."""
        facts, offers = self._described(device.address), count_handles(device)
        if not mig.is_enabled(facts):
            return [Layout(mig.FIXED, offers)]
        return mig.possible_layouts(facts, self._find_parents(device.address), offers)

    def apply(self, address: str, layout: str) -> None:
        """Apply a layout to the device at an address. Raise DriverFailed if this fails."""
        self._forget_facts(address)  # somebody may have changed the instances
        facts = self._read_facts(address)
        in_mig_mode = mig.is_enabled(facts)
        if layout == (mig.current_layout(facts) if in_mig_mode else mig.FIXED):
            return
        profile = mig.profile_of(facts, layout) if in_mig_mode else None
        removes_all = in_mig_mode and layout == mig.NONE
        if profile is None and not removes_all:
            profiles = facts.mig_profiles if in_mig_mode else {}
            names = [mig.layout_of(name, count) for name, count in profiles.items()]
            raise DriverFailed(
                f"{address} has no layout {layout!r}: expected {', '.join(names) or mig.FIXED}"
            )
        instances = {} if profile is None else {profile: facts.mig_profiles[profile]}
        try:
            self._set_instances(address, instances)
        finally:
            self._forget_facts(address)
