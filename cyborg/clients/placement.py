# SPDX-License-Identifier: Apache-2.0
"""Placement's resource providers: read them, make them, bring them to what is wanted.

Every write that Placement can check is checked: it carries the generation that was read, and a 409
says that somebody else wrote in between. See the reference at
https://docs.openstack.org/api-ref/placement/.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import microversion_parse
from keystoneauth1 import adapter, loading
from keystoneauth1 import exceptions as ks
from oslo_config import cfg

from cyborg.core.errors import Conflict, InUse, Invalid, Misconfigured, TimedOut, Unavailable

BEST = (1, 39)
LEAST = (1, 26)
"""The first microversion in which ``reserved`` may reach ``total``: how a provider is closed."""

_IN_USE = frozenset(
    {
        "placement.inventory.inuse",
        "placement.resource_provider.inuse",
        "placement.resource_provider.cannot_delete_parent",
    }
)


@dataclass(frozen=True, slots=True)
class Known:
    """A provider as Placement lists it; ``generation`` guards the writes to it."""

    uuid: str
    name: str
    parent_uuid: str | None
    generation: int


class Placement:
    """The calls of Placement that the conductor makes.

    Each raises Unavailable when Placement is away, fails or refuses our credentials, TimedOut when
    it does not answer in time, Conflict on a stale generation or a taken name, InUse when there are
    allocations, and Invalid for whatever else it refuses.
    """

    def __init__(self, adapter: adapter.Adapter, timeout: float = 30.0) -> None:
        """Use a keystoneauth adapter; ``timeout`` is in seconds, for each request."""
        self._adapter = adapter
        self._timeout = timeout
        self._lock = threading.Lock()
        self._version: str | None = None
        self._ensured: set[str] = set()

    def find(self, name: str) -> Known | None:
        """Return the provider of that name, or None."""
        found = self._list(f"name={quote(name, safe='')}")
        return found[0] if found else None

    def tree(self, uuid: str, trait: str | None = None) -> dict[str, Known]:
        """Return every provider of the tree that this one is in, by uuid; empty for none.

        Those that have a trait, if one is given.
        """
        which = f"in_tree={uuid}" + (f"&required={trait}" if trait else "")
        return {known.uuid: known for known in self._list(which)}

    def roots(self) -> list[Known]:
        """Return every provider that has no parent: one large answer, not for a hot path."""
        answer = self._call("GET", "/resource_providers")
        found = (_known(body) for body in answer.json()["resource_providers"])
        return [known for known in found if known.parent_uuid is None]

    def get(self, uuid: str) -> Known | None:
        """Return a provider, or None."""
        answer = self._call("GET", f"/resource_providers/{uuid}", 404)
        return None if answer.status_code == 404 else _known(answer.json())

    def inventories(self, uuid: str) -> dict[str, dict[str, Any]]:
        """Return the inventories of a provider by resource class; empty when it is gone."""
        answer = self._call("GET", f"/resource_providers/{uuid}/inventories", 404)
        return {} if answer.status_code == 404 else dict(answer.json()["inventories"])

    def traits(self, uuid: str) -> frozenset[str]:
        """Return the traits of a provider; empty when it is gone."""
        answer = self._call("GET", f"/resource_providers/{uuid}/traits", 404)
        return frozenset() if answer.status_code == 404 else frozenset(answer.json()["traits"])

    def allocations(self, uuid: str) -> dict[str, dict[str, int]] | None:
        """Return what each consumer has of a provider, by consumer and resource class.

        None is that Placement has no such provider, which says nothing of its consumers.
        """
        answer = self._call("GET", f"/resource_providers/{uuid}/allocations", 404)
        if answer.status_code == 404:
            return None
        found = answer.json()["allocations"]
        return {str(consumer): dict(has["resources"]) for consumer, has in found.items()}

    def consumer_project(self, consumer: str) -> str | None:
        """Return the project that a consumer's allocations belong to, None when it has none."""
        answer = self._call("GET", f"/allocations/{quote(consumer, safe='')}", 404)
        body = {} if answer.status_code == 404 else answer.json()
        project = body.get("project_id")
        return str(project) if project and body.get("allocations") else None

    def ensure_classes(self, names: Iterable[str]) -> None:
        """Make resource classes of our own that are not there yet."""
        self._ensure("resource_classes", names)

    def ensure_traits(self, names: Iterable[str]) -> None:
        """Make traits of our own that are not there yet."""
        self._ensure("traits", names)

    def forget(self) -> None:
        """Ask again for all that is remembered: Placement may have another database now."""
        with self._lock:
            self._ensured.clear()
            self._version = None

    def create(self, uuid: str, name: str, parent_uuid: str | None) -> int:
        """Make a provider and return its generation."""
        body = {"uuid": uuid, "name": name, "parent_provider_uuid": parent_uuid}
        return int(self._call("POST", "/resource_providers", json=body).json()["generation"])

    def rename(self, uuid: str, name: str, parent_uuid: str | None) -> int:
        """Give a provider its name and its place; return its generation."""
        body = {"name": name, "parent_provider_uuid": parent_uuid}
        return int(self._call("PUT", f"/resource_providers/{uuid}", json=body).json()["generation"])

    def set_inventories(
        self, uuid: str, generation: int, inventories: Mapping[str, Mapping[str, Any]]
    ) -> int:
        """Replace the inventories of a provider and return its new generation."""
        body = {
            "resource_provider_generation": generation,
            "inventories": {name: dict(values) for name, values in inventories.items()},
        }
        answer = self._call("PUT", f"/resource_providers/{uuid}/inventories", json=body)
        return int(answer.json()["resource_provider_generation"])

    def set_traits(self, uuid: str, generation: int, traits: Iterable[str]) -> int:
        """Replace the traits of a provider and return its new generation."""
        body = {"resource_provider_generation": generation, "traits": sorted(traits)}
        answer = self._call("PUT", f"/resource_providers/{uuid}/traits", json=body)
        return int(answer.json()["resource_provider_generation"])

    def delete(self, uuid: str) -> None:
        """Delete a provider; one that is gone is fine. Raises InUse when it has allocations."""
        self._call("DELETE", f"/resource_providers/{uuid}", 404)

    def _list(self, query: str) -> list[Known]:
        answer = self._call("GET", f"/resource_providers?{query}")
        return [_known(body) for body in answer.json()["resource_providers"]]

    def _ensure(self, collection: str, names: Iterable[str]) -> None:
        for name in sorted(names):
            path = f"/{collection}/{quote(name, safe='')}"
            if path not in self._ensured:
                self._call("PUT", path)
                with self._lock:
                    self._ensured.add(path)

    def _call(self, verb: str, path: str, *allowed: int, **more: Any) -> Any:
        version = self._version or self._negotiate()
        answer = self._request(verb, path, microversion=version, **more)
        if answer.status_code < 300 or answer.status_code in allowed:
            return answer
        raise self._refusal(verb, path, answer)

    def _negotiate(self) -> str:
        """Return the best microversion that both sides know, and remember it."""
        answer = self._request("GET", "/", headers={"Accept": "application/json"})
        if answer.status_code >= 300:
            raise self._refusal("GET", "/", answer)
        try:
            offered = microversion_parse.parse_version_string(
                answer.json()["versions"][0]["max_version"]
            )
        except (ValueError, KeyError, IndexError, TypeError) as bad:
            raise Unavailable(f"what answers is not Placement: {answer.text[:100]!r}") from bad
        agreed = min(BEST, (offered.major, offered.minor))
        if agreed < LEAST:
            raise Unavailable(
                f"Placement speaks microversions up to {offered}; {LEAST[0]}.{LEAST[1]} is the "
                "least this service needs"
            )
        with self._lock:
            self._version = f"{agreed[0]}.{agreed[1]}"
            return self._version

    def _request(self, verb: str, path: str, **more: Any) -> Any:
        try:
            return self._adapter.request(path, verb, raise_exc=False, timeout=self._timeout, **more)
        except ks.ConnectTimeout as bad:
            raise TimedOut(f"Placement did not answer in {self._timeout:g} s: {bad}") from bad
        except ks.ClientException as bad:
            raise Unavailable(f"Placement cannot be reached: {bad}") from bad

    def _refusal(self, verb: str, path: str, answer: Any) -> Exception:
        status = answer.status_code
        code, detail = _explained(answer)
        told = f"Placement answered {status} to {verb} {path}: {detail}"
        if status == 409:
            return (InUse if code in _IN_USE else Conflict)(told, status=status)
        if status >= 500 or status in (401, 403, 406, 408, 429):
            if status == 406:
                self.forget()
            return Unavailable(told, status=status)
        if status == 400:
            # A name that we believe to be there may have gone with Placement's old database.
            self.forget()
        return Invalid(told, status=status)


def make(conf: cfg.ConfigOpts) -> Placement:
    """Build the client from section [placement]. Raises Misconfigured when it is unusable."""
    try:
        auth = loading.load_auth_from_conf_options(conf, "placement")
        session = loading.load_session_from_conf_options(conf, "placement", auth=auth)
        made = loading.load_adapter_from_conf_options(conf, "placement", session=session, auth=auth)
    except (ks.ClientException, cfg.Error, ValueError) as bad:
        raise Misconfigured(f"[placement]: {bad}", option="placement.auth_type") from bad
    if auth is None and not conf.placement.endpoint_override:
        raise Misconfigured(
            "[placement] auth_type is not set: expected the name of an auth plugin and its options",
            option="placement.auth_type",
        )
    return Placement(made, conf.placement.request_timeout)


def _known(body: Mapping[str, Any]) -> Known:
    return Known(
        body["uuid"], body["name"], body.get("parent_provider_uuid"), int(body["generation"])
    )


def _explained(answer: Any) -> tuple[str, str]:
    try:
        first = answer.json()["errors"][0]
        return str(first.get("code", "")), " ".join(str(first["detail"]).split())[:300]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "", str(answer.text)[:200]
