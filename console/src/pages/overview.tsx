// SPDX-License-Identifier: Apache-2.0
import { useAnnounceChanges } from "../lib/announce";
import { buildPath } from "../lib/api";
import { count } from "../lib/format";
import { usePoll } from "../lib/poll";
import { href } from "../lib/router";
import { can, sessionStore } from "../lib/session";
import { useStore } from "../lib/store";
import type { Job, Limits, Request, Summary } from "../lib/types";
import { Badge, Bar, Card, ErrorBox, Loading, Page, segmentsOf, Time, type Segment } from "../ui/parts";
import { Table } from "../ui/table";
import { JobsTable } from "./jobs";
import { REQUEST_COLUMNS } from "./requests";

export function OverviewPage() {
  return (
    <Page title="Overview">
      {can("summary:get") ? <Cloud /> : null}
      {can("limits:get") ? <Project /> : null}
      {!can("summary:get") && can("arq:get_all") ? <LatestRequests /> : null}
    </Page>
  );
}

function Cloud() {
  const { data, error } = usePoll<Summary>("v2/summary", 5000);
  const jobs = usePoll<{ jobs: Job[] }>(
    buildPath("v2/jobs", { state: "pending", limit: 10, sort_key: "created_at", sort_dir: "desc" }),
    5000,
  );
  const alarms = data ? findAlarms(data) : [];
  useAnnounceChanges(
    "overview",
    data ? new Map([["Alarms", alarms.map((alarm) => alarm.text).join(", ") || "none"]]) : null,
  );
  if (!data) return error ? <ErrorBox error={error} /> : <Loading />;
  const hosts = data.hosts.up + data.hosts.late + data.hosts.down;
  return (
    <>
      <ErrorBox error={error ?? jobs.error} stale />
      <div class="tiles">
        <Tile label="Hosts" value={hosts} path={["hosts"]}>
          {data.hosts.up} up · <Warn n={data.hosts.late} tone="warn" /> late ·{" "}
          <Warn n={data.hosts.down} tone="bad" /> down
        </Tile>
        <Tile label="Devices" value={data.devices.total} path={["devices"]}>
          <Warn n={data.devices.unhealthy} tone="bad" /> unhealthy ·{" "}
          <Warn n={data.devices.undeliverable} tone="bad" /> undeliverable ·{" "}
          <Warn n={data.devices.disabled} tone="warn" /> disabled
        </Tile>
        <Tile label="Requests" value={sum(data.accelerator_requests)} path={["requests"]}>
          {data.accelerator_requests["Bound"] ?? 0} bound · {data.accelerator_requests["BindStarted"] ?? 0} binding
        </Tile>
        <Tile label="Contexts" value={sum(data.device_contexts)} path={["contexts"]}>
          {data.device_contexts["bound"] ?? 0} bound · {data.device_contexts["reserved"] ?? 0} reserved
        </Tile>
      </div>
      <div class="cards">
        <Card title="Alarms" aside={<Badge state={String(alarms.length)} tone={alarms.length ? "bad" : "good"} />}>
          {alarms.length ? (
            <ul class="alarms">
              {alarms.map((alarm) => (
                <li key={alarm.text} class={alarm.tone}>
                  {alarm.path ? <a href={href(alarm.path, alarm.query)}>{alarm.text}</a> : alarm.text}
                  {alarm.since ? (
                    <span class="faint">
                      <Time at={alarm.since} />
                    </span>
                  ) : null}
                </li>
              ))}
            </ul>
          ) : (
            <p class="faint empty">Nothing needs attention.</p>
          )}
        </Card>
        <Card title="Daemons">
          <ul class="plain-list">
            {data.services.map((row) => (
              <li key={row.binary + row.state}>
                <span>{row.binary}</span>
                <span>
                  {row.count} <Badge state={row.state} />
                </span>
              </li>
            ))}
          </ul>
        </Card>
        <Card title="Capacity and use" wide aside={<Legend />}>
          {data.resource_classes.length ? (
            <ul class="classes">
              {data.resource_classes.map((row) => (
                <ClassRow key={row.resource_class} row={row} />
              ))}
            </ul>
          ) : (
            <p class="faint empty">No accelerators have been reported.</p>
          )}
          <p class="faint small">Counted {data.count_age} s ago.</p>
        </Card>
        <Card title="Jobs under way" wide aside={<a href={href(["jobs"])}>All jobs</a>}>
          {jobs.data ? <JobsTable jobs={jobs.data.jobs} /> : <Loading />}
        </Card>
      </div>
    </>
  );
}

function Tile(props: { label: string; value: number; path: string[]; children: preact.ComponentChildren }) {
  return (
    <a class="tile" href={href(props.path)}>
      <span class="tile-label">{props.label}</span>
      <span class="tile-value">{props.value.toLocaleString("en")}</span>
      <span class="tile-more">{props.children}</span>
    </a>
  );
}

function Warn({ n, tone }: { n: number; tone: string }) {
  return n ? <strong class={`text-${tone}`}>{n.toLocaleString("en")}</strong> : <>0</>;
}

type Uses = Summary["resource_classes"][number];

const NOTHING = { total: 0, free: 0, owned: 0, dirty: 0, draining: 0, cordoned: 0 };

export function Legend() {
  return (
    <ul class="legend" aria-label="Legend">
      {segmentsOf(NOTHING).map(({ kind, label }) => (
        <li key={kind}>
          <span class={`swatch fill-${kind}`} aria-hidden="true" /> {label}
        </li>
      ))}
    </ul>
  );
}

function ClassRow({ row }: { row: Uses }) {
  return (
    <li>
      <span class="class-name">{row.resource_class}</span>
      <Bar segments={segmentsOf(row)} total={row.total} name={row.resource_class} />
      <span class="class-numbers">
        <strong>{row.owned.toLocaleString("en")}</strong> of {row.total.toLocaleString("en")} in use,{" "}
        {row.free.toLocaleString("en")} free
      </span>
    </li>
  );
}

interface Alarm {
  text: string;
  tone: "bad" | "warn";
  path?: string[];
  query?: Record<string, string>;
  since?: string | null;
}

export function findAlarms(data: Summary): Alarm[] {
  const alarms: Alarm[] = [];
  const add = (number: number, text: string, tone: Alarm["tone"], more: Partial<Alarm> = {}): void => {
    if (number > 0) alarms.push({ text, tone, ...more });
  };
  for (const service of data.down_services) {
    alarms.push({
      text: `${service.host}: ${service.binary} is down`,
      tone: "bad",
      since: service.last_seen_at,
      ...(service.binary === "cyborg-agent" ? { path: ["hosts", service.host] } : {}),
    });
  }
  const down = data.services.reduce((sum, row) => sum + (row.state === "down" ? row.count : 0), 0);
  add(down - data.down_services.length, `${down - data.down_services.length} more daemons down`, "bad");
  for (const device of data.unhealthy_devices) {
    alarms.push({
      text: `${device.host}: ${device.address} is unhealthy`,
      tone: "bad",
      path: ["devices"],
      query: { hostname: device.host, health: "unhealthy" },
      since: device.health_since,
    });
  }
  const hidden = data.devices.unhealthy - data.unhealthy_devices.length;
  add(hidden, `${hidden} more unhealthy devices`, "bad", {
    path: ["devices"],
    query: { health: "unhealthy" },
  });
  const { undeliverable, failing: closed } = data.devices;
  add(undeliverable, `${count(undeliverable, "device")} cannot be attached to an instance`, "bad", {
    path: ["devices"],
    query: { deliverable: "false" },
  });
  add(closed, `${count(closed, "device")} closed for a time after failed jobs`, "bad", { path: ["devices"] });
  for (const binary of ["cyborg-conductor", "cyborg-agent"]) {
    const rows = data.services.filter((row) => row.binary === binary);
    const up = rows.reduce((total, row) => total + (row.state === "down" ? 0 : row.count), 0);
    const effect = binary === "cyborg-agent" ? "no host does any work" : "no request can be changed";
    if (!up) alarms.push({ text: `No ${binary} is up: ${effect}`, tone: "bad" });
  }
  const missing = data.guest_devices_missing;
  add(missing, `${count(missing, "device")} missing in a running guest`, "bad", {
    path: ["requests"],
    query: { attach_failed: "true" },
  });
  const failed = data.attachments["error"] ?? 0;
  add(failed, `${count(failed, "attachment")} failed`, "bad", {
    path: ["attachments"],
    query: { state: "error" },
  });
  const contexts = data.device_contexts["error"] ?? 0;
  add(contexts, `${count(contexts, "device context")} in error`, "warn", {
    path: ["contexts"],
    query: { state: "error" },
  });
  const unbind = data.accelerator_requests["UnbindFailed"] ?? 0;
  add(unbind, `${count(unbind, "request")} failed to unbind`, "bad", { path: ["requests"] });
  for (const row of data.jobs) {
    add(row.overdue, `${count(row.overdue, `${row.kind} job`)} overdue`, "warn", {
      path: ["jobs"],
      query: { kind: row.kind, state: "pending" },
      since: row.oldest,
    });
  }
  const { failing } = data.providers;
  add(failing, `${count(failing, "provider")} cannot be published to Placement`, "bad");
  for (const row of data.outbox.filter((each) => each.state === "dead")) {
    add(row.count, `${count(row.count, "message")} (${row.kind}) not delivered`, "bad", { since: row.oldest });
  }
  add(data.hosts.late, `${count(data.hosts.late, "host")} late`, "warn", { path: ["hosts"] });
  return alarms;
}

// For users who see their project only.
function LatestRequests() {
  const { data, error } = usePoll<{ arqs: Request[] }>(
    buildPath("v2/accelerator_requests", { limit: 10, sort_key: "created_at", sort_dir: "desc" }),
    5000,
  );
  return (
    <Card title="Latest requests" wide aside={<a href={href(["requests"])}>All requests</a>}>
      <ErrorBox error={error} stale={data !== null} />
      {data ? (
        <Table
          caption="Latest accelerator requests"
          columns={REQUEST_COLUMNS}
          rows={data.arqs}
          rowKey={(arq) => arq.uuid}
          empty="The project has no accelerator requests."
        />
      ) : error ? null : (
        <Loading />
      )}
    </Card>
  );
}

function sum(numbers: Record<string, number>): number {
  return Object.values(numbers).reduce((total, number) => total + number, 0);
}

function Project() {
  const session = useStore(sessionStore).session;
  const { data, error } = usePoll<Limits>("v2/limits", 15_000);
  if (!data) return error ? <ErrorBox error={error} /> : <Loading />;
  const rows: { name: string; used: number; limit: number; path: string[] | null }[] = [
    { name: "Accelerator requests", ...data.accelerator_requests, path: ["requests"] },
    { name: "Device contexts", ...data.device_contexts, path: ["contexts"] },
    { name: "Attachments", ...data.attachments, path: ["attachments"] },
    ...data.resources.map((row) => ({ ...row, name: row.resource_class, path: null })),
  ];
  return (
    <Card title={`Project ${session?.project ?? ""}`} wide>
      <ErrorBox error={error} stale />
      <ul class="classes">
        {rows.map((row) => {
          const limited = row.limit >= 0;
          const used: Segment = { kind: "used", label: "used", value: row.used };
          return (
            <li key={row.name}>
              <span class="class-name">
                {row.path ? <a href={href(row.path)}>{row.name}</a> : row.name}
              </span>
              {limited ? (
                <Bar segments={[used]} total={Math.max(row.limit, row.used)} name={row.name} />
              ) : (
                <span class="faint small">no limit</span>
              )}
              <span class="class-numbers">
                <strong>{row.used.toLocaleString("en")}</strong>
                {limited ? ` of ${row.limit.toLocaleString("en")}` : ""} used
              </span>
            </li>
          );
        })}
      </ul>
    </Card>
  );
}

