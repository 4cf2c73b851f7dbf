// SPDX-License-Identifier: Apache-2.0
// The device sets of a host, or those that have a device: a row each, with a cell for each device.
import { useAnnounceChanges } from "../lib/announce";
import { buildPath, type Query } from "../lib/api";
import { count, words } from "../lib/format";
import { usePoll } from "../lib/poll";
import { href } from "../lib/router";
import type { DeviceSet, Link, SetMember } from "../lib/types";
import { Badge, Card, ErrorBox, Id, Text } from "../ui/parts";
import { describeSetLinks } from "./nvlinks";

const MAX_SETS = 200;
// What a cell has, so that the colors are not needed.
const LETTERS = { offered: "O", allocated: "A", withdrawing: "W", withheld: "×" } as const;

export function DeviceSets({ query }: { query: Query }) {
  // A deployable that is no device set has no offer.
  const path = buildPath("v2/deployables", { ...query, offer: Object.keys(LETTERS), limit: MAX_SETS });
  const { data, error } = usePoll<{ deployables: DeviceSet[]; deployables_links?: Link[] }>(path, 5000);
  const sets = data?.deployables ?? [];
  useAnnounceChanges(
    path,
    data ? new Map(sets.map((row) => [`Device set ${row.address}`, words(row.device_set.offer)])) : null,
  );
  // Most hosts have none.
  if (!sets.length) return error ? <ErrorBox error={error} /> : null;
  const offered = sets.filter((row) => row.device_set.offer === "offered").length;
  const sources = Map.groupBy(sets, (row) => row.device_id);
  return (
    <Card title="Device sets" wide aside={<span class="faint">{offered} of {count(sets.length, "set")} offered</span>}>
      <ErrorBox error={error} stale />
      <ul class="legend">
        {Object.entries(LETTERS).map(([offer, letter]) => (
          <li key={offer}>
            <span class={`swatch member-${offer}`} /> {letter} {words(offer)}
          </li>
        ))}
      </ul>
      {[...sources].map(([uuid, rows]) => (
        <Matrix key={uuid} rows={rows} />
      ))}
      {data?.deployables_links ? <p class="faint small">The first {MAX_SETS} sets are shown.</p> : null}
    </Card>
  );
}

function Matrix({ rows }: { rows: DeviceSet[] }) {
  // The largest set first: its order is that of the fabric.
  const ordered = rows.toSorted((a, b) => b.device_set.size - a.device_set.size);
  const members = new Map(ordered.flatMap((row) => row.device_set.members.map((each) => [each.handle, each])));
  // Most kinds of sets have none.
  const hasLinks = ordered.some((row) => describeSetLinks(row) !== null);
  const caption = `Device sets of ${ordered[0]?.address.split(":")[0] ?? ""}`;
  return (
    <div class="table-box" role="group" aria-label={caption} tabIndex={0}>
      <table class="matrix">
        <caption class="hidden">{caption}</caption>
        <thead>
          <tr>
            <th scope="col">Set</th>
            {[...members.values()].map((member) => (
              <th key={member.handle} scope="col">
                <MemberName member={member} />
              </th>
            ))}
            {hasLinks ? <th scope="col">NVLinks</th> : null}
            <th scope="col">Offer</th>
            <th scope="col">Instance</th>
            <th scope="col">Project</th>
            <th scope="col">Reason</th>
          </tr>
        </thead>
        <tbody>
          {ordered.map((row) => (
            <SetRow key={row.uuid} row={row} handles={[...members.keys()]} hasLinks={hasLinks} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function MemberName({ member }: { member: SetMember }) {
  const short = member.handle.replace(/^0000:/, "");
  if (member.device_uuid === null) return <span title="The host does not have it.">{short} absent</span>;
  return (
    <a class="mono" href={href(["devices", member.device_uuid])} title={member.handle}>
      {short}
    </a>
  );
}

function SetRow({ row, handles, hasLinks }: { row: DeviceSet; handles: string[]; hasLinks: boolean }) {
  const { offer, offer_reason, members, instance_uuid, project_id } = row.device_set;
  const own = new Set(members.map((member) => member.handle));
  return (
    <tr>
      <th scope="row">{row.address}</th>
      {handles.map((handle) =>
        own.has(handle) ? (
          <td key={handle} class={`member member-${offer}`} title={offer_reason ?? words(offer)}>
            {LETTERS[offer]}
          </td>
        ) : (
          <td key={handle} class="member" />
        ),
      )}
      {hasLinks ? (
        <td class="links">
          <Text value={describeSetLinks(row)} />
        </td>
      ) : null}
      <td>
        <Badge state={offer} />
      </td>
      <td>
        <Id value={instance_uuid} />
      </td>
      <td>
        <Id value={project_id} />
      </td>
      <td>
        <Text value={offer_reason} />
      </td>
    </tr>
  );
}
