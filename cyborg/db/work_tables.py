# SPDX-License-Identifier: Apache-2.0
"""The tables of pending work, logs and counters; import them from ``cyborg.db.schema``."""

import sqlalchemy as sa

from cyborg.core import log as trace_context
from cyborg.db.clock import utcnow
from cyborg.db.columns import Json, Moment, Text, foreign_key, table, uuid_column, work_table

outbox = work_table(
    "outbox",
    sa.Column("subject", sa.String(255), nullable=False, index=True),
    sa.Column("payload", Json, nullable=False),
)

jobs = work_table(
    "jobs",
    sa.Column("host", sa.String(255), nullable=False, index=True),
    # The uuid of the instance or the deployable, or the name of the driver.
    sa.Column("subject", sa.String(255), nullable=False, index=True),
    sa.Column("arguments", Json, nullable=False),
    sa.Column("result", Json),
    # When the conductors time the job out and undo it; None is never.
    sa.Column("deadline", Moment),
    # Only one open job may have it. None for an ended job, and for host work.
    sa.Column("mutex_key", sa.String(255), unique=True),
    # What the agent did at the last query: ``core.jobs.progress``. Of no meaning after the end.
    sa.Column("activity", Json),
    sa.Index(None, "kind"),
)

# ``core.drivers.rollout``: a step changes one backend on one host.
job_steps = table(
    "job_steps",
    foreign_key("job_id", "jobs", nullable=False),
    sa.Column("host", sa.String(255), nullable=False, index=True),
    sa.Column("backend", sa.String(255), nullable=False),
    sa.Column("state", sa.String(32), nullable=False),
    # The generation of the host's desired state that the agent must reach.
    sa.Column("generation", sa.BigInteger),
    # The previous desired state for a rollback: ``core.drivers.desired_state`` as plain values.
    sa.Column("previous", Json),
    sa.Column("error", Text),
    # When a step without an outcome from the agent fails.
    sa.Column("deadline", Moment),
    sa.UniqueConstraint("job_id", "host", "backend"),
)

discoveries = table(
    "discoveries",
    uuid_column(),
    # The numbers of its backends by state. They change with the states, in the same transaction.
    sa.Column("in_progress", sa.Integer, nullable=False, index=True),
    sa.Column("done", sa.Integer, nullable=False, default=0),
    sa.Column("failed", sa.Integer, nullable=False, default=0),
    sa.Column("mutex_key", sa.String(64), unique=True),  # of its filters
)

discovery_backends = table(
    "discovery_backends",
    # Without an index of its own: the unique key begins with it.
    sa.Column("discovery_id", sa.ForeignKey("discoveries.id", ondelete="CASCADE"), nullable=False),
    sa.Column("host", sa.String(255), nullable=False, index=True),
    sa.Column("backend", sa.String(255), nullable=False),
    sa.Column("state", sa.String(32), nullable=False, index=True),
    sa.Column("error", Text),
    sa.UniqueConstraint("discovery_id", "host", "backend"),
)

audits = table(
    "audits",
    uuid_column(),
    # The host to audit; None is all hosts.
    sa.Column("host", sa.String(255)),
    sa.Column("repair", sa.Boolean, nullable=False, default=False),
    sa.Column("state", sa.String(32), nullable=False),
    sa.Column("error", Text),
    # The sources that were compared: ``core.audit.sources.Source``.
    sa.Column("sources", Json, nullable=False, default=list),
    # Number of audited hosts, of how many, and the last of them.
    sa.Column("hosts_done", sa.Integer, nullable=False, default=0),
    sa.Column("hosts_total", sa.Integer, nullable=False, default=0),
    sa.Column("last_host", sa.String(255)),
    # Number of findings; if there are too many, ``findings`` has only the first ones.
    sa.Column("num_findings", sa.Integer, nullable=False, default=0),
    sa.Column("findings", Json, nullable=False, default=list),
    sa.Column("owner", sa.String(255)),
    sa.Column("lease_until", Moment),
)

# ``core.attachments``. The row is also the record of its own work.
attachments = table(
    "attachments",
    uuid_column(),
    # Without a uuid of the caller: the instance or host, and what is attached.
    sa.Column("request_key", sa.String(300), unique=True),
    sa.Column("project_id", sa.String(255), nullable=False, index=True),
    # None if the host itself gets the devices; then the attachment is the consumer in Placement.
    sa.Column("instance_uuid", sa.String(36), index=True),
    sa.Column("hostname", sa.String(255), nullable=False, index=True),
    # The profile with the groups: a hidden one, if a context or an accelerator is attached.
    sa.Column("device_profile_name", sa.String(255), nullable=False),
    # What was selected instead of a profile; no foreign key, since it may be deleted later.
    sa.Column("device_context", sa.String(36)),
    sa.Column("accelerator", sa.String(36)),
    # The epoch of the lease of the context, if it had one at the request.
    sa.Column("context_epoch", sa.BigInteger),
    sa.Column("mode", sa.String(32), nullable=False),
    sa.Column("reboot", sa.Boolean, nullable=False),
    sa.Column("state", sa.String(32), nullable=False),
    # The next step of the work; None while there is none.
    sa.Column("step", sa.String(32)),
    # The last error, and the reason why the attachment is being undone.
    sa.Column("error", Text),
    sa.Column("failure", Text),
    # ``core.attachments.allocation.Intent``: the change of the allocation in Placement.
    sa.Column("intent", sa.JSON(none_as_null=True)),
    # The consumer, while the work changes its allocation: one attachment at a time may.
    sa.Column("allocation_key", sa.String(36), unique=True),
    # Requests of actions of the instance in Nova: ``core.attachments.server``.
    sa.Column("boot_marker", sa.String(255)),
    sa.Column("reboot_marker", sa.String(255)),
    # The uuid of the last job that changed the guest, in the mode live; the job may be deleted.
    sa.Column("guest_job", sa.String(36)),
    # Of a successor: its context, and the device under maintenance.
    sa.Column("successor_of", sa.String(36), index=True),
    sa.Column("maintained_device", sa.String(36), index=True),
    # When an attachment that is not complete is undone.
    sa.Column("deadline", Moment, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("next_try_at", Moment, nullable=False, default=utcnow()),
    sa.Column("owner", sa.String(255)),
    sa.Column("lease_until", Moment),
    # The trace of the last request, to attach or to detach: ``core.log``.
    sa.Column("trace_context", sa.String(trace_context.LENGTH)),
    sa.Index(None, "state", "next_try_at"),
)


# Events of the custody logs: ``core.custody``. A row is inserted, and sealed once: sequence and
# hash are None until a conductor has put the record into the chain of its device.
custody_records = table(
    "custody_records",
    uuid_column(),
    # No foreign key: the log of a device outlives the device.
    sa.Column("device_uuid", sa.String(36), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("event", sa.String(32), nullable=False),
    sa.Column("recorded_at", Moment, nullable=False),
    sa.Column("details", Json, nullable=False),
    sa.Column("sequence", sa.BigInteger),
    sa.Column("hash", sa.String(64)),
    # The signature of the conductor that wrote the record, until the record is in the chain.
    sa.Column("signature", sa.String(80)),
    sa.UniqueConstraint("device_uuid", "sequence"),
    # Finds the records to seal, in the order of their ids.
    sa.Index(None, "sequence", "id"),
    # Finds the hosts, and the devices of a host, for the audit.
    sa.Index(None, "host", "device_uuid"),
)

_ENDS = ("", "base_", "checked_")

# The ends of each chain: ``core.custody``.
custody_heads = table(
    "custody_heads",
    sa.Column("device_uuid", sa.String(36), nullable=False, unique=True),
    sa.Column("host", sa.String(255), nullable=False, index=True),
    # The last record, the last one that was removed after its retention, and where the next audit
    # continues.
    *(sa.Column(f"{end}sequence", sa.BigInteger, nullable=False, default=0) for end in _ENDS),
    *(sa.Column(f"{end}hash", sa.String(64), nullable=False) for end in _ENDS),
    # Of the first two, and of the third: ``core.custody``.
    *(sa.Column(f"{end}signature", sa.String(80)) for end in ("", "checked_")),
    # The times of the first record, the last audit, and the last notification of the last record.
    sa.Column("oldest_at", Moment, index=True),
    sa.Column("checked_at", Moment, nullable=False, default=utcnow()),
    sa.Column("anchored_at", Moment, nullable=False, default=utcnow(), index=True),
)

self_heal_counters = table(
    "self_heal_counters",
    sa.Column("kind", sa.String(64), nullable=False, unique=True),
    sa.Column("count", sa.BigInteger, nullable=False, default=0),
    sa.Column("last_at", Moment, nullable=False),
)

# The numbers of all objects as a conductor counted them last: ``cyborg.db.totals``. It has one row.
object_counts = table(
    "object_counts",
    sa.Column("name", sa.String(64), nullable=False, unique=True),
    # The database's time before they were counted, and the seconds that counting took.
    sa.Column("counted_at", Moment, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("counts", Json, nullable=False),
)

# Locked while the units of a project are counted: ``cyborg.db.binding.project_units``. It has no
# count that could be wrong: ``generation`` only makes the UPDATE a change.
project_locks = table(
    "project_locks",
    sa.Column("project_id", sa.String(255), nullable=False, unique=True),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
)

# Completed calls: ``cyborg.db.unit_of_work``.
idempotency_keys = table(
    "idempotency_keys",
    sa.Column("key", sa.String(64), nullable=False, unique=True),
    # {"ok": response} or {"error": the error that the call returned after a change}.
    sa.Column("response", Json, nullable=False),
)
