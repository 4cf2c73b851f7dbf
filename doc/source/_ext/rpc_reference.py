# SPDX-License-Identifier: Apache-2.0
"""Sphinx directive ``rpc-reference``: the methods of the RPC contract, from the code."""

import inspect
import textwrap
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from cyborg.rpc.agent_api import AgentAPI
from cyborg.rpc.contract import (
    CONTRACTS,
    MAX_MESSAGE_BYTES,
    ConductorAPI,
    Contract,
    Method,
)

WIDTH = 116

CLIENTS = {"conductor": ConductorAPI, "agent": AgentAPI}
RECEIVERS = {
    "conductor": "Any conductor takes the call.",
    "agent": "Conductors call, and name the host whose agent is meant.",
}
AGENTS = "an agent"
CALLERS = dict.fromkeys(
    [
        "hello",
        "report",
        "discovery_done",
        "get_desired_backends",
        "get_guest_devices",
        "report_guest_devices",
        "find_function_owners",
        "report_active_partitions",
        "deactivate_partitions",
        "report_backend_outcomes",
        "job_done",
    ],
    AGENTS,
) | {"service_hello": "a conductor or an API"}


def text() -> str:
    """Return the sections of the methods."""
    return "\n".join(_contract(contract) for contract in CONTRACTS.values())


def _contract(contract: Contract) -> str:
    title = f"{contract.name} {contract.version}"
    parts = [title, "=" * len(title), "", RECEIVERS[contract.name], ""]
    for name, method in contract.methods.items():
        parts += [f"``{name}({', '.join(method.arguments)})``", *_about(contract, name, method), ""]
    return "\n".join(parts)


def _about(contract: Contract, name: str, method: Method) -> list[str]:
    client = getattr(CLIENTS[contract.name], name)
    caller = "a conductor" if contract.name == "agent" else CALLERS.get(name, "an API")
    facts = [f"Since {method.since}", f"from {caller}", f"at most {_size(method)}"]
    if method.optional:
        names = " and ".join(f"``{n}``" for n in method.arguments if n in method.optional)
        facts.append(f"{names} may be left out")
    facts += [f"``{arg}`` since {version}" for arg, version in method.argument_versions.items()]
    paragraphs = inspect.cleandoc(client.__doc__).split("\n\n")
    lines: list[str] = []
    for paragraph in [*paragraphs, f"{'; '.join(facts)}."]:
        plain = " ".join(paragraph.split())
        lines += [*textwrap.wrap(plain, WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    return [f"    {line}" if line else "" for line in lines[:-1]]


def _size(method: Method) -> str:
    return (
        "``[conductor] max_report_bytes``"
        if method.is_report
        else f"{MAX_MESSAGE_BYTES // 2**20} MiB"
    )


class RpcReference(SphinxDirective):
    """The sections of the methods."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return self.parse_text_to_nodes(text(), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("rpc-reference", RpcReference)
    return {"version": "1", "parallel_read_safe": True}
