# SPDX-License-Identifier: Apache-2.0
"""The conductor as others see it. Every method may raise TimedOut and Unavailable."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from oslo_config import cfg

from cyborg.rpc.client import Client
from cyborg.rpc.contract import CONDUCTOR
from cyborg.rpc.transport import Transport

Plain = Mapping[str, Any]


class ConductorClient:
    """Calls any conductor; the context of the request that the thread serves goes along."""

    def __init__(self, transport: Transport, conf: cfg.ConfigOpts) -> None:
        self._client = Client(CONDUCTOR, transport, conf)

    def hello(
        self,
        host: str,
        epoch: str,
        endpoint: str | None,
        status: str,
        drivers: Sequence[Plain],
        digest: str | None,
        versions: Plain | None,
        wanted: int | None = None,
    ) -> dict[str, Any]:
        """Say that an agent is alive, and to which revision of what is wanted it has come.

        ``{"interval": seconds, "report": is one wanted, "wanted": the revision that is}``.
        """
        answer = self._client.call(
            "hello",
            host=host,
            epoch=epoch,
            endpoint=endpoint,
            status=status,
            drivers=drivers,
            digest=digest,
            versions=versions,
            wanted=wanted,
        )
        return cast(dict[str, Any], answer)

    def report(self, report: Plain) -> dict[str, Any]:
        """Tell all that a host has (``core.wire.dump_report``). Raises Stale, Invalid, Conflict."""
        return cast(dict[str, Any], self._client.call("report", report=report))

    def service_hello(
        self, binary: str, host: str, epoch: str, versions: Plain | None
    ) -> dict[str, Any]:
        """Say that a daemon other than an agent is alive.

        ``{"interval": seconds, "now": the conductor's time, naive UTC in ISO 8601}``.
        """
        answer = self._client.call(
            "service_hello", binary=binary, host=host, epoch=epoch, versions=versions
        )
        return cast(dict[str, Any], answer)

    def device_profile_create(self, profile: Plain) -> dict[str, Any]:
        """Make a device profile and return its row. Raises Invalid, Conflict."""
        answer = self._client.call("device_profile_create", profile=profile)
        return cast(dict[str, Any], answer)

    def device_profile_delete(self, keys: Sequence[str]) -> None:
        """Delete device profiles by uuid or name, all or none. Raises NotFound, InUse."""
        self._client.call("device_profile_delete", keys=keys)

    def accelerator_update(self, uuid: str, label: Plain, scope: str | None) -> dict[str, Any]:
        """Label an accelerator, return its row. Raises Invalid, NotFound, WrongState.

        ``label`` has those of name, description and tags that change.
        """
        answer = self._client.call("accelerator_update", uuid=uuid, label=label, scope=scope)
        return cast(dict[str, Any], answer)

    def attribute_create(self, deployable: str, key: str, value: str) -> dict[str, Any]:
        """Give an attribute to a deployable, return its row. Raises Invalid, NotFound, Conflict."""
        answer = self._client.call("attribute_create", deployable=deployable, key=key, value=value)
        return cast(dict[str, Any], answer)

    def attribute_delete(self, uuid: str) -> None:
        """Take an operator's attribute away. Raises Invalid, NotFound."""
        self._client.call("attribute_delete", uuid=uuid)

    def arq_create(self, device_profile_name: str, project_id: str | None) -> dict[str, Any]:
        """Make the requests of a profile: ``{"arqs": [row]}``. Raises NotFound."""
        answer = self._client.call(
            "arq_create", device_profile_name=device_profile_name, project_id=project_id
        )
        return cast(dict[str, Any], answer)

    def arq_patch(
        self,
        wishes: Sequence[Plain],
        verb: str,
        scope: str | None,
        project: str | None = None,
    ) -> None:
        """Bind or unbind, all or none. Raises Invalid, NotFound, Conflict and its kinds.

        ``project`` is the one whose instances the caller's own roles reach, None for more than one.
        """
        self._client.call("arq_patch", wishes=wishes, verb=verb, scope=scope, project=project)

    def arq_delete(
        self,
        uuids: Sequence[str] | None,
        instance: str | None,
        scope: str | None,
        bound_too: bool,
    ) -> None:
        """Delete requests by uuid or by instance. Raises NotFound, Forbidden."""
        self._client.call(
            "arq_delete", uuids=uuids, instance=instance, scope=scope, bound_too=bound_too
        )

    def device_set_status(self, uuid: str, status: str) -> None:
        """Open a device to new requests, or close it. Raises Invalid, NotFound."""
        self._client.call("device_set_status", uuid=uuid, status=status)

    def deployable_program(self, uuid: str, image_uuid: str) -> None:
        """Have an image loaded into a deployable. Raises Invalid, NotFound, InUse, WrongState."""
        self._client.call("deployable_program", uuid=uuid, image_uuid=image_uuid)

    def outbox_retry(self, uuid: str) -> None:
        """Have a dead message delivered after all. Raises Invalid, NotFound, WrongState."""
        self._client.call("outbox_retry", uuid=uuid)

    def outbox_delete(self, uuid: str) -> None:
        """Forget a dead message. Raises Invalid, NotFound, WrongState."""
        self._client.call("outbox_delete", uuid=uuid)

    def audit_create(self, host: str | None, repair: bool) -> dict[str, Any]:
        """Have a host or all be audited: ``{"uuid": of the audit}``. Raises Invalid, NotFound."""
        answer = self._client.call("audit_create", host=host, repair=repair)
        return cast(dict[str, Any], answer)

    def discovery_create(
        self, host: str | None = None, driver: str | None = None
    ) -> dict[str, Any]:
        """Have backends look again: ``{"uuid": of the discovery}``. Raises NotFound."""
        answer = self._client.call("discovery_create", host=host, driver=driver)
        return cast(dict[str, Any], answer)

    def discovery_done(self, discovery_id: str, host: str, drivers: Sequence[Plain]) -> None:
        """Tell how a discovery ended on a host. Raises Invalid."""
        self._client.call("discovery_done", discovery_id=discovery_id, host=host, drivers=drivers)

    def driver_install(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Plain | None,
    ) -> dict[str, Any]:
        """Enable a driver on hosts, on all that have it for None: ``{"uuid": of the job}``.

        ``backend`` is the driver's name for None. Raises Invalid, NotFound, Conflict.
        """
        answer = self._client.call(
            "driver_install", driver=driver, backend=backend, hosts=hosts, config=config
        )
        return cast(dict[str, Any], answer)

    def driver_uninstall(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        drain: bool,
        force: bool,
    ) -> dict[str, Any]:
        """Have hosts give up a driver's backends, all or one: ``{"uuid": of the job}``.

        Raises Invalid, NotFound, InUse, Conflict.
        """
        answer = self._client.call(
            "driver_uninstall",
            driver=driver,
            backend=backend,
            hosts=hosts,
            drain=drain,
            force=force,
        )
        return cast(dict[str, Any], answer)

    def driver_update(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Plain | None,
        wish: str | None,
        reload: bool,
    ) -> dict[str, Any]:
        """Change a driver's backends, one host after another: ``{"uuid": of the job}``.

        ``wish`` is enabled or disabled; what is None stays. Raises Invalid, NotFound, Conflict.
        """
        answer = self._client.call(
            "driver_update",
            driver=driver,
            backend=backend,
            hosts=hosts,
            config=config,
            wish=wish,
            reload=reload,
        )
        return cast(dict[str, Any], answer)

    def hardware_adopt(self, host: str, address: str, backend: str) -> dict[str, Any]:
        """Have a backend manage a device that it does not: ``{"uuid": of the job}``.

        Raises Invalid, NotFound, Conflict.
        """
        answer = self._client.call("hardware_adopt", host=host, address=address, backend=backend)
        return cast(dict[str, Any], answer)

    def hardware_release(self, uuid: str) -> dict[str, Any]:
        """Have a backend leave a device alone: ``{"uuid": of the job}``.

        Raises Invalid, NotFound, InUse, Conflict.
        """
        return cast(dict[str, Any], self._client.call("hardware_release", uuid=uuid))

    def job_cancel(self, uuid: str) -> None:
        """Have a job about a driver begin nothing more. Raises Invalid, NotFound, WrongState."""
        self._client.call("job_cancel", uuid=uuid)

    def backends_wanted(self, host: str, epoch: str) -> dict[str, Any]:
        """Return what is wanted of a host (``core.wanted.WantedHost``). Raises Invalid, Stale."""
        answer = self._client.call("backends_wanted", host=host, epoch=epoch)
        return cast(dict[str, Any], answer)

    def backends_applied(
        self, host: str, epoch: str, revision: int, outcomes: Sequence[Plain]
    ) -> None:
        """Tell what became of wanted backends (``core.wanted.Applied``). Raises Invalid, Stale."""
        self._client.call(
            "backends_applied", host=host, epoch=epoch, revision=revision, outcomes=outcomes
        )

    def job_done(self, job: str, host: str, state: str, error: str | None) -> None:
        """Tell how a job ended on a host: ``done`` or ``failed``. Raises Invalid, NotFound."""
        self._client.call("job_done", job=job, host=host, state=state, error=error)
