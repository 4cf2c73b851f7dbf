# SPDX-License-Identifier: Apache-2.0
"""Mediated devices: handles that Nova gives to a guest again after their release.

At a hard reboot, and at a start after a stop, Nova's driver for libvirt reads the mediated devices
of the definition of the guest, and adds them to its new definition. It adds those of accelerator
requests that it does not find any more, too. The uuid of a mediated device is that of its attach
handle, and so the next owner of the handle has a device with the same uuid: the former guest gets
this device if it starts first. Other handles, such as PCI functions, are those of the present
accelerator requests at each start.

Nova deletes the definition at a rebuild, and when the server leaves its host. In the mode live,
the agent removes the device from the definition. So such handles are not attached in the mode
next-boot, and get no successor. Attachments of earlier releases may have them: ``server`` has
the proof that they require.
"""

from collections.abc import Collection

from cyborg.core.attachments.attachment import Mode
from cyborg.core.errors import Conflict
from cyborg.core.inventory.device import HandleType

KEPT_TYPES = frozenset({HandleType.MDEV})
"""Types of handles that the definition of a guest keeps."""


def is_kept(types: Collection[str]) -> bool:
    """Return whether the definition of a guest keeps a handle of these types."""
    return not KEPT_TYPES.isdisjoint(types)


def check_mode(types: Collection[str], mode: Mode, selected: str) -> None:
    """Raise Conflict if a handle of these types could not be detached in a mode."""
    if mode is Mode.NEXT_BOOT and is_kept(types):
        raise Conflict(
            f"mode: {selected} needs a mediated device, which Nova gives to the guest again at "
            f"each reboot and start, also after a detach: use the mode {Mode.LIVE}",
            field="mode",
        )


def check_exchangeable(types: Collection[str], context: str) -> None:
    """Raise Conflict if handles of these types cannot be exchanged for those of a successor."""
    if is_kept(types):
        raise Conflict(
            f"device context {context} has a mediated device, which Nova gives to the guest again "
            "at each reboot and start: it gets no successor; shelve or delete the server to "
            "empty the device",
            device_context=context,
        )


def kept_error(server: str) -> str:
    """Return what the release of a mediated device waits for."""
    return (
        f"server {server} may have mediated devices, which Nova gives to its guest again at each "
        "reboot and start: rebuild, shelve or delete the server"
    )
