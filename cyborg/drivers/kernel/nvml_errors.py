# SPDX-License-Identifier: Apache-2.0
"""Errors of NVML that are no failure of the GPU: it does not have what was asked for.

``nvmlReturn_t`` of the NVML API Reference Guide has the names, and ``pynvml.py`` of nvidia-ml-py
the numbers.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

# Numbers, because old releases of the binding lack some of the names.
_UNSUPPORTED = frozenset(
    (
        2,  # INVALID_ARGUMENT, such as of a link that the GPU does not have
        3,  # NOT_SUPPORTED
        4,  # NO_PERMISSION
        6,  # NOT_FOUND
        13,  # FUNCTION_NOT_FOUND, in an old library
        14,  # CORRUPTED_INFOROM, which stays: the GPU has facts outside it
        21,  # NO_DATA
        22,  # VGPU_ECC_NOT_SUPPORTED, while ECC is enabled
        25,  # ARGUMENT_VERSION_MISMATCH, in an old library
        26,  # DEPRECATED
    )
)


def is_unsupported(error: Any) -> bool:
    """Return whether an NVMLError says that the GPU, the library or the caller cannot do this.

    With all others, a GPU that was lost, or does not answer in time, would look like one that
    supports little.
    """
    return error.value in _UNSUPPORTED


@contextlib.contextmanager
def ignored_if_unsupported(nvml: Any) -> Iterator[None]:
    """Suppress an NVMLError of ``is_unsupported``; raise all others."""
    try:
        yield
    except nvml.NVMLError as exc:
        if not is_unsupported(exc):
            raise
