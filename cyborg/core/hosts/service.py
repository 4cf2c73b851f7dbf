# SPDX-License-Identifier: Apache-2.0
"""Names of the service binaries, as the services table and the REST API have them."""

AGENT = "cyborg-agent"
CONDUCTOR = "cyborg-conductor"
API = "cyborg-api"
