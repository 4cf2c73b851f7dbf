# SPDX-License-Identifier: Apache-2.0
"""The database schema. Its constraints enforce uniqueness, whatever the code does.

``doc/source/contributor/architecture.rst`` has the modules that write each table, and
``checklists.rst`` the way of a column to the command line.

::

    services 1--n backends          one daemon of one host; the configured drivers of an agent
                  backends 1--n backend_functions   what the devices of a backend can do
    services 1--n drivers           the installed drivers of a host, used or not
    services 1--n desired_backends  desired backends, in addition to the configuration file
    devices 1--n deployables 1--n attach_handles
                 deployables 1--n attributes
                 deployables 1--n set_members n--1 attach_handles
    providers                       Placement synchronization state, one row per deployable
    device_profiles 1--n arqs       accelerator requests (ARQs), each with a copy of its group
    device_contexts 1--1 device_profiles   a context has a hidden profile
    device_contexts 1--n arqs       the ARQs of a context
    attach_handles 0..1--0..1 arqs
    attachments 0..1--n arqs        accelerators that were attached to existing instances
    discoveries, jobs, outbox       pending work
    discoveries 1--n discovery_backends   each backend that must answer
    jobs 1--n job_steps             steps of a job on many hosts
    device_tombstones               tombstones of removed devices
    device_maintenances             maintenance windows; they name devices by uuid
    audits                          consistency checks that operators requested
    self_heal_counters              counts of corrections that conductors made
    object_counts                   the numbers of all objects, as they were counted last
    project_locks                   a row to lock for each project with limits
    idempotency_keys                completed calls, with their responses
    custody_heads 0..1--n custody_records   custody logs; they name devices by uuid, not by row id

All tables are here, not in the folders of the capabilities: foreign keys cross these, and a reader
of a query looks for a table by its name. The tables from ``discoveries`` on, which no table of the
inventory needs but for a foreign key, are in ``work_tables``: one file would be too long.
"""

from collections.abc import Sequence

import sqlalchemy as sa

from cyborg.db import columns, work_tables
from cyborg.db.clock import utcnow
from cyborg.db.columns import Json, Moment, Text
from cyborg.db.columns import foreign_key as _foreign_key
from cyborg.db.columns import table as _table
from cyborg.db.columns import uuid_column as _uuid

# The last migration, ``cyborg.db.migrate.head``. The API has no alembic to look it up.
REVISION = "3f7c2a9d1b64"

metadata = columns.metadata
attachments = work_tables.attachments
audits = work_tables.audits
custody_heads = work_tables.custody_heads
custody_records = work_tables.custody_records
discoveries = work_tables.discoveries
discovery_backends = work_tables.discovery_backends
idempotency_keys = work_tables.idempotency_keys
job_steps = work_tables.job_steps
jobs = work_tables.jobs
object_counts = work_tables.object_counts
outbox = work_tables.outbox
project_locks = work_tables.project_locks
self_heal_counters = work_tables.self_heal_counters

services = _table(
    "services",
    _uuid(),
    sa.Column("binary", sa.String(64), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("epoch", sa.String(36), nullable=False),
    sa.Column("endpoint", sa.String(255)),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("digest", sa.String(64)),
    # Whether the last heartbeat had a digest: one without it may have changed the backends.
    sa.Column("has_digest", sa.Boolean, nullable=False, default=True),
    # Generation of the last report of the epoch. A report that is not newer is late or a duplicate.
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("versions", Json, nullable=False, default=dict),
    sa.Column("started_at", Moment, nullable=False),
    sa.Column("last_seen_at", Moment, nullable=False, index=True),
    # Deadlines of the next heartbeat, by the interval that the daemon was given with the last one.
    sa.Column("late_at", Moment, nullable=False),
    sa.Column("down_at", Moment, nullable=False, index=True),
    # When the service was marked down, which cordons its host's inventory; None if it is up.
    sa.Column("down_since", Moment),
    # The names that Nova may use for its host: ``core.hosts``.
    sa.Column("identity", Json, nullable=False, default=dict),
    # ``core.drivers.registry.fingerprint`` of the rows of drivers.
    sa.Column("drivers_digest", sa.String(64)),
    # The boot of the host in which an agent last sent a heartbeat; None if the agent is older.
    sa.Column("boot_id", sa.String(64)),
    # Generation of the desired state of its backends.
    sa.Column("desired_generation", sa.BigInteger, nullable=False, default=0),
    sa.UniqueConstraint("binary", "host"),
)

backends = _table(
    "backends",
    _uuid(),
    _foreign_key("service_id", "services", nullable=False),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("driver", sa.String(255), nullable=False),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("error", Text),
    # From the last report: ``core.inventory.report``; None if an agent does not report them.
    sa.Column("remarks", Json),
    sa.Column("settings", Json),
    # Too many discoveries failed in a row: handles that need host work are not allocated.
    sa.Column("cordoned", sa.Boolean, nullable=False, default=False),
    sa.UniqueConstraint("service_id", "name"),
)

# ``core.inventory.functions`` of the devices of a backend, for the search of backends.
backend_functions = _table(
    "backend_functions",
    _foreign_key("backend_id", "backends", nullable=False),
    sa.Column("function", sa.String(255), nullable=False),
    sa.UniqueConstraint("function", "backend_id"),
)

# Installed drivers of a host, as its agent reports them: ``core.drivers.registry``.
drivers = _table(
    "drivers",
    _foreign_key("service_id", "services", nullable=False),
    sa.Column("name", sa.String(255), nullable=False, index=True),
    sa.Column("version", sa.String(255)),
    sa.Column("type", sa.String(32)),
    sa.Column("support", sa.String(32), nullable=False),
    sa.Column("abilities", Json, nullable=False),
    sa.Column("options", Json, nullable=False),
    sa.Column("error", Text),
    sa.Column("installable", sa.Boolean, nullable=False, default=True),
    sa.UniqueConstraint("service_id", "name"),
)

# Desired backends (``core.drivers.desired_state``), and the outcomes that the agent reports.
desired_backends = _table(
    "desired_backends",
    _foreign_key("service_id", "services", nullable=False),
    sa.Column("backend", sa.String(255), nullable=False),
    sa.Column("driver", sa.String(255), nullable=False, index=True),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("config", Json, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    # Whether the agent has applied it; the error if it failed.
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
    # The driver's reason for the health, and the time of the last change.
    sa.Column("health_reason", sa.String(255)),
    sa.Column("health_since", Moment, nullable=False, default=utcnow()),
    *(sa.Column(f"{name}_required", sa.Boolean, nullable=False) for name in ("setup", "reboot")),
    # Set by the operator: enabled or maintaining. No report changes it.
    sa.Column("status", sa.String(32), nullable=False, default="enabled"),
    # The backend is disabled, being uninstalled or cordoned, or a partition job drains the device.
    sa.Column("cordoned", sa.Boolean, nullable=False, default=False),
    # Since when its status or cordon keeps new binds away; None if its backend cannot be used.
    sa.Column("cordoned_since", Moment),
    # The host no longer reports the device, but a handle of it is bound.
    sa.Column("draining", sa.Boolean, nullable=False, default=False, index=True),
    # The abilities of its driver: ``core.inventory.device.Ability``.
    sa.Column("abilities", Json, nullable=False, default=list),
    # Whether it can be attached to an instance; if not, the reason with its remedy.
    sa.Column("deliverable", sa.Boolean, nullable=False, default=True),
    sa.Column("undeliverable_reason", sa.String(255)),
    sa.Column("topology", Json, nullable=False, default=dict),
    # The current layout and the possible ones: ``core.inventory.device.Layout``.
    sa.Column("layout", sa.String(255)),
    sa.Column("layouts", Json, nullable=False, default=list),
    # The layout that an operator applied last. No report changes it.
    sa.Column("desired_layout", sa.String(255)),
    # ``core.inventory.device_state``: what its host did not keep over a reboot; None if nothing.
    sa.Column("boot_check", sa.String(32), index=True),
    # ``core.jobs.progress``: the last failed job of each kind; failed prepare jobs in a row.
    sa.Column("job_failures", sa.JSON(none_as_null=True)),
    sa.Column("failed_prepares", sa.Integer, nullable=False, default=0),
    sa.Column("failing", sa.Boolean, nullable=False, default=False),
    sa.Column("retry_at", Moment, index=True),
    sa.UniqueConstraint("host", "address"),
    # Lists the unhealthy devices, those unhealthy for longest first.
    sa.Index(None, "health", "health_since"),
)

deployables = _table(
    "deployables",
    _uuid(),
    _foreign_key("device_id", "devices", nullable=False),
    # The host of its device, which never changes: a list of one host needs no other table.
    sa.Column("host", sa.String(255), nullable=False),
    _foreign_key("parent_id", "deployables", "SET NULL"),
    _foreign_key("root_id", "deployables", "SET NULL"),
    sa.Column("address", sa.String(120), nullable=False),
    sa.Column("name", sa.String(200), nullable=False, unique=True),
    sa.Column("rp_uuid", sa.String(36), nullable=False, unique=True),
    sa.Column("resource_class", sa.String(255), nullable=False, index=True),
    sa.Column("traits", Json, nullable=False),
    # The agent's attributes. An operator's are in table attributes, and no report removes them.
    sa.Column("attributes", Json, nullable=False),
    sa.Column("bitstream_id", sa.String(255)),
    # The image that an operator programmed last. No report changes it.
    sa.Column("desired_image", sa.String(255)),
    sa.Column("num_accelerators", sa.Integer, nullable=False, default=0),
    sa.Column("draining", sa.Boolean, nullable=False, default=False),
    # The job that programs it now; meanwhile its handles are not allocated.
    _foreign_key("job_id", "jobs", "SET NULL"),
    # ``core.inventory.device_set.DeviceSet``; null unless it is a device set. Its size and its
    # group are in columns of their own, to count the offered sets of a group.
    sa.Column("device_set", sa.JSON(none_as_null=True)),
    sa.Column("set_size", sa.Integer),
    # ``core.inventory.device_set.OfferState``. No report changes it, nor ``offer_reason``, which is
    # why the set is not offered.
    sa.Column("offer", sa.String(32)),
    sa.Column("set_group", sa.String(255)),
    sa.Column("offer_reason", sa.String(255)),
    sa.Index(None, "host", "id"),
    # Find the device sets of hosts and of the cloud: most have none.
    sa.Index(None, "host", "set_size"),
    sa.Index(None, "set_size"),
    sa.Index(None, "draining", "set_size"),
    sa.Index(None, "set_group", "offer", "set_size"),
)

# Tombstones: data of removed devices that is restored when they return.
device_tombstones = _table(
    "device_tombstones",
    # The uuid of the device, for its restore.
    _uuid(),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("address", sa.String(120), nullable=False),
    sa.Column("status", sa.String(32), nullable=False),
    # By the deployable's address: its uuid, the operator's attributes and the dirty handles.
    sa.Column("deployables", Json, nullable=False),
    sa.UniqueConstraint("host", "address"),
)

# Maintenance windows of devices.
device_maintenances = _table(
    "device_maintenances",
    # No foreign key: a window continues if the device is removed and returns meanwhile.
    sa.Column("device_uuid", sa.String(36), nullable=False, unique=True),
    sa.Column("until", Moment, nullable=False, index=True),
    # The status of the device after the window.
    sa.Column("next_status", sa.String(32), nullable=False),
    # ``core.maintenance.SuccessorMode``; None if contexts get no successors.
    sa.Column("successor", sa.String(32)),
    # The user who set it, None without authentication.
    sa.Column("user_id", sa.String(255)),
)

attributes = _table(
    "attributes",
    _uuid(),
    _foreign_key("deployable_id", "deployables", nullable=False),
    sa.Column("key", sa.String(255), nullable=False),
    sa.Column("value", sa.String(255), nullable=False),
    sa.UniqueConstraint("deployable_id", "key"),
)

device_contexts = _table(
    "device_contexts",
    _uuid(),
    sa.Column("project_id", sa.String(255), index=True),
    sa.Column("name", sa.String(255), index=True),
    sa.Column("description", Text),
    # ``core.contexts.states.ContextState``; it changes with the ARQs, in the same transaction.
    sa.Column("state", sa.String(32), nullable=False),
    # The copy of what was requested: no change of a profile reaches it.
    sa.Column("groups", Json, nullable=False),
    sa.Column("config_data", Json, nullable=False),
    # The name of the profile that it was made from. No foreign key: the profile may be deleted.
    sa.Column("device_profile", sa.String(255), index=True),
    sa.Column("hostname", sa.String(255), index=True),
    sa.Column("instance_uuid", sa.String(36), index=True),
    # Why the last bind failed, or why a former handle is not clean.
    sa.Column("error", Text),
    # The same as values: ``core.contexts.refusals.ContextFailure``; null without such a failure.
    sa.Column("failure", sa.JSON(none_as_null=True)),
    # The fencing token of a use; it rises with each lease, and each bind without a lease.
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    # When an unbound context is deleted; None is never.
    sa.Column("expires_at", Moment),
    # When the lease ends; None without a lease.
    sa.Column("lease_expires_at", Moment),
    # Find the expired contexts and the leases that have ended.
    sa.Index(None, "state", "expires_at"),
    sa.Index(None, "state", "lease_expires_at"),
)

device_profiles = _table(
    "device_profiles",
    _uuid(),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("description", Text),
    sa.Column("groups", Json, nullable=False),
    # The context whose hidden profile it is: it is deleted with the context.
    sa.Column("context_id", sa.ForeignKey("device_contexts.id", ondelete="CASCADE"), unique=True),
    # The attachment of one accelerator whose hidden profile it is: it is deleted with it.
    sa.Column("attachment_id", sa.ForeignKey("attachments.id", ondelete="CASCADE"), unique=True),
)

arqs = _table(
    "arqs",
    _uuid(),
    sa.Column("state", sa.String(32), nullable=False),
    # RESTRICT: a profile in use cannot be deleted, not even concurrently with the first use.
    _foreign_key("profile_id", "device_profiles", "RESTRICT", nullable=False),
    # RESTRICT: a context is deleted after its ARQs, which then own no handle.
    _foreign_key("context_id", "device_contexts", "RESTRICT"),
    sa.Column("device_profile_name", sa.String(255), nullable=False),
    sa.Column("device_profile_group_id", sa.Integer, nullable=False),
    sa.Column("resource_class", sa.String(255), nullable=False),
    sa.Column("group", Json, nullable=False),
    sa.Column("project_id", sa.String(255)),
    sa.Column("hostname", sa.String(255)),
    sa.Column("device_rp_uuid", sa.String(36), index=True),
    sa.Column("instance_uuid", sa.String(36)),
    # The slot among its instance's accelerators, from 0. Every first bind for an instance starts at
    # slot 0, so the unique key rejects the second of two concurrent binds.
    sa.Column("instance_slot", sa.Integer),
    # The job for which this bind waits in BindStarted; the restore job, if any, in Bound.
    _foreign_key("job_id", "jobs", "RESTRICT"),
    # Whether `project_id` is verified as the instance's project, not only taken from the token.
    sa.Column("owner_verified", sa.Boolean, nullable=False, default=True),
    # Since when the ARQ is a suspected orphan: Placement has no allocation for it.
    sa.Column("orphan_since", Moment),
    # For a device that the agent attaches, such as one that Nova ignores or forgets: since when the
    # guest has it, or since when it lacks it although it runs, and why.
    sa.Column("attached_at", Moment),
    sa.Column("attach_failed_at", Moment, index=True),
    sa.Column("attach_error", sa.String(1024)),
    _foreign_key("attachment_id", "attachments", "SET NULL"),
    # Nova does not find the ARQ among those of its instance: it is not attached yet, or no more.
    sa.Column("hidden", sa.Boolean, nullable=False, default=False),
    # The label of the accelerator; the next owner of the handle cannot read it.
    sa.Column("label_name", sa.String(255), index=True),
    sa.Column("label_description", sa.String(1024)),
    sa.Column("label_tags", Json),
    sa.UniqueConstraint("instance_uuid", "instance_slot"),
)
# List the ARQs of a project in their order, and find the oldest ARQs of a state.
sa.Index("ix_arqs_project_id_id", arqs.c.project_id, arqs.c.id)
sa.Index("ix_arqs_state_created_at", arqs.c.state, arqs.c.created_at)

attach_handles = _table(
    "attach_handles",
    _uuid(),
    sa.Column(
        "deployable_id", sa.ForeignKey("deployables.id", ondelete="RESTRICT"), nullable=False
    ),
    sa.Column("address", sa.String(120), nullable=False),
    sa.Column("type", sa.String(32), nullable=False),
    sa.Column("info", Json, nullable=False),
    # The owner; an ARQ has at most one handle. RESTRICT: an ARQ that owns a handle is not deleted.
    sa.Column("arq_id", sa.ForeignKey("arqs.id", ondelete="RESTRICT"), unique=True),
    sa.Column("draining", sa.Boolean, nullable=False, default=False, index=True),
    # The host prepares the handle, or must sanitise it. Without an owner it is dirty: not free.
    sa.Column("needs_cleaning", sa.Boolean, nullable=False, default=False),
    # The job that cleans it now.
    _foreign_key("job_id", "jobs", "SET NULL"),
    # The device set through which it was claimed; kept until it is clean. RESTRICT: a set is not
    # deleted while its fabric may be active.
    _foreign_key("set_id", "deployables", "RESTRICT"),
    sa.UniqueConstraint("deployable_id", "address"),
    # Finds a free handle of a provider, and counts its handles, without a scan of others. The only
    # index on deployable_id: MariaDB would merge two and lock rows that the query does not need.
    sa.Index(None, "deployable_id", "arq_id", "needs_cleaning", "draining"),
    # Finds handles by their address, or its beginning, which PostgreSQL has another operator for.
    sa.Index(None, "address", postgresql_ops={"address": "varchar_pattern_ops"}),
    # Finds the dirty handles, and lists the free ones in their order.
    sa.Index(None, "needs_cleaning", "arq_id", "id"),
)

# Handles that are members of device sets. The handle of a member that is not present has no row.
set_members = _table(
    "set_members",
    # Without an index of its own: the unique key begins with it.
    sa.Column("deployable_id", sa.ForeignKey("deployables.id", ondelete="CASCADE"), nullable=False),
    _foreign_key("handle_id", "attach_handles", nullable=False),
    sa.UniqueConstraint("deployable_id", "handle_id"),
)

providers = _table(
    "providers",
    _uuid(),
    sa.Column("name", sa.String(200), nullable=False, unique=True),
    sa.Column("host", sa.String(255), nullable=False, index=True),
    # `revision` rises with every change of the desired state; `published_revision` is the last one
    # in Placement. If they differ, the provider is stale since `stale_since`.
    sa.Column("revision", sa.BigInteger, nullable=False, default=1),
    sa.Column("published_revision", sa.BigInteger, nullable=False, default=0),
    sa.Column("stale_since", Moment, index=True),
    *(sa.Column(name, Moment) for name in ("next_try_at", "lease_until")),
    # When Placement was last known to have the desired state; None for a stale provider.
    sa.Column("verified_at", Moment, index=True),
    # When its contents in Placement were last compared or written; its generation, parent then.
    sa.Column("compared_at", Moment),
    sa.Column("placement_generation", sa.BigInteger),
    sa.Column("placement_parent", sa.String(36)),
    sa.Column("error", Text),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("owner", sa.String(255)),
    # Only a verification is due: the desired state is unchanged, a difference is drift.
    sa.Column("verify_only", sa.Boolean, nullable=False, default=False),
    # An operator removed its host with force: what consumers have allocated of it goes with it.
    sa.Column("evict", sa.Boolean, nullable=False, default=False),
)

TABLES: Sequence[sa.Table] = tuple(metadata.sorted_tables)
