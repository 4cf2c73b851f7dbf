# SPDX-License-Identifier: Apache-2.0
"""Decisions about device sets."""
