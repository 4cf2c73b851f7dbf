# SPDX-License-Identifier: Apache-2.0
"""Uses of PCI functions by the host that withhold them from servers, and what overrides them.

Two decisions of an operator override a use: a rule with ``active_port=offer``, and an adoption by
force. The latter accepts the uses that it finds, not those that begin later: an operator who gives
away a NIC whose link is up has not given away the default route. What was accepted is stored with
the mark of the adoption; without that record nothing is accepted.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.core.log import get_logger
from cyborg.drivers.base import Memory
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.host_use.domains import ReadDomains, read_nothing
from cyborg.drivers.host_use.networks import IsAccepted, NetworkUse
from cyborg.drivers.sysfs import PciFunction

LOG = get_logger(__name__)

MAX_ADOPTIONS = 8
"""Earlier adoptions of a function whose accepted uses are kept: the last ones may have failed."""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What does not count as a use by the host.

    For the addresses ``shared``, these are open device nodes and mediated devices, because servers
    and the host use the function at the same time, and domains that do not run; for ``free_ports``,
    a network port that is up with a link.
    """

    shared: frozenset[str] = frozenset()
    free_ports: frozenset[str] = frozenset()


class HostUses:
    """The uses of PCI functions by the host, as one backend sees them.

    ``marks`` has the mark of the adoption of each address in the option ``adopt_in_use``.
    ``memory`` returns the memory of the driver, which has the accepted uses.
    """

    def __init__(
        self, sysfs_root: Path, marks: Mapping[str, str], memory: Callable[[], Memory]
    ) -> None:
        self._root = sysfs_root
        self._marks = marks
        self._memory = memory
        self._networks: dict[str, NetworkUse] = {}
        self.overridden: Mapping[str, str] = {}
        """An accepted use of each function that has one, as the last ``find`` has seen them."""

    def find(
        self,
        functions: Mapping[str, PciFunction],
        exceptions: Exceptions,
        domains: ReadDomains = read_nothing,
    ) -> dict[str, str]:
        """Return the PCI functions that the host uses: a text with the reason by address.

        ``domains`` returns the functions that domains of libvirt have on this host.
        """
        adopted = self._marks.keys() & functions.keys()
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

        def is_accepted(address: str, reason: str) -> bool:
            uses.get(address, set()).add(reason)
            return True

        left = self._read(functions, exceptions, read_nothing, is_accepted)
        for address, reasons in uses.items():
            if address in functions and address not in left:
                self._store(functions[address], reasons)

    def can_be_accepted(
        self, address: str, functions: Mapping[str, PciFunction], exceptions: Exceptions
    ) -> bool:
        """Return whether an adoption by force would accept all present uses of a function."""
        left = self._read(functions, exceptions, read_nothing, lambda *_: True)
        return address not in self._marks and address not in left

    def describe_missing(self, functions: Mapping[str, PciFunction]) -> list[str]:
        """Return a warning for each function whose accepted uses are not known (any more)."""
        return [
            f"{address} was adopted by force, and the uses that were accepted then are not known: "
            "repeat cyborg hardware-adopt --force"
            for address in sorted(self._marks.keys() & functions.keys())
            if self._load(functions[address]) is None
        ]

    def _read(
        self,
        functions: Mapping[str, PciFunction],
        exceptions: Exceptions,
        domains: ReadDomains,
        is_accepted: IsAccepted,
    ) -> dict[str, str]:
        return used_functions(
            self._root,
            self._networks,
            functions,
            shared=exceptions.shared,
            checked_ports=functions.keys() - exceptions.free_ports,
            is_accepted=is_accepted,
            domains=domains,
        )

    def _load(self, function: PciFunction) -> Collection[str] | None:
        """Return the accepted uses of a PCI function; None if they are not known."""
        uses = self._load_all(function).get(self._marks[function.address])
        return uses if isinstance(uses, list) else None

    def _load_all(self, function: PciFunction) -> dict[str, Any]:
        """Return what the adoptions of a PCI function have accepted, by mark, the last one last."""
        try:
            stored = json.loads(self._memory().get(_adoptions_key(function.address)) or "")
            adoptions = stored["adoptions"] if stored["model"] == _model(function) else {}
        except (RecursionError, TypeError, KeyError, ValueError):
            return {}
        return adoptions if isinstance(adoptions, dict) else {}

    def _store(self, function: PciFunction, uses: Collection[str]) -> None:
        mark = self._marks[function.address]
        others = [(m, u) for m, u in self._load_all(function).items() if m != mark]
        adoptions = {**dict(others[-MAX_ADOPTIONS:]), mark: sorted(uses)}
        value = {"model": _model(function), "adoptions": adoptions}
        self._memory().put(_adoptions_key(function.address), json.dumps(value))
        for use in sorted(uses):
            LOG.warning("Adopted although the host uses it: %s", use, device=function.address)


def _model(function: PciFunction) -> str:
    return f"{function.vendor}:{function.product}"


def _adoptions_key(address: str) -> str:
    return f"accepted uses {address}"
