# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of this API."""
