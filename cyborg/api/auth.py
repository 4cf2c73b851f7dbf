# SPDX-License-Identifier: Apache-2.0
"""Authentication: keystone, or (noauth) loopback connections only; the caller of a request."""

import functools
import ipaddress
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from oslo_config import cfg
from oslo_context import context
from oslo_policy import policy
from webob import exc as http_exc

from cyborg.api.middleware import App
from cyborg.core.errors import CyborgError, Forbidden, Misconfigured, Unavailable
from cyborg.core.log import drop_tracebacks
from cyborg.core.validation import check_text
from cyborg.policies import enforcer as policies

# Key of the WSGI environ: the Caller, which is set after the token has been checked.
ENVIRON = "cyborg.caller"
# False in the environ of a request that counts as one of a service without a service token.
NAMED_AS_SERVICE = "cyborg.named_as_service"


@dataclass(frozen=True)
class Caller:
    """The owner of a token; ``is_service`` is True if a valid service token came with it.

    Without keystone, every caller is a service; ``has_service_token`` is whether it says so.
    """

    context: context.RequestContext
    is_service: bool
    enforcer: policy.Enforcer
    has_service_token: bool

    @property
    def project_id(self) -> str | None:
        """Return the project of the token."""
        return self.context.project_id

    def require(self, rule: str) -> None:
        """Raise Forbidden unless the policy allows the rule in the token's project."""
        target = {"project_id": self.project_id}
        policies.authorize(self.enforcer, rule, self._credentials(), target)

    def allows(self, rule: str) -> bool:
        """Return whether the policy allows the rule in the token's project."""
        target = {"project_id": self.project_id}
        return bool(self.enforcer.authorize(rule, target, self._credentials()))

    @functools.cached_property
    def is_elevated(self) -> bool:
        """Return whether the caller administers the accelerators of the whole cloud."""
        return bool(self.enforcer.authorize("elevated", {}, self._credentials()))

    @property
    def administrators(self) -> str:
        """Return who administers the accelerators, for an error: with which roles."""
        roles = policies.describe_roles(self.enforcer, "elevated")
        return f"administrators, with {roles}," if roles else "administrators"

    @property
    def project_scope(self) -> str | None:
        """Return the project whose ARQs are visible to the caller; None means all projects."""
        # A token without a project is that of no project: "" matches no row, None would match all.
        return None if self.is_service or self.is_elevated else self.project_id or ""

    @property
    def instance_project(self) -> str | None:
        """Return the project of the instances that the caller can manage; None means any."""
        # An instance that Nova binds with a member's token belongs to that member's project. The
        # token of an administrator or a service does not identify the project of the instance.
        roles = {role.lower() for role in self.context.roles}
        return None if self.is_elevated or "service" in roles else self.project_id

    def _credentials(self) -> dict[str, Any]:
        ctx = self.context
        return {
            "user_id": ctx.user_id,
            "project_id": ctx.project_id,
            "domain_id": ctx.domain_id,
            "system_scope": ctx.system_scope,
            "roles": ctx.roles,
            "service_roles": ctx.service_roles,
            "service_token": self.is_service,
        }


def read_caller(
    environ: dict[str, Any], service_roles: Collection[str], enforcer: policy.Enforcer
) -> Caller:
    """Return the caller of a request, from the headers that authentication has set.

    A caller whose service token has one of ``service_roles`` is a service.

    Side effect: the oslo context of the thread is set, and appears in RPC calls and log lines.
    """
    ctx = context.RequestContext.from_environ(environ)
    # Names of roles are compared without case, as oslo.policy does.
    token_roles = {role.lower() for role in ctx.service_roles}
    is_service = not token_roles.isdisjoint(role.lower() for role in service_roles)
    # Only LoopbackAuth sets the key. With keystone, service roles come from a service token.
    has_service_token = is_service and environ.get(NAMED_AS_SERVICE, True)
    return Caller(ctx, is_service, enforcer, has_service_token)


# Key of the WSGI environ: the address of the client, before proxy headers replace it.
PEER = "cyborg.peer"
DEFAULT_PROJECT = "noauth"
KEYSTONE_TIMEOUT = 5  # seconds to wait for a response
_ROLES = "admin,manager,member,reader"
_SERVICE_ROLE = "service"
# All that oslo.context reads from the environ of a request.
_IDENTITY_HEADERS = ("HTTP_X_", "HTTP_OPENSTACK_SYSTEM_SCOPE")


def add_authentication(app: App, conf: cfg.ConfigOpts, enforcer: policy.Enforcer) -> App:
    """Wrap the app in the authentication layers that ``[DEFAULT] auth_strategy`` selects."""
    if conf.auth_strategy == "noauth":
        return LoopbackAuth(_add_caller(app, enforcer, lambda: (_SERVICE_ROLE,)))
    check_config(conf)
    from keystonemiddleware import auth_token

    # A malformed token, or an answer of keystone that is not from keystone, is no bug.
    drop_tracebacks(("keystonemiddleware.auth_token",), (Exception,))
    inner = _add_caller(app, enforcer, lambda: conf.keystone_authtoken.service_token_roles)
    return _KeystoneErrors(auth_token.AuthProtocol(inner, {"oslo_config_config": conf}))


def check_config(conf: cfg.ConfigOpts) -> None:
    """Raise Misconfigured if keystone authentication is selected and its section is unusable.

    Side effect: the options of keystonemiddleware are registered, and its calls get a timeout.
    """
    if conf.auth_strategy != "keystone":
        return
    # Late imports: noauth needs none of these.
    from keystoneauth1 import discover
    from keystonemiddleware import opts

    from cyborg.conf.auth_options import check_url, load_auth

    for group, options in opts.list_auth_token_opts():
        conf.register_opts(options, group=group)
    # The middleware has no timeout by default: a keystone that hangs would block every thread.
    conf.set_default("http_connect_timeout", KEYSTONE_TIMEOUT, group="keystone_authtoken")
    conf.set_default("http_request_max_retries", 1, group="keystone_authtoken")
    options = conf.keystone_authtoken
    if load_auth(conf, "keystone_authtoken") is None:
        raise Misconfigured(
            "[keystone_authtoken] auth_type is not set. auth_strategy = keystone requires the "
            "keystone credentials in this section, for example auth_type = password with "
            "auth_url, username, password, project_name and the user and project domains",
            option="[keystone_authtoken] auth_type",
        )
    check_url("keystone_authtoken", "www_authenticate_uri", options.www_authenticate_uri)
    # Checked here: the middleware would fail at the first request only.
    if options.auth_version is not None:
        try:
            discover.normalize_version_number(options.auth_version)
        except TypeError as exc:
            raise Misconfigured(
                f"[keystone_authtoken] auth_version: {options.auth_version!r}: expected 3, or no "
                "auth_version",
                option="[keystone_authtoken] auth_version",
            ) from exc


class _KeystoneErrors:
    """A WSGI layer that turns error responses of keystonemiddleware into exceptions.

    Any failure before the caller is identified is attributed to keystone.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise the error that stands for a rejection by the middleware."""
        # The status line and the headers of the rejection.
        rejection: tuple[str, Mapping[str, str]] | None = None

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            nonlocal rejection
            # The caller is known, so the token is valid: the response is one of the layers below.
            if ENVIRON in environ:
                return start_response(status, headers, *more)
            rejection = status, dict(headers)
            # The write function of WSGI; the body of the rejection is not sent.
            return lambda _: None

        try:
            response = self._app(environ, start)
        except CyborgError:
            # An error of the layers below is no failure of keystone.
            raise
        except Exception as exc:
            # A defect of a layer below, after the token was accepted.
            if ENVIRON in environ:
                raise
            raise Unavailable(
                f"cannot check the token with keystone: {type(exc).__name__}: {exc}"
            ) from exc
        if rejection is None:
            return response
        raise _rejection_error(*rejection)


def _rejection_error(status: str, headers: Mapping[str, str]) -> Exception:
    if not status.startswith("401"):
        return Unavailable(f"keystone is unavailable: {status}")
    # It tells clients where to get a token.
    challenge = headers.get("WWW-Authenticate", "Keystone")
    return http_exc.HTTPUnauthorized(
        "the token is missing or not valid", headers={"WWW-Authenticate": challenge}
    )


def _add_caller(
    app: App, enforcer: policy.Enforcer, service_roles: Callable[[], Collection[str]]
) -> App:
    """Wrap the app in a layer that builds the Caller from the identity headers."""

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # The roles are read at each request: a reload of the configuration can change them.
        environ[ENVIRON] = read_caller(environ, service_roles(), enforcer)
        return app(environ, start_response)

    return serve


class LoopbackAuth:
    """A WSGI layer that treats every caller as an administrator and a service.

    It therefore serves loopback connections only. The header X-Project-Id selects the project, so
    that several projects can be used.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise Forbidden if the peer is not on this machine."""
        # PEER is the address of the connection; a proxy header may have replaced REMOTE_ADDR.
        if not is_local(environ.get(PEER, environ.get("REMOTE_ADDR"))):
            raise Forbidden(
                "auth_strategy = noauth accepts connections from loopback or a unix socket only: "
                "connect locally, or set [DEFAULT] auth_strategy = keystone"
            )
        project = environ.get("HTTP_X_PROJECT_ID") or DEFAULT_PROJECT
        # It is stored with objects, and a part of log lines.
        check_text("X-Project-Id", project)
        # Each caller counts as a service. Read before the headers are deleted.
        environ[NAMED_AS_SERVICE] = "HTTP_X_SERVICE_TOKEN" in environ
        # Other identity headers of the client must not reach the log or the policy.
        for name in [name for name in environ if name.startswith(_IDENTITY_HEADERS)]:
            del environ[name]
        environ |= {
            "HTTP_X_USER_ID": "noauth",
            "HTTP_X_PROJECT_ID": project,
            "HTTP_X_ROLES": _ROLES,
            "HTTP_X_SERVICE_ROLES": _SERVICE_ROLE,
        }
        return self._app(environ, start_response)


def is_local(address: str | None) -> bool:
    """Return whether a peer is on this machine. None or "" is a peer on a unix socket."""
    if not address:
        return True
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    # A socket of both families shows a peer of IPv4 with a mapped address.
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
