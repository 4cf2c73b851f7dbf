# SPDX-License-Identifier: Apache-2.0
"""Output to terminals: their width, tables that fit, views that are refreshed."""
