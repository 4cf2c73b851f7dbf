# SPDX-License-Identifier: Apache-2.0
"""The default policy rules: the base rules, and one rule for each operation of the API.

Only secure role defaults are used: a token without a role passes no rule.
"""

import functools
from collections.abc import Iterator

from oslo_policy import policy

ELEVATED = "rule:elevated"
READ = f"{ELEVATED} or rule:project_reader or rule:service"
WRITE = f"{ELEVATED} or rule:project_member or rule:service"
SERVICE = f"{ELEVATED} or rule:service"

BASE_RULES = (
    policy.RuleDefault(
        "elevated",
        "role:admin or role:accelerator_admin",
        "Administrators of the cloud or, with a role that the operator creates, of its "
        "accelerators.",
    ),
    policy.RuleDefault(
        "project_reader",
        "role:reader and project_id:%(project_id)s",
        "Users who can read objects of the project of the token.",
    ),
    policy.RuleDefault(
        "project_member",
        "role:member and project_id:%(project_id)s",
        "Users who can change objects of the project of the token.",
    ),
    policy.RuleDefault(
        "service",
        "role:service or service_token:True",
        "Another service, such as Nova: with a token of its own user, or with a service token in "
        "addition to the user's token. The service token must have one of the roles in "
        "[keystone_authtoken] service_token_roles.",
    ),
)

# The name after "cyborg:", who is allowed, the description, and the calls: method and path.
OPERATION_RULES = (
    # Binding, unbinding and deleting a bound ARQ also require a service token from every caller. A
    # policy file cannot change that.
    ("arq:get_all", READ, "List accelerator requests.", "GET accelerator_requests"),
    ("arq:get_one", READ, "Show an accelerator request.", "GET accelerator_requests/{uuid}"),
    (
        "arq:create",
        WRITE,
        "Create the accelerator requests of a device profile.",
        "POST accelerator_requests",
    ),
    (
        "arq:update",
        WRITE,
        "Bind or unbind accelerator requests.",
        "PATCH accelerator_requests",
        "PATCH accelerator_requests/{uuid}",
    ),
    (
        "arq:delete",
        WRITE,
        "Delete accelerator requests.",
        "DELETE accelerator_requests",
        "DELETE accelerator_requests/{uuid}",
    ),
    # The API itself limits callers to accelerators of their project.
    ("accelerator:get_all", READ, "List accelerators.", "GET accelerators"),
    ("accelerator:get_one", READ, "Show an accelerator.", "GET accelerators/{uuid}"),
    ("accelerator:update", WRITE, "Label an accelerator.", "PATCH accelerators/{uuid}"),
    # The API itself limits callers to instances and attachments of their project, so that an
    # operator can allow members to attach: "rule:elevated or rule:project_member or rule:service".
    ("attachment:get_all", READ, "List attachments.", "GET attachments"),
    ("attachment:get_one", READ, "Show an attachment.", "GET attachments/{uuid}"),
    (
        "attachment:create",
        SERVICE,
        "Attach accelerators to an existing instance.",
        "POST attachments",
    ),
    # Members do not see the accelerators that nobody owns.
    (
        "attachment:create_by_accelerator",
        SERVICE,
        "Attach one accelerator, chosen by its uuid, to an existing instance.",
        "POST attachments",
    ),
    # The devices of a host leave the cloud until they are detached.
    (
        "attachment:create_for_host",
        ELEVATED,
        "Attach accelerators to a host itself.",
        "POST attachments",
    ),
    (
        "attachment:delete",
        SERVICE,
        "Detach accelerators from an instance or a host.",
        "DELETE attachments",
        "DELETE attachments/{uuid}",
    ),
    (
        "attachment:delete_for_host",
        ELEVATED,
        "Detach accelerators from a host itself.",
        "DELETE attachments",
        "DELETE attachments/{uuid}",
    ),
    ("attribute:get_all", ELEVATED, "List attributes.", "GET attributes"),
    ("attribute:get_one", ELEVATED, "Show an attribute.", "GET attributes/{uuid}"),
    ("attribute:create", ELEVATED, "Create an attribute.", "POST attributes"),
    ("attribute:delete", ELEVATED, "Delete an attribute.", "DELETE attributes/{uuid}"),
    ("audit:get_all", ELEVATED, "List audits.", "GET audits"),
    ("audit:get_one", ELEVATED, "Show an audit.", "GET audits/{uuid}"),
    ("audit:create", ELEVATED, "Audit hosts, with or without repairs.", "POST audits"),
    ("deployable:get_all", ELEVATED, "List deployables.", "GET deployables"),
    ("deployable:get_one", ELEVATED, "Show a deployable.", "GET deployables/{uuid}"),
    (
        "deployable:program",
        ELEVATED,
        "Program an image.",
        "PATCH deployables/{uuid}/program",
        "PATCH deployables/{uuid}/program/{suffix}",
    ),
    # The API itself limits callers to the contexts of their project.
    ("device_context:get_all", READ, "List device contexts.", "GET device_contexts"),
    ("device_context:get_one", READ, "Show a device context.", "GET device_contexts/{uuid}"),
    ("device_context:create", WRITE, "Create a device context.", "POST device_contexts"),
    ("device_context:update", WRITE, "Change a device context.", "PATCH device_contexts/{uuid}"),
    ("device_context:delete", WRITE, "Delete a device context.", "DELETE device_contexts/{uuid}"),
    # They require a service token from every caller, as the bind of an ARQ.
    (
        "device_context:pre_bind",
        WRITE,
        "Reserve the accelerators of a device context.",
        "POST device_contexts/{uuid}/pre_bind",
    ),
    (
        "device_context:bind",
        WRITE,
        "Bind a device context to an instance.",
        "POST device_contexts/{uuid}/bind",
    ),
    (
        "device_context:unbind",
        WRITE,
        "Unbind a device context.",
        "POST device_contexts/{uuid}/unbind",
    ),
    (
        "device_context:request_groups",
        READ,
        "Show what Placement is asked for a device context.",
        "GET device_contexts/{uuid}/request_groups",
    ),
    # The API itself shows hosts, devices and owners to elevated callers only.
    (
        "device_context:explain",
        READ,
        "Explain why a device context finds devices, or none.",
        "GET device_contexts/{uuid}/explanation",
    ),
    # The answer has names of hosts and uuids of resource providers of the whole cloud.
    (
        "device_context:candidates",
        f"{ELEVATED} or rule:service",
        "Ask Placement for allocation candidates of a device context.",
        "GET device_contexts/{uuid}/allocation_candidates",
    ),
    ("device_profile:get_all", READ, "List device profiles.", "GET device_profiles"),
    (
        "device_profile:get_one",
        READ,
        "Show a device profile.",
        "GET device_profiles/{uuid_or_name}",
    ),
    # The API itself shows hosts, devices and owners to elevated callers only.
    (
        "device_profile:explain",
        READ,
        "Explain why a device profile finds devices, or none.",
        "GET device_profiles/{uuid_or_name}/explanation",
    ),
    (
        "device_profile:capacity",
        READ,
        "Show how many more servers with a device profile fit.",
        "GET device_profiles/{uuid_or_name}/capacity",
    ),
    ("device_profile:create", ELEVATED, "Create a device profile.", "POST device_profiles"),
    (
        "device_profile:delete",
        ELEVATED,
        "Delete device profiles.",
        "DELETE device_profiles/{uuid_or_name}",
        "DELETE device_profiles",
    ),
    ("device:get_all", ELEVATED, "List devices.", "GET devices"),
    ("device:get_one", ELEVATED, "Show a device.", "GET devices/{uuid}"),
    (
        "device:enable",
        ELEVATED,
        "Enable a device: new accelerator requests can be bound to it.",
        "POST devices/{uuid}/enable",
    ),
    (
        "device:disable",
        ELEVATED,
        "Disable a device: no new accelerator requests are bound to it.",
        "POST devices/{uuid}/disable",
    ),
    (
        "device:maintain",
        ELEVATED,
        "Begin, change or end the maintenance window of a device.",
        "PUT devices/{uuid}/maintenance",
        "DELETE devices/{uuid}/maintenance",
    ),
    (
        "custody:get_all",
        ELEVATED,
        "List the custody records of a device.",
        "GET devices/{uuid}/custody",
    ),
    ("layout:get_one", ELEVATED, "Show the layouts of a device.", "GET devices/{uuid}/layout"),
    ("layout:set", ELEVATED, "Change the layout of a device.", "PUT devices/{uuid}/layout"),
    ("discovery:create", ELEVATED, "Start a discovery.", "POST discoveries"),
    ("discovery:get_all", ELEVATED, "List discoveries.", "GET discoveries"),
    ("discovery:get_one", ELEVATED, "Show a discovery.", "GET discoveries/{uuid}"),
    ("driver:get_all", ELEVATED, "List drivers.", "GET drivers"),
    ("driver:get_one", ELEVATED, "Show a driver.", "GET drivers/{uuid_or_name}"),
    ("driver:install", ELEVATED, "Enable a driver on hosts.", "POST drivers"),
    ("driver:update", ELEVATED, "Change the backends of a driver.", "PATCH drivers/{uuid_or_name}"),
    (
        "driver:uninstall",
        ELEVATED,
        "Uninstall the backends of a driver.",
        "DELETE drivers/{uuid_or_name}",
    ),
    ("hardware:get_all", ELEVATED, "List hardware.", "GET hardware"),
    ("hardware:adopt", ELEVATED, "Adopt a device into a backend.", "POST hardware"),
    ("hardware:release", ELEVATED, "Release a device from its backend.", "DELETE hardware/{uuid}"),
    ("host:forget", ELEVATED, "Remove a host that left for good.", "DELETE hosts/{host}"),
    ("job:get_all", ELEVATED, "List jobs.", "GET jobs"),
    ("job:get_one", ELEVATED, "Show a job.", "GET jobs/{uuid}"),
    ("job:cancel", ELEVATED, "Cancel a job.", "DELETE jobs/{uuid}"),
    # The API itself limits callers to the limits of their project.
    ("limits:get", READ, "Show the limits of a project and their usage.", "GET limits"),
    ("outbox:get_all", ELEVATED, "List the messages of the outbox.", "GET outbox"),
    ("outbox:retry", ELEVATED, "Retry the delivery of a dead letter.", "POST outbox/{uuid}/retry"),
    ("outbox:delete", ELEVATED, "Delete a dead letter.", "DELETE outbox/{uuid}"),
    ("service:get_all", ELEVATED, "List services and hosts.", "GET services", "GET hosts"),
    ("service:delete", ELEVATED, "Delete a daemon that is down.", "DELETE services/{uuid}"),
    ("summary:get", ELEVATED, "Show the numbers of all objects of the cloud.", "GET summary"),
)


def list_rules() -> list[policy.RuleDefault]:
    """Return every rule: the entry point of oslo.policy.policies."""
    return list(_all_rules())


@functools.cache
def _all_rules() -> tuple[policy.RuleDefault, ...]:
    return (*BASE_RULES, *_operation_rules())


def _operation_rules() -> Iterator[policy.DocumentedRuleDefault]:
    for name, allowed, description, *calls in OPERATION_RULES:
        operations: list[policy.Operation] = []
        for method, path in (call.split() for call in calls):
            operations.append({"method": method, "path": f"/v2/{path}"})
        yield policy.DocumentedRuleDefault(
            f"cyborg:{name}", allowed, description, operations, scope_types=["project"]
        )
