# SPDX-License-Identifier: Apache-2.0
"""POST /ui/sign-in and GET /ui/session: the token of a user, and what the policy allows.

The console may connect to its own origin only, so the API forwards the credentials. They are
neither stored nor logged, and the token is in the response only: there is no cookie. These paths
are no part of the REST API and have no microversion: the page is of the same release.
"""

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from importlib import metadata
from typing import Any

import webob
from keystoneauth1 import exceptions, session
from keystoneauth1.identity import v3
from oslo_config import cfg
from webob import exc

from cyborg.api import auth
from cyborg.api.auth import KEYSTONE_TIMEOUT
from cyborg.api.body import BodyReader
from cyborg.api.console.throttle import Throttle, client_key
from cyborg.api.middleware import JSON, App, check_content_length, json_response, require_get
from cyborg.core.errors import Invalid, Misconfigured, Unavailable
from cyborg.core.text import to_iso
from cyborg.core.validation import check_text
from cyborg.policies import list_rules

SESSION = "/ui/session"


class ConsoleSession:
    """A WSGI layer, after authentication, that serves the session of the console's user."""

    def __init__(self, app: App, conf: cfg.ConfigOpts) -> None:
        self._app = app
        self._conf = conf

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        if environ.get("PATH_INFO") != SESSION:
            return self._app(environ, start_response)
        require_get(environ)
        # It depends on the token of the request, of which no cache knows.
        response = json_response(self._show(environ[auth.ENVIRON]), cache_control="no-store")
        return response(environ, start_response)

    def _show(self, caller: auth.Caller) -> dict[str, Any]:
        """Return the caller, and the operations that the policy allows in the caller's project."""
        context = caller.context
        # Not the base rules: they are no operations.
        rules = [rule.name for rule in list_rules() if rule.name.startswith("cyborg:")]
        return {
            "release": metadata.version("cyborg"),
            "auth": self._conf.auth_strategy,
            "user": context.user_name or context.user_id,
            "project": context.project_name or caller.project_id,
            "roles": sorted(context.roles),
            "all_projects": caller.project_scope is None,
            "rules": [rule for rule in rules if caller.allows(rule)],
        }


# Maximum number of bytes of a request.
MAX_BODY = 8192

# Seconds to receive the body of a client that is not authenticated.
BODY_TIMEOUT = 3.0

# Maximum number of characters of a user name, a password or another value.
MAX_VALUE = 1024

# The fields of a request and their defaults; those with None are mandatory.
FIELDS: Mapping[str, str | None] = {
    "user": None,
    "password": None,
    "project": None,
    "user_domain": "Default",
    "project_domain": "Default",
}


class SignIn:
    """A WSGI application that returns a token for a user, a password and a project."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf
        self._throttle = Throttle()
        self._read_body = BodyReader(self._answer, conf, BODY_TIMEOUT)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise HTTPUnauthorized if keystone rejects the credentials."""
        if environ["REQUEST_METHOD"] != "POST":
            raise exc.HTTPMethodNotAllowed("sign-in: use POST", headers={"Allow": "POST"})
        # A form of another site cannot send this type.
        if webob.Request(environ).content_type != JSON:
            raise exc.HTTPUnsupportedMediaType(f"Content-Type must be {JSON}")
        check_content_length(environ, MAX_BODY)
        if not environ.get("CONTENT_LENGTH"):
            raise exc.HTTPLengthRequired("sign-in: send Content-Length")
        # The client is not authenticated, and may send the body slowly: it must not keep others
        # from keystone, nor block more than a few threads.
        with self._throttle.admit(client_key(environ.get("REMOTE_ADDR"))):
            return self._read_body(environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        credentials = _parse(environ["wsgi.input"].read())
        # Keystone compares names without case: other spellings are no further attempts.
        user = (credentials["user_domain"].casefold(), credentials["user"].casefold())
        with self._throttle.call(client_key(environ.get("REMOTE_ADDR")), user):
            document = self._authenticate(keystone_url(self._conf), credentials)
        # The response has the token.
        return json_response(document, 201, cache_control="no-store")(environ, start_response)

    def _authenticate(self, url: str, credentials: Mapping[str, str]) -> dict[str, Any]:
        """Return the document with a token of keystone and its expiry.

        Raise HTTPUnauthorized if keystone rejects the credentials, Unavailable if it fails.
        """
        options = self._conf.keystone_authtoken
        plugin = v3.Password(
            url,
            username=credentials["user"],
            password=credentials["password"],
            user_domain_name=credentials["user_domain"],
            project_name=credentials["project"],
            project_domain_name=credentials["project_domain"],
            # The console calls this service only; the catalogue of a large cloud has 100 kB.
            include_catalog=False,
        )
        client = session.Session(
            timeout=KEYSTONE_TIMEOUT,
            verify=False if options.insecure else options.cafile or True,
            cert=(options.certfile, options.keyfile) if options.certfile else None,
            # A redirect could lead the password to another host.
            redirect=False,
        )
        try:
            access = plugin.get_auth_ref(client)
            token = access.auth_token
        except exceptions.MissingAuthMethods:
            raise self._rejection(
                "keystone requires a second factor: sign in with a token, such as that of "
                "'openstack token issue'"
            ) from None
        except exceptions.HttpError as error:
            if not _is_rejection(error.http_status):
                raise Unavailable(f"cannot sign in at keystone: {error.http_status}") from error
            raise self._rejection(
                "keystone does not accept the user, the password or the project"
            ) from None
        except (exceptions.ClientException, OSError, KeyError, TypeError, ValueError) as error:
            # OSError: a file of TLS. The last three: an answer that is not keystone's.
            raise Unavailable(f"cannot sign in at keystone: {type(error).__name__}") from error
        expires = access.expires
        return {"token": token, "expires_at": None if expires is None else to_iso(expires)}

    def _rejection(self, text: str) -> exc.HTTPUnauthorized:
        # Not the URL that this service uses, which may be internal.
        public = self._conf.keystone_authtoken.www_authenticate_uri
        challenge = f'Keystone uri="{public}"' if public else "Keystone"
        return exc.HTTPUnauthorized(text, headers={"WWW-Authenticate": challenge})


def _is_rejection(status: int) -> bool:
    """Return whether a status of keystone means that it does not accept the credentials."""
    return (
        HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
        and status != HTTPStatus.TOO_MANY_REQUESTS
    )


def keystone_url(conf: cfg.ConfigOpts) -> str:
    """Return the URL of keystone. Raise Misconfigured without one."""
    # First the URL at which the API itself authenticates: it is known to be reachable from here,
    # which may not be true of the public one.
    options = conf.keystone_authtoken
    section = conf[options.auth_section] if options.auth_section else options
    for url in (getattr(section, "auth_url", None), options.www_authenticate_uri):
        if url:
            return str(url)
    raise Misconfigured(
        "the console cannot sign in: [keystone_authtoken] has neither auth_url nor "
        "www_authenticate_uri",
        option="[keystone_authtoken] auth_url",
    )


def _parse(text: bytes) -> dict[str, str]:
    """Return all FIELDS of a request, with their defaults. Raise Invalid.

    ``check_text`` rejects the None of a mandatory field that is missing.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        # One message for all that is no object of these fields; none may quote the password.
        body = None
    if not isinstance(body, dict) or not set(body) <= set(FIELDS):
        raise Invalid(f"body: expected a JSON object of {', '.join(FIELDS)}", field="body")
    credentials: dict[str, str] = {}
    for name, default in FIELDS.items():
        value = body.get(name) or default
        if name == "password":
            # Any character is allowed in it, and no message may quote it.
            if not isinstance(value, str) or not value or len(value) > MAX_VALUE:
                raise Invalid("password: missing or too long", field=name)
            credentials[name] = value
        else:
            credentials[name] = check_text(name, value, MAX_VALUE)
    return credentials
