# SPDX-License-Identifier: Apache-2.0
"""Read the unified limits of keystone with oslo.limit. Needs the extra ``limits``."""

from collections.abc import Mapping
from typing import Any

from keystoneauth1 import exceptions as ks
from keystoneauth1 import loading
from openstack import exceptions as sdk
from oslo_config import cfg
from oslo_limit import exception, limit, opts

from cyborg.clients.service_client import describe
from cyborg.compat.oslo import use_limit_configuration
from cyborg.conf.auth_options import load_auth
from cyborg.core.errors import Misconfigured, Unavailable

GROUP = "oslo_limit"
# A limit is named class:RESOURCE_CLASS, as those of Nova.
PREFIX = "class:"

TIMEOUT = 10  # seconds of one request, unless [oslo_limit] timeout is set
_ALL: Any = None  # oslo.limit returns all limits, though its type hints do not say so


class KeystoneLimits:
    """Reader of registered limits and project limits; connects at its first use. Thread-safe."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        """Check the options. Raise Misconfigured."""
        self._conf = conf
        # Made at the first use: its constructor connects to keystone.
        self._enforcer: limit.Enforcer | None = None
        _register(conf)
        _check(conf)
        use_limit_configuration(conf)

    def read(self, project: str) -> Mapping[str, int]:
        """Return the limits of a project by resource class. Raise Unavailable. Sends two requests.

        A class that has neither a registered limit nor a limit of the project is absent.
        """
        try:
            enforcer = self._connect()
            limits = dict(enforcer.get_registered_limits(_ALL))
            limits |= dict(enforcer.get_project_limits(project, _ALL))
        except NotImplementedError:
            error = "its enforcement model is not 'flat', and oslo.limit supports no other"
        except (ks.ClientException, sdk.SDKException, exception.SessionInitError, OSError) as exc:
            error = f"with {describe(self._conf, GROUP)}: {exc}"
        except ValueError as exc:
            # The endpoint of this service, which identifies the limits, is unknown.
            error = f"for the endpoint of [{GROUP}] endpoint_*: {exc}"
        else:
            return {
                name.removeprefix(PREFIX): units
                for name, units in limits.items()
                if name.startswith(PREFIX)
            }
        raise Unavailable(f"cannot read the limits of project {project} from keystone, {error}")

    def _connect(self) -> limit.Enforcer:
        # Without a lock: a keystone that does not answer would otherwise delay one thread after the
        # other. Threads that connect concurrently make one enforcer each; one of them is kept.
        if self._enforcer is None:
            self._enforcer = limit.Enforcer(_reject_enforcement, cache=False)
        return self._enforcer


def _reject_enforcement(*arguments: Any) -> dict[str, int]:
    # oslo.limit would count and compare outside of the transaction, so that concurrent calls exceed
    # a limit.
    raise NotImplementedError("limits are enforced in the transactions of the conductor")


def _register(conf: cfg.ConfigOpts) -> None:
    loading.register_session_conf_options(conf, GROUP)
    loading.register_auth_conf_options(conf, GROUP)
    loading.register_adapter_conf_options(conf, GROUP, include_deprecated=False)
    opts.register_opts(conf)
    conf.set_default("timeout", TIMEOUT, group=GROUP)
    conf.set_default("endpoint_service_type", "accelerator", group=GROUP)


def _check(conf: cfg.ConfigOpts) -> None:
    """Raise Misconfigured if the section cannot be used."""
    if load_auth(conf, GROUP) is None:
        raise Misconfigured(
            f"[{GROUP}] auth_type is not set: expected the name of an auth plugin and its "
            "options, or another [quota] driver than unified",
            option=f"{GROUP}.auth_type",
        )
