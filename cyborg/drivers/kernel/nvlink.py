# SPDX-License-Identifier: Apache-2.0
"""Place of an NVIDIA GPU on its baseboard, and its NVLinks to other GPUs, from NVML.

NVIDIA documents the functions in the NVML API Reference Guide: ``nvmlDeviceGetModuleId``, and in
"NvLink Methods" ``nvmlDeviceGetNvLinkState``, ``nvmlDeviceGetNvLinkRemoteDeviceType`` and
``nvmlDeviceGetNvLinkRemotePciInfo_v2``. ``pynvml.py`` of nvidia-ml-py has the values.
"""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Mapping
from typing import Any

from cyborg.core.address import PciAddress


def read_module(nvml: Any, device: Any) -> int | None:
    """Return the module id of a GPU; None for a GPU that is on no baseboard."""
    number = ctypes.c_uint()
    with contextlib.suppress(nvml.NVMLError):
        # With a reference, which all releases of the binding accept.
        if nvml.nvmlDeviceGetModuleId(device, ctypes.byref(number)) == nvml.NVML_SUCCESS:
            # The id of a card of its own is 0.
            return number.value or None
    return None


def read_links(nvml: Any, device: Any) -> Mapping[str, int]:
    """Return the number of active NVLinks of a GPU to each other GPU, by the PCI address.

    Links to an NVSwitch are left out: Fabric Manager decides which GPUs these connect.
    """
    links: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        # A GPU has fewer links than the maximum, and NVML fails for the others.
        with contextlib.suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetNvLinkState(device, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link)
            if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                other = nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link)
                links[str(PciAddress(other.domain, other.bus, other.device, 0))] += 1
    return dict(sorted(links.items()))
