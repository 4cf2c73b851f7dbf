# SPDX-License-Identifier: Apache-2.0
"""Internal RPC bus: oslo.messaging with a contract of methods, plain values and size limits."""

import warnings

from oslo_service import backend

from cyborg.compat.imports import hide_eventlet

# oslo.messaging imports oslo.service, which uses eventlet unless a backend is set before, and
# futurist, which imports eventlet.
backend.register_backend_default_hook(lambda: backend.BackendType.THREADING)
hide_eventlet()
with warnings.catch_warnings():
    # It also imports a deprecated module of oslo.utils, or eventlet itself, which warn.
    warnings.simplefilter("ignore")
    import oslo_messaging  # noqa: F401
