// SPDX-License-Identifier: Apache-2.0
// What happened to an object, and what is under way: its jobs and the messages about it.
import { buildPath } from "../lib/api";
import { count, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { can } from "../lib/session";
import type { Job, Message } from "../lib/types";
import { JobsTable } from "../pages/jobs";
import { Badge, Card, ErrorBox, Loading, Text, Time } from "./parts";
import { Table } from "./table";

const ROWS = 20;

// `jobs` selects the jobs; `subject` is that of the messages.
export function Story({ jobs, subject }: { jobs: Record<string, string> | null; subject: string | null }) {
  return (
    <>
      {jobs && can("job:get_all") ? <Jobs query={jobs} /> : null}
      {subject && can("outbox:get_all") ? <Messages subject={subject} /> : null}
    </>
  );
}

function Jobs({ query }: { query: Record<string, string> }) {
  const path = buildPath("v2/jobs", { ...query, limit: ROWS, sort_key: "created_at", sort_dir: "desc" });
  const { data, error } = usePoll<{ jobs: Job[] }>(path, 10_000);
  return (
    <Card title="Jobs" wide>
      <ErrorBox error={error} stale={data !== null} />
      {data ? <JobsTable jobs={data.jobs} empty="No job of the last days." /> : error ? null : <Loading />}
      {data && data.jobs.length === ROWS ? <p class="faint small">The last {count(ROWS, "job")} are shown.</p> : null}
    </Card>
  );
}

function Messages({ subject }: { subject: string }) {
  const path = buildPath("v2/outbox", { subject, limit: ROWS, with_count: "true" });
  const { data, error } = usePoll<{ outbox: Message[]; count: number }>(path, 10_000);
  return (
    <Card title="Notifications" wide aside={data ? <span class="faint">{data.count} not delivered</span> : null}>
      <ErrorBox error={error} stale={data !== null} />
      {data ? (
        <Table
          caption="Messages about the object that are not delivered"
          columns={[
            { name: "To", show: (m) => words(m.kind) },
            { name: "State", show: (m) => <Badge state={m.state} /> },
            { name: "Attempts", number: true, show: (m) => m.attempts },
            { name: "Error", show: (m) => <span class="clip"><Text value={m.error} /></span> },
            { name: "Created", show: (m) => <Time at={m.created_at} /> },
          ]}
          rows={data.outbox}
          rowKey={(m) => m.uuid}
          empty="All were delivered."
        />
      ) : error ? null : (
        <Loading />
      )}
    </Card>
  );
}
