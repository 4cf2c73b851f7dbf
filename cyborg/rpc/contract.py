# SPDX-License-Identifier: Apache-2.0
"""The messages of the internal bus: every method, its arguments and since which version it exists.

A server answers the methods of its contract and no others. A change of this table is a change of
the internal contract: a new method or a new optional argument raises the minor version, anything
else the major one. A call carries the oldest version that understands it, so that sides whose minor
versions differ speak to each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OTHER_BYTES = 1024 * 1024
"""The largest message that is no report, in bytes of JSON."""


@dataclass(frozen=True, slots=True)
class Method:
    """One message: its arguments in order, those that may be left out, its version.

    ``later`` has the version of each optional argument that is younger than the method.
    """

    arguments: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    since: str = "1.0"
    report: bool = False  # of the size that [conductor] max_report_bytes allows
    later: Mapping[str, str] = field(default_factory=dict)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@dataclass(frozen=True, slots=True)
class Contract:
    """What one kind of server answers. ``version`` is the newest; older callers are served too."""

    name: str
    version: str
    methods: Mapping[str, Method]

    def needed(self, method: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the oldest version that understands a call, and the arguments to send.

        A younger argument that is None says nothing, and is left out: an older side takes the rest.
        """
        known = self.methods[method]
        sent = {k: v for k, v in arguments.items() if k not in known.later or v is not None}
        versions = [known.since, *(known.later[name] for name in sent if name in known.later)]
        # Another major version is another contract, from its beginning.
        return max([*versions, f"{self.version.partition('.')[0]}.0"], key=_parts), sent


CONDUCTOR = Contract(
    "conductor",
    "1.0",
    {
        "hello": Method(
            ("host", "epoch", "endpoint", "status", "drivers", "digest", "versions", "wanted"),
            frozenset({"wanted"}),
        ),
        "report": Method(("report",), report=True),
        "service_hello": Method(("binary", "host", "epoch", "versions")),
        "device_profile_create": Method(("profile",)),
        "device_profile_delete": Method(("keys",)),
        "accelerator_update": Method(("uuid", "label", "scope")),
        "attribute_create": Method(("deployable", "key", "value")),
        "attribute_delete": Method(("uuid",)),
        "arq_create": Method(("device_profile_name", "project_id")),
        "arq_patch": Method(("wishes", "verb", "scope", "project"), frozenset({"project"})),
        "arq_delete": Method(("uuids", "instance", "scope", "bound_too")),
        "device_set_status": Method(("uuid", "status")),
        "deployable_program": Method(("uuid", "image_uuid")),
        "outbox_retry": Method(("uuid",)),
        "outbox_delete": Method(("uuid",)),
        "audit_create": Method(("host", "repair")),
        "discovery_create": Method(("host", "driver"), frozenset({"host", "driver"})),
        "discovery_done": Method(("discovery_id", "host", "drivers")),
        "driver_install": Method(("driver", "backend", "hosts", "config")),
        "driver_uninstall": Method(("driver", "backend", "hosts", "drain", "force")),
        "driver_update": Method(("driver", "backend", "hosts", "config", "wish", "reload")),
        "hardware_adopt": Method(("host", "address", "backend")),
        "hardware_release": Method(("uuid",)),
        "job_cancel": Method(("uuid",)),
        "backends_wanted": Method(("host", "epoch")),
        "backends_applied": Method(("host", "epoch", "revision", "outcomes")),
        "job_done": Method(("job", "host", "state", "error")),
    },
)

AGENT = Contract(
    "agent",
    "1.0",
    {
        "discovery": Method(("driver", "discovery_id"), frozenset({"driver", "discovery_id"})),
        "hardware": Method(("driver",), frozenset({"driver"})),
        "wanted": Method(("revision",)),
        "job": Method(("job", "kind", "arguments", "seconds")),
    },
)

CONTRACTS: Mapping[str, Contract] = {c.name: c for c in (CONDUCTOR, AGENT)}
