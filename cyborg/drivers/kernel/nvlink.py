# SPDX-License-Identifier: Apache-2.0
"""Place of an NVIDIA GPU on its baseboard, and its NVLinks to other GPUs, from NVML.

NVIDIA documents the functions in the NVML API Reference Guide: ``nvmlDeviceGetModuleId``, and in
"NvLink Methods" ``nvmlDeviceGetNvLinkState``, ``nvmlDeviceGetNvLinkRemoteDeviceType`` and
``nvmlDeviceGetNvLinkRemotePciInfo_v2``; in "Field Value Enums" ``NVML_FI_DEV_NVLINK_GET_SPEED`` and
``NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON``. ``pynvml.py`` of nvidia-ml-py has the values.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.drivers.kernel.nvml_errors import ignored_if_unsupported


def read_module(nvml: Any, device: Any) -> int | None:
    """Return the module id of a GPU; None for a GPU that is on no baseboard."""
    number = ctypes.c_uint()
    with ignored_if_unsupported(nvml):
        # With a reference, which all releases of the binding accept.
        if nvml.nvmlDeviceGetModuleId(device, ctypes.byref(number)) == nvml.NVML_SUCCESS:
            # The id of a card of its own is 0.
            return number.value or None
    return None


def read_links(nvml: Any, device: Any) -> Mapping[str, int]:
    """Return the number of active NVLinks of a GPU to each other GPU, by the PCI address.

    Links to an NVSwitch are left out: Fabric Manager decides which GPUs these connect.
    """
    links = Counter(address for _, address in _links_to_gpus(nvml, device))
    return dict(sorted(links.items()))


def read_speed(nvml: Any, device: Any) -> int | None:
    """Return the speed of the slowest active NVLink to another GPU, in megabytes per second.

    It is the raw speed of one direction, with the overhead of the protocol, such as 26562. Return
    None if the GPU has no such link, or does not support the question.
    """
    links = [link for link, _ in _links_to_gpus(nvml, device)]
    if not links:
        return None
    fields = [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link) for link in links]
    speeds = _read_fields(nvml, device, fields)
    if not speeds:
        # GPUs before Hopper have only the common value of all links.
        speeds = _read_fields(nvml, device, [(nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0)])
    return min(speeds, default=None)


def _read_fields(nvml: Any, device: Any, fields: list[tuple[int, int]]) -> list[int]:
    """Return the values of fields, given with their links; leave out those that are not known."""
    values: Any = ()
    with ignored_if_unsupported(nvml):
        values = nvml.nvmlDeviceGetFieldValues(device, fields)
    found = [int(v.value.uiVal) for v in values if v.nvmlReturn == nvml.NVML_SUCCESS]
    return [value for value in found if value]


def _links_to_gpus(nvml: Any, device: Any) -> Iterator[tuple[int, str]]:
    """Yield the number of each active link to another GPU, with the address of the other GPU."""
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        # A GPU has fewer links than the maximum, and NVML fails for the others.
        with ignored_if_unsupported(nvml):
            if nvml.nvmlDeviceGetNvLinkState(device, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link)
            if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                other = nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link)
                yield link, str(PciAddress(other.domain, other.bus, other.device, 0))
