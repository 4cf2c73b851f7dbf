# SPDX-License-Identifier: Apache-2.0
"""Configuration and connection of oslo.limit, which reads the global configuration only."""

from oslo_config import cfg


def use_limit_configuration(conf: cfg.ConfigOpts) -> None:
    """Make oslo.limit read this configuration, and connect with it at its next use."""
    # A late import: oslo.limit is an optional dependency and slow to import.
    from oslo_limit import limit

    limit.CONF = conf
    limit._SDK_CONNECTION = None
