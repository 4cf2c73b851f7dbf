# SPDX-License-Identifier: Apache-2.0
"""What the resources of the API work with."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from oslo_config import cfg
from oslo_utils import timeutils

from cyborg.core.liveness import Liveness, judge
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

    def judging(self) -> Callable[[datetime], Liveness]:
        """Return what tells how a service is by when it was heard last, as of one moment."""
        now, conf = timeutils.utcnow(), self.desk.conf.conductor
        return lambda seen: judge(seen, now, conf.hello_interval, conf.late_after, conf.down_after)
