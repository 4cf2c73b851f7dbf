# SPDX-License-Identifier: Apache-2.0
"""``cyborg-conductor``: the service that owns the database and syncs with Placement."""

import sys
from collections.abc import Sequence

from oslo_config import cfg
from oslo_service import backend

from cyborg import conf as options
from cyborg.cmd.configuration import configure
from cyborg.compat.oslo import set_up_logging
from cyborg.conductor.service import ConductorService
from cyborg.core.errors import Misconfigured
from cyborg.threads.heap import exclude_startup_objects


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    # Before the first import of oslo_service.service, which uses the backend that is set by then.
    backend.init_backend(backend.BackendType.THREADING)
    from oslo_service import service

    try:
        conf = configure("cyborg-conductor", options.CONDUCTOR_GROUPS, argv)
        # A check of the options, which connects to nothing. Before workers start: the launcher
        # would restart a failing worker for ever.
        ConductorService(conf).open()
    except (Misconfigured, cfg.Error) as exc:
        # On one line: a message of oslo.config may have several.
        sys.stderr.write(f"cyborg-conductor: {' '.join(str(exc).split())}\n")
        return 1

    class Worker(ConductorService, service.ServiceBase):  # type: ignore[misc]
        """A worker process of oslo.service; opens no connection before ``start``."""

        def start(self) -> None:
            """Start with the current options: after SIGHUP a new worker gets reloaded options."""
            set_up_logging(conf, "cyborg-conductor")
            super().start()
            exclude_startup_objects()

        def reset(self) -> None:
            """Do nothing on SIGHUP: the launcher starts a new worker."""

    service.launch(conf, Worker(conf), workers=conf.conductor.workers).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
