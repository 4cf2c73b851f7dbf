# SPDX-License-Identifier: Apache-2.0
"""Mixes of vGPUs without mediated devices: the layouts of a card besides the whole card.

A mix has numbers of vGPUs of one or more types, such as ``2xH200X-70C`` or, in the heterogeneous
mode, ``1xH200X-70C+4xH200X-18C``. A mix of MIG-backed types needs the MIG mode, and the GPU
instances of the profiles of its types; any other mix needs that the card is not in MIG mode. A mix
can also have numbers of GPU instances by MIG profile, such as ``1x3g.71gb+4x1g.18gb``: then the
card and its rule decide which types use them.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

# The plus sign before an attribute of a MIG profile, as in 1g.18gb+me, separates nothing.
_SEPARATOR = re.compile(r"\+(?!me|gfx)")
_PART = re.compile(r"(?P<count>[1-9][0-9]{0,2})x(?P<type>.+)")
_PROFILE = re.compile(r"[1-9][0-9]*g\.[1-9][0-9]*gb([+-][a-z.]+)?")


@dataclass(frozen=True, slots=True)
class Mix:
    """Numbers of vGPUs by type, in the order of the option; a type has no product line.

    A mix of ``profiles`` has numbers of GPU instances by MIG profile, and no types until
    ``find_types``.
    """

    counts: Mapping[str, int]
    profiles: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of the layout."""
        parts = self.profiles or self.counts
        return "+".join(f"{count}x{part}" for part, count in parts.items())

    def find_types(self, types: Collection[str], facts: GpuFacts) -> "Mix":
        """Return the mix with the vGPUs that use its GPU instances if a rule enables these types.

        The first type of a profile applies, with as many vGPUs as the instances can have.
        """
        counts = dict(self.counts)
        for profile, count in self.profiles.items():
            type_ = next((t for t in types if facts.vgpu_profiles.get(t) == profile), None)
            if type_ is not None:
                counts[type_] = count * facts.vgpus_per_instance.get(type_, 1)
        return replace(self, counts=counts)

    def find_obstacle(self, types: Collection[str], facts: GpuFacts) -> str | None:
        """Return why a card cannot have the mix if a rule enables these types, or None.

        None does not mean that it can be created: placements of GPU instances are known only then,
        and those of vGPUs in the framebuffer have rules that NVML does not describe.
        """
        instances = self.instances(facts)
        for profile, count in instances.items():
            most = facts.mig_profiles.get(profile, 0)
            if count > most:
                known = ", ".join(facts.mig_profiles) or "none"
                return f"it can have {most} GPU instances of {profile}; its MIG profiles: {known}"
        backed = {facts.vgpu_profiles[t] for t in self.counts if t in facts.vgpu_profiles}
        if lacking := [profile for profile in instances if profile not in backed]:
            usable = [t for t, profile in facts.vgpu_profiles.items() if profile in lacking]
            known = ", ".join(usable) or "no type"
            return f"no rule enables a type of {', '.join(lacking)}; NVML lists {known}"
        if not self.counts.keys() <= set(types):
            return f"no rule enables {', '.join(t for t in self.counts if t not in types)}"
        if instances:
            # MIG-backed types exist in MIG mode only, where no other type can exist.
            is_mixed = not self.counts.keys() <= facts.vgpu_profiles.keys()
            return "its types are not all MIG-backed" if is_mixed else None
        if unknown := [t for t in self.counts if t not in facts.max_vgpus]:
            return f"NVML lists no type {', '.join(unknown)}"
        # In MIG mode, NVML does not say whether the card has the heterogeneous mode otherwise.
        unsupported = facts.heterogeneous is None and not facts.in_mig_mode
        if self.is_heterogeneous(facts) and unsupported:
            return "it has no mode for vGPUs of different sizes"
        # Each vGPU takes one part of the card, of as many parts as there can be vGPUs of its type.
        parts = sum(Fraction(n, facts.max_vgpus[type_]) for type_, n in self.counts.items())
        return "its framebuffer is too small" if parts > 1 else None

    def needs_mig(self, facts: GpuFacts) -> bool:
        """Return whether the mix has GPU instances, or MIG-backed types."""
        return bool(self.profiles) or not self.counts.keys().isdisjoint(facts.vgpu_profiles)

    def is_heterogeneous(self, facts: GpuFacts) -> bool:
        """Return whether the types, none of which is MIG-backed, have different framebuffers."""
        time_sliced = self.counts.keys() - facts.vgpu_profiles.keys()
        return len({facts.vgpu_memory.get(type_) for type_ in time_sliced}) > 1

    def instances(self, facts: GpuFacts) -> dict[str, int]:
        """Return the GPU instances that the mix has, or its MIG-backed types need, by profile."""
        if self.profiles:
            return dict(self.profiles)
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
    mixes: dict[str, Mix] = {}  # by trait
    for text in texts:
        mix = _parse_mix(text)
        try:
            trait = trait_of(mix.name)  # the length of a trait is limited
        except Invalid as exc:
            raise InvalidOption(text, f"fewer types: {exc.message}") from exc
        other = mixes.setdefault(trait, mix)
        if other.name != mix.name:
            raise InvalidOption(text, f"no mix with the same trait as {other.name}: {trait}")
    # Two layouts are no mixes: the whole card, and the current layout if it is none of these.
    if len(mixes) > MAX_LAYOUTS - 2:
        raise InvalidOption(len(mixes), f"at most {MAX_LAYOUTS - 2} mixes")
    return tuple(mixes.values())


def _parse_mix(text: str) -> Mix:
    """Parse one mix. Raise InvalidOption."""
    counts: dict[str, int] = {}
    for part in _SEPARATOR.split(text):
        found = _PART.fullmatch(part.strip())
        type_ = found["type"] if found else ""
        if found is None or not TYPE.fullmatch(type_) or short_name(type_) in counts:
            raise InvalidOption(
                text, "numbers of different vGPU types, such as 1xH200X-70C+4xH200X-18C"
            )
        counts[short_name(type_)] = int(found["count"])
    profiles = [name for name in counts if _PROFILE.fullmatch(name)]
    if not profiles:
        return Mix(counts)
    if len(profiles) < len(counts):
        raise InvalidOption(text, "either vGPU types or MIG profiles")
    return Mix({}, counts)


def trait_of(layout: str) -> str:
    """Return the trait of a layout, such as ``CUSTOM_GPU_LAYOUT_2XH200X_70C``."""
    return make_custom_name(f"GPU_LAYOUT_{layout}")
