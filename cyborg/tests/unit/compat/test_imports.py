# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
DEFER = "import sys; from cyborg.compat import imports; imports.defer_openstack()"


def run(*lines: str) -> list[str]:
    """Run a program in a new process; return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_deferred_openstack_has_the_configuration_without_the_connection() -> None:
    shown = "print(*[m for m in ('openstack.config', 'openstack.connection') if m in sys.modules])"
    assert run(DEFER, "from openstack import config, exceptions", shown) == ["openstack.config"]
    # Otherwise this part of cyborg/compat has no use any more.
    assert run("import sys, openstack.config", shown) == [
        "openstack.config",
        "openstack.connection",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "connect",
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in ("connection.Connection", "enable_logging", "config.OpenStackConfig")
        ),
    ],
)
def test_deferred_openstack_has_all_names(name: str) -> None:
    used = f"import openstack; print(openstack.{name}.__module__, openstack.{name}.__name__)"
    assert run(DEFER, used) == run(used)


def test_deferred_openstack_without_a_name_raises_attribute_error() -> None:
    program = f"{DEFER}\nimport openstack\ntry:\n openstack.none_such\n"
    assert run(f"{program}except AttributeError as exc:\n print(exc.name)") == ["none_such"]


def test_imported_openstack_is_kept() -> None:
    before = "import openstack; before = openstack"
    assert run(before, DEFER, "print(sys.modules['openstack'] is before)") == ["True"]


def test_deferred_openstack_that_is_not_installed_is_missing() -> None:
    hidden = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]"
    program = "try:\n import openstack.config\nexcept ModuleNotFoundError as exc:\n print(exc.name)"
    defer = "from cyborg.compat import imports"
    assert run(defer, hidden, "imports.defer_openstack()", program) == ["openstack"]


def test_session_works_without_osprofiler() -> None:
    pytest.importorskip("osprofiler")
    hide = "from cyborg.compat import imports; imports.hide_osprofiler()"
    shown = "from keystoneauth1 import session; print(session.osprofiler_web)"
    assert run(hide, shown) == ["None"]
    assert run(shown) != ["None"]
