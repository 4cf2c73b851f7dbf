# SPDX-License-Identifier: Apache-2.0
"""The command cyborg-agent: finds the accelerators of this host and tells the conductor.

SIGTERM and SIGINT end it. SIGHUP has it read its configuration again, as far as options may change
at run time, and discover at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from oslo_config import cfg
from oslo_log import log

import cyborg.conf
from cyborg.agent.service import AgentService
from cyborg.core.errors import Misconfigured
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.transport import make_transport

LOG = log.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal says to stop; return the exit status."""
    conf = cfg.ConfigOpts()
    cyborg.conf.register(conf, cyborg.conf.AGENT_GROUPS)
    log.register_options(conf)
    try:
        conf(sys.argv[1:] if argv is None else argv, project="cyborg", prog="cyborg-agent")
        log.setup(conf, "cyborg")
        transport = make_transport(conf)
        service = AgentService(conf, ConductorClient(transport, conf), transport)
        signals = _Signals(conf, service)
        service.start()
    except Misconfigured as bad:
        print(f"cyborg-agent: {bad.message}", file=sys.stderr)  # noqa: T201
        return 1
    except (cfg.Error, log.LogConfigError) as bad:
        print(f"cyborg-agent: {bad}", file=sys.stderr)  # noqa: T201
        return 1
    signals.wait()
    service.stop()
    _close(transport)
    return 0


class _Signals:
    """Signals as bytes in a pipe, which the main thread reads."""

    def __init__(self, conf: cfg.ConfigOpts, service: AgentService) -> None:
        self._conf = conf
        self._service = service
        # Python's own handlers run when the main thread next runs code: one that comes just before
        # it waits, for a queue or an event, is heard when the wait ends, that is never.
        self._came, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: None)

    def wait(self) -> None:
        """Do what signals ask for until one says to stop."""
        while set(os.read(self._came, 64)) <= {signal.SIGHUP}:
            self._reload()

    def _reload(self) -> None:
        LOG.info("SIGHUP: reading the configuration again")
        try:
            self._conf.mutate_config_files()
        except (cfg.Error, ValueError) as bad:
            LOG.error("The configuration stays as it was: %s", bad)
        self._service.rediscover()


def _close(transport: Any) -> None:
    """Close the connections; a broker that is away must not keep the process from ending."""
    closing = threading.Thread(target=transport.cleanup, name="closing", daemon=True)
    closing.start()
    closing.join(2.0)


if __name__ == "__main__":
    sys.exit(main())
