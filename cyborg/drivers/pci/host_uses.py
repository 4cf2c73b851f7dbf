# SPDX-License-Identifier: Apache-2.0
"""Uses of PCI functions by the host that withhold them from servers, and what overrides them.

A disk with a signature may hold data of the host, so its function is not offered unless an operator
adopts it. But a server leaves signatures too, and these must not withhold the function: the server
may start again, or the disk is about to be erased. A server uses the function through VFIO. So a
function that was offered, and then bound to VFIO, has what a server left there, until its disks are
empty again. The memory of the driver keeps this.

Two decisions of an operator override a use: a rule with ``active_port=offer``, and an adoption by
force. The latter accepts the uses that it finds, not those that begin later: an operator who gives
away a NIC whose link is up has not given away the default route. What was accepted is stored with
the mark of the adoption; without that record nothing is accepted.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from cyborg.core.codec import Serializable
from cyborg.core.inventory.delivery import is_vfio
from cyborg.core.log import get_logger
from cyborg.drivers.base import Memory, load_record
from cyborg.drivers.host_use import signatures
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.host_use.domains import ReadDomains, read_nothing
from cyborg.drivers.host_use.networks import IsAccepted, NetworkUse
from cyborg.drivers.host_use.signatures import DiskContents
from cyborg.drivers.sysfs import PciFunction, Sysfs

LOG = get_logger(__name__)

# Classes, as pci.ids lists them: all controllers of disks, and those that are disks; then USB and
# Fibre Channel, which may have disks too.
_STORAGE, _NVME = "01", "0108"
_BUSES = ("0c03", "0c04")
_HOLDS = " holds "  # in each reason of ``host_use.disks``
_REMEDY = "erase it, for example with wipefs, or adopt the device"


@dataclass(frozen=True, slots=True)
class OfferedFunction(Serializable):
    """What is known of a function with disks.

    ``model`` is vendor and product, ``serial`` the serial number of an NVMe controller if known.
    ``given`` is set from the time at which it was offered and bound to VFIO until its disks are
    empty: what is on them is of servers. ``held`` is set from the time at which its disks had data
    of the host until they are empty.
    """

    model: str
    serial: str | None = None
    given: bool = False
    held: bool = False

    def is_same(self, other: "OfferedFunction") -> bool:
        """Return whether both may be the same function."""
        serials = {self.serial, other.serial} - {None}
        return self.model == other.model and len(serials) <= 1


class Decision(NamedTuple):
    """Why a function is withheld, None if it is offered, and what is known of it from now on."""

    reason: str | None
    record: OfferedFunction | None


def decide(
    function: PciFunction,
    serial: str | None,
    contents: DiskContents | None,
    known: OfferedFunction | None,
) -> Decision:
    """Decide whether a function is offered.

    ``contents`` is None if the kernel shows no disk of the function. ``known`` is the last result.
    """
    new = OfferedFunction(f"{function.vendor}:{function.product}", serial)
    if known is not None and not known.is_same(new):
        known = None
    if known is not None:
        # A drive that was first seen without its disks gets its serial number now.
        known = replace(known, serial=known.serial or serial)
    if contents is None:
        return _decide_without_disks(function, new, known)
    if contents.is_empty:
        return Decision(None, replace(known or new, given=False, held=False))
    if known is not None and known.given:
        return Decision(None, known)  # the data are of servers
    if contents.signature is not None:
        reason = f"{contents.signature}; {_REMEDY}"
        return Decision(reason, replace(known or new, held=True))
    return Decision(contents.error, known)


def _decide_without_disks(
    function: PciFunction, new: OfferedFunction, known: OfferedFunction | None
) -> Decision:
    """Decide about a function of which the kernel shows no disk."""
    if known is not None and known.held:
        reason = f"it held data of the host when its disks were last shown; {_REMEDY}"
        return Decision(reason, known)
    if is_vfio(function.kernel_driver):
        return Decision(None, replace(known or new, given=True))
    is_unbound = function.kernel_driver is None and function.class_code.startswith(_STORAGE)
    # The kernel may not have read the disks yet. A controller of disks that has its driver, and a
    # virtual function, may have none; a physical NVMe function is a disk itself.
    is_unknown = known is None and function.physfn is None
    if is_unknown and (is_unbound or function.class_code.startswith(_NVME)):
        driver = function.kernel_driver or "no kernel driver"
        reason = (
            f"the contents of its disks are unknown while it is bound to {driver} and shows none: "
            "bind it to its kernel driver or, if servers may overwrite the disks, to vfio-pci"
        )
        return Decision(reason, None)
    return Decision(None, known)


class DiskHistory:
    """What a driver knows of the functions with disks; ``memory`` returns its memory."""

    def __init__(self, sysfs: Sysfs, memory: Callable[[], Memory]) -> None:
        self._sysfs = sysfs
        self._memory = memory
        self._contents: Mapping[str, DiskContents] = {}
        self._empty: frozenset[str] = frozenset()  # functions, at the discovery before this one

    def read(self) -> None:
        """Read the contents of all disks; once for each discovery."""
        self._empty = frozenset(a for a, c in self._contents.items() if c.is_empty)
        facts = signatures.read(self._sysfs.root)
        self._contents = signatures.contents_by_function(self._sysfs, facts)

    def find_reason(self, function: PciFunction) -> str | None:
        """Return why an offered function must be withheld for what its disks hold, or None."""
        contents = self._contents.get(function.address)
        if contents is None and self._read_controller(function.address, "state") == "live":
            contents = DiskContents()  # an NVMe controller without a namespace
        stored = self._memory().get(_contents_key(function.address))
        may_have_disks = function.class_code.startswith((_STORAGE, *_BUSES))
        if contents is None and stored is None and not may_have_disks:
            return None  # it is no storage, and never had any
        known = load_record(OfferedFunction, stored)
        # The kernel shows the namespaces of a drive one after another: what is empty for the first
        # time proves nothing about a drive that servers had.
        is_empty = contents is not None and contents.is_empty
        is_newly_empty = is_empty and function.address not in self._empty
        if is_newly_empty and known is not None and known.given:
            return None  # what servers left may be there until a second discovery finds nothing
        serial = self._read_controller(function.address, "serial")
        decision = decide(function, serial, contents, known)
        self._store(function.address, decision.record)
        return decision.reason

    def find_contents(self, function: PciFunction) -> str | None:
        """Return what the disks of a function hold now that withholds it, or None."""
        # Nothing is stored: this is for another thread than that of the discovery.
        if not function.class_code.startswith((_STORAGE, *_BUSES)):
            return None
        facts = signatures.read(self._sysfs.root)
        contents = signatures.contents_by_function(self._sysfs, facts).get(function.address)
        known = load_record(OfferedFunction, self._memory().get(_contents_key(function.address)))
        serial = self._read_controller(function.address, "serial")
        return None if contents is None else decide(function, serial, contents, known).reason

    def adopt(self, function: PciFunction) -> None:
        """Remember that servers may have, and overwrite, what is on the disks of a function."""
        if function.class_code.startswith((_STORAGE, *_BUSES)):
            model = f"{function.vendor}:{function.product}"
            serial = self._read_controller(function.address, "serial")
            self._store(function.address, OfferedFunction(model, serial, given=True))

    def note_use(self, function: PciFunction, reason: str) -> None:
        """Forget that servers had the disks of a function if the host has something on them now."""
        if _HOLDS in reason and self._memory().get(_contents_key(function.address)) is not None:
            self._store(function.address, None)

    def _store(self, address: str, known: OfferedFunction | None) -> None:
        self._memory().put(
            _contents_key(address), None if known is None else json.dumps(known.to_dict())
        )

    def _read_controller(self, address: str, name: str) -> str | None:
        """Return an attribute of an NVMe controller; None without the kernel driver nvme."""
        folder = f"bus/pci/devices/{address}/nvme"
        names = self._sysfs.list_names(folder)
        return self._sysfs.read_text(f"{folder}/{names[0]}/{name}") if names else None


def _contents_key(address: str) -> str:
    return f"disks {address}"


# Earlier adoptions of a function whose accepted uses are kept: the last ones may have failed.
MAX_ADOPTIONS = 8


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What does not count as a use by the host.

    For the addresses ``shared``, these are open device nodes and mediated devices, because servers
    and the host use the function at the same time, and domains that do not run; for ``free_ports``,
    a network port that is up with a link.
    """

    shared: frozenset[str] = frozenset()
    free_ports: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Adoptions(Serializable):
    """The uses of a PCI function that its adoptions have accepted, by mark."""

    model: str
    adoptions: Mapping[str, Sequence[str]]


@dataclass(slots=True)
class HostUses:
    """The uses of PCI functions by the host, as one backend sees them.

    ``marks`` has the mark of the adoption of each address in the option ``adopt_in_use``.
    ``memory`` returns the memory of the driver, which has the accepted uses. ``overridden`` is an
    accepted use of each function that has one, as the last ``find`` has seen them.
    """

    root: Path
    marks: Mapping[str, str]
    memory: Callable[[], Memory]
    overridden: Mapping[str, str] = field(default_factory=dict)
    _networks: dict[str, NetworkUse] = field(default_factory=dict)

    def find(
        self,
        functions: Mapping[str, PciFunction],
        exceptions: Exceptions,
        domains: ReadDomains = read_nothing,
    ) -> dict[str, str]:
        """Return the PCI functions that the host uses: a text with the reason by address.

        ``domains`` returns the functions that domains of libvirt have on this host.
        """
        adopted = self.marks.keys() & functions.keys()
        accepted = {address: self._load(functions[address]) or () for address in adopted}
        overridden: dict[str, str] = {}

        def is_accepted(address: str, reason: str) -> bool:
            if reason not in accepted.get(address, ()):
                return False
            overridden.setdefault(address, reason)
            return True

        found = self._read(functions, exceptions, domains, is_accepted)
        self.overridden = overridden
        return found

    def accept(
        self,
        addresses: Collection[str],
        functions: Mapping[str, PciFunction],
        exceptions: Exceptions,
    ) -> None:
        """Accept the uses that the host makes now of functions that are adopted by force.

        Functions of which the host makes another use that cannot be accepted are not changed. What
        earlier adoptions accepted stays: the backend with them may go on.
        """
        uses: dict[str, set[str]] = {address: set() for address in addresses}

        # Accepts everything, to learn each use: the reader asks for the next use of a function only
        # if the one before it was accepted.
        def is_accepted(address: str, reason: str) -> bool:
            uses.get(address, set()).add(reason)
            return True

        unacceptable = self._read(functions, exceptions, read_nothing, is_accepted)
        for address, reasons in uses.items():
            if address in functions and address not in unacceptable:
                self._store(functions[address], reasons)

    def can_be_accepted(
        self, address: str, functions: Mapping[str, PciFunction], exceptions: Exceptions
    ) -> bool:
        """Return whether an adoption by force would accept all present uses of a function."""
        unacceptable = self._read(functions, exceptions, read_nothing, lambda *_: True)
        return address not in self.marks and address not in unacceptable

    def describe_missing(self, functions: Mapping[str, PciFunction]) -> list[str]:
        """Return a warning for each function whose accepted uses are not known (any more)."""
        return [
            f"{address} was adopted by force, and the uses that were accepted then are not known: "
            "repeat cyborg hardware-adopt --force"
            for address in sorted(self.marks.keys() & functions.keys())
            if self._load(functions[address]) is None
        ]

    def _read(
        self,
        functions: Mapping[str, PciFunction],
        exceptions: Exceptions,
        domains: ReadDomains,
        is_accepted: IsAccepted,
    ) -> dict[str, str]:
        """Return the functions that the host uses, with the first reason that is not accepted."""
        return used_functions(
            self.root,
            self._networks,
            functions,
            shared=exceptions.shared,
            checked_ports=functions.keys() - exceptions.free_ports,
            is_accepted=is_accepted,
            domains=domains,
        )

    def _load(self, function: PciFunction) -> Collection[str] | None:
        """Return the accepted uses of a PCI function; None if they are not known."""
        return self._load_all(function).get(self.marks[function.address])

    def _load_all(self, function: PciFunction) -> Mapping[str, Sequence[str]]:
        """Return what the adoptions of a PCI function have accepted, by mark, the last one last."""
        stored = load_record(_Adoptions, self.memory().get(_adoptions_key(function.address)))
        return {} if stored is None or stored.model != _model(function) else stored.adoptions

    def _store(self, function: PciFunction, uses: Collection[str]) -> None:
        mark = self.marks[function.address]
        others = [(m, u) for m, u in self._load_all(function).items() if m != mark]
        adoptions = {**dict(others[-MAX_ADOPTIONS:]), mark: sorted(uses)}
        value = _Adoptions(_model(function), adoptions).to_dict()
        self.memory().put(_adoptions_key(function.address), json.dumps(value))
        for use in sorted(uses):
            LOG.warning("Adopted although the host uses it: %s", use, device=function.address)


def _model(function: PciFunction) -> str:
    return f"{function.vendor}:{function.product}"


def _adoptions_key(address: str) -> str:
    return f"accepted uses {address}"
