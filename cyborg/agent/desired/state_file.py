# SPDX-License-Identifier: Apache-2.0
"""Desired and applied state of this host's backends, in a file that the restarted agent reads.

The agent then starts the same backends even if it cannot reach a conductor. The file also has the
boot id of the host, because a reboot undoes the setup of the backends.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from cyborg.agent import atomic_file
from cyborg.agent.jobs.checkpoint import BOOT_ID, read_boot_id
from cyborg.core.drivers.reconcile import BackendRecord
from cyborg.core.log import get_logger
from cyborg.core.validation import integer

LOG = get_logger(__name__)


class StateFile:
    """The file and its content in memory. Not thread-safe."""

    def __init__(self, path: Path, boot_id: str | Path = BOOT_ID) -> None:
        """Read the file; ``boot_id`` is the path of the file with the host's boot id.

        A malformed file is quarantined, with a warning, and treated as empty.
        """
        self.path = path
        self._boot_id = read_boot_id(boot_id)
        self._setup_boot: str | None = None  # boot in which the backends were set up
        self.generation, self.backends = self._read()

    @property
    def rebooted_since_setup(self) -> bool:
        """Return whether the host has rebooted since its backends were set up."""
        return bool(self.backends) and self._setup_boot != self._boot_id

    def record_setup(self) -> None:
        """Record that all backends are set up in this boot; ``write`` persists it."""
        self._setup_boot = self._boot_id

    def write(self, generation: int, backends: Mapping[str, BackendRecord]) -> None:
        """Store the backends of a generation in memory, then in the file. Raise OSError."""
        if not self.rebooted_since_setup:
            self.record_setup()
        self.generation, self.backends = generation, dict(backends)
        body = {
            "boot_id": self._setup_boot,
            "generation": generation,
            "backends": [record.to_dict() for record in backends.values()],
        }
        atomic_file.atomic_write(self.path, json.dumps(body).encode())

    def _read(self) -> tuple[int, dict[str, BackendRecord]]:
        failure: Exception
        try:
            body = json.loads(self.path.read_bytes())
            backends = [BackendRecord.from_dict(item) for item in body["backends"]]
            self._setup_boot = body.get("boot_id")
            return integer(body["generation"]), {
                record.desired.backend: record for record in backends
            }
        except FileNotFoundError:
            return 0, {}
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as exc:
            failure = exc
        consequence = "backends follow the configuration file until the conductor is reached"
        atomic_file.quarantine(self.path, failure, "The file of desired backends", consequence)
        return 0, {}
