# SPDX-License-Identifier: Apache-2.0
"""/v2/summary: the numbers of all objects of the cloud, and what needs attention."""

from cyborg.api.v2.summary.controller import Controller as Controller
