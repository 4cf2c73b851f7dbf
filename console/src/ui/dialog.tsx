// SPDX-License-Identifier: Apache-2.0
// Dialogs of the changes that a user can make. The browser's own dialog keeps the focus.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import { announce } from "../lib/announce";

export function Dialog(props: {
  title: string;
  confirm: string;
  danger?: boolean;
  children?: ComponentChildren;
  run: () => Promise<string>; // the announcement of the result
  onClose: () => void;
}) {
  const element = useRef<HTMLDialogElement>(null);
  const title = useId();
  const [error, setError] = useState("");
  const [running, setRunning] = useState(false);

  useEffect(() => {
    const dialog = element.current;
    dialog?.showModal();
    // It returns the focus to the button that opened it, which it does not if it is only removed.
    return () => dialog?.close();
  }, []);

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    if (running) return;
    setRunning(true);
    setError("");
    try {
      announce(await props.run());
      props.onClose();
    } catch (failure) {
      setError(failure instanceof Error ? failure.message : String(failure));
      setRunning(false);
    }
  }

  return (
    <dialog
      ref={element}
      aria-labelledby={title}
      onCancel={(event) => {
        event.preventDefault();
        props.onClose();
      }}
    >
      <form onSubmit={submit}>
        <h2 id={title}>{props.title}</h2>
        {props.children}
        {error ? (
          <div class="note bad" role="alert">
            {error}
          </div>
        ) : null}
        <div class="buttons">
          <button type="button" onClick={props.onClose}>
            Cancel
          </button>
          <button type="submit" class={props.danger ? "danger" : "primary"} aria-disabled={running}>
            {running ? "Working…" : props.confirm}
          </button>
        </div>
      </form>
    </dialog>
  );
}

// A button that opens a dialog; `children` gets the function that closes it.
export function DialogButton(props: {
  label: string;
  danger?: boolean;
  children: (close: () => void) => ComponentChildren;
}) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" class={props.danger ? "danger-quiet" : ""} onClick={() => setOpen(true)}>
        {props.label}
      </button>
      {open ? props.children(() => setOpen(false)) : null}
    </>
  );
}
