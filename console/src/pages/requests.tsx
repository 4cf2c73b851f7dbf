// SPDX-License-Identifier: Apache-2.0
// Accelerator requests (ARQs) with their time lines.
import { useAnnounceChanges } from "../lib/announce";
import { buildPath } from "../lib/api";
import { toneOf, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { href } from "../lib/router";
import { can } from "../lib/session";
import type { Accelerator, CustodyLog, Job, Request } from "../lib/types";
import { Badge, Card, ErrorBox, Facts, Id, Loading, Page, Text, Time } from "../ui/parts";
import { Story } from "../ui/story";
import { Collection, type Column } from "../ui/table";
import { Timeline, type TimelineEvent } from "../ui/timeline";
import { custodyEvent, handleName } from "./devices";
import { GuestDevice } from "./guests";

export function HostLink({ host }: { host: string | null }) {
  if (!host) return <Text value={null} />;
  return can("service:get_all") ? <a href={href(["hosts", host])}>{host}</a> : <>{host}</>;
}

const STATES = ["Initial", "BindStarted", "Bound", "BindFailed", "Unbound", "UnbindFailed", "Deleting"];

export const REQUEST_COLUMNS: Column<Request>[] = [
  { name: "Request", show: (r) => <Id value={r.uuid} to={["requests", r.uuid]} /> },
  { name: "State", show: (r) => <Badge state={r.state} /> },
  { name: "Profile", show: (r) => r.device_profile_name },
  { name: "Group", number: true, show: (r) => r.device_profile_group_id },
  { name: "Host", show: (r) => <HostLink host={r.hostname} /> },
  { name: "Instance", show: (r) => <Id value={r.instance_uuid} /> },
  { name: "Project", show: (r) => <Id value={r.project_id} /> },
  { name: "In guest", show: (r) => <GuestDevice owned={r} /> },
  { name: "Created", show: (r) => <Time at={r.created_at} /> },
];

export function RequestsPage() {
  return (
    <Page title="Requests">
      <Collection<Request>
        collection="accelerator_requests"
        rowsKey="arqs"
        route={["requests"]}
        noun="request"
        caption="Accelerator requests"
        query={{ sort_key: "created_at", sort_dir: "desc" }}
        columns={REQUEST_COLUMNS}
        filters={[
          { name: "state", label: "State", values: STATES },
          { name: "attach_failed", label: "Missing in guest", values: ["true", "false"] },
          { name: "instance", label: "Instance (UUID)" },
        ]}
        rowKey={(r) => r.uuid}
        name={(r) => `Request ${r.uuid.slice(0, 8)}`}
        state={(r) => r.state}
      />
    </Page>
  );
}

export function RequestPage({ uuid }: { uuid: string }) {
  const { data: arq, error } = usePoll<Request>(
    `v2/accelerator_requests/${encodeURIComponent(uuid)}`,
    5000,
  );
  useAnnounceChanges(uuid, arq ? new Map([["Request", words(arq.state)]]) : null);
  return (
    <Page title={`Request ${uuid.slice(0, 8)}`} trail={["Requests", ["requests"]]}>
      <ErrorBox error={error} stale={arq !== null} />
      {arq ? (
        <div class="cards">
          <Card title="Facts" aside={<Badge state={arq.state} />}>
            {arq.attach_error ? (
              <div class="note bad">The running guest lacks the device: {arq.attach_error}</div>
            ) : null}
            <Facts
              facts={[
                ["Device profile", <>{arq.device_profile_name}, group {arq.device_profile_group_id}</>],
                ["Host", <HostLink host={arq.hostname} />],
                ["Instance", <Text value={arq.instance_uuid} />],
                ["Project", <Text value={arq.project_id} />],
                ["Provider", <Id value={arq.device_rp_uuid} />],
                ["Created", <Time at={arq.created_at} />],
                ["Changed", <Time at={arq.updated_at} />],
                ["Handle", <span class="mono">{handleName(arq.attach_handle_info, "–")}</span>],
                ["In guest", <GuestDevice owned={arq} />],
                ["UUID", <span class="mono">{arq.uuid}</span>],
              ]}
            />
          </Card>
          <Card title="Time line">
            <RequestTimeline arq={arq} />
          </Card>
          <Story
            jobs={arq.instance_uuid ? { subject: arq.instance_uuid } : null}
            subject={arq.instance_uuid ?? arq.uuid}
          />
        </div>
      ) : error ? null : (
        <Loading />
      )}
    </Page>
  );
}

function RequestTimeline({ arq }: { arq: Request }) {
  const handle = can("accelerator:get_one") && arq.attach_handle_uuid;
  const accelerator = usePoll<Accelerator>(handle ? `v2/accelerators/${handle}` : null, 0);
  const device = accelerator.data?.device_uuid;
  const custody = usePoll<CustodyLog>(
    device && can("custody:get_all")
      ? buildPath(`v2/devices/${device}/custody`, { limit: 200, sort_key: "recorded_at", sort_dir: "desc" })
      : null,
    10_000,
  );
  const jobs = usePoll<{ jobs: Job[] }>(
    arq.instance_uuid && can("job:get_all")
      ? buildPath("v2/jobs", { subject: arq.instance_uuid, limit: 20 })
      : null,
    10_000,
  );
  const events: TimelineEvent[] = [
    { key: "created", at: arq.created_at, title: "created", tone: "idle" },
    ...(custody.data?.custody ?? []).filter((record) => record.details["arq"] === arq.uuid).map(custodyEvent),
    ...(jobs.data?.jobs ?? []).map(jobEvent),
  ];
  if (arq.attached_at) {
    events.push({ key: "attached", at: arq.attached_at, title: "attached to the guest", tone: "good" });
  }
  if (arq.updated_at) {
    events.push({ key: "now", at: arq.updated_at, title: <>state {words(arq.state)}</>, tone: toneOf(arq.state) });
  }
  return (
    <>
      <ErrorBox error={custody.error ?? jobs.error} />
      <Timeline label="Time line of the request" events={events} />
      {device && can("device:get_one") ? (
        <p>
          <a href={href(["devices", device])}>Device of this request</a>
        </p>
      ) : null}
    </>
  );
}

export function jobEvent(job: Job): TimelineEvent {
  return {
    key: job.uuid,
    at: job.updated_at ?? job.created_at,
    tone: toneOf(job.state),
    title: <>job {words(job.kind)} {words(job.state)}</>,
    details: (
      <>
        <a href={href(["jobs", job.uuid])}>job</a> on {job.host ?? "hosts"}
        {job.error ? <span class="text-bad"> {job.error}</span> : null}
      </>
    ),
  };
}
