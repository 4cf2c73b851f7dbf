# SPDX-License-Identifier: Apache-2.0
"""PCI functions that domains of libvirt have, although no accelerator request has them for these.

Such a domain was made with virsh, or by Nova for a PCI passthrough request or an SR-IOV port of its
own. A domain that is defined and does not run has nothing open: only libvirt knows its devices
("Domain XML format" of libvirt, which is its ``docs/formatdomain.rst``, sections "Host device
assignment", "PCI passthrough of host network devices" and "Hard drives, floppy disks, CDROMs").

The agent reads libvirt, and knows which domains are servers with accelerator requests. A tree that
is not /sys has the functions as a file: so does a capture.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from cyborg.core.address import PciAddress
from cyborg.core.codec import Serializable, wire
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.text import sanitize
from cyborg.drivers.sysfs import LOCAL_ROOT, PciFunction, Sysfs, notify_facts, read_facts

# Path of the facts below the directory that contains ``sys``.
FILE = "proc/libvirt_domains.json"
# Characters of the name of a domain that are shown.
MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class DomainFacts(Serializable):
    """Names of the domains that have a PCI function, by the address of the function.

    ``error``: why the domains of a tree could not be read, None if they were. ``remarks``: warnings
    about the read of this host, for the remarks of the backends.
    """

    users: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    remarks: Sequence[str] = field(default=(), metadata=wire(omit=lambda remarks: not remarks))


class ReadDomains(Protocol):
    """Function that returns the facts of this host."""

    def __call__(self, *, fresh: bool = False) -> DomainFacts:
        """Return the facts; raise nothing, and take seconds at most.

        ``fresh`` is for a check before host work: libvirt is read and the owners are asked now. The
        next calls without it return the same facts for a time.
        """


def read_nothing(*, fresh: bool = False) -> DomainFacts:
    """Return no facts, as on a host without libvirt."""
    return DomainFacts()


def parse_functions(xml: str) -> frozenset[str]:
    """Return the addresses of the PCI functions of the host that the XML of a domain names.

    These are those of ``<hostdev type='pci'>``, of ``<interface type='hostdev'>``, and of
    ``<disk type='nvme'>``. Skip an element that names no address: that of a network with a pool of
    functions has none until the domain runs. Raise ValueError if the text is no XML.
    """
    try:
        root = ElementTree.fromstring(xml)  # noqa: S314  libvirt has written it
    except (ElementTree.ParseError, LookupError) as exc:
        raise ValueError(f"no XML: {exc}") from exc
    return frozenset(_addresses(root.iterfind("devices/*")))


def _addresses(devices: Iterable[Element]) -> Iterator[str]:
    """Yield the PCI addresses of functions that devices of a guest are or use."""
    for device in devices:
        kind = device.get("type")
        is_function = (device.tag, kind) in (
            ("hostdev", "pci"),
            ("interface", "hostdev"),
            ("disk", "nvme"),
        )
        source = device.find("source/address")
        if not is_function or source is None or source.get("type", "pci") != "pci":
            continue
        parts = (source.get(name) for name in ("domain", "bus", "slot", "function"))
        try:
            # libvirt writes 0x3d; it reads decimal numbers too, and a domain that is missing.
            yield str(PciAddress(*(int(part or "0", 0) for part in parts)))
        except (Invalid, ValueError):
            continue


def read(sysfs_root: Path, read_local: ReadDomains = read_nothing) -> DomainFacts:
    """Return the facts of this host, or of the tree that ``sysfs_root`` is in.

    ``read_local`` returns the facts of this host. A tree without the file has none. The error of a
    failed read is in the result.
    """
    if sysfs_root != LOCAL_ROOT:
        return read_facts(
            sysfs_root, FILE, DomainFacts, lambda error: DomainFacts(error=error), read_local
        )
    # Not by read_facts: the observer, which records a capture, would get all that libvirt has.
    facts = read_local()
    # The names of domains may be those of customers, and are no facts of the hardware.
    names = {name: f"domain{n}" for n, name in enumerate(sorted(set(facts.users.values())), 1)}
    users = {address: names[name] for address, name in facts.users.items()}
    # Remarks are about this read, not about the host.
    notify_facts(FILE, DomainFacts(users, facts.error))
    return facts


def find_used(
    sysfs_root: Path, read_local: ReadDomains, functions: Iterable[PciFunction]
) -> dict[str, str]:
    """Return the PCI functions that domains have, and their virtual functions: a reason by address.

    ``functions`` are those of the host. Each counts as used if the domains of a tree cannot be
    read.
    """
    facts = read(sysfs_root, read_local)
    reasons = {
        address: f"it is used by the domain {sanitize(name, MAX_NAME)} of libvirt"
        for address, name in facts.users.items()
    }
    for function in functions:
        # A domain with the physical function takes its virtual ones away when it starts.
        if (name := facts.users.get(function.physfn or "")) is not None:
            reasons.setdefault(
                function.address,
                f"its physical function {function.physfn} is used by the domain "
                f"{sanitize(name, MAX_NAME)} of libvirt",
            )
        if facts.error is not None:
            reasons.setdefault(function.address, f"a domain of libvirt may have it: {facts.error}")
    return reasons


def check_unused(sysfs: Sysfs, read_local: ReadDomains, address: str) -> None:
    """Raise DriverFailed if a domain has the PCI function at an address, or a virtual one of it."""
    functions = [
        function
        for function in sysfs.pci_functions()
        if address in (function.address, function.physfn)
    ]
    used = find_used(sysfs.root, partial(read_local, fresh=True), functions)
    for function in functions:
        if (reason := used.get(function.address)) is not None:
            raise DriverFailed(f"{function.address} cannot be changed now: {reason}")
