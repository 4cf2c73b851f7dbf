# SPDX-License-Identifier: Apache-2.0
"""First tables: services, devices and their inventory, profiles, ARQs, pending work."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "3f7c2a9d1b64"
down_revision = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MOMENT = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    """Create the tables, referenced tables first."""
    _create_attachments()
    _create_contexts_and_profiles()
    _table(
        "devices",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("address", sa.String(120), nullable=False),
        sa.Column("backend", sa.String(255), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        *_columns(sa.String(255), "vendor", "model", nullable=False),
        *(sa.Column(f"{name}_board_info", sa.JSON(), nullable=False) for name in ("std", "vendor")),
        sa.Column("numa_node", sa.Integer()),
        sa.Column("serial", sa.String(255)),
        sa.Column("health", sa.String(32), nullable=False),
        sa.Column("health_reason", sa.String(255)),
        sa.Column("health_since", MOMENT, nullable=False),
        *(sa.Column(f"{n}_required", sa.Boolean(), nullable=False) for n in ("setup", "reboot")),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("cordoned", sa.Boolean(), nullable=False),
        sa.Column("cordoned_since", MOMENT),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("abilities", sa.JSON(), nullable=False),
        sa.Column("deliverable", sa.Boolean(), nullable=False),
        sa.Column("undeliverable_reason", sa.String(255)),
        sa.Column("topology", sa.JSON(), nullable=False),
        sa.Column("layout", sa.String(255)),
        sa.Column("layouts", sa.JSON(), nullable=False),
        sa.Column("desired_layout", sa.String(255)),
        *(sa.Column("boot_check", sa.String(32)), sa.Column("job_failures", sa.JSON())),
        sa.Column("failed_prepares", sa.Integer(), nullable=False),
        sa.Column("failing", sa.Boolean(), nullable=False),
        sa.Column("retry_at", MOMENT),
        _unique("devices", "uuid"),
        _unique("devices", "host", "address"),
    )
    plain = ("boot_check", "draining", "retry_at", "type", "vendor")
    _index_each("devices", *plain, ("health", "health_since"))
    _table(
        "device_maintenances",
        sa.Column("device_uuid", sa.String(36), nullable=False),
        sa.Column("until", MOMENT, nullable=False),
        sa.Column("next_status", sa.String(32), nullable=False),
        sa.Column("successor", sa.String(32)),
        sa.Column("user_id", sa.String(255)),
        _unique("device_maintenances", "device_uuid"),
    )
    _index("device_maintenances", "until")
    _create_counters()
    _table(
        "device_tombstones",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("address", sa.String(120), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("deployables", sa.JSON(), nullable=False),
        _unique("device_tombstones", "uuid"),
        _unique("device_tombstones", "host", "address"),
    )
    _table(
        "idempotency_keys",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("response", sa.JSON(), nullable=False),
        _unique("idempotency_keys", "key"),
    )
    _table(
        "audits",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255)),
        sa.Column("repair", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("error", TEXT),
        sa.Column("sources", sa.JSON(), nullable=False),
        *_columns(sa.Integer(), "hosts_done", "hosts_total", nullable=False),
        sa.Column("last_host", sa.String(255)),
        sa.Column("num_findings", sa.Integer(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        *(sa.Column("owner", sa.String(255)), sa.Column("lease_until", MOMENT)),
        _unique("audits", "uuid"),
    )
    _table(
        "discoveries",
        sa.Column("uuid", sa.String(36), nullable=False),
        *_columns(sa.Integer(), "in_progress", "done", "failed", nullable=False),
        sa.Column("mutex_key", sa.String(64)),
        *(_unique("discoveries", name) for name in ("uuid", "mutex_key")),
    )
    _index("discoveries", "in_progress")
    _table(
        "discovery_backends",
        sa.Column("discovery_id", KEY, nullable=False),
        *_columns(sa.String(255), "host", "backend", nullable=False),
        *(sa.Column("state", sa.String(32), nullable=False), sa.Column("error", TEXT)),
        _references("discovery_backends", "discovery_id", "discoveries", "CASCADE"),
        _unique("discovery_backends", "discovery_id", "host", "backend"),
    )
    _index_each("discovery_backends", "host", "state")
    _table(
        "jobs",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        *_columns(sa.String(255), "host", "subject", nullable=False),
        *(sa.Column("arguments", sa.JSON(), nullable=False), sa.Column("result", sa.JSON())),
        sa.Column("deadline", MOMENT),
        *(sa.Column("mutex_key", sa.String(255)), sa.Column("activity", sa.JSON())),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_try_at", MOMENT, nullable=False),
        *(sa.Column("owner", sa.String(255)), sa.Column("lease_until", MOMENT)),
        *(sa.Column("error", TEXT), sa.Column("trace_context", sa.String(55))),
        *(_unique("jobs", name) for name in ("uuid", "mutex_key")),
    )
    _index_each("jobs", "host", "kind", "subject", ("state", "next_try_at"))
    _table(
        "job_steps",
        sa.Column("job_id", KEY, nullable=False),
        *_columns(sa.String(255), "host", "backend", nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        *(sa.Column("generation", sa.BigInteger()), sa.Column("previous", sa.JSON())),
        *(sa.Column("error", TEXT), sa.Column("deadline", MOMENT)),
        _references("job_steps", "job_id", "jobs", "CASCADE"),
        _unique("job_steps", "job_id", "host", "backend"),
    )
    _index_each("job_steps", "job_id", "host")
    _table(
        "outbox",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_try_at", MOMENT, nullable=False),
        *(sa.Column("owner", sa.String(255)), sa.Column("lease_until", MOMENT)),
        *(sa.Column("error", TEXT), sa.Column("trace_context", sa.String(55))),
        _unique("outbox", "uuid"),
    )
    _index_each("outbox", "subject", ("state", "next_try_at"))
    _table(
        "providers",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        *_columns(sa.BigInteger(), "revision", "published_revision", nullable=False),
        *_columns(MOMENT, "stale_since", "next_try_at", "lease_until", "verified_at"),
        sa.Column("compared_at", MOMENT),
        sa.Column("placement_generation", sa.BigInteger()),
        sa.Column("placement_parent", sa.String(36)),
        sa.Column("error", TEXT),
        *(sa.Column("attempts", sa.Integer(), nullable=False), sa.Column("owner", sa.String(255))),
        *(sa.Column(name, sa.Boolean(), nullable=False) for name in ("verify_only", "evict")),
        *(_unique("providers", name) for name in ("uuid", "name")),
    )
    _index_each("providers", "host", "stale_since", "verified_at")
    _table(
        "services",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("binary", sa.String(64), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("epoch", sa.String(36), nullable=False),
        sa.Column("endpoint", sa.String(255)),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(64)),
        sa.Column("has_digest", sa.Boolean(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        *_columns(MOMENT, "started_at", "last_seen_at", "late_at", "down_at", nullable=False),
        sa.Column("down_since", MOMENT),
        sa.Column("identity", sa.JSON(), nullable=False),
        *(sa.Column(name, sa.String(64)) for name in ("drivers_digest", "boot_id")),
        sa.Column("desired_generation", sa.BigInteger(), nullable=False),
        *(_unique("services", *names) for names in (("uuid",), ("binary", "host"))),
    )
    _index_each("services", "last_seen_at", "down_at")
    _table(
        "backends",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("service_id", KEY, nullable=False),
        *(sa.Column(name, sa.String(255), nullable=False) for name in ("name", "driver")),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("error", TEXT),
        *(sa.Column(name, sa.JSON()) for name in ("remarks", "settings")),
        sa.Column("cordoned", sa.Boolean(), nullable=False),
        _references("backends", "service_id", "services", "CASCADE"),
        _unique("backends", "uuid"),
        _unique("backends", "service_id", "name"),
    )
    _index("backends", "service_id")
    _table(
        "backend_functions",
        sa.Column("backend_id", KEY, nullable=False),
        sa.Column("function", sa.String(255), nullable=False),
        _references("backend_functions", "backend_id", "backends", "CASCADE"),
        _unique("backend_functions", "function", "backend_id"),
    )
    _index("backend_functions", "backend_id")
    _table(
        "drivers",
        sa.Column("service_id", KEY, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("version", sa.String(255)),
        sa.Column("type", sa.String(32)),
        sa.Column("support", sa.String(32), nullable=False),
        *(sa.Column(name, sa.JSON(), nullable=False) for name in ("abilities", "options")),
        sa.Column("error", TEXT),
        sa.Column("installable", sa.Boolean(), nullable=False),
        _references("drivers", "service_id", "services", "CASCADE"),
        _unique("drivers", "service_id", "name"),
    )
    _index_each("drivers", "name", "service_id")
    _table(
        "desired_backends",
        sa.Column("service_id", KEY, nullable=False),
        *_columns(sa.String(255), "backend", "driver", nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("error", TEXT),
        _references("desired_backends", "service_id", "services", "CASCADE"),
        _unique("desired_backends", "service_id", "backend"),
    )
    _index_each("desired_backends", "driver", "service_id")
    _table(
        "deployables",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("device_id", KEY, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        *_columns(KEY, "parent_id", "root_id"),
        sa.Column("address", sa.String(120), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("rp_uuid", sa.String(36), nullable=False),
        sa.Column("resource_class", sa.String(255), nullable=False),
        *_columns(sa.JSON(), "traits", "attributes", nullable=False),
        *_columns(sa.String(255), "bitstream_id", "desired_image"),
        sa.Column("num_accelerators", sa.Integer(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("job_id", KEY),
        sa.Column("device_set", sa.JSON()),
        sa.Column("set_size", sa.Integer()),
        sa.Column("offer", sa.String(32)),
        *_columns(sa.String(255), "set_group", "offer_reason"),
        _references("deployables", "device_id", "devices", "CASCADE"),
        _references("deployables", "job_id", "jobs", "SET NULL"),
        _references("deployables", "parent_id", "deployables", "SET NULL"),
        _references("deployables", "root_id", "deployables", "SET NULL"),
        *(_unique("deployables", name) for name in ("uuid", "name", "rp_uuid")),
    )
    _index_each("deployables", ("host", "id"), ("host", "set_size"), ("draining", "set_size"))
    _index("deployables", "set_group", "offer", "set_size")
    _index_each("deployables", "device_id", "job_id", "parent_id")
    _index_each("deployables", "resource_class", "root_id", "set_size")
    _create_arq_tables()
    _table(
        "attach_handles",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("deployable_id", KEY, nullable=False),
        sa.Column("address", sa.String(120), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("info", sa.JSON(), nullable=False),
        sa.Column("arq_id", KEY),
        *_columns(sa.Boolean(), "draining", "needs_cleaning", nullable=False),
        *_columns(KEY, "job_id", "set_id"),
        _references("attach_handles", "deployable_id", "deployables", "RESTRICT"),
        _references("attach_handles", "job_id", "jobs", "SET NULL"),
        _references("attach_handles", "set_id", "deployables", "RESTRICT"),
        _references("attach_handles", "arq_id", "arqs", "RESTRICT"),
        *(_unique("attach_handles", name) for name in ("uuid", "arq_id")),
        _unique("attach_handles", "deployable_id", "address"),
    )
    counting = ("deployable_id", "arq_id", "needs_cleaning", "draining")
    _index_each("attach_handles", counting, ("needs_cleaning", "arq_id", "id"))
    _index_each("attach_handles", "draining", "job_id", "set_id")
    _index("attach_handles", "address", postgresql_ops={"address": "varchar_pattern_ops"})
    _table(
        "set_members",
        *_columns(KEY, "deployable_id", "handle_id", nullable=False),
        _references("set_members", "deployable_id", "deployables", "CASCADE"),
        _references("set_members", "handle_id", "attach_handles", "CASCADE"),
        _unique("set_members", "deployable_id", "handle_id"),
    )
    _index("set_members", "handle_id")
    _table(
        "attributes",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("deployable_id", KEY, nullable=False),
        *_columns(sa.String(255), "key", "value", nullable=False),
        _references("attributes", "deployable_id", "deployables", "CASCADE"),
        _unique("attributes", "uuid"),
        _unique("attributes", "deployable_id", "key"),
    )
    _index("attributes", "deployable_id")
    _create_custody_tables()


def _create_attachments() -> None:
    _table(
        "attachments",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("request_key", sa.String(300)),
        sa.Column("project_id", sa.String(255), nullable=False),
        sa.Column("instance_uuid", sa.String(36)),
        *_columns(sa.String(255), "hostname", "device_profile_name", nullable=False),
        *_columns(sa.String(36), "device_context", "accelerator"),
        sa.Column("context_epoch", sa.BigInteger()),
        sa.Column("mode", sa.String(32), nullable=False),
        sa.Column("reboot", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("step", sa.String(32)),
        *_columns(TEXT, "error", "failure"),
        sa.Column("intent", sa.JSON()),
        sa.Column("allocation_key", sa.String(36)),
        *_columns(sa.String(255), "boot_marker", "reboot_marker"),
        *_columns(sa.String(36), "guest_job", "successor_of", "maintained_device"),
        sa.Column("deadline", MOMENT, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_try_at", MOMENT, nullable=False),
        sa.Column("owner", sa.String(255)),
        *(sa.Column("lease_until", MOMENT), sa.Column("trace_context", sa.String(55))),
        *(_unique("attachments", name) for name in ("uuid", "request_key", "allocation_key")),
    )
    _index_each("attachments", "hostname", "instance_uuid", "maintained_device")
    _index_each("attachments", "project_id", "successor_of", ("state", "next_try_at"))


def _create_contexts_and_profiles() -> None:
    _table(
        "device_contexts",
        sa.Column("uuid", sa.String(36), nullable=False),
        *(sa.Column(name, sa.String(255)) for name in ("project_id", "name")),
        sa.Column("description", TEXT),
        sa.Column("state", sa.String(32), nullable=False),
        *_columns(sa.JSON(), "groups", "config_data", nullable=False),
        *(sa.Column(name, sa.String(255)) for name in ("device_profile", "hostname")),
        sa.Column("instance_uuid", sa.String(36)),
        sa.Column("error", TEXT),
        sa.Column("failure", sa.JSON()),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        *(sa.Column(name, MOMENT) for name in ("expires_at", "lease_expires_at")),
        _unique("device_contexts", "uuid"),
    )
    _index_each("device_contexts", "project_id", "name", "device_profile", "hostname")
    _index_each("device_contexts", "instance_uuid")
    _index_each("device_contexts", ("state", "expires_at"), ("state", "lease_expires_at"))
    _table(
        "device_profiles",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("description", TEXT),
        sa.Column("groups", sa.JSON(), nullable=False),
        *_columns(KEY, "context_id", "attachment_id"),
        _references("device_profiles", "context_id", "device_contexts", "CASCADE"),
        _references("device_profiles", "attachment_id", "attachments", "CASCADE"),
        *(_unique("device_profiles", c) for c in ("uuid", "name", "context_id", "attachment_id")),
    )


def _create_counters() -> None:
    """Create the tables of counters, and of the rows that are locked to count."""
    _table(
        "self_heal_counters",
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("last_at", MOMENT, nullable=False),
        _unique("self_heal_counters", "kind"),
    )
    _table(
        "object_counts",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("counted_at", MOMENT, nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        _unique("object_counts", "name"),
    )
    _table(
        "project_locks",
        sa.Column("project_id", sa.String(255), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        _unique("project_locks", "project_id"),
    )


def _create_arq_tables() -> None:
    _table(
        "arqs",
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("profile_id", KEY, nullable=False),
        sa.Column("context_id", KEY),
        sa.Column("device_profile_name", sa.String(255), nullable=False),
        sa.Column("device_profile_group_id", sa.Integer(), nullable=False),
        sa.Column("resource_class", sa.String(255), nullable=False),
        sa.Column("group", sa.JSON(), nullable=False),
        *_columns(sa.String(255), "project_id", "hostname"),
        *_columns(sa.String(36), "device_rp_uuid", "instance_uuid"),
        sa.Column("instance_slot", sa.Integer()),
        sa.Column("job_id", KEY),
        sa.Column("owner_verified", sa.Boolean(), nullable=False),
        *_columns(MOMENT, "orphan_since", "attached_at", "attach_failed_at"),
        sa.Column("attach_error", sa.String(1024)),
        sa.Column("attachment_id", KEY),
        sa.Column("hidden", sa.Boolean(), nullable=False),
        sa.Column("label_name", sa.String(255)),
        sa.Column("label_description", sa.String(1024)),
        sa.Column("label_tags", sa.JSON()),
        _references("arqs", "attachment_id", "attachments", "SET NULL"),
        _references("arqs", "job_id", "jobs", "RESTRICT"),
        _references("arqs", "profile_id", "device_profiles", "RESTRICT"),
        _references("arqs", "context_id", "device_contexts", "RESTRICT"),
        _unique("arqs", "uuid"),
        _unique("arqs", "instance_uuid", "instance_slot"),
    )
    _index_each("arqs", "attachment_id", "context_id", "device_rp_uuid", "job_id", "profile_id")
    pairs = (("project_id", "id"), ("state", "created_at"))
    _index_each("arqs", "attach_failed_at", "label_name", *pairs)


def _create_custody_tables() -> None:
    _table(
        "custody_records",
        *_columns(sa.String(36), "uuid", "device_uuid", nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("recorded_at", MOMENT, nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("sequence", sa.BigInteger()),
        *(sa.Column("hash", sa.String(64)), sa.Column("signature", sa.String(80))),
        _unique("custody_records", "uuid"),
        _unique("custody_records", "device_uuid", "sequence"),
    )
    _index_each("custody_records", ("sequence", "id"), ("host", "device_uuid"))
    ends = ("", "base_", "checked_")
    _table(
        "custody_heads",
        sa.Column("device_uuid", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        *(sa.Column(f"{end}sequence", sa.BigInteger(), nullable=False) for end in ends),
        *(sa.Column(f"{end}hash", sa.String(64), nullable=False) for end in ends),
        *(sa.Column(f"{end}signature", sa.String(80)) for end in ("", "checked_")),
        sa.Column("oldest_at", MOMENT),
        *(sa.Column(name, MOMENT, nullable=False) for name in ("checked_at", "anchored_at")),
        _unique("custody_heads", "device_uuid"),
    )
    _index_each("custody_heads", "anchored_at", "host", "oldest_at")


def _table(name: str, *columns: Any) -> None:
    op.create_table(
        name,
        sa.Column("id", KEY, nullable=False),
        *columns,
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{name}")),
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        sqlite_autoincrement=True,
    )


def _columns(kind: Any, *names: str, **options: Any) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, **options) for name in names]


def _unique(table: str, *columns: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(*columns, name=op.f(f"uq_{table}_{'_'.join(columns)}"))


def _references(table: str, column: str, other: str, ondelete: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        [column], [f"{other}.id"], name=op.f(f"fk_{table}_{column}"), ondelete=ondelete
    )


def _index_each(table: str, *keys: str | tuple[str, ...]) -> None:
    for key in keys:
        _index(table, *((key,) if isinstance(key, str) else key))


def _index(table: str, *columns: str, **options: Any) -> None:
    op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, list(columns), **options)
