# SPDX-License-Identifier: Apache-2.0
"""Changes of the layout of a card between the whole card and mixes of vGPUs.

The steps are in the order of NVIDIA's "Virtual GPU Software User Guide": virtual functions, the
heterogeneous mode (which enabling them clears), GPU instances of a card in MIG mode, vGPUs. A mix
is tried: all its vGPUs are created and removed again. If a step fails, the steps before it are
undone in the reverse order. After the end of the agent during a change, the next change removes the
vGPUs that were tried.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from cyborg.core.errors import CyborgError, DriverFailed
from cyborg.core.inventory.device import Device, Layout, count_handles
from cyborg.drivers.gpu.mixes import WHOLE, Mix, trait_of
from cyborg.drivers.gpu.vgpu_cards import VgpuCards
from cyborg.drivers.kernel import vgpu as kernel_vgpu
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.sysfs import PciFunction, Sysfs


class VgpuLayouts:
    """Layouts of the cards of a backend; ``script`` is the path of ``sriov-manage``.

    ``read_facts`` returns the facts of NVML about a card, read again after ``forget_facts``.
    """

    def __init__(
        self,
        cards: VgpuCards,
        sysfs: Sysfs,
        access: HostAccess,
        script: str,
        read_facts: Callable[[str], GpuFacts],
        forget_facts: Callable[[str], None],
    ) -> None:
        self._cards = cards
        self._sysfs = sysfs
        self._access = access
        self._script = script
        self._read_facts = read_facts
        self._forget_facts = forget_facts

    def has_layouts(self, address: str) -> bool:
        """Return whether the device at an address is a card with layouts."""
        return bool(self._cards.mixes) and self._cards.rule_of_card(address) is not None

    def of_device(self, device: Device, offered_class: str | None) -> Sequence[Layout]:
        """Return the layouts of a card, the current one first.

        ``offered_class`` is the resource class of the whole card, None if it is not offered.
        """
        card, rule = (
            self._sysfs.pci_function(device.address),
            self._cards.rule_of_card(device.address),
        )
        if card is None or rule is None:
            raise DriverFailed(f"there is no card {device.address}")
        # With what it offers now, which may be less than it could: that is how it is recognised.
        current = self._cards.current_layout(card)
        offers: dict[str, Mapping[str, int]] = {current: count_handles(device)}
        offers.setdefault(WHOLE, {} if offered_class is None else {offered_class: 1})
        for mix in self._possible(device.address):
            offers.setdefault(mix.name, {rule.resource_class: sum(mix.counts.values())})
        return [
            Layout(name, counts, frozenset({trait_of(name)})) for name, counts in offers.items()
        ]

    def apply(self, address: str, layout: str) -> None:
        """Apply a layout to the card at an address.

        Raise DriverFailed if the card does not have the layout, a virtual function has a vGPU or is
        open, or a step fails; then the steps before it are undone.
        """
        card = self._sysfs.pci_function(address)
        if card is None:
            raise DriverFailed(f"there is no device {address}")
        self._forget_facts(address)  # another program may have changed the modes
        if layout == self._cards.current_layout(card):
            return
        mixes = self._possible(address)
        mix = next((mix for mix in mixes if mix.name == layout), None)
        if mix is None and layout != WHOLE:
            raise DriverFailed(
                f"{address} has no layout {layout!r}: expected one of "
                f"{', '.join([WHOLE, *(mix.name for mix in mixes)])}"
            )
        self._check_own(address)
        previous = self._cards.find_mix(self._cards.current_layout(card))
        self._cards.record_change(address, changing=True)
        try:
            with self._undone_on_error(address) as undo:
                if mix is None:
                    self._make_whole(card, previous, undo)
                else:
                    self._make_mix(card, mix, undo)
            self._cards.record_layout(address, mix)
        finally:
            self._forget_facts(address)
        self._cards.record_change(address, changing=False)

    def _possible(self, address: str) -> list[Mix]:
        rule, facts = self._cards.rule_of_card(address), self._read_facts(address)
        types = () if rule is None else rule.types
        return [mix for mix in self._cards.mixes if mix.is_possible(types, facts)]

    def _make_whole(
        self, card: PciFunction, previous: Mix | None, undo: contextlib.ExitStack
    ) -> None:
        self._remove_vgpus(card.address)
        # Only those of a mix: an operator may have created others.
        instances = {} if previous is None else previous.instances(self._read_facts(card.address))
        if instances:
            # Before the change, which may end half-way; a repeated one is complete.
            undo.callback(self._access.set_instances, card.address, instances)
            self._access.set_instances(card.address, {})
        self._access.set_sriov(card.address, False, self._script)

    def _make_mix(self, card: PciFunction, mix: Mix, undo: contextlib.ExitStack) -> None:
        address = card.address
        if card.numvfs:
            self._remove_vgpus(address)
        else:
            undo.callback(self._access.set_sriov, address, False, self._script)
            self._access.set_sriov(address, True, self._script)
            self._forget_facts(address)
        facts = self._read_facts(address)
        wanted = mix.is_heterogeneous(facts)
        if facts.heterogeneous not in (None, wanted):
            self._access.set_heterogeneous(address, wanted)
            undo.callback(self._access.set_heterogeneous, address, not wanted)
        present = {profile: count for profile, count in facts.mig_instances.items() if count}
        instances = mix.instances(facts)
        if instances != present:
            undo.callback(self._access.set_instances, address, present)
            self._access.set_instances(address, instances)
        self._try_vgpus(address, mix)

    def _try_vgpus(self, address: str, mix: Mix) -> None:
        """Create all vGPUs of a mix and remove them. Raise DriverFailed if that fails."""
        types = [type_ for type_, count in mix.counts.items() for _ in range(count)]
        functions = [state.address for state in self._states(address) if state.registered]
        if len(functions) < len(types):
            raise DriverFailed(
                f"{address} has {len(functions)} virtual functions for {len(types)} vGPUs of "
                f"{mix.name}"
            )
        with contextlib.ExitStack() as created:
            for function, type_ in zip(functions, types, strict=False):
                self._access.create_vgpu(function, type_, "")
                created.callback(self._access.remove_vgpu, function)

    def _remove_vgpus(self, address: str) -> None:
        """Remove the vGPUs of a card. Raise DriverFailed if a process may have one."""
        for state in self._states(address):
            if state.current:
                self._access.remove_vgpu(state.address)

    def _check_own(self, address: str) -> None:
        """Raise DriverFailed if another program has created a vGPU of a card."""
        if self._cards.is_changing(address):
            return
        for state in self._states(address):
            if state.current and not self._cards.is_prepared(state.address):
                raise DriverFailed(
                    f"{address} cannot be changed: {state.address} has a vGPU that this service "
                    "did not create"
                )

    def _states(self, address: str) -> Iterator[kernel_vgpu.VgpuFunction]:
        for function in self._sysfs.pci_functions():
            if function.physfn == address:
                state = kernel_vgpu.read(self._sysfs, function.address)
                if state is not None:
                    yield state

    @contextlib.contextmanager
    def _undone_on_error(self, address: str) -> Iterator[contextlib.ExitStack]:
        """Yield a stack whose callbacks are called, the last one first, if the block fails."""
        with contextlib.ExitStack() as undo:
            try:
                yield undo
            except CyborgError as exc:
                try:
                    undo.close()
                except CyborgError as failed:
                    raise DriverFailed(
                        f"{exc.message}; the steps before could not be undone: {failed.message}"
                    ) from exc
                self._cards.record_change(address, changing=False)
                raise DriverFailed(f"{exc.message}; {address} is as before") from exc
            undo.pop_all()
