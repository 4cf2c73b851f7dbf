# SPDX-License-Identifier: Apache-2.0
"""Client of Placement: read, create and update resource providers.

Every write with a generation check in Placement sends the generation that was read; a 409 means a
concurrent write. See the reference at
https://docs.openstack.org/api-ref/placement/.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import microversion_parse
from keystoneauth1 import adapter
from oslo_config import cfg

from cyborg.clients.service_client import ServiceClient, credentials_error, describe, load_adapter
from cyborg.core.errors import Conflict, InUse, Invalid, Misconfigured, Unavailable

# The last one whose behaviour was checked: a later one may change a body.
MAX_MICROVERSION = (1, 39)
# The first microversion in which ``reserved`` may equal ``total``, as a cordon requires.
MIN_MICROVERSION = (1, 26)

# Placement answers 409 for these and for a stale generation. Only the code of the error tells
# whether a repetition may help.
_IN_USE = frozenset(
    {
        "placement.inventory.inuse",
        "placement.resource_provider.inuse",
        "placement.resource_provider.cannot_delete_parent",
    }
)


# The first one with suffixes in allocation candidates, which name the provider of each group.
MAPPINGS_MICROVERSION = (1, 34)
CANDIDATES = "1.34"  # the same as text


@dataclass(frozen=True, slots=True)
class ConsumerAllocation:
    """Allocations of a consumer, by provider and resource class, and its generation."""

    amounts: Mapping[str, Mapping[str, int]]
    generation: int | None
    project: str
    user: str


@dataclass(frozen=True, slots=True)
class ProviderSummary:
    """Provider as a list of Placement shows it; writes to the provider send ``generation``.

    ``root_uuid`` is the uuid of the provider itself if it has no parent.
    """

    uuid: str
    name: str
    parent_uuid: str | None
    generation: int
    root_uuid: str | None


class Placement(ServiceClient):
    """Client of Placement with the calls that a conductor needs.

    Each method raises Unavailable if Placement cannot be reached, fails or rejects the credentials,
    TimedOut if it does not answer in time, Conflict for a stale generation or a duplicate name,
    InUse if there are allocations, and Invalid for any other rejection.
    """

    SERVICE = "Placement"

    def __init__(
        self, adapter: adapter.Adapter, timeout: float = 30.0, credentials: str | None = None
    ) -> None:
        """Create a client with an empty cache; ServiceClient describes the arguments."""
        super().__init__(adapter, timeout, credentials)
        self._lock = threading.Lock()
        self._version: str | None = None
        self._ensured: set[str] = set()

    @property
    def version(self) -> tuple[int, int]:
        """Return the microversion of the calls: the highest that both sides support."""
        major, minor = (self._version or self._negotiate()).split(".")
        return int(major), int(minor)

    def find(self, name: str) -> ProviderSummary | None:
        """Return the provider with this name, or None."""
        return next(iter(self._list(f"name={quote(name, safe='')}")), None)

    def tree(self, uuid: str, trait: str | None = None) -> dict[str, ProviderSummary]:
        """Return every provider in the tree of a provider, by uuid; empty if it does not exist.

        With ``trait``, return only the providers with this trait.
        """
        query = f"in_tree={uuid}" + (f"&required={trait}" if trait else "")
        return {provider.uuid: provider for provider in self._list(query)}

    def root_providers(self) -> list[ProviderSummary]:
        """Return every provider without a parent. The response is large: do not call this often."""
        answer = self._call("GET", "/resource_providers")
        found = (_summary(body) for body in answer.json()["resource_providers"])
        return [provider for provider in found if provider.parent_uuid is None]

    def compute_nodes(self) -> list[ProviderSummary]:
        """Return the providers of compute nodes: those with the trait that nova-compute sets.

        The size of the response grows with the number of hosts.
        """
        return self._list("required=COMPUTE_NODE")

    def get(self, uuid: str) -> ProviderSummary | None:
        """Return a provider, or None."""
        answer = self._call("GET", f"/resource_providers/{uuid}", 404)
        return None if answer.status_code == 404 else _summary(answer.json())

    def inventories(self, uuid: str) -> dict[str, dict[str, Any]]:
        """Return the inventories of a provider by resource class; empty if it does not exist."""
        answer = self._call("GET", f"/resource_providers/{uuid}/inventories", 404)
        return {} if answer.status_code == 404 else dict(answer.json()["inventories"])

    def traits(self, uuid: str) -> frozenset[str]:
        """Return the traits of a provider; empty if it does not exist."""
        answer = self._call("GET", f"/resource_providers/{uuid}/traits", 404)
        return frozenset() if answer.status_code == 404 else frozenset(answer.json()["traits"])

    def allocations(self, uuid: str) -> dict[str, dict[str, int]] | None:
        """Return the allocations of a provider, by consumer and resource class.

        Return None if the provider does not exist; then nothing is known about its consumers.
        """
        answer = self._call("GET", f"/resource_providers/{uuid}/allocations", 404)
        if answer.status_code == 404:
            return None
        found = answer.json()["allocations"]
        return {str(consumer): dict(item["resources"]) for consumer, item in found.items()}

    def allocations_of(self, consumer: str) -> tuple[str | None, dict[str, int]]:
        """Return the project of a consumer, and the units of its allocations by provider.

        The project is None if the consumer has no allocations.
        """
        answer = self._call("GET", f"/allocations/{quote(consumer, safe='')}", 404)
        body = {} if answer.status_code == 404 else answer.json()
        project, allocations = body.get("project_id"), body.get("allocations")
        if not project or not allocations:
            return None, {}
        units = {str(uuid): sum(item["resources"].values()) for uuid, item in allocations.items()}
        return str(project), units

    def allocation_candidates(self, query: str, limit: int) -> dict[str, Any]:
        """Return up to ``limit`` allocation candidates; the size of the answer grows with it.

        ``query`` has suffixes of request groups. Raise Invalid for a class or a trait that
        Placement does not know.
        """
        if self.version < MAPPINGS_MICROVERSION:
            raise Unavailable(
                f"Placement supports microversions up to {self._version}, but allocation "
                f"candidates with mappings need {CANDIDATES}: upgrade Placement"
            )
        answer = self._call("GET", f"/allocation_candidates?{query}&limit={limit}")
        return dict(answer.json())

    def candidates(self, query: str) -> list[Mapping[str, str]]:
        """Return the allocation candidates of a query: for each, the provider of each group.

        Each group of the query must be granular: each has one provider.
        """
        path = f"/allocation_candidates?{query}"
        answer = self._call("GET", path, version=self._at_most(CANDIDATES))
        try:
            # The key of the group without a suffix is empty: this group can have several providers.
            return [
                {group: providers[0] for group, providers in request["mappings"].items() if group}
                for request in answer.json()["allocation_requests"]
            ]
        except (ValueError, KeyError, IndexError, TypeError) as exc:
            raise Unavailable(f"Placement must support microversion {CANDIDATES}: {exc}") from exc

    def consumer(self, consumer: str) -> ConsumerAllocation | None:
        """Return the allocations of a consumer, None if it has none."""
        path = f"/allocations/{quote(consumer, safe='')}"
        body = self._call("GET", path, version=self._at_most(CANDIDATES)).json()
        # Placement answers 200 with an empty body for a consumer that it does not know.
        if not body.get("allocations"):
            return None
        return ConsumerAllocation(
            amounts={uuid: dict(item["resources"]) for uuid, item in body["allocations"].items()},
            generation=body.get("consumer_generation"),
            project=str(body["project_id"]),
            user=str(body["user_id"]),
        )

    def set_consumer(
        self, consumer: str, amounts: Mapping[str, Mapping[str, int]], known: ConsumerAllocation
    ) -> None:
        """Replace the allocations of a consumer.

        Raise Conflict if they have changed since ``known`` was read, or if a provider lacks
        capacity.
        """
        body = {
            "allocations": {uuid: {"resources": dict(names)} for uuid, names in amounts.items()},
            "consumer_generation": known.generation,
            "project_id": known.project,
            "user_id": known.user,
        }
        path = f"/allocations/{quote(consumer, safe='')}"
        # From 1.38 on the body must have the type of the consumer; an older version keeps the type.
        self._call("PUT", path, version=self._at_most(CANDIDATES), json=body)

    def ensure_classes(self, names: Iterable[str]) -> None:
        """Create the custom resource classes that do not exist."""
        self._ensure("resource_classes", names)

    def ensure_traits(self, names: Iterable[str]) -> None:
        """Create the custom traits that do not exist."""
        self._ensure("traits", names)

    def reset_cache(self) -> None:
        """Clear the cache, because Placement's database may have been replaced."""
        with self._lock:
            self._ensured.clear()
            self._version = None

    def create(self, uuid: str, name: str, parent_uuid: str | None) -> int:
        """Create a provider and return its generation."""
        body = {"uuid": uuid, "name": name, "parent_provider_uuid": parent_uuid}
        return int(self._call("POST", "/resource_providers", json=body).json()["generation"])

    def rename(self, uuid: str, name: str, parent_uuid: str | None) -> int:
        """Set the name and the parent of a provider; return its generation."""
        # This call of Placement has no generation.
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
        """Delete a provider; do nothing if it does not exist. Raise InUse if it has allocations."""
        # 404: another conductor, or an earlier attempt, has deleted it.
        self._call("DELETE", f"/resource_providers/{uuid}", 404)

    def _list(self, query: str) -> list[ProviderSummary]:
        answer = self._call("GET", f"/resource_providers?{query}")
        return [_summary(body) for body in answer.json()["resource_providers"]]

    def _ensure(self, collection: str, names: Iterable[str]) -> None:
        for name in sorted(names):
            path = f"/{collection}/{quote(name, safe='')}"
            # Hardly anybody deletes them: one call for each process is enough. A 400 clears this.
            if path not in self._ensured:
                self._call("PUT", path)
                with self._lock:
                    self._ensured.add(path)

    def _at_most(self, version: str) -> str:
        """Return the older one of a microversion and the negotiated microversion."""
        agreed = self._version or self._negotiate()
        # As numbers: "1.9" is older than "1.34".
        return min(version, agreed, key=lambda text: tuple(map(int, text.split("."))))

    def _call(
        self, verb: str, path: str, *allowed: int, version: str | None = None, **options: Any
    ) -> Any:
        """Send a request; return a response below 300 or with an ``allowed`` status.

        ``version`` is by default the negotiated microversion. Raise the error of other responses.
        """
        version = version or self._version or self._negotiate()
        answer = self._request(verb, path, microversion=version, **options)
        if answer.status_code < 300 or answer.status_code in allowed:
            return answer
        raise self._refusal(verb, path, answer)

    def _negotiate(self) -> str:
        """Return the highest microversion that both sides support, and cache it."""
        answer = self._request("GET", "/", headers={"Accept": "application/json"})
        if answer.status_code >= 300:
            raise self._refusal("GET", "/", answer)
        try:
            offered = microversion_parse.parse_version_string(
                answer.json()["versions"][0]["max_version"]
            )
        except (ValueError, KeyError, IndexError, TypeError) as exc:
            raise Unavailable(
                f"unexpected response from Placement: no version: {answer.text[:100]!r}"
            ) from exc
        agreed = min(MAX_MICROVERSION, (offered.major, offered.minor))
        # Not a lower version with fewer functions: without a cordon, devices of dead hosts would be
        # given to servers.
        if agreed < MIN_MICROVERSION:
            raise Unavailable(
                f"Placement supports microversions up to {offered}, but this service needs "
                f"{MIN_MICROVERSION[0]}.{MIN_MICROVERSION[1]}: upgrade Placement"
            )
        with self._lock:
            self._version = f"{agreed[0]}.{agreed[1]}"
            return self._version

    def _refusal(self, verb: str, path: str, answer: Any) -> Exception:
        """Return the error for a response: Unavailable if a repetition may succeed."""
        status = answer.status_code
        code, detail = _error_details(answer)
        message = f"Placement answered {status} to {verb} {path}: {detail}"
        if status == 401:
            return credentials_error("Placement", self._credentials, f"{verb} {path}: {detail}")
        if status == 409:
            return (InUse if code in _IN_USE else Conflict)(message, status=status)
        # 403 is a policy that an operator corrects; 406 is a Placement of another version behind
        # the same address, such as during an upgrade.
        if status >= 500 or status in (403, 406, 408, 429):
            if status == 406:
                self.reset_cache()
            return Unavailable(message, status=status)
        if status == 400:
            # A cached name may not exist any more if Placement's database was replaced.
            self.reset_cache()
        return Invalid(message, status=status)


def make(conf: cfg.ConfigOpts) -> Placement:
    """Create the client from section [placement]. Raise Misconfigured if it is unusable."""
    adapter = load_adapter(conf, "placement")
    if adapter.auth is None and not conf.placement.endpoint_override:
        raise Misconfigured(
            "[placement] auth_type is not set: expected the name of an auth plugin and its options",
            option="placement.auth_type",
        )
    return Placement(adapter, conf.placement.request_timeout, describe(conf, "placement"))


def _summary(body: Mapping[str, Any]) -> ProviderSummary:
    return ProviderSummary(
        uuid=body["uuid"],
        name=body["name"],
        parent_uuid=body.get("parent_provider_uuid"),
        generation=int(body["generation"]),
        root_uuid=body.get("root_provider_uuid"),
    )


def _error_details(answer: Any) -> tuple[str, str]:
    try:
        first = answer.json()["errors"][0]
        return str(first.get("code", "")), " ".join(str(first["detail"]).split())[:300]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "", str(answer.text)[:200]
