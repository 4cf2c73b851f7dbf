# SPDX-License-Identifier: Apache-2.0
"""Migrations, one per file. A released migration never changes, so it imports no schema code."""
