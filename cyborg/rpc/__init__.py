# SPDX-License-Identifier: Apache-2.0
"""Internal RPC bus: oslo.messaging with a contract of methods, plain values and size limits."""

import warnings

from oslo_service import backend

# oslo.messaging imports oslo.service, which uses eventlet unless a backend is set before.
backend.register_backend_default_hook(lambda: backend.BackendType.THREADING)
with warnings.catch_warnings():
    # futurist imports eventlet if it is installed, which warns about its use. It is not used here.
    warnings.simplefilter("ignore")
    import oslo_messaging  # noqa: F401
