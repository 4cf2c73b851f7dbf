# SPDX-License-Identifier: Apache-2.0
"""The internal bus: oslo.messaging with a contract of named methods, plain values and bounds."""

import warnings

from oslo_service import backend

# oslo.messaging imports oslo.service, which would take eventlet unless told otherwise by then.
backend.register_backend_default_hook(lambda: backend.BackendType.THREADING)
with warnings.catch_warnings():
    # futurist imports eventlet where it finds it, and that complains of being used. It is not.
    warnings.simplefilter("ignore")
    import oslo_messaging  # noqa: F401
