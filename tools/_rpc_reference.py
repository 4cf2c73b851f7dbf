# SPDX-License-Identifier: Apache-2.0
"""Writes the methods of the internal contract into its page, from the code that declares them.

``python tools/_rpc_reference.py`` writes what stands between the two marks of
``doc/source/contributor/rpc.rst``; a test fails while that is not what the code says.
"""

import inspect
import textwrap
from pathlib import Path

from cyborg.rpc.agent import AgentClient
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.contract import CONTRACTS, OTHER_BYTES, Contract, Method

PAGE = Path(__file__).parents[1] / "doc" / "source" / "contributor" / "rpc.rst"
BEGIN = ".. what follows is written by tools/_rpc_reference.py\n"
END = ".. here ends what is written by tools/_rpc_reference.py\n"
WIDTH = 116

CLIENTS = {"conductor": ConductorClient, "agent": AgentClient}
WHO = {
    "conductor": "Any conductor takes the call.",
    "agent": "Conductors call, and name the host whose agent is meant.",
}
AGENTS = "an agent"
CALLERS = dict.fromkeys(
    ["hello", "report", "discovery_done", "backends_wanted", "backends_applied", "job_done"], AGENTS
) | {"service_hello": "a conductor or an API"}


def text() -> str:
    """Return the part of the page that the code decides, without its marks."""
    return "\n".join(_contract(contract) for contract in CONTRACTS.values())


def _contract(contract: Contract) -> str:
    title = f"{contract.name} {contract.version}"
    parts = [title, "=" * len(title), "", WHO[contract.name], ""]
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
    facts += [f"``{arg}`` since {version}" for arg, version in method.later.items()]
    paragraphs = inspect.cleandoc(client.__doc__).split("\n\n")
    lines: list[str] = []
    for paragraph in [*paragraphs, f"{'; '.join(facts)}."]:
        plain = " ".join(paragraph.split())
        lines += [*textwrap.wrap(plain, WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    return [f"    {line}" if line else "" for line in lines[:-1]]


def _size(method: Method) -> str:
    return "``[conductor] max_report_bytes``" if method.report else f"{OTHER_BYTES // 2**20} MiB"


def written(page: str) -> str:
    """Return a page with the part that the code decides written anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
