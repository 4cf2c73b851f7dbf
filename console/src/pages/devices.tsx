// SPDX-License-Identifier: Apache-2.0
// Devices, their life cycle, and their custody logs.
import { useAnnounceChanges } from "../lib/announce";
import { buildPath, send } from "../lib/api";
import { modelOf, reasonNotOffered, shorten, stateOf, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { href } from "../lib/router";
import { can } from "../lib/session";
import type { Accelerator, CustodyLog, CustodyRecord, Device, Link } from "../lib/types";
import { Dialog, DialogButton } from "../ui/dialog";
import { Badge, Card, ErrorBox, Facts, Id, Loading, Page, Text, Time, Use, type HandleUse } from "../ui/parts";
import { Story } from "../ui/story";
import { Collection, Table, type Column } from "../ui/table";
import { Timeline, type TimelineEvent } from "../ui/timeline";
import { DeviceSets } from "./device_sets";
import { GuestDevice } from "./guests";
import { LayoutButton, Layouts } from "./layouts";
import { MaintenanceButton } from "./maintenance";

const TOPOLOGY: Record<string, string> = {
  pci_root: "PCIe root",
  pci_path: "PCIe path",
  iommu_group: "IOMMU group",
  max_link_width: "Link width",
  max_link_speed: "Link speed",
  reset_methods: "Reset methods",
  firmware_version: "Firmware",
  module_id: "Module",
  nvlink_peers: "NVLinks to",
  nvlink_links: "NVLinks to each",
  nvlink_mbps: "Speed of an NVLink (MB/s)",
};

const YES_NO = { true: "yes", false: "no" };
export const TYPES = ["GPU", "FPGA", "AICHIP", "QAT", "NIC", "SSD", "CRYPTO", "OTHER"];

function useOf(device: Device): HandleUse {
  return { ...device.use, undeliverable: device.deliverable ? 0 : device.use.cordoned };
}

const COLUMNS: Column<Device>[] = [
  { name: "Address", show: (d) => <a class="mono" href={href(["devices", d.uuid])}>{d.address}</a> },
  { name: "Host", show: (d) => <a href={href(["hosts", d.hostname])}>{d.hostname}</a> },
  { name: "Type", show: (d) => d.type },
  { name: "Model", show: (d) => <span title={modelOf(d)}>{shorten(modelOf(d), 34)}</span> },
  { name: "State", show: (d) => <Badge state={stateOf(d)} /> },
  { name: "Use", show: (d) => <Use use={useOf(d)} name={`Handles of ${d.address}`} /> },
  { name: "Health", show: (d) => <Badge state={d.health} usual="ok" /> },
  { name: "Backend", show: (d) => d.backend },
  { name: "NUMA", number: true, show: (d) => <Text value={d.numa_node} /> },
  { name: "Placement", show: (d) => (d.placement ? <Badge state={d.placement} usual="in_sync" /> : <Text value={null} />) },
];

export function DevicesPage() {
  return (
    <Page title="Devices">
      <Collection<Device>
        collection="devices"
        route={["devices"]}
        noun="device"
        caption="Devices"
        columns={COLUMNS}
        filters={[
          { name: "hostname", label: "Host" },
          { name: "type", label: "Type", values: TYPES },
          { name: "health", label: "Health", values: ["ok", "unhealthy", "unknown"] },
          { name: "status", label: "Status", values: ["enabled", "maintaining"] },
          { name: "deliverable", label: "Attachable", values: ["true", "false"], texts: YES_NO },
          { name: "model", label: "Model" },
          { name: "backend", label: "Backend" },
          { name: "vendor", label: "Vendor" },
          { name: "address", label: "Address" },
        ]}
        rowKey={(d) => d.uuid}
        name={(d) => `Device ${d.address} of ${d.hostname}`}
        state={stateOf}
      />
    </Page>
  );
}

export function DevicePage({ uuid }: { uuid: string }) {
  const path = `v2/devices/${encodeURIComponent(uuid)}`;
  const { data: device, error, refresh } = usePoll<Device>(path, 5000);
  useAnnounceChanges(
    uuid,
    device ? new Map([[`Device ${device.address}`, words(stateOf(device))]]) : null,
  );
  return (
    <Page
      title={device ? device.address : "Device"}
      trail={["Devices", ["devices"]]}
      actions={device ? <Actions device={device} refresh={refresh} /> : null}
    >
      <ErrorBox error={error} stale={device !== null} />
      {device ? (
        <div class="cards">
          <State device={device} />
          <Card title="Facts">
            <Facts
              facts={[
                ["Type", device.type],
                ["Model", modelOf(device)],
                ["Vendor", device.vendor],
                ["Serial number", <Text value={device.serial} />],
                ["Host", <a href={href(["hosts", device.hostname])}>{device.hostname}</a>],
                ["Backend", device.backend],
                ["NUMA node", <Text value={device.numa_node} />],
                ["Layout", <Text value={device.layout} />],
                ["Found", <Time at={device.created_at} />],
                ["Changed", <Time at={device.updated_at} />],
                ["Use", <Use use={useOf(device)} name="Handles" />],
                ["UUID", <span class="mono">{device.uuid}</span>],
                ...Object.entries(device.topology).map(
                  ([name, value]) => [TOPOLOGY[name] ?? words(name), <span class="mono">{value}</span>] as [string, preact.VNode],
                ),
              ]}
            />
          </Card>
          {device.layouts.length && can("layout:get_one") ? <Layouts device={device} /> : null}
          <Accelerators device={device} />
          {can("deployable:get_all") ? <DeviceSets query={{ member: device.uuid }} /> : null}
          <Story jobs={{ subject: device.uuid }} subject={device.uuid} />
          {can("custody:get_all") ? <Custody device={device} /> : null}
        </div>
      ) : error ? null : (
        <Loading />
      )}
    </Page>
  );
}

function Actions({ device, refresh }: { device: Device; refresh: () => void }) {
  const enabled = device.status === "enabled";
  const isPartitionable = device.layouts.length > 0 && can("layout:get_one") && can("layout:set");
  const rule = enabled ? "device:disable" : "device:enable";
  return (
    <>
      {isPartitionable ? <LayoutButton device={device} refresh={refresh} /> : null}
      {can("device:maintain") ? <MaintenanceButton device={device} refresh={refresh} /> : null}
      {can(rule) ? (
        <DialogButton label={enabled ? "Disable" : "Enable"} danger={enabled}>
          {(close) => (
            <Dialog
              title={`${enabled ? "Disable" : "Enable"} ${device.address}?`}
              confirm={enabled ? "Disable" : "Enable"}
              danger={enabled}
              onClose={close}
              run={async () => {
                await send("POST", `v2/devices/${device.uuid}/${enabled ? "disable" : "enable"}`);
                refresh();
                return `The device is ${enabled ? "disabled" : "enabled"}.`;
              }}
            >
              <p>
                {enabled
                  ? "No new requests are bound to it. Those that are bound stay bound."
                  : "New requests can be bound to it. If its work failed, it is tried again."}
              </p>
            </Dialog>
          )}
        </DialogButton>
      ) : null}
    </>
  );
}

const CONDITIONS: Record<string, string> = {
  setup_required: "Its driver must be set up on the host.",
  reboot_required: "The host must be rebooted.",
  undeliverable: "It cannot be attached to an instance.",
  disabled: "Its backend is disabled, being removed or cordoned, or it waits for another layout.",
  maintaining: "An operator has disabled it. Bound handles stay bound.",
  programming: "An image is being programmed, or its layout is being changed.",
  restore_failed: "A bound handle could not be prepared again after a reboot. This is retried.",
  failing: "Its last prepare jobs failed. It is tried again after a time.",
  unhealthy: "Its driver measured a fault.",
  host_down: "The agent of its host is down.",
  draining: "It is no longer present on the host. Bound handles stay.",
};

function State({ device }: { device: Device }) {
  const notOffered = reasonNotOffered(device);
  return (
    <Card title="State" aside={<Badge state={stateOf(device)} />}>
      {notOffered === null ? null : <p>It is not offered: {notOffered}</p>}
      {device.state_reasons.length ? (
        <ul class="reasons">
          {device.state_reasons.map((reason) => (
            <li key={reason}>
              <span>
                <Badge state={reason} />
              </span>
              <span>
                {CONDITIONS[reason] ?? ""}
                {reason === "undeliverable" && device.undeliverable_reason ? ` ${device.undeliverable_reason}` : ""}
              </span>
            </li>
          ))}
        </ul>
      ) : notOffered === null ? (
        <p>Its free handles can be allocated.</p>
      ) : null}
      <Facts
        facts={[
          [
            "Health",
            <>
              <Badge state={device.health} /> <span class="faint"><Time at={device.health_since} /></span>
            </>,
          ],
          ["Placement", device.placement ? <Badge state={device.placement} /> : <Text value={null} />],
        ]}
      />
      {device.health_reason ? <div class="note bad">{device.health_reason}</div> : null}
      {device.maintenance ? (
        <div class="note warn">
          Maintenance began <Time at={device.maintenance.since} />, ends{" "}
          <Time at={device.maintenance.until} />: {device.maintenance.owned} handles are owned,{" "}
          {device.maintenance.cleaning} are being cleaned.
        </div>
      ) : null}
      {device.job_errors.map((text) => (
        <div class="note bad" key={text}>
          {text}
        </div>
      ))}
    </Card>
  );
}

export const MAX_ACCELERATORS = 1000;

export interface AcceleratorList {
  accelerators: Accelerator[];
  accelerators_links?: Link[];
}

export function handleName(info: Record<string, string>, fallback: string): string {
  const { domain, bus, device, function: fn, ...others } = info;
  const more = others["asked_type"] ?? Object.values(others)[0];
  if (bus === undefined || device === undefined || fn === undefined) return more ?? fallback;
  const hex = (text: string, digits: number): string => text.replace(/^0x/, "").padStart(digits, "0");
  const address = `${hex(domain ?? "0", 4)}:${hex(bus, 2)}:${hex(device, 2)}.${hex(fn, 1)}`;
  return more ? `${address} ${more}` : address;
}

function nameOf(row: Accelerator): string {
  return handleName(row.attach_handle_info, row.uuid.slice(0, 8));
}

export const OWNER_COLUMNS: Column<Accelerator>[] = [
  { name: "Handle", show: (a) => <span class="mono" title={a.uuid}>{shorten(nameOf(a), 40)}</span> },
  { name: "Class", show: (a) => a.resource_class },
  { name: "State", show: (a) => <Badge state={a.state} /> },
  { name: "Request", show: (a) => <Id value={a.arq_uuid} {...(a.arq_uuid ? { to: ["requests", a.arq_uuid] } : {})} /> },
  { name: "Instance", show: (a) => <Id value={a.instance_uuid} /> },
  { name: "Project", show: (a) => <Id value={a.project_id} /> },
  { name: "Name", show: (a) => <Text value={a.name} /> },
  { name: "In guest", show: (a) => <GuestDevice owned={a} /> },
];

function Accelerators({ device }: { device: Device }) {
  const path = buildPath("v2/accelerators", { device: device.uuid, limit: MAX_ACCELERATORS });
  const { data, error } = usePoll<AcceleratorList>(path, 10_000);
  const rows = data?.accelerators ?? [];
  const failed = rows.filter((row) => row.error);
  return (
    <Card title="Accelerators" wide>
      <ErrorBox error={error} stale={data !== null} />
      {failed.map((row) => (
        <div class="note bad" key={row.uuid}>
          {nameOf(row)}: {row.error}
        </div>
      ))}
      {data ? (
        <>
          <Table caption="Accelerators of the device" columns={OWNER_COLUMNS} rows={rows} rowKey={(row) => row.uuid} />
          {data.accelerators_links ? (
            <p class="faint small">The first {MAX_ACCELERATORS} accelerators are shown.</p>
          ) : null}
        </>
      ) : error ? null : (
        <Loading />
      )}
    </Card>
  );
}

const CUSTODY_TONES: Record<string, TimelineEvent["tone"]> = {
  device_added: "good",
  device_removed: "warn",
  claimed: "busy",
  assigned: "busy",
  prepared: "busy",
  cleaned: "good",
  programmed: "good",
  partitioned: "good",
  cleaning_failed: "bad",
  cleaning_abandoned: "bad",
  program_failed: "bad",
  partition_failed: "bad",
};

export function custodyEvent(record: CustodyRecord): TimelineEvent {
  const { details } = record;
  const text = (name: string): string => (typeof details[name] === "string" ? String(details[name]) : "");
  const arq = text("arq");
  const handle = text("handle_address");
  return {
    key: record.uuid,
    at: record.recorded_at,
    tone: CUSTODY_TONES[record.event] ?? "idle",
    title: words(record.event),
    details: (
      <>
        {handle ? <span class="mono">{handle} </span> : null}
        {arq ? (
          <>
            request <Id value={arq} to={["requests", arq]} />{" "}
          </>
        ) : null}
        {text("instance") ? (
          <>
            instance <Id value={text("instance")} />{" "}
          </>
        ) : null}
        {text("image") ? <>image {text("image")} </> : null}
        {text("layout") ? <>layout {text("layout")} </> : null}
        {text("reason") ? <>({words(text("reason"))}) </> : null}
        {text("error") ? <span class="text-bad">{text("error")} </span> : null}
        {record.sequence !== null ? (
          <span title={record.hash ?? undefined}>
            #{record.sequence} <span class="mono">{record.hash?.slice(0, 8)}</span>
          </span>
        ) : (
          <span>not sealed yet</span>
        )}
      </>
    ),
  };
}

function Custody({ device }: { device: Device }) {
  const path = buildPath(`v2/devices/${device.uuid}/custody`, {
    limit: 50,
    sort_key: "recorded_at",
    sort_dir: "desc",
  });
  const { data, error } = usePoll<CustodyLog>(path, 10_000);
  return (
    <Card
      title="Life cycle and custody"
      wide
      aside={
        data?.chain ? (
          <span class="faint small">
            {data.chain.sequence} sealed records, last hash <span class="mono">{data.chain.hash.slice(0, 12)}</span>
          </span>
        ) : null
      }
    >
      <ErrorBox error={error} stale={data !== null} />
      {data ? (
        <Timeline label="Custody log" events={data.custody.map(custodyEvent)} />
      ) : error ? null : (
        <Loading />
      )}
      {data?.custody_links ? (
        <p class="faint small">The last 50 records are shown. cyborg device-custody has all, and verifies them.</p>
      ) : null}
    </Card>
  );
}
