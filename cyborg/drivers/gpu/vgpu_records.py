# SPDX-License-Identifier: Apache-2.0
"""What the memory of the gpu driver has about vGPUs without mediated devices.

It has the type of each virtual function that the driver prepared, these functions by card, the mix
of each card, whether a change of the layout did not end, and the vGPUs that such a change tried.
"""

from collections.abc import Callable

from cyborg.core.errors import DriverFailed
from cyborg.drivers.base import Memory


class VgpuRecords:
    """Records about cards and their virtual functions, by address.

    ``memory`` returns the memory of the driver. Methods that store raise DriverFailed, and store
    nothing, if a restart of the agent would lose the record; those that remove a record only if
    they say so.
    """

    def __init__(self, memory: Callable[[], Memory]) -> None:
        self._memory = memory

    def prepared_type(self, function: str) -> str | None:
        """Return the type with which a virtual function was prepared; None if released."""
        return self._memory().get(_key(function))

    def add_prepared(self, card: str, function: str, type_: str) -> None:
        """Store the type of a virtual function of a card that is being prepared."""
        # While the function is missing, only this says of which card it is. It is stored first:
        # each function with a type is among those of its card.
        self._store(_functions_key(card), ",".join(sorted(self._functions_of(card) | {function})))
        self._store(_key(function), type_)

    def put_written(self, function: str, type_id: int) -> None:
        """Store the id of the type that a virtual function got."""
        self._memory().put(_id_key(function), str(type_id))

    def written_id(self, function: str) -> str | None:
        """Return the id of the type that a virtual function got; None if it is unknown."""
        return self._memory().get(_id_key(function))

    def remove_prepared(self, card: str, function: str) -> None:
        """Remove the type of a virtual function. Raise DriverFailed if a restart reverts this."""
        memory = self._memory()
        if not memory.put(_key(function), None):
            raise make_storage_error(function)
        memory.put(_id_key(function), None)
        # An address that is left here has no type, and no effect.
        left = ",".join(sorted(self._functions_of(card) - {function}))
        memory.put(_functions_key(card), left or None)

    def prepared_of(self, card: str) -> dict[str, str]:
        """Return the types of the vGPUs of a card that servers have, by virtual function.

        A function can be missing, such as after a boot of the host.
        """
        return {
            name: type_
            for name in sorted(self._functions_of(card))
            if (type_ := self.prepared_type(name)) is not None
        }

    def layout_of(self, card: str) -> str | None:
        """Return the name of the mix that was applied to a card; None for the whole card."""
        return self._memory().get(_layout_key(card))

    def put_layout(self, card: str, mix: str | None) -> None:
        """Store which mix a card has, or that it has none."""
        self._store(_layout_key(card), mix)

    def is_changing(self, card: str) -> bool:
        """Return whether the layout of a card is being changed, or a change did not end."""
        return self._memory().get(_change_key(card)) is not None

    def begin_change(self, card: str) -> None:
        """Store that the layout of a card is being changed."""
        self._store(_change_key(card), "1")

    def end_change(self, card: str) -> None:
        """Store that the change of the layout of a card has ended."""
        self._memory().put(_change_key(card), None)

    def tried_type(self, function: str) -> str | None:
        """Return the type of which a change tries a vGPU at a function; None without any."""
        return self._memory().get(_try_key(function))

    def put_tried(self, function: str, type_: str) -> None:
        """Store of which type a change tries a vGPU at a function."""
        self._store(_try_key(function), type_)

    def remove_tried(self, function: str) -> None:
        """Store that a function has no vGPU any more that a change tried."""
        self._memory().put(_try_key(function), None)

    def _functions_of(self, card: str) -> set[str]:
        return set((self._memory().get(_functions_key(card)) or "").split(",")) - {""}

    def _store(self, key: str, text: str | None) -> None:
        memory = self._memory()
        previous = memory.get(key)
        if not memory.put(key, text):
            memory.put(key, previous)
            raise make_storage_error(key)


def _key(function: str) -> str:
    return f"vgpu {function}"


def _id_key(function: str) -> str:
    return f"vgpu id {function}"


def _try_key(function: str) -> str:
    return f"vgpu tried {function}"


def _functions_key(card: str) -> str:
    return f"vgpu functions {card}"


def _change_key(card: str) -> str:
    return f"vgpu change {card}"


def _layout_key(card: str) -> str:
    return f"vgpu layout {card}"


def make_storage_error(subject: str) -> DriverFailed:
    """Return the error of a record about a card or a function that a restart would lose."""
    return DriverFailed(
        f"the change of {subject} cannot be recorded: free space in the state_path of the agent, "
        "and make it writable"
    )
