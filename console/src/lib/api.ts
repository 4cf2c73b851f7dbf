// SPDX-License-Identifier: Apache-2.0
// Requests to the REST API of the same origin. The token is in the memory of this module only.

// The page and the API are of the same release, so the version is fixed.
const MICROVERSION = "accelerator 2.6";
const TIMEOUT = 30_000; // milliseconds
// The page is <prefix>/ui/, the API <prefix>/v2/.
const ROOT = new URL("..", new URL(".", location.href.split("#")[0]));

let token: string | null = null;

export function setToken(value: string | null): void {
  token = value;
}

export class ApiError extends Error {
  constructor(
    readonly status: number, // 0 if there is no response
    message: string,
    readonly body = "",
  ) {
    super(message);
  }
}

// A list is a parameter that is repeated.
export type Query = Record<string, string | number | readonly string[] | undefined | null>;

export function buildPath(path: string, query: Query = {}): string {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  const search = new URLSearchParams(
    given.flatMap(([name, value]) => [value].flat().map((each) => [name, String(each)])),
  );
  return given.length ? `${path}?${search}` : path;
}

export async function send<T>(
  method: string,
  path: string,
  body?: unknown,
  signal?: AbortSignal,
): Promise<T> {
  const headers: Record<string, string> = {
    Accept: "application/json",
    "OpenStack-API-Version": MICROVERSION,
  };
  if (token !== null) headers["X-Auth-Token"] = token;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const limit = AbortSignal.timeout(TIMEOUT);
  let response: Response;
  let text: string;
  try {
    response = await fetch(new URL(path, ROOT), {
      method,
      headers,
      body: body === undefined ? null : JSON.stringify(body),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
    text = await response.text();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The API does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, readMessage(text, response), text);
  return (text ? parse(text, response) : undefined) as T;
}

function parse(text: string, response: Response): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError(response.status, "The API answered with something that is not JSON.");
  }
}

function readMessage(text: string, response: Response): string {
  try {
    // The message is JSON within JSON, as in the other OpenStack services that use WSME.
    const fault = JSON.parse(JSON.parse(text).error_message);
    if (typeof fault.faultstring === "string") return fault.faultstring;
  } catch {
    // A proxy has answered.
  }
  return `The API answered ${response.status} ${response.statusText}`.trim();
}

export function get<T>(path: string, query?: Query, signal?: AbortSignal): Promise<T> {
  return send<T>("GET", buildPath(path, query), undefined, signal);
}
