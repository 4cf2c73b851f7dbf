# SPDX-License-Identifier: Apache-2.0
from cyborg.core.inventory.device_state import FACTS
from cyborg.db.deployables import facts


def test_columns_and_conditions_are_the_facts_of_core() -> None:
    assert {*facts.COLUMNS, "host_down"} == {*facts.CONDITIONS, "host_down"} == set(FACTS)
