// SPDX-License-Identifier: Apache-2.0
// The layouts of a device, and the change of its layout. What the device would offer more and less,
// and the device sets of its host that would be closed or offered, are shown first.
import { useState } from "preact/hooks";
import { buildPath, send } from "../lib/api";
import { count } from "../lib/format";
import { usePoll } from "../lib/poll";
import { go } from "../lib/router";
import { can } from "../lib/session";
import type { Device, DeviceLayout, Job, Layout, SetChange } from "../lib/types";
import { Dialog, DialogButton } from "../ui/dialog";
import { Badge, Card, ErrorBox, Facts, Loading, Text } from "../ui/parts";
import { Table } from "../ui/table";

// A longer list would hide the rest of the page.
const MAX_OPEN = 4;

function pathOf(device: Device): string {
  return `v2/devices/${device.uuid}/layout`;
}

function offersOf({ offers }: Layout): string {
  return Object.entries(offers)
    .map(([resourceClass, number]) => `${resourceClass} ${number.toLocaleString("en")}`)
    .join(", ");
}

export function Layouts({ device }: { device: Device }) {
  const { data, error } = usePoll<DeviceLayout>(pathOf(device), 10_000);
  return (
    <Card title="Layouts" wide>
      <ErrorBox error={error} stale={data !== null} />
      {data ? (
        <details open={data.layouts.length <= MAX_OPEN}>
          <summary>{count(data.layouts.length, "layout")}</summary>
          <Table<Layout>
            caption="Layouts of the device"
            columns={[
              { name: "Layout", show: (row) => row.name },
              { name: "Offers", show: (row) => <Text value={offersOf(row) || "nothing"} /> },
              { name: "Traits", show: (row) => <Text value={row.traits.join(", ")} /> },
              { name: "State", show: (row) => <LayoutState name={row.name} device={device} current={data.layout} /> },
            ]}
            rows={data.layouts}
            rowKey={(row) => row.name}
          />
        </details>
      ) : error ? null : (
        <Loading />
      )}
    </Card>
  );
}

function LayoutState({ name, device, current }: { name: string; device: Device; current: string | null }) {
  if (name === current) return <Badge state="current" tone="good" />;
  // An operator applied it, and the device does not have it yet, or not any more.
  if (name === device.desired_layout) return <Badge state="desired" tone="busy" />;
  return <Text value={null} />;
}

export function LayoutButton({ device, refresh }: { device: Device; refresh: () => void }) {
  return (
    <DialogButton label="Change layout">
      {(close) => <LayoutDialog device={device} refresh={refresh} close={close} />}
    </DialogButton>
  );
}

function LayoutDialog({ device, refresh, close }: { device: Device; refresh: () => void; close: () => void }) {
  const { data, error } = usePoll<DeviceLayout>(pathOf(device), 5000);
  const [name, setName] = useState("");
  const [drain, setDrain] = useState(false);
  const chosen = data?.layouts.find((row) => row.name === name);
  const { owned, dirty } = device.use;
  return (
    <Dialog
      title={`Change the layout of ${device.address}`}
      confirm="Change layout"
      onClose={close}
      run={async () => {
        const { uuid } = await send<Job>("PUT", pathOf(device), { layout: name, drain });
        refresh();
        if (can("job:get_one")) go(["jobs", uuid]);
        return `The change to the layout ${name} has started.`;
      }}
    >
      <ErrorBox error={error} stale={data !== null} />
      {data || error ? null : <Loading />}
      <label class="field">
        <span>Layout</span>
        <select required value={name} onChange={(event) => setName(event.currentTarget.value)}>
          <option value="">choose</option>
          {data?.layouts.map((row) => (
            <option key={row.name} value={row.name}>
              {row.name === data.layout ? `${row.name} (current)` : row.name}
            </option>
          ))}
        </select>
      </label>
      <div aria-live="polite">
        {data && chosen ? (
          <>
            <Difference layouts={data} chosen={chosen} />
            <SetChanges path={buildPath(pathOf(device), { preview: name })} />
          </>
        ) : null}
      </div>
      {owned || dirty ? (
        <div class="note warn">
          The device is in use: {count(owned, "handle")} {owned === 1 ? "is" : "are"} owned,{" "}
          {dirty.toLocaleString("en")} {dirty === 1 ? "is" : "are"} being cleaned.
        </div>
      ) : null}
      <label class="check">
        <input type="checkbox" checked={drain} onChange={(event) => setDrain(event.currentTarget.checked)} />
        <span>Cordon the device and wait until no handle is in use; otherwise the change of a device in use is refused</span>
      </label>
    </Dialog>
  );
}

interface ClassChange {
  resourceClass: string;
  before: number;
  after: number;
}

// What the device would offer more and less than now.
function Difference({ layouts, chosen }: { layouts: DeviceLayout; chosen: Layout }) {
  const current = layouts.layouts.find((row) => row.name === layouts.layout);
  if (!current) {
    return (
      <p>
        It would offer {offersOf(chosen) || "nothing"}
        {chosen.traits.length ? `, with the traits ${chosen.traits.join(", ")}` : ""}. Its current layout is unknown.
      </p>
    );
  }
  const names = [...new Set([...Object.keys(current.offers), ...Object.keys(chosen.offers)])].toSorted();
  const changes: ClassChange[] = names
    .map((resourceClass) => ({
      resourceClass,
      before: current.offers[resourceClass] ?? 0,
      after: chosen.offers[resourceClass] ?? 0,
    }))
    .filter(({ before, after }) => before !== after);
  const lost = current.traits.filter((trait) => !chosen.traits.includes(trait)).toSorted();
  const gained = chosen.traits.filter((trait) => !current.traits.includes(trait)).toSorted();
  if (!changes.length && !lost.length && !gained.length) return <p>The device would offer the same as now.</p>;
  return (
    <>
      {changes.length ? (
        <Table<ClassChange>
          caption="What the device would offer"
          columns={[
            { name: "Resource class", show: (row) => row.resourceClass },
            { name: "Now", number: true, show: (row) => row.before.toLocaleString("en") },
            { name: "Then", number: true, show: (row) => row.after.toLocaleString("en") },
            { name: "Change", number: true, show: (row) => <Signed value={row.after - row.before} /> },
          ]}
          rows={changes}
          rowKey={(row) => row.resourceClass}
        />
      ) : null}
      {lost.length || gained.length ? (
        <Facts
          facts={[
            ["Traits lost", <Text value={lost.join(", ")} />],
            ["Traits gained", <Text value={gained.join(", ")} />],
          ]}
        />
      ) : null}
    </>
  );
}

// The device sets of the host whose offers would change.
function SetChanges({ path }: { path: string }) {
  const { data, error } = usePoll<DeviceLayout>(path, 5000);
  const sets = data?.preview?.device_sets ?? [];
  return (
    <>
      <ErrorBox error={error} stale={data !== null} />
      {data || error ? null : <Loading />}
      {sets.length ? (
        <Table<SetChange>
          caption="Device sets that would be closed or offered"
          columns={[
            { name: "Device set", show: (row) => row.address },
            { name: "Size", number: true, show: (row) => row.size.toLocaleString("en") },
            { name: "Now", show: (row) => <Badge state={row.before} /> },
            { name: "Then", show: (row) => <Badge state={row.after} /> },
            { name: "Reason", show: (row) => <Text value={row.reason} /> },
          ]}
          rows={sets}
          rowKey={(row) => row.uuid}
        />
      ) : null}
    </>
  );
}

function Signed({ value }: { value: number }) {
  const size = Math.abs(value).toLocaleString("en");
  return value < 0 ? <span class="text-bad">−{size}</span> : <>+{size}</>;
}
