# SPDX-License-Identifier: Apache-2.0
"""The uses of functions by a host that drivers find: how each begins and ends, and its reason."""

from collections.abc import Sequence

from cyborg.tests.unit.drivers.host_use.device_uses import DEVICE_USES
from cyborg.tests.unit.drivers.host_use.disk_uses import DISK_USES
from cyborg.tests.unit.drivers.host_use.network_uses import NETWORK_USES
from cyborg.tests.unit.drivers.host_use.steps import Use

USES: Sequence[Use] = (*NETWORK_USES, *DISK_USES, *DEVICE_USES)
