# SPDX-License-Identifier: Apache-2.0
"""The steps from one schema to the next; ``cyborg.db.migrate`` takes them."""
