# SPDX-License-Identifier: Apache-2.0
"""Logging of oslo.log under the name of the command.

oslo.log names the file in ``log_dir``, and the lines in syslog and the journal, after the file of
the outermost frame: ``threading.py`` in a worker of the conductor, ``<frozen
importlib._bootstrap>`` under uWSGI.
"""

from oslo_config import cfg
from oslo_log import handlers, log

from cyborg.core.errors import Misconfigured


def set_up_logging(conf: cfg.ConfigOpts, program: str) -> None:
    """Set up the logging of this process, whose name is ``program``, such as ``cyborg-api``.

    Call it again after a reload of the options. Raise Misconfigured if a destination of the log
    cannot be opened.
    """
    handlers._get_binary_name = lambda: program
    try:
        log.setup(conf, "cyborg")
    except (OSError, RuntimeError, log.LogConfigError) as exc:
        raise Misconfigured(
            f"cannot open the log that log_dir, log_file, log_config_append, use_journal or "
            f"use_syslog of [DEFAULT] select: {exc}",
            option="[DEFAULT] log_dir",
        ) from exc
