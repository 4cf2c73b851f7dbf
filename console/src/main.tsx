// SPDX-License-Identifier: Apache-2.0
import { render } from "preact";
import "./style/main.css";
import { App } from "./app";
import { start } from "./lib/session";

const root = document.getElementById("app");
if (root) render(<App />, root);
void start();
