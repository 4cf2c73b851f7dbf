# SPDX-License-Identifier: Apache-2.0
"""The simulated NVML, for the real binding of nvidia-ml-py."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.drivers.kernel import nvml

SOURCE = Path(__file__).with_name("nvml_library.c")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Load the simulated library; the binding finds it by its name, because it is loaded."""
    pytest.importorskip(nvml.MODULE, reason="nvidia-ml-py is not installed")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    soname = "-Wl,-soname,libnvidia-ml.so.1"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        soname,
        "-o",
        str(path),
        str(SOURCE),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def library(built: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    built.set_broken(0)
    built.set_mig(0)
    built.set_bridged(1)
    built.set_module(0)
    built.set_vgpus(0)
    built.set_ignoring(0)
    built.set_lost(0)
    built.set_unprivileged(0)
    built.set_profiles(3)
    built.set_placing(1)
    yield built
    assert built.count_opened() == 0, "NVML must be closed, or the kernel cannot detach the GPU"
