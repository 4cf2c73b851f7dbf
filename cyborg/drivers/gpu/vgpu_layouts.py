# SPDX-License-Identifier: Apache-2.0
"""Changes of the layout of a card between the whole card and mixes of vGPUs.

The steps are in the order of NVIDIA's "Virtual GPU Software User Guide": the MIG mode, which cannot
be changed while the card has virtual functions; these functions; the heterogeneous mode (which
enabling them clears) or GPU instances; vGPUs. A mix is tried: all its vGPUs are created and removed
again. If a step fails, the card is brought back to the state before the change, by the same steps.
Each vGPU is recorded before it is tried: after the end of the agent during a change, the next
change removes those that were left. The current layout is ``other`` until then.

The vGPU of a server is never removed, also while the server is stopped. A mix can be applied to a
card with such vGPUs, for example again after a boot of the host, if they are a part of it.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cyborg.core.errors import CyborgError, DriverFailed
from cyborg.core.inventory.device import Device, Layout, count_handles
from cyborg.drivers.gpu.mixes import WHOLE, Mix, trait_of
from cyborg.drivers.gpu.vgpu_cards import VgpuCards
from cyborg.drivers.kernel import vgpu as kernel_vgpu


@dataclass(frozen=True, slots=True)
class CardState:
    """Modes of a card, whether it has virtual functions, and its GPU instances by profile.

    ``pending`` is whether a reset would switch the MIG mode; no layout has that.
    """

    mig: bool = False
    functions: bool = False
    heterogeneous: bool = False
    instances: Mapping[str, int] = field(default_factory=dict)
    pending: bool = False


class VgpuLayouts:
    """Layouts of the cards of a backend.

    ``script`` is the path of ``sriov-manage``, ``nvidia_smi`` that of the program with this name.
    ``class_of_whole`` returns the resource class of a whole card, None if it is not offered.
    """

    def __init__(
        self,
        cards: VgpuCards,
        script: str,
        nvidia_smi: str,
        class_of_whole: Callable[[str], str | None],
    ) -> None:
        self._cards = cards
        self._records = cards.records
        self._host = cards.host
        self._script = script
        self._nvidia_smi = nvidia_smi
        self._class_of_whole = class_of_whole

    def has_layouts(self, address: str) -> bool:
        """Return whether the device at an address is a card with layouts."""
        return bool(self._cards.mixes) and self._cards.rule_of_card(address) is not None

    def of_device(self, device: Device) -> Sequence[Layout]:
        """Return the layouts of a card, the current one first."""
        card, rule = (
            self._host.sysfs.pci_function(device.address),
            self._cards.rule_of_card(device.address),
        )
        if card is None or rule is None:
            raise DriverFailed(f"there is no card {device.address}")
        # The current one with the handles of now, which may be fewer than it could have:
        # ``Layout.matches`` recognises it by them.
        current = self._cards.current_layout(card)
        offers: dict[str, Mapping[str, int]] = {current: count_handles(device)}
        offered_class = self._class_of_whole(device.address)
        offers.setdefault(WHOLE, {} if offered_class is None else {offered_class: 1})
        for mix in self._possible(device.address):
            offers.setdefault(mix.name, {rule.resource_class: sum(mix.counts.values())})
        return [
            Layout(name, counts, frozenset({trait_of(name)})) for name, counts in offers.items()
        ]

    def apply(self, address: str, layout: str) -> None:
        """Apply a layout to the card at an address.

        Raise DriverFailed if the card does not have the layout, a virtual function has a vGPU that
        must stay or is open, or a step fails; then the steps before it are undone.
        """
        card = self._host.sysfs.pci_function(address)
        if card is None:
            raise DriverFailed(f"there is no device {address}")
        self._host.forget_facts(address)  # another program may have changed the modes
        # While a change did not end, the current layout is OTHER: the same one is applied again.
        if layout == self._cards.current_layout(card):
            return
        mix = self._cards.find_mix(address, layout)
        if mix is None and layout != WHOLE:
            names = [WHOLE, *(possible.name for possible in self._possible(address))]
            raise DriverFailed(
                f"{address} has no layout {layout!r}: expected one of {', '.join(names)}"
            )
        if mix is not None and (obstacle := self._find_obstacle(address, mix)) is not None:
            raise DriverFailed(f"{address} cannot have the layout {layout}: {obstacle}")
        self._check_vgpus(address, mix)
        previous, target = self._read_state(address), self._target(address, mix)
        self._records.begin_change(address)
        try:
            with self._undone_on_error(address, previous):
                self._remove_tried(address)
                self._reach(address, target)
                if mix is not None:
                    self._try_vgpus(address, mix)
                self._records.put_layout(address, None if mix is None else mix.name)
        finally:
            self._host.forget_facts(address)
        self._records.end_change(address)

    def _possible(self, address: str) -> list[Mix]:
        mixes = (self._cards.find_mix(address, mix.name) for mix in self._cards.mixes)
        return [
            mix for mix in mixes if mix is not None and self._find_obstacle(address, mix) is None
        ]

    def _find_obstacle(self, address: str, mix: Mix) -> str | None:
        rule = self._cards.rule_of_card(address)
        types = () if rule is None else rule.types
        return mix.find_obstacle(types, self._host.read_facts(address))

    def _target(self, address: str, mix: Mix | None) -> CardState:
        """Return the state of the card at an address for a mix, or for the whole card."""
        if mix is None:
            return CardState()
        facts = self._host.read_facts(address)
        return CardState(
            mig=mix.needs_mig(facts),
            functions=True,
            heterogeneous=mix.is_heterogeneous(facts),
            instances=mix.instances(facts),
        )

    def _read_state(self, address: str) -> CardState:
        """Return the state of the card at an address. Raise DriverFailed if NVML cannot read it."""
        # Not the last known facts, which are those before a step: they hide what is to be undone.
        facts = self._host.read_facts_again(address)
        card = self._host.sysfs.pci_function(address)
        if card is None:
            raise DriverFailed(f"there is no device {address}")
        return CardState(
            mig=facts.in_mig_mode,
            functions=bool(card.numvfs),
            heterogeneous=facts.heterogeneous is True,
            instances=facts.present_instances,
            pending=facts.mig_pending,
        )

    def _reach(self, address: str, target: CardState) -> None:
        """Bring the card at an address to a state.

        Raise DriverFailed if a server has a vGPU, or the card has another state afterwards.
        """
        present = self._read_state(address)
        if present != target:
            self._check_no_server(address)
        # A request of the present mode cancels a change that is pending.
        switches_mig = present.mig != target.mig or present.pending
        removes_functions = present.functions and (switches_mig or not target.functions)
        if present.instances and not target.mig:
            self._host.access.set_instances(address, {})
        if removes_functions:
            self._host.access.set_sriov(address, False, self._script)
        if switches_mig:
            self._host.access.set_mig_mode(address, target.mig, self._nvidia_smi)
        if target.functions and (removes_functions or not present.functions):
            self._host.access.set_sriov(address, True, self._script)
        present = self._read_state(address)
        if target.functions and present.heterogeneous != target.heterogeneous:
            self._host.access.set_heterogeneous(address, target.heterogeneous)
        if present.instances != target.instances:
            self._host.access.set_instances(address, target.instances)
        reached = self._read_state(address)
        # A reset that is pending is none of the state that is restored; without virtual functions,
        # the heterogeneous mode has no effect, and enabling them clears it.
        expected = replace(target, pending=False)
        if not target.functions:
            reached = replace(reached, heterogeneous=target.heterogeneous)
        if reached != expected:
            raise DriverFailed(f"{address} is in another state after the change: {reached}")

    def _try_vgpus(self, address: str, mix: Mix) -> None:
        """Create all vGPUs of a mix that servers do not have, and remove them.

        Raise DriverFailed if that fails.
        """
        # How many vGPUs of each type no server has; the types to create, by function; the functions
        # that can get any type.
        missing, tried, free = Counter(mix.counts), dict[str, str](), list[str]()
        for state in self._states(address):
            type_ = self._records.prepared_type(state.address)
            if type_ is None and state.registered:
                free.append(state.address)
            elif type_ is not None and missing[type_] and (state.current or state.registered):
                # A prepared function gets no other type: after the end of the agent, that would
                # seem to be the vGPU of its server.
                missing[type_] -= 1
                if not state.current:
                    tried[state.address] = type_
        if len(free) < missing.total():
            total = sum(mix.counts.values())
            raise DriverFailed(
                f"{address} has {total - missing.total() + len(free)} virtual functions for "
                f"{total} vGPUs of {mix.name}"
            )
        tried |= zip(free, missing.elements(), strict=False)  # most functions stay free
        with contextlib.ExitStack() as created:
            for function, type_ in sorted(tried.items()):
                self._records.put_tried(function, type_)
                self._host.access.create_vgpu(function, type_, "")
                created.callback(self._remove, function)

    def _remove(self, function: str) -> None:
        self._host.access.remove_vgpu(function)
        self._records.remove_tried(function)

    def _remove_tried(self, address: str) -> None:
        """Remove the vGPUs that a change tried. Raise DriverFailed if a process may have one."""
        states = list(self._states(address))
        for state in states:
            if state.current and self._cards.is_tried(state, states):
                self._host.access.remove_vgpu(state.address)
            self._records.remove_tried(state.address)

    def _check_vgpus(self, address: str, mix: Mix | None) -> None:
        """Raise DriverFailed if a card has a vGPU of another program, or one that is in no mix."""
        states = list(self._states(address))
        for state in states:
            if self._cards.is_foreign(state, address, states):
                raise DriverFailed(
                    f"{address} cannot be changed: {state.address} has a vGPU that this service "
                    "did not create"
                )
        left = Counter({} if mix is None else mix.counts)
        # Also those that a boot removed: the restore jobs of their servers create them again.
        for function, type_ in self._records.prepared_of(address).items():
            left[type_] -= 1
            if left[type_] < 0:
                raise _server_error(address, function)

    def _check_no_server(self, address: str) -> None:
        """Raise DriverFailed if a server has a vGPU of a card whose modes must change."""
        for state in self._states(address):
            if state.current and self._records.prepared_type(state.address) is not None:
                raise _server_error(address, state.address)

    def _states(self, address: str) -> Iterator[kernel_vgpu.VgpuFunction]:
        for function in self._host.sysfs.pci_functions():
            if function.physfn == address:
                state = kernel_vgpu.read(self._host.sysfs, function.address)
                if state is not None:
                    yield state

    @contextlib.contextmanager
    def _undone_on_error(self, address: str, previous: CardState) -> Iterator[None]:
        """Bring a card back to the previous state if the block fails."""
        try:
            yield
        except Exception as exc:  # any other exception is the end of the agent
            try:
                self._remove_tried(address)
                self._reach(address, previous)
            except Exception as failed:  # noqa: BLE001  both are in the message
                raise DriverFailed(
                    f"{_text(exc)}; the steps before could not be undone: {_text(failed)}"
                ) from exc
            self._records.end_change(address)
            raise DriverFailed(f"{_text(exc)}; {address} is as before") from exc


def _server_error(address: str, function: str) -> DriverFailed:
    return DriverFailed(
        f"{address} cannot be changed: {function} has the vGPU of a server; delete the server"
    )


def _text(exc: Exception) -> str:
    return exc.message if isinstance(exc, CyborgError) else f"{type(exc).__name__}: {exc}"
