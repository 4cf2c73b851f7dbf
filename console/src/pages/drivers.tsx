// SPDX-License-Identifier: Apache-2.0
// Drivers, their backends on the hosts, and their rollouts.
import { useState } from "preact/hooks";
import { useAnnounceChanges } from "../lib/announce";
import { buildPath, send } from "../lib/api";
import { count, reportedStatus, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { go, href, routeStore } from "../lib/router";
import { can } from "../lib/session";
import { useStore } from "../lib/store";
import type { Driver, DriverDetail, HostDriver, Job } from "../lib/types";
import { Badge, Card, ErrorBox, Facts, Loading, Page, Text, type Fact } from "../ui/parts";
import { Dialog, DialogButton } from "../ui/dialog";
import { Collection, nextMarker, Table, type Column } from "../ui/table";
import { TYPES } from "./devices";
import { JobsTable } from "./jobs";

function Statuses({ statuses }: { statuses: Record<string, number> }) {
  const entries = Object.entries(statuses).sort();
  if (!entries.length) return <Text value={null} />;
  return (
    <span class="statuses">
      {entries.map(([status, number]) => (
        <span key={status}>
          {number} <Badge state={status} />
        </span>
      ))}
    </span>
  );
}

const COLUMNS: Column<Driver>[] = [
  { name: "Driver", show: (d) => <a href={href(["drivers", d.name])}>{d.name}</a> },
  { name: "Version", show: (d) => <Text value={d.version ?? "several"} /> },
  { name: "Type", show: (d) => <Text value={d.type ?? "any"} /> },
  { name: "Support", show: (d) => words(d.support) },
  { name: "Hosts", number: true, show: (d) => d.num_hosts.toLocaleString("en") },
  { name: "Backends", show: (d) => <Statuses statuses={d.statuses} /> },
];

export function DriversPage() {
  return (
    <Page title="Drivers">
      <Collection<Driver>
        collection="drivers"
        route={["drivers"]}
        noun="driver"
        caption="Drivers"
        columns={COLUMNS}
        filters={[
          { name: "type", label: "Type", values: TYPES },
          { name: "host", label: "Host" },
        ]}
        rowKey={(d) => d.uuid}
        name={(d) => `Driver ${d.name}`}
        state={(d) => Object.entries(d.statuses).map(([status, n]) => `${n} ${status}`).join(" ")}
      />
    </Page>
  );
}

const HOST_COLUMNS: Column<HostDriver>[] = [
  { name: "Host", show: (h) => <a href={href(["hosts", h.host])}>{h.host}</a> },
  { name: "Backend", show: (h) => <Text value={h.backend} /> },
  { name: "Status", show: (h) => <Badge state={reportedStatus(h.state, h.status)} /> },
  { name: "Desired", show: (h) => (h.desired_status ? <Badge state={h.desired_status} /> : <span class="faint">file</span>) },
  { name: "Applied", show: (h) => (h.applied === null ? <Text value={null} /> : h.applied ? "yes" : <Badge state="waiting" />) },
  { name: "Version", show: (h) => <Text value={h.version} /> },
  { name: "Agent", show: (h) => <Badge state={h.state} /> },
  {
    name: "Notes",
    show: (h) => (
      <>
        {h.error ? <div class="text-bad">{h.error}</div> : null}
        {h.remarks.map((remark) => (
          <div class="faint small" key={remark}>
            {remark}
          </div>
        ))}
      </>
    ),
  },
];

export function DriverPage({ name }: { name: string }) {
  const route = useStore(routeStore);
  const marker = route.query.get("marker") ?? "";
  const path = `v2/drivers/${encodeURIComponent(name)}`;
  const { data: driver, error, refresh } = usePoll<DriverDetail>(
    buildPath(path, { limit: 50, marker }),
    3000,
  );
  const jobs = usePoll<{ jobs: Job[] }>(
    can("job:get_all")
      ? buildPath("v2/jobs", { subject: name, limit: 5, sort_key: "created_at", sort_dir: "desc" })
      : null,
    2000,
  );
  const open = jobs.data?.jobs.find((job) => job.state === "pending");
  useAnnounceChanges(
    name,
    jobs.data
      ? new Map(jobs.data.jobs.map((job) => [`Rollout ${job.kind}`, `${job.state}, ${job.progress["done"] ?? 0} done`]))
      : null,
  );
  const next = nextMarker(driver?.hosts_links);
  const changed = (): void => {
    refresh();
    jobs.refresh();
  };
  return (
    <Page
      title={`Driver ${name}`}
      trail={["Drivers", ["drivers"]]}
      actions={driver ? <Actions driver={driver} path={path} changed={changed} /> : null}
    >
      <ErrorBox error={error ?? jobs.error} stale={driver !== null} />
      {driver ? (
        <div class="cards">
          <Card title="Rollouts" wide aside={open ? <Badge state="in_progress" /> : null}>
            {jobs.data ? (
              <JobsTable jobs={jobs.data.jobs} empty="This driver has not been changed in the last days." />
            ) : can("job:get_all") ? (
              <Loading />
            ) : (
              <Text value={null} />
            )}
          </Card>
          <Card title="Facts" wide>
            <Facts
              facts={[
                ["Version", driver.version ?? "several"],
                ["Devices", driver.type ?? "any type"],
                ["Support", words(driver.support)],
                ["Hosts", driver.num_hosts.toLocaleString("en")],
                ["Backends", <Statuses statuses={driver.statuses} />],
                ["Abilities", <Text value={driver.abilities.map(words).join(", ")} />],
              ]}
            />
          </Card>
          <Card title="Hosts" wide aside={<span class="faint">{count(driver.hosts.length, "entry", "entries")}</span>}>
            <Table
              caption="Hosts of the driver"
              columns={HOST_COLUMNS}
              rows={driver.hosts}
              rowKey={(h) => `${h.host} ${h.backend}`}
            />
            {marker || next ? (
              <nav class="pager" aria-label="Pages of hosts">
                <button type="button" disabled={!marker} onClick={() => go(["drivers", name])}>
                  First page
                </button>
                <button type="button" disabled={!next} onClick={() => next && go(["drivers", name], { marker: next })}>
                  Next page
                </button>
              </nav>
            ) : null}
          </Card>
          {driver.options.length ? (
            <Card title="Options" wide>
              <details>
                <summary>{count(driver.options.length, "option")}</summary>
                <Facts
                  facts={driver.options.map((option): Fact => [
                    `${option.name} (${option.kind}${option.host_only ? ", on the host only" : ""})`,
                    <span class="small">{option.help}</span>,
                  ])}
                />
              </details>
            </Card>
          ) : null}
        </div>
      ) : error ? null : (
        <Loading />
      )}
    </Page>
  );
}

interface Change {
  label: string;
  title: string;
  text: string;
  danger: boolean;
  rule: string;
  method: string;
  body: Record<string, unknown> | null;
}

const CHANGES: Change[] = [
  {
    label: "Reload",
    title: "Reload",
    text: "The backends are recreated, host by host. Bound handles stay bound.",
    danger: false,
    rule: "driver:update",
    method: "PATCH",
    body: { reload: true },
  },
  {
    label: "Enable",
    title: "Enable",
    text: "The backends discover devices and offer them.",
    danger: false,
    rule: "driver:update",
    method: "PATCH",
    body: { status: "enabled" },
  },
  {
    label: "Disable",
    title: "Disable",
    text: "No new requests are bound to the devices. Those that are bound stay bound.",
    danger: true,
    rule: "driver:update",
    method: "PATCH",
    body: { status: "disabled" },
  },
];

function Actions({ driver, path, changed }: { driver: Driver; path: string; changed: () => void }) {
  return (
    <>
      {CHANGES.filter((change) => can(change.rule)).map((change) => (
        <ChangeButton key={change.label} change={change} driver={driver} path={path} changed={changed} />
      ))}
      {can("driver:install") ? <Install driver={driver} changed={changed} /> : null}
      {can("driver:uninstall") ? <Uninstall driver={driver} path={path} changed={changed} /> : null}
    </>
  );
}

// The names of hosts or of a backend that limit a change.
function Scope(props: { hosts: string; backend: string; set: (hosts: string, backend: string) => void }) {
  return (
    <>
      <label class="field">
        <span>Hosts, separated by spaces; empty for all hosts</span>
        <input
          value={props.hosts}
          onInput={(event) => props.set(event.currentTarget.value, props.backend)}
          autocomplete="off"
          spellcheck={false}
        />
      </label>
      <label class="field">
        <span>Backend; empty for all backends of the driver</span>
        <input
          value={props.backend}
          onInput={(event) => props.set(props.hosts, event.currentTarget.value)}
          autocomplete="off"
          spellcheck={false}
        />
      </label>
    </>
  );
}

function useScope(): [hosts: string, backend: string, set: (hosts: string, backend: string) => void] {
  const [scope, setScope] = useState({ hosts: "", backend: "" });
  return [scope.hosts, scope.backend, (hosts, backend) => setScope({ hosts, backend })];
}

function scopeOf(hosts: string, backend: string): { hosts?: string[]; backend?: string } {
  const names = hosts.split(/[\s,]+/).filter(Boolean);
  return {
    ...(names.length ? { hosts: names } : {}),
    ...(backend.trim() ? { backend: backend.trim() } : {}),
  };
}

function ChangeButton(props: { change: Change; driver: Driver; path: string; changed: () => void }) {
  const { change, driver } = props;
  const [hosts, backend, setScope] = useScope();
  return (
    <DialogButton label={change.label} danger={change.danger}>
      {(close) => (
        <Dialog
          title={`${change.title} the driver ${driver.name}?`}
          confirm={change.label}
          danger={change.danger}
          onClose={close}
          run={async () => {
            await send(change.method, props.path, { ...change.body, ...scopeOf(hosts, backend) });
            props.changed();
            return `The rollout has started: ${change.label} ${driver.name}.`;
          }}
        >
          <p>{change.text}</p>
          <Scope hosts={hosts} backend={backend} set={setScope} />
        </Dialog>
      )}
    </DialogButton>
  );
}

function Install({ driver, changed }: { driver: Driver; changed: () => void }) {
  const [hosts, backend, setScope] = useScope();
  return (
    <DialogButton label="Install">
      {(close) => (
        <Dialog
          title={`Install a backend of ${driver.name}`}
          confirm="Install"
          onClose={close}
          run={async () => {
            await send("POST", "v2/drivers", { driver: driver.name, ...scopeOf(hosts, backend) });
            changed();
            return `The rollout has started: install ${driver.name}.`;
          }}
        >
          <p>Hosts that have the driver get a backend, which discovers devices and offers them.</p>
          <Scope hosts={hosts} backend={backend} set={setScope} />
        </Dialog>
      )}
    </DialogButton>
  );
}

function Uninstall({ driver, path, changed }: { driver: Driver; path: string; changed: () => void }) {
  const [hosts, backend, setScope] = useScope();
  const [drain, setDrain] = useState(true);
  return (
    <DialogButton label="Uninstall" danger>
      {(close) => (
        <Dialog
          title={`Uninstall the driver ${driver.name}?`}
          confirm="Uninstall"
          danger
          onClose={close}
          run={async () => {
            const scope = scopeOf(hosts, backend);
            const query = new URLSearchParams({ drain: String(drain) });
            for (const host of scope.hosts ?? []) query.append("host", host);
            if (scope.backend) query.set("backend", scope.backend);
            await send("DELETE", `${path}?${query}`);
            changed();
            return `The rollout has started: uninstall ${driver.name}.`;
          }}
        >
          <p>The devices of its backends leave the cloud.</p>
          <Scope hosts={hosts} backend={backend} set={setScope} />
          <label class="check">
            <input
              type="checkbox"
              checked={drain}
              onChange={(event) => setDrain(event.currentTarget.checked)}
            />
            <span>Wait until no handle is in use; otherwise hosts with handles in use fail</span>
          </label>
        </Dialog>
      )}
    </DialogButton>
  );
}
