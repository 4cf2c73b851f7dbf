# SPDX-License-Identifier: Apache-2.0
"""The kinds of objects, and what else is shown of an object of each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cyborg.cli.accelerators import ACCELERATORS
from cyborg.cli.arqs import ARQS
from cyborg.cli.attachments import ATTACHMENTS
from cyborg.cli.common import formatting
from cyborg.cli.common.rest import Collection
from cyborg.cli.custody import CUSTODY
from cyborg.cli.deployables import ATTRIBUTES, DEPLOYABLES
from cyborg.cli.device_contexts import CONTEXT_EXPLANATIONS, CONTEXTS
from cyborg.cli.device_profiles import EXPLANATIONS, PROFILES
from cyborg.cli.device_sets import ALL_OFFERS, DEVICE_SETS
from cyborg.cli.devices import DEVICES
from cyborg.cli.drivers import DRIVERS
from cyborg.cli.hardware import HARDWARE
from cyborg.cli.jobs import JOBS, OUTBOX
from cyborg.cli.services import BACKEND, LONG_BACKEND, SERVICES, format_backend

Fixed = Mapping[str, Any]
# The title, and the path below a profile or context, of the section about its providers.
REASONS, EXPLANATION = "Explanation", "explanation"


@dataclass(frozen=True)
class Related:
    """Objects that belong to an object; one request reads a page of them, or the only one.

    ``filters`` have the field of the object for each query parameter, and ``fixed`` more
    parameters. With ``key``, this field of the object is the name of the only object. With
    ``below``, the rows are at this path below that object, or the object itself. Nothing is read if
    a field is null.
    """

    title: str
    collection: Collection
    filters: Mapping[str, str] = field(default_factory=dict)
    fixed: Fixed = field(default_factory=dict)
    key: str = ""
    below: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of objects. ``has_complete_rows``: the rows of a list have all fields of an object.

    ``parts`` are titles of lists that are fields of an object, with their columns; ``filters``
    select the kind in its collection.
    """

    noun: str
    collection: Collection
    related: Sequence[Related] = ()
    has_complete_rows: bool = True
    parts: Mapping[str, tuple[str, Collection]] = field(default_factory=dict)
    filters: Fixed = field(default_factory=dict)


_AUDITS = Collection("/audits", formatting.columns_of("uuid, state, host, error, created_at"))
_DISCOVERIES = Collection("/discoveries", formatting.columns_of("uuid, state, created_at"))
# The last work is of interest, and one page of it.
_NEWEST: Fixed = {"limit": 20, "sort_dir": "desc"}
# The summary is the same on each page.
_ONE: Fixed = {"limit": 1}
_SERVICES = replace(
    SERVICES, short=formatting.columns_of("uuid, binary=Service, host, state, status, down_since")
)
_BACKENDS = Collection("", formatting.columns_of("name=Backend, driver, status, error"))
_SETS: Fixed = {"offer": ALL_OFFERS}
_STEPS = Collection("", formatting.columns_of("host, backend, state, error"))
_HOSTS = Collection("", formatting.columns_of("host, backend, status, error"))
_FINDINGS = Collection("", formatting.columns_of("host, kind, explanation"))


DEVICE = Kind(
    "device",
    DEVICES,
    (
        Related("Accelerators", ACCELERATORS, {"device": "uuid"}),
        Related("Device sets", DEVICE_SETS, {"member": "uuid"}, _SETS),
        Related("Services", _SERVICES, {"host": "hostname"}),
        Related("Jobs", JOBS, {"subject": "uuid"}, _NEWEST),
        Related("Custody", CUSTODY, fixed=_NEWEST, below="custody"),
    ),
)
CONTEXT = Kind(
    "device context",
    CONTEXTS,
    (
        Related(REASONS, CONTEXT_EXPLANATIONS, fixed=_ONE, below=EXPLANATION),
        Related("Profile", PROFILES, key="device_profile"),
        Related("Attachments", ATTACHMENTS, {"instance": "instance_uuid"}),
        Related("Jobs", JOBS, {"subject": "instance_uuid"}, _NEWEST),
        Related("Services", _SERVICES, {"host": "hostname"}),
    ),
    has_complete_rows=False,
    parts={"arqs": ("Requests", ARQS)},
)
PROFILE = Kind(
    "device profile",
    PROFILES,
    (
        Related(REASONS, EXPLANATIONS, fixed=_ONE, below=EXPLANATION),
        Related("Contexts", CONTEXTS, {"device_profile": "name"}),
    ),
)
DRIVER = Kind(
    "driver",
    DRIVERS,
    (
        Related("Jobs", JOBS, {"subject": "name"}, _NEWEST),
        Related("Accelerators", ACCELERATORS, {"driver": "name"}, {"limit": 20}),
    ),
    has_complete_rows=False,
    parts={"hosts": ("Hosts", _HOSTS)},
)
SERVICE = Kind(
    "service",
    SERVICES,
    (
        Related("Devices", DEVICES, {"hostname": "host"}),
        Related("Jobs", JOBS, {"host": "host"}, _NEWEST),
    ),
    parts={"backends": ("Backends", _BACKENDS)},
)
ACCELERATOR = Kind(
    "accelerator",
    ACCELERATORS,
    (
        Related("Device", DEVICES, key="device_uuid"),
        Related("Request", ARQS, key="arq_uuid"),
        Related(
            "Custody of the device", CUSTODY, fixed=_NEWEST, key="device_uuid", below="custody"
        ),
        Related("Attachments", ATTACHMENTS, {"instance": "instance_uuid"}),
        Related("Services", _SERVICES, {"host": "hostname"}),
    ),
)
DEPLOYABLE = Kind(
    "deployable",
    DEPLOYABLES,
    (
        Related("Attributes", ATTRIBUTES, {"deployable_id": "uuid"}),
        Related("Jobs", JOBS, {"subject": "uuid"}, _NEWEST),
    ),
)
# The kinds whose objects have uuids, the most common first.
KINDS: Sequence[Kind] = (
    DEVICE,
    ACCELERATOR,
    Kind(
        "accelerator request",
        ARQS,
        (
            Related("Accelerator", ACCELERATORS, key="attach_handle_uuid"),
            Related("Profile", PROFILES, key="device_profile_name"),
            Related("Requests of the instance", ARQS, {"instance": "instance_uuid"}),
            Related("Attachments", ATTACHMENTS, {"instance": "instance_uuid"}),
            Related("Jobs", JOBS, {"subject": "instance_uuid"}, _NEWEST),
            Related("Services", _SERVICES, {"host": "hostname"}),
        ),
    ),
    CONTEXT,
    Kind(
        "attachment",
        ATTACHMENTS,
        (
            Related("Context", CONTEXTS, key="device_context"),
            Related("Accelerator", ACCELERATORS, key="accelerator"),
            Related("Profile", PROFILES, key="device_profile"),
            Related("Requests", ARQS, {"instance": "instance_uuid"}),
            Related("Jobs", JOBS, {"subject": "instance_uuid"}, _NEWEST),
            Related("Services", _SERVICES, {"host": "hostname"}),
        ),
    ),
    Kind(
        "job",
        JOBS,
        (Related("Services", _SERVICES, {"host": "host"}),),
        has_complete_rows=False,
        parts={"steps": ("Steps", _STEPS)},
    ),
    PROFILE,
    DEPLOYABLE,
    SERVICE,
    Kind(
        "backend",
        Collection("/services", BACKEND, LONG_BACKEND, format_row=format_backend),
        (Related("Devices", DEVICES, {"hostname": "host"}),),
        filters={"kind": "backend"},
    ),
    DRIVER,
    Kind("attribute", ATTRIBUTES, (Related("Deployable", DEPLOYABLES, key="deployable_id"),)),
    Kind("message", OUTBOX),
    Kind("audit", _AUDITS, has_complete_rows=False, parts={"findings": ("Differences", _FINDINGS)}),
    Kind(
        "discovery", _DISCOVERIES, has_complete_rows=False, parts={"backends": ("Backends", _STEPS)}
    ),
)

_OBJECT = Collection("", (("Name", "name"), ("UUID", "uuid")), (("Name", "name"), ("UUID", "uuid")))
HOST = Kind(
    "host",
    _OBJECT,
    (
        Related("Services", _SERVICES, {"host": "name"}),
        Related("Devices", DEVICES, {"hostname": "name"}),
        Related("Device sets", DEVICE_SETS, {"host": "name"}, _SETS),
        Related("Accelerators", ACCELERATORS, {"host": "name"}),
        Related("Contexts", CONTEXTS, {"host": "name"}),
        Related("Attachments", ATTACHMENTS, {"host": "name"}),
        Related("Jobs", JOBS, {"host": "name"}, _NEWEST),
        Related("Hardware", HARDWARE, {"host": "name"}),
    ),
)
INSTANCE = Kind(
    "instance",
    _OBJECT,
    (
        Related("Accelerators", ACCELERATORS, {"instance": "uuid"}),
        Related("Contexts", CONTEXTS, {"instance": "uuid"}),
        Related("Requests", ARQS, {"instance": "uuid"}),
        Related("Attachments", ATTACHMENTS, {"instance": "uuid"}),
        Related("Jobs", JOBS, {"subject": "uuid"}, _NEWEST),
    ),
)
