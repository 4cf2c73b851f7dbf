# SPDX-License-Identifier: Apache-2.0
"""``cyborg-conductor``: the service that owns the database and syncs with Placement."""

import sys
from collections.abc import Sequence
from importlib import metadata

from oslo_config import cfg
from oslo_log import log
from oslo_service import backend

from cyborg import conf as options
from cyborg.conductor.service import ConductorService
from cyborg.core.errors import Misconfigured


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    # Before the first import of oslo_service.service, which takes the backend that it finds.
    backend.init_backend(backend.BackendType.THREADING)
    from oslo_service import service

    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    try:
        conf(
            sys.argv[1:] if argv is None else list(argv),
            project="cyborg",
            prog="cyborg-conductor",
            version=metadata.version("cyborg"),
        )
        log.setup(conf, "cyborg")
        # Here, where it can still be refused; a worker that fails would be started for ever.
        ConductorService(conf).open()
    except (Misconfigured, cfg.Error) as bad:
        sys.stderr.write(f"cyborg-conductor: {' '.join(str(bad).split())}\n")
        return 1

    class Worker(ConductorService, service.ServiceBase):  # type: ignore[misc]
        """What oslo.service forks: nothing is connected before ``start``."""

        def reset(self) -> None:
            """Do nothing on SIGHUP: the launcher starts a fresh worker."""

    service.launch(conf, Worker(conf), workers=conf.conductor.workers).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
