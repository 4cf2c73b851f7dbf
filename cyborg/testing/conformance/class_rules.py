# SPDX-License-Identifier: Apache-2.0
"""Conformance rules for the metadata of a driver class and for its constructor."""

import ast
import inspect
import json
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from cyborg.core.drivers import registry
from cyborg.core.drivers.registry import LISTS, Kind, Option, Support
from cyborg.core.errors import CyborgError
from cyborg.core.inventory.device import Ability, DeviceType
from cyborg.drivers.base import ABILITY_INTERFACES, Driver
from cyborg.testing.conformance.environment import Environment, RuleViolated, rule

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_OPTION = re.compile(r"[a-z][a-z0-9_]*")
_SUBSYSTEM = re.compile(r"[a-z0-9_-]{1,64}")
_RESERVED = {"driver"}  # the entry point in the configuration section of every backend
_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "list": (list, tuple),
    "multi": (list, tuple),
}
_TEXTS = {"str", "list", "multi"}  # the kinds whose values can be a path
_PATHS = frozenset(
    {
        *("path", "file", "filename", "dir", "directory", "folder", "socket"),
        *("command", "cmd", "script", "executable", "binary", "exec"),
    }
)
_PATH_HELP = re.compile(
    r"\b(paths? (of|to)|(file|directory|folder|socket) (with|that|in which|to which)|"
    r"(command|script|program|executable) (to run|that|which)|command line)\b",
    re.IGNORECASE,
)
_SECRETS = frozenset({"password", "passwd", "secret", "token", "credential", "credentials"})
_ALLOWED_IMPORTS = ("cyborg.core", "cyborg.drivers", "cyborg.testing")
_FORBIDDEN_IMPORTS = ("oslo_", "stevedore", "sqlalchemy", "pecan", "wsme")


@rule("The driver is a subclass of Driver and implements discover().", "Driver")
def is_driver_class(env: Environment) -> None:
    """Check that the agent can load the class."""
    driver = env.subject.driver
    if not (inspect.isclass(driver) and issubclass(driver, Driver)):
        raise RuleViolated(f"{driver!r} is not a subclass of cyborg.drivers.base.Driver")
    if missing := sorted(getattr(driver, "__abstractmethods__", ())):
        raise RuleViolated(f"{driver.__name__} does not define {', '.join(missing)}")


@rule("name is the name of the entry point; version is not empty.", "Driver")
def has_name_and_version(env: Environment) -> None:
    """Check the name and the version, which operators see."""
    name = getattr(env.subject.driver, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RuleViolated(f"name is {name!r}; expected 1 to 64 of a-z 0-9 _ . -")
    entry_point = env.subject.entry_point
    if entry_point is not None and name != entry_point:
        raise RuleViolated(f"name is {name!r}, but the entry point is {entry_point!r}")
    version = getattr(env.subject.driver, "version", None)
    if not isinstance(version, str) or not version.strip() or not version.isprintable():
        raise RuleViolated(f"version is {version!r}; expected printable text")


@rule("OPTIONS have unique names, known kinds, help and defaults of their kind.", "Option")
def options_are_valid(env: Environment) -> None:
    """Check the options, from which the agent creates configuration options."""
    declared = getattr(env.subject.driver, "OPTIONS", None)
    if not isinstance(declared, tuple) or not all(isinstance(o, Option) for o in declared):
        raise RuleViolated("OPTIONS is not a tuple of Option")
    names = [o.name for o in declared]
    for option in declared:
        if not _OPTION.fullmatch(option.name) or option.name in _RESERVED:
            raise RuleViolated(f"invalid option name {option.name!r}")
        if names.count(option.name) > 1:
            raise RuleViolated(f"option {option.name} is declared twice")
        if option.kind not in get_args(Kind):
            raise RuleViolated(f"option {option.name} has the unknown kind {option.kind!r}")
        if not option.help.strip():
            raise RuleViolated(f"option {option.name} has no help")
        if option.default is None and option.kind in LISTS:
            raise RuleViolated(
                f"the default of option {option.name} is None; expected a {option.kind}"
            )
        # bool is a subclass of int.
        is_wrong_bool = isinstance(option.default, bool) and option.kind != "bool"
        if option.default is not None and (
            is_wrong_bool or not isinstance(option.default, _TYPES[option.kind])
        ):
            raise RuleViolated(
                f"the default of option {option.name}, {option.default!r}, is not "
                f"of the kind {option.kind}"
            )


@rule("Options for paths and commands are host_only, options for secrets are secret.", "Option")
def path_options_are_host_only(env: Environment) -> None:
    """Check that an option that is a path or a command is ``host_only``.

    The meaning of an option is guessed from its name, default and help.
    """
    # Otherwise a value set over the API could make the agent read, write or run a file.
    for option in getattr(env.subject.driver, "OPTIONS", ()):
        # Only options whose kind is text can hold a path.
        if option.kind not in _TEXTS:
            continue
        name_parts = frozenset(option.name.split("_"))
        defaults = option.default if option.kind in LISTS else [option.default]
        absolute = any(isinstance(value, str) and value.startswith("/") for value in defaults or ())
        is_path = absolute or name_parts & _PATHS or _PATH_HELP.search(option.help)
        if secret := name_parts & _SECRETS:
            if not option.secret:
                raise RuleViolated(f"option {option.name} is a {min(secret)} but not secret")
        elif is_path and not option.host_only:
            raise RuleViolated(f"option {option.name} is a path or a command but not host_only")


@rule("DEVICE_TYPE is a DeviceType or None; SUPPORT_LEVEL is a Support.", "Driver.SUPPORT_LEVEL")
def declares_type_and_support(env: Environment) -> None:
    """Check DEVICE_TYPE and SUPPORT_LEVEL, which operators see before they use the driver."""
    driver = env.subject.driver
    if not (driver.DEVICE_TYPE is None or isinstance(driver.DEVICE_TYPE, DeviceType)):
        raise RuleViolated(f"DEVICE_TYPE is {driver.DEVICE_TYPE!r}; expected a DeviceType or None")
    if not isinstance(driver.SUPPORT_LEVEL, Support):
        raise RuleViolated(f"SUPPORT_LEVEL is {driver.SUPPORT_LEVEL!r}; expected a Support")


@rule("The metadata of the class survive serialisation unchanged.", "Driver")
def metadata_is_serialisable(env: Environment) -> None:
    """Check that the agent can report the metadata of the class to the conductor."""
    # A round trip as the bus makes it: allow_nan=False, because JSON has no NaN.
    driver = env.subject.driver
    try:
        entry = registry.DriverEntry(
            name=driver.name,
            version=driver.version,
            type=driver.DEVICE_TYPE,
            support=driver.SUPPORT_LEVEL,
            options=driver.OPTIONS,
        )
        sent = registry.dump([entry])
        received = registry.dump(registry.load(json.loads(json.dumps(sent, allow_nan=False))))
    except (CyborgError, TypeError, ValueError, KeyError, AttributeError) as exc:
        raise RuleViolated(
            f"the metadata cannot be serialised: {type(exc).__name__}: {exc}"
        ) from exc
    for key, value in sent[0].items():
        # JSON does not distinguish lists and tuples.
        if json.dumps(value) != json.dumps(received[0][key]):
            raise RuleViolated(f"{key} was sent as {value!r}, received as {received[0][key]!r}")


@rule("An object can be created without any options.", "Driver.__init__")
def defaults_are_usable(env: Environment) -> None:
    """Check that a driver object can be created without options, as by ``enabled_drivers``."""
    call = env.try_create(options={})
    if call.failure is not None:
        raise RuleViolated(f"without options the constructor {call.failure}")


@rule("Any backend name is accepted and stored in backend.", "Driver.__init__")
def accepts_any_backend_name(env: Environment) -> None:
    """Check the constructor with several backend names."""
    # Operators choose these names: the driver must not expect its own name, or a form.
    for name in ("gen0", "Rack-3.left", "an_unknown_backend"):
        call = env.try_create(name)
        if call.failure is not None:
            raise RuleViolated(f"for the backend {name!r} the constructor {call.failure}")
        if getattr(call.value, "backend", None) != name:
            raise RuleViolated(
                f"for the backend {name!r} the attribute backend is {call.value.backend!r}"
            )


@rule("The constructor uses no file, process, socket or thread.", "Driver.__init__")
def constructor_has_no_side_effects(env: Environment) -> None:
    """Check that the constructor has no side effects."""
    # The agent calls it in its main thread: a device that hangs would hang the agent.
    call = env.try_create()
    if call.failure is not None:
        raise RuleViolated(call.failure)
    if call.effects:
        raise RuleViolated(call.effects[0])
    root = str(Path(env.subject.sysfs_root).absolute())
    if below := [p for p in call.reads if p == root or p.startswith(f"{root}/")]:
        raise RuleViolated(f"the constructor read {below[0]}; only discover() may do this")
    if call.leaked_threads:
        raise RuleViolated(f"the constructor started the thread {call.leaked_threads[0]}")


@rule("abilities is a frozenset of Ability, and each one is implemented.", "Driver.abilities")
def abilities_are_implemented(env: Environment) -> None:
    """Check that the methods of each ability exist."""
    # Otherwise the agent does not start.
    driver = env.create()
    abilities = env.must_succeed("abilities", lambda: driver.abilities)
    if not isinstance(abilities, frozenset) or not all(isinstance(a, Ability) for a in abilities):
        raise RuleViolated(f"abilities is {abilities!r}; expected a frozenset of Ability")
    for ability in sorted(abilities):
        if not isinstance(driver, ABILITY_INTERFACES[ability]):
            raise RuleViolated(
                f"the driver claims {ability} but does not implement "
                f"{ABILITY_INTERFACES[ability].__name__}"
            )


@rule("UEVENT_SUBSYSTEMS is a frozenset of kernel subsystems.", "Driver.UEVENT_SUBSYSTEMS")
def uevent_subsystems_are_valid(env: Environment) -> None:
    """Check that UEVENT_SUBSYSTEMS is a frozenset."""
    # The agent would read a string as letters.
    subsystems = getattr(env.subject.driver, "UEVENT_SUBSYSTEMS", None)
    if not isinstance(subsystems, frozenset):
        raise RuleViolated(f"UEVENT_SUBSYSTEMS is {subsystems!r}; expected a frozenset")
    if invalid := sorted(repr(s) for s in subsystems if not _is_subsystem(s)):
        raise RuleViolated(
            f"UEVENT_SUBSYSTEMS has {invalid[0]}; expected names as in /sys/bus and /sys/class"
        )


@rule("Of Cyborg it imports only cyborg.core and cyborg.drivers.", "the module", needs_class=True)
def imports_only_core_and_drivers(env: Environment) -> None:
    """Check the imports of each loaded module of the driver's package."""
    driver = env.subject.driver
    package = driver.__module__.partition(".")[0]
    # A driver of Cyborg shares the package with the services, so only its module is checked.
    checked = [driver.__module__]
    if package != "cyborg":
        # With the dots: also the package itself, and no other whose name begins with its name.
        checked = sorted(name for name in sys.modules if f"{name}.".startswith(f"{package}."))
    for name in checked:
        for imported in _imported_names(sys.modules[name]):
            is_cyborg = imported == "cyborg" or imported.startswith("cyborg.")
            is_internal = is_cyborg and not imported.startswith(_ALLOWED_IMPORTS)
            if is_internal or imported.startswith(_FORBIDDEN_IMPORTS):
                raise RuleViolated(f"{name} imports {imported}")


# The package of a vendor is read once for all checks of its driver.
@lru_cache(maxsize=256)
def _imported_names(module: ModuleType) -> Sequence[str]:
    """Return the names that the source of a module imports; none without a source."""
    found: list[str] = []
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return found  # compiled or created at run time
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _is_subsystem(name: Any) -> bool:
    return isinstance(name, str) and bool(_SUBSYSTEM.fullmatch(name))
