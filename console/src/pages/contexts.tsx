// SPDX-License-Identifier: Apache-2.0
// Device contexts with their time lines, and why they find devices or not.
import { useAnnounceChanges } from "../lib/announce";
import { buildPath } from "../lib/api";
import { count, toneOf, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { can } from "../lib/session";
import type { Context, Explanation, Job } from "../lib/types";
import { Badge, Card, ErrorBox, Facts, Id, Loading, Page, Text, Time } from "../ui/parts";
import { Story } from "../ui/story";
import { Collection, Table, type Column } from "../ui/table";
import { Timeline, type TimelineEvent } from "../ui/timeline";
import { Groups } from "./profiles";
import { HostLink, jobEvent, REQUEST_COLUMNS } from "./requests";

const STATES = ["unbound", "reserving", "reserved", "binding", "bound", "unbinding", "cleaning", "error"];

const COLUMNS: Column<Context>[] = [
  { name: "Context", show: (c) => <Id value={c.uuid} to={["contexts", c.uuid]} /> },
  { name: "Name", show: (c) => <Text value={c.name} /> },
  { name: "State", show: (c) => <Badge state={c.state} /> },
  { name: "Host", show: (c) => <HostLink host={c.hostname} /> },
  { name: "Instance", show: (c) => <Id value={c.instance_uuid} /> },
  { name: "Project", show: (c) => <Id value={c.project_id} /> },
  { name: "Expires", show: (c) => <Time at={c.expires_at} /> },
  { name: "Created", show: (c) => <Time at={c.created_at} /> },
];

export function ContextsPage() {
  return (
    <Page title="Device contexts">
      <Collection<Context>
        collection="device_contexts"
        route={["contexts"]}
        noun="context"
        caption="Device contexts"
        query={{ sort_key: "created_at", sort_dir: "desc" }}
        columns={COLUMNS}
        filters={[
          { name: "state", label: "State", values: STATES },
          { name: "host", label: "Host" },
          { name: "instance", label: "Instance (UUID)" },
          { name: "device_profile", label: "Made from profile" },
        ]}
        rowKey={(c) => c.uuid}
        name={(c) => `Context ${c.name ?? c.uuid.slice(0, 8)}`}
        state={(c) => c.state}
      />
    </Page>
  );
}

export function ContextPage({ uuid }: { uuid: string }) {
  const path = `v2/device_contexts/${encodeURIComponent(uuid)}`;
  const { data: context, error } = usePoll<Context>(path, 5000);
  // It reads all providers: once, and again only if the context changes.
  const explained = usePoll<Explanation>(
    context && can("device_context:explain")
      ? buildPath(`${path}/explanation`, { limit: 1, marker: null })
      : null,
    0,
  );
  const jobs = usePoll<{ jobs: Job[] }>(
    context?.instance_uuid && can("job:get_all")
      ? buildPath("v2/jobs", { subject: context.instance_uuid, limit: 20 })
      : null,
    10_000,
  );
  useAnnounceChanges(uuid, context ? new Map([["Context", words(context.state)]]) : null);
  return (
    <Page
      title={context?.name ?? `Context ${uuid.slice(0, 8)}`}
      trail={["Device contexts", ["contexts"]]}
    >
      <ErrorBox error={error} stale={context !== null} />
      {context ? (
        <div class="cards">
          <Card title="Facts" aside={<Badge state={context.state} />}>
            {context.error ? <div class="note bad">{context.error}</div> : null}
            <Facts
              facts={[
                ["Description", <Text value={context.description} />],
                ["Host", <HostLink host={context.hostname} />],
                ["Instance", <Text value={context.instance_uuid} />],
                ["Project", <Text value={context.project_id} />],
                ["Profile of the flavor", <span class="mono">{context.hidden_profile}</span>],
                ["Made from", <Text value={context.device_profile} />],
                ["UUID", <span class="mono">{context.uuid}</span>],
                ["Created", <Time at={context.created_at} />],
                ["Changed", <Time at={context.updated_at} />],
                ["Epoch", context.epoch],
                ["Expires", <Time at={context.expires_at} />],
                ["Groups", <GroupList groups={context.groups} />],
                [
                  "Config data",
                  <Text
                    value={Object.entries(context.config_data)
                      .map(([key, value]) => `${key}=${value}`)
                      .join(", ")}
                  />,
                ],
              ]}
            />
            {context.successor ? (
              <div class="note warn">
                Successor: {words(context.successor.state)}
                {context.successor.error ? `, ${context.successor.error}` : ""}
              </div>
            ) : null}
          </Card>
          <Card title="Time line">
            <ErrorBox error={jobs.error} />
            <Timeline
              label="Time line of the context"
              events={eventsOf(context, explained.data, jobs.data?.jobs ?? [])}
            />
          </Card>
          {context.arqs?.length ? (
            <Card title="Requests" wide aside={<span class="faint">{count(context.arqs.length, "request")}</span>}>
              <Table
                caption="Requests of the context"
                columns={REQUEST_COLUMNS}
                rows={context.arqs}
                rowKey={(r) => r.uuid}
              />
            </Card>
          ) : null}
          <Story
            jobs={context.instance_uuid ? { subject: context.instance_uuid } : null}
            subject={context.instance_uuid ?? context.uuid}
          />
          {explained.data ? (
            <Card title="Where it fits" wide>
              <Groups explanation={explained.data} />
            </Card>
          ) : (
            <ErrorBox error={explained.error} />
          )}
        </div>
      ) : error ? null : (
        <Loading />
      )}
    </Page>
  );
}

function eventsOf(context: Context, explained: Explanation | null, jobs: Job[]): TimelineEvent[] {
  const events: TimelineEvent[] = [
    { key: "created", at: context.created_at, title: "created", tone: "idle" },
    ...jobs.map(jobEvent),
  ];
  if (context.updated_at) {
    events.push({
      key: "now",
      at: context.updated_at,
      title: <>state {words(context.state)}</>,
      tone: toneOf(context.state),
      details: context.hostname ? <>on {context.hostname}</> : null,
    });
  }
  const failure = explained?.last_failure;
  if (failure) {
    events.push({
      key: "failure",
      at: failure.at,
      title: <>failed: {words(failure.code)}</>,
      tone: "bad",
      details: failure.reason,
    });
  }
  if (context.expires_at) {
    events.push({ key: "expires", at: context.expires_at, title: "expires", tone: "warn" });
  }
  return events;
}

export function GroupList({ groups }: { groups: Record<string, string>[] }) {
  return (
    <ul class="groups mono">
      {groups.map((group, index) => (
        <li key={index}>
          {Object.entries(group)
            .map(([key, value]) => `${key}=${value}`)
            .join(", ")}
        </li>
      ))}
    </ul>
  );
}

