// SPDX-License-Identifier: Apache-2.0
// Who uses the console, and what the policy allows. Nothing of it is stored.
import { ApiError, get, send, setToken } from "./api";
import { createStore } from "./store";

export interface Session {
  release: string;
  auth: "keystone" | "noauth";
  user: string;
  project: string;
  roles: string[];
  all_projects: boolean;
  rules: string[];
}

export interface SessionState {
  phase: "starting" | "signed-out" | "signed-in" | "failed";
  session: Session | null;
  message: string;
}

export const sessionStore = createStore<SessionState>({
  phase: "starting",
  session: null,
  message: "",
});

let expiry: ReturnType<typeof setTimeout> | undefined;

// Without keystone the session is there without a token; with keystone the answer is 401.
export async function start(): Promise<void> {
  try {
    await load();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) signOut("");
    else fail(error);
  }
}

export interface Credentials {
  user: string;
  password: string;
  project: string;
  user_domain: string;
  project_domain: string;
}

export async function signIn(credentials: Credentials): Promise<void> {
  const found = await send<{ token: string; expires_at: string | null }>(
    "POST",
    "ui/sign-in",
    credentials,
  );
  await useToken(found.token);
  const milliseconds = Date.parse(found.expires_at ?? "") - Date.now();
  if (Number.isNaN(milliseconds)) return;
  // A timer cannot be longer than 2^31 ms.
  expiry = setTimeout(() => signOut("The token has expired."), Math.min(milliseconds, 2 ** 31 - 1));
}

export async function useToken(token: string): Promise<void> {
  setToken(token);
  try {
    await load();
  } catch (error) {
    setToken(null);
    throw error;
  }
}

export function signOut(message: string): void {
  clearTimeout(expiry);
  setToken(null);
  sessionStore.set({ phase: "signed-out", session: null, message });
}

export function can(rule: string): boolean {
  return sessionStore.get().session?.rules.includes(`cyborg:${rule}`) ?? false;
}

async function load(): Promise<void> {
  const session = await get<Session>("ui/session");
  sessionStore.set({ phase: "signed-in", session, message: "" });
}

function fail(error: unknown): void {
  const message = error instanceof Error ? error.message : String(error);
  sessionStore.set({ phase: "failed", session: null, message });
}
