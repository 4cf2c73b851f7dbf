// SPDX-License-Identifier: Apache-2.0
// Device profiles, and the explanation of each provider: why it fits or not.
import { useState } from "preact/hooks";
import { buildPath, send } from "../lib/api";
import { count, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { go, href } from "../lib/router";
import { can } from "../lib/session";
import type { Capacity, Explanation, Profile, Reason } from "../lib/types";
import { Dialog, DialogButton } from "../ui/dialog";
import { Badge, Bar, Card, ErrorBox, Facts, Loading, Page, Text, Time, type Segment } from "../ui/parts";
import { Collection, nextMarker, Table } from "../ui/table";
import { GroupList } from "./contexts";

export function ProfilesPage() {
  return (
    <Page title="Device profiles" actions={can("device_profile:create") ? <CreateProfile /> : null}>
      <p class="faint">Choose a device profile to see how many servers fit, and why devices cannot be used.</p>
      <Collection<Profile>
        collection="device_profiles"
        route={["profiles"]}
        noun="profile"
        caption="Device profiles"
        interval={30_000}
        columns={[
          { name: "Profile", show: (p) => <a href={href(["profiles", p.name])}>{p.name}</a> },
          { name: "Groups", show: (p) => <GroupList groups={p.groups} /> },
          { name: "Description", show: (p) => <Text value={p.description} /> },
          { name: "Created", show: (p) => <Time at={p.created_at} /> },
        ]}
        filters={[{ name: "name", label: "Name" }]}
        rowKey={(p) => p.uuid}
      />
    </Page>
  );
}

// Groups as text: a key and its value in a line, and an empty line between groups.
export function parseGroups(text: string): Record<string, string>[] {
  return text
    .split(/\n\s*\n/)
    .map((group) => group.split("\n").filter((line) => line.trim()))
    .filter((lines) => lines.length)
    .map((lines) =>
      Object.fromEntries(
        lines.map((line) => {
          const at = line.indexOf("=");
          if (at < 0) throw new Error(`"${line.trim()}" has no "=": write for example resources:FPGA=1`);
          return [line.slice(0, at).trim(), line.slice(at + 1).trim()];
        }),
      ),
    );
}

function CreateProfile() {
  const [name, setName] = useState("");
  const [description, setDescription] = useState("");
  const [groups, setGroups] = useState("resources:FPGA=1");
  return (
    <DialogButton label="Create a profile">
      {(close) => (
        <Dialog
          title="Create a device profile"
          confirm="Create"
          onClose={close}
          run={async () => {
            const body = { name: name.trim(), groups: parseGroups(groups) };
            await send("POST", "v2/device_profiles", [description ? { ...body, description } : body]);
            go(["profiles", body.name]);
            return `The profile ${body.name} was created.`;
          }}
        >
          <label class="field">
            <span>Name</span>
            <input value={name} onInput={(event) => setName(event.currentTarget.value)} autocomplete="off" required />
          </label>
          <label class="field">
            <span>Description</span>
            <input value={description} onInput={(event) => setDescription(event.currentTarget.value)} autocomplete="off" />
          </label>
          <label class="field">
            <span>Groups: a key and its value in a line, an empty line between groups</span>
            <textarea
              class="mono"
              rows={6}
              value={groups}
              onInput={(event) => setGroups(event.currentTarget.value)}
              spellcheck={false}
              required
            />
          </label>
        </Dialog>
      )}
    </DialogButton>
  );
}

function DeleteProfile({ name, path }: { name: string; path: string }) {
  return (
    <DialogButton label="Delete" danger>
      {(close) => (
        <Dialog
          title={`Delete the profile ${name}?`}
          confirm="Delete"
          danger
          onClose={close}
          run={async () => {
            await send("DELETE", path);
            go(["profiles"]);
            return `The profile ${name} was deleted.`;
          }}
        >
          <p>Flavors that name it find no devices afterwards. A profile whose requests exist cannot be deleted.</p>
        </Dialog>
      )}
    </DialogButton>
  );
}

export function ProfilePage({ name }: { name: string }) {
  const [marker, setMarker] = useState("");
  const [all, setAll] = useState(false);
  const path = `v2/device_profiles/${encodeURIComponent(name)}`;
  const profile = usePoll<{ device_profile: Profile }>(path, 0);
  // Both read all providers of the cloud, so they are read again only on request.
  const explained = usePoll<Explanation>(
    can("device_profile:explain") ? buildPath(`${path}/explanation`, { limit: 50, marker }) : null,
    0,
  );
  const capacity = usePoll<Capacity>(
    can("device_profile:capacity") ? buildPath(`${path}/capacity`, { limit: 1 }) : null,
    0,
  );
  const { data } = explained;
  const next = nextMarker(data?.providers_links);
  return (
    <Page
      title={name}
      trail={["Device profiles", ["profiles"]]}
      actions={
        <>
          <button
            type="button"
            onClick={() => {
              explained.refresh();
              capacity.refresh();
            }}
          >
            Explain again
          </button>
          {can("device_profile:delete") ? <DeleteProfile name={name} path={path} /> : null}
        </>
      }
    >
      <ErrorBox error={profile.error ?? explained.error ?? capacity.error} stale={data !== null} />
      <div class="cards">
        <Card title="Capacity now">
          {capacity.data ? (
            <Facts
              facts={[
                [
                  "More servers that fit",
                  <strong>
                    {capacity.data.exact ? "" : "at least "}
                    {capacity.data.servers.toLocaleString("en")}
                  </strong>,
                ],
                ["Free handles", `${capacity.data.free_handles} of ${capacity.data.handles}`],
                ["Hosts that fit", data ? data.fitting_hosts : <Text value={null} />],
              ]}
            />
          ) : capacity.error ? null : (
            <Loading />
          )}
        </Card>
        <Card title="Profile">
          {profile.data ? (
            <WholeProfile profile={profile.data.device_profile} />
          ) : profile.error ? null : (
            <Loading />
          )}
        </Card>
        <Card title="Reasons by group" wide>
          {data ? <Groups explanation={data} /> : explained.error ? null : <Loading />}
        </Card>
        {data?.providers.length ? (
          <Card
            title="Providers"
            wide
            aside={
              <label class="check">
                <input type="checkbox" checked={all} onChange={(event) => setAll(event.currentTarget.checked)} />
                <span>Show providers of other resource classes</span>
              </label>
            }
          >
            <Table
              caption="Why each provider fits or not"
              columns={[
                { name: "Host", show: (p) => <a href={href(["hosts", p.hostname])}>{p.hostname}</a> },
                { name: "Device", show: (p) => <a class="mono" href={href(["devices", p.device_uuid])}>{p.address}</a> },
                { name: "Class", show: (p) => p.resource_class },
                { name: "Free", number: true, show: (p) => `${p.free_handles} of ${p.handles}` },
                {
                  name: "Reason",
                  show: (p) => (
                    <>
                      {p.groups.map((group) => (
                        <div key={group.group}>
                          {p.groups.length > 1 ? <span class="faint">group {group.group}: </span> : null}
                          {group.code ? (
                            <>
                              <Badge state={group.code} tone="warn" /> {group.reason}
                              {group.remedy ? <div class="faint small">{group.remedy}</div> : null}
                            </>
                          ) : (
                            <Badge state="fits" tone="good" />
                          )}
                        </div>
                      ))}
                    </>
                  ),
                },
              ]}
              rows={all ? data.providers : data.providers.filter(isCandidate)}
              rowKey={(p) => p.uuid}
              empty="No provider of this page has the resource class."
            />
            {marker || next ? (
              <nav class="pager" aria-label="Pages of providers">
                <button type="button" disabled={!marker} onClick={() => setMarker("")}>
                  First page
                </button>
                <button type="button" disabled={!next} onClick={() => next && setMarker(next)}>
                  Next page
                </button>
              </nav>
            ) : null}
          </Card>
        ) : null}
      </div>
    </Page>
  );
}

function WholeProfile({ profile }: { profile: Profile }) {
  return (
    <>
      <Facts
        facts={[
          ["Description", <Text value={profile.description} />],
          ["UUID", <span class="mono">{profile.uuid}</span>],
          ["Created", <Time at={profile.created_at} />],
          ["Changed", <Time at={profile.updated_at} />],
        ]}
      />
      {profile.groups.map((group, index) => (
        <section key={index} aria-label={`Keys of group ${index}`}>
          <h3>Group {index}</h3>
          <Facts
            facts={Object.entries(group).map(([key, value]) => [key, <span class="mono">{value}</span>])}
          />
        </section>
      ))}
    </>
  );
}

const OTHER_CLASS = "resource_class";

function isCandidate(provider: Explanation["providers"][number]): boolean {
  return provider.groups.some((group) => group.code !== OTHER_CLASS);
}

function lastOtherClass(reasons: Reason[]): Reason[] {
  const other = (reason: Reason): number => Number(reason.code === OTHER_CLASS);
  return [...reasons].sort((a, b) => other(a) - other(b));
}

export function Groups({ explanation }: { explanation: Explanation }) {
  return (
    <>
      {explanation.groups.map((group) => {
        const segments: Segment[] = [
          { kind: "free", label: "fit", value: group.fitting_providers },
          // Providers of other classes are no candidates, and in most clouds the majority.
          ...group.reasons.filter((reason) => reason.code !== OTHER_CLASS).map((reason) => ({
            kind: "closed",
            label: words(reason.code),
            value: reason.providers,
          })),
        ];
        const total = segments.reduce((sum, segment) => sum + segment.value, 0);
        const resources = Object.entries(group.resources).map(([name, units]) => `${units} ${name}`);
        return (
          <section key={group.group} aria-label={`Group ${group.group}`}>
            <h3>
              Group {group.group}: {resources.join(", ")}
            </h3>
            <Bar segments={segments} total={total} name={`Providers of group ${group.group}`} />
            <ul class="reasons">
              <li>
                <span>
                  <Badge state="fits" tone={group.fitting_providers ? "good" : "idle"} />{" "}
                  {count(group.fitting_providers, "provider")} with {count(group.free_handles, "free handle")}
                </span>
              </li>
              {lastOtherClass(group.reasons).map((reason) => (
                <li key={reason.code}>
                  <span>
                    <Badge state={reason.code} tone="warn" /> {count(reason.providers, "provider")}
                    {reason.handles ? ` with ${count(reason.handles, "handle")}` : ""}: {reason.reason}
                  </span>
                  {reason.remedy ? <span class="remedy">{reason.remedy}</span> : null}
                </li>
              ))}
            </ul>
          </section>
        );
      })}
    </>
  );
}
