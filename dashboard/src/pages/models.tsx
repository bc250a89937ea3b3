import { useId, useState } from "preact/hooks";
import { call, usePolled } from "../api";
import { bytes, number, percent, seconds } from "../format";
import { Button, Card, Confirm, Input, Outcome, Problem, Shares, Table, useAction } from "../parts";
import { useRates } from "../rates";
import type { Cluster, ModelList, ServedModel, Task } from "../shapes";

/** Layouts that are shown. */
const MOST_LAYOUTS = 12;

interface Downloads {
  available: { name: string; bytes: number }[];
  downloads: { name: string; state: "running" | "done" | "failed"; done: number; total: number; error: string | null }[];
}

/** What `thunder cluster plan` predicts of a layout, and what loads it. */
interface PlannedLayout {
  name: string;
  why_not: string | null;
  decode_tokens_s: number;
  prefill_tokens_s: number;
  batch_tokens_s: number;
  answer_s: number;
  kv_tokens: number;
  load: { layouts: unknown[]; replicas: number };
}

interface Plan {
  /** What was asked: a plan of another model or other options is not shown. */
  of: string;
  layouts: PlannedLayout[];
  pick: { index: number; why: string; slower: string | null } | null;
}

export function ModelsPage() {
  const models = usePolled<ModelList>("/admin/models", 1000);
  const cluster = usePolled<Cluster>("/admin/cluster", 2000);
  const files = usePolled<Downloads>("/admin/downloads", 2000);
  const rates = useRates(models.data?.models, models.at);
  const action = useAction();
  const [unloading, setUnloading] = useState<string | null>(null);
  const cannot = models.data?.cannot_change ?? null;
  return (
    <>
      <h1>Models</h1>
      <Problem error={models.error} missing="This server does not tell its models: it is of an older version." />
      <Card title="Loaded">
        {(models.data?.models ?? []).map((model) => (
          <Loaded key={model.name} model={model} speed={rates.get(model.name)?.generated} cannot={cannot} unload={() => setUnloading(model.name)} />
        ))}
        {models.data?.models.length === 0 && <p class="empty">No model is loaded.</p>}
        <Outcome action={action} />
      </Card>
      <Load cannot={cannot} cluster={cluster.data} files={files.data} again={models.again} />
      <Stored cluster={cluster.data} />
      <Files files={files.data} error={files.error} again={files.again} />
      {unloading && (
        <Confirm
          text={`Unload ${unloading}? Answers under way are cut off.`}
          yes="Unload"
          onNo={() => setUnloading(null)}
          onYes={() => {
            const name = unloading;
            setUnloading(null);
            action.run(async () => {
              await call("POST", "/admin/models/unload", { model: name });
              models.again();
              return `${name} is unloaded.`;
            });
          }}
        />
      )}
    </>
  );
}

function Loaded(props: { model: ServedModel; speed: number | undefined; cannot: string | null; unload: () => void }) {
  const { model } = props;
  const load = model.load;
  const ended = model.ranks.filter((rank) => rank.state !== null && typeof rank.state === "object");
  return (
    <article class="model" aria-label={model.name}>
      <header>
        <h3>{model.name}</h3>
        <span class={model.ready ? "good" : "bad"}>{model.ready ? "ready" : model.ranks.length === 0 ? "waits for a node" : "starting"}</span>
        <Button kind="danger" label={`Unload ${model.name}`} onClick={props.unload} why={props.cannot}>Unload</Button>
      </header>
      <p>
        {model.ranks.map((rank, index) => `rank ${index} on ${rank.node} (${rank.words})`).join(", ")}
        {model.generation > 1 && ` · formed ${model.generation} times`}
      </p>
      {ended.map((rank) => <p class="error" key={rank.node}>{rank.node}: {rank.words}</p>)}
      {load && (
        <>
          <p>
            {number(load.running)} running, {number(load.waiting)} waiting · {number(props.speed, 1)} tokens/s · context {number(load.context)} tokens ·
            KV cache {number(load.kv_tokens_used)} of {number(load.kv_tokens)} tokens ({percent(load.kv_tokens_used / Math.max(load.kv_tokens, 1))})
          </p>
          <Shares
            label="KV cache"
            total={load.kv_tokens}
            parts={[
              { name: "used", value: load.kv_tokens_used, text: `${number(load.kv_tokens_used)} tokens`, tone: 2 },
              { name: "free", value: load.kv_tokens - load.kv_tokens_used, text: `${number(load.kv_tokens - load.kv_tokens_used)} tokens`, tone: 4 },
            ]}
          />
        </>
      )}
    </article>
  );
}

function Load(props: { cannot: string | null; cluster: Cluster | null; files: Downloads | null; again: () => void }) {
  const list = useId();
  const action = useAction();
  const [model, setModel] = useState("");
  const [nodes, setNodes] = useState<string[]>([]);
  const [options, setOptions] = useState("");
  const planning = useAction();
  const [planned, setPlanned] = useState<Plan | null>(null);
  const [layout, setLayout] = useState<number | null>(null);
  const members = props.cluster?.members ?? [];
  const why = props.cannot ?? (model.trim() === "" ? "Name a model first." : action.busy ? "The request is on its way." : null);
  const whyNoPlan = why ?? (planning.busy ? "Nodes and links are measured." : nodes.length > 0 ? "Nodes are chosen above." : null);
  const words = options.trim() ? options.trim().split(/\s+/) : [];
  const asked = JSON.stringify([model.trim(), words]);
  const plan = planned?.of === asked && nodes.length === 0 ? planned : null;
  const makePlan = () =>
    planning.run(async () => {
      const found = await call<Omit<Plan, "of">>("POST", "/admin/models/plan", { model: model.trim(), arguments: words });
      setPlanned({ ...found, of: asked });
      setLayout(found.pick?.index ?? null);
      return found.pick ? [found.pick.why, found.pick.slower].filter(Boolean).join(" ") : "The model fits nowhere: the table says why.";
    });
  return (
    <Card title="Load a model">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (why) return;
          action.run(async () => {
            const body: Record<string, unknown> = { model: model.trim() };
            if (nodes.length > 0) body["nodes"] = nodes;
            else if (plan && layout !== null) Object.assign(body, plan.layouts[layout]?.load);
            if (words.length > 0) body["arguments"] = words;
            const loaded = await call<{ why?: string | null }>("POST", "/admin/models/load", body);
            props.again();
            return `${model} is being loaded: its ranks are shown above. ${loaded.why ?? ""}`.trim();
          });
        }}
      >
        <datalist id={list}>
          <option value="builtin" />
          {(props.files?.available ?? []).map((file) => <option value={file.name} key={file.name}>{bytes(file.bytes)}</option>)}
        </datalist>
        <div class="grid">
          <Input label="Model" list={list} value={model} onInput={setModel} hint="A name of the Hugging Face cache, a folder or GGUF file that every node has, or builtin." />
          <Input label="Options" value={options} onInput={setOptions} hint="As for thunder serve, e.g. --context 4096 --memory 8G" />
        </div>
        <fieldset>
          <legend>Nodes that run it together</legend>
          {members.map((member) => (
            <label class="check" key={member.id}>
              <input
                type="checkbox"
                checked={nodes.includes(member.id)}
                onChange={(event) => setNodes(event.currentTarget.checked ? [...nodes, member.id] : nodes.filter((id) => id !== member.id))}
              />
              {member.name}{member.report && ` (${bytes(member.report.memory_free)} free)`}{!member.up && ", down"}
            </label>
          ))}
          <p class="hint">None chosen: the layout below, or else the one that the plan picks, as by thunder model load.</p>
        </fieldset>
        <Button label="Predict layouts" onClick={makePlan} why={whyNoPlan}>Predict</Button>
        <Outcome action={planning} />
        {plan && (
          <Table
            caption="Predicted layouts, the best first"
            head={["Take", "Layout", "Decode, tokens/s", "Prefill, tokens/s", "16 at a time, tokens/s", "An answer", "KV tokens"]}
            numeric={[2, 3, 4, 5, 6]}
            empty="No node takes work."
            rows={plan.layouts.slice(0, MOST_LAYOUTS).map((of, index) =>
              of.why_not
                ? ["", of.name, of.why_not, "", "", "", ""]
                : [
                    <input type="radio" name="layout" aria-label={of.name} checked={layout === index} onChange={() => setLayout(index)} />,
                    of.name,
                    number(of.decode_tokens_s, 1),
                    number(of.prefill_tokens_s),
                    number(of.batch_tokens_s),
                    seconds(of.answer_s),
                    number(of.kv_tokens),
                  ],
            )}
          />
        )}
        <Button submit kind="main" onClick={() => {}} why={why}>Load</Button>
      </form>
      <Outcome action={action} />
    </Card>
  );
}

function Files(props: { files: Downloads | null; error: Parameters<typeof Problem>[0]["error"]; again: () => void }) {
  const [name, setName] = useState("");
  const action = useAction();
  const running = props.files?.downloads ?? [];
  return (
    <Card title="On this machine's disk">
      <Problem error={props.error} missing="This server does not download models: use `thunder model pull`." />
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          if (name.trim() === "") return;
          action.run(async () => {
            await call("POST", "/admin/downloads", { model: name.trim() });
            props.again();
            return `${name} is being downloaded.`;
          });
        }}
      >
        <Input label="Download from the Hugging Face hub" value={name} onInput={setName} placeholder="mlx-community/Qwen3-0.6B-4bit" />
        <Button submit onClick={() => {}} why={props.error ? "The server does not download." : name.trim() === "" ? "Name a model first." : null}>Pull</Button>
      </form>
      <Outcome action={action} />
      {running.map((download) => (
        <div class="download" key={download.name}>
          <span>{download.name}: {download.state === "failed" ? download.error : `${bytes(download.done)} of ${bytes(download.total)}`}</span>
          {download.state === "running" && <progress aria-label={`Download of ${download.name}`} max={Math.max(download.total, 1)} value={download.done} />}
          {download.state === "done" && <span class="good">complete</span>}
        </div>
      ))}
      <Table
        caption="Models in the Hugging Face cache"
        head={["Model", "Bytes"]}
        numeric={[1]}
        empty="The cache has no models."
        rows={(props.files?.available ?? []).map((file) => [file.name, bytes(file.bytes)])}
      />
    </Card>
  );
}

/** What the nodes have on their disks, as `thunder model list --nodes all` shows it. */
interface StoredModels {
  nodes: { node: string; error: string | null; models: { name: string; commit: string | null; bytes: number; missing: string | null }[] }[];
}

const WORDS = { pull: "Download", update: "Update", verify: "Check" };

function Stored(props: { cluster: Cluster | null }) {
  const { cluster } = props;
  const isCluster = cluster?.cluster ?? false;
  const stored = usePolled<StoredModels>(isCluster ? "/admin/models/stored" : null, 5000);
  const [name, setName] = useState("");
  const [deleting, setDeleting] = useState<{ model: string; node: string } | null>(null);
  const action = useAction();
  if (!isCluster) {
    return (
      <Card title="On the nodes' disks">
        <p class="note">This is one server, whose models are below. `thunder model verify`, `update` and `remove` look after them; the nodes of a cluster do it from here.</p>
      </Card>
    );
  }
  const nodes = stored.data?.nodes ?? [];
  const act = (what: "verify" | "update" | "delete", model: string, node: string) =>
    action.run(async () => {
      const done = await call<{ removed?: Record<string, number> }>("POST", `/admin/models/${what}`, { model, nodes: [node] });
      stored.again();
      return what === "delete" ? `${model} is deleted on ${node}: ${bytes(done.removed?.[node])} are free.` : `${what === "verify" ? "Checking" : "Updating"} ${model} on ${node}: its progress is below.`;
    });
  const busy = (model: string, node: string) => {
    const runs = (task: Task) => task.model.split("@")[0] === model && task.nodes.some((its) => its.node === node && typeof its.state === "string");
    return (cluster?.tasks ?? []).some(runs) ? "A job with it runs on this node." : action.busy ? "The request is on its way." : null;
  };
  return (
    <Card title="On the nodes' disks">
      <Problem error={stored.error} />
      {nodes.filter((node) => node.error).map((node) => <p class="error" role="alert" key={node.node}>{node.node}: {node.error}</p>)}
      <Table
        caption="Models that nodes have"
        head={["Model", "Node", "Bytes", "Version", "Actions"]}
        numeric={[2]}
        empty="No node has downloaded a model. Builtin is in the program."
        rows={nodes.flatMap((node) =>
          node.models.map((model) => [
            model.name,
            node.node,
            bytes(model.bytes),
            model.missing ? `incomplete: lacks ${model.missing}` : (model.commit?.slice(0, 8) ?? "–"),
            <div class="row">
              <Button label={`Check ${model.name} on ${node.node}`} why={busy(model.name, node.node)} onClick={() => act("verify", model.name, node.node)}>Check</Button>
              <Button label={`Update ${model.name} on ${node.node}`} why={busy(model.name, node.node)} onClick={() => act("update", model.name, node.node)}>Update</Button>
              <Button kind="danger" label={`Delete ${model.name} on ${node.node}`} why={busy(model.name, node.node)} onClick={() => setDeleting({ model: model.name, node: node.node })}>Delete</Button>
            </div>,
          ]),
        )}
      />
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          if (name.trim() === "") return;
          action.run(async () => {
            await call("POST", "/admin/models/pull", { model: name.trim() });
            return `${name} comes to all nodes: its progress is below.`;
          });
        }}
      >
        <Input label="Download to all nodes" value={name} onInput={setName} hint="From nodes that have it, else once from the Hugging Face hub." />
        <Button submit label="Pull to all nodes" onClick={() => {}} why={name.trim() === "" ? "Name a model first." : action.busy ? "The request is on its way." : null}>Pull to all</Button>
      </form>
      <Outcome action={action} />
      {(cluster?.tasks ?? []).map((task) => (
        <div class="task" key={task.id}>
          {task.nodes.map((node) => (
            <p key={node.node}>
              {WORDS[task.work]} of {task.model} on {node.node}:{" "}
              {typeof node.state === "string" ? `${node.state}, ${bytes(node.done)} of ${bytes(node.total)}` : "done" in node.state ? <span class="good">{node.state.done}</span> : <span class="bad">{node.state.failed}</span>}
            </p>
          ))}
        </div>
      ))}
      {deleting && (
        <Confirm
          text={`Delete the files of ${deleting.model} on ${deleting.node}? A node that needs them again downloads them.`}
          yes="Delete"
          onNo={() => setDeleting(null)}
          onYes={() => {
            act("delete", deleting.model, deleting.node);
            setDeleting(null);
          }}
        />
      )}
    </Card>
  );
}
