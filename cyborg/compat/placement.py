# SPDX-License-Identifier: Apache-2.0
"""Placement within a process: caches of what it computes for each request, and its flags."""

import functools
import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import sqlalchemy


def cache_computed_values() -> None:
    """Let Placement make each alias of a table, and check each JSON schema, once. Idempotent.

    SQLAlchemy copies all columns of a table into an alias. An alias is immutable, and its name
    identifies it in a statement. ``jsonschema.validate`` checks the schema itself before the body.
    Both together are a third of the CPU time of a request that changes something.
    """
    # Late imports: Placement is an optional dependency and slow to import.
    import jsonschema
    import placement.objects
    import placement.util

    # Copies of the modules with a function replaced: the modules themselves are used by others.
    patched_sqlalchemy = SimpleNamespace(**(vars(sqlalchemy) | {"alias": _make_alias}))
    for info in pkgutil.iter_modules(placement.objects.__path__, "placement.objects."):
        module: Any = importlib.import_module(info.name)
        if getattr(module, "sa", None) is sqlalchemy:
            module.sa = patched_sqlalchemy
    if placement.util.jsonschema is jsonschema:
        patched_jsonschema = SimpleNamespace(**(vars(jsonschema) | {"validate": _Validation()}))
        placement.util.jsonschema = patched_jsonschema


@functools.lru_cache(maxsize=256)
def _make_alias(table: sqlalchemy.Table, name: str) -> Any:
    # No default for the name: two anonymous aliases of a statement must differ.
    return sqlalchemy.alias(table, name)


class _Validation:
    """``jsonschema.validate`` with a validator for each schema, which are constants."""

    def __init__(self) -> None:
        self._validators: dict[int, Any] = {}

    def __call__(self, instance: Any, schema: Any, format_checker: Any) -> None:
        """Raise ValidationError unless the instance matches the schema."""
        from jsonschema import exceptions, validators

        # The validator keeps its schema, so that no other object gets this id.
        validator = self._validators.get(id(schema))
        if validator is None:
            validator_class = validators.validator_for(schema)
            validator_class.check_schema(schema)
            validator = validator_class(schema, format_checker=format_checker)
            self._validators[id(schema)] = validator
        error = exceptions.best_match(validator.iter_errors(instance))
        if error is not None:
            raise error


def reset_sync_flags() -> None:
    """Clear the flags, so that Placement writes traits and classes to the next database too."""
    # A late import: Placement is an optional dependency and slow to import.
    from placement.objects import resource_class, trait

    trait._TRAITS_SYNCED = False
    resource_class._RESOURCE_CLASSES_SYNCED = False
