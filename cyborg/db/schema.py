# SPDX-License-Identifier: Apache-2.0
"""The tables. Uniqueness lives here, so that no code can forget it.

::

    services 1--n backends          one daemon of one host; the configured drivers of an agent
    services 1--n drivers           what is installed there, used or not
    services 1--n wanted_backends   what operators want there beside the configuration file
    devices 1--n deployables 1--n attach_handles
                 deployables 1--n attributes
    providers                       what Placement must be brought to, one row a deployable
    device_profiles 1--n requests   an accelerator request keeps its own copy of its group
    attach_handles 0..1--0..1 requests
    discoveries, jobs, outbox       work that has been promised and must be done
    jobs 1--n job_steps             of one that is about many hosts
    departed                        what operators said of devices that are gone
    audits                          disagreements that somebody asked to be looked for
    deeds                           what the conductors have put right by themselves, counted
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from oslo_utils import timeutils
from sqlalchemy.dialects import mysql

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# Microseconds matter: two hellos of one agent may come within a second.
Moment = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
# MySQL's TEXT ends at 64 KiB, which a profile of 32 groups can pass.
Text = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
Json = sa.JSON()


def _table(name: str, *columns: Any) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        *columns,
        sa.Column("created_at", Moment, nullable=False, default=timeutils.utcnow),
        sa.Column("updated_at", Moment, onupdate=timeutils.utcnow),
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        sqlite_autoincrement=True,
    )


def _uuid(**more: Any) -> sa.Column[str]:
    return sa.Column("uuid", sa.String(36), nullable=False, unique=True, **more)


def _owned(name: str, table: str, ondelete: str = "CASCADE", **more: Any) -> sa.Column[int]:
    return sa.Column(name, sa.ForeignKey(f"{table}.id", ondelete=ondelete), index=True, **more)


services = _table(
    "services",
    _uuid(),
    sa.Column("binary", sa.String(64), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("epoch", sa.String(36), nullable=False),
    sa.Column("endpoint", sa.String(255)),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("digest", sa.String(64)),
    # Counts the reports of an epoch; a report that does not raise it is late or a duplicate.
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("versions", Json, nullable=False, default=dict),
    sa.Column("started_at", Moment, nullable=False),
    sa.Column("last_seen_at", Moment, nullable=False),
    # Since when a conductor holds it for down, which closes its host's inventory; None while not.
    sa.Column("down_since", Moment),
    # By which names its host may be known to Nova: ``core.identity.Identity``.
    sa.Column("identity", Json, nullable=False, default=dict),
    # ``core.catalogue.fingerprint`` of the rows of drivers.
    sa.Column("catalogue", sa.String(64)),
    # The revision of what is wanted of its backends, and the one that the agent has come to.
    sa.Column("wanted", sa.BigInteger, nullable=False, default=0),
    sa.UniqueConstraint("binary", "host"),
)

backends = _table(
    "backends",
    _uuid(),
    _owned("service_id", "services", nullable=False),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("driver", sa.String(255), nullable=False),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("error", Text),
    sa.UniqueConstraint("service_id", "name"),
)

# What is installed on a host, as its agent found it: ``core.catalogue.Entry``.
drivers = _table(
    "drivers",
    _owned("service_id", "services", nullable=False),
    sa.Column("name", sa.String(255), nullable=False, index=True),
    sa.Column("version", sa.String(255)),
    sa.Column("type", sa.String(32)),
    sa.Column("support", sa.String(32), nullable=False),
    sa.Column("abilities", Json, nullable=False),
    sa.Column("options", Json, nullable=False),
    sa.Column("error", Text),
    sa.UniqueConstraint("service_id", "name"),
)

# ``core.wanted.Wanted``, and what its agent made of it.
wanted_backends = _table(
    "wanted_backends",
    _owned("service_id", "services", nullable=False),
    sa.Column("backend", sa.String(255), nullable=False),
    sa.Column("driver", sa.String(255), nullable=False, index=True),
    sa.Column("wish", sa.String(32), nullable=False),
    sa.Column("config", Json, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    # Whether its agent has said that it is so; what was wrong if it could not be.
    sa.Column("applied", sa.Boolean, nullable=False, default=False),
    sa.Column("error", Text),
    sa.UniqueConstraint("service_id", "backend"),
)

devices = _table(
    "devices",
    _uuid(),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("address", sa.String(120), nullable=False),
    sa.Column("backend", sa.String(255), nullable=False),
    sa.Column("type", sa.String(32), nullable=False, index=True),
    sa.Column("vendor", sa.String(255), nullable=False, index=True),
    sa.Column("model", sa.String(255), nullable=False),
    sa.Column("std_board_info", Json, nullable=False),
    sa.Column("vendor_board_info", Json, nullable=False),
    sa.Column("numa_node", sa.Integer),
    sa.Column("serial", sa.String(255)),
    sa.Column("health", sa.String(32), nullable=False),
    # Why, as the driver says, and since when it is so.
    sa.Column("health_reason", sa.String(255)),
    sa.Column("health_since", Moment, nullable=False, default=timeutils.utcnow),
    sa.Column("setup_required", sa.Boolean, nullable=False),
    sa.Column("reboot_required", sa.Boolean, nullable=False),
    # What the operator wants: enabled or maintaining. No report changes it.
    sa.Column("status", sa.String(32), nullable=False, default="enabled"),
    # Its backend was disabled, or is being uninstalled.
    sa.Column("withdrawn", sa.Boolean, nullable=False, default=False),
    # The host does not report it any longer, but something of it is bound.
    sa.Column("draining", sa.Boolean, nullable=False, default=False),
    # What its driver can do beyond finding it: ``core.device.Ability``.
    sa.Column("abilities", Json, nullable=False, default=list),
    sa.UniqueConstraint("host", "address"),
)

deployables = _table(
    "deployables",
    _uuid(),
    _owned("device_id", "devices", nullable=False),
    _owned("parent_id", "deployables", "SET NULL"),
    _owned("root_id", "deployables", "SET NULL"),
    sa.Column("address", sa.String(120), nullable=False),
    sa.Column("name", sa.String(200), nullable=False, unique=True),
    sa.Column("rp_uuid", sa.String(36), nullable=False, unique=True),
    sa.Column("resource_class", sa.String(255), nullable=False),
    sa.Column("traits", Json, nullable=False),
    # The agent's attributes; an operator's are rows of their own and no report removes them.
    sa.Column("attributes", Json, nullable=False),
    sa.Column("bitstream_id", sa.String(255)),
    sa.Column("num_accelerators", sa.Integer, nullable=False, default=0),
    sa.Column("draining", sa.Boolean, nullable=False, default=False),
    # The job that programs it now; none of its handles is given out meanwhile.
    _owned("job_id", "jobs", "SET NULL"),
)

# What operators said of devices that are gone, for the day on which they return.
departed = _table(
    "departed",
    # The uuid that the device had and gets again.
    _uuid(),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("address", sa.String(120), nullable=False),
    sa.Column("status", sa.String(32), nullable=False),
    # By the deployable's address: its uuid and the operator's attributes.
    sa.Column("parts", Json, nullable=False),
    sa.UniqueConstraint("host", "address"),
)

attributes = _table(
    "attributes",
    _uuid(),
    _owned("deployable_id", "deployables", nullable=False),
    sa.Column("key", sa.String(255), nullable=False),
    sa.Column("value", sa.String(255), nullable=False),
    sa.UniqueConstraint("deployable_id", "key"),
)

device_profiles = _table(
    "device_profiles",
    _uuid(),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("description", Text),
    sa.Column("groups", Json, nullable=False),
)

requests = _table(
    "requests",
    _uuid(),
    sa.Column("state", sa.String(32), nullable=False, index=True),
    # RESTRICT: a profile that is in use cannot be deleted, whoever tries and whenever.
    _owned("profile_id", "device_profiles", "RESTRICT", nullable=False),
    sa.Column("device_profile_name", sa.String(255), nullable=False),
    sa.Column("device_profile_group_id", sa.Integer, nullable=False),
    sa.Column("resource_class", sa.String(255), nullable=False),
    sa.Column("group", Json, nullable=False),
    sa.Column("project_id", sa.String(255), index=True),
    sa.Column("hostname", sa.String(255)),
    sa.Column("device_rp_uuid", sa.String(36), index=True),
    sa.Column("instance_uuid", sa.String(36)),
    # The place among its instance's accelerators, from 0. Every bind for an instance that has none
    # starts at place 0, so of two at once the key lets one through.
    sa.Column("instance_slot", sa.Integer),
    # The host work that this bind waits for; None in every state but BindStarted.
    _owned("job_id", "jobs", "RESTRICT"),
    # Whether `project_id` is known to be the instance's and not only that of the token.
    sa.Column("owner_known", sa.Boolean, nullable=False, default=True),
    # Since when Placement is seen to have no allocation for it.
    sa.Column("orphan_since", Moment),
    # The label that its holder gave to the accelerator: it goes with the request, so that the next
    # one who gets the handle does not read it.
    sa.Column("label_name", sa.String(255)),
    sa.Column("label_description", sa.String(1024)),
    sa.Column("label_tags", Json),
    sa.UniqueConstraint("instance_uuid", "instance_slot"),
)

attach_handles = _table(
    "attach_handles",
    _uuid(),
    sa.Column(
        "deployable_id", sa.ForeignKey("deployables.id", ondelete="RESTRICT"), nullable=False
    ),
    sa.Column("address", sa.String(120), nullable=False),
    sa.Column("type", sa.String(32), nullable=False),
    sa.Column("info", Json, nullable=False),
    # The owner. One column holds at most one owner, and UNIQUE gives a request at most one handle;
    # RESTRICT keeps a request from going while it holds one.
    sa.Column("request_id", sa.ForeignKey("requests.id", ondelete="RESTRICT"), unique=True),
    sa.Column("draining", sa.Boolean, nullable=False, default=False),
    # Its host has begun to prepare it, perhaps: without an owner it is dirty, and is no free handle
    # until a job has cleaned it.
    sa.Column("prepared", sa.Boolean, nullable=False, default=False),
    # The job that cleans it now.
    _owned("job_id", "jobs", "SET NULL"),
    sa.UniqueConstraint("deployable_id", "address"),
    # A free handle of a provider is found without a walk over those that are taken. The one index
    # on deployable_id: MariaDB merges two, and then locks rows that nobody asked for.
    sa.Index(None, "deployable_id", "request_id"),
)

providers = _table(
    "providers",
    _uuid(),
    sa.Column("name", sa.String(200), nullable=False, unique=True),
    sa.Column("host", sa.String(255), nullable=False, index=True),
    # `revision` rises with every change of what is wanted; Placement was last brought to
    # `published`. The two differ: the provider is stale, since `stale_since`.
    sa.Column("revision", sa.BigInteger, nullable=False, default=1),
    sa.Column("published", sa.BigInteger, nullable=False, default=0),
    sa.Column("stale_since", Moment, index=True),
    sa.Column("error", Text),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("next_try_at", Moment),
    sa.Column("owner", sa.String(255)),
    sa.Column("lease_until", Moment),
    # Nothing has changed here: it is only compared, so that what differs is somebody else's doing.
    sa.Column("audited", sa.Boolean, nullable=False, default=False),
)

# The audit takes those first that were looked at longest ago.
sa.Index("ix_providers_updated_at", providers.c.updated_at)

discoveries = _table(
    "discoveries",
    sa.Column("uuid", sa.String(36), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("backend", sa.String(255), nullable=False),
    sa.Column("state", sa.String(32), nullable=False),
    sa.Column("error", Text),
    sa.UniqueConstraint("uuid", "host", "backend"),
)


def _work(name: str, *columns: Any) -> sa.Table:
    return _table(
        name,
        _uuid(),
        sa.Column("kind", sa.String(64), nullable=False),
        *columns,
        sa.Column("state", sa.String(32), nullable=False, default="pending"),
        sa.Column("attempts", sa.Integer, nullable=False, default=0),
        sa.Column("next_try_at", Moment, nullable=False, default=timeutils.utcnow),
        sa.Column("owner", sa.String(255)),
        sa.Column("lease_until", Moment),
        sa.Column("error", Text),
        sa.Index(None, "state", "next_try_at"),
    )


outbox = _work(
    "outbox",
    sa.Column("subject", sa.String(255), nullable=False, index=True),
    sa.Column("payload", Json, nullable=False),
)

jobs = _work(
    "jobs",
    sa.Column("host", sa.String(255), nullable=False, index=True),
    # What it is about: the instance's uuid, or the deployable's.
    sa.Column("subject", sa.String(255), nullable=False, index=True),
    sa.Column("arguments", Json, nullable=False),
    sa.Column("result", Json),
    # When the conductors give it up and undo it; None is never.
    sa.Column("deadline", Moment),
    # What no two open jobs may be about at once; None when it has ended, and for host work.
    sa.Column("exclusive", sa.String(255), unique=True),
)

# ``core.rollout.Step``: one backend on one host that a job is about.
job_steps = _table(
    "job_steps",
    _owned("job_id", "jobs", nullable=False),
    sa.Column("host", sa.String(255), nullable=False, index=True),
    sa.Column("backend", sa.String(255), nullable=False),
    sa.Column("state", sa.String(32), nullable=False),
    # The revision of the host that its agent was asked for.
    sa.Column("revision", sa.BigInteger),
    # What was wanted before, to go back to: ``core.wanted.Wanted`` as plain values.
    sa.Column("before", Json),
    sa.Column("error", Text),
    # When an agent that has not answered counts as failed.
    sa.Column("deadline", Moment),
    sa.UniqueConstraint("job_id", "host", "backend"),
)

audits = _table(
    "audits",
    _uuid(),
    # Which host is looked at; None is all.
    sa.Column("host", sa.String(255)),
    sa.Column("repair", sa.Boolean, nullable=False, default=False),
    sa.Column("state", sa.String(32), nullable=False),
    sa.Column("error", Text),
    # Whose word was compared: ``core.audit.Side``.
    sa.Column("sides", Json, nullable=False, default=list),
    # Hosts looked at so far, of how many; the next is the one behind the last.
    sa.Column("done", sa.Integer, nullable=False, default=0),
    sa.Column("total", sa.Integer, nullable=False, default=0),
    sa.Column("last_host", sa.String(255)),
    # How many disagreements there are; of very many, ``findings`` holds the first.
    sa.Column("found", sa.Integer, nullable=False, default=0),
    sa.Column("findings", Json, nullable=False, default=list),
    sa.Column("owner", sa.String(255)),
    sa.Column("lease_until", Moment),
)

deeds = _table(
    "deeds",
    sa.Column("kind", sa.String(64), nullable=False, unique=True),
    sa.Column("count", sa.BigInteger, nullable=False, default=0),
    sa.Column("last_at", Moment, nullable=False),
)

TABLES: Sequence[sa.Table] = tuple(metadata.sorted_tables)
