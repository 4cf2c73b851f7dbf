// SPDX-License-Identifier: Apache-2.0
// Small parts of all pages.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { ApiError } from "../lib/api";
import { ago, shorten, toneOf, words, type Tone } from "../lib/format";
import { href } from "../lib/router";

// `usual` is the state that a list in a narrow window leaves out.
export function Badge({ state, tone, usual }: { state: string; tone?: Tone; usual?: string }) {
  return <span class={`badge ${tone ?? toneOf(state)}${state === usual ? " usual" : ""}`}>{words(state)}</span>;
}

export function Time({ at }: { at: string | null }) {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 10_000);
    return () => clearInterval(timer);
  }, []);
  if (!at) return <span class="faint none">–</span>;
  const exact = at.replace("T", " ").replace(/(\.\d+)?\+00:00$/, " UTC");
  return (
    <time dateTime={at} title={exact}>
      {ago(at, Math.max(now, Date.now()))}
    </time>
  );
}

// A uuid or another long name; the first characters are enough to compare.
export function Id({ value, to }: { value: string | null | undefined; to?: string[] }) {
  if (!value) return <span class="faint none">–</span>;
  const text = <span title={value}>{shorten(value, 13)}</span>;
  return <span class="mono">{to ? <a href={href(to)}>{text}</a> : text}</span>;
}

export function Text({ value }: { value: string | number | null | undefined }) {
  return value === null || value === undefined || value === "" ? (
    <span class="faint none">–</span>
  ) : (
    <>{value}</>
  );
}

export function ErrorBox({ error, stale }: { error: ApiError | null; stale?: boolean }) {
  if (!error) return null;
  return (
    <div class="note bad" role="alert">
      {error.message}
      {stale ? " The last values are shown." : ""}
    </div>
  );
}

export function Loading() {
  return (
    <p class="faint loading" role="status">
      Loading…
    </p>
  );
}

export function Card(props: {
  title: string;
  children: ComponentChildren;
  aside?: ComponentChildren;
  wide?: boolean;
}) {
  const id = `card-${props.title.toLowerCase().replace(/\W+/g, "-")}`;
  return (
    <section class={`card${props.wide ? " wide" : ""}`} aria-labelledby={id}>
      <header>
        <h2 id={id}>{props.title}</h2>
        {props.aside}
      </header>
      {props.children}
    </section>
  );
}

export type Fact = [name: string, value: ComponentChildren];

export function Facts({ facts }: { facts: Fact[] }) {
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export interface Segment {
  label: string;
  value: number;
  kind: string;
}

// Shares of a whole, with their numbers as text below.
export function Bar({ segments, total, name }: { segments: Segment[]; total: number; name: string }) {
  const shown = segments.filter((segment) => segment.value > 0);
  const text = shown.map((s) => `${s.value.toLocaleString("en")} ${s.label}`).join(", ");
  let x = 0;
  return (
    <svg class="bar" role="img" aria-label={`${name}: ${text || "none"}`} viewBox="0 0 100 6" preserveAspectRatio="none">
      <rect class="track" width="100" height="6" />
      {shown.map((segment) => {
        const width = (segment.value / Math.max(total, 1)) * 100;
        const start = x;
        x += width;
        return <rect key={segment.label} class={`fill-${segment.kind}`} x={start} width={width} height="6" />;
      })}
    </svg>
  );
}

// The handles of a device, a host or a class by use.
export interface HandleUse {
  total: number;
  free: number;
  owned: number;
  dirty: number;
  draining: number;
  cordoned: number;
  undeliverable?: number; // of the cordoned ones
}

export function segmentsOf(use: HandleUse): Segment[] {
  const undeliverable = use.undeliverable ?? 0;
  return [
    { kind: "used", label: "in use", value: use.owned },
    { kind: "clean", label: "to be cleaned", value: use.dirty },
    { kind: "closed", label: "draining or cordoned", value: use.draining + use.cordoned - undeliverable },
    { kind: "error", label: "undeliverable", value: undeliverable },
    { kind: "free", label: "free", value: use.free },
  ];
}

export function Use({ use, name }: { use: HandleUse; name: string }) {
  if (!use.total) return <Text value={null} />;
  return (
    <span class="use">
      <Bar segments={segmentsOf(use)} total={use.total} name={name} />
      <span class="small">
        {use.owned.toLocaleString("en")} of {use.total.toLocaleString("en")}
      </span>
    </span>
  );
}

export function Page(props: {
  title: string;
  trail?: [text: string, path: string[]];
  actions?: ComponentChildren;
  children: ComponentChildren;
}) {
  useEffect(() => {
    document.title = `${props.title} · Cyborg`;
  }, [props.title]);
  return (
    <>
      <div class="page-head">
        <div>
          {props.trail ? (
            <nav aria-label="Breadcrumb" class="trail">
              <a href={href(props.trail[1])}>{props.trail[0]}</a> <span aria-hidden="true">/</span>
            </nav>
          ) : null}
          <h1 tabIndex={-1}>{props.title}</h1>
        </div>
        {props.actions ? <div class="actions">{props.actions}</div> : null}
      </div>
      {props.children}
    </>
  );
}
