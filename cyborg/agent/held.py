# SPDX-License-Identifier: Apache-2.0
"""What was wanted of this host's backends and came of it, in a file that survives the agent.

By it the agent begins with the backends that it had, whether or not a conductor can be asked. It
names the boot of the host as well: what was set up before that is not set up any more.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from oslo_log import log

from cyborg.agent import durable
from cyborg.agent.checkpoint import BOOT_ID, boot
from cyborg.core import convergence
from cyborg.core.convergence import Held
from cyborg.core.plain import integer

LOG = log.getLogger(__name__)


class HeldFile:
    """The file, and in memory what it has. One thread at a time uses it."""

    def __init__(self, path: Path, boot_id: str | Path = BOOT_ID) -> None:
        """Read what the last life of the agent left; ``boot_id`` is the file that names the boot.

        A file that cannot be used is put aside, with a warning, as if nothing had ever been wanted.
        """
        self._path = path
        self._boot = boot(boot_id)
        self._set_up: str | None = None  # in which boot the backends were
        self.revision, self.backends = self._read()

    @property
    def booted(self) -> bool:
        """Tell whether the host has booted since its backends were set up."""
        return bool(self.backends) and self._set_up != self._boot

    def set_up(self) -> None:
        """Hear that all backends are set up in this boot; the file has it after a write."""
        self._set_up = self._boot

    def write(self, revision: int, backends: Mapping[str, Held]) -> None:
        """Remember what is held as of a revision. Raises OSError; the memory has it even so."""
        if not self.booted:
            self.set_up()
        self.revision, self.backends = revision, dict(backends)
        body = {
            "boot_id": self._set_up,
            "revision": revision,
            "backends": [one.to_dict() for one in backends.values()],
        }
        durable.write(self._path, json.dumps(body).encode())

    def _read(self) -> tuple[int, dict[str, Held]]:
        try:
            body = json.loads(self._path.read_bytes())
            backends = [convergence.load(one) for one in body["backends"]]
            self._set_up = body.get("boot_id")
            return integer(body["revision"]), {one.wanted.backend: one for one in backends}
        except FileNotFoundError:
            return 0, {}
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as bad:
            then = "backends are as the configuration has them until the conductor is asked"
            durable.put_aside(self._path, bad, "The memory of wanted backends", then)
            return 0, {}
