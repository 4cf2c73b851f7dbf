# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of critical paths, one module each; ``tools/bench`` runs them."""
