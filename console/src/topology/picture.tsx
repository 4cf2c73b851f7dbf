// SPDX-License-Identifier: Apache-2.0
// The picture of a host: where its devices are, in which state, and which handles are in use.
import { useEffect, useRef, useState } from "preact/hooks";
import { modelOf, shorten, stateOf, toneOf, words } from "../lib/format";
import { href } from "../lib/router";
import type { Accelerator, Device } from "../lib/types";
import { layOut, MAX_PIPS, PIP, PIP_GAP, pipColumns, type Bridge, type Node, type Placed } from "./layout";

const CHARACTER = 7.3; // width of a character of 12 px

export function TopologyPicture(props: {
  host: string;
  devices: Device[];
  handlesOf: (device: Device) => Accelerator[] | null;
}) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (!box.current) return;
    const observer = new ResizeObserver((entries) => {
      setWidth(Math.floor(entries[0]?.contentRect.width ?? 0));
    });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const picture = layOut(props.devices, props.handlesOf, Math.max(width, 280));
  return (
    <div ref={box} class="topology">
      {width ? (
        <svg
          role="group"
          aria-label={`Topology of ${props.host}`}
          width={picture.width}
          height={picture.height}
          viewBox={`0 0 ${picture.width} ${picture.height}`}
        >
          {picture.nodes.map((node) => (
            <NumaNode key={node.title} node={node} />
          ))}
        </svg>
      ) : null}
    </div>
  );
}

function NumaNode({ node }: { node: Node }) {
  return (
    <g role="group" aria-label={node.title}>
      <rect class="numa" x={node.x + 0.5} y={node.y + 0.5} width={node.width - 1} height={node.height - 1} rx="7" />
      <text class="numa-title" x={node.x + 12} y={node.y + 20}>
        {node.title}
      </text>
      {node.bridges.map((bridge) => (
        <Wire key={`wire ${bridge.name}`} from={bridge.parent} to={{ x: bridge.x, y: bridge.y + 13 }} />
      ))}
      {node.devices.map((placed) => (
        <Wire key={`wire ${placed.device.uuid}`} from={placed.parent} to={{ x: placed.x, y: placed.y + 20 }} />
      ))}
      {node.bridges.map((bridge) => (
        <BridgeMark key={`${bridge.kind} ${bridge.name}`} bridge={bridge} />
      ))}
      {node.devices.map((placed) => (
        <DeviceCard key={placed.device.uuid} placed={placed} />
      ))}
    </g>
  );
}

function Wire({ from, to }: { from: { x: number; y: number } | null; to: { x: number; y: number } }) {
  if (!from) return null;
  return <path class="wire" d={`M${from.x + 6} ${from.y + 19}V${to.y}H${to.x}`} />;
}

function BridgeMark({ bridge }: { bridge: Bridge }) {
  const root = bridge.kind === "root";
  return (
    <g>
      {root ? (
        <rect class="bridge" x={bridge.x} y={bridge.y + 7} width="12" height="12" rx="2" />
      ) : (
        <circle class="bridge" cx={bridge.x + 6} cy={bridge.y + 13} r="5" />
      )}
      <text class="bridge-name" x={bridge.x + 19} y={bridge.y + 17}>
        {root ? `PCIe root ${bridge.name}` : bridge.name}
      </text>
    </g>
  );
}

const PIP_KINDS: Record<string, string> = {
  bound: "used",
  preparing: "busy",
  dirty: "clean",
  error: "error",
  cordoned: "closed",
  draining: "closed",
  free: "free",
};

function DeviceCard({ placed }: { placed: Placed }) {
  const { device, x, y, width, height } = placed;
  const handles = placed.handles ?? [];
  const used = handles.filter((handle) => handle.arq_uuid !== null);
  const projects = new Set(used.map((handle) => handle.project_id).filter(Boolean));
  const summary = handles.length
    ? `${used.length} of ${handles.length} in use${projects.size ? `, ${projects.size} ${projects.size === 1 ? "project" : "projects"}` : ""}`
    : placed.handles
      ? "no handles"
      : "handles unknown";
  const failed = handles.filter((handle) => handle.state === "error").length;
  // A device stays ready while the cleaning of one of its handles fails.
  const deviceState = stateOf(device);
  const state = failed && device.state === "ready" ? "cleaning fails" : words(deviceState);
  const tone = failed ? "bad" : toneOf(deviceState);
  const room = Math.floor((width - 24) / CHARACTER);
  const columns = pipColumns(width);
  const shown = handles.slice(0, handles.length > MAX_PIPS ? MAX_PIPS - 1 : MAX_PIPS);
  return (
    <a
      class="device"
      href={href(["devices", device.uuid])}
      aria-label={`${device.type} ${device.address}, ${modelOf(device)}: ${state}; ${summary}`}
    >
      <rect class="device-back" x={x} y={y} width={width} height={height} rx="5" />
      <path class={`device-edge ${tone}`} d={`M${x + 1.5} ${y + 5}v${height - 10}`} />
      <text x={x + 12} y={y + 17}>
        <tspan class="device-address">{device.address}</tspan>
        <tspan class="device-type" dx="8">
          {device.type}
        </tspan>
      </text>
      <text class={`device-state ${tone}`} x={x + width - 10} y={y + 17}>
        {state}
      </text>
      <text class="device-more" x={x + 12} y={y + 34}>
        {shorten(`${summary} · ${modelOf(device)}`, room)}
      </text>
      {shown.map((handle, index) => (
        <Pip
          key={handle.uuid}
          handle={handle}
          x={x + 12 + (index % columns) * (PIP + PIP_GAP)}
          y={y + 43 + Math.floor(index / columns) * (PIP + PIP_GAP)}
        />
      ))}
      {handles.length > shown.length ? (
        <text class="device-more" x={x + width - 44} y={y + height - 8}>
          +{handles.length - shown.length}
        </text>
      ) : null}
    </a>
  );
}

export function Pip({ handle, x, y }: { handle: Pick<Accelerator, "state" | "resource_class" | "instance_uuid">; x: number; y: number }) {
  const kind = PIP_KINDS[handle.state] ?? "free";
  const title = `${handle.resource_class}: ${words(handle.state)}${handle.instance_uuid ? `, instance ${handle.instance_uuid}` : ""}`;
  return (
    <g class={`pip pip-${kind}`}>
      <title>{title}</title>
      <rect x={x + 0.5} y={y + 0.5} width={PIP - 1} height={PIP - 1} rx="2" />
      {kind === "error" ? (
        <path d={`M${x + 3} ${y + 3}l5 5m0 -5l-5 5`} />
      ) : kind === "clean" ? (
        <path d={`M${x + 2} ${y + 9}l7 -7`} />
      ) : kind === "closed" ? (
        <path d={`M${x + 2.5} ${y + 5.5}h6`} />
      ) : kind === "busy" ? (
        <circle cx={x + 5.5} cy={y + 5.5} r="2" />
      ) : null}
    </g>
  );
}

const LEGEND: [state: string, label: string][] = [
  ["bound", "in use"],
  ["preparing", "being prepared"],
  ["dirty", "to be cleaned"],
  ["error", "cleaning fails"],
  ["cordoned", "cordoned"],
  ["free", "free"],
];

export function TopologyLegend() {
  return (
    <ul class="legend" aria-label="Handles">
      {LEGEND.map(([state, label]) => (
        <li key={state}>
          <svg width={PIP} height={PIP} aria-hidden="true">
            <Pip handle={{ state, resource_class: "", instance_uuid: null }} x={0} y={0} />
          </svg>{" "}
          {label}
        </li>
      ))}
    </ul>
  );
}
