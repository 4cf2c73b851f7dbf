# SPDX-License-Identifier: Apache-2.0
"""Options with which a driver finds Fabric Manager."""

from cyborg.core.drivers.registry import Option
from cyborg.drivers.base import Driver, in_range
from cyborg.drivers.gpu.fabric.manager import FabricManager
from cyborg.drivers.gpu.fabric.mode import CONFIG, find_config
from cyborg.drivers.gpu.fabric.requests import (
    ADDRESS,
    COMMAND,
    LIBRARY,
    TIMEOUT,
    FabricRequests,
    check_address,
)
from cyborg.drivers.pci.access import HostAccess

# A longer one could exceed the 60 seconds that Fabric Manager waits for the active partitions.
_MAX_TIMEOUT = 15.0

OPTIONS = (
    Option(
        "fabric_address",
        "str",
        ADDRESS,
        "Address of Fabric Manager: host:port (FM_CMD_BIND_INTERFACE and FM_CMD_PORT_NUMBER of "
        "fabricmanager.cfg), also that of a service VM, or the path of its unix socket "
        "(FM_CMD_UNIX_SOCKET_PATH).",
        host_only=True,
    ),
    Option(
        "fabric_library",
        "str",
        LIBRARY,
        "Name or path of the library of Fabric Manager, in the version of Fabric Manager. Without "
        "it fabric_command is used.",
        host_only=True,
    ),
    Option(
        "fabric_command",
        "str",
        COMMAND,
        "Name or path of the program fmpm. It cannot activate partitions of virtual functions, nor "
        "tell a restarted Fabric Manager which partitions are active.",
        host_only=True,
    ),
    Option(
        "fabric_config",
        "str",
        CONFIG,
        "Path of the configuration file of Fabric Manager, whose FABRIC_MODE must be that of the "
        "members: 1 for whole GPUs, 2 for virtual functions. It is not read if fabric_address is "
        "that of another host or of a service VM.",
        host_only=True,
    ),
    Option(
        "fabric_timeout",
        "float",
        TIMEOUT,
        f"Timeout of one request to Fabric Manager in seconds, up to {_MAX_TIMEOUT:g}.",
    ),
)


def open_fabric(driver: Driver) -> FabricManager:
    """Return the client of Fabric Manager for a driver with these options. Raise Misconfigured."""
    requests = FabricRequests(
        address=driver.parse_option("fabric_address", check_address),
        timeout=driver.parse_option("fabric_timeout", in_range(0.1, _MAX_TIMEOUT, " s")),
        library=driver.options["fabric_library"],
        command=driver.options["fabric_command"],
    )
    # The agent sets the memory after the driver was created.
    return FabricManager(
        requests,
        lambda: driver.memory,
        HostAccess.of(driver.sysfs_root).kernel_log,
        find_config(requests.address, driver.options["fabric_config"]),
    )
