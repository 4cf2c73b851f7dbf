# SPDX-License-Identifier: Apache-2.0
"""Commands of ``cyborg`` as commands of ``openstack accelerator``."""

import argparse
from typing import Any

from cliff import command

from cyborg.cli import (
    accelerators,
    attachments,
    audit,
    custody,
    device_contexts,
    device_profiles,
    devices,
    discoveries,
    drivers,
    hardware,
    jobs,
    layouts,
    limits,
    outbox,
    services,
)
from cyborg.cli.views import top, topology


class _PluginCommand:
    """Mix-in that gets the REST client from the client manager of ``openstack``."""

    app: Any

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Set the REST client and run the command."""
        self.app.rest = self.app.client_manager.cyborg
        return super().take_action(parsed_args)  # type: ignore[misc]


def _as_plugin_command(command_class: type[command.Command]) -> type[command.Command]:
    attributes = {"__doc__": command_class.__doc__, "__module__": __name__}
    return type(command_class.__name__, (_PluginCommand, command_class), attributes)


AcceleratorList = _as_plugin_command(accelerators.List)
AcceleratorSet = _as_plugin_command(accelerators.Update)
AcceleratorShow = _as_plugin_command(accelerators.Show)
AttachmentCreate = _as_plugin_command(attachments.Attach)
AttachmentDelete = _as_plugin_command(attachments.Detach)
AttachmentList = _as_plugin_command(attachments.List)
AttachmentShow = _as_plugin_command(attachments.Show)
AuditCreate = _as_plugin_command(audit.Audit)
DeviceContextBind = _as_plugin_command(device_contexts.Bind)
DeviceContextCandidates = _as_plugin_command(device_contexts.Candidates)
DeviceContextCreate = _as_plugin_command(device_contexts.Create)
DeviceContextDelete = _as_plugin_command(device_contexts.Delete)
DeviceContextExplain = _as_plugin_command(device_contexts.Explain)
DeviceContextList = _as_plugin_command(device_contexts.List)
DeviceContextPreBind = _as_plugin_command(device_contexts.PreBind)
DeviceContextSet = _as_plugin_command(device_contexts.Set)
DeviceContextShow = _as_plugin_command(device_contexts.Show)
DeviceContextUnbind = _as_plugin_command(device_contexts.Unbind)
DeviceCustodyShow = _as_plugin_command(custody.Custody)
DeviceLayoutList = _as_plugin_command(layouts.List)
DeviceLayoutSet = _as_plugin_command(layouts.Set)
DeviceMaintain = _as_plugin_command(devices.Maintain)
DeviceProfileCapacity = _as_plugin_command(device_profiles.Capacity)
DeviceProfileExplain = _as_plugin_command(device_profiles.Explain)
DriverInstall = _as_plugin_command(drivers.Install)
DriverList = _as_plugin_command(drivers.List)
DriverShow = _as_plugin_command(drivers.Show)
DriverUninstall = _as_plugin_command(drivers.Uninstall)
DriverUpdate = _as_plugin_command(drivers.Update)
HardwareAdopt = _as_plugin_command(hardware.Adopt)
HardwareList = _as_plugin_command(hardware.List)
HardwareRelease = _as_plugin_command(hardware.Release)
HostAttachmentCreate = _as_plugin_command(attachments.AttachHost)
HostAttachmentDelete = _as_plugin_command(attachments.DetachHost)
HostForget = _as_plugin_command(services.ForgetHost)
JobCancel = _as_plugin_command(jobs.Cancel)
JobList = _as_plugin_command(jobs.List)
JobShow = _as_plugin_command(jobs.Show)
LimitsShow = _as_plugin_command(limits.Show)
OutboxDelete = _as_plugin_command(outbox.Delete)
OutboxList = _as_plugin_command(outbox.List)
OutboxRetry = _as_plugin_command(outbox.Retry)
ServiceDelete = _as_plugin_command(services.Delete)
ServiceDiscover = _as_plugin_command(discoveries.Create)
ServiceList = _as_plugin_command(services.List)
Top = _as_plugin_command(top.Top)
Topology = _as_plugin_command(topology.Topology)
