// SPDX-License-Identifier: Apache-2.0
// Attachments of accelerators to existing instances and to hosts.
import { useAnnounceChanges } from "../lib/announce";
import { buildPath, send } from "../lib/api";
import { toneOf, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { can } from "../lib/session";
import type { Attachment, Request } from "../lib/types";
import { Dialog, DialogButton } from "../ui/dialog";
import { Badge, Card, ErrorBox, Facts, Id, Loading, Page, Text, Time } from "../ui/parts";
import { Story } from "../ui/story";
import { Collection, Table, type Column } from "../ui/table";
import { Timeline } from "../ui/timeline";
import { HostLink, REQUEST_COLUMNS } from "./requests";

function Selected({ row }: { row: Attachment }) {
  if (row.device_context) return <Id value={row.device_context} to={["contexts", row.device_context]} />;
  if (row.accelerator) return <Id value={row.accelerator} />;
  return <Text value={row.device_profile} />;
}

const COLUMNS: Column<Attachment>[] = [
  { name: "Attachment", show: (a) => <Id value={a.uuid} to={["attachments", a.uuid]} /> },
  { name: "State", show: (a) => <Badge state={a.state} /> },
  { name: "Mode", show: (a) => a.mode },
  { name: "Device", show: (a) => <Selected row={a} /> },
  { name: "Host", show: (a) => <HostLink host={a.hostname} /> },
  { name: "Instance", show: (a) => <Id value={a.instance_uuid} /> },
  { name: "Step", show: (a) => <Text value={a.step === null ? null : words(a.step)} /> },
  { name: "Error", show: (a) => <span class="clip"><Text value={a.error} /></span> },
  { name: "Created", show: (a) => <Time at={a.created_at} /> },
];

export function AttachmentsPage() {
  return (
    <Page title="Attachments">
      <Collection<Attachment>
        collection="attachments"
        route={["attachments"]}
        noun="attachment"
        caption="Attachments"
        query={{ sort_key: "created_at", sort_dir: "desc" }}
        columns={COLUMNS}
        filters={[
          { name: "state", label: "State", values: ["attaching", "attached", "detaching", "error"] },
          { name: "host", label: "Host" },
          { name: "instance", label: "Instance (UUID)" },
        ]}
        rowKey={(a) => a.uuid}
        name={(a) => `Attachment ${a.uuid.slice(0, 8)}`}
        state={(a) => a.state}
      />
    </Page>
  );
}

export function AttachmentPage({ uuid }: { uuid: string }) {
  const path = `v2/attachments/${encodeURIComponent(uuid)}`;
  const { data: row, error, refresh } = usePoll<Attachment>(path, 3000);
  const requests = usePoll<{ arqs: Request[] }>(
    row?.instance_uuid && can("arq:get_all")
      ? buildPath("v2/accelerator_requests", { instance: row.instance_uuid })
      : null,
    5000,
  );
  const shown = (requests.data?.arqs ?? []).filter((arq) => row?.arqs.includes(arq.uuid));
  useAnnounceChanges(uuid, row ? new Map([["Attachment", words(row.state)]]) : null);
  const rule = row?.instance_uuid === null ? "attachment:delete_for_host" : "attachment:delete";
  return (
    <Page
      title={`Attachment ${uuid.slice(0, 8)}`}
      trail={["Attachments", ["attachments"]]}
      actions={
        row && row.state !== "detaching" && can(rule) && can("attachment:delete") ? (
          <DialogButton label="Detach" danger>
            {(close) => (
              <Dialog
                title="Detach the accelerators?"
                confirm="Detach"
                danger
                onClose={close}
                run={async () => {
                  await send("DELETE", path);
                  refresh();
                  return "The accelerators are being detached.";
                }}
              >
                <p>
                  {row.mode === "live"
                    ? "The running guest loses the devices."
                    : row.mode === "host"
                      ? "The devices return to the cloud."
                      : "The guest loses the devices at its next start."}
                </p>
              </Dialog>
            )}
          </DialogButton>
        ) : null
      }
    >
      <ErrorBox error={error} stale={row !== null} />
      {row ? (
        <div class="cards">
          <Card title="Facts" aside={<Badge state={row.state} />}>
            {row.error ? <div class="note bad">{row.error}</div> : null}
            <Facts
              facts={[
                ["Device", <Selected row={row} />],
                ["Mode", row.mode],
                ["Host", <HostLink host={row.hostname} />],
                ["Instance", <Text value={row.instance_uuid} />],
                ["UUID", <span class="mono">{row.uuid}</span>],
                ["Project", <Text value={row.project_id} />],
                ["Next step", <Text value={row.step === null ? null : words(row.step)} />],
                [
                  "Requests",
                  <>
                    {row.arqs.map((arq) => (
                      <div key={arq}>
                        <Id value={arq} to={["requests", arq]} />
                      </div>
                    ))}
                  </>,
                ],
              ]}
            />
          </Card>
          <Card title="Time line">
            <Timeline
              label="Time line of the attachment"
              events={[
                { key: "created", at: row.created_at, title: "created", tone: "idle" },
                ...(row.updated_at
                  ? [
                      {
                        key: "now",
                        at: row.updated_at,
                        title: <>state {words(row.state)}</>,
                        tone: toneOf(row.state),
                        details: row.step ? <>next step: {words(row.step)}</> : null,
                      },
                    ]
                  : []),
              ]}
            />
          </Card>
          {shown.length ? (
            <Card title="Requests" wide>
              <Table
                caption="Requests of the attachment"
                columns={REQUEST_COLUMNS}
                rows={shown}
                rowKey={(arq) => arq.uuid}
              />
            </Card>
          ) : null}
          <ErrorBox error={requests.error} stale={requests.data !== null} />
          <Story jobs={{ subject: row.instance_uuid ?? row.uuid }} subject={row.instance_uuid ?? row.uuid} />
        </div>
      ) : error ? null : (
        <Loading />
      )}
    </Page>
  );
}
