# SPDX-License-Identifier: Apache-2.0
"""Every route of the API. A path with and without /v2 before it is the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pecan
from webob import exc

from cyborg.api.resource import Desk
from cyborg.api.v2 import (
    accelerator_requests,
    accelerators,
    attributes,
    audits,
    deployables,
    device_profiles,
    devices,
    discoveries,
    drivers,
    hardware,
    jobs,
    outbox,
    services,
)

Table = Mapping[str, Mapping[str, Callable[..., Any]]]


def table(desk: Desk) -> Table:
    """Return the operations by path and method; a star stands for one name or uuid."""
    arqs = accelerator_requests.Controller(desk)
    accelerator = accelerators.Controller(desk)
    attribute = attributes.Controller(desk)
    audit = audits.Controller(desk)
    deployable = deployables.Controller(desk)
    device = devices.Controller(desk)
    discovery = discoveries.Controller(desk)
    driver = drivers.Controller(desk)
    hardware_ = hardware.Controller(desk)
    job = jobs.Controller(desk)
    message = outbox.Controller(desk)
    profile = device_profiles.Controller(desk)
    service = services.Controller(desk)
    return {
        "accelerator_requests": {
            "GET": arqs.find,
            "POST": arqs.create,
            "PATCH": arqs.patch,
            "DELETE": arqs.delete_many,
        },
        "accelerator_requests/*": {
            "GET": arqs.get,
            "PATCH": arqs.patch_one,
            "DELETE": arqs.delete,
        },
        "accelerators": {"GET": accelerator.find},
        "accelerators/*": {"GET": accelerator.get, "PATCH": accelerator.update},
        "attributes": {"GET": attribute.find, "POST": attribute.create},
        "attributes/*": {"GET": attribute.get, "DELETE": attribute.delete},
        "audits": {"GET": audit.find, "POST": audit.create},
        "audits/*": {"GET": audit.get},
        "deployables": {"GET": deployable.find},
        "deployables/*": {"GET": deployable.get},
        "deployables/*/program": {"PATCH": deployable.program},
        "deployables/*/program/*": {"PATCH": deployable.program_again},
        "device_profiles": {
            "GET": profile.find,
            "POST": profile.create,
            "DELETE": profile.delete_many,
        },
        "device_profiles/*": {"GET": profile.get, "DELETE": profile.delete},
        "devices": {"GET": device.find},
        "devices/*": {"GET": device.get},
        "devices/*/disable": {"POST": device.disable},
        "devices/*/enable": {"POST": device.enable},
        "discoveries": {"GET": discovery.find, "POST": discovery.create},
        "discoveries/*": {"GET": discovery.get},
        "drivers": {"GET": driver.find, "POST": driver.install},
        "drivers/*": {
            "GET": driver.get,
            "PATCH": driver.update,
            "DELETE": driver.uninstall,
        },
        "hardware": {"GET": hardware_.find, "POST": hardware_.adopt},
        "hardware/*": {"DELETE": hardware_.release},
        "jobs": {"GET": job.find},
        "jobs/*": {"GET": job.get, "DELETE": job.cancel},
        "outbox": {"GET": message.find},
        "outbox/*": {"DELETE": message.delete},
        "outbox/*/retry": {"POST": message.retry},
        "services": {"GET": service.find},
    }


class Root:
    """The controller that pecan starts from; the table alone says where it goes."""

    def __init__(self, routes: Table) -> None:
        self._table = routes

    @pecan.expose()
    def _route(self, args: Sequence[str], request: Any) -> tuple[Callable[..., Any], list[str]]:
        parts = list(args[1:] if args and args[0] == "v2" else args)
        if parts and parts[-1] == "":
            parts.pop()
        # Names and uuids stand in every second place, and a star at each in the table.
        names = parts[1::2]
        methods = self._table.get("/".join("*" if n % 2 else p for n, p in enumerate(parts)))
        if methods is None or "" in names:
            raise exc.HTTPNotFound(f"there is no {request.path_info}"[:255])
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            allowed = sorted({*methods, *(("HEAD",) if "GET" in methods else ())})
            raise exc.HTTPMethodNotAllowed(
                f"{method} is not for {request.path_info}: {', '.join(allowed)}"[:255],
                headers={"Allow": ", ".join(allowed)},
            )
        return methods[method], names
