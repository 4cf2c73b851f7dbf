# SPDX-License-Identifier: Apache-2.0
"""Microversions: the supported versions, version negotiation, and the version documents.

==== ==========================================================================
2.0  the base, used by Nova and openstacksdk, which request no version
2.1  ``/project_id`` in the patch of accelerator requests, for administrators
2.2  no change: a device profile can be shown by its name at every version
2.3  ``status`` in devices
2.4  accelerators, drivers, hardware, services, discoveries, jobs, the outbox and audits; state,
     health and other fields of devices; the Placement status of deployables
2.5  ``deliverable``, ``undeliverable_reason``, ``topology``, ``job_errors`` and
     ``desired_layout`` in devices; the device states ``undeliverable``, ``restore_failed``
     and ``failing``, which 2.4 shows as ``setup_required``, ``unhealthy`` and
     ``unhealthy``; the custody log and the layouts of a device; ``activity`` in jobs;
     ``error`` in accelerators, and the accelerator state ``error``, which 2.4 shows as
     ``dirty``; ``accel:attach_target`` of new device profiles is checked
2.6  404 for a list of an unknown host, for administrators; attachments; device contexts;
     explanations and the capacity of a device profile; limits and their usage; ``maintenance``
     in devices, and maintenance windows; the removal of a host; the summary of the cloud; hosts;
     ``use`` in devices; ``device_set``, ``hostname``, ``address``, ``resource_class`` and
     ``traits`` in deployables, and their filters; ``with_count`` in lists; filters by ``name``
     and ``address``; ``attached_at`` and ``attach_error`` in accelerator requests and
     accelerators, and their filter ``attach_failed``; ``preview`` of the layouts of a device
==== ==========================================================================
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import microversion_parse
from webob import exc

from cyborg.core.log import get_logger
from cyborg.threads.failures import LOG_INTERVAL, RateLimitedLogger

SERVICE_TYPE = "accelerator"
MINIMUM = (2, 0)
MAXIMUM = (2, 6)
VERSIONS = tuple(f"2.{minor}" for minor in range(MINIMUM[1], MAXIMUM[1] + 1))
FIRST, LATEST = VERSIONS[0], VERSIONS[-1]

LOG = get_logger(__name__)

ENVIRON = "cyborg.version"

_HEADER = "OpenStack-API-Version"
# Rate-limited: a client that leaves out the service type does so in each request.
_BARE_VERSION_LOG = RateLimitedLogger(logger=LOG)

Version = tuple[int, int]


def requested_version(environ: Mapping[str, Any]) -> Version:
    """Return the microversion that a request asks for.

    Without the header, or if it names only other services, this is the first version. As in
    OpenStack Cyborg, a version without the service type is accepted, and logged as a warning, and
    ``latest`` in any case. Raise HTTPNotAcceptable if the version is unknown or malformed.
    """
    header = environ.get("HTTP_OPENSTACK_API_VERSION") or ""
    # Each entry should be "<service> <version>"; the parser ignores all others.
    entries = [entry.split() for entry in header.split(",") if entry.strip()]
    bare = [words[0] for words in entries if len(words) == 1]
    text = microversion_parse.get_version({_HEADER: header}, SERVICE_TYPE)
    is_bare = text is None and bool(bare)
    if is_bare:
        # The last one, as the parser takes the last entry of this service.
        text = bare[-1]
    if text is None:
        if any(len(words) > 2 for words in entries):
            raise _refuse(header, "is malformed")
        return MINIMUM
    try:
        version = microversion_parse.parse_version_string(
            LATEST if text.lower() == "latest" else text
        )
    except TypeError:
        raise _refuse(header, "is malformed") from None
    if str(version) not in VERSIONS:
        raise _refuse(header, f"names no version from {FIRST} to {LATEST}")
    if is_bare:
        _BARE_VERSION_LOG.warn(
            "%s: %r lacks the service type, taken as '%s %s'; the next such header within %g s is "
            "not logged",
            _HEADER,
            header[:60],
            SERVICE_TYPE,
            version,
            LOG_INTERVAL,
        )
    return version.major, version.minor


def _refuse(header: str, reason: str) -> exc.HTTPNotAcceptable:
    return exc.HTTPNotAcceptable(
        f"{_HEADER}: {header[:60]!r} {reason}, expected for example '{SERVICE_TYPE} {LATEST}' or "
        f"'{SERVICE_TYPE} latest'"
    )


class MicroversionHeaders:
    """A WSGI layer that adds the microversion headers to every response."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request; a layer below puts the negotiated version into the environ."""

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            # Not set if the request failed before the version was known.
            major, minor = environ.get(ENVIRON, MINIMUM)
            version_headers = [
                # A cache must not answer one version with another.
                ("Vary", _HEADER),
                ("OpenStack-API-Minimum-Version", f"{SERVICE_TYPE} {FIRST}"),
                ("OpenStack-API-Maximum-Version", f"{SERVICE_TYPE} {LATEST}"),
                (_HEADER, f"{SERVICE_TYPE} {major}.{minor}"),
            ]
            return start_response(status, [*headers, *version_headers], *more)

        return self._app(environ, start)


def root_document(root: str) -> dict[str, Any]:
    """Return the document of GET /."""
    version = _version("v2", root)
    return {
        "name": "OpenStack Accelerator API",
        "description": "Cyborg manages accelerators: GPUs, FPGAs, crypto cards, NVMe drives, NICs.",
        "versions": [version],
        "default_version": version,
    }


def v2_document(root: str) -> dict[str, Any]:
    """Return the document of GET /v2."""
    return _version("v2.0", root)


def _version(id_: str, root: str) -> dict[str, Any]:
    return {
        "id": id_,
        "status": "CURRENT",
        "max_version": LATEST,
        "min_version": FIRST,
        "links": [{"href": f"{root}/v2", "rel": "self"}],
    }
