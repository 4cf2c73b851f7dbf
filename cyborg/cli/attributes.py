# SPDX-License-Identifier: Apache-2.0
"""``cyborg attribute-*``: attributes that operators set on deployables."""

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection
from cyborg.cli.deployables import DEPLOYABLES

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
