# SPDX-License-Identifier: Apache-2.0
"""Methods of the conductor by what a copy of a call does; a copy has the id of the call.

A conductor that has taken a call may end before it answers. So the client sends a call of
``DEDUPLICATED_METHODS`` again if no answer comes: another conductor executes it, or returns the
answer that the first one has recorded (``cyborg.conductor.common.idempotency``).
"""

DEDUPLICATED_METHODS = frozenset(
    {
        "device_context_create",
        "device_context_update",
        "device_context_delete",
        "device_context_pre_bind",
        "device_context_bind",
        "device_context_unbind",
        "device_profile_create",
        "device_profile_delete",
        "accelerator_update",
        "attribute_create",
        "attribute_delete",
        "arq_create",
        "arq_bind",
        "arq_unbind",
        "arq_delete",
        "attachment_create",
        "attachment_delete",
        "device_set_status",
        "device_maintain",
        "device_end_maintenance",
        "device_set_layout",
        "deployable_program",
        "outbox_retry",
        "outbox_delete",
        "service_delete",
        "host_forget",
        "audit_create",
        "discovery_create",
        "driver_install",
        "driver_uninstall",
        "driver_update",
        "hardware_adopt",
        "hardware_release",
        "job_cancel",
    }
)
"""Methods whose effect and answer are recorded for each call; a copy gets the same answer."""

IDEMPOTENT_METHODS = frozenset(
    {
        "hello",
        "report",
        "service_hello",
        "discovery_done",
        "get_desired_backends",
        "get_guest_devices",
        "find_function_owners",
        "limits_get",
        "report_backend_outcomes",
        "job_done",
        "device_context_candidates",
    }
)
"""Methods that may be repeated: each reads, or reports a state identified by an epoch or a uuid."""
