// SPDX-License-Identifier: Apache-2.0
// Events in the order of their times, the newest first.
import type { ComponentChildren } from "preact";
import type { Tone } from "../lib/format";
import { Time } from "./parts";

export interface TimelineEvent {
  key: string;
  at: string;
  title: ComponentChildren;
  details?: ComponentChildren;
  tone?: Tone;
}

export function Timeline({ events, label }: { events: TimelineEvent[]; label: string }) {
  if (!events.length) return <p class="faint empty">No events.</p>;
  const sorted = [...events].sort((a, b) => b.at.localeCompare(a.at));
  return (
    <ol class="timeline" aria-label={label}>
      {sorted.map((event) => (
        <li key={event.key} class={event.tone ?? "idle"}>
          <div class="timeline-head">
            <strong>{event.title}</strong>
            <span class="faint">
              <Time at={event.at} />
            </span>
          </div>
          {event.details ? <div class="details">{event.details}</div> : null}
        </li>
      ))}
    </ol>
  );
}
