# SPDX-License-Identifier: Apache-2.0
"""The drivers: a folder or module for each family of devices.

``doc/source/contributor/checklists.rst`` (A driver) has the steps to add one: entry point, layer,
options, captures, tests and pages.
"""
