# SPDX-License-Identifier: Apache-2.0
"""Reading of the configuration, which the daemons and ``cyborg-dbsync`` do alike."""

import sys
from collections.abc import Sequence
from importlib import metadata

from oslo_config import cfg
from oslo_log import log

from cyborg.compat.oslo import set_up_logging
from cyborg.conf import options, register


def configure(
    program: str,
    groups: Sequence[options.Section],
    argv: Sequence[str] | None,
    arguments: Sequence[cfg.Opt] = (),
) -> cfg.ConfigOpts:
    """Return the configuration of a program with these sections, and set up its log.

    ``argv`` are the arguments of the command line, None for those of the process; ``arguments``
    are its options in addition to those of oslo.config. Raise Misconfigured, and errors of
    oslo.config.
    """
    conf = cfg.ConfigOpts()
    register(conf, groups)
    log.register_options(conf)
    conf.register_cli_opts(arguments)
    conf(
        sys.argv[1:] if argv is None else list(argv),
        project="cyborg",
        prog=program,
        version=metadata.version("cyborg"),
    )
    # After the files are read: they select the destination of the log.
    set_up_logging(conf, program)
    return conf
