// SPDX-License-Identifier: Apache-2.0
// Build the console into the folder that is the only argument.
import { build } from "esbuild";
import { copyFile, mkdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";

const out = process.argv[2];
if (!out) throw new Error("usage: node build.mjs FOLDER");
const banner = "/* SPDX-License-Identifier: Apache-2.0; third-party code: see licenses.txt */";
await mkdir(out, { recursive: true });
await build({
  entryPoints: { app: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
  banner: { js: banner, css: banner },
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) await copyFile(`src/${name}`, join(out, name));
const { dependencies } = JSON.parse(await readFile("package.json", "utf8"));
const texts = [];
for (const name of Object.keys(dependencies).sort()) {
  const { version } = JSON.parse(await readFile(`node_modules/${name}/package.json`, "utf8"));
  const text = await readFile(`node_modules/${name}/LICENSE`, "utf8");
  texts.push(`${name} ${version}\n\n${text.trim()}\n`);
}
await writeFile(join(out, "licenses.txt"), texts.join("\n"));
