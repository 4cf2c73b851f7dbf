# SPDX-License-Identifier: Apache-2.0
"""Code that uses private names of libraries: a new release of a library may remove them."""

from collections.abc import Mapping

# A test compares these with constraints.txt, so that an upgrade needs a look at each use.
# The version of each library with which this package was last checked.
CHECKED: Mapping[str, str] = {
    "amqp": "5.4.2",
    "keystonemiddleware": "13.0.1",
    "kombu": "5.7.0",
    "openstack-placement": "16.0.0",
    "oslo.limit": "2.12.0",
    "oslo.log": "8.3.2",
    "oslo.messaging": "18.3.1",
    "oslo.policy": "6.0.1",
    "pecan": "1.8.0",
    "PyMySQL": "1.2.4",
    "SQLAlchemy": "2.1.9",
}
