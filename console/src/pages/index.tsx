// SPDX-License-Identifier: Apache-2.0
// The pages, and which of them the policy allows.
import type { VNode } from "preact";
import { can } from "../lib/session";
import { AttachmentPage, AttachmentsPage } from "./attachments";
import { AuditPage, AuditsPage } from "./audits";
import { CloudPage } from "./cloud";
import { ContextPage, ContextsPage } from "./contexts";
import { DevicePage, DevicesPage } from "./devices";
import { DriverPage, DriversPage } from "./drivers";
import { HostPage, HostsPage } from "./hosts";
import { JobPage, JobsPage } from "./jobs";
import { OverviewPage } from "./overview";
import { ProfilePage, ProfilesPage } from "./profiles";
import { RequestPage, RequestsPage } from "./requests";

interface Entry {
  path: string; // first segment
  title: string;
  rules: string[]; // one of them is needed
  list: () => VNode;
  one?: (uuid: string) => VNode;
  oneNamed?: (name: string) => VNode;
}

const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;
// Names that a browser would resolve as parts of a path.
const PATH_PARTS = ["", ".", ".."];

const ENTRIES: Entry[] = [
  { path: "", title: "Overview", rules: ["summary:get", "limits:get"], list: () => <OverviewPage /> },
  { path: "cloud", title: "Cloud", rules: ["service:get_all"], list: () => <CloudPage /> },
  {
    path: "hosts",
    title: "Hosts",
    rules: ["service:get_all"],
    list: () => <HostsPage />,
    oneNamed: (key) => <HostPage host={key} />,
  },
  {
    path: "devices",
    title: "Devices",
    rules: ["device:get_all"],
    list: () => <DevicesPage />,
    one: (key) => <DevicePage uuid={key} />,
  },
  {
    path: "requests",
    title: "Requests",
    rules: ["arq:get_all"],
    list: () => <RequestsPage />,
    one: (key) => <RequestPage uuid={key} />,
  },
  {
    path: "contexts",
    title: "Contexts",
    rules: ["device_context:get_all"],
    list: () => <ContextsPage />,
    one: (key) => <ContextPage uuid={key} />,
  },
  {
    path: "attachments",
    title: "Attachments",
    rules: ["attachment:get_all"],
    list: () => <AttachmentsPage />,
    one: (key) => <AttachmentPage uuid={key} />,
  },
  {
    path: "profiles",
    title: "Profiles",
    rules: ["device_profile:get_all"],
    list: () => <ProfilesPage />,
    oneNamed: (key) => <ProfilePage name={key} />,
  },
  {
    path: "drivers",
    title: "Drivers",
    rules: ["driver:get_all"],
    list: () => <DriversPage />,
    oneNamed: (key) => <DriverPage name={key} />,
  },
  {
    path: "jobs",
    title: "Jobs",
    rules: ["job:get_all"],
    list: () => <JobsPage />,
    one: (key) => <JobPage uuid={key} />,
  },
  {
    path: "audits",
    title: "Audits",
    rules: ["audit:get_all"],
    list: () => <AuditsPage />,
    one: (key) => <AuditPage uuid={key} />,
  },
];

export function visiblePages(): Entry[] {
  return ENTRIES.filter((entry) => entry.rules.some(can));
}

export function findPage(path: string[]): VNode | null {
  const [first = "", key] = path;
  const entry = visiblePages().find((each) => each.path === first);
  if (!entry || path.length > 2) return null;
  if (key === undefined) return entry.list();
  if (entry.one && UUID.test(key)) return entry.one(key);
  if (entry.oneNamed && !PATH_PARTS.includes(key)) return entry.oneNamed(key);
  return null;
}
