// SPDX-License-Identifier: Apache-2.0
// The fields of the REST API that the console shows; the served OpenAPI document has all.

import type { HandleUse } from "../ui/parts";

export interface Link {
  href: string;
  rel: string;
}

export interface Device {
  uuid: string;
  type: string;
  vendor: string;
  model: string;
  hostname: string;
  status: "enabled" | "maintaining";
  state: string;
  state_reasons: string[];
  health: string;
  health_reason: string | null;
  health_since: string;
  address: string;
  backend: string;
  numa_node: number | null;
  serial: string | null;
  draining: boolean;
  placement: string | null;
  vendor_board_info: string; // an object as JSON
  std_board_info: string; // an object as JSON
  use: HandleUse;
  deliverable: boolean;
  undeliverable_reason: string | null;
  topology: Record<string, string>;
  layout: string | null;
  layouts: string[];
  desired_layout: string | null;
  job_errors: string[];
  maintenance: {
    since: string;
    until: string;
    owned: number;
    cleaning: number;
    successor: string | null;
  } | null;
  created_at: string;
  updated_at: string | null;
}

export interface Layout {
  name: string;
  offers: Record<string, number>; // by resource class
  traits: string[];
}

export interface DeviceLayout {
  uuid: string;
  layout: string | null; // null if it is unknown
  layouts: Layout[];
  preview: { layout: string; device_sets: SetChange[] } | null; // null unless it is requested
}

// What a layout changes in the offer of a device set.
export interface SetChange {
  uuid: string;
  address: string;
  size: number;
  before: string;
  after: string;
  reason: string | null;
}

export interface HostClass extends HandleUse {
  resource_class: string;
  whole_free: number; // of deployables of which nothing is in use
  largest_free: number; // of one deployable
}

export interface Host {
  uuid: string;
  hostname: string;
  state: string;
  status: string;
  last_seen_at: string;
  down_since: string | null;
  devices: number;
  resource_classes: HostClass[];
}

export interface Message {
  uuid: string;
  kind: string;
  subject: string;
  state: string;
  attempts: number;
  error: string | null;
  created_at: string;
}

export interface Accelerator {
  uuid: string;
  type: string;
  hostname: string;
  device_uuid: string;
  deployable_uuid: string;
  resource_class: string;
  attach_handle_type: string;
  attach_handle_info: Record<string, string>;
  state: string;
  arq_uuid: string | null;
  instance_uuid: string | null;
  project_id: string | null;
  name: string | null;
  attached_at: string | null; // by the agent
  attach_error: string | null;
  error: string | null;
}

export interface SetMember {
  device: string; // addresses
  handle: string;
  device_uuid: string | null; // null if the host does not have it
}

// A deployable that is a device set; the list with an offer has no other ones.
export interface DeviceSet {
  uuid: string;
  address: string;
  device_id: string; // of its source
  resource_class: string;
  attributes_list: string; // a list of objects with one key each, as JSON
  device_set: {
    kind: string;
    size: number;
    members: SetMember[];
    offer: "offered" | "allocated" | "withdrawing" | "withheld";
    offer_reason: string | null;
    instance_uuid: string | null;
    project_id: string | null;
  };
}

export interface Service {
  uuid: string;
  kind: string;
  binary: string;
  host: string;
  status: string;
  state: string;
  last_seen_at: string;
  down_since: string | null;
  backends: { uuid: string; name: string; driver: string; status: string; error: string | null }[];
  created_at: string;
}

export interface Request {
  uuid: string;
  state: string;
  device_profile_name: string;
  device_profile_group_id: number;
  hostname: string | null;
  device_rp_uuid: string | null;
  instance_uuid: string | null;
  project_id: string | null;
  attach_handle_type: string;
  attach_handle_uuid: string | null;
  attach_handle_info: Record<string, string>;
  attached_at: string | null; // by the agent
  attach_error: string | null;
  created_at: string;
  updated_at: string | null;
}

export interface Context {
  uuid: string;
  name: string | null;
  description: string | null;
  state: string;
  project_id: string | null;
  groups: Record<string, string>[];
  config_data: Record<string, string>;
  device_profile: string | null;
  hidden_profile: string;
  hostname: string | null;
  instance_uuid: string | null;
  error: string | null;
  successor: { state: string; error: string | null } | null;
  arqs?: Request[]; // only of a single context
  epoch: number;
  expires_at: string | null;
  created_at: string;
  updated_at: string | null;
}

export interface Attachment {
  uuid: string;
  project_id: string;
  instance_uuid: string | null;
  hostname: string;
  device_profile: string | null;
  device_context: string | null;
  accelerator: string | null;
  mode: string;
  state: string;
  step: string | null;
  error: string | null;
  arqs: string[];
  created_at: string;
  updated_at: string | null;
}

export interface Profile {
  uuid: string;
  name: string;
  description: string | null;
  groups: Record<string, string>[];
  created_at: string;
  updated_at: string | null;
}

export interface Reason {
  code: string;
  reason: string;
  remedy: string | null;
  providers: number;
  handles: number;
}

export interface Explanation {
  uuid: string;
  name: string;
  last_failure: {
    at: string;
    code: string;
    reason: string;
    hostname: string | null;
    groups: { group: number | null; code: string; reason: string; handles: number }[];
  } | null;
  fitting_hosts: number;
  groups: {
    group: number;
    resources: Record<string, number>;
    fitting_providers: number;
    free_handles: number;
    reasons: Reason[];
  }[];
  providers: {
    uuid: string;
    hostname: string;
    device_uuid: string;
    address: string;
    resource_class: string;
    handles: number;
    free_handles: number;
    groups: { group: number; code: string | null; reason: string | null; remedy: string | null }[];
    owners: { arq_uuid: string; instance_uuid: string | null; project_id: string | null }[];
  }[];
  providers_links?: Link[];
}

export interface Capacity {
  servers: number;
  exact: boolean;
  free_handles: number;
  handles: number;
  losses: { code: string; reason: string; handles: number }[];
}

export interface Driver {
  uuid: string;
  name: string;
  version: string | null;
  type: string | null;
  support: string;
  abilities: string[];
  num_hosts: number;
  statuses: Record<string, number>;
}

export interface HostDriver {
  host: string;
  backend: string | null;
  status: string;
  error: string | null;
  remarks: string[];
  version: string | null;
  desired_status: string | null;
  applied: boolean | null;
  state: string;
}

export interface DriverDetail extends Driver {
  hosts: HostDriver[];
  hosts_links?: Link[];
  options: { name: string; kind: string; default: unknown; help: string; host_only: boolean }[];
}

export interface Job {
  uuid: string;
  kind: string;
  host: string | null;
  subject: string;
  state: string;
  error: string | null;
  attempts: number;
  progress: Record<string, number>;
  activity: { step: string; done: number | null; total: number | null } | null;
  created_at: string;
  updated_at: string | null;
  steps?: Step[];
  steps_links?: Link[];
}

export interface Step {
  host: string;
  backend: string;
  state: string;
  error: string | null;
}

export interface Audit {
  uuid: string;
  host: string | null;
  repair: boolean;
  state: string;
  error: string | null;
  sources: string[];
  hosts_done: number;
  hosts_total: number;
  num_findings: number;
  created_at: string;
  updated_at: string | null;
  findings?: {
    host: string;
    kind: string;
    object: string;
    explanation: string;
    advice: string;
    repair: string | null;
    repaired: boolean;
    error: string | null;
  }[];
}

export interface CustodyRecord {
  uuid: string;
  device_uuid: string;
  hostname: string;
  event: string;
  recorded_at: string;
  details: Record<string, unknown>;
  sequence: number | null;
  hash: string | null;
}

export interface CustodyLog {
  custody: CustodyRecord[];
  chain: { sequence: number; hash: string; base_sequence: number } | null;
  custody_links?: Link[];
}

export interface Limits {
  project_id: string;
  accelerator_requests: { limit: number; used: number };
  attachments: { limit: number; used: number };
  device_contexts: { limit: number; used: number };
  resources: { resource_class: string; limit: number; used: number; bound: number }[];
}

export interface Summary {
  hosts: { up: number; late: number; down: number; cordoned: number };
  services: { binary: string; state: string; count: number }[];
  down_services: { uuid: string; binary: string; host: string; last_seen_at: string }[];
  resource_classes: {
    resource_class: string;
    total: number;
    free: number;
    owned: number;
    dirty: number;
    draining: number;
    cordoned: number;
    undeliverable: number;
  }[];
  devices: {
    total: number;
    disabled: number;
    unhealthy: number;
    undeliverable: number;
    failing: number;
    maintenance: number;
  };
  unhealthy_devices: { host: string; address: string; health_since: string }[];
  guest_devices_missing: number;
  accelerator_requests: Record<string, number>;
  device_contexts: Record<string, number>;
  attachments: Record<string, number>;
  jobs: { kind: string; count: number; overdue: number; oldest: string }[];
  outbox: { kind: string; state: string; count: number; oldest: string }[];
  providers: { total: number; stale: number; failing: number };
  count_age: number;
}
