# SPDX-License-Identifier: Apache-2.0
"""One file a step. A released step never changes: what it makes, it spells out itself."""
