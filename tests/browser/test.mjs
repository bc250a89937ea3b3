// Every page of the dashboard in headless Chromium. tests/browser/run starts this.
import assert from "node:assert/strict";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { cluster, command, endAll, serve, startAgain, stop, storeFolder, storeModel } from "./cluster.mjs";
import { provider } from "./provider.mjs";

const require = createRequire(new URL("../../dashboard/package.json", import.meta.url));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const shots = process.argv.includes("--screenshots");
const pictures = new URL("../../docs/pictures/", import.meta.url).pathname;
if (shots) mkdirSync(pictures, { recursive: true });

const PAGES = ["chat", "models", "cluster", "requests", "usage", "keys", "limits", "audit", "prompts", "planner", "settings"];
/** The first page's budget. */
const MOST_BYTES = 300_000;
const USABLE_WITHIN_MS = 1000;

let passed = 0;
let failed = 0;
async function check(name, test) {
  const began = performance.now();
  try {
    await test();
    passed += 1;
    console.log(`ok      ${name} (${Math.round(performance.now() - began)} ms)`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
}

/** A page that notes what its console, its policy and its network complain about. */
async function open(browser, url, prepare = () => {}) {
  // Without transitions: a button that turns on has no contrast for a tenth of a second.
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, reducedMotion: "reduce" });
  await prepare(context);
  const page = await context.newPage();
  page.setDefaultTimeout(15_000);
  const troubles = [];
  page.on("pageerror", (error) => troubles.push(String(error)));
  page.on("console", (message) => {
    // Pages ask for what a server may not have, and say so; the browser logs the 404 as well.
    if (message.type() === "error" && !/Failed to load resource/.test(message.text())) troubles.push(message.text());
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(url) && !request.url().startsWith("data:")) troubles.push(`asks ${request.url()}`);
  });
  await page.goto(url);
  return { page, troubles, close: () => context.close() };
}

/** Serious findings of axe on the page as it is. */
async function accessibility(page) {
  // Through the debugger, which the page's policy does not bind.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return violations
    .filter((found) => ["serious", "critical"].includes(found.impact))
    .map((found) => `${found.id}: ${found.nodes.map((node) => `${node.html.slice(0, 120)} ${node.failureSummary ?? ""}`).join("; ")}`);
}

async function picture(page, name) {
  if (shots) await page.screenshot({ path: `${pictures}${name}.png` });
}

const goTo = async (page, name) => {
  await page.evaluate((hash) => (location.hash = hash), `#/${name}`);
  await page.getByRole("heading", { level: 1 }).waitFor();
};

// Ended from outside, the nodes end too.
for (const signal of ["SIGTERM", "SIGINT"]) process.once(signal, () => endAll().finally(() => process.exit(1)));
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-gpu"] });
try {
  const nodes = await cluster(["anvil", "bellows", "crucible"]);
  const [anvil, bellows, crucible] = nodes;
  const { page, troubles, close } = await open(browser, anvil.url);

  await check("the first page is small and soon usable", async () => {
    const context = await browser.newContext();
    const fresh = await context.newPage();
    let bytes = 0;
    fresh.on("response", async (response) => {
      const sizes = await response.request().sizes().catch(() => null);
      if (sizes) bytes += sizes.responseBodySize + sizes.responseHeadersSize;
    });
    const began = performance.now();
    await fresh.goto(anvil.url);
    await fresh.getByRole("textbox", { name: "Message" }).waitFor();
    const took = performance.now() - began;
    await fresh.waitForTimeout(200);
    await context.close();
    console.log(`        ${bytes} bytes, usable after ${Math.round(took)} ms`);
    assert.ok(bytes > 10_000 && bytes < MOST_BYTES, `${bytes} bytes`);
    assert.ok(took < USABLE_WITHIN_MS * (process.env.CI ? 3 : 2), `${took} ms`);
  });

  await check("the cluster page shows three nodes", async () => {
    await goTo(page, "cluster");
    for (const node of nodes) await page.getByRole("cell", { name: node.name }).first().waitFor();
    await page.getByText("3 of 3 nodes answer.").waitFor();
  });

  await check("a model is loaded on chosen nodes", async () => {
    await goTo(page, "models");
    assert.equal(await page.getByRole("button", { name: "Load", exact: true }).getAttribute("aria-disabled"), "true");
    await page.getByText("Name a model first.").first().waitFor();
    await page.getByLabel("Model", { exact: true }).fill("builtin");
    await page.getByLabel("Options").fill("--context 1024 --threads 1");
    await page.getByRole("button", { name: "Predict layouts" }).click();
    await page.getByRole("radio", { name: /^anvil alone|^bellows alone|^crucible alone/ }).first().waitFor({ timeout: 60_000 });
    const rows = await page.getByRole("region", { name: "Predicted layouts, the best first" }).getByRole("row").count();
    assert.ok(rows > 4, `${rows} rows of layouts on three nodes`);
    assert.equal(await page.locator('input[name="layout"]:checked').count(), 1, "the pick is chosen");
    await picture(page, "layouts");
    await page.getByLabel(/^anvil \(/).check();
    await page.getByLabel(/^bellows \(/).check();
    await page.getByRole("button", { name: "Load", exact: true }).click();
    const model = page.getByRole("article", { name: "builtin" });
    await model.getByText("ready", { exact: true }).waitFor({ timeout: 60_000 });
    await model.getByText(/KV cache/).first().waitFor();
    const ranks = await model.getByText(/rank 0 on/).textContent();
    assert.match(ranks, /anvil/);
    assert.match(ranks, /bellows/);
    await picture(page, "models");
  });

  await check("a chat streams, is kept, and is answered again", async () => {
    await goTo(page, "chat");
    // Two ranks wait for each other at every token: on a machine that does other things, few are enough.
    await page.getByText("Model and parameters").click();
    await page.getByLabel("Most tokens").fill("24");
    await page.getByText("Model and parameters").click();
    await page.getByRole("textbox", { name: "Message" }).fill("What is Thunderhead?");
    await page.keyboard.press("Enter");
    const answer = page.getByRole("article", { name: "Model" });
    await answer.getByText(/tokens\/s|tokens ·/).waitFor({ timeout: 60_000 });
    const text = await answer.locator(".prose").textContent();
    assert.ok(text.trim().length > 5, `the answer is ${JSON.stringify(text)}`);
    await picture(page, "chat");
    await page.getByRole("button", { name: "Regenerate" }).click();
    await answer.getByText(/tokens\/s|tokens ·/).waitFor({ timeout: 60_000 });
    assert.equal(await page.getByRole("article", { name: "Model" }).count(), 1, "an answer in place of the other");
    await page.reload();
    await page.getByRole("heading", { level: 1, name: "What is Thunderhead?" }).waitFor();
    assert.ok((await page.getByRole("article").count()) >= 2, "the conversation is kept");
  });

  await check("an answer is stopped", async () => {
    await page.getByRole("button", { name: "New conversation" }).click();
    await page.getByText("Model and parameters").click();
    await page.getByLabel("Temperature").fill("1.5");
    await page.getByLabel("Most tokens").fill("700");
    await page.getByText("Model and parameters").click();
    await page.getByRole("textbox", { name: "Message" }).fill("Tell me everything, at length, about each of its parts. ".repeat(20));
    // The answer must not be over before the server hears of the stop.
    const chat = "**/v1/chat/completions";
    await page.route(chat, (route) =>
      route.continue({ postData: JSON.stringify({ ...route.request().postDataJSON(), ignore_eos: true }) }));
    await page.getByRole("button", { name: "Send" }).click();
    // Playwright's own click waits until the page stops moving: the answer would be over.
    await page.getByRole("button", { name: "Stop" }).dispatchEvent("click");
    await page.unroute(chat);
    await page.getByText("Stopped.").first().waitFor();
    await page.getByRole("button", { name: "Send" }).waitFor();
  });

  await check("text of a model is never HTML", async () => {
    // The pages' own code on a conversation whose answer attacks.
    await page.evaluate(() => {
      const text = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\n\n[a](javascript:window.hacked=1) ![p](https://evil.example/x.png)\n\n```js\nlet x = 1; // <b>\n```\n\n| a | b |\n|---|---|\n| 1 | **2** |';
      const parameters = { model: "", system: "", temperature: "", topP: "", maxTokens: "", seed: "", thinking: "" };
      const chat = { id: "attack", title: "Attack", changed: Date.now() + 1e6, parameters, messages: [{ role: "user", text: "x" }, { role: "assistant", text, thinking: "<b>hm</b>" }] };
      localStorage.setItem("thunder.chat.attack", JSON.stringify(chat));
    });
    await page.reload();
    await page.getByRole("heading", { level: 1, name: "Attack" }).waitFor();
    const answer = page.getByRole("article", { name: "Model" });
    await answer.getByRole("table").waitFor();
    await answer.getByText("<img src=x").waitFor();
    assert.equal(await answer.locator("img, script, iframe").count(), 0);
    assert.deepEqual(await answer.locator("a").evaluateAll((links) => links.map((link) => link.protocol)), ["https:"]);
    assert.equal(await page.evaluate(() => window.hacked), undefined);
    assert.equal(await answer.locator("details").getAttribute("open"), null, "thinking is folded");
    await page.getByRole("button", { name: "Delete “Attack”" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
    await page.getByRole("heading", { level: 1, name: "Attack" }).waitFor({ state: "detached" });
  });

  await check("requests show where their time went", async () => {
    await goTo(page, "requests");
    await page.getByRole("cell", { name: "/v1/chat/completions" }).first().waitFor();
    const time = page.getByRole("img", { name: /prefill .* decode/ }).first();
    await time.waitFor();
    await page.getByText("client left").waitFor();
    await picture(page, "requests");
  });

  await check("prompts are kept by a policy, and read from all nodes", async () => {
    await goTo(page, "prompts");
    await page.getByText("nobody's", { exact: true }).waitFor();
    await page.getByLabel("Keep prompts and answers of").selectOption("some");
    await page.getByText("Name a key, a team or a model.").waitFor();
    await page.getByLabel("Models").fill("builtin");
    await page.getByLabel("Days").fill("7");
    await page.getByLabel(/Further patterns/).fill("\\bP-\\d{4}\\b");
    await page.getByRole("button", { name: "Set the policy" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Keep them" }).click();
    await page.getByText("some", { exact: true }).waitFor();
    // It holds at every node's gateway, and each keeps what its own clients asked.
    for (const node of [anvil, crucible]) {
      for (let tries = 0; ; tries++) {
        const { policy } = await (await fetch(`${node.url}/admin/prompts/policy`)).json();
        if (policy.days === 7) break;
        assert.ok(tries < 100, `${node.name} has no policy: ${JSON.stringify(policy)}`);
        await page.waitForTimeout(50);
      }
      const answer = await fetch(`${node.url}/v1/chat/completions`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({
          model: "builtin", max_tokens: 4, messages: [{ role: "user", content: `${node.name}: mail ann@example.org about P-1234` }],
        }),
      });
      assert.equal(answer.status, 200, await answer.text());
    }
    await page.getByRole("button", { name: "Read", exact: true }).click();
    await page.getByText("2 prompts are read, which is noted in the audit log.").waitFor();
    await page.getByText(/builtin · .* · on crucible/).click();
    await page.getByText("crucible: mail [email] about [redacted]").waitFor();
    await page.getByText(/builtin · .* · on anvil/).waitFor();
    assert.deepEqual(await accessibility(page), []);
    await picture(page, "prompts");
    const { entries } = await (await fetch(`${anvil.url}/admin/audit?action=prompts.read`)).json();
    assert.deepEqual(entries.map((entry) => [entry.node, entry.details.found]).sort(), [["anvil", 2], ["crucible", 1]]);
    // The command line says the same.
    const said = await command("audit", "prompts", "--data", anvil.data, "--format", "json");
    assert.equal(JSON.parse(said).prompts.length, 2, said);
    await page.getByLabel("Keep prompts and answers of").selectOption("none");
    await page.getByRole("button", { name: "Set the policy" }).click();
    await page.getByText("nobody's", { exact: true }).waitFor();
  });

  await check("a node that is killed is seen, and the model is formed again", async () => {
    await goTo(page, "cluster");
    await stop(bellows.child, "SIGKILL");
    await page.getByRole("row", { name: /bellows/ }).getByText("down").waitFor({ timeout: 10_000 });
    await page.getByText("2 of 3 nodes answer.").waitFor();
    await picture(page, "cluster-node-lost");
    // The other chosen node goes on alone.
    await page.getByRole("row", { name: /^builtin ready anvil \(ready\) / }).waitFor({ timeout: 60_000 });
  });

  await check("a node is drained and taken back", async () => {
    await page.getByRole("button", { name: "Drain crucible" }).click();
    await page.getByText("up, drained").first().waitFor();
    await page.getByRole("button", { name: "Resume crucible" }).click();
    await page.getByRole("button", { name: "Drain crucible" }).waitFor();
    const status = JSON.parse(await command("cluster", "--data", anvil.data, "status", "--json"));
    assert.equal(status.members.filter((member) => member.drained).length, 0, "the command line says the same");
  });

  await check("what has happened on each node is shown, and tokens are made", async () => {
    await page.getByText("bellows does not answer").first().waitFor();
    const log = page.getByLabel("Log of the node, the latest last");
    await log.getByText(/bellows/).waitFor();
    await page.getByLabel("Node", { exact: true }).selectOption({ label: "crucible" });
    await log.getByText(/rank|drained|builtin|node/).first().waitFor();
    await page.getByLabel("Hours that a token can be used").fill("0");
    await page.getByText("Its hours must be a number above 0.").waitFor();
    await page.getByLabel("Hours that a token can be used").fill("2");
    await page.getByRole("button", { name: "Make a token" }).click();
    const dialog = page.getByRole("dialog", { name: "A token for one new node" });
    assert.ok((await dialog.locator("pre.secret").innerText()).length > 40);
    assert.deepEqual(await accessibility(page), []);
    await dialog.getByRole("button", { name: "I have kept it" }).click();
    // What only a node's own dashboard may do is off for the others, and says why.
    assert.equal(await page.getByRole("button", { name: "Stop crucible" }).getAttribute("aria-disabled"), "true");
    await page.getByText("Only on that node's own dashboard.").first().waitFor();
    await page.getByRole("button", { name: "Stop anvil" }).click();
    await page.getByRole("dialog", { name: /End the agent on anvil\?/ }).getByRole("button", { name: "Cancel" }).click();
  });

  await check("the node that was killed comes back", async () => {
    await startAgain(bellows, [anvil, crucible]);
    await page.getByText("3 of 3 nodes answer.").waitFor();
    await page.getByText("All nodes answer and agree.").waitFor();
  });

  await check("the files of models on the nodes' disks are checked and deleted", async () => {
    storeModel("house", "tiny");
    await goTo(page, "models");
    const table = page.getByRole("region", { name: "Models that nodes have" });
    await table.getByRole("cell", { name: "house/tiny" }).first().waitFor();
    await page.getByRole("button", { name: "Check house/tiny on crucible" }).click();
    await page.getByText(/Check of house\/tiny on crucible: .*/).waitFor();
    await page.getByRole("button", { name: "Delete house/tiny on crucible" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
    await page.getByText(/house\/tiny is deleted on crucible: .* free/).waitFor();
    assert.deepEqual(await accessibility(page), []);
  });

  await check("the model is unloaded after a question", async () => {
    await goTo(page, "models");
    await page.getByRole("button", { name: "Unload builtin" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Unload" }).click();
    await page.getByText("No model is loaded.").waitFor();
  });

  await check("the planner answers", async () => {
    await goTo(page, "planner");
    await page.getByLabel("Price of a machine").fill("9000");
    await page.getByRole("button", { name: "Plan" }).click();
    await page.getByRole("heading", { name: "Answer" }).waitFor({ timeout: 60_000 });
    await page.getByRole("row", { name: /A user/ }).waitFor();
    await page.getByRole("heading", { name: "Money" }).evaluate((heading) => heading.scrollIntoView());
    await picture(page, "planner");
  });

  await check("the planner takes recorded requests and measured steps, as the command line does", async () => {
    await page.reload();
    const request = (nth) => ({
      number: nth, time: new Date(Date.UTC(2026, 10, 25, 10, 0, 7 * nth)).toISOString(), key_id: `k_${nth % 3}`, key: "ci", model: "builtin",
      outcome: "stop", prompt_tokens: 300 + nth, cached_tokens: 64, completion_tokens: 50, duration_s: 1.5,
    });
    const trace = storeFolder("november.jsonl");
    // A refused request is a line, and asks the engine for nothing.
    const refused = { ...request(40), outcome: "refused", completion_tokens: 0 };
    writeFileSync(trace, [...Array.from({ length: 40 }, (_, nth) => request(nth)), refused].map((line) => `${JSON.stringify(line)}\n`).join(""));
    const planned = async () => {
      const answered = page.waitForResponse((response) => response.request().method() === "POST");
      await page.getByRole("button", { name: "Plan" }).click();
      return (await answered).json();
    };
    const asked = ["capacity", "qwen3-30b-a3b", "--machines", "2xm3-ultra-512", "--users", "50", "--speed", "15", "--currency", "GBP", "--kwh", "0.27"];
    await page.getByLabel("Recorded requests").setInputFiles(trace);
    await page.getByText("The 41 lines of november.jsonl").waitFor();
    assert.equal(await page.getByLabel("Tokens of a prompt").count(), 0, "the file says it");
    const of_trace = await planned();
    assert.deepEqual(of_trace, JSON.parse(await command(...asked, "--trace", trace, "--json")));
    await page.getByText("The 40 requests of november.jsonl, without 1 refused or empty, get what was promised").waitFor();
    await page.getByText(`The same requests may come ${of_trace.most_times.toFixed(1)} times as often.`).waitFor();
    // Without a price there are no costs, but power and energy.
    await page.getByRole("heading", { name: "Power and energy" }).waitFor();
    assert.equal(await page.getByRole("heading", { name: "Costs" }).count(), 0);
    assert.deepEqual(await accessibility(page), []);

    const measured = storeFolder("here.json");
    writeFileSync(measured, JSON.stringify({
      model: "qwen3-30b-a3b", ranks: 1, decode: [{ rows: 1, seconds: 0.01 }], prompt: [{ rows: 256, seconds: 0.2 }], decode_pair_s: 1e-6,
      prompt_pair_s: 1e-7, sequences: 16, rows: 256, kv_tokens: 65536, context: 8192,
    }));
    await page.getByLabel("Measured step times").setInputFiles(measured);
    await page.getByText("how long its steps take are those of here.json").waitFor();
    assert.deepEqual(await planned(), JSON.parse(await command(...asked, "--trace", trace, "--measured", measured, "--json")));
    await page.getByRole("button", { name: "Without here.json" }).click();
    await page.getByLabel("Weights").waitFor();

    // A line that is wrong is named by its number in the file, and what is no file of ours is refused here.
    await page.getByLabel("Recorded requests").setInputFiles({ name: "broken.jsonl", mimeType: "text/plain", buffer: Buffer.from("\n\nnonsense\n") });
    await page.getByText("The 1 lines of broken.jsonl").waitFor();
    await planned();
    await page.getByText(/the trace's line 3: expected/).waitFor();
    await page.getByRole("button", { name: "Without broken.jsonl" }).click();
    await page.getByLabel("Tokens of a prompt").waitFor();
    await page.getByLabel("Measured step times").setInputFiles({ name: "odd.json", mimeType: "application/json", buffer: Buffer.from("{") });
    await page.getByText("odd.json is no JSON").waitFor();
  });

  for (const theme of ["light", "dark"]) {
    await check(`all pages are accessible, ${theme}`, async () => {
      await page.emulateMedia({ colorScheme: theme });
      for (const name of PAGES) {
        await goTo(page, name);
        await page.waitForTimeout(300);
        assert.deepEqual(await accessibility(page), [], name);
      }
    });
  }

  await check("the keyboard reaches every page, and disabled controls say why", async () => {
    await goTo(page, "settings");
    await page.reload();
    await page.getByRole("heading", { level: 1, name: "Settings" }).waitFor();
    await page.keyboard.press("Tab");
    assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to the page");
    for (const name of PAGES) {
      await goTo(page, name);
      // A button that was found off may be on or replaced by now: its page's data have come.
      const mute = await page.locator('button[aria-disabled="true"]').evaluateAll((buttons) =>
        buttons.filter((button) => button.isConnected && button.hasAttribute("aria-disabled") && !document.getElementById(button.getAttribute("aria-describedby") ?? "")?.textContent).map((button) => button.textContent),
      );
      assert.deepEqual(mute, [], name);
      assert.equal(await page.locator("button:disabled").count(), 0, `${name}: a disabled button takes no focus, so nobody reads its reason`);
    }
  });

  await check("a narrow page does not scroll sideways", async () => {
    await page.setViewportSize({ width: 360, height: 700 });
    for (const name of PAGES) {
      await goTo(page, name);
      const over = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      assert.ok(over <= 0, `${name}: ${over} pixels`);
    }
  });

  await check("nothing else was asked, and nothing complained", async () => assert.deepEqual(troubles, []));
  await close();

  const server = await serve("--api-key", "sesame", "--context", "1024");
  const keyed = await open(browser, server.url);
  await check("a single server asks for its key, and takes it", async () => {
    const dialog = keyed.page.getByRole("dialog");
    await dialog.waitFor();
    assert.deepEqual(await accessibility(keyed.page), []);
    await dialog.getByLabel("API key").fill("sesame");
    await dialog.getByRole("button", { name: "Use this key" }).click();
    await keyed.page.getByRole("textbox", { name: "Message" }).fill("Hello");
    await keyed.page.getByRole("button", { name: "Send" }).click();
    await keyed.page.getByRole("article", { name: "Model" }).getByText(/tokens ·/).waitFor({ timeout: 60_000 });
  });
  await check("a single server says why it loads no other model", async () => {
    await goTo(keyed.page, "models");
    await keyed.page.getByText(/has one model for as long as it runs/).first().waitFor();
    await goTo(keyed.page, "cluster");
    await keyed.page.getByText("This is one server, without a cluster").waitFor();
    await goTo(keyed.page, "settings");
    await keyed.page.getByText("1 set, not shown").waitFor();
    assert.ok(!(await keyed.page.content()).includes("sesame"));
    await keyed.page.getByRole("button", { name: "Read the settings again" }).click();
    await keyed.page.getByText("No setting has changed at once.").waitFor();
    await picture(keyed.page, "settings");
    assert.deepEqual(keyed.troubles, []);
  });
  await keyed.close();

  await stop(server.child);

  // Keys and Usage of the three nodes: the first key closes all of them, and a limit is hit at all together.
  await command("model", "load", "builtin", "--data", anvil.data, "--", "--context", "1024", "--threads", "1");
  const own = ["--data", anvil.data];
  const owner = await open(browser, anvil.url);
  const make = async (name, prepare) => {
    await owner.page.getByLabel("Name", { exact: true }).fill(name);
    await prepare();
    await owner.page.getByRole("button", { name: "Create" }).click();
    const dialog = owner.page.getByRole("dialog", { name: `The secret of ${name}` });
    const secret = await dialog.locator("pre.secret").innerText();
    // After the first key the page itself is refused, and asks for a key above the secret.
    const refused = owner.page.getByRole("button", { name: "Not now" });
    if (!boss) await refused.click({ timeout: 10_000 });
    await dialog.getByRole("button", { name: "I have kept it" }).click();
    assert.match(secret, /^th-[0-9a-z]{8}-[\w-]{43}$/);
    assert.ok(!(await owner.page.content()).includes(secret), "the secret is gone from the page");
    return secret;
  };
  const ask = (secret, node = anvil) =>
    fetch(`${node.url}/v1/completions`, {
      method: "POST",
      headers: { authorization: `Bearer ${secret}`, "content-type": "application/json" },
      body: JSON.stringify({ model: "builtin", prompt: "The sea", max_tokens: 3, ignore_eos: true }),
    });
  let boss;
  let ci;
  /** Waits until a node says this to a key. */
  const says = async (node, secret, status) => {
    for (let tries = 0; ; tries++) {
      const answer = await fetch(`${node.url}/v1/models`, { headers: { authorization: `Bearer ${secret}` } });
      if (answer.status === status) return;
      assert.ok(tries < 100, `${node.name} says ${answer.status}, not ${status}`);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  };
  await check("the first key of a cluster closes every node to all others", async () => {
    assert.equal((await ask("none")).status, 200);
    await goTo(owner.page, "keys");
    boss = await make("boss", () => owner.page.getByLabel("Role").selectOption("admin"));
    assert.equal((await ask("none")).status, 401);
    for (const node of nodes) {
      await says(node, boss, 200);
      assert.equal((await ask("none", node)).status, 401, node.name);
      assert.equal((await ask(boss, node)).status, 200, node.name);
    }
    await owner.page.evaluate((key) => sessionStorage.setItem("thunder.key", key), boss);
    await owner.page.reload();
    await owner.page.getByRole("cell", { name: "boss", exact: true }).waitFor();
  });
  await check("a key is used up to its limit at three nodes, and counted", async () => {
    ci = await make("ci", async () => {
      await owner.page.getByLabel("Team").fill("lab");
      await owner.page.locator("summary").click();
      await owner.page.getByLabel("Requests a minute").fill("2");
    });
    const statuses = [];
    for (const node of nodes) {
      await says(node, ci, 200);
      const answer = await ask(ci, node);
      statuses.push(answer.status);
      const body = await answer.json();
      if (answer.status === 429) assert.equal(body.error.param, "key.requests_per_minute");
    }
    assert.deepEqual(statuses, [200, 200, 429]);
    await owner.page.getByRole("cell", { name: "Requests a minute: 2" }).waitFor();
    assert.deepEqual(await accessibility(owner.page), []);
    await goTo(owner.page, "usage");
    await owner.page.getByRole("cell", { name: new Date().toISOString().slice(0, 10) }).first().waitFor();
    await owner.page.getByLabel("By", { exact: true }).selectOption("key,model");
    const row = owner.page.getByRole("row").filter({ hasText: "ci" }).filter({ hasText: "builtin" });
    await row.first().waitFor();
    // What the page shows is what the server counted.
    const sums = await (await fetch(`${anvil.url}/admin/usage?by=key,model`, { headers: { authorization: `Bearer ${boss}` } })).json();
    const counted = sums.rows.find((one) => one.key === "ci");
    assert.equal(counted.requests, 2, JSON.stringify(counted));
    assert.equal(counted.completion_tokens, 6, JSON.stringify(counted));
    assert.ok((await row.first().innerText()).split(/\s+/).includes("6"), await row.first().innerText());
    // The third request was over the key's limit.
    assert.equal(counted.refused, 1, JSON.stringify(counted));
    const heads = await owner.page.getByRole("region", { name: "Usage" }).getByRole("columnheader").allInnerTexts();
    const cells = await row.first().getByRole("cell").allInnerTexts();
    assert.equal(cells[heads.indexOf("Refused") - heads.length + cells.length], "1", `${heads}: ${cells}`);
    assert.deepEqual(await accessibility(owner.page), []);
    await picture(owner.page, "usage");
  });
  await check("a key is changed on the page, and its limits hold", async () => {
    await goTo(owner.page, "keys");
    await owner.page.getByRole("button", { name: "Change ci" }).click();
    const dialog = owner.page.getByRole("dialog", { name: "Change ci" });
    await dialog.getByText("Nothing is changed yet.").waitFor();
    assert.deepEqual(await accessibility(owner.page), []);
    const limit = dialog.getByLabel("Requests a minute");
    assert.equal(await limit.inputValue(), "2");
    await limit.fill("0");
    await dialog.getByText("Requests a minute is 0, but must be a whole number above 0.").waitFor();
    await limit.fill("1.5");
    await dialog.getByText("Requests a minute is 1.5, but must be a whole number above 0.").waitFor();
    await limit.fill("1000");
    await dialog.getByLabel("Cost a month").fill("12.5");
    await dialog.getByLabel("Owner").fill("ann@example.org");
    await dialog.getByRole("button", { name: "Save" }).click();
    await owner.page.getByRole("cell", { name: "Requests a minute: 1 000; Cost a month: 12.50" }).waitFor();
    await picture(owner.page, "keys");
    assert.equal((await ask(ci)).status, 200);
    const { key } = JSON.parse(await command("keys", "show", "ci", "--json", ...own));
    assert.deepEqual([key.owner, key.team, key.limits.requests_per_minute, key.limits.cost_per_month], ["ann@example.org", "lab", 1000, 12.5]);
  });
  await check("limits of teams and models, and prices, are set on the page, and hold", async () => {
    const { page } = owner;
    await goTo(page, "limits");
    await page.getByText("No team has limits.").waitFor();
    const edit = async (button, title, fill) => {
      await page.getByRole("button", { name: button, exact: true }).click();
      const dialog = page.getByRole("dialog", { name: title });
      await fill(dialog);
      await dialog.getByRole("button", { name: "Save" }).click();
      return dialog;
    };
    let dialog = await edit("Set a team's limits", "Settings of a team", async (dialog) => {
      await dialog.getByText("Name the team first.").waitFor();
      await dialog.locator('option[value="lab"]').waitFor({ state: "attached" });
      await dialog.getByLabel("Team").fill("lab");
      await dialog.getByLabel("Share under load").fill("0");
      await dialog.getByLabel("Tokens a day").fill("1");
      assert.deepEqual(await accessibility(page), []);
    });
    await dialog.getByText("`weight` is 0, but must be 0.001 to 1000").waitFor();
    await dialog.getByLabel("Share under load").fill("2.5");
    await dialog.getByRole("button", { name: "Save" }).click();
    await page.getByRole("row", { name: /^lab 2.5 Tokens a day: 1 / }).waitFor();
    const refused = await ask(ci);
    assert.deepEqual([refused.status, (await refused.json()).error.param], [429, "team.tokens_per_day"]);
    dialog = await edit("Change lab", "Settings of lab", (dialog) => dialog.getByLabel("Tokens a day").fill(""));
    await page.getByRole("row", { name: /^lab 2.5 – / }).waitFor();

    dialog = await edit("Set a model's limits or price", "Settings of a model", async (dialog) => {
      await dialog.getByLabel("Model").fill("builtin");
      await dialog.getByLabel("Price of 1M tokens of prompts").fill("1000");
      await dialog.getByText("A price needs an amount for prompts and one for answers.").waitFor();
      await dialog.getByLabel("Price of 1M tokens of answers").fill("2000");
      await dialog.getByLabel("Parallel requests").fill("50");
    });
    await page.getByRole("row", { name: /^builtin 1000 1000 2000 Parallel requests: 50 / }).waitFor();
    await edit("Change what each key has", "Limits of each key without its own", (dialog) => dialog.getByLabel("Tokens a minute").fill("90000"));
    await page.getByText("Tokens a minute: 90 000").waitFor();
    await page.getByRole("textbox", { name: "Currency" }).fill("euro");
    await page.getByRole("button", { name: "Set", exact: true }).click();
    await page.getByText('`currency` is "euro", but must be three capital letters').waitFor();
    await page.getByRole("textbox", { name: "Currency" }).fill("EUR");
    await page.getByRole("button", { name: "Set", exact: true }).click();
    await page.getByText("Prices and budgets are in EUR.").waitFor();
    await page.getByText("It is this one already.").waitFor();
    for (const colorScheme of ["dark", "light"]) {
      await page.emulateMedia({ colorScheme });
      assert.deepEqual(await accessibility(page), [], colorScheme);
    }
    await picture(page, "limits");

    // An answer costs what the page says, and the command line shows the same limits.
    assert.equal((await ask(ci)).status, 200);
    const { rows, currency } = await (await fetch(`${anvil.url}/admin/usage?by=key`, { headers: { authorization: `Bearer ${boss}` } })).json();
    assert.ok(currency === "EUR" && rows.find((row) => row.key === "ci").cost > 3 * 0.002, JSON.stringify(rows));
    const shown = JSON.parse(await command("limits", "show", ...own));
    assert.deepEqual(
      [shown.currency, shown.default.tokens_per_minute, shown.teams.lab.weight, shown.models.builtin.price.output, shown.models.builtin.limits.parallel_requests],
      ["EUR", 90000, 2.5, 2000, 50],
    );
    // What another administrator sets while a dialog is open is not overwritten, but shown.
    await page.getByRole("button", { name: "Change lab", exact: true }).click();
    dialog = page.getByRole("dialog", { name: "Settings of lab" });
    await command("limits", "team", "sales", "--requests-per-minute", "7", ...own);
    await dialog.getByLabel("Tokens a day").fill("5");
    await dialog.getByRole("button", { name: "Save" }).click();
    await dialog.getByText("the limits were changed by somebody else meanwhile").waitFor();
    await dialog.getByRole("button", { name: "Cancel" }).click();
    await page.getByRole("row", { name: /^sales 1 Requests a minute: 7 / }).waitFor();
    await page.getByRole("button", { name: "Remove lab" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Remove" }).click();
    await page.getByRole("row", { name: /^lab / }).waitFor({ state: "detached" });
    assert.deepEqual(Object.keys(JSON.parse(await command("limits", "show", ...own)).teams), ["sales"]);
    const { entries } = await (await fetch(`${anvil.url}/admin/audit?action=limits.set`, { headers: { authorization: `Bearer ${boss}` } })).json();
    assert.ok(entries.length >= 7, `${entries.length} changes of limits are in the audit log`);
  });
  await check("the audit log is read and checked on the page", async () => {
    const { page } = owner;
    await goTo(page, "audit");
    const table = page.getByRole("region", { name: "Audit log, the latest first" });
    await table.getByRole("cell", { name: "key.update" }).first().waitFor();
    await table.getByRole("row", { name: /local here limits.set – anvil/ }).waitFor();
    await page.getByLabel("Act", { exact: true }).fill("key.create");
    await page.getByRole("button", { name: "Show", exact: true }).click();
    await table.getByRole("cell", { name: "key.update" }).first().waitFor({ state: "detached" });
    assert.equal(await table.getByRole("cell", { name: "key.create" }).count(), 2);
    await page.getByRole("button", { name: "Check the log" }).click();
    await page.getByText(/this server: \d+ entries are intact/).waitFor();
    await page.getByText(/crucible: \d+ entries are intact/).waitFor();
    const head = await page.locator(".done code").first().textContent();
    assert.ok((await command("audit", "--verify", ...own)).includes(head), head);
    // Which node each act was done on.
    assert.match(await command("audit", ...own), /node[\s\S]*anvil/);
    for (const colorScheme of ["dark", "light"]) {
      await page.emulateMedia({ colorScheme });
      assert.deepEqual(await accessibility(page), [], colorScheme);
    }
    await picture(page, "audit");
  });
  await check("a user sees the own usage, and why keys are not shown", async () => {
    const user = await open(browser, crucible.url, (context) => context.addInitScript((key) => sessionStorage.setItem("thunder.key", key), ci));
    await goTo(user.page, "usage");
    await user.page.getByRole("heading", { name: "My usage" }).waitFor();
    await user.page.getByRole("cell", { name: "key ci" }).first().waitFor();
    assert.deepEqual(await accessibility(user.page), []);
    await goTo(user.page, "keys");
    await user.page.getByText(/this needs a key with the role admin/).first().waitFor();
    assert.ok(!(await user.page.content()).includes("boss"), "a user sees no other keys");
    await goTo(user.page, "audit");
    await user.page.getByText(/this needs a key with the role admin/).first().waitFor();
    await goTo(user.page, "limits");
    await user.page.getByText(/this needs a key with the role admin/).first().waitFor();
    assert.equal(await user.page.getByRole("button", { name: /Change|Set/ }).count(), 0, "nothing to press that would be refused");
    assert.deepEqual(user.troubles, []);
    await user.close();
  });
  await check("a revoked key is shown as such, and refused", async () => {
    await goTo(owner.page, "keys");
    await owner.page.getByRole("button", { name: "Revoke ci" }).click();
    await owner.page.getByRole("dialog").getByRole("button", { name: "Revoke" }).click();
    await owner.page.getByRole("cell", { name: "revoked", exact: true }).waitFor();
    await owner.page.getByText("It is revoked.").first().waitFor();
    // One whose time is over can be revoked too, so that nobody prolongs it, and not be rotated.
    await command("keys", "create", "old", "--expires", "1s", ...own);
    const row = owner.page.getByRole("row", { name: /^old / });
    await row.getByRole("cell", { name: "expired", exact: true }).waitFor({ timeout: 20_000 });
    assert.equal(await row.getByRole("button", { name: "Rotate old" }).getAttribute("aria-disabled"), "true");
    await row.getByRole("button", { name: "Revoke old" }).click();
    await owner.page.getByRole("dialog").getByRole("button", { name: "Revoke" }).click();
    await row.getByRole("cell", { name: "revoked", exact: true }).waitFor();
    for (const node of nodes) await says(node, ci, 401);
    assert.deepEqual(owner.troubles, []);
  });
  await owner.close();
  await Promise.all(nodes.map((node) => stop(node.child)));

  // People sign in at a provider: the page leaves for it, and comes back with a key of their own.
  const login = await provider({ sub: "7", name: "Ann", email: "ann@example.org", groups: ["llm-admins"] });
  const signing = await serve(
    "--store", storeFolder("signing"), "--context", "1024", "--oidc-issuer", login.issuer, "--oidc-client", login.client.id,
    "--oidc-secret", login.client.secret, "--oidc-admin", "llm-admins",
  );
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
  const visitor = await context.newPage();
  visitor.setDefaultTimeout(15_000);
  const problems = [];
  visitor.on("pageerror", (error) => problems.push(String(error)));
  await check("a server with sign-in is closed, and a person signs in", async () => {
    const refused = await fetch(`${signing.url}/v1/models`);
    assert.equal(refused.status, 401);
    await visitor.goto(`${signing.url}/#/keys`);
    const dialog = visitor.getByRole("dialog", { name: "Sign in, or use an API key" });
    await dialog.waitFor();
    assert.deepEqual(await accessibility(visitor), []);
    await picture(visitor, "sign-in");
    await dialog.getByRole("button", { name: /Sign in at 127.0.0.1/ }).click();
    await visitor.getByRole("button", { name: "Continue as Ann" }).click();
    // Back on the page from which it left, as an administrator by the provider's group.
    await visitor.getByRole("cell", { name: "sso:ann@example.org", exact: true }).waitFor();
    assert.equal(new URL(visitor.url()).search, "", "the code is not left in the address");
    assert.equal(new URL(visitor.url()).hash, "#/keys");
    const secret = await visitor.evaluate(() => sessionStorage.getItem("thunder.key"));
    assert.match(secret, /^th-[0-9a-z]{8}-[\w-]{43}$/);
    const answer = await fetch(`${signing.url}/admin/me`, { headers: { authorization: `Bearer ${secret}` } });
    assert.equal((await answer.json()).role, "admin");
  });
  await check("a sign-in that another tab began is not taken", async () => {
    const { url } = await (await fetch(`${signing.url}/auth/begin`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ redirect: `${signing.url}/` }),
    })).json();
    const other = await (await browser.newContext()).newPage();
    await other.goto(url);
    await other.getByRole("button", { name: "Continue as Ann" }).click();
    await other.getByText("This sign-in was not begun in this tab").waitFor();
    assert.equal(await other.evaluate(() => sessionStorage.getItem("thunder.key")), null);
    await other.context().close();
    assert.deepEqual(problems, []);
  });
  await context.close();
  login.close();
} finally {
  await browser.close();
  await endAll();
}
console.log(`browser: ${passed} passed, ${failed} failed`);
process.exit(failed === 0 ? 0 : 1);
