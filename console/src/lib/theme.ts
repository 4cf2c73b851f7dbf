// SPDX-License-Identifier: Apache-2.0
// Light, dark, or as the system: the only thing that the console stores in the browser.
import { createStore } from "./store";

export type Theme = "system" | "light" | "dark";
export const THEMES: Theme[] = ["system", "light", "dark"];
const KEY = "cyborg-console-theme";

function stored(): Theme {
  try {
    return THEMES.find((theme) => theme === localStorage.getItem(KEY)) ?? "system";
  } catch {
    return "system"; // storage is disabled
  }
}

export const themeStore = createStore<Theme>(stored());

function show(theme: Theme): void {
  document.documentElement.dataset["theme"] = theme;
}

show(themeStore.get());

themeStore.subscribe((theme) => {
  show(theme);
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // The choice lasts until the page is closed.
  }
});
