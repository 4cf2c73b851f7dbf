# SPDX-License-Identifier: Apache-2.0
"""The domains of libvirt's driver ``test``, which all connections of this process share."""

from collections.abc import Iterator
from typing import Any

import pytest

from cyborg.agent.guests.hypervisor import find_library

URI = "test:///default"


def remove_domains(connection: Any) -> None:
    """Remove all domains except the one that the driver begins with."""
    for domain in connection.listAllDomains():
        if domain.name() == "test":
            continue
        is_running = domain.isActive()
        if domain.isPersistent():
            domain.undefine()
        if is_running:
            domain.destroy()


@pytest.fixture
def connection() -> Iterator[Any]:
    """Return a connection of libvirt without domains of other tests."""
    library: Any = find_library()
    assert library is not None, "the test requires libvirt_python"
    connection = library.open(URI)
    remove_domains(connection)
    yield connection
    remove_domains(connection)
    connection.close()
