# SPDX-License-Identifier: Apache-2.0
"""Run migrations on the connection of ``cyborg.db.migrate``, in its transaction."""

from alembic import context

from cyborg.db import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    on_version_apply=context.config.attributes["applied"],
)
context.run_migrations()
