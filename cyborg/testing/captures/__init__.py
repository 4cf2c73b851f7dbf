# SPDX-License-Identifier: Apache-2.0
"""Captures of hosts with cards, for tests. The first line of each capture names its source.

``doc/source/contributor/captures.rst`` lists them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from cyborg.core.capture.model import Capture, merge
from cyborg.drivers.replay.recorder import load_capture

FOLDER = Path(__file__).parent

# Drivers of the families, with options that offer the devices of the captures.
# In a configuration file, a list is an option that is repeated, a tuple one with commas.
DRIVERS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "crypto": {"devices": ["vendor=8086"]},
        "fpga": {"devices": ["vendor=8086,product=0b2b|0b2c"]},
        "gpu": {"mdev_types": ["vendor=10de,type=nvidia-593"]},
        "nvme": {"devices": ["class=0108,resource_class=CUSTOM_NVME"]},
        "generic": {"devices": ["vendor=8086,product=1889,resource_class=CUSTOM_VF"]},
        "nic": {
            "devices": ["vendor=15b3,product=101e"],
            "physical_networks": ("physnet1:0000:c1:00.0", "physnet2:ens3f0np0"),
            "vf_counts": ("2", "4"),
        },
    }
)

# Resource classes of the devices by driver.
RESOURCE_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "crypto": "CUSTOM_CRYPTO",
        "fpga": "FPGA",
        "gpu": "VGPU",
        "nvme": "CUSTOM_NVME",
        "generic": "CUSTOM_VF",
        "nic": "CUSTOM_NIC",
    }
)


def capture_names() -> list[str]:
    """Return the names of the captures."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def load(name: str) -> Capture:
    """Return the capture with this name."""
    return load_capture(FOLDER / f"{name}.jsonl")


def load_all(names: Sequence[str] = ()) -> Capture:
    """Return a capture of one host with the cards of several captures, by default of all."""
    return merge("All captures of cards", [load(name) for name in names or capture_names()])
