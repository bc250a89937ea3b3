// Nodes of `thunder up` on this machine, and a single `thunder serve`.
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const thunder = process.env.THUNDER;
const folder = mkdtempSync(join(tmpdir(), "thunder-browser-"));
const running = new Set();
const environment = { ...process.env, XDG_DATA_HOME: folder, HF_HOME: join(folder, "hf"), HF_HUB_CACHE: join(folder, "hf/hub") };
for (const name of ["THUNDER_API_KEY", "THUNDER_STORE", "THUNDER_DATA", "THUNDER_URL"]) delete environment[name];

/** Ends all processes and removes their data. */
export async function endAll() {
  await Promise.all([...running].map((child) => stop(child)));
  rmSync(folder, { recursive: true, force: true });
}

/** Ends a process, and waits until it has. */
export function stop(child, signal = "SIGTERM") {
  return new Promise((resolve) => {
    if (child.exitCode !== null || child.signalCode !== null) return resolve();
    child.once("exit", resolve);
    child.kill(signal);
    // Ranks get time to end; a process that does not end is a failure of the test that follows.
    setTimeout(() => child.kill("SIGKILL"), 10_000).unref();
  });
}

/** Starts thunder; resolves once a line of its standard error fits, with what the pattern caught. */
function start(args, pattern, limitMs = 60_000) {
  const child = spawn(thunder, args, { stdio: ["ignore", "ignore", "pipe"], env: environment });
  running.add(child);
  let said = "";
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`thunder ${args.join(" ")} said nothing like ${pattern}:\n${said}`)), limitMs);
    child.stderr.on("data", (data) => {
      said += data;
      const match = pattern.exec(said);
      if (match) {
        clearTimeout(timer);
        resolve({ child, match, said: () => said });
      }
    });
    child.once("exit", (code) => {
      running.delete(child);
      clearTimeout(timer);
      reject(new Error(`thunder ${args.join(" ")} ended with status ${code}:\n${said}`));
    });
  });
}

/** Runs a command to its end; returns what it printed. */
export function command(...args) {
  return new Promise((resolve, reject) => {
    const child = spawn(thunder, args, { stdio: ["ignore", "pipe", "pipe"], env: environment });
    let [out, err] = ["", ""];
    child.stdout.on("data", (data) => (out += data));
    child.stderr.on("data", (data) => (err += data));
    child.once("exit", (code) => (code === 0 ? resolve(out) : reject(new Error(`thunder ${args.join(" ")}: ${err}`))));
  });
}

/** A server of the built-in model; resolves with its address. */
export async function serve(...args) {
  const pattern = /serving builtin on (http:\/\/[\d.:]+)\/v1/;
  const { child, match } = await start(["serve", "builtin", "--port", "0", ...args], pattern);
  return { child, url: match[1] };
}

/** A folder for a server's store, which does not exist yet. */
export const storeFolder = (name) => join(folder, name);

/** Puts a small model into the cache of this machine, as a download leaves it. */
export function storeModel(org, name) {
  const [text, commit] = ['{"model_type": "llama"}', "0123456789012345678901234567890123456789"];
  const root = join(folder, "hf/hub", `models--${org}--${name}`);
  const blob = createHash("sha256").update(text).digest("hex");
  for (const below of ["blobs", "refs", `snapshots/${commit}`]) mkdirSync(join(root, below), { recursive: true });
  writeFileSync(join(root, "blobs", blob), text);
  writeFileSync(join(root, "refs/main"), commit);
  symlinkSync(`../../blobs/${blob}`, join(root, "snapshots", commit, "config.json"));
}

/** Starts a node. `more` says how it joins, if it is in no cluster yet. */
async function up(name, more) {
  const data = join(folder, name);
  const args = ["up", "--data", data, "--name", name, "--listen", "127.0.0.1:0", "--port", "0", "--no-discovery", ...more];
  const { child, match } = await start(args, /dashboard at (http:\/\/[\d.:]+)\/\s+[\s\S]*listens on ([\d.:]+);/);
  return { child, name, data, url: match[1], address: match[2] };
}

/** Waits until the nodes reach each other: a node calls another once it knows where that listens. */
async function met(nodes) {
  for (const node of nodes) {
    for (let tries = 0; ; tries++) {
      const { members } = await (await fetch(`${node.url}/admin/cluster`)).json();
      if (members.length === nodes.length && members.every((member) => member.up && member.addresses.length > 0)) break;
      if (tries > 150) throw new Error(`the nodes did not find each other: ${JSON.stringify(members)}`);
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }
}

/** A cluster of nodes; the first one's token lets the others in. */
export async function cluster(names) {
  const nodes = [];
  for (const name of names) {
    if (nodes.length === 0) {
      nodes.push(await up(name, []));
      continue;
    }
    const token = await command("cluster", "--data", nodes[0].data, "token");
    nodes.push(await up(name, ["--join", nodes[0].address, "--token", token.trim()]));
  }
  await met(nodes);
  return nodes;
}

/** Starts a node again that has ended, on other ports. */
export async function startAgain(node, others) {
  Object.assign(node, await up(node.name, ["--join", others[0].address]));
  await met([node, ...others]);
}
