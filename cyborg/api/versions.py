# SPDX-License-Identifier: Apache-2.0
"""Microversions: which there are, which one a request asks for, and the version documents.

==== ==========================================================================
2.0  the base: what Nova and openstacksdk, which ask for no version, must find
2.1  ``/project_id`` in the patch of accelerator requests, for administrators
2.2  a device profile is shown by its name; ours does so at any version
2.3  ``status`` in devices
2.4  accelerators, drivers, hardware, services, discoveries, jobs, the outbox and audits; state and
     health of devices, and more of them; what Placement has of deployables
==== ==========================================================================
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import microversion_parse
from webob import exc

SERVICE_TYPE = "accelerator"
MINIMUM = (2, 0)
MAXIMUM = (2, 4)
VERSIONS = tuple(f"2.{minor}" for minor in range(MINIMUM[1], MAXIMUM[1] + 1))
FIRST, LATEST = VERSIONS[0], VERSIONS[-1]

ENVIRON = "cyborg.version"

Version = tuple[int, int]


def asked_for(environ: Mapping[str, Any]) -> Version:
    """Return the microversion that a request asks for.

    A header that is absent or names other services alone asks for the first. Raises
    HTTPNotAcceptable for one that we do not have or cannot read.
    """
    header = environ.get("HTTP_OPENSTACK_API_VERSION")
    if header is None:
        return MINIMUM
    try:
        found = microversion_parse.extract_version(
            {"openstack-api-version": _readable(header)}, SERVICE_TYPE, VERSIONS
        )
    except (ValueError, TypeError):
        raise exc.HTTPNotAcceptable(
            f"OpenStack-API-Version: {header[:60]!r} asks for a version that is none of "
            f"{FIRST} to {LATEST}"
        ) from None
    return found.major, found.minor


def _readable(header: str) -> str:
    # The parser overlooks what is not "<service> <version>", and would take it for an absence.
    if any(len(part.split()) != 2 for part in header.split(",") if part.strip()):
        raise ValueError(header)
    return header


class Telling:
    """A WSGI layer that says in every answer which microversions there are and which it has."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request; the layer that reads its version leaves it in the environ."""

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            major, minor = environ.get(ENVIRON, MINIMUM)
            told = [
                ("Vary", "OpenStack-API-Version"),
                ("OpenStack-API-Minimum-Version", f"{SERVICE_TYPE} {FIRST}"),
                ("OpenStack-API-Maximum-Version", f"{SERVICE_TYPE} {LATEST}"),
                ("OpenStack-API-Version", f"{SERVICE_TYPE} {major}.{minor}"),
            ]
            return start_response(status, [*headers, *told], *more)

        return self._app(environ, start)


def root_document(root: str) -> dict[str, Any]:
    """Return what GET / answers."""
    one = _version("v2", root)
    return {
        "name": "OpenStack Accelerator API",
        "description": "Cyborg manages accelerators: GPUs, FPGAs, crypto cards, NVMe drives, NICs.",
        "versions": [one],
        "default_version": one,
    }


def v2_document(root: str) -> dict[str, Any]:
    """Return what GET /v2 answers."""
    return _version("v2.0", root)


def _version(id_: str, root: str) -> dict[str, Any]:
    return {
        "id": id_,
        "status": "CURRENT",
        "max_version": LATEST,
        "min_version": FIRST,
        "links": [{"href": f"{root}/v2", "rel": "self"}],
    }
