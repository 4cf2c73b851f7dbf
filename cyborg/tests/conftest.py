# SPDX-License-Identifier: Apache-2.0
"""What every test may use."""

import importlib.util

FIXTURES = ("guard", "databases", "broker", "stack", "nova", "keystone_cloud")

pytest_plugins = [
    name
    for name in (f"cyborg.fixtures.{noun}" for noun in FIXTURES)
    if importlib.util.find_spec(name)
]
