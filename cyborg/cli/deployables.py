# SPDX-License-Identifier: Apache-2.0
"""``cyborg deployable-*`` and ``attribute-*``: each deployable is one resource provider."""

from typing import Any

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Arguments, argument, field_argument
from cyborg.cli.common.rest import Collection, Row
from cyborg.cli.device_sets import describe_set
from cyborg.cli.jobs import JOBS, WAIT_ARGUMENTS, describe_failure, job_progress
from cyborg.core.jobs.job import JobKind, JobState

SHORT = formatting.columns_of(
    "uuid, name, device_id=Device, rp_uuid=Provider, num_accelerators=Total, placed=Placement"
)
LONG = formatting.columns_of(
    "placement_error, driver_name=Backend, draining, bitstream_id=Image, "
    "hostname=Host, address, resource_class=Class, traits, attributes_list=Attributes, "
    "size=Set size, devices=Set devices, offer=Set offer, owner=Set owner, reason=Set reason, "
    "parent_id=Parent, root_id=Root, created_at, updated_at",
    after=SHORT,
)


def _format_row(row: Row) -> dict[str, Any]:
    placement = row.get("placement") or {}
    status = placement.get("status")
    return {
        **row,
        **describe_set(row.get("device_set")),
        "placed": status and status.replace("_", " "),
        "placement_error": placement.get("error"),
    }


DEPLOYABLES = Collection("/deployables", SHORT, LONG, format_row=_format_row)


class DeployableList(listing.Lister, of=DEPLOYABLES):
    """List deployables and their status in Placement."""


class DeployableProgram(base.WaitCommand, base.Show, of=DEPLOYABLES):
    """Program an image of the image service into a deployable that is not bound.

    With --wait the exit status is 1 if the job did not succeed.
    """

    ARGUMENTS = (
        argument("deployable", help="uuid of the deployable"),
        argument("image", help="uuid of the image"),
        *WAIT_ARGUMENTS,
    )

    def take_action(self, args: Arguments) -> Any:
        """Start the job, wait with --wait, and return the deployable."""
        (uuid,) = self.find_uuids(args)
        path = DEPLOYABLES.object_path(uuid)
        body = [{"path": "/program", "op": "replace", "value": [{"image_uuid": args.image}]}]
        row = self.app.rest.call("PATCH", f"{path}/program", body)
        if args.wait:
            self._wait_for_job(uuid, args.within)
            row = self.app.rest.call("GET", path)
        return DEPLOYABLES.build_object(row)

    def _wait_for_job(self, uuid: str, within: float) -> None:
        # The response does not contain the job; it is the newest one of this deployable.
        jobs = JOBS.list_all(self.app.rest, kind=str(JobKind.PROGRAM), subject=uuid)
        if not jobs:
            return
        newest = max(jobs, key=lambda job: str(job["created_at"]))
        path = JOBS.object_path(newest["uuid"])
        job = self.wait(path, job_progress, "programming", within, show_counts=False)
        if job["state"] != JobState.DONE:
            self.app.LOG.error(describe_failure(job))
            self._status = 1


ATTRIBUTE_COLUMNS = formatting.columns_of("uuid, deployable_id=Deployable, key, value")
LONG_ATTRIBUTE_COLUMNS = formatting.columns_of("created_at, updated_at", after=ATTRIBUTE_COLUMNS)
ATTRIBUTES = Collection("/attributes", ATTRIBUTE_COLUMNS, LONG_ATTRIBUTE_COLUMNS)


class AttributeCreate(base.Create, of=ATTRIBUTES):
    """Create an attribute of a deployable; reports of the agent do not remove it."""

    ARGUMENTS = (
        field_argument(
            "deployable",
            to="deployable_id",
            lookup=DEPLOYABLES.find_uuid,
            help="uuid of the deployable",
        ),
        field_argument("key", help="name of the attribute"),
        field_argument("value", help="value of the attribute"),
    )


class AttributeList(listing.Lister, of=ATTRIBUTES):
    """List the attributes that operators created on deployables."""

    ARGUMENTS = (
        field_argument(
            "--deployable",
            to="deployable_id",
            lookup=DEPLOYABLES.find_uuid,
            help="only the attributes of this deployable",
        ),
        field_argument("--key", help="only attributes with this key"),
    )


class AttributeDelete(base.CallEach, of=ATTRIBUTES):
    """Delete attributes of deployables."""

    ARGUMENTS = (argument("attribute", nargs="+", help="uuid of an attribute"),)
