# SPDX-License-Identifier: Apache-2.0
"""The descriptions of the parameters in paths and queries.

A parameter has the same description in all operations, unless it has one with the id of the
operation.
"""

from collections.abc import Mapping

_ONE_HOST = "Only the providers of this host, by its name. Only administrators can give it."
DESCRIPTIONS: Mapping[str, str] = {
    # in paths
    "uuid": "The uuid of the object.",
    "key": "The uuid or the name of the object.",
    "suffix": "Any text; it is ignored.",
    "hosts.forget_host:host": "The name of the host.",
    # pages
    "limit": "The maximum number of objects in the answer. The option max_limit of the section "
    "[api] is the default and the maximum.",
    "device_contexts.candidates:limit": "The maximum number of candidates, at most 100.",
    "marker": "The uuid of the last object of the previous page.",
    "device_profiles.capacity:marker": "The name of the last host of the previous page.",
    "discoveries.get:limit": "The maximum number of hosts in the answer. The option max_limit of "
    "the section [api] is the default and the maximum.",
    "discoveries.get:marker": "The name of the last host of the previous page.",
    "jobs.get:limit": "The maximum number of hosts in the answer. The option max_limit of the "
    "section [api] is the default and the maximum.",
    "jobs.get:marker": "The name of the last host of the previous page.",
    "sort_key": "The field by which the objects are sorted. The answer 400 lists the fields.",
    "sort_dir": "Whether the order is ascending, which is the default, or descending.",
    "with_count": "Whether the answer has the number of the objects on all pages as ``count``.",
    # filters
    "devices.find:backend": "Only the devices of this backend, by its name.",
    "model": "Only the devices of this model.",
    "outbox.find:subject": "Only the messages about this subject.",
    "address": "Only the devices at this address, such as 0000:0c:00.0.",
    "accelerators.find:address": "Only the accelerators with this address, such as 0000:0c:00.1. "
    "That of a mediated device is the address of its parent.",
    "accelerators.find:name": "Only the accelerators with this name.",
    "device_contexts.find:name": "Only the contexts with this name.",
    "rp_uuid": "Only the deployable of this resource provider of Placement.",
    "binary": "Only the daemons of this program, such as cyborg-agent.",
    "bind_state": "Only ARQs that are bound, or whose bind failed. With the parameter instance, "
    "the answer is 423 until all of its ARQs are.",
    "deliverable": "Only devices that Nova can attach to a server, or only the other ones.",
    "deployable_id": "Only the attributes of this deployable, by its uuid.",
    "device_profile": "Only contexts that were made from the device profile of this name.",
    "driver": "Only objects of this driver, by its name.",
    "event": "Only the records of this event.",
    "filters.field": "The field of a filter, for python-cyborgclient. It can be repeated.",
    "filters.value": "The value of the filter with the same position. It can be repeated.",
    "function": "Only backends that offer this function.",
    "health": "Only the devices of this health.",
    "device": "Only the accelerators of this device, by its uuid.",
    "host": "Only the objects of this host, by its name.",
    "device_contexts.explain_context:host": _ONE_HOST,
    "device_profiles.capacity:host": _ONE_HOST,
    "device_profiles.explain:host": _ONE_HOST,
    "hostname": "Only the devices of this host, by its name.",
    "instance": "Only the objects of this instance, by its uuid.",
    "attributes.find:key": "Only the attributes with this key.",
    "kind": "Only the objects of this kind.",
    "services.find:kind": "Either daemons, each with its backends, or backends.",
    "name": "Only the profiles of these names, which are separated by commas.",
    "resource_class": "Only accelerators of this resource class of Placement.",
    "state": "Only objects in this state.",
    "status": "Only objects with this status.",
    "drivers.get:status": "Only hosts with an entry of this status.",
    "step_state": "Only the steps in this state.",
    "subject": "Only jobs with this subject: the name of a driver, or the uuid of an instance, a "
    "deployable or a device.",
    "discoveries.find:uuid": "Only the discovery with this uuid.",
    "jobs.find:uuid": "Only the job with this uuid.",
    "type": "Only objects of this type, such as GPU.",
    "vendor": "Only the devices of this vendor, by its id.",
    # selections and modes of other operations
    "arqs": "The uuids of the ARQs, which are separated by commas.",
    "accelerator_requests.delete_many:instance": "The uuid of the instance whose ARQs are deleted.",
    "attachments.delete_of_instance:instance": "The uuid of the instance.",
    "attachments.delete_of_instance:host": "The name of the host.",
    "accelerator": "Only the attachment that holds the accelerator of this uuid.",
    "reboot": "Whether Nova reboots the instance, so that its guest loses the accelerators.",
    "explain": "Whether the answer explains the providers that are in no candidate. Only "
    "administrators can give it.",
    "value": "The uuids or names of the device profiles, which are separated by commas.",
    "drain": "Whether the job waits until no accelerator of the backends is in use.",
    "force": "Whether accelerators in use are ignored.",
    "hosts.forget_host:dry_run": "Whether only to show what would be removed.",
    "hosts.forget_host:force": "Whether the accelerator requests of the host, and the allocations "
    "of its resource providers, are deleted with it.",
    "drivers.uninstall:host": "The name of a host of the backends; by default all hosts. It can be "
    "repeated.",
    "backend": "The name of the backend; by default all backends of the driver.",
    "project_id": "The project, by default that of the token.",
}


def describe_parameter(operation_id: str, name: str) -> str:
    """Return the description of a parameter. Raise KeyError if it has none."""
    return DESCRIPTIONS.get(f"{operation_id}:{name}") or DESCRIPTIONS[name]
