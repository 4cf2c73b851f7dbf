# SPDX-License-Identifier: Apache-2.0
"""The handlers of the RPC methods of a conductor.

The arguments of a handler are unchecked plain values, which the services validate. An error of
``cyborg.core.errors`` is returned to the caller.
"""

from collections.abc import Callable, Mapping
from typing import Any

from cyborg.conductor.wiring import Conductor


def make_handlers(conductor: Conductor) -> Mapping[str, Callable[..., Any]]:
    """Return the function of each method of ``cyborg.rpc.contract.ConductorAPI``."""

    def create_audit(host: str | None, repair: bool) -> dict[str, Any]:
        audit = conductor.audits.create(host, repair)
        conductor.audit_task.wake()
        return audit

    return {
        "hello": conductor.hosts.heartbeat,
        "report": conductor.hosts.report,
        "service_hello": conductor.hosts.service_heartbeat,
        "device_context_create": conductor.device_contexts.create,
        "device_context_update": conductor.device_contexts.update,
        "device_context_delete": conductor.device_contexts.delete,
        "device_context_candidates": conductor.device_contexts.candidates,
        "device_context_pre_bind": conductor.context_leases.pre_bind,
        "device_context_bind": conductor.context_leases.bind,
        "device_context_unbind": conductor.context_leases.unbind,
        "device_profile_create": conductor.device_profiles.create,
        "device_profile_delete": conductor.device_profiles.delete,
        "accelerator_update": conductor.accelerators.update,
        "attribute_create": conductor.attributes.create,
        "attribute_delete": conductor.attributes.delete,
        "arq_create": conductor.arqs.create,
        "arq_bind": conductor.arqs.bind,
        "arq_unbind": conductor.arqs.unbind,
        "arq_delete": conductor.arqs.delete,
        "attachment_create": conductor.attachments.create,
        "attachment_delete": conductor.attachments.delete,
        "device_set_status": conductor.devices.set_status,
        "device_maintain": conductor.maintenance_windows.begin,
        "device_end_maintenance": conductor.maintenance_windows.end,
        "device_set_layout": conductor.partitions.start,
        "deployable_program": conductor.programs.start,
        "outbox_retry": conductor.dead_letters.retry,
        "outbox_delete": conductor.dead_letters.delete,
        "service_delete": conductor.services.delete,
        "host_forget": conductor.host_removal.forget,
        "audit_create": create_audit,
        "discovery_create": conductor.discoveries.create,
        "discovery_done": conductor.discoveries.complete,
        "driver_install": conductor.drivers.install,
        "driver_uninstall": conductor.drivers.uninstall,
        "driver_update": conductor.drivers.update,
        "hardware_adopt": conductor.drivers.adopt,
        "hardware_release": conductor.drivers.release,
        "limits_get": conductor.limits.get,
        "job_cancel": conductor.rollouts.cancel,
        "get_guest_devices": conductor.attachment_runner.guests.list_of_host,
        "report_guest_devices": conductor.guest_deliveries.record,
        "find_function_owners": conductor.function_owners.find,
        "report_active_partitions": conductor.active_partitions.find_uses,
        "deactivate_partitions": conductor.active_partitions.deactivate,
        "get_desired_backends": conductor.rollouts.get_desired_state,
        "report_backend_outcomes": conductor.rollouts.record_outcomes,
        "job_done": conductor.jobs.complete,
    }
