# SPDX-License-Identifier: Apache-2.0
"""``cyborg-agent``: discovers the accelerators of this host and reports them to the conductor.

SIGTERM and SIGINT stop it. SIGHUP reloads the options that may change at run time, and starts a
discovery.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence

from oslo_config import cfg

from cyborg import conf as options
from cyborg.agent.backends.factory import deny_host_work
from cyborg.agent.service import AgentService
from cyborg.cmd.configuration import configure
from cyborg.core import errors, log
from cyborg.rpc.client import make_conductor_client
from cyborg.rpc.transport import make_transport
from cyborg.threads.heap import exclude_startup_objects

LOG = log.get_logger(__name__)

CLOSE_TIMEOUT = 2.0  # seconds for the connections to the broker


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return the exit status."""
    try:
        conf = configure("cyborg-agent", options.AGENT_GROUPS, argv)
        share_configuration(conf)
        transport = make_transport(conf)
        service = AgentService(conf, make_conductor_client(transport, conf), transport)
        signals = _Signals(conf, service)
        # For a replay: before the first thread of a driver runs.
        deny_host_work(conf)
        service.start()
        exclude_startup_objects()
    except (errors.Misconfigured, cfg.Error) as exc:
        print(f"cyborg-agent: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    signals.wait()
    service.stop()
    # In a thread: an unreachable broker must not delay the exit.
    closing = threading.Thread(target=transport.cleanup, name="closing", daemon=True)
    closing.start()
    closing.join(CLOSE_TIMEOUT)
    return 0


def share_configuration(conf: cfg.ConfigOpts) -> None:
    """Make the configuration files known to oslo.privsep, which reads the global configuration."""
    cfg.CONF(
        [],
        project="cyborg",
        prog="cyborg-agent",
        default_config_files=conf.config_file,
        default_config_dirs=conf.config_dir,
    )


class _Signals:
    """Signal handling: signals arrive as bytes in a pipe, which the main thread reads."""

    def __init__(self, conf: cfg.ConfigOpts, service: AgentService) -> None:
        self._conf = conf
        self._service = service
        # Python runs signal handlers only when the main thread executes bytecode. If the main
        # thread waited for an event or a queue, a signal just before the wait could be lost.
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        # A full pipe has enough bytes to wake the main thread.
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                # It does nothing: the byte in the pipe is enough.
                signal.signal(number, lambda *_: None)

    def wait(self) -> None:
        """Handle signals; return at SIGTERM or SIGINT."""
        while set(os.read(self._read_fd, 64)) <= {signal.SIGHUP}:
            self._reload()

    def _reload(self) -> None:
        LOG.info("SIGHUP received, reloading the configuration")
        try:
            self._conf.mutate_config_files()
        except (cfg.Error, ValueError) as exc:
            LOG.error("Failed to reload the configuration, keeping the previous one: %s", exc)
        self._service.rediscover()


if __name__ == "__main__":
    sys.exit(main())
