// SPDX-License-Identifier: Apache-2.0
// Polling: at an interval while the page is visible, and less often while requests fail.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError, get } from "./api";
import { sessionStore, signOut } from "./session";
import { createStore } from "./store";

const MAX_INTERVAL = 60_000;

export interface Live {
  updatedAt: number | null; // milliseconds since 1970 of the last success
  failing: boolean;
  outage: string; // which component does not answer, while requests fail
  paused: boolean;
}

export const liveStore = createStore<Live>({ updatedAt: null, failing: false, outage: "", paused: false });

export interface Polled<T> {
  data: T | null;
  error: ApiError | null;
  refresh: () => void;
}

// Double the interval with each failure, and spread the clients of an API that comes back.
export function backOff(interval: number, failures: number, random = Math.random()): number {
  if (!failures) return interval;
  return Math.min(interval * 2 ** failures, MAX_INTERVAL) * (0.75 + random / 2);
}

interface HealthDocument {
  reason: string;
  database: string;
  conductor: string;
}

// Ask the API, whose health check needs neither a token nor the database, which component is away.
async function findOutage(error: ApiError): Promise<string> {
  if (error.status === 0) return "The API does not answer.";
  const health = await readHealth();
  if (health === null) return "The API does not answer its health check.";
  if (health.database === "unavailable") return `The database does not answer the API: ${health.reason}.`;
  if (health.conductor === "unavailable") return "No conductor answers the API.";
  return error.message;
}

async function readHealth(): Promise<HealthDocument | null> {
  try {
    return await get<HealthDocument>("healthcheck");
  } catch (failure) {
    const body = failure instanceof ApiError ? failure.body : "";
    try {
      return JSON.parse(body) as HealthDocument; // unhealthy: 503 with the document
    } catch {
      return null;
    }
  }
}

// Read `path` now and every `interval` milliseconds; null reads nothing, 0 reads once.
export function usePoll<T>(path: string | null, interval: number): Polled<T> {
  const [state, setState] = useState<{ path: string | null; data: T | null; error: ApiError | null }>(
    { path, data: null, error: null },
  );
  const wake = useRef<() => void>(() => undefined);

  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    let failures = 0;
    let running = false;
    let again = false;

    async function read(): Promise<void> {
      if (running) {
        again = true;
        return;
      }
      clearTimeout(timer);
      running = true;
      try {
        const data = await get<T>(path as string, {}, abort.signal);
        failures = 0;
        setState({ path, data, error: null });
        liveStore.set({ updatedAt: Date.now(), failing: false, outage: "", paused: document.hidden });
      } catch (error) {
        if (abort.signal.aborted) return;
        failures += 1;
        const known = error instanceof ApiError ? error : new ApiError(0, String(error));
        if (known.status === 401 && sessionStore.get().session?.auth === "keystone") {
          signOut("The token is no longer valid.");
          return;
        }
        // The last data stay visible.
        setState((last) => ({ path, data: last.path === path ? last.data : null, error: known }));
        if (known.status === 0 || known.status >= 500) {
          liveStore.set({ ...liveStore.get(), failing: true });
          const outage = await findOutage(known);
          if (liveStore.get().failing) liveStore.set({ ...liveStore.get(), outage });
        }
      } finally {
        running = false;
      }
      if (again) {
        again = false;
        return read();
      }
      schedule();
    }

    function schedule(): void {
      if (!interval || abort.signal.aborted || document.hidden) return;
      timer = setTimeout(() => void read(), backOff(interval, failures));
    }

    function onVisibility(): void {
      clearTimeout(timer);
      if (document.hidden) liveStore.set({ ...liveStore.get(), paused: true });
      else if (interval) void read();
    }

    wake.current = () => void read();
    document.addEventListener("visibilitychange", onVisibility);
    void read();
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisibility);
    };
  }, [path, interval]);

  const refresh = useCallback(() => wake.current(), []);
  const current = state.path === path;
  return { data: current ? state.data : null, error: current ? state.error : null, refresh };
}

// Return the last answer for any path, and the answer to show: while another path is read, the last
// one; after an error, only one for the same path.
export function useLast<T>({ data, error }: Polled<T>): { last: T | null; shown: T | null } {
  const ref = useRef<T | null>(null);
  if (data !== null) ref.current = data;
  return { last: ref.current, shown: error ? data : ref.current };
}
