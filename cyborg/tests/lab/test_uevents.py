# SPDX-License-Identifier: Apache-2.0
"""The agent's ear on a kernel that has something to tell: which events come, and what is lost."""

import json
import sys
import textwrap
from typing import Any

import pytest

from cyborg.fixtures import guest

pytestmark = pytest.mark.lab

IN_GUEST = textwrap.dedent(
    """
    import glob, json, os, subprocess
    from cyborg.agent.uevents import KernelEar, Lost

    subprocess.run(["modprobe", "nvme"], check=True)
    drive = os.path.dirname(glob.glob("/sys/bus/pci/devices/*/sriov_totalvfs")[0])
    ear, deaf, small = KernelEar({"pci"}), KernelEar({"usb"}), KernelEar({"pci"}, buffer=1)
    told = {}

    def write(name, value):
        with open(f"{drive}/{name}", "w") as file:
            file.write(value)

    def heard(ear):
        events, lost = 0, 0
        while True:
            try:
                some = ear.hear(0.2)
            except Lost:
                lost += 1
                continue
            if not some:
                return [events, lost]
            assert set(some) == {"pci"}, some
            events += len(some)

    for name, value in [
        ("sriov_drivers_autoprobe", "0"),
        ("sriov_numvfs", "2"),
        ("sriov_numvfs", "0"),
        ("driver/unbind", os.path.basename(drive)),
    ]:
        write(name, value)
        told[f"{name} {value[:1]}"] = heard(ear)
    heard(small)
    for _ in range(3000):
        write("uevent", "change")
    told["storm"] = heard(ear)
    told["small"] = heard(small)
    write("uevent", "change")
    told["small again"] = heard(small)
    told["deaf"] = heard(deaf)
    print("RESULT " + json.dumps(told))
    """
)


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """How many events were heard, and how often some were lost, by what was done."""
    outcome = guest.run(
        [sys.executable, "-c", IN_GUEST], [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME]
    )
    assert outcome.code == 0, outcome.output
    line = next(x for x in outcome.output.splitlines() if x.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_what_the_driver_must_see_is_told(told: dict[str, Any]) -> None:
    assert told["sriov_drivers_autoprobe 0"] == [0, 0]
    for act in ("sriov_numvfs 2", "sriov_numvfs 0", "driver/unbind 0"):
        events, lost = told[act]
        assert events >= 1, act
        assert lost == 0


def test_a_storm_fits_into_the_buffer(told: dict[str, Any]) -> None:
    assert told["storm"] == [3000, 0]


def test_what_a_small_buffer_loses_is_noticed_and_the_ear_goes_on(told: dict[str, Any]) -> None:
    events, lost = told["small"]
    assert events < 3000
    assert lost >= 1
    assert told["small again"] == [1, 0]


def test_other_subsystems_are_not_heard(told: dict[str, Any]) -> None:
    assert told["deaf"][0] == 0
