# SPDX-License-Identifier: Apache-2.0
"""What the driver finds, and that it keeps every rule of the contract."""

import pytest
from acme_accelerator.driver import AcmeDriver

from cyborg.core.errors import Misconfigured
from cyborg.fixtures.driver_conformance import Check, conformance


@pytest.mark.parametrize("check", conformance(AcmeDriver, {"count": 3}), ids=str)
def test_conformance(check: Check) -> None:
    """Each rule is a test of its own."""
    check()


def test_two_cards() -> None:
    """The addresses are those that the cards have on the bus."""
    driver = AcmeDriver("cards", {"count": 2})
    assert [d.address for d in driver.discover()] == ["0000:5e:00.0", "0000:5f:00.0"]


def test_a_count_that_cannot_be() -> None:
    """The message says where, what was found and what is expected."""
    with pytest.raises(Misconfigured, match=r"\[cards\] count: found 99; expected 1 to 16"):
        AcmeDriver("cards", {"count": 99})
