# SPDX-License-Identifier: Apache-2.0
"""What was wanted of this host's backends and came of it, in a file that survives the agent.

By it the agent begins with the backends that it had, whether or not a conductor can be asked.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from oslo_log import log

from cyborg.agent import durable
from cyborg.core import convergence
from cyborg.core.convergence import Held
from cyborg.core.plain import integer

LOG = log.getLogger(__name__)


class HeldFile:
    """The file, and in memory what it has. One thread at a time uses it."""

    def __init__(self, path: Path) -> None:
        """Read what the last life of the agent left.

        A file that cannot be used is put aside, with a warning, as if nothing had ever been wanted.
        """
        self._path = path
        self.revision, self.backends = self._read()

    def write(self, revision: int, backends: Mapping[str, Held]) -> None:
        """Remember what is held as of a revision. Raises OSError; the memory has it even so."""
        self.revision, self.backends = revision, dict(backends)
        body = {"revision": revision, "backends": [one.to_dict() for one in backends.values()]}
        durable.write(self._path, json.dumps(body).encode())

    def _read(self) -> tuple[int, dict[str, Held]]:
        try:
            body = json.loads(self._path.read_bytes())
            backends = [convergence.load(one) for one in body["backends"]]
            return integer(body["revision"]), {one.wanted.backend: one for one in backends}
        except FileNotFoundError:
            return 0, {}
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as bad:
            then = "backends are as the configuration has them until the conductor is asked"
            durable.put_aside(self._path, bad, "The memory of wanted backends", then)
            return 0, {}
