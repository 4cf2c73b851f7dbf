# SPDX-License-Identifier: Apache-2.0
"""cyborg-capture on a real kernel: the replay shows the devices that the drivers found there."""

import json
from pathlib import Path
from typing import Any

import pytest

from cyborg.drivers.base import Driver
from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.drivers.replay.recorder import load_capture
from cyborg.tests.fixtures.machine import guest

pytestmark = [pytest.mark.lab, pytest.mark.long]

DEVICES = (*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *guest.EDU)
CRYPTO = (*guest.CRYPTO_BACKEND, "-device", "virtio-crypto-pci,cryptodev=engine0,id=crypto0")
DRIVERS: tuple[type[Driver], ...] = (CryptoDriver, GenericDriver, NvmeDriver)


def test_replay_of_the_guest_shows_its_devices(tmp_path: Path) -> None:
    result: list[Any] = guest.run_program("capture", (*DEVICES, *CRYPTO))
    code, content, found = result
    assert code == 0
    file = tmp_path / "guest.jsonl.gz"
    file.write_bytes(bytes.fromhex(content))
    capture = load_capture(file)
    assert capture.kernel
    host = ReplayedHost(capture)
    try:
        for driver in DRIVERS:
            replayed = host.create_driver(driver, driver.name, {"devices": ["address=*"]})
            devices = [device.to_dict() for device in replayed.discover()]
            assert json.loads(json.dumps(devices)) == found[driver.name]
    finally:
        host.close()
    assert [d["type"] for d in found["nvme"]] == ["SSD"]
    assert [len(p["handles"]) for p in found["nvme"][0]["deployables"]] == [2]
    assert found["crypto"], "the virtio-crypto device"
    assert len(found["generic"]) > 2
