# SPDX-License-Identifier: Apache-2.0
"""Mixes of vGPUs without mediated devices: the layouts of a card besides the whole card.

A mix has numbers of vGPUs of one or more types, such as ``2xH200X-70C`` or, in the heterogeneous
mode, ``1xH200X-70C+4xH200X-18C``. A mix of MIG-backed types needs the MIG mode, and the GPU
instances of the profiles of its types; any other mix needs that the card is not in MIG mode.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import MAX_LAYOUTS
from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.kernel.nvml import GpuFacts, short_name
from cyborg.drivers.kernel.vgpu import TYPE

# Name of the layout without virtual functions.
WHOLE = "whole"

# Name of all layouts that the driver does not offer: another program has enabled the functions.
OTHER = "other"

_PART = re.compile(r"(?P<count>[1-9][0-9]{0,2})x(?P<type>.+)")


@dataclass(frozen=True, slots=True)
class Mix:
    """Numbers of vGPUs by type, in the order of the option; a type has no product line."""

    counts: Mapping[str, int]

    @property
    def name(self) -> str:
        """Return the name of the layout."""
        return "+".join(f"{count}x{type_}" for type_, count in self.counts.items())

    def is_possible(self, types: Collection[str], facts: GpuFacts) -> bool:
        """Return whether a card can have the mix if a rule enables these types.

        True does not mean that each order of creation succeeds: the placement of vGPUs in the
        framebuffer has rules that NVML does not describe.
        """
        if not self.counts.keys() <= set(types):
            return False
        if backed := self.counts.keys() & facts.vgpu_profiles.keys():
            # MIG-backed types, which exist in MIG mode only, where no other type can exist.
            instances = self.instances(facts)
            return len(backed) == len(self.counts) and all(
                count <= facts.mig_profiles.get(profile, 0) for profile, count in instances.items()
            )
        if not self.counts.keys() <= facts.max_vgpus.keys():
            return False
        # In MIG mode, NVML does not say whether the card has the heterogeneous mode otherwise.
        unsupported = facts.heterogeneous is None and not facts.in_mig_mode
        if self.is_heterogeneous(facts) and unsupported:
            return False
        # Each vGPU takes one part of the card, of as many parts as there can be vGPUs of its type.
        return sum(Fraction(n, facts.max_vgpus[type_]) for type_, n in self.counts.items()) <= 1

    def needs_mig(self, facts: GpuFacts) -> bool:
        """Return whether the types are MIG-backed."""
        return not self.counts.keys().isdisjoint(facts.vgpu_profiles)

    def is_heterogeneous(self, facts: GpuFacts) -> bool:
        """Return whether the types, none of which is MIG-backed, have different framebuffers."""
        time_sliced = self.counts.keys() - facts.vgpu_profiles.keys()
        return len({facts.vgpu_memory.get(type_) for type_ in time_sliced}) > 1

    def instances(self, facts: GpuFacts) -> dict[str, int]:
        """Return the GPU instances that the MIG-backed types need, by profile."""
        found: dict[str, int] = {}
        for type_, count in self.counts.items():
            if (profile := facts.vgpu_profiles.get(type_)) is not None:
                # vGPUs of several types do not share a GPU instance. The number is rounded up.
                needed = -(-count // facts.vgpus_per_instance.get(type_, 1))
                found[profile] = found.get(profile, 0) + needed
        return found

    def is_applied(self, facts: GpuFacts) -> bool:
        """Return whether the modes and GPU instances of a card are those of the mix."""
        if facts.mig_pending or facts.in_mig_mode != self.needs_mig(facts):
            return False
        if facts.present_instances != self.instances(facts):
            return False
        return not self.is_heterogeneous(facts) or facts.heterogeneous is True


def parse_mixes(texts: Sequence[str]) -> tuple[Mix, ...]:
    """Parse the mixes of the option ``vgpu_layouts``. Raise InvalidOption."""
    mixes: dict[str, Mix] = {}
    for text in texts:
        counts: dict[str, int] = {}
        for part in text.split("+"):
            found = _PART.fullmatch(part.strip())
            type_ = found["type"] if found else ""
            if found is None or not TYPE.fullmatch(type_) or short_name(type_) in counts:
                raise InvalidOption(
                    text, "numbers of different vGPU types, such as 1xH200X-70C+4xH200X-18C"
                )
            counts[short_name(type_)] = int(found["count"])
        mix = Mix(counts)
        try:
            trait_of(mix.name)  # the length of a trait is limited
        except Invalid as exc:
            raise InvalidOption(text, f"fewer types: {exc.message}") from exc
        mixes[mix.name] = mix
    # Two layouts are no mixes: the whole card, and the current layout if it is none of these.
    if len(mixes) > MAX_LAYOUTS - 2:
        raise InvalidOption(len(mixes), f"at most {MAX_LAYOUTS - 2} mixes")
    return tuple(mixes.values())


def trait_of(layout: str) -> str:
    """Return the trait of a layout, such as ``CUSTOM_GPU_LAYOUT_2XH200X_70C``."""
    return make_custom_name(f"GPU_LAYOUT_{layout}")
