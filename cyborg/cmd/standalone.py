# SPDX-License-Identifier: Apache-2.0
"""``cyborg-standalone``: the whole service in one process, for one machine and its owner."""

import argparse
import contextlib
import gc
import os
import signal
import sys
import threading
from importlib import metadata
from pathlib import Path

from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.conf import opts
from cyborg.core.errors import CyborgError


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    args = _parser().parse_args(argv)
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Under nohup SIGHUP is ignored and stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: told.set())
    try:
        return _serve(args, told)
    except (CyborgError, cfg.Error, OSError) as bad:
        sys.stderr.write(f"cyborg-standalone: {' '.join(str(bad).split())}\n")
        return 1


def _serve(args: argparse.Namespace, told: threading.Event) -> int:
    state = Path(args.state_dir).expanduser().absolute()
    conf = _configuration(args, state)
    log.setup(conf, "cyborg")
    # Late: --help and a wrong option should not wait for a second of imports.
    from cyborg.standalone.stack import StandaloneStack

    stack = StandaloneStack(conf, state, say=_say)
    try:
        stack.start()
        _say(f"Placement listens on {stack.placement_endpoint} (X-Auth-Token: admin)")
        _say(f"API listens on {stack.endpoint}")
        _say(f"ready: cyborg --os-auth-type none --os-endpoint {stack.endpoint} device-list")
        # The kernel may give a signal to any thread, which does not wake this one: its handler runs
        # when this thread next looks.
        while not told.wait(0.5):
            pass
        _say("stopping")
    finally:
        stack.stop()
    _say("stopped")
    # Or the interpreter looks for garbage among all it has, for half a second, before it ends.
    gc.freeze()
    return 0


def _configuration(args: argparse.Namespace, state: Path) -> cfg.ConfigOpts:
    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    quiet = [f"{name}=WARNING" for name in ("alembic", "oslo_service.backend", "waitress")]
    log.set_defaults(default_log_levels=[*log.get_default_log_levels(), *quiet])
    # Standard output is for what this command says itself.
    conf.set_default("use_stderr", True)
    usual = state / "cyborg.conf"
    files = args.config_file or ([str(usual)] if usual.exists() else [])
    words = [word for file in files for word in ("--config-file", file)]
    words += ["--debug"] if args.debug else []
    conf(words, project="cyborg", default_config_files=[], default_config_dirs=[])
    for name in ("listen", "port", "placement_port"):
        if (value := getattr(args, name)) is not None:
            conf.set_override(name, value, group="standalone")
    if args.host is not None:
        conf.set_override("host", args.host)
    _read_all(conf)
    return conf


def _read_all(conf: cfg.ConfigOpts) -> None:
    """Raise for a value that does not parse now, not when its option is first needed."""
    for section, declared in opts.list_opts():
        for option in declared:
            # What only an authentication plug-in registers is not there yet.
            with contextlib.suppress(cfg.NoSuchOptError, cfg.NoSuchGroupError):
                conf[option.dest] if section == "DEFAULT" else conf[section][option.dest]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cyborg-standalone",
        description="Run API, conductor, agent and an embedded Placement in one process, without "
        "authentication, for the users of this machine alone.",
    )
    add = parser.add_argument
    add("--version", action="version", version=metadata.version("cyborg"))
    add(
        "--config-file",
        action="append",
        metavar="FILE",
        help="read options from this file, such as [agent] enabled_backends; may be repeated. "
        "Default: cyborg.conf in the state directory, if it is there",
    )
    add(
        "--state-dir",
        default=_default_state(),
        metavar="DIR",
        help="where the databases are kept (%(default)s)",
    )
    add("--listen", metavar="ADDRESS", help="loopback address, overrides [standalone] listen")
    add("--port", type=_port, help="port of the API, 0 for any; overrides [standalone] port")
    add("--placement-port", type=_port, help="port of Placement, 0 for any")
    add("--host", metavar="NAME", help="the name of this host, overrides [DEFAULT] host")
    add("--debug", action="store_true", help="log what happens, on stderr")
    return parser


def _default_state() -> str:
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(home).expanduser() / "cyborg")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: expected 0 to 65535")
    return int(text)


def _say(line: str) -> None:
    sys.stdout.write(f"cyborg-standalone: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
