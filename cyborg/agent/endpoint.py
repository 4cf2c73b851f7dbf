# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the bus: version 1.0 of the internal contract."""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from cyborg.agent.backend import Backend
from cyborg.agent.inventory import collect
from cyborg.agent.jobs import Jobs
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.hardware import answer
from cyborg.core.job import load_work
from cyborg.core.report import BackendState
from cyborg.core.request import parse_uuid


class Agent:
    """Answers for the backends of this host; ``driver`` is a backend's name or its driver's."""

    def __init__(
        self,
        host: str,
        backends: Sequence[Backend],
        discovered: Callable[[str, BackendState], None],
        jobs: Jobs,
        nudge: Callable[[int], int],
    ) -> None:
        """``discovered`` is told each backend's outcome of a discovery that was asked for.

        ``nudge`` is told which revision is wanted and returns the one that the host has come to.
        """
        self._host = host
        self._backends = backends
        self._discovered = discovered
        self._jobs = jobs
        self._nudge = nudge

    def discovery(
        self, ctxt: Any, driver: str | None = None, discovery_id: str | None = None
    ) -> dict[str, str]:
        """Have backends look again, all or those of one driver. Raises Invalid, NotFound."""
        asked = None if discovery_id is None else parse_uuid(discovery_id, "discovery_id")
        uuid = asked or str(uuid4())
        for backend in self._meant(driver):
            backend.rediscover(self._teller(asked))
        return {"status": "IN-PROGRESS", "discovery_id": uuid}

    def hardware(self, ctxt: Any, driver: str | None = None) -> dict[str, Any]:
        """Return what backends saw last, and how these are doing. Raises NotFound."""
        names = {backend.name for backend in self._meant(driver)}
        seen = collect([backend.view for backend in self._backends])
        return answer(
            [device for device in seen.devices if device.backend in names],
            [state for state in seen.states if state.name in names],
        )

    def wanted(self, ctxt: Any, revision: int) -> dict[str, int]:
        """Come to what is wanted of this host; the answer does not wait for it. Raises Invalid."""
        if not isinstance(revision, int) or isinstance(revision, bool) or revision < 0:
            raise Invalid("revision must be a whole number, 0 or more", field="revision")
        return {"revision": self._nudge(revision)}

    def job(
        self, ctxt: Any, job: str, kind: str, arguments: Any, seconds: float
    ) -> dict[str, str | None]:
        """Have a job done, or tell how it is; asking twice does it once. Raises Invalid."""
        return self._jobs.start(load_work(job, kind, arguments, seconds))

    def _teller(self, discovery_id: str | None) -> Callable[[BackendState], None]:
        if discovery_id is None:
            return lambda _: None
        return lambda state: self._discovered(discovery_id, state)

    def _meant(self, driver: str | None) -> list[Backend]:
        meant = [b for b in self._backends if driver in (None, b.name, b.driver.name)]
        if driver is not None and not meant:
            known = sorted({b.name for b in self._backends})
            raise NotFound(
                f"host {self._host} has no backend or driver {str(driver)[:255]!r}; it has "
                f"{', '.join(known) or 'none'}",
                field="driver",
            )
        return meant
