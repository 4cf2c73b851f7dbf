# SPDX-License-Identifier: Apache-2.0
"""The conductor's side of the bus: one method for each message, each the matter of one room.

Arguments are plain values that may hold anything; the rooms check them. What a method raises of
``cyborg.core.errors`` travels back to the caller. This is version 1.0 of the internal contract.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from oslo_config import cfg

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.devices import Devices
from cyborg.conductor.discoveries import Agents, Discoveries
from cyborg.conductor.hosts import Hosts
from cyborg.conductor.outbox import Outbox
from cyborg.conductor.periodic import Loop
from cyborg.conductor.publisher import Publisher
from cyborg.conductor.requests import Requests
from cyborg.db.unit_of_work import UnitOfWork

Plain = Mapping[str, Any]


class Conductor:
    """All rooms of the conductor, and the loops that do what these have promised.

    The loops are not running: whoever builds a conductor starts and stops them. ``ctxt`` is the
    request context of the caller; it says who asked, for the log.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: Agents,
        placement: Placement,
        nova: Nova,
    ) -> None:
        self.publisher = Publisher(conf, uow, placement)
        self.outbox = Outbox(conf, uow, nova)
        publishing = Loop("publisher", conf.conductor.publish_interval, self.publisher.run_once)
        delivering = Loop("outbox", conf.conductor.outbox_interval, self.outbox.run_once)
        sweeping = Loop("sweep", conf.conductor.hello_interval, self.sweep)
        self.loops: Sequence[Loop] = (publishing, delivering, sweeping)
        self.hosts = Hosts(conf, uow, publishing.wake)
        self.devices = Devices(uow, publishing.wake)
        self.discoveries = Discoveries(conf, uow, agents)
        self.device_profiles = DeviceProfiles(uow)
        self.requests = Requests(conf, uow, delivering.wake)

    def sweep(self) -> None:
        """Finish what nobody else would: open discoveries, drained things that are free."""
        self.discoveries.sweep()
        self.hosts.sweep()

    def hello(
        self,
        ctxt: Any,
        host: str,
        epoch: str,
        endpoint: str | None,
        status: str,
        drivers: Sequence[Plain],
        digest: str | None,
        versions: Plain | None,
    ) -> dict[str, Any]:
        """An agent is alive; the answer says when to come again and whether to report."""
        return self.hosts.hello(host, epoch, endpoint, status, drivers, digest, versions)

    def report(self, ctxt: Any, report: Plain) -> dict[str, Any]:
        """An agent tells everything its host has."""
        return self.hosts.report(report)

    def service_hello(
        self, ctxt: Any, binary: str, host: str, epoch: str, versions: Plain | None
    ) -> dict[str, Any]:
        """A daemon other than an agent is alive; the answer says when to come again."""
        return self.hosts.service_hello(binary, host, epoch, versions)

    def device_profile_create(self, ctxt: Any, profile: Plain) -> dict[str, Any]:
        """Make a device profile; the answer is its row."""
        return self.device_profiles.create(profile)

    def device_profile_delete(self, ctxt: Any, keys: Sequence[str]) -> None:
        """Delete device profiles by uuid or name, all or none."""
        self.device_profiles.delete(keys)

    def arq_create(
        self, ctxt: Any, device_profile_name: str, project_id: str | None
    ) -> dict[str, Any]:
        """Make the accelerator requests of a profile; the answer holds their rows as ``arqs``."""
        return self.requests.create(device_profile_name, project_id)

    def arq_patch(self, ctxt: Any, wishes: Sequence[Plain], verb: str, scope: str | None) -> None:
        """Bind or unbind accelerator requests, all or none."""
        self.requests.patch(wishes, verb, scope)

    def arq_delete(
        self,
        ctxt: Any,
        uuids: Sequence[str] | None,
        instance: str | None,
        scope: str | None,
        bound_too: bool,
    ) -> None:
        """Delete accelerator requests by uuid or by instance."""
        self.requests.delete(uuids, instance, scope, bound_too)

    def device_set_status(self, ctxt: Any, uuid: str, status: str) -> None:
        """Open a device to new requests, or close it."""
        self.devices.set_status(uuid, status)

    def discovery_create(
        self, ctxt: Any, host: str | None = None, driver: str | None = None
    ) -> dict[str, Any]:
        """Have backends look again; the answer is the discovery's uuid."""
        return self.discoveries.create(host, driver)

    def discovery_done(
        self, ctxt: Any, discovery_id: str, host: str, drivers: Sequence[Plain]
    ) -> None:
        """An agent tells how a discovery ended."""
        self.discoveries.done(discovery_id, host, drivers)
