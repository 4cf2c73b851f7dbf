# SPDX-License-Identifier: Apache-2.0
"""How to reach Nova."""

from typing import Any

from oslo_config import cfg

GROUP = "nova"
OPTIONS = [
    cfg.BoolOpt(
        "notify",
        default=True,
        help="Tell Nova of each accelerator request that is bound. Off in an installation without "
        "Nova: no events are recorded then.",
    ),
    cfg.FloatOpt("request_timeout", default=30.0, min=0.1, help="Seconds for one request."),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section, those of keystoneauth among them."""
    from keystoneauth1 import loading  # here, because the agent does without

    loading.register_session_conf_options(conf, GROUP)
    loading.register_auth_conf_options(conf, GROUP)
    loading.register_adapter_conf_options(conf, GROUP)
    conf.register_opts(OPTIONS, group=GROUP)
    conf.set_default("service_type", "compute", group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    from keystoneauth1 import loading

    shared = [
        *loading.get_session_conf_options(),
        *loading.get_auth_common_conf_options(),
        *loading.get_auth_plugin_conf_options("password"),
        *loading.get_adapter_conf_options(include_deprecated=False),
    ]
    return [(GROUP, [*OPTIONS, *shared])]
