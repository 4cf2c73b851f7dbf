# SPDX-License-Identifier: Apache-2.0
"""Instances of Nova: what its notifications mean for the ARQs of an instance."""
