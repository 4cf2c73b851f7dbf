// SPDX-License-Identifier: Apache-2.0
// The part of the URL after #: path segments and a query. It is never sent to the server.
import { createStore } from "./store";

export interface Route {
  path: string[]; // such as ["devices", uuid]
  query: URLSearchParams;
  key: string;
}

function read(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const segments = path.split("/").filter(Boolean).map(decode);
  return { path: segments, query: new URLSearchParams(query), key: `${path}?${query}` };
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const routeStore = createStore<Route>(read());

addEventListener("hashchange", () => routeStore.set(read()));

export function href(path: string[], query: Record<string, string> = {}): string {
  const given = Object.entries(query).filter(([, value]) => value);
  const search = new URLSearchParams(given).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

export function go(path: string[], query: Record<string, string> = {}): void {
  location.hash = href(path, query);
}
