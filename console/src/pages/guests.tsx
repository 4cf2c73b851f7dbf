// SPDX-License-Identifier: Apache-2.0
// Whether the guest has a device that the agent attaches, and not Nova.
import type { Accelerator, Request } from "../lib/types";
import { Badge, Text, Time } from "../ui/parts";

type Owned = Pick<Request | Accelerator, "state" | "attach_handle_type" | "attached_at" | "attach_error">;

// Nova ignores handles of this type.
const ATTACHED_BY_AGENT = "VFIO";
const BOUND = ["Bound", "bound"]; // a request, an accelerator

export function GuestDevice({ owned }: { owned: Owned }) {
  if (owned.attach_error) {
    return (
      <>
        <Badge state="missing" tone="bad" />
        <span class="clip" title={owned.attach_error}>{owned.attach_error}</span>
      </>
    );
  }
  if (owned.attached_at) return <>attached <Time at={owned.attached_at} /></>;
  if (owned.attach_handle_type === ATTACHED_BY_AGENT && BOUND.includes(owned.state)) {
    return <Badge state="at the next start" tone="idle" />;
  }
  return <Text value={null} />;
}
