// SPDX-License-Identifier: Apache-2.0
// The NVLinks between the GPUs of a host: a row and a column for each GPU.
import { buildPath } from "../lib/api";
import { count } from "../lib/format";
import { usePoll } from "../lib/poll";
import { href } from "../lib/router";
import type { Device, DeviceSet } from "../lib/types";
import { Card, ErrorBox } from "../ui/parts";

const MAX_GPUS = 32; // in the matrix
const MAX_READ = 200; // GPUs of one host

interface Links {
  number: number; // 0 if it is unknown
  maximum?: number; // without failures; 0 if it is unknown
  mbps: number; // of one link, in megabytes per second; 0 if it is unknown
}

function linksOf({ topology }: Device): Map<string, Links> {
  const peers = (topology["nvlink_peers"] ?? "").split(",").filter(Boolean);
  const numbers = (topology["nvlink_links"] ?? "").split(",");
  const mbps = Number(topology["nvlink_mbps"]) || 0;
  return new Map(peers.map((peer, index) => [peer, { number: Number(numbers[index]) || 0, mbps }]));
}

// Such as "4 × 26.562 GB/s" or "16 of 18 × 26.562 GB/s".
function describeLinks({ number, maximum = 0, mbps }: Links): string {
  const speed = mbps ? `${(mbps / 1000).toLocaleString("en", { maximumFractionDigits: 3 })}\u00a0GB/s` : "";
  const links = number && maximum > number ? `${number} of ${maximum}` : String(number || "");
  // A narrow column has the number and the speed in a line each.
  if (links && speed) return `${links.replaceAll(" ", "\u00a0")} ×\u00a0${speed}`;
  return speed || (links ? count(number, "link") : "linked");
}

// The links of a device set: between two of its GPUs, or, with an NVSwitch, from each of them to
// the fabric. Null without any.
export function describeSetLinks(set: DeviceSet): string | null {
  const attributes: Record<string, string> = Object.assign({}, ...(JSON.parse(set.attributes_list) as object[]));
  const numberOf = (name: string): number => Number(attributes[name]) || 0;
  const links = { number: numberOf("nvlinks"), maximum: numberOf("max_nvlinks"), mbps: numberOf("nvlink_mbps") };
  return links.number || links.mbps ? describeLinks(links) : null;
}

// If ``found`` is only a part of the devices of the host, the GPUs are read without the others.
export function NvLinks({ host, found, isPartial }: { host: string; found: Device[]; isPartial: boolean }) {
  const path = buildPath("v2/devices", { hostname: host, type: "GPU", limit: MAX_READ });
  const { data, error } = usePoll<{ devices: Device[] }>(isPartial ? path : null, 10_000);
  const devices = isPartial ? data?.devices ?? [] : found;
  const links = new Map(devices.map((device) => [device.address, linksOf(device)] as const));
  const linked = [...links].filter(([, peers]) => peers.size);
  // Most hosts have none. GPUs that only an NVSwitch connects have none to each other.
  if (!linked.length) return error ? <ErrorBox error={error} /> : null;
  const all = [...new Set(linked.flatMap(([address, peers]) => [address, ...peers.keys()]))].toSorted();
  const shown = all.slice(0, MAX_GPUS);
  const uuids = new Map(devices.map((device) => [device.address, device.uuid]));
  // A GPU whose driver is not loaded reports none: its peer may have reported them.
  const find = (a: string, b: string): Links | undefined => links.get(a)?.get(b) ?? links.get(b)?.get(a);
  return (
    <Card title="NVLinks" wide aside={<span class="faint">{count(all.length, "GPU")}</span>}>
      <p class="faint small">The number of links between two GPUs, and the speed of one link in one direction.</p>
      <div class="table-box" role="group" aria-label="NVLinks between GPUs" tabIndex={0}>
        <table class="matrix">
          <caption class="hidden">NVLinks between GPUs</caption>
          <thead>
            <tr>
              <th scope="col">GPU</th>
              {shown.map((address) => (
                <th key={address} scope="col">
                  <GpuName address={address} uuid={uuids.get(address)} />
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={row}>
                <th scope="row">
                  <GpuName address={row} uuid={uuids.get(row)} />
                </th>
                {shown.map((column) => (
                  <td key={column} class="links">{row === column ? null : <Cell links={find(row, column)} />}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {all.length > MAX_GPUS ? <p class="faint small">The first {MAX_GPUS} GPUs are shown.</p> : null}
    </Card>
  );
}

function Cell({ links }: { links: Links | undefined }) {
  return links ? <>{describeLinks(links)}</> : <span class="faint">–</span>;
}

function GpuName({ address, uuid }: { address: string; uuid: string | undefined }) {
  const short = address.replace(/^0000:/, "");
  if (uuid === undefined) return <span title="Cyborg does not manage it on this host.">{short} absent</span>;
  return (
    <a class="mono" href={href(["devices", uuid])} title={address}>
      {short}
    </a>
  );
}
