# SPDX-License-Identifier: Apache-2.0
"""Replay of a captured host: the agent uses no device of the machine on which it runs."""

from pathlib import Path

from oslo_config import cfg

from cyborg.core.capture.faults import parse_fault
from cyborg.core.errors import Invalid, Misconfigured
from cyborg.core.log import get_logger
from cyborg.drivers.replay.files import load_capture
from cyborg.drivers.replay.host import ReplayedHost

LOG = get_logger(__name__)


def open_replay(conf: cfg.ConfigOpts) -> ReplayedHost | None:
    """Return the host of ``[agent] replay``; None if the agent manages its own machine.

    Raise Misconfigured if the capture or the faults are invalid. Raise it also if external drivers
    are enabled, because they run in their own processes and use the devices of this machine.
    """
    options = conf.agent
    if not options.replay:
        if options.replay_faults:
            raise _misconfigured("replay_faults", "found faults without [agent] replay")
        return None
    if options.external_driver_dir or options.external_drivers:
        raise _misconfigured("external_driver_dir", "external drivers cannot be replayed")
    try:
        faults = [parse_fault(text) for text in options.replay_faults]
    except Invalid as exc:
        raise _misconfigured("replay_faults", exc.message) from exc
    try:
        host = ReplayedHost(load_capture(Path(options.replay)), faults)
    except Invalid as exc:
        raise _misconfigured("replay", exc.message) from exc
    except OSError as exc:
        raise _misconfigured("replay", f"{options.replay}: {exc.strerror or exc}") from exc
    LOG.warning(
        "This agent replays a capture, its devices exist in no machine: %s",
        host.capture.source,
        host=conf.host,
    )
    return host


def deny_host_work(conf: cfg.ConfigOpts) -> None:
    """Make the privileged Python functions of this process fail if its agent replays a capture.

    Simulated drivers do not call these functions; this is an additional protection.
    """
    if conf.agent.replay:
        # Imported here: other agents do not need oslo.privsep until they have host work.
        from cyborg.drivers import privileged

        privileged.deny_calls("this process replays a capture ([agent] replay)")


def _misconfigured(option: str, problem: str) -> Misconfigured:
    return Misconfigured(f"[agent] {option}: {problem}", option=f"agent.{option}")
