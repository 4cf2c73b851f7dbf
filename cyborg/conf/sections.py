# SPDX-License-Identifier: Apache-2.0
"""Sections of the configuration: their options, and how these are registered and listed."""

from typing import Any

from oslo_config import cfg

REQUEST_TIMEOUT = cfg.FloatOpt(
    "request_timeout", default=30.0, min=0.1, help="Timeout in seconds of one request."
)


class Section:
    """A section with options of this project."""

    def __init__(self, name: str, *options: cfg.Opt) -> None:
        self.name = name
        self.options = options

    def register(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of this section."""
        # oslo.config knows the section DEFAULT as "no group".
        conf.register_opts(self.options, group=None if self.name == "DEFAULT" else self.name)

    def list_opts(self) -> list[tuple[str, list[Any]]]:
        """Return the options for the sample file and the documentation."""
        return [(self.name, list(self.options))]


class ClientSection(Section):
    """A section of the client of a service, which also has the options of keystoneauth."""

    def __init__(self, name: str, service_type: str, *options: cfg.Opt) -> None:
        super().__init__(name, *options)
        self.service_type = service_type

    def register(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of this section and those of keystoneauth."""
        # A late import: an agent without an image service does not need it.
        from keystoneauth1 import loading

        loading.register_session_conf_options(conf, self.name)
        loading.register_auth_conf_options(conf, self.name)
        loading.register_adapter_conf_options(conf, self.name)
        super().register(conf)
        conf.set_default("service_type", self.service_type, group=self.name)

    def list_opts(self) -> list[tuple[str, list[Any]]]:
        """Return all options of this section for the sample file and the documentation."""
        from keystoneauth1 import loading

        shared = [
            *loading.get_session_conf_options(),
            *loading.get_auth_common_conf_options(),
            *loading.get_auth_plugin_conf_options("password"),
            *loading.get_adapter_conf_options(include_deprecated=False),
        ]
        return [(self.name, [*self.options, *shared])]


class OptionalClientSection(ClientSection):
    """A section whose client a process may not need: only ``register_client`` imports libraries."""

    def register(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of this section without those of keystoneauth."""
        Section.register(self, conf)

    def register_client(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of keystoneauth too."""
        super().register(conf)


class DatabaseSection(Section):
    """The options of oslo.db, which is imported late: an agent does not need it."""

    POOL = 32
    """Connections in the pool of a process: half of the concurrent calls of oslo.messaging."""
    OVERFLOW = 8
    """Connections beyond those of the pool, which are closed after use."""

    def register(self, conf: cfg.ConfigOpts) -> None:
        """Register the options of oslo.db with defaults for this service."""
        from oslo_db import options

        conf.register_opts(options.database_opts, group=self.name)
        # With oslo.db's default of 5, a conductor with 64 concurrent calls would open and close
        # connections all the time. The pool opens a connection only when it is needed. With the 50
        # of oslo.db beyond that, two conductors under load could exceed the 151 connections that
        # MariaDB accepts by default, and calls would fail that only have to wait for a few
        # milliseconds.
        options.set_defaults(conf, max_pool_size=self.POOL, max_overflow=self.OVERFLOW)

    def list_opts(self) -> list[tuple[str, list[Any]]]:
        """Return the options for the sample file and the documentation."""
        from oslo_db import options

        return [(self.name, list(options.database_opts))]
