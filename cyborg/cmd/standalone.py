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
from cyborg.compat.oslo import set_up_logging
from cyborg.core.errors import CyborgError
from cyborg.threads.heap import exclude_startup_objects


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    args = _parser().parse_args(argv)
    stop_requested = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Under nohup, SIGHUP stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stop_requested.set())
    try:
        return _serve(args, stop_requested)
    except (CyborgError, cfg.Error, OSError) as exc:
        sys.stderr.write(f"cyborg-standalone: {' '.join(str(exc).split())}\n")
        return 1


def _serve(args: argparse.Namespace, stop_requested: threading.Event) -> int:
    """Run the stand-alone stack until a stop is requested; return the exit status."""
    state = Path(args.state_dir).expanduser().absolute()
    conf = _configuration(args, state)
    set_up_logging(conf, "cyborg-standalone")
    # A late import: it takes a second, which --help and invalid options should not cost.
    from cyborg.agent.backends.factory import deny_host_work
    from cyborg.standalone.stack import StandaloneStack

    deny_host_work(conf)
    stack = StandaloneStack(conf, state, report=_print)
    try:
        stack.start()
        exclude_startup_objects()
        _print(f"Placement listens on {stack.placement_endpoint} (X-Auth-Token: admin)")
        _print(f"API listens on {stack.endpoint}")
        if conf.api.console:
            _print(f"console: {stack.endpoint}/ui/")
        _print(f"ready: cyborg --os-auth-type none --os-endpoint {stack.endpoint} device-list")
        # A poll, since the kernel may deliver a signal to any thread, which does not wake this
        # one, and Python runs the handler only when this thread executes.
        while not stop_requested.wait(0.5):
            pass
        _print("stopping")
    finally:
        stack.stop()
    _print("stopped")
    # Otherwise the garbage collection at interpreter exit takes half a second.
    gc.freeze()
    return 0


def _configuration(args: argparse.Namespace, state: Path) -> cfg.ConfigOpts:
    """Return the configuration from files, options of the command and defaults."""
    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    levels = [f"{name}=WARNING" for name in ("alembic", "oslo_service.backend", "waitress")]
    log.set_defaults(default_log_levels=[*log.get_default_log_levels(), *levels])
    # Logs go to stderr, since stdout is for the messages of this command.
    conf.set_default("use_stderr", True)
    default_file = state / "cyborg.conf"
    files = args.config_file or ([str(default_file)] if default_file.exists() else [])
    config_args = [arg for file in files for arg in ("--config-file", file)]
    config_args += ["--debug"] if args.debug else []
    conf(config_args, project="cyborg", default_config_files=[], default_config_dirs=[])
    for name in ("listen", "port", "placement_port"):
        if (value := getattr(args, name)) is not None:
            conf.set_override(name, value, group="standalone")
    if args.host is not None:
        conf.set_override("host", args.host)
    _read_all(conf)
    return conf


def _read_all(conf: cfg.ConfigOpts) -> None:
    """Read every option, so that an invalid value fails now and not at its first use."""
    for section, section_options in options.list_opts():
        for option in section_options:
            # Options that an authentication plugin registers do not exist yet.
            with contextlib.suppress(cfg.NoSuchOptError, cfg.NoSuchGroupError):
                conf[option.dest] if section == "DEFAULT" else conf[section][option.dest]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cyborg-standalone",
        description="Run API, conductor, agent and an embedded Placement in one process, without "
        "authentication, for users of this machine only.",
    )
    add = parser.add_argument
    add("--version", action="version", version=metadata.version("cyborg"))
    add(
        "--config-file",
        action="append",
        metavar="FILE",
        help="read options from this file, such as [agent] enabled_backends; can be repeated. "
        "Default: cyborg.conf in the state directory, if it exists",
    )
    add(
        "--state-dir",
        default=_default_state(),
        metavar="DIR",
        help="directory of the databases (%(default)s)",
    )
    add("--listen", metavar="ADDRESS", help="loopback address, overrides [standalone] listen")
    add(
        "--port",
        type=_port,
        help="port of the API, 0 for any free port; overrides [standalone] port",
    )
    add("--placement-port", type=_port, help="port of Placement, 0 for any free port")
    add("--host", metavar="NAME", help="name of this host, overrides [DEFAULT] host")
    add("--debug", action="store_true", help="log at debug level, on stderr")
    return parser


def _default_state() -> str:
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(home).expanduser() / "cyborg")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: expected 0 to 65535")
    return int(text)


def _print(line: str) -> None:
    sys.stdout.write(f"cyborg-standalone: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
