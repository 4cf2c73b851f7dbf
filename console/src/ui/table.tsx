// SPDX-License-Identifier: Apache-2.0
// Tables, and pages of a collection with filters.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useAnnounceChanges } from "../lib/announce";
import { buildPath } from "../lib/api";
import { words } from "../lib/format";
import { useLast, usePoll, type Polled } from "../lib/poll";
import { go, routeStore } from "../lib/router";
import { useStore } from "../lib/store";
import type { Link } from "../lib/types";
import { ErrorBox, Loading } from "./parts";

export interface Column<R> {
  name: string;
  show: (row: R) => ComponentChildren;
  number?: boolean;
}

export function Table<R>(props: {
  caption: string;
  columns: Column<R>[];
  rows: R[];
  rowKey: (row: R) => string;
  empty?: string;
  busy?: boolean; // other rows are being read
}) {
  if (!props.rows.length) return <p class="faint empty">{props.empty ?? "None."}</p>;
  return (
    <div class="table-box" role="group" aria-label={props.caption} aria-busy={props.busy} tabIndex={0}>
      <table>
        <caption class="hidden">{props.caption}</caption>
        <thead>
          <tr>
            {props.columns.map((column) => (
              <th key={column.name} scope="col" class={column.number ? "number" : undefined}>
                {column.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.rows.map((row) => (
            <tr key={props.rowKey(row)}>
              {props.columns.map((column) => (
                <td key={column.name} data-label={column.name} class={column.number ? "number" : undefined}>
                  {column.show(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export const PAGE_SIZE = 50;

export interface Filter {
  name: string;
  label: string;
  values?: readonly string[]; // a text field without them
}

// Return the marker of the next page, null on the last page.
export function nextMarker(links: Link[] | undefined): string | null {
  const next = links?.find((link) => link.rel === "next");
  return next ? new URL(next.href, location.href).searchParams.get("marker") : null;
}

type Listed<R> = Record<string, R[] | Link[] | undefined>;

export interface CollectionProps<R> {
  collection: string;
  rowsKey?: string; // of the rows in the response, by default the collection
  route: string[];
  caption: string;
  columns: Column<R>[];
  filters?: Filter[];
  query?: Record<string, string | number>;
  interval?: number;
  empty?: string;
  rowKey: (row: R) => string;
  state?: (row: R) => string; // announced when it changes
  name?: (row: R) => string; // in the announcement
  onPolled?: (polled: Polled<Listed<R>>) => void;
}

// One page of a collection; filters and the marker are in the URL.
export function Collection<R>(props: CollectionProps<R>) {
  const route = useStore(routeStore);
  const filters = props.filters ?? [];
  const chosen = Object.fromEntries(
    filters.map((filter) => [filter.name, route.query.get(filter.name) ?? ""]),
  );
  const marker = route.query.get("marker") ?? "";
  const path = buildPath(`v2/${props.collection}`, {
    ...props.query,
    ...chosen,
    limit: PAGE_SIZE,
    marker,
  });
  const polled = usePoll<Listed<R>>(path, props.interval ?? 5000);
  const key = props.rowsKey ?? props.collection;
  const rows = (polled.data?.[key] as R[] | undefined) ?? null;
  // The last page stays until the next one has been read.
  const { last, shown } = useLast(polled);
  const { state, name } = props;
  useAnnounceChanges(
    path,
    rows && state ? new Map(rows.map((row) => [(name ?? props.rowKey)(row), words(state(row))])) : null,
  );
  const next = nextMarker(last?.[`${key}_links`] as Link[] | undefined);
  return (
    <>
      {filters.length ? (
        <Filters filters={filters} chosen={chosen} route={props.route} />
      ) : null}
      <ErrorBox error={polled.error} stale={rows !== null} />
      {shown ? (
        <Table {...props} rows={(shown[key] as R[] | undefined) ?? []} busy={rows === null} />
      ) : polled.error ? null : (
        <Loading />
      )}
      <Pager route={props.route} chosen={chosen} marker={marker} next={next} />
    </>
  );
}

// Buttons between pages; nothing if there is only one page.
export function Pager(props: {
  route: string[];
  chosen: Record<string, string>;
  marker: string;
  next: string | null;
}) {
  const { route, chosen, marker, next } = props;
  // It stays once it was shown, and its buttons can always have the focus.
  const needed = useRef(false);
  needed.current ||= Boolean(marker || next);
  if (!needed.current) return null;
  return (
    <nav class="pager" aria-label="Pages">
      <button type="button" aria-disabled={!marker} onClick={() => marker && go(route, chosen)}>
        First page
      </button>
      <button type="button" aria-disabled={!marker} onClick={() => marker && history.back()}>
        Back
      </button>
      <button type="button" aria-disabled={!next} onClick={() => next && go(route, { ...chosen, marker: next })}>
        Next page
      </button>
    </nav>
  );
}

export function Filters(props: { filters: Filter[]; chosen: Record<string, string>; route: string[] }) {
  const [values, setValues] = useState(props.chosen);
  useEffect(() => setValues(props.chosen), [JSON.stringify(props.chosen)]);

  function apply(changed: Record<string, string>): void {
    setValues(changed);
    const trimmed = Object.entries(changed).map(([name, value]) => [name, value.trim()]);
    go(props.route, Object.fromEntries(trimmed));
  }

  return (
    <form
      class="filters"
      role="search"
      aria-label="Filters"
      onSubmit={(event) => {
        event.preventDefault();
        apply(values);
      }}
    >
      {props.filters.map((filter) => (
        <label key={filter.name}>
          <span>{filter.label}</span>
          {filter.values ? (
            <select
              value={values[filter.name]}
              onChange={(event) => apply({ ...values, [filter.name]: event.currentTarget.value })}
            >
              <option value="">all</option>
              {filter.values.map((value) => (
                <option key={value} value={value}>
                  {words(value)}
                </option>
              ))}
            </select>
          ) : (
            <input
              type="search"
              value={values[filter.name]}
              autocomplete="off"
              spellcheck={false}
              onInput={(event) => setValues({ ...values, [filter.name]: event.currentTarget.value })}
            />
          )}
        </label>
      ))}
      <button type="submit">Filter</button>
    </form>
  );
}
