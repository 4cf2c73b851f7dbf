# SPDX-License-Identifier: Apache-2.0
"""Schema migration scripts; ``cyborg.db.migrate`` runs them."""
