# SPDX-License-Identifier: Apache-2.0
"""The nvme driver and its commands without a controller."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyborg.core.errors import DriverFailed
from cyborg.drivers.kernel.nvme import Controller
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.pci.access import HostAccess


class SimulatedNvmeDriver(NvmeDriver):
    """The nvme driver, which erases nothing."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        """Create the driver."""
        result = {"method": "format, user data erase", "namespaces": 1, "samples": 16}
        access = replace(
            HostAccess.of(Path(sysfs_root)), erase=lambda address, timeout, methods: result
        )
        super().__init__(backend, options, sysfs_root, access)


class ListedController(Controller):
    """A controller with stored Identify data, by the number of the data structure.

    ``controllers`` are the Controller Lists of namespaces.
    """

    def __init__(
        self, answers: Mapping[int, bytes], controllers: Mapping[int, bytes] | None = None
    ) -> None:
        super().__init__(-1)
        self._answers = answers
        self._controllers = controllers or {}

    def _identify(self, structure: int, namespace: int = 0) -> bytes:
        found = self._controllers.get(namespace) if structure == 0x12 else None
        if found is None and structure not in self._answers:
            raise DriverFailed("NVMe admin command 0x06 failed with status 0x2")
        return self._answers[structure] if found is None else found
