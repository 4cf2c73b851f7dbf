# SPDX-License-Identifier: Apache-2.0
"""The drivers of OpenStack Cyborg, releases 12 to 17, and their counterparts here.

The names are those of its entry points ``cyborg.accelerator.driver``.
"""

from collections.abc import Mapping

COUNTERPARTS: Mapping[str, str | None] = {
    "fake_driver": "fake",
    "huawei_ascend_driver": "generic",
    "inspur_fpga_driver": "fpga",
    "inspur_nvme_ssd_driver": "nvme",
    "intel_fpga_driver": "fpga",
    "intel_nic_driver": "nic",
    "intel_qat_driver": "crypto",
    "nvidia_gpu_driver": "gpu",
    "nvmf_spdk_driver": None,
    "pci_driver": "generic",
    "xilinx_fpga_driver": "fpga",
}
"""The driver of this service for each driver; None without a counterpart."""


def describe_counterpart(name: str) -> str | None:
    """Return the remedy for the name of a driver of OpenStack Cyborg, None for any other name."""
    if name not in COUNTERPARTS:
        return None
    driver = COUNTERPARTS[name]
    remedy = "has no counterpart" if driver is None else f"is the driver {driver!r} here"
    return (
        f"which is a driver of OpenStack Cyborg and {remedy}; convert the configuration file with "
        "cyborg-status convert-config"
    )
