# SPDX-License-Identifier: Apache-2.0
"""Uses of PCI functions by the host that withhold them from servers, and what overrides them.

Two decisions of an operator override a use: a rule with ``active_port=offer``, and the option
``adopt_in_use``. The latter accepts the uses that the first discovery finds, not those that begin
later: an operator who gives away a NIC whose link is up has not given away the default route.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from cyborg.core.log import get_logger
from cyborg.drivers.base import Memory
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.host_use.domains import ReadDomains, read_nothing
from cyborg.drivers.host_use.networks import NetworkUse
from cyborg.drivers.sysfs import PciFunction

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What does not count as a use by the host.

    For the addresses ``shared``, these are open device nodes and mediated devices, because servers
    and the host use the function at the same time; for ``free_ports``, a network port that is up
    with a link.
    """

    shared: frozenset[str] = frozenset()
    free_ports: frozenset[str] = frozenset()


class HostUses:
    """The uses of PCI functions by the host, as one backend sees them.

    ``in_use`` are the addresses of the option ``adopt_in_use``. ``memory`` returns the memory of
    the driver, which has the accepted uses.
    """

    def __init__(
        self, sysfs_root: Path, in_use: Collection[str], memory: Callable[[], Memory]
    ) -> None:
        self._root = sysfs_root
        self._in_use = frozenset(in_use)
        self._memory = memory
        self._networks: dict[str, NetworkUse] = {}

    def find(
        self,
        functions: Mapping[str, PciFunction],
        exceptions: Exceptions,
        domains: ReadDomains = read_nothing,
    ) -> dict[str, str]:
        """Return the PCI functions that the host uses: a text with the reason by address.

        ``domains`` returns the functions that domains of libvirt have on this host.
        """
        adopted = {address: functions[address] for address in self._in_use & functions.keys()}
        accepted = {address: self._load(function) for address, function in adopted.items()}
        first: dict[str, set[str]] = {a: set() for a, uses in accepted.items() if uses is None}

        def is_accepted(address: str, reason: str) -> bool:
            if address in first:
                first[address].add(reason)
            return address in first or reason in (accepted.get(address) or ())

        found = used_functions(
            self._root,
            self._networks,
            functions,
            shared=exceptions.shared,
            checked_ports=functions.keys() - exceptions.free_ports,
            is_accepted=is_accepted,
            domains=domains,
        )
        for address, uses in first.items():
            self._store(functions[address], uses)
        return found

    def describe_refusal(self, address: str, used: Mapping[str, str]) -> str | None:
        """Return why a PCI function in use is not adopted, with a remedy; None if not in use."""
        if (reason := used.get(address)) is None:
            return None
        remedy = "first" if address in self._in_use else "or force the adoption"
        return f"the host uses it: {reason}; end this use {remedy}"

    def forget(self, addresses: Collection[str]) -> None:
        """Forget the accepted uses of PCI functions: the next discovery accepts those of then."""
        for address in addresses:
            self._memory().put(_key(address), None)

    def _load(self, function: PciFunction) -> frozenset[str] | None:
        """Return the accepted uses of a PCI function; None before its first discovery."""
        try:
            stored = json.loads(self._memory().get(_key(function.address)) or "")
            model, uses = stored["model"], frozenset(stored["uses"])
        except (RecursionError, TypeError, KeyError, ValueError):
            return None
        return uses if model == _model(function) else frozenset()

    def _store(self, function: PciFunction, uses: Collection[str]) -> None:
        value = {"model": _model(function), "uses": sorted(uses)}
        self._memory().put(_key(function.address), json.dumps(value))
        for use in sorted(uses):
            LOG.warning("Adopted although the host uses it: %s", use, device=function.address)


def _model(function: PciFunction) -> str:
    return f"{function.vendor}:{function.product}"


def _key(address: str) -> str:
    return f"accepted uses {address}"
