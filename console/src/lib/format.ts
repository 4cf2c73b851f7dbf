// SPDX-License-Identifier: Apache-2.0
// Texts for people.
import type { Device } from "./types";

const UNITS: [limit: number, seconds: number, unit: Intl.RelativeTimeFormatUnit][] = [
  [60, 1, "second"],
  [3600, 60, "minute"],
  [86400, 3600, "hour"],
  [Infinity, 86400, "day"],
];
const RELATIVE = new Intl.RelativeTimeFormat("en", { numeric: "always", style: "narrow" });

export function ago(time: string, now: number): string {
  const seconds = Math.round((Date.parse(time) - now) / 1000);
  if (!Number.isFinite(seconds)) return time;
  const size = Math.abs(seconds);
  if (size < 5) return "now";
  for (const [limit, divisor, unit] of UNITS) {
    if (size < limit) return RELATIVE.format(Math.trunc(seconds / divisor), unit);
  }
  return time;
}

export function count(number: number, noun: string, nouns = `${noun}s`): string {
  return `${number.toLocaleString("en")} ${number === 1 ? noun : nouns}`;
}

export function shorten(text: string, length: number): string {
  return text.length <= length ? text : `${text.slice(0, Math.max(1, length - 1))}…`;
}

// "pending_agent" and "BindStarted" as words.
export function words(state: string): string {
  const spaced = state.replace(/[_-]/g, " ").replace(/([a-z])([A-Z])/g, "$1 $2");
  return spaced === spaced.toUpperCase() || / [A-Z]/.test(spaced) || /^[A-Z][a-z]/.test(spaced)
    ? spaced.toLowerCase()
    : spaced;
}

// Return why a device is not offered to Placement at all, null if it is.
export function reasonNotOffered(device: Device): string | null {
  if (device.placement !== null) return null;
  const info = JSON.parse(device.vendor_board_info) as Record<string, unknown> | null;
  const reason = info?.["not_offered"];
  return typeof reason === "string" ? reason : null;
}

// Return the state to show: a device that holds the root file system is no device with a problem.
export function stateOf(device: Device): string {
  return reasonNotOffered(device) === null ? device.state : "not_offered";
}

// The status that an agent or a backend reported last is not known to hold while the host is down.
export function reportedStatus(state: string, status: string): string {
  return state === "down" ? "UNKNOWN" : status;
}

const NO_MODEL = "miss model info"; // of the fake driver, as clients of the API expect it

export function modelOf(device: Device): string {
  if (device.model && device.model !== NO_MODEL) return device.model;
  const info = JSON.parse(device.std_board_info) as Record<string, unknown> | null;
  const product = info?.["product_id"];
  return typeof product === "string" ? `${device.vendor}:${product}` : device.vendor;
}

export type Tone = "good" | "busy" | "warn" | "bad" | "idle";

const TONES: Record<Tone, string[]> = {
  good: ["ready", "up", "enabled", "ok", "done", "attached", "Bound", "bound", "READY", "DONE",
    "in_sync", "healthy", "INSTALLED", "offered"],
  busy: ["pending", "in_progress", "waiting", "draining", "preparing", "programming", "attaching",
    "detaching", "BindStarted", "Deleting", "binding", "unbinding", "reserving", "cleaning",
    "RUNNING", "PENDING", "DISCOVERING", "dirty", "stale", "reserved", "pending_agent",
    "allocated"],
  warn: ["late", "disabled", "maintaining", "undeliverable", "setup_required", "reboot_required",
    "cordoned", "rolled_back", "skipped", "cancelled", "NOT_REPORTED", "UNKNOWN", "unknown",
    "withdrawing"],
  bad: ["down", "host_down", "unhealthy", "failing", "restore_failed", "failed", "error",
    "BindFailed", "UnbindFailed", "ERROR", "FAILED", "IMPORT_FAILED"],
  idle: ["not_offered", "withheld", "free", "Initial", "Unbound", "unbound", "absent"],
};

const TONE_OF = new Map(
  Object.entries(TONES).flatMap(([tone, states]) => states.map((s) => [s, tone as Tone])),
);

export function toneOf(state: string): Tone {
  return TONE_OF.get(state) ?? "idle";
}
