# SPDX-License-Identifier: Apache-2.0
"""Knowing who is asking: by keystone's word, or, without one, by their being on this machine."""

import ipaddress
from collections.abc import Callable, Iterable
from typing import Any

from keystoneauth1.exceptions import ClientException
from oslo_config import cfg
from oslo_policy import policy

from cyborg.api import caller
from cyborg.core.errors import Forbidden, Invalid, Misconfigured, Unavailable

PEER = "cyborg.peer"
DEFAULT_PROJECT = "noauth"
_ROLES = "admin,manager,member,reader"
_SERVICE_ROLE = "service"
_CLAIMS = ("HTTP_X_", "HTTP_OPENSTACK_SYSTEM_SCOPE")

App = Callable[..., Iterable[bytes]]


def wrap(app: App, conf: cfg.ConfigOpts, enforcer: policy.Enforcer) -> App:
    """Return the app behind the layers of ``[DEFAULT] auth_strategy``."""
    if conf.auth_strategy == "noauth":
        return Loopback(_Known(app, enforcer, lambda: (_SERVICE_ROLE,)))
    check(conf)
    from keystonemiddleware import auth_token

    known = _Known(app, enforcer, lambda: conf.keystone_authtoken.service_token_roles)
    return _Keystone(auth_token.AuthProtocol(known, {"oslo_config_config": conf}))


def check(conf: cfg.ConfigOpts) -> None:
    """Raise Misconfigured unless there is a way to know who is asking."""
    if conf.auth_strategy != "keystone":
        return
    from keystonemiddleware import opts

    for group, options in opts.list_auth_token_opts():
        conf.register_opts(options, group=group)
    if not (conf.keystone_authtoken.auth_type or conf.keystone_authtoken.auth_section):
        raise Misconfigured(
            "[keystone_authtoken] auth_type is not set: with auth_strategy = keystone this section "
            "says how to reach keystone, as in auth_type = password with auth_url, username, "
            "password, project_name and the domains of both",
            option="[keystone_authtoken] auth_type",
        )


class _Keystone:
    """Tells of a keystone that is away as of any other neighbour."""

    def __init__(self, app: App) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        try:
            return self._app(environ, start_response)
        except ClientException as away:
            raise Unavailable(f"keystone: {away}") from away


class _Known:
    """Makes the caller of the headers."""

    def __init__(
        self, app: App, enforcer: policy.Enforcer, service_roles: Callable[[], Iterable[str]]
    ) -> None:
        self._app = app
        self._enforcer = enforcer
        self._service_roles = service_roles

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ[caller.ENVIRON] = caller.read(environ, tuple(self._service_roles()), self._enforcer)
        return self._app(environ, start_response)


class Loopback:
    """Takes everyone for an administrator, and a service, and so answers this machine alone.

    The project is that of the header X-Project-Id, so that two may be told apart.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raises Forbidden for a peer of another machine."""
        if not is_local(environ.get(PEER, environ.get("REMOTE_ADDR"))):
            raise Forbidden(
                "with auth_strategy = noauth only this machine is answered: come over loopback or "
                "a unix socket, or set [DEFAULT] auth_strategy = keystone"
            )
        project = environ.get("HTTP_X_PROJECT_ID") or DEFAULT_PROJECT
        if len(project) > 255 or not project.isprintable():
            raise Invalid("X-Project-Id: at most 255 printable characters", field="X-Project-Id")
        # Whatever else a client claims about itself must not reach the log or the policy.
        for name in [name for name in environ if name.startswith(_CLAIMS)]:
            del environ[name]
        environ |= {
            "HTTP_X_USER_ID": "noauth",
            "HTTP_X_PROJECT_ID": project,
            "HTTP_X_ROLES": _ROLES,
            "HTTP_X_SERVICE_ROLES": _SERVICE_ROLE,
        }
        return self._app(environ, start_response)


def is_local(address: str | None) -> bool:
    """Tell whether a peer is on this machine; one without an address came over a unix socket."""
    if not address:
        return True
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
