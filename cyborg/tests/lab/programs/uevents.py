# SPDX-License-Identifier: Apache-2.0
"""Print the numbers of uevents that the agent's socket receives and loses, by action."""

import json

from cyborg.agent.backends.uevents import EventsDropped, NetlinkSource
from cyborg.tests.lab.programs.drive import load_driver


def count(source: NetlinkSource) -> list[int]:
    """Return the numbers of received and of lost events."""
    events, overflows = 0, 0
    while True:
        try:
            subsystems = source.read(0.2)
        except EventsDropped:
            overflows += 1
            continue
        if not subsystems:
            return [events, overflows]
        assert set(subsystems) == {"pci"}, subsystems
        events += len(subsystems)


def main() -> None:
    """Create and remove VFs, unbind the drive, and write more events than a small buffer holds."""
    drive = load_driver()
    source, unsubscribed = NetlinkSource({"pci"}), NetlinkSource({"usb"})
    small = NetlinkSource({"pci"}, buffer=1)
    results = {}
    for name, value in [
        ("sriov_drivers_autoprobe", "0"),
        ("sriov_numvfs", "2"),
        ("sriov_numvfs", "0"),
        ("driver/unbind", drive.name),
    ]:
        (drive / name).write_text(value)
        results[f"{name} {value[:1]}"] = count(source)
    count(small)
    for _ in range(3000):
        (drive / "uevent").write_text("change")
    results["storm"] = count(source)
    results["small"] = count(small)
    (drive / "uevent").write_text("change")
    results["small again"] = count(small)
    results["deaf"] = count(unsubscribed)
    print("RESULT " + json.dumps(results))  # noqa: T201


main()
