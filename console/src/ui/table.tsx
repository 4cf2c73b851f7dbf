// SPDX-License-Identifier: Apache-2.0
// Tables, and pages of a collection with filters.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { announce, useAnnounceChanges } from "../lib/announce";
import { buildPath, type Query } from "../lib/api";
import { MAX_EXPORT, nextMarker, readAll, save, type Format } from "../lib/export";
import { count, words } from "../lib/format";
import { useLast, usePoll } from "../lib/poll";
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

export { nextMarker };
const WIDE = matchMedia("(min-width: 40rem)");
export const PAGE_SIZE = 50;

export interface Filter {
  name: string;
  label: string;
  values?: readonly string[]; // a text field without them
  texts?: Record<string, string>; // of values that are not words
}

const MAX_COUNT = 10_000; // of the API

type Listed<R> = Record<string, R[] | Link[] | number | undefined>;

export interface CollectionProps<R> {
  collection: string;
  rowsKey?: string; // of the rows in the response, by default the collection
  route: string[];
  caption: string;
  noun: string; // of one row
  columns: Column<R>[];
  filters?: Filter[];
  query?: Record<string, string | number>;
  interval?: number;
  empty?: string;
  rowKey: (row: R) => string;
  state?: (row: R) => string; // announced when it changes
  name?: (row: R) => string; // in the announcement
}

// One page of a collection; filters and the marker are in the URL.
export function Collection<R>(props: CollectionProps<R>) {
  const route = useStore(routeStore);
  const filters = props.filters ?? [];
  const chosen = Object.fromEntries(
    filters.map((filter) => [filter.name, route.query.get(filter.name) ?? ""]),
  );
  const marker = route.query.get("marker") ?? "";
  const selection = { ...props.query, ...chosen };
  const path = buildPath(`v2/${props.collection}`, {
    ...selection,
    limit: PAGE_SIZE,
    marker,
    with_count: "true",
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
      <ListHead
        path={`v2/${props.collection}`}
        query={selection}
        rowsKey={key}
        name={props.collection}
        noun={props.noun}
        total={shown?.["count"] as number | undefined}
      />
      {shown ? (
        <Table {...props} rows={(shown[key] as R[] | undefined) ?? []} busy={rows === null} />
      ) : polled.error ? null : (
        <Loading />
      )}
      <Pager route={props.route} chosen={chosen} marker={marker} next={next} />
    </>
  );
}

// The number of rows, and their export.
function ListHead(props: {
  path: string;
  query: Query;
  rowsKey: string;
  name: string;
  noun: string;
  total: number | undefined;
}) {
  const { total } = props;
  const [error, setError] = useState("");
  const [running, setRunning] = useState(false);

  async function run(format: Format): Promise<void> {
    if (running) return;
    setRunning(true);
    setError("");
    try {
      const rows = await readAll(props.path, props.query, props.rowsKey);
      save(props.name, format, rows);
      const cut = rows.length === MAX_EXPORT ? ", which is the most that one file has" : "";
      announce(`Exported ${count(rows.length, props.noun)}${cut}.`);
    } catch (failure) {
      setError(failure instanceof Error ? failure.message : String(failure));
    }
    setRunning(false);
  }

  return (
    <>
      <div class="list-head">
        <span class="count">
          {total === undefined ? null : `${count(total, props.noun)}${total >= MAX_COUNT ? " or more" : ""}`}
        </span>
        <span class="export" role="group" aria-label="Export">
          {(["csv", "json"] as const).map((format) => (
            <button key={format} type="button" class="plain" aria-disabled={running} onClick={() => void run(format)}>
              {format.toUpperCase()}
            </button>
          ))}
        </span>
      </div>
      {error ? (
        <div class="note bad" role="alert">
          {error}
        </div>
      ) : null}
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
    // A narrow window shows the rows first.
    <details class="filter-box" open={WIDE.matches || Object.values(props.chosen).some(Boolean)}>
      <summary>Filters</summary>
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
                    {filter.texts?.[value] ?? words(value)}
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
    </details>
  );
}
