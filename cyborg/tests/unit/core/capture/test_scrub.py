# SPDX-License-Identifier: Apache-2.0
"""What identifies a host is replaced, each value by the same one of its form."""

import re

from cyborg.core.capture.model import Capture, Folder, Uevent
from cyborg.core.capture.scrub import Scrubber

SERIAL, UUID, MAC = "S64GNE0R500001", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "3c:fd:fe:12:34:56"
NVME = "sys/devices/pci0000:5d/0000:5e:00.0/nvme/nvme0"
CAPTURE = Capture(
    "host-7",
    {
        NVME: Folder(
            {
                "serial": f"{SERIAL}\n".encode(),
                "model": b"SAMSUNG\n",
                "wwid": f"nvme.{UUID}\n".encode(),
                "vpd": b"\x82\x05\x00SN123\xff",
            }
        ),
        f"{NVME}/nvme0n1": Folder({"uuid": f"{UUID}\n".encode()}),
        "sys/class/net/eth0": Folder({"address": f"{MAC}\n".encode(), "flags": b"0x1003\n"}),
        "sys/class/net/lo": Folder({"address": b"00:00:00:00:00:00\n"}),
        "sys/bus/mdev/devices": Folder({}, {UUID: f"../../../devices/x/{UUID}"}),
        f"sys/devices/x/{UUID}": Folder(),
        "proc/self": Folder(
            {
                "mountinfo": b"1 2 259:1 / / rw - ext4 /dev/nvme0n1p1 rw\n"
                b"3 1 259:2 /v /home/alice rw shared:9 - ext4 /dev/nvme0n1p2 rw,x\n"
                b"4 1 0:4 / /run rw - tmpfs secret-name rw\n"
            }
        ),
    },
    uevents=(Uevent(0.1, "add", "mdev", f"/devices/x/{UUID}"),),
    nvml={"0000:3b:00.0": {"uuid": f"GPU-{UUID}", "memory": 8, "mig": None}},
)


def scrub(salt: bytes = b"salt") -> Capture:
    return Scrubber(salt).scrub(CAPTURE)


def test_scrub_leaves_no_identifying_value() -> None:
    found = repr(scrub())
    for value in (SERIAL, UUID, MAC, "alice", "secret-name", "SN123"):
        assert value not in found, value
    assert scrub().scrubbed


def test_scrub_keeps_everything_else() -> None:
    folders = scrub().folders
    assert folders[NVME].files["model"] == b"SAMSUNG\n"
    assert folders["sys/class/net/eth0"].files["flags"] == b"0x1003\n"
    assert folders["sys/class/net/lo"].files["address"] == b"00:00:00:00:00:00\n"
    mounts = (folders["proc/self"].files["mountinfo"] or b"").decode().splitlines()
    assert mounts[0] == "1 2 259:1 / / rw - ext4 /dev/nvme0n1p1 rw"
    assert re.fullmatch(r"3 1 259:2 / /mnt/[0-9a-f]+ rw - ext4 /dev/nvme0n1p2 rw", mounts[1])


def test_scrub_replaces_equal_values_by_equal_ones_of_the_same_form() -> None:
    folders = scrub().folders
    (uuid,) = folders["sys/bus/mdev/devices"].links
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
    assert folders["sys/bus/mdev/devices"].links[uuid] == f"../../../devices/x/{uuid}"
    assert f"sys/devices/x/{uuid}" in folders
    assert scrub().uevents[0].path == f"/devices/x/{uuid}"
    serial = (folders[NVME].files["serial"] or b"").decode()
    assert re.fullmatch(r"[A-Z]\d\d[A-Z]{3}\d[A-Z]\d{6}\n", serial)
    mac = (folders["sys/class/net/eth0"].files["address"] or b"").decode()
    assert re.fullmatch(r"([0-9a-f]{2}:){5}[0-9a-f]{2}\n", mac)


def test_scrub_depends_on_the_salt_alone() -> None:
    assert scrub() == scrub()
    assert scrub(b"other").folders[NVME] != scrub().folders[NVME]
