# SPDX-License-Identifier: Apache-2.0
"""Library for programs that attach accelerators to guests: nova-compute, or the agent.

All arguments are plain values as the REST API shows them, and are checked completely: an invalid
one raises ``cyborg.core.errors.Invalid``, whose ``details['field']`` names the field. The library
does no I/O, except that it loads its plugins once.
"""

from cyborg.core.binding.request_groups import RequestGroup
from cyborg.os_acc.binding import BindParameters, build_patch, build_query, parse, to_request_groups
from cyborg.os_acc.devices import attach, detach, find_alias, get_config

__all__ = [
    "BindParameters",
    "RequestGroup",
    "attach",
    "build_patch",
    "build_query",
    "detach",
    "find_alias",
    "get_config",
    "parse",
    "to_request_groups",
]
