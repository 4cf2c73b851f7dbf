// SPDX-License-Identifier: Apache-2.0
// Export of a list: all its pages as a file, up to a number of rows.
import { buildPath, get, type Query } from "./api";
import type { Link } from "./types";

export const MAX_EXPORT = 10_000;
const PAGE = 1000;

export type Format = "csv" | "json";

// Return the marker of the next page, null on the last page.
export function nextMarker(links: Link[] | undefined): string | null {
  const next = links?.find((link) => link.rel === "next");
  return next ? new URL(next.href, location.href).searchParams.get("marker") : null;
}

export async function readAll(path: string, query: Query, key: string): Promise<object[]> {
  const rows: object[] = [];
  let marker: string | null = "";
  do {
    const page: Record<string, unknown> = await get(buildPath(path, { ...query, limit: PAGE, marker }));
    rows.push(...(page[key] as object[]));
    marker = nextMarker(page[`${key}_links`] as Link[] | undefined);
  } while (marker && rows.length < MAX_EXPORT);
  return rows.slice(0, MAX_EXPORT);
}

function cell(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return quote(typeof value === "object" ? JSON.stringify(value) : String(value));
  // A spreadsheet would run a text that begins like a formula.
  return quote(/^[=+\-@\t\r]/.test(value) ? `'${value}` : value);
}

function quote(text: string): string {
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function toCsv(rows: object[]): string {
  const names = [...new Set(rows.flatMap(Object.keys))].filter((name) => name !== "links");
  const lines = rows.map((row) => names.map((name) => cell((row as Record<string, unknown>)[name])));
  return [names, ...lines].map((line) => `${line.join(",")}\r\n`).join("");
}

export function save(name: string, format: Format, rows: object[]): void {
  const text = format === "csv" ? toCsv(rows) : JSON.stringify(rows, null, 1);
  const type = format === "csv" ? "text/csv" : "application/json";
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${name}.${format}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
