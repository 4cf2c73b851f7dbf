// SPDX-License-Identifier: Apache-2.0
// Audits and their findings.
import { useState } from "preact/hooks";
import { useAnnounceChanges } from "../lib/announce";
import { send } from "../lib/api";
import { count, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { go, href } from "../lib/router";
import { can } from "../lib/session";
import type { Audit } from "../lib/types";
import { Dialog, DialogButton } from "../ui/dialog";
import { Badge, Bar, Card, ErrorBox, Facts, Loading, Page, Text, Time } from "../ui/parts";
import { Collection, Table, type Column } from "../ui/table";

function Hosts({ audit }: { audit: Audit }) {
  const done = { kind: "free", label: "hosts checked", value: audit.hosts_done };
  return (
    <span class="progress">
      <Bar segments={[done]} total={audit.hosts_total} name="Hosts" />
      <span class="small">
        {audit.hosts_done} of {audit.hosts_total}
      </span>
    </span>
  );
}

function Findings({ number }: { number: number }) {
  return <Badge state={String(number)} tone={number ? "warn" : "good"} />;
}

const COLUMNS: Column<Audit>[] = [
  { name: "Audit", show: (a) => <a href={href(["audits", a.uuid])}>{a.host ?? "all hosts"}</a> },
  { name: "State", show: (a) => <Badge state={a.state} /> },
  { name: "Hosts", show: (a) => <Hosts audit={a} /> },
  { name: "Findings", show: (a) => <Findings number={a.num_findings} /> },
  { name: "Repairs", show: (a) => (a.repair ? "yes" : "no") },
  { name: "Created", show: (a) => <Time at={a.created_at} /> },
];

export function AuditsPage() {
  return (
    <Page title="Audits" actions={can("audit:create") ? <StartAudit /> : null}>
      <Collection<Audit>
        collection="audits"
        route={["audits"]}
        noun="audit"
        caption="Audits of the last days"
        query={{ sort_key: "created_at", sort_dir: "desc" }}
        columns={COLUMNS}
        filters={[
          { name: "host", label: "Host" },
          { name: "state", label: "State", values: ["PENDING", "RUNNING", "DONE", "FAILED"] },
        ]}
        rowKey={(a) => a.uuid}
        name={(a) => `Audit of ${a.host ?? "all hosts"}`}
        state={(a) => a.state}
        empty="No audit of the last days."
      />
    </Page>
  );
}

function StartAudit() {
  const [host, setHost] = useState("");
  const [repair, setRepair] = useState(false);
  return (
    <DialogButton label="Start an audit">
      {(close) => (
        <Dialog
          title="Start an audit"
          confirm="Start"
          onClose={close}
          run={async () => {
            const body = { repair, ...(host.trim() ? { host: host.trim() } : {}) };
            const { uuid } = await send<{ uuid: string }>("POST", "v2/audits", body);
            go(["audits", uuid]);
            return "The audit has started.";
          }}
        >
          <p>It compares agents, database, Placement and Nova.</p>
          <label class="field">
            <span>Host, or empty for all hosts</span>
            <input value={host} onInput={(event) => setHost(event.currentTarget.value)} autocomplete="off" />
          </label>
          <label class="check">
            <input
              type="checkbox"
              checked={repair}
              onChange={(event) => setRepair(event.currentTarget.checked)}
            />
            <span>Do the repairs that are safe</span>
          </label>
        </Dialog>
      )}
    </DialogButton>
  );
}

const MAX_FINDINGS = 500;

export function AuditPage({ uuid }: { uuid: string }) {
  const { data: audit, error } = usePoll<Audit>(`v2/audits/${encodeURIComponent(uuid)}`, 3000);
  useAnnounceChanges(
    uuid,
    audit ? new Map([["Audit", `${words(audit.state)}, ${count(audit.num_findings, "finding")}`]]) : null,
  );
  const findings = audit?.findings ?? [];
  return (
    <Page
      title={audit ? `Audit of ${audit.host ?? "all hosts"}` : "Audit"}
      trail={["Audits", ["audits"]]}
    >
      <ErrorBox error={error} stale={audit !== null} />
      {audit ? (
        <div class="cards">
          <Card title="Progress" wide aside={<Badge state={audit.state} />}>
            <Hosts audit={audit} />
            <Facts
              facts={[
                ["Findings", <Findings number={audit.num_findings} />],
                ["Repairs", audit.repair ? "yes" : "no"],
                ["Compared", audit.sources.map(words).join(", ")],
                ["Created", <Time at={audit.created_at} />],
                ["Error", <Text value={audit.error} />],
              ]}
            />
          </Card>
          <Card title="Findings" wide>
            <Table
              caption="Findings"
              columns={[
                { name: "Host", show: (f) => <a href={href(["hosts", f.host])}>{f.host}</a> },
                { name: "Finding", show: (f) => <Badge state={f.kind} tone="warn" /> },
                { name: "Object", show: (f) => <span class="mono">{f.object}</span> },
                {
                  name: "Explanation",
                  show: (f) => (
                    <>
                      {f.explanation}
                      <div class="faint small">{f.advice}</div>
                    </>
                  ),
                },
                {
                  name: "Repair",
                  show: (f) =>
                    f.repair ? (
                      <>
                        {words(f.repair)}{" "}
                        {f.repaired ? <Badge state="done" /> : f.error ? <Badge state="failed" /> : null}
                        {f.error ? <div class="text-bad small">{f.error}</div> : null}
                      </>
                    ) : (
                      <Text value={null} />
                    ),
                },
              ]}
              rows={findings.slice(0, MAX_FINDINGS)}
              rowKey={(f) => `${f.host} ${f.kind} ${f.object}`}
              empty={audit.state === "DONE" ? "Everything agrees." : "None so far."}
            />
            {findings.length > MAX_FINDINGS ? (
              <p class="faint small">The first {MAX_FINDINGS} are shown.</p>
            ) : null}
          </Card>
        </div>
      ) : error ? null : (
        <Loading />
      )}
    </Page>
  );
}
