// SPDX-License-Identifier: Apache-2.0
// Hosts, and the topology picture of one host.
import { useAnnounceChanges } from "../lib/announce";
import { buildPath, send } from "../lib/api";
import { count, reportedStatus, stateOf, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { can } from "../lib/session";
import { href } from "../lib/router";
import type { Device, Host, Link, Service } from "../lib/types";
import { TopologyLegend, TopologyPicture } from "../topology/picture";
import { Dialog, DialogButton } from "../ui/dialog";
import { Badge, Card, ErrorBox, Facts, Loading, Page, Text, Time, Use } from "../ui/parts";
import { Story } from "../ui/story";
import { Collection, Table, type Column } from "../ui/table";
import { DeviceSets } from "./device_sets";
import { MAX_ACCELERATORS, OWNER_COLUMNS, type AcceleratorList } from "./devices";
import { NvLinks } from "./nvlinks";

const AGENT = "cyborg-agent";
const MAX_DEVICES = 200; // in the picture of one host

const COLUMNS: Column<Host>[] = [
  { name: "Host", show: (h) => <a href={href(["hosts", h.hostname])}>{h.hostname}</a> },
  { name: "State", show: (h) => <Badge state={h.state} /> },
  { name: "Agent", show: (h) => words(reportedStatus(h.state, h.status)) },
  { name: "Devices", number: true, show: (h) => h.devices.toLocaleString("en") },
  {
    name: "Use",
    show: (h) =>
      h.resource_classes.length ? (
        <ul class="uses">
          {h.resource_classes.map((row) => (
            <li key={row.resource_class}>
              {row.resource_class} <Use use={row} name={row.resource_class} />
            </li>
          ))}
        </ul>
      ) : (
        <Text value={null} />
      ),
  },
  { name: "Last heartbeat", show: (h) => <Time at={h.last_seen_at} /> },
  { name: "Cordoned since", show: (h) => <Time at={h.down_since} /> },
];

export function HostsPage() {
  return (
    <Page title="Hosts" actions={can("discovery:create") ? <Discover host={null} /> : null}>
      <Collection<Host>
        collection="hosts"
        route={["hosts"]}
        noun="host"
        caption="Hosts"
        columns={COLUMNS}
        filters={[
          { name: "hostname", label: "Host" },
          { name: "state", label: "State", values: ["up", "late", "down"] },
        ]}
        rowKey={(h) => h.uuid}
        name={(h) => `Host ${h.hostname}`}
        state={(h) => h.state}
      />
    </Page>
  );
}

function Discover({ host }: { host: string | null }) {
  return (
    <DialogButton label="Discover devices">
      {(close) => (
        <Dialog
          title={host ? `Discover the devices of ${host}?` : "Discover the devices of all hosts?"}
          confirm="Discover"
          onClose={close}
          run={async () => {
            await send("POST", "v2/discoveries", host ? { host } : {});
            return "The discovery has started.";
          }}
        >
          <p>Each agent searches its devices now instead of at its next interval, and reports changes.</p>
        </Dialog>
      )}
    </DialogButton>
  );
}

export function HostPage({ host }: { host: string }) {
  const services = usePoll<{ services: Service[] }>(
    buildPath("v2/services", { host, binary: AGENT, limit: 1 }),
    5000,
  );
  const devices = usePoll<{ devices: Device[]; devices_links?: Link[] }>(
    buildPath("v2/devices", { hostname: host, limit: MAX_DEVICES }),
    5000,
  );
  const accelerators = usePoll<AcceleratorList>(
    buildPath("v2/accelerators", { host, limit: MAX_ACCELERATORS }),
    10_000,
  );
  const found = devices.data?.devices ?? [];
  const isPartial = devices.data?.devices_links !== undefined;
  const rows = accelerators.data?.accelerators ?? [];
  // The list is in the order of the handles: without its end, no device has all of its handles.
  const isCut = accelerators.data?.accelerators_links !== undefined;
  const byDevice = Map.groupBy(rows, (row) => row.device_uuid);
  const owned = rows.filter((row) => row.arq_uuid !== null || row.error !== null);
  const service = services.data?.services[0];
  const error = services.error ?? devices.error ?? accelerators.error;
  useAnnounceChanges(
    host,
    devices.data && service
      ? new Map([
          [`Host ${host}`, words(service.state)],
          ...found.map((device) => [`Device ${device.address}`, words(stateOf(device))] as const),
        ])
      : null,
  );
  return (
    <Page
      title={host}
      trail={["Hosts", ["hosts"]]}
      actions={can("discovery:create") && service ? <Discover host={host} /> : null}
    >
      <ErrorBox error={error} stale={devices.data !== null} />
      {services.data && !service && !found.length ? <p>No agent of this host has reported.</p> : null}
      <div class="cards">
        <Card title="Topology" wide aside={<TopologyLegend />}>
          {devices.data && (accelerators.data || accelerators.error) ? (
            found.length ? (
              <TopologyPicture
                host={host}
                devices={found}
                handlesOf={(d) => (accelerators.data && !isCut ? byDevice.get(d.uuid) ?? [] : null)}
              />
            ) : (
              <p class="faint empty">The host has no devices.</p>
            )
          ) : devices.error ? null : (
            <Loading />
          )}
          {isCut ? (
            <p class="faint small">
              The host has more than {MAX_ACCELERATORS} handles: the page of each device shows those of the device.
            </p>
          ) : null}
          {isPartial ? (
            <p class="faint small">The first {MAX_DEVICES} devices are shown.</p>
          ) : null}
        </Card>
        {can("deployable:get_all") ? <DeviceSets query={{ host }} /> : null}
        <NvLinks host={host} found={found} isPartial={isPartial} />
        {service ? (
          <Card title="Agent" aside={<Badge state={service.state} />}>
            <Facts
              facts={[
                ["Last heartbeat", <Time at={service.last_seen_at} />],
                ["Down since", <Time at={service.down_since} />],
                ["Status", words(reportedStatus(service.state, service.status))],
                ["Known since", <Time at={service.created_at} />],
                ["Devices", count(found.length, "device")],
              ]}
            />
          </Card>
        ) : null}
        {service?.backends.length ? (
          <Card title="Backends">
            <Table
              caption="Backends"
              columns={[
                { name: "Backend", show: (b) => b.name },
                { name: "Driver", show: (b) => <a href={href(["drivers", b.driver])}>{b.driver}</a> },
                { name: "Status", show: (b) => <Badge state={reportedStatus(service.state, b.status)} /> },
                { name: "Error", show: (b) => <Text value={b.error} /> },
              ]}
              rows={service.backends}
              rowKey={(b) => b.uuid}
            />
          </Card>
        ) : null}
        <Card title="Who holds what" wide aside={
            accelerators.data ? (
              <span class="faint">
                {isCut ? `of the first ${MAX_ACCELERATORS} handles: ` : ""}
                {count(owned.length, "handle")}
              </span>
            ) : null
          }>
          {accelerators.data ? (
            <Table
              caption="Handles with an owner, or with an error"
              columns={[
                ...OWNER_COLUMNS,
                { name: "Error", show: (a) => <span class="clip">{<Text value={a.error} />}</span> },
              ]}
              rows={owned}
              rowKey={(a) => a.uuid}
              empty="No handle of this host is in use."
            />
          ) : accelerators.error ? null : (
            <Loading />
          )}
        </Card>
        <Story jobs={{ host }} subject={host} />
      </div>
    </Page>
  );
}
