# SPDX-License-Identifier: Apache-2.0
"""What the resources of the API work with."""

from dataclasses import dataclass

from oslo_config import cfg

from cyborg.db.reader import Reader
from cyborg.rpc.conductor import ConductorClient


@dataclass(frozen=True)
class Desk:
    """The read side of the database, and the conductor, who does whatever changes anything."""

    conf: cfg.ConfigOpts
    conductor: ConductorClient
    reader: Reader


class Resource:
    """The base of a noun's operations."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
