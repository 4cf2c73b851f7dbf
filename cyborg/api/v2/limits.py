# SPDX-License-Identifier: Apache-2.0
"""/v2/limits: the limits of a project and their usage."""

from typing import Any

from cyborg.api import types
from cyborg.api.controller import RequestContext, Resource
from cyborg.api.operation import operation
from cyborg.core.binding.limits import UNLIMITED
from cyborg.core.errors import Forbidden, Invalid
from cyborg.db.attachments import read as attachments
from cyborg.db.binding import project_units
from cyborg.db.contexts import read as device_contexts


class CountLimit(types.JsonObject, counts=("limit", "used")):
    """The limit of a project on a number of objects; -1 is unlimited."""


class ResourceLimit(types.JsonObject, row=project_units.UsageRow):
    """The limit of a project on the units of one resource class; -1 is unlimited.

    ``used`` counts all accelerator requests and is compared with the limit when they are created;
    ``bound`` counts those that own an attach handle and is compared when they are bound.
    """

    limit = types.required(int)


class Limits(types.JsonObject):
    """The limits of a project and their usage.

    ``resources`` has the resource classes that have a limit or are used, ordered by name.
    """

    project_id = types.required(str)
    accelerator_requests = types.required(CountLimit)
    attachments = types.required(CountLimit)
    device_contexts = types.required(CountLimit)
    resources = types.required([ResourceLimit])


class Controller(Resource):
    """The operation on limits."""

    @operation(
        "GET limits",
        "cyborg:limits:get",
        since=(2, 6),
        answer=Limits,
        query={"project_id": types.Text(min_length=1)},
        raises=(Forbidden,),
    )
    def show(self, request: RequestContext, project_id: str | None) -> Any:
        """Show the limits of the project of the token, and their usage.

        Administrators and services can select another project with ``project_id``.
        """
        project = _project(request, project_id)
        limits = self.context.conductor.limits_get(project)
        with self.context.reader.connect() as connection:
            usage = {row["resource_class"]: row for row in project_units.usage(connection, project)}
            num_attachments = attachments.count(connection, project)
            num_contexts = device_contexts.count(connection, project)
        unused = {"used": 0, "bound": 0}
        resources = [
            {
                **usage.get(name, unused),
                "resource_class": name,
                "limit": limits["units"].get(name, UNLIMITED),
            }
            # A class may have a limit without a use, or a use from before its limit.
            for name in sorted({*usage, *limits["units"]})
        ]
        arqs = {"limit": limits["arqs"], "used": sum(row["used"] for row in usage.values())}
        contexts = {"limit": limits["device_contexts"], "used": num_contexts}
        row = {
            "project_id": project,
            "accelerator_requests": arqs,
            "attachments": {"limit": limits["attachments"], "used": num_attachments},
            "device_contexts": contexts,
            "resources": resources,
        }
        return types.serialize(Limits, row)


def _project(request: RequestContext, project_id: str | None) -> str:
    """Return the project to show. Raise Forbidden if it is not visible to the caller."""
    caller = request.caller
    project = project_id or caller.project_id
    if not project:
        raise Invalid("project_id: missing, and the token has no project", field="project_id")
    if project != caller.project_id and caller.project_scope is not None:
        raise Forbidden(
            f"project_id: only {caller.administrators} see the limits of another project; omit "
            "this parameter",
            field="project_id",
        )
    return project
