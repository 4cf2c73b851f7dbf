# SPDX-License-Identifier: Apache-2.0
"""Reset of a PCI function after its use, as the option ``reset`` has it.

VFIO resets a function itself when a process opens and closes it, and ignores a failure
(``vfio_pci_core_enable`` and ``vfio_pci_core_disable`` of ``drivers/vfio/pci/vfio_pci_core.c``).
This module resets the function once more, by the attribute ``reset``, and detects a failure.
"""

from collections.abc import Callable
from enum import StrEnum
from functools import partial

from cyborg.core.drivers.registry import Option
from cyborg.core.errors import DriverFailed
from cyborg.core.log import get_logger
from cyborg.drivers.base import Driver, one_of
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.kernel.reset import find_current_obstacle
from cyborg.drivers.sysfs import Sysfs, canonical_address

LOG = get_logger(__name__)


class ResetPolicy(StrEnum):
    """Values of the option ``reset``."""

    NEVER = "never"
    IF_POSSIBLE = "if_possible"
    REQUIRED = "required"


OPTION = Option(
    "reset",
    "str",
    str(ResetPolicy.NEVER),
    "Whether the agent resets a PCI function after each use, before it is offered again: never "
    "(only VFIO resets it), if_possible (if the kernel has a method and no kernel driver of the "
    "host is bound to it), or required (a function that cannot be reset is shown and not "
    "scheduled). A function whose reset fails stays unavailable, and the reset is retried.",
)


class Resetter:
    """Reset of a backend's PCI functions according to its option ``reset``.

    A driver without the option resets nothing. ``run`` resets the PCI function at an address, and
    returns its reset methods; None if it disappeared.
    """

    def __init__(self, driver: Driver, run: Callable[[str], str | None]) -> None:
        """Read the option. Raise Misconfigured for an unknown value."""
        # The driver nvme has no such option: an erasure is more than a reset.
        self.policy = ResetPolicy.NEVER
        if OPTION.name in driver.options:
            self.policy = driver.parse_option(OPTION.name, one_of(ResetPolicy))
        self._driver = driver
        self._run = run

    @property
    def enabled(self) -> bool:
        """Return whether PCI functions are reset after their use."""
        return self.policy is not ResetPolicy.NEVER

    def reset(self, handle: str) -> None:
        """Reset a handle that is a PCI function. Raise DriverFailed if the reset fails.

        Do nothing for other handles. With ``reset = if_possible``, a PCI function that cannot be
        reset is not changed and no error is raised.
        """
        if (address := canonical_address(handle)) is None:
            return  # no function, but for example a mediated device, which no longer exists
        sysfs, backend = Sysfs(self._driver.sysfs_root), self._driver.backend
        function = sysfs.pci_function(address)
        if function is None or not self.enabled:
            return
        # Not what the last discovery has read: the host may have begun to use it since.
        read_domains = partial(self._driver.read_domains, fresh=True)
        used = used_functions(sysfs.root, domains=read_domains)
        obstacle = find_current_obstacle(sysfs, function, used)
        if obstacle is not None and self.policy is ResetPolicy.IF_POSSIBLE:
            LOG.info("PCI function not reset: %s", obstacle, backend=backend, device=address)
        elif obstacle is not None:
            raise DriverFailed(f"{address} cannot be reset: {obstacle}")
        elif (methods := self._run(address)) is not None:
            text = "PCI function reset, its reset methods: %s"
            LOG.info(text, methods, backend=backend, device=address)
