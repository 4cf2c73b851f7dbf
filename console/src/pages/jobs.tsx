// SPDX-License-Identifier: Apache-2.0
// Jobs: work on hosts, and rollouts of drivers on many hosts.
import { useAnnounceChanges } from "../lib/announce";
import { buildPath, send } from "../lib/api";
import { count, words } from "../lib/format";
import { useLast, usePoll } from "../lib/poll";
import { href, routeStore } from "../lib/router";
import { can } from "../lib/session";
import { useStore } from "../lib/store";
import type { Job, Step } from "../lib/types";
import { Dialog, DialogButton } from "../ui/dialog";
import { Badge, Bar, Card, ErrorBox, Facts, Id, Loading, Page, Text, Time, type Segment } from "../ui/parts";
import { Collection, Filters, nextMarker, PAGE_SIZE, Pager, Table, type Column } from "../ui/table";

const KINDS = ["install", "update", "uninstall", "prepare", "release", "restore", "plug", "unplug", "partition", "program"];
const ROLLOUTS = new Set(["install", "update", "uninstall"]);
const PARTITION = "partition";
const STATES = ["pending", "done", "failed", "cancelled"];

const STEP_STATES = ["failed", "rolled_back", "in_progress", "draining", "pending_agent", "waiting", "skipped", "done"];

const STEP_KINDS: [kind: string, states: string[]][] = [
  ["used", ["done"]],
  ["clean", ["in_progress", "draining"]],
  ["error", ["failed", "rolled_back"]],
  ["closed", ["skipped", "pending_agent"]],
  ["rest", ["waiting"]],
];

function segmentsOf(progress: Record<string, number>): Segment[] {
  return STEP_KINDS.flatMap(([kind, states]) =>
    states.map((state) => ({ kind, label: words(state), value: progress[state] ?? 0 })),
  );
}

function countSteps(job: Job): number {
  return Object.values(job.progress).reduce((sum, number) => sum + number, 0);
}

function countOf(job: Job, state: string): string {
  const all = count(countSteps(job), "step");
  return state ? `${(job.progress[state] ?? 0).toLocaleString("en")} of ${all}` : all;
}

export function Progress({ job }: { job: Job }) {
  const total = countSteps(job);
  if (total) {
    return (
      <span class="progress">
        <Bar segments={segmentsOf(job.progress)} total={total} name={`Progress of ${job.kind}`} />
        <span class="small">
          {(job.progress["done"] ?? 0).toLocaleString("en")} of {total.toLocaleString("en")}
        </span>
      </span>
    );
  }
  if (job.activity) {
    const { step, done, total: parts } = job.activity;
    return <span class="small">{words(step)}{parts ? ` ${done ?? 0} of ${parts}` : ""}</span>;
  }
  return <span class="faint">–</span>;
}

export function Subject({ job }: { job: Job }) {
  if (ROLLOUTS.has(job.kind)) return <a href={href(["drivers", job.subject])}>{job.subject}</a>;
  // The subject of a change of a layout is the device.
  return <Id value={job.subject} {...(job.kind === PARTITION ? { to: ["devices", job.subject] } : {})} />;
}

const COLUMNS: Column<Job>[] = [
  { name: "Job", show: (job) => <a href={href(["jobs", job.uuid])}>{job.kind}</a> },
  { name: "Subject", show: (job) => <Subject job={job} /> },
  { name: "Host", show: (job) => <Text value={job.host ?? (ROLLOUTS.has(job.kind) ? "many" : null)} /> },
  { name: "State", show: (job) => <Badge state={job.state} /> },
  { name: "Progress", show: (job) => <Progress job={job} /> },
  { name: "Error", show: (job) => <span class="clip" title={job.error ?? undefined}><Text value={job.error} /></span> },
  { name: "Created", show: (job) => <Time at={job.created_at} /> },
];

export function JobsTable({ jobs, empty }: { jobs: Job[]; empty?: string }) {
  return (
    <Table caption="Jobs" columns={COLUMNS} rows={jobs} rowKey={(job) => job.uuid} empty={empty ?? "No work is under way."} />
  );
}

export function JobsPage() {
  return (
    <Page title="Jobs">
      <Collection<Job>
        collection="jobs"
        route={["jobs"]}
        noun="job"
        caption="Jobs"
        query={{ sort_key: "created_at", sort_dir: "desc" }}
        columns={COLUMNS}
        filters={[
          { name: "state", label: "State", values: STATES },
          { name: "kind", label: "Kind", values: KINDS },
          { name: "host", label: "Host" },
          { name: "subject", label: "Subject" },
        ]}
        rowKey={(job) => job.uuid}
        name={(job) => `${job.kind} ${job.subject}`}
        state={(job) => job.state}
      />
    </Page>
  );
}

const STEP_COLUMNS: Column<Step>[] = [
  { name: "Host", show: (step) => <a href={href(["hosts", step.host])}>{step.host}</a> },
  { name: "Backend", show: (step) => step.backend },
  { name: "State", show: (step) => <Badge state={step.state} /> },
  { name: "Error", show: (step) => <Text value={step.error} /> },
];

export function JobPage({ uuid }: { uuid: string }) {
  const route = useStore(routeStore);
  const state = route.query.get("step_state") ?? "";
  const chosen = { step_state: STEP_STATES.includes(state) ? state : "" };
  const marker = route.query.get("marker") ?? "";
  const path = buildPath(`v2/jobs/${encodeURIComponent(uuid)}`, { ...chosen, marker, limit: PAGE_SIZE });
  const polled = usePoll<Job>(path, 2000);
  const { data, error, refresh } = polled;
  // The job and its steps stay while another page of the steps is read.
  const { last: job, shown } = useLast(polled);
  useAnnounceChanges(
    uuid,
    job
      ? new Map([
          [`Job ${job.kind}`, job.state],
          ["Steps done", String(job.progress["done"] ?? 0)],
        ])
      : null,
    // It may have ended before this page was shown.
    job && job.state !== "pending" ? `Job ${job.kind}: ${job.state}` : null,
  );
  const open = job?.state === "pending";
  const total = job ? countSteps(job) : 0;
  return (
    <Page
      title={job ? titleOf(job) : "Job"}
      trail={["Jobs", ["jobs"]]}
      actions={
        job && open && can("job:cancel") && (ROLLOUTS.has(job.kind) || job.kind === PARTITION) ? (
          <DialogButton label="Cancel the job" danger>
            {(close) => (
              <Dialog
                title="Cancel this job?"
                confirm="Cancel the job"
                danger
                onClose={close}
                run={async () => {
                  await send("DELETE", `v2/jobs/${job.uuid}`);
                  refresh();
                  return "The job is cancelled.";
                }}
              >
                <p>
                  {job.kind === PARTITION
                    ? "A device that drains keeps its layout and is offered again. Once its host works on the layout, the job cannot be cancelled."
                    : "Hosts that are done keep the change. Steps in progress end, the others are skipped."}
                </p>
              </Dialog>
            )}
          </DialogButton>
        ) : null
      }
    >
      <ErrorBox error={error} stale={data !== null} />
      {job ? (
        <div class="cards">
          <Card title="Progress" wide aside={<Badge state={job.state} />}>
            <Progress job={job} />
            <ul class="legend">
              {Object.entries(job.progress).map(([state, number]) => (
                <li key={state}>
                  <a href={href(["jobs", uuid], { step_state: state })}>
                    <Badge state={state} /> {number.toLocaleString("en")}
                  </a>
                </li>
              ))}
            </ul>
            <Facts
              facts={[
                ["Kind", job.kind],
                ["Subject", <Subject job={job} />],
                ["Host", <Text value={job.host} />],
                ["Attempts", job.attempts],
                ["Created", <Time at={job.created_at} />],
                ["Changed", <Time at={job.updated_at} />],
                ["Error", <Text value={job.error} />],
              ]}
            />
          </Card>
          {total ? (
            <Card title="Steps" wide aside={<span class="faint">{countOf(job, chosen.step_state)}</span>}>
              <Filters
                filters={[{ name: "step_state", label: "State", values: STEP_STATES }]}
                chosen={chosen}
                route={["jobs", uuid]}
              />
              {shown ? (
                <Table
                  caption="Steps"
                  columns={STEP_COLUMNS}
                  rows={shown.steps ?? []}
                  rowKey={(step) => `${step.host} ${step.backend}`}
                  busy={data === null}
                />
              ) : null}
              <Pager route={["jobs", uuid]} chosen={chosen} marker={marker} next={nextMarker(job.steps_links)} />
            </Card>
          ) : null}
        </div>
      ) : error ? null : (
        <Loading />
      )}
    </Page>
  );
}

function titleOf(job: Job): string {
  const kind = words(job.kind);
  const title = kind.charAt(0).toUpperCase() + kind.slice(1);
  return ROLLOUTS.has(job.kind) ? `${title} ${job.subject}` : title;
}
