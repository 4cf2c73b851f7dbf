# SPDX-License-Identifier: Apache-2.0
"""Discovery and conformance of the driver."""

import pytest
from acme_accelerator.driver import AcmeDriver

from cyborg.core.errors import Misconfigured
from cyborg.testing.conformance.kit import Check, conformance


@pytest.mark.parametrize("check", conformance(AcmeDriver, {"count": 3}), ids=str)
def test_conformance(check: Check) -> None:
    """Run one test for each rule of the conformance kit."""
    check()


def test_discover_two_cards() -> None:
    """Check the addresses of the cards on the bus."""
    driver = AcmeDriver("cards", {"count": 2})
    assert [d.address for d in driver.discover()] == ["0000:5e:00.0", "0000:5f:00.0"]


def test_invalid_count_is_rejected() -> None:
    """Check that the error contains the option, the value and the expected value."""
    with pytest.raises(Misconfigured, match=r"\[cards\] count: found 99; expected 1 to 16"):
        AcmeDriver("cards", {"count": 99})
