# SPDX-License-Identifier: Apache-2.0
"""Create the objects for the guests of this host, if the configuration enables them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oslo_config import cfg

from cyborg.agent.backends.backend import Backend
from cyborg.agent.guests.devices import GuestDevices
from cyborg.agent.guests.function_users import FunctionUsers, RecordFile
from cyborg.agent.guests.known_handles import make_check, make_pending_check, make_use_check
from cyborg.agent.guests.libvirt_domains import LibvirtDomains, find_library
from cyborg.agent.guests.libvirt_hypervisor import LibvirtHypervisor
from cyborg.agent.guests.reasserter import Reasserter
from cyborg.rpc.contract import ConductorAPI


@dataclass(frozen=True, slots=True)
class LiveGuests:
    """The running guests of this host; ``reasserter`` is started and stopped by its owner."""

    hypervisor: LibvirtHypervisor
    devices: GuestDevices
    reasserter: Reasserter


def make_guests(
    conf: cfg.ConfigOpts, epoch: str, conductor: ConductorAPI, backends: Sequence[Backend]
) -> LiveGuests | None:
    """Return the objects for running guests, None if live attach is disabled. Raise Misconfigured.

    A guest gets only devices of these backends.

    An agent that replays another host changes no guests, because the guests of this machine do not
    belong to the replayed host.
    """
    options = conf.libvirt
    if not options.live_attach or conf.agent.replay:
        return None
    hypervisor = LibvirtHypervisor(
        options.connection_uri,
        options.request_timeout,
        lambda: reasserter.notice_start(),  # noqa: PLW0108  it is created below
    )
    is_known = make_check(conf.host, backends)
    devices = GuestDevices(
        hypervisor,
        options.detach_timeout,
        is_known=is_known,
        is_pending=make_pending_check(backends),
        check_unused=make_use_check(backends),
    )
    reasserter = Reasserter(
        conf.host, epoch, conductor, devices, hypervisor.watch, options.reassert_interval
    )
    return LiveGuests(hypervisor, devices, reasserter)


def make_function_users(
    conf: cfg.ConfigOpts, conductor: ConductorAPI, path: Path, rediscover: Callable[[], object]
) -> FunctionUsers | None:
    """Return the reader of the devices of guests; None if they are not read.

    ``path`` is the file with what is known of them. ``rediscover`` starts a discovery of all
    backends.
    """
    options = conf.libvirt
    library = find_library() if options.read_domains else None
    if library is None:
        return None
    domains = LibvirtDomains(options.connection_uri, library)
    return FunctionUsers(conf.host, conductor, domains.read, RecordFile(path), rediscover)
