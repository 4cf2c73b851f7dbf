// SPDX-License-Identifier: Apache-2.0
// A page that fails shows its error; the navigation stays usable.
import { Component, type ComponentChildren } from "preact";
import { Page } from "./parts";

interface State {
  error: string | null;
}

export class PageBoundary extends Component<{ children: ComponentChildren }, State> {
  override state: State = { error: null };

  static override getDerivedStateFromError(error: unknown): State {
    return { error: error instanceof Error ? error.message : String(error) };
  }

  override render() {
    const { error } = this.state;
    if (error === null) return <>{this.props.children}</>;
    return (
      <Page title="This page failed">
        <div class="note bad" role="alert">
          {error}
        </div>
        <p>
          The answer of the service is not as expected. Reload the page; after an upgrade, all API
          services must be of the same release.
        </p>
      </Page>
    );
  }
}
