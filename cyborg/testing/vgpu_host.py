# SPDX-License-Identifier: Apache-2.0
"""A simulated host with NVIDIA GPUs whose vGPUs are virtual functions, without mediated devices.

The attributes are files in a sysfs tree, so all reads are those of a card. ``write`` acts as the
kernel driver on a write: it refuses what the driver refuses, and updates the lists of creatable
types of all virtual functions. The script ``sriov-manage`` and the changes by NVML are replaced in
the same way (``redirect``); the checks before them are those of a card. Sources:
``nvidia-vgpu-vfio`` of NVIDIA's driver for hosts (forms and errors of the attributes), the script,
and measurements that operators published (framebuffer sizes, heterogeneous mode). No card was used.
"""

import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cyborg.core.errors import DriverFailed
from cyborg.drivers.kernel import nvml
from cyborg.drivers.kernel.mig_placements import Placement, place
from cyborg.drivers.kernel.nvml import GpuFacts, MigMode, short_name
from cyborg.drivers.privileged import CONTEXT, gpu, mig, vgpu
from cyborg.testing.machine import HostTree

_NUMBER = re.compile(r"[+-]?[0-9]+\n?")  # kstrtol of Linux
HEADING = "ID    : vGPU Name\n"
SLICES = 7  # of a GPU in MIG mode
# By the slices of an instance: its slices of memory, of which there are eight, and the possible
# first ones.
_PLACES: Mapping[int, tuple[int, Sequence[int]]] = {
    1: (1, range(7)),
    2: (2, (0, 2, 4)),
    3: (4, (0, 4)),
    4: (4, (0,)),
    7: (8, (0,)),
}


@dataclass(frozen=True, slots=True)
class VgpuType:
    """A type of vGPUs; ``framebuffer`` is in GB. Each MIG-backed type has a ``profile``."""

    id: int
    name: str
    framebuffer: int
    profile: str | None = None
    per_instance: int = 1


def _slices(profile: str) -> int:
    """Return the slices of an instance of a MIG profile, such as 3 of ``3g.71gb``."""
    return int(profile.partition("g.")[0])


@dataclass(slots=True)
class SimulatedCard:
    """State of a card; ``framebuffer`` is in GB."""

    address: str
    framebuffer: int
    types: Sequence[VgpuType]
    numvfs: int
    mig: bool = False
    pending_mig: bool = False
    needs_reset: bool = False  # a change of the MIG mode stays pending until a reset
    # NVML describes MIG-backed types and profiles outside the MIG mode, and the others in it.
    lists_all: bool = True
    heterogeneous: bool = False
    instances: Counter[str] = field(default_factory=Counter)  # GPU instances by profile
    vgpus: dict[str, VgpuType] = field(default_factory=dict)  # by virtual function
    functions: list[str] = field(default_factory=list)


class SimulatedVgpuHost(HostTree):
    """Simulated host with cards; pass ``read_facts`` to a driver as NVML."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.dev = folder / "dev"
        (self.dev / "vfio").mkdir(parents=True)
        self.cards: dict[str, SimulatedCard] = {}
        self.writes: list[tuple[str, str]] = []  # "function/attribute" and the text
        self.opened: set[str] = set()  # virtual functions that a guest has
        self.commands: list[str] = []  # of sriov-manage and nvidia-smi
        self.opens: list[str] = []  # addresses of the cards that NVML opened
        # Names of attributes whose writes fail with EIO, and of other steps that fail: the option
        # of sriov-manage, "heterogeneous" and "instances".
        self.failing: set[str] = set()

    def redirect(self, set_attribute: Callable[[object, str, object], None]) -> None:
        """Let the privileged functions run in this process on this host.

        ``set_attribute`` replaces an attribute of a module, such as ``monkeypatch.setattr``.
        """
        for module, name, value in (
            (vgpu, "_SYS", self.root),
            (vgpu, "_DEV", self.dev),
            (vgpu, "_PROC", self.proc),
            (vgpu, "_write", self.write_attribute),
            (vgpu, "_resolve", lambda path, name: Path(path)),
            (vgpu, "_run_script", self._run_script),
            (gpu, "_SYS", self.root),
            (mig, "_SYS", self.root),
            (mig, "_resolve", lambda path, name: Path(path)),
            (mig, "_run", self._run_reset),
            (nvml, "set_heterogeneous", self.set_heterogeneous),
            (nvml, "request_mig_mode", self.request_mig_mode),
            (nvml, "replace_instances", self.replace_instances),
            (CONTEXT, "client_mode", False),
        ):
            set_attribute(module, name, value)

    def add_card(
        self,
        address: str,
        types: Sequence[VgpuType],
        *,
        framebuffer: int,
        numvfs: int = 4,
        product: str = "2335",
        mig: bool = False,
        needs_reset: bool = False,
    ) -> SimulatedCard:
        """Add a card that is bound to its driver for hosts, without virtual functions."""
        self.add_function(
            address,
            vendor="10de",
            product=product,
            class_code="030200",
            kernel_driver="nvidia",
            totalvfs=numvfs,
        )
        # Virtual functions of these cards have the product id of the card.
        (self.bus / address / "sriov_vf_device").write_text(f"{product}\n")
        card = SimulatedCard(
            address,
            framebuffer,
            types,
            numvfs,
            mig=mig,
            pending_mig=mig,  # no change is pending
            needs_reset=needs_reset,
        )
        self.cards[address] = card
        return card

    def manage_sriov(self, address: str, *, enable: bool) -> None:
        """Act as ``sriov-manage -e`` or ``-d``. Raise OSError while a guest has a function.

        Both rebind the card, which removes all vGPUs and switches the heterogeneous mode off.
        """
        card = self.cards[address]
        if self.opened & set(card.functions):
            raise OSError(errno.EBUSY, "Cannot obtain unbindLock")
        if enable and card.functions:  # enabled already
            return
        card.heterogeneous = False
        card.vgpus.clear()
        if enable:
            product = (self.bus / address / "device").read_text().strip()[2:]
            card.functions = self.enable_virtual_functions(
                address, card.numvfs, product=product, class_code="030200"
            )
            for number, name in enumerate(card.functions):
                self._add_attributes(name, f"vfio{number}")
        else:
            self._remove_functions(card)
        self._update(card)

    def set_heterogeneous(self, address: str, *, enable: bool) -> None:
        """Act as ``nvml.set_heterogeneous``. Raise DriverFailed."""
        card = self.cards[address]
        if card.mig or card.vgpus or "heterogeneous" in self.failing:
            reason = "Not Supported" if card.mig else "In use by another client"
            raise DriverFailed(f"the heterogeneous mode of {address} cannot be changed: {reason}")
        if enable and not card.functions:
            raise DriverFailed(f"the heterogeneous mode of {address} is 0 after a change to 1")
        card.heterogeneous = enable
        self._update(card)

    def request_mig_mode(self, address: str, *, enable: bool) -> str | None:
        """Act as ``nvml.request_mig_mode``: return why the mode stays pending, None if it is set.

        Raise DriverFailed.
        """
        card = self.cards[address]
        if not enable and card.instances.total():
            raise DriverFailed(f"{address} has GPU instances: remove them first")
        card.pending_mig = enable
        if card.mig == enable:
            return None
        if card.functions:
            raise AssertionError("the MIG mode of a card with virtual functions was changed")
        if f"mig {int(enable)}" in self.failing:
            return "In use by another client"
        if card.needs_reset:
            return nvml.RESET_REQUIRED
        self._activate(card)
        return None

    def _run_reset(
        self, command: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> None:
        """Act as ``nvidia-smi --gpu-reset -i ADDRESS``."""
        _, option, _, address = command
        self.commands.append(f"nvidia-smi {option} {address}")
        if option in self.failing:
            raise DriverFailed("nvidia-smi failed with 255: GPU Reset couldn't run")
        self._activate(self.cards[address])

    @staticmethod
    def _activate(card: SimulatedCard) -> None:
        card.mig = card.pending_mig
        card.heterogeneous = False
        card.instances.clear()

    def replace_instances(self, address: str, instances: Mapping[str, int]) -> None:
        """Act as ``nvml.replace_instances``. Raise DriverFailed; some instances may be left."""
        card = self.cards[address]
        if not card.mig or card.vgpus:
            reason = "In use by another client" if card.mig else "Not Supported"
            raise DriverFailed(f"the MIG instances of {address} could not be replaced: {reason}")
        possible: dict[str, list[Placement]] = {}
        for profile in instances:
            size, starts = _PLACES[_slices(profile)]
            possible[profile] = [Placement(start, size) for start in starts]
        placed, text = place(instances, possible), nvml.format_instances(instances)
        if placed is None:
            raise DriverFailed(f"{address} has no room for the MIG instances {text}")
        card.instances = Counter()
        if placed and "instances" in self.failing:
            self._update(card)
            raise DriverFailed(
                f"the MIG instances of {address} could not be replaced by {text}: Insufficient "
                "Resources"
            )
        card.instances.update(instances)
        self._update(card)

    def open_function(self, function: str) -> None:
        """Let a guest have a virtual function. Raise OSError unless it has a vGPU."""
        if function not in self._card_of(function).vgpus:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        self.opened.add(function)
        # A group that a process has open cannot be opened: nor can a folder be, to write.
        node = self._group_node(function)
        node.unlink()
        node.mkdir()

    def close_function(self, function: str) -> None:
        """Take a virtual function back from its guest."""
        self.opened.discard(function)
        node = self._group_node(function)
        node.rmdir()
        node.touch()

    def reboot(self) -> None:
        """Act as a boot of the host, after which SR-IOV is disabled."""
        for function in list(self.opened):
            self.close_function(function)
        for address in self.cards:
            self.manage_sriov(address, enable=False)
            # As of a card before the generation Hopper, whose mode outlasts a reboot.
            card = self.cards[address]
            card.pending_mig = card.mig if card.needs_reset else False
            self._activate(card)

    def current(self, function: str) -> str:
        """Return the name of the type of a function's vGPU; empty without one."""
        found = self._card_of(function).vgpus.get(function)
        return "" if found is None else found.name

    def read_facts(self, address: str) -> GpuFacts | None:
        """Return what NVML says about a card, which it opens for that."""
        self.opens.append(address)
        card = self.cards.get(address)
        if card is None:
            return None
        # Without ``lists_all``, NVML describes the types of the present mode only.
        types = [t for t in card.types if card.lists_all or (t.profile is not None) == card.mig]
        mig_backed = {short_name(t.name): t for t in types if t.profile is not None}
        return GpuFacts(
            memory=card.framebuffer << 30,
            mig="enabled" if card.mig else "disabled",
            # Outside the MIG mode there is no maximum of MIG-backed types.
            max_vgpus={
                short_name(t.name): card.framebuffer // t.framebuffer
                for t in types
                if card.mig or t.profile is None
            },
            mig_profiles={
                str(t.profile): SLICES // _slices(str(t.profile)) for t in mig_backed.values()
            },
            mig_instances={
                str(t.profile): card.instances[str(t.profile)]
                for t in (mig_backed.values() if card.mig else ())
            },
            vgpu_profiles={name: str(t.profile) for name, t in mig_backed.items()},
            vgpus_per_instance={name: t.per_instance for name, t in mig_backed.items()},
            vgpu_names={str(t.id): short_name(t.name) for t in types},
            vgpu_memory={short_name(t.name): t.framebuffer << 30 for t in types},
            heterogeneous=None if card.mig else card.heterogeneous,
            mig_pending=card.pending_mig != card.mig,
        )

    def read_mig_mode(self, address: str) -> MigMode | None:
        """Return what NVML says about the MIG mode of a card."""
        facts = self.read_facts(address)
        return None if facts is None else MigMode(facts.mig, facts.mig_pending)

    def write_attribute(self, path: Path, text: str) -> None:
        """Act as the kernel on a write to an attribute. Raise OSError."""
        function = path.parent.parent.name  # the path ends with FUNCTION/nvidia/ATTRIBUTE
        self.writes.append((f"{function}/{path.name}", text))
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if path.name in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if path.name == "current_vgpu_type":
            self._set_type(function, text)
        elif path.name == "vgpu_params" and function in self._card_of(function).vgpus:
            path.write_text(f"{text}\n")
        else:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def _run_script(self, script: Path, option: str, function: str) -> None:
        self.commands.append(f"{script.name} {option} {function}")
        try:
            if option in self.failing:
                raise OSError(errno.EIO, "the script failed")
            self.manage_sriov(function, enable=option == "-e")
        except OSError as exc:
            raise DriverFailed(f"sriov-manage failed with 1: {exc.strerror}") from exc

    def _set_type(self, function: str, text: str) -> None:
        """Act on a write to ``current_vgpu_type``: the id of a type, or 0 to remove the vGPU."""
        card = self._card_of(function)
        if not _NUMBER.fullmatch(text):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        # The driver refuses a removal of nothing, and a creation where a vGPU is, alike.
        if (int(text) == 0) != (function in card.vgpus):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        if function in self.opened:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if int(text) == 0:
            del card.vgpus[function]
        else:
            found = next((t for t in self.creatable(card) if t.id == int(text)), None)
            if found is None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            card.vgpus[function] = found
        self._update(card)

    @staticmethod
    def creatable(card: SimulatedCard) -> list[VgpuType]:
        """Return the types of which a card can have one more vGPU."""
        free = card.framebuffer - sum(t.framebuffer for t in card.vgpus.values())
        sizes = {t.framebuffer for t in card.vgpus.values()}
        used = Counter(t.profile for t in card.vgpus.values())
        found = []
        for type_ in card.types:
            if card.mig:
                room = card.instances[type_.profile or ""] * type_.per_instance
                fits = type_.profile is not None and used[type_.profile] < room
            else:
                same_size = card.heterogeneous or sizes <= {type_.framebuffer}
                fits = type_.profile is None and same_size and type_.framebuffer <= free
            if fits:
                found.append(type_)
        return found

    def _update(self, card: SimulatedCard) -> None:
        """Write the attributes of all virtual functions of a card."""
        text = HEADING + "".join(f"{t.id:<5} : {t.name}\n" for t in self.creatable(card))
        for function in card.functions:
            folder = self.bus / function / "nvidia"
            (folder / "creatable_vgpu_types").write_text(text)
            current = card.vgpus.get(function)
            (folder / "current_vgpu_type").write_text(f"{current.id if current else 0}\n")
            if current is None:
                (folder / "vgpu_params").write_text("\n")

    def _card_of(self, function: str) -> SimulatedCard:
        return next(card for card in self.cards.values() if function in card.functions)

    def _group_node(self, function: str) -> Path:
        return (
            self.dev / "vfio" / os.path.basename(os.readlink(self.bus / function / "iommu_group"))
        )

    def _add_attributes(self, function: str, device: str) -> None:
        folder = (self.bus / function).resolve()
        (folder / "vendor").write_text("0x10de\n")
        self._link(folder / "driver", self.root / "bus/pci/drivers/nvidia")
        (folder / "nvidia").mkdir()
        (folder / "vfio-dev" / device).mkdir(parents=True)
        node = self._group_node(function)
        node.touch()
        (self.root / "class/vfio" / node.name).mkdir(parents=True)

    def _remove_functions(self, card: SimulatedCard) -> None:
        folder = (self.bus / card.address).resolve()
        for number, function in enumerate(card.functions):
            node = self._group_node(function)
            node.unlink()
            (self.root / "class/vfio" / node.name).rmdir()
            # Kept elsewhere: no later folder gets its inode number, as in sysfs.
            removed = self.root / "removed"
            removed.mkdir(exist_ok=True)
            (self.bus / function).resolve().rename(removed / str(len(list(removed.iterdir()))))
            (self.bus / function).unlink()
            (folder / f"virtfn{number}").unlink()
        (folder / "sriov_numvfs").write_text("0\n")
        card.functions = []
