// SPDX-License-Identifier: Apache-2.0
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "../lib/api";
import { signIn, useToken } from "../lib/session";

export function SignInPage({ message }: { message: string }) {
  const [mode, setMode] = useState<"password" | "token">("password");
  const [error, setError] = useState("");
  const [running, setRunning] = useState(false);
  const heading = useRef<HTMLHeadingElement>(null);

  useEffect(() => {
    document.title = "Sign in · Cyborg";
    if (message) heading.current?.focus();
  }, []);

  async function submit(event: SubmitEvent): Promise<void> {
    event.preventDefault();
    if (running) return;
    const data = new FormData(event.currentTarget as HTMLFormElement);
    const text = (name: string): string => String(data.get(name) ?? "");
    setRunning(true);
    setError("");
    try {
      if (mode === "token") await useToken(text("token").trim());
      else {
        await signIn({
          user: text("user"),
          password: text("password"),
          project: text("project"),
          user_domain: text("user_domain"),
          project_domain: text("project_domain"),
        });
      }
    } catch (failure) {
      const refused = failure instanceof ApiError && failure.status === 401 && mode === "token";
      const reason = failure instanceof Error ? failure.message : String(failure);
      setError(refused ? "The token is not valid." : reason);
      setRunning(false);
    }
  }

  return (
    <main class="alone">
      <form class="sign-in" onSubmit={submit} key={mode}>
        <h1 ref={heading} tabIndex={-1}>
          <img src="icon.svg" alt="" width="28" height="28" /> Cyborg
        </h1>
        {message ? <div class="note">{message}</div> : null}
        {mode === "password" ? (
          <>
            <Field name="user" label="User" autocomplete="username" />
            <Field name="password" label="Password" type="password" autocomplete="current-password" />
            <Field name="project" label="Project" autocomplete="off" />
            <details>
              <summary>Domains</summary>
              <Field name="user_domain" label="Domain of the user" value="Default" />
              <Field name="project_domain" label="Domain of the project" value="Default" />
            </details>
          </>
        ) : (
          <Field name="token" label="Token" type="password" autocomplete="off" />
        )}
        {error ? (
          <div class="note bad" role="alert">
            {error}
          </div>
        ) : null}
        <button type="submit" class="primary" aria-disabled={running}>
          {running ? "Signing in…" : "Sign in"}
        </button>
        <button
          type="button"
          class="plain"
          onClick={() => {
            setError("");
            setMode(mode === "token" ? "password" : "token");
          }}
        >
          {mode === "token" ? "Use a password instead" : "Use a token instead"}
        </button>
        <p class="faint small">
          The token stays in the memory of this page: a reload signs you out.
        </p>
      </form>
    </main>
  );
}

function Field(props: {
  name: string;
  label: string;
  type?: string;
  autocomplete?: string;
  value?: string;
}) {
  return (
    <label class="field">
      <span>{props.label}</span>
      <input
        name={props.name}
        type={props.type ?? "text"}
        defaultValue={props.value}
        autocomplete={props.autocomplete ?? "off"}
        autocapitalize="none"
        spellcheck={false}
        required
      />
    </label>
  );
}
