# SPDX-License-Identifier: Apache-2.0
"""The commands of ``cyborg`` as commands of ``openstack accelerator``."""

import argparse
from typing import Any

from cliff import command

from cyborg.cli import accelerators, discoveries, drivers, hardware, jobs, services


class _Plugged:
    """Finds the service by the client manager of ``openstack``."""

    app: Any

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Do what the command does."""
        self.app.rest = self.app.client_manager.cyborg
        return super().take_action(parsed_args)  # type: ignore[misc]


def _plugged(its: type[command.Command]) -> type[command.Command]:
    return type(its.__name__, (_Plugged, its), {"__doc__": its.__doc__, "__module__": __name__})


AcceleratorList = _plugged(accelerators.List)
AcceleratorSet = _plugged(accelerators.Update)
AcceleratorShow = _plugged(accelerators.Show)
DriverInstall = _plugged(drivers.Install)
DriverList = _plugged(drivers.List)
DriverShow = _plugged(drivers.Show)
DriverUninstall = _plugged(drivers.Uninstall)
DriverUpdate = _plugged(drivers.Update)
HardwareAdopt = _plugged(hardware.Adopt)
HardwareList = _plugged(hardware.List)
HardwareRelease = _plugged(hardware.Release)
JobCancel = _plugged(jobs.Cancel)
JobList = _plugged(jobs.List)
JobShow = _plugged(jobs.Show)
ServiceDiscover = _plugged(discoveries.Create)
ServiceList = _plugged(services.List)
