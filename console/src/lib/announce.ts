// SPDX-License-Identifier: Apache-2.0
// Announcements for screen readers, and of what changed between two polls.
import { useEffect, useRef } from "preact/hooks";
import { createStore } from "./store";

export const announcement = createStore("");

export function announce(text: string): void {
  // A text that does not change is not read again.
  announcement.set(announcement.get() === text ? `${text} ` : text);
}

const MAX_CHANGES = 3;

// Announce the objects whose state changed; `states` maps their names to their states. `first` is
// announced with the first states: nothing may change afterwards.
export function useAnnounceChanges(
  scope: string,
  states: Map<string, string> | null,
  first: string | null = null,
): void {
  const last = useRef<{ scope: string; states: Map<string, string> } | null>(null);
  useEffect(() => {
    if (!states) return;
    const before = last.current;
    last.current = { scope, states };
    // Another page of a list is no change.
    if (!before || before.scope !== scope) {
      if (first) announce(first);
      return;
    }
    const changes = [...states].filter(
      ([name, state]) => before.states.has(name) && before.states.get(name) !== state,
    );
    if (!changes.length) return;
    const shown = changes.slice(0, MAX_CHANGES).map(([name, state]) => `${name}: ${state}`);
    const more = changes.length - shown.length;
    announce(shown.join(", ") + (more ? `, and ${more} more changes` : ""));
  });
}
