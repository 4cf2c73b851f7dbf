# SPDX-License-Identifier: Apache-2.0
"""Telling Nova of accelerator requests, by its external events."""

from collections.abc import Mapping, Sequence
from typing import Any

from keystoneauth1 import adapter, loading
from keystoneauth1 import exceptions as ks
from oslo_config import cfg

from cyborg.core.errors import Invalid, Misconfigured, TimedOut, Unavailable

MICROVERSION = "2.82"
"""The first that knows the event accelerator-request-bound."""

BOUND = "accelerator-request-bound"
GONE = 404
NO_HOST_YET = 422

_PATH = "/os-server-external-events"


class Nova:
    """The one call of Nova's that a conductor makes."""

    def __init__(self, adapter: adapter.Adapter, timeout: float = 30.0) -> None:
        """Use a keystoneauth adapter; ``timeout`` is in seconds, for each request."""
        self._adapter = adapter
        self._timeout = timeout

    def send(self, events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Post events and return Nova's status code for each, in their order.

        200: taken. 422: the instance has no host yet, which is normal while it is built. 404: no
        such instance. Raises Invalid when Nova took none and says it is our mistake, Unavailable
        when it failed or did not answer, TimedOut when it did not in time.
        """
        try:
            answer = self._adapter.post(
                _PATH,
                json={"events": [dict(event) for event in events]},
                microversion=MICROVERSION,
                raise_exc=False,
                timeout=self._timeout,
            )
        except ks.ConnectTimeout as bad:
            raise TimedOut(f"Nova did not answer in {self._timeout:g} s: {bad}") from bad
        except ks.ClientException as bad:
            raise Unavailable(f"Nova cannot be reached: {bad}") from bad
        if answer.status_code in (200, 207):
            return _codes(answer, events)
        if answer.status_code == GONE and _says_no_instance(answer):
            return (GONE,) * len(events)
        told = f"Nova answered {answer.status_code}: {answer.text[:300]}"
        if answer.status_code >= 500 or answer.status_code in (401, 403, 408, 429):
            raise Unavailable(told, status=answer.status_code)
        raise Invalid(told, field="events", status=answer.status_code)


def make(conf: cfg.ConfigOpts) -> Nova:
    """Build the client from section [nova]. Raises Misconfigured when the section is unusable."""
    try:
        auth = loading.load_auth_from_conf_options(conf, "nova")
        session = loading.load_session_from_conf_options(conf, "nova", auth=auth)
        made = loading.load_adapter_from_conf_options(conf, "nova", session=session, auth=auth)
    except (ks.ClientException, cfg.Error, ValueError) as bad:
        raise Misconfigured(f"[nova]: {bad}", option="nova.auth_type") from bad
    if conf.nova.notify and auth is None and not conf.nova.endpoint_override:
        raise Misconfigured(
            "[nova] auth_type is not set: expected the name of an auth plugin and its options, or "
            "notify = false in an installation without Nova",
            option="nova.auth_type",
        )
    return Nova(made, conf.nova.request_timeout)


def _codes(answer: Any, events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Read the code of each event; one that Nova leaves out has the code of the whole."""
    if answer.status_code == 200:
        return (200,) * len(events)
    try:
        found = {
            (item.get("name"), item.get("server_uuid"), item.get("tag")): int(item["code"])
            for item in answer.json()["events"]
        }
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        raise Unavailable(f"Nova answered 207 with what is no list of events: {bad}") from bad
    return tuple(
        found.get((event.get("name"), event.get("server_uuid"), event.get("tag")), 200)
        for event in events
    )


def _says_no_instance(answer: Any) -> bool:
    # A wrong endpoint is a 404 as well; only Nova's own words may drop an event.
    try:
        return "itemNotFound" in answer.json()
    except ValueError:
        return False
