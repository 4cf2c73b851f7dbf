# SPDX-License-Identifier: Apache-2.0
"""RPC contract: every method of the internal bus, its arguments and its first version.

Each method is declared once, as a method of ``ConductorAPI`` or ``AgentAPI``: clients are generated
from it, and a server only serves these methods. An argument with the default None is optional. A
new method or a new optional argument raises the minor version of the contract, any other change the
major one; ``rpc_method`` declares its first version. A call carries the oldest version that
supports it, so that peers with different minor versions can communicate.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cyborg.rpc.agent_api import AgentAPI

F = TypeVar("F", bound=Callable[..., Any])
Plain = Mapping[str, Any]

# Limit of messages other than reports, in bytes of JSON.
MAX_MESSAGE_BYTES = 1024 * 1024

# An attribute of the declared function: a method of a Protocol has no other place for options.
_OPTIONS = "__rpc_options__"


@dataclass(frozen=True, slots=True)
class Method:
    """Method of a contract: its arguments in order, optional arguments, first version.

    ``argument_versions`` has the first version of each optional argument that is newer than the
    method.
    """

    arguments: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    since: str = "1.0"
    is_report: bool = False  # the size limit is [conductor] max_report_bytes
    argument_versions: Mapping[str, str] = field(default_factory=dict)


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@dataclass(frozen=True, slots=True)
class Contract:
    """Methods of one kind of server. ``version`` is the newest; older callers are served too.

    ``server_argument`` is the name of the client methods' argument for the host of the server.
    """

    name: str
    version: str
    methods: Mapping[str, Method]
    server_argument: str | None = None

    @classmethod
    def from_api(
        cls, name: str, version: str, api: type, server_argument: str | None = None
    ) -> "Contract":
        """Return the contract of the methods that ``api`` declares."""
        methods = {
            method: _describe(func, server_argument)
            for method, func in vars(api).items()
            # typing.Protocol adds functions of its own, such as __init__.
            if inspect.isfunction(func) and not method.startswith("_")
        }
        return cls(name, version, methods, server_argument)

    def minimal_call(self, method: str, given: Collection[str]) -> tuple[str, frozenset[str]]:
        """Return the oldest version that supports a call, and the arguments to leave out.

        ``given`` are the names of the arguments that are not None. A newer argument that is None is
        left out, so that an older server accepts the call.
        """
        definition = self.methods[method]
        newer = definition.argument_versions
        versions = [definition.since, *(newer[name] for name in newer if name in given)]
        # Each major version is a contract of its own: its versions start with MAJOR.0.
        versions.append(f"{self.version.partition('.')[0]}.0")
        # The oldest version and not ours: a server with an older minor version accepts the call.
        return max(versions, key=_version_key), frozenset(newer).difference(given)


def is_newer(version: str, other: str) -> bool:
    """Return whether an RPC version is newer than another one."""
    return _version_key(version) > _version_key(other)


def rpc_method(**options: Any) -> Callable[[F], F]:
    """Set fields of ``Method`` for a declared method, such as ``since`` or ``is_report``."""

    def decorate(func: F) -> F:
        setattr(func, _OPTIONS, options)
        return func

    return decorate


def _describe(func: Callable[..., Any], server_argument: str | None) -> Method:
    # From the signature, so that client, server and reference page cannot differ from it.
    _self, *parameters = inspect.signature(func).parameters.values()
    parameters = [p for p in parameters if p.name != server_argument]
    # Only None: any other default could differ between client and server of two releases.
    optional = frozenset(p.name for p in parameters if p.default is None)
    return Method(tuple(p.name for p in parameters), optional, **getattr(func, _OPTIONS, {}))


class ConductorAPI(Protocol):
    """Calls to any conductor. Every method may raise TimedOut and Unavailable."""

    # The name of the first version of the contract, so that older agents are served; elsewhere it
    # is called a heartbeat.
    def hello(
        self,
        host: str,
        epoch: str,
        endpoint: str | None,
        status: str,
        drivers: Sequence[Plain],
        digest: str | None,
        versions: Plain | None,
        observed_generation: int | None = None,
        boot_id: str | None = None,
    ) -> dict[str, Any]:
        """Send an agent's heartbeat with the generation of the desired state that it runs.

        Another ``boot_id`` than in the last heartbeat means that the host has rebooted.

        Return ``{"interval": seconds, "report": whether to report, "desired_generation":
        generation}``.
        """

    # The only message that grows with the number of devices of a host.
    @rpc_method(is_report=True)
    def report(self, report: Plain) -> dict[str, Any]:
        """Send the inventory of a host (``core.inventory.report``).

        Raise Stale, Invalid, Conflict.
        """

    def service_hello(
        self, binary: str, host: str, epoch: str, versions: Plain | None, status: str | None = None
    ) -> dict[str, Any]:
        """Send the heartbeat of a daemon other than an agent.

        ``status`` is READY, or DEGRADED if a loop of the daemon is overdue; None means READY.
        Return ``{"interval": seconds, "now": the conductor's time, naive UTC in ISO 8601}``.
        """

    def device_context_create(self, context: Plain, project_id: str | None) -> dict[str, Any]:
        """Create a device context with its ARQs; return its row.

        Raise Invalid, NotFound, Conflict, OverLimit.
        """

    def device_context_update(
        self, uuid: str, changes: Plain, project_scope: str | None
    ) -> dict[str, Any]:
        """Change an unbound device context; return its row. Raise Invalid, NotFound, WrongState.

        ``changes`` has any of name, description, config_data and expires_at.
        """

    def device_context_delete(
        self, uuid: str, project_scope: str | None, allow_bound: bool | None = None
    ) -> None:
        """Delete a device context with its ARQs. Raise Invalid, NotFound, WrongState.

        With ``allow_bound``, a context that an instance uses is unbound first.
        """

    def device_context_candidates(
        self, uuid: str, project_scope: str | None, limit: int
    ) -> dict[str, Any]:
        """Query Placement for allocation candidates of a device context.

        Return ``{"candidates": [{"hostname", "mappings"}], "reason": str or None}``; the reason is
        that of Placement if it rejects the query.
        Raise Invalid, NotFound, Unavailable.
        """

    def device_context_pre_bind(
        self, uuid: str, reservation: Plain, project_scope: str | None
    ) -> dict[str, Any]:
        """Claim the handles of a device context under a lease, or renew it; return its row.

        ``reservation`` has hostname, mappings and, optionally, lease_seconds and epoch. Raise
        Invalid, NotFound, WrongState, Conflict, OverLimit, NoHandle, Unavailable.
        """

    def device_context_bind(
        self, uuid: str, target: Plain, project_scope: str | None
    ) -> dict[str, Any]:
        """Bind a device context to an instance; return its row.

        ``target`` has hostname, instance_uuid and, optionally, mappings and epoch. The project of
        the instance is that of its allocation in Placement. Raise Invalid, NotFound, WrongState,
        Conflict, OverLimit, NoHandle, Unavailable.
        """

    def device_context_unbind(
        self, uuid: str, use: Plain, project_scope: str | None, elevated: bool = False
    ) -> dict[str, Any]:
        """Release the handles of a device context; return its row.

        ``use`` has epoch or instance_uuid of the use that ends; both are optional if ``elevated``
        is True, or if the context owns no handles. Raise Invalid, NotFound, WrongState, Conflict.
        """

    def device_profile_create(self, profile: Plain) -> dict[str, Any]:
        """Create a device profile and return its row. Raise Invalid, Conflict."""

    def device_profile_delete(self, keys: Sequence[str]) -> None:
        """Delete device profiles by uuid or name, all or none. Raise NotFound, InUse."""

    def accelerator_update(
        self, uuid: str, label: Plain, project_scope: str | None
    ) -> dict[str, Any]:
        """Label an accelerator and return its row. Raise Invalid, NotFound, WrongState.

        ``label`` has the fields to change: any of name, description and tags.
        """

    def attribute_create(self, deployable: str, key: str, value: str) -> dict[str, Any]:
        """Create an attribute and return its row. Raise Invalid, NotFound, Conflict."""

    def attribute_delete(self, uuid: str) -> None:
        """Delete an operator's attribute. Raise Invalid, NotFound."""

    def arq_create(
        self, device_profile_name: str, project_id: str | None, context_scope: str | None = None
    ) -> dict[str, Any]:
        """Create the requests of a profile; return ``{"arqs": [row]}``. Raise NotFound.

        Of the hidden profile of a device context, replace the requests of the context by new ones.
        ``context_scope`` limits this to contexts of one project; None means unrestricted. Raise
        WrongState if the context is in use or in error.
        """

    def arq_bind(
        self,
        requests: Sequence[Plain],
        project_scope: str | None,
        instance_project: str | None = None,
    ) -> None:
        """Bind requests, all or none. Raise Invalid, NotFound, Conflict and subclasses.

        ``instance_project`` limits the bind to instances of this project; None means unrestricted.
        """

    def arq_unbind(self, requests: Sequence[Plain], project_scope: str | None) -> None:
        """Unbind requests, all or none. Raise Invalid, NotFound, WrongState."""

    def arq_delete(
        self,
        uuids: Sequence[str] | None,
        instance: str | None,
        project_scope: str | None,
        allow_bound: bool,
    ) -> None:
        """Delete requests by uuid or by instance. Raise NotFound, Forbidden."""

    def attachment_create(self, request: Plain, project_scope: str | None) -> dict[str, Any]:
        """Start to attach accelerators to an instance or host; return the row of the attachment.

        The request has instance_uuid, or hostname and the project_id of the caller, and one of
        device_profile, device_context and accelerator. A repeated request gets the same attachment.
        Raise Invalid, NotFound, Conflict, WrongState, OverLimit.
        """

    def attachment_delete(
        self,
        uuid: str | None,
        instance: str | None,
        project_scope: str | None,
        reboot: bool,
        accelerator: str | None = None,
        hostname: str | None = None,
    ) -> None:
        """Start to detach one attachment, or all of an instance, or all of a host itself.

        An attach in progress is cancelled and undone. ``accelerator`` selects those of the instance
        or host that hold this accelerator alone. With ``reboot`` a running instance is rebooted.
        Raise Invalid, NotFound, WrongState, Conflict.
        """

    def device_set_status(self, uuid: str, status: str) -> None:
        """Enable a device, or set it to maintaining. Raise Invalid, NotFound."""

    def device_maintain(self, request: Plain) -> None:
        """Begin or change a maintenance window. Raise Invalid, NotFound, Conflict."""

    def device_end_maintenance(self, uuid: str) -> None:
        """End the maintenance window of a device now. Raise Invalid, NotFound, WrongState."""

    def device_set_layout(self, uuid: str, layout: str, drain: bool) -> dict[str, Any]:
        """Start to apply a layout to a device; return ``{"uuid": of the job}``.

        With ``drain`` the job waits until nothing uses the device. Raise Invalid, NotFound, InUse,
        WrongState.
        """

    def deployable_program(self, uuid: str, image_uuid: str) -> None:
        """Start to load an image into a deployable. Raise Invalid, NotFound, InUse, WrongState."""

    def outbox_retry(self, uuid: str) -> None:
        """Retry the delivery of a dead letter. Raise Invalid, NotFound, WrongState."""

    def outbox_delete(self, uuid: str) -> None:
        """Delete a dead letter. Raise Invalid, NotFound, WrongState."""

    def service_delete(self, uuid: str) -> None:
        """Delete a daemon that is down. Raise Invalid, NotFound, WrongState, InUse."""

    def host_forget(self, host: str, force: bool, dry_run: bool | None = None) -> dict[str, Any]:
        """Remove a host that left for good; return the number of removed objects of each kind.

        The answer has services, devices, accelerator_requests, tombstones and resource_providers.
        With ``dry_run`` it is the same, and nothing is removed. Raise Invalid, NotFound,
        WrongState, InUse.
        """

    def audit_create(self, host: str | None, repair: bool) -> dict[str, Any]:
        """Enqueue an audit of one host or of all hosts; return ``{"uuid": of the audit}``.

        Raise Invalid, NotFound, Conflict.
        """

    def discovery_create(
        self, host: str | None = None, driver: str | None = None
    ) -> dict[str, Any]:
        """Start a discovery of backends; return ``{"uuid": of the discovery}``.

        Raise NotFound, and Conflict while one of the same host and driver is open, or too many are.
        """

    def discovery_done(
        self, discovery_id: str, host: str, drivers: Sequence[Plain], epoch: str | None = None
    ) -> None:
        """Report the results of a discovery on a host. Raise Invalid, Stale.

        ``epoch`` is that of the agent, None from an older agent.
        """

    def driver_install(
        self, driver: str, backend: str | None, hosts: Sequence[str] | None, config: Plain | None
    ) -> dict[str, Any]:
        """Enable a driver on some or all hosts that have it; return ``{"uuid": of the job}``.

        ``backend`` defaults to the driver's name. Raise Invalid, NotFound, Conflict.
        """

    def driver_uninstall(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        drain: bool,
        force: bool,
    ) -> dict[str, Any]:
        """Remove one or all backends of a driver from hosts; return ``{"uuid": of the job}``.

        Raise Invalid, NotFound, InUse, Conflict.
        """

    def driver_update(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Plain | None,
        status: str | None,
        reload: bool,
    ) -> dict[str, Any]:
        """Change a driver's backends, one host after another; return ``{"uuid": of the job}``.

        ``status`` is enabled or disabled; None changes nothing. Raise Invalid, NotFound, Conflict.
        """

    def hardware_adopt(self, host: str, address: str, backend: str, force: bool) -> dict[str, Any]:
        """Make a backend manage a device that its rules exclude; return ``{"uuid": of the job}``.

        ``force`` accepts the uses of the device by the host that its driver finds then.
        Raise Invalid, NotFound, Conflict.
        """

    def hardware_release(self, uuid: str) -> dict[str, Any]:
        """Exclude a device from the management of its backend; return ``{"uuid": of the job}``.

        Raise Invalid, NotFound, InUse, Conflict.
        """

    def limits_get(self, project_id: str) -> dict[str, Any]:
        """Return the limits of a project; nothing is changed.

        The answer is ``{"arqs": number of ARQs, "attachments": number of attachments,
        "device_contexts": number of contexts, "units": {resource class: units}}``; -1 is unlimited,
        and so is a resource class that is absent.
        Raise Invalid, Unavailable.
        """

    def job_cancel(self, uuid: str) -> None:
        """Cancel a driver job, or one that drains a device. Raise Invalid, NotFound, WrongState."""

    def get_guest_devices(self, host: str, epoch: str) -> dict[str, Any]:
        """Return the devices that the running guests of a host must have from its agent.

        The answer is ``{"devices": [{"instance", "ready", "arq", "attached", "error"}]}``; ``arq``
        has the fields of the REST API that ``cyborg.os_acc`` needs, ``ready`` is false while a job
        prepares the device, the others are from the last report; ``attached`` is also true if Nova
        attaches the device at most starts of the guest. Raise Invalid, Stale.
        """

    def report_guest_devices(self, host: str, epoch: str, devices: Sequence[Plain]) -> None:
        """Report whether running guests have their devices (``core.attachments.delivery``).

        Raise Invalid, Stale.
        """

    def find_function_owners(self, host: str, functions: Sequence[Plain]) -> dict[str, Any]:
        """Return which PCI functions of a host, that its guests have, belong to ARQs.

        Each function is ``{"instance": uuid of the guest, "address"}``. The answer is ``{"owners":
        [owner]}`` in the same order. An owner is "instance" if an ARQ of this instance owns the
        function, "other" if any other ARQ does, or needs it for a virtual function or a mediated
        device of it, or None. Raise Invalid.
        """

    def report_active_partitions(
        self, host: str, epoch: str, partitions: Sequence[str]
    ) -> dict[str, Any]:
        """Report the partitions of a fabric that the agent has activated and that are active.

        Each one is the address of its deployable. The answer is ``{"uses": [use]}`` in the same
        order. A use is "used" if an ARQ has the partition or its devices are cleaned; "unused" if
        nothing has it; "overlapped" if it is not used, but one of its devices is; "missing" if it
        is not used, and the host does not report one of its devices; None if the partition is
        unknown. Raise Invalid, Stale.
        """

    def deactivate_partitions(
        self, host: str, epoch: str, partitions: Sequence[str]
    ) -> dict[str, Any]:
        """Have partitions deactivated that were reported as unused and are still active.

        Their addresses are those of ``report_active_partitions``; the agent has read that they are
        active after its answer. The answer is ``{"deactivated": [address]}`` with those that are
        still unused: a release job deactivates them. Raise InUse, Invalid, Stale.
        """

    def get_desired_backends(self, host: str, epoch: str) -> dict[str, Any]:
        """Return the desired state of a host (``core.drivers.desired_state.DesiredHostState``).

        Raise Invalid, Stale.
        """

    def report_backend_outcomes(
        self, host: str, epoch: str, generation: int, outcomes: Sequence[Plain]
    ) -> None:
        """Report the outcomes of backends (``core.drivers.desired_state.BackendOutcome``).

        Raise Invalid, Stale.
        """

    def job_done(
        self, job: str, host: str, state: str, error: str | None, epoch: str | None = None
    ) -> None:
        """Report the result of a job on a host: ``done`` or ``failed``.

        ``epoch`` is that of the agent, None from an older agent. A result that is refused as stale
        is not lost: the conductor queries the agent about each open job.

        Raise Invalid, NotFound, Stale.
        """


CONDUCTOR = Contract.from_api("conductor", "1.0", ConductorAPI)
AGENT = Contract.from_api("agent", "1.0", AgentAPI, "host")
# By name: a server finds its contract by the end of its topic.
CONTRACTS: Mapping[str, Contract] = {c.name: c for c in (CONDUCTOR, AGENT)}
