// SPDX-License-Identifier: Apache-2.0
// The frame of all pages: header, navigation, announcements.
import { useEffect, useRef, useState } from "preact/hooks";
import { announcement } from "./lib/announce";
import { liveStore } from "./lib/poll";
import { href, routeStore } from "./lib/router";
import { sessionStore, signOut, start, type Session } from "./lib/session";
import { useStore } from "./lib/store";
import { THEMES, themeStore, type Theme } from "./lib/theme";
import { findPage, visiblePages } from "./pages";
import { PageBoundary } from "./ui/boundary";
import { Page } from "./ui/parts";
import { SignInPage } from "./pages/sign_in";

export function App() {
  const { phase, session, message } = useStore(sessionStore);
  return (
    <>
      {phase === "signed-in" && session ? <Frame session={session} /> : null}
      {phase === "signed-out" ? <SignInPage message={message} /> : null}
      {phase === "failed" ? (
        <main class="alone">
          <h1>Cyborg</h1>
          <div class="note bad" role="alert">
            {message}
          </div>
          <button type="button" class="primary" onClick={() => void start()}>
            Try again
          </button>
        </main>
      ) : null}
      {phase === "starting" ? (
        <main class="alone">
          <h1>Cyborg</h1>
          <p class="faint">Loading…</p>
        </main>
      ) : null}
      <Announcer />
    </>
  );
}

function Announcer() {
  const text = useStore(announcement);
  return (
    <div class="hidden" role="status" aria-live="polite" id="announcements">
      {text}
    </div>
  );
}

function Frame({ session }: { session: Session }) {
  const route = useStore(routeStore);
  const page = findPage(route.path);
  const main = useRef<HTMLElement>(null);
  const first = useRef(true);
  const [open, setOpen] = useState(false);
  const place = route.path.join("/");

  // A new page: its heading gets the focus, as after the load of a document.
  useEffect(() => {
    setOpen(false);
    if (first.current) {
      first.current = false;
      return;
    }
    scrollTo(0, 0);
    main.current?.querySelector("h1")?.focus();
  }, [place]);

  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          // The part of the URL after # is the route of the page.
          event.preventDefault();
          main.current?.querySelector("h1")?.focus();
        }}
      >
        Skip to content
      </a>
      <header class="top">
        <button
          type="button"
          class="menu"
          aria-expanded={open}
          aria-controls="navigation"
          onClick={() => setOpen(!open)}
        >
          Menu
        </button>
        <a class="brand" href={href([])}>
          <img src="icon.svg" alt="" width="22" height="22" /> Cyborg
        </a>
        <span class="space" />
        <LiveStatus />
        <ThemeSwitch />
        <Account session={session} />
      </header>
      <nav id="navigation" class={open ? "side open" : "side"} aria-label="Main">
        <ul>
          {visiblePages().map((entry) => (
            <li key={entry.path}>
              <a
                href={href([entry.path])}
                aria-current={entry.path === (route.path[0] ?? "") ? "page" : undefined}
              >
                {entry.title}
              </a>
            </li>
          ))}
        </ul>
      </nav>
      <main ref={main} id="main" key={place}>
        <Outage />
        <PageBoundary key={place}>{page ? page : <NotFound />}</PageBoundary>
      </main>
    </>
  );
}

function NotFound() {
  return (
    <Page title="Page not found">
      <p>
        There is no such page, or the policy does not allow it.{" "}
        <a href={href([])}>Go to the overview</a>
      </p>
    </Page>
  );
}

function LiveStatus() {
  const live = useStore(liveStore);
  const text = live.failing ? "Reconnecting" : live.paused ? "Paused" : "Live";
  const tone = live.failing ? "bad" : live.paused ? "warn" : "good";
  const updated = live.updatedAt ? `Updated at ${new Date(live.updatedAt).toLocaleTimeString()}` : "";
  return (
    <span class={`live ${tone}`} title={updated}>
      {text}
    </span>
  );
}

function Outage() {
  const { failing, outage } = useStore(liveStore);
  if (!failing || !outage) return null;
  return (
    <div class="note bad" role="status">
      <strong>Outage.</strong> {outage}
    </div>
  );
}

function ThemeSwitch() {
  const theme = useStore(themeStore);
  return (
    <label class="theme">
      <span class="theme-label">Theme</span>
      <select
        value={theme}
        onChange={(event) => themeStore.set(event.currentTarget.value as Theme)}
      >
        {THEMES.map((name) => (
          <option key={name} value={name}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

function Account({ session }: { session: Session }) {
  if (session.auth === "noauth") return <span class="account faint">no sign-in</span>;
  return (
    <span class="account">
      <span title={`Roles: ${session.roles.join(", ") || "none"}`}>
        {session.user} · {session.project}
      </span>
      <button type="button" onClick={() => signOut("You have signed out.")}>
        Sign out
      </button>
    </span>
  );
}
