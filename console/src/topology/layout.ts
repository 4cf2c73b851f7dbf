// SPDX-License-Identifier: Apache-2.0
// The places of the parts of a host in its picture: NUMA nodes, PCIe roots, bridges and devices.
import type { Accelerator, Device } from "../lib/types";

export interface Bridge {
  kind: "root" | "bridge";
  name: string;
  x: number;
  y: number;
  parent: { x: number; y: number } | null;
}

export interface Placed {
  device: Device;
  handles: Accelerator[] | null; // null: unknown
  x: number;
  y: number;
  width: number;
  height: number;
  parent: { x: number; y: number } | null;
}

export interface Node {
  title: string;
  x: number;
  y: number;
  width: number;
  height: number;
  bridges: Bridge[];
  devices: Placed[];
}

export interface Picture {
  width: number;
  height: number;
  nodes: Node[];
}

export const PIP = 11; // side of the square of a handle
export const PIP_GAP = 3;
export const MAX_PIPS = 64;
const MARGIN = 12;
const GAP = 14;
const HEAD = 30; // of a NUMA node
const ROW = 26; // of a bridge
const INDENT = 20;
const CARD = 62; // a device without the second row of handles
const MIN_COLUMN = 420;

// The bridges above a device, from the host bridge; the last part of the path is the device.
export function bridgesOf(device: Device): string[] {
  const root = device.topology["pci_root"];
  const path = (device.topology["pci_path"] ?? "").split("/").filter(Boolean);
  return root ? [root, ...path.slice(0, -1)] : [];
}

export function pipColumns(width: number): number {
  return Math.max(1, Math.floor((width - 24) / (PIP + PIP_GAP)));
}

export function cardHeight(handles: number, width: number): number {
  const pips = Math.min(handles, MAX_PIPS);
  const rows = Math.max(1, Math.ceil(pips / pipColumns(width)));
  return CARD + (rows - 1) * (PIP + PIP_GAP);
}

// Lay a host out in columns of NUMA nodes, as many as fit into `width`.
export function layOut(
  devices: Device[],
  handlesOf: (device: Device) => Accelerator[] | null,
  width: number,
): Picture {
  const groups = new Map<number | null, Device[]>();
  for (const device of devices) {
    const group = groups.get(device.numa_node) ?? [];
    group.push(device);
    groups.set(device.numa_node, group);
  }
  const ordered = [...groups].sort(([a], [b]) => (a ?? Infinity) - (b ?? Infinity));
  const fitting = Math.max(1, Math.floor((width + GAP) / (MIN_COLUMN + GAP)));
  const columns = Math.min(Math.max(ordered.length, 1), fitting);
  const columnWidth = (width - GAP * (columns - 1)) / columns;
  const heights: number[] = Array.from({ length: columns }, () => 0);
  const nodes = ordered.map(([numa, members]) => {
    const shortest = heights.indexOf(Math.min(...heights));
    const y = heights[shortest] ?? 0;
    const node = layOutNode(numa, members, handlesOf, shortest * (columnWidth + GAP), y, columnWidth);
    heights[shortest] = y + node.height + GAP;
    return node;
  });
  return { width, height: Math.max(...heights, GAP) - GAP, nodes };
}

function layOutNode(
  numa: number | null,
  devices: Device[],
  handlesOf: (device: Device) => Accelerator[] | null,
  x: number,
  y: number,
  width: number,
): Node {
  const node: Node = {
    title: numa === null ? "NUMA node unknown" : `NUMA node ${numa}`,
    x,
    y,
    width,
    height: 0,
    bridges: [],
    devices: [],
  };
  const placed = new Map<string, Bridge>();
  let top = y + HEAD;
  const sorted = [...devices].sort((a, b) => sortKey(a).localeCompare(sortKey(b)));
  for (const device of sorted) {
    let parent: Bridge | null = null;
    bridgesOf(device).forEach((name, depth) => {
      const key = `${parent ? `${parent.name}>` : ""}${name}`;
      let bridge = placed.get(key);
      if (!bridge) {
        bridge = {
          kind: depth ? "bridge" : "root",
          name,
          x: x + MARGIN + depth * INDENT,
          y: top,
          parent: parent ? { x: parent.x, y: parent.y } : null,
        };
        placed.set(key, bridge);
        node.bridges.push(bridge);
        top += ROW;
      }
      parent = bridge;
    });
    const above = parent as Bridge | null;
    const left: number = above ? above.x + INDENT : x + MARGIN;
    const handles = handlesOf(device);
    const cardWidth = x + width - MARGIN - left;
    const height = cardHeight(handles?.length ?? 0, cardWidth);
    node.devices.push({
      device,
      handles,
      x: left,
      y: top,
      width: cardWidth,
      height,
      parent: above ? { x: above.x, y: above.y } : null,
    });
    top += height + 8;
  }
  node.height = top - y + 4;
  return node;
}

function sortKey(device: Device): string {
  return [...bridgesOf(device), device.address].join("/");
}
