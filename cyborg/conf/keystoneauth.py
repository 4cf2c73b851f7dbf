# SPDX-License-Identifier: Apache-2.0
"""Options of keystoneauth, for a section with the client of a service, such as [placement].

keystoneauth is imported late, because an agent without an image service does not need it.
"""

from collections.abc import Sequence
from typing import Any

from oslo_config import cfg

TIMEOUT = cfg.FloatOpt(
    "request_timeout", default=30.0, min=0.1, help="Timeout in seconds of one request."
)


def register(
    conf: cfg.ConfigOpts, group: str, service_type: str, options: Sequence[cfg.Opt]
) -> None:
    """Register the options of a section and those of keystoneauth."""
    from keystoneauth1 import loading

    loading.register_session_conf_options(conf, group)
    loading.register_auth_conf_options(conf, group)
    loading.register_adapter_conf_options(conf, group)
    conf.register_opts(options, group=group)
    conf.set_default("service_type", service_type, group=group)


def list_opts(group: str, options: Sequence[cfg.Opt]) -> list[tuple[str, list[Any]]]:
    """Return all options of a section for the sample file and the documentation."""
    from keystoneauth1 import loading

    shared = [
        *loading.get_session_conf_options(),
        *loading.get_auth_common_conf_options(),
        *loading.get_auth_plugin_conf_options("password"),
        *loading.get_adapter_conf_options(include_deprecated=False),
    ]
    return [(group, [*options, *shared])]
