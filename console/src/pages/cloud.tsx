// SPDX-License-Identifier: Apache-2.0
// The cloud: the use of each resource class on each host, and how much of the capacity is fragmented.
import { useState } from "preact/hooks";
import { buildPath } from "../lib/api";
import { count } from "../lib/format";
import { useLast, usePoll } from "../lib/poll";
import { href, routeStore } from "../lib/router";
import { useStore } from "../lib/store";
import type { Host, HostClass, Link } from "../lib/types";
import { Badge, Bar, Card, ErrorBox, Loading, Page, segmentsOf } from "../ui/parts";
import { nextMarker, Pager, Table } from "../ui/table";
import { Legend } from "./overview";

const HOSTS = 500; // of a page
const STEPS = 5; // of the shades

interface Total extends HostClass {
  hosts: number; // that have any free handle
}

function add(total: Total | undefined, row: HostClass): Total {
  const sum: Total = total ? { ...total } : { ...row, ...NOTHING };
  for (const name of SUMS) sum[name] += row[name] ?? 0;
  sum.largest_free = Math.max(sum.largest_free, row.largest_free);
  if (row.free) sum.hosts += 1;
  return sum;
}

export const SUMS = ["total", "free", "owned", "dirty", "draining", "cordoned", "undeliverable", "whole_free"] as const;
const NOTHING = { ...Object.fromEntries(SUMS.map((name) => [name, 0])), largest_free: 0, hosts: 0 } as Omit<
  Total,
  "resource_class"
>;

export function totalsOf(hosts: Host[]): Total[] {
  const found = new Map<string, Total>();
  for (const row of hosts.flatMap((host) => host.resource_classes)) {
    found.set(row.resource_class, add(found.get(row.resource_class), row));
  }
  return [...found.values()].sort((a, b) => a.resource_class.localeCompare(b.resource_class));
}

export function CloudPage() {
  const route = useStore(routeStore);
  const marker = route.query.get("marker") ?? "";
  const path = buildPath("v2/hosts", { limit: HOSTS, marker, sort_key: "hostname", with_count: "true" });
  const polled = usePoll<{ hosts: Host[]; hosts_links?: Link[]; count: number }>(path, 30_000);
  const { shown } = useLast(polled);
  const [onlyFree, setOnlyFree] = useState(false);
  const hosts = shown?.hosts ?? [];
  const totals = totalsOf(hosts);
  const rows = onlyFree ? hosts.filter((host) => host.resource_classes.some((each) => each.free)) : hosts;
  const isPart = shown !== null && shown.count > hosts.length;
  return (
    <Page title="Cloud">
      <ErrorBox error={polled.error} stale={shown !== null} />
      {shown ? (
        <div class="cards">
          <Card title="Capacity" wide aside={<Legend />}>
            {isPart ? <p class="faint small">Of the {count(hosts.length, "host")} of this page.</p> : null}
            <Table
              caption="Capacity by resource class"
              columns={[
                { name: "Class", show: (t) => t.resource_class },
                { name: "Use", show: (t) => <Bar segments={segmentsOf(t)} total={t.total} name={t.resource_class} /> },
                { name: "Total", number: true, show: (t) => t.total.toLocaleString("en") },
                { name: "In use", number: true, show: (t) => t.owned.toLocaleString("en") },
                { name: "Free", number: true, show: (t) => t.free.toLocaleString("en") },
                { name: "Fragmented", number: true, show: (t) => (t.free - t.whole_free).toLocaleString("en") },
                { name: "Largest request", number: true, show: (t) => t.largest_free.toLocaleString("en") },
                { name: "Hosts with free ones", number: true, show: (t) => t.hosts.toLocaleString("en") },
              ]}
              rows={totals}
              rowKey={(t) => t.resource_class}
              empty="No accelerators have been reported."
            />
            <p class="faint small">
              Fragmented ones are free, but others of the same part of a device are in use. The largest request is the
              most that one group of a device profile can get, since it gets all from one part.
            </p>
          </Card>
          <Card
            title="Hosts and classes"
            wide
            aside={
              <label class="check">
                <input type="checkbox" checked={onlyFree} onChange={(event) => setOnlyFree(event.currentTarget.checked)} />
                <span>Only hosts with free ones</span>
              </label>
            }
          >
            <p class="faint small">In use of all; the darker, the more. {count(shown.count, "host")}.</p>
            <HeatMap hosts={rows} classes={totals.map((total) => total.resource_class)} />
            <Pager route={["cloud"]} chosen={{}} marker={marker} next={nextMarker(shown.hosts_links)} />
          </Card>
        </div>
      ) : polled.error ? null : (
        <Loading />
      )}
    </Page>
  );
}

function HeatMap({ hosts, classes }: { hosts: Host[]; classes: string[] }) {
  if (!hosts.length) return <p class="faint empty">None.</p>;
  return (
    <div class="table-box" role="group" aria-label="Use of each class on each host" tabIndex={0}>
      <table class="matrix">
        <caption class="hidden">Use of each class on each host</caption>
        <thead>
          <tr>
            <th scope="col">Host</th>
            {classes.map((name) => (
              <th key={name} scope="col" class="number">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {hosts.map((host) => (
            <tr key={host.uuid}>
              <th scope="row">
                <a href={href(["hosts", host.hostname])}>{host.hostname}</a>{" "}
                {host.state === "up" ? null : <Badge state={host.state} />}
              </th>
              {classes.map((name) => (
                <HeatCell key={name} row={host.resource_classes.find((each) => each.resource_class === name)} />
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function HeatCell({ row }: { row: HostClass | undefined }) {
  if (!row?.total) return <td class="number faint">–</td>;
  const closed = row.total - row.owned - row.free;
  const shade = Math.ceil((row.owned / row.total) * STEPS);
  return (
    <td class={`number heat-${shade}`}>
      {row.owned}/{row.total}
      {closed ? <span class="small text-warn"> {closed} closed</span> : null}
    </td>
  );
}
