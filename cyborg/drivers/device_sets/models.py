# SPDX-License-Identifier: Apache-2.0
"""What a whole GPU of each model offers, for GPUs that offer nothing now.

Such a GPU does not show its resource class and traits, and there may be no other GPU of its model
that is offered. So the last known ones are stored.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cyborg.core.inventory.device import AttachHandle, Deployable, Device, DeviceType
from cyborg.drivers.base import Memory, load_record
from cyborg.drivers.device_sets.grouping import Unit


@dataclass(frozen=True, slots=True)
class ModelTable:
    """The models of the GPUs of one backend. ``prefix`` begins their keys in ``memory``."""

    memory: Memory
    prefix: str

    def store(self, units: Iterable[Unit]) -> None:
        """Store the model of each unit that is a whole GPU."""
        whole = (u for u in units if u.is_whole_device and u.device.type is DeviceType.GPU)
        # One text for each model: several would replace each other at each discovery.
        for key, unit in {self._key(unit.device): unit for unit in whole}.items():
            handle = AttachHandle(unit.handle.address, unit.handle.type)
            found = replace(unit.deployable, handles=(handle,), attributes={})
            self.memory.put(key, json.dumps(found.to_dict()))

    def make_unit(self, device: Device) -> Unit | None:
        """Return the unit of a GPU as a whole; None if no unit of its model was ever stored."""
        known = load_record(Deployable, self.memory.get(self._key(device)))
        if known is None or not known.handles:
            return None
        handle = replace(known.handles[0], address=device.address)
        return Unit(device, replace(known, address=device.address, handles=()), handle)

    def _key(self, device: Device) -> str:
        return f"{self.prefix} {device.vendor} {device.model}"
