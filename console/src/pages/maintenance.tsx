// SPDX-License-Identifier: Apache-2.0
// The maintenance window of a device: begin, change or end it.
import { useState } from "preact/hooks";
import { send } from "../lib/api";
import type { Device } from "../lib/types";
import { Dialog, DialogButton } from "../ui/dialog";

const HOURS = [1, 2, 4, 8, 24, 72];

export function MaintenanceButton({ device, refresh }: { device: Device; refresh: () => void }) {
  const path = `v2/devices/${device.uuid}/maintenance`;
  const [hours, setHours] = useState(4);
  const [successor, setSuccessor] = useState(false);
  if (device.maintenance) {
    return (
      <DialogButton label="End maintenance">
        {(close) => (
          <Dialog
            title={`End the maintenance of ${device.address}?`}
            confirm="End maintenance"
            onClose={close}
            run={async () => {
              await send("DELETE", path);
              refresh();
              return "The maintenance has ended.";
            }}
          >
            <p>The device gets the status back that it had before.</p>
          </Dialog>
        )}
      </DialogButton>
    );
  }
  return (
    <DialogButton label="Maintenance">
      {(close) => (
        <Dialog
          title={`Maintenance of ${device.address}`}
          confirm="Begin"
          onClose={close}
          run={async () => {
            const until = new Date(Date.now() + hours * 3_600_000).toISOString();
            await send("PUT", path, { until, ...(successor ? { successor: "auto" } : {}) });
            refresh();
            return "The maintenance has begun.";
          }}
        >
          <p>Until its end no new requests are bound to the device. Those that are bound stay bound.</p>
          <label class="field">
            <span>Duration</span>
            <select value={hours} onChange={(event) => setHours(Number(event.currentTarget.value))}>
              {HOURS.map((value) => (
                <option key={value} value={value}>
                  {value === 1 ? "1 hour" : `${value} hours`}
                </option>
              ))}
            </select>
          </label>
          <label class="check">
            <input
              type="checkbox"
              checked={successor}
              onChange={(event) => setSuccessor(event.currentTarget.checked)}
            />
            <span>Give each bound device context another device of the host, from the next start of its instance</span>
          </label>
        </Dialog>
      )}
    </DialogButton>
  );
}
