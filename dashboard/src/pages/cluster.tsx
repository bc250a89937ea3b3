import { call, usePolled } from "../api";
import { bytes, number, percent, time } from "../format";
import { Button, Card, Confirm, Figure, Input, Outcome, Problem, Secret, Select, Shares, Table, useAction } from "../parts";
import { useRates } from "../rates";
import type { Cluster, Link, Member, ModelList, ServedModel } from "../shapes";
import { useState } from "preact/hooks";

export function ClusterPage() {
  const cluster = usePolled<Cluster>("/admin/cluster", 1000);
  const models = usePolled<ModelList>("/admin/models", 1000);
  const rates = useRates(models.data?.models, models.at);
  const status = cluster.data;
  const members = status?.members ?? [];
  const up = members.filter((member) => member.up);
  const speed = [...rates.values()].reduce((sum, rate) => sum + rate.generated, 0);
  const running = models.data?.models.reduce((sum, model) => sum + (model.load?.running ?? 0), 0);
  const memory = (field: "memory_total" | "memory_free") => up.reduce((sum, member) => sum + (member.report?.[field] ?? 0), 0);
  return (
    <>
      <h1>Cluster</h1>
      <Problem error={cluster.error} />
      {status && !status.cluster && <p class="note">This is one server, without a cluster. `thunder up` on each machine makes one.</p>}
      <p class="visually-hidden" role="status">
        {members.length > 0 && `${up.length} of ${members.length} nodes answer.`}
      </p>
      <dl class="figures">
        <Figure name="Nodes" value={`${up.length} of ${members.length}`} unit="answer" />
        <Figure name="Memory free" value={bytes(memory("memory_free"))} unit={`of ${bytes(memory("memory_total"))}`} />
        <Figure name="Tokens" value={number(speed, 1)} unit="per second" />
        <Figure name="Requests" value={number(running)} unit="computed now" />
      </dl>
      {status?.problems?.map((problem) => <p class="error" role="alert" key={problem}>{problem}</p>)}
      {status?.cluster && status.problems?.length === 0 && <p class="done">All nodes answer and agree.</p>}
      {status && <Topology members={members} links={status.links ?? []} me={status.me} models={models.data?.models ?? []} />}
      {status && <Nodes status={status} models={models.data?.models ?? []} again={cluster.again} />}
      {status?.cluster && <Admission status={status} again={cluster.again} />}
      {status?.cluster && <Log members={members} me={status.me} />}
      <Card title="Models">
        <Problem error={models.error} />
        <Table
          caption="Models and their ranks"
          head={["Model", "State", "Ranks", "KV cache used", "Tokens/s", "Prompt tokens/s", "In reductions"]}
          numeric={[3, 4, 5, 6]}
          empty="No model is loaded."
          rows={(models.data?.models ?? []).map((model) => [
            model.name,
            model.ready ? "ready" : "not ready",
            model.ranks.map((rank) => `${rank.node} (${rank.words})`).join(", "),
            model.load ? percent(model.load.kv_tokens_used / Math.max(model.load.kv_tokens, 1)) : "–",
            number(rates.get(model.name)?.generated, 1),
            number(rates.get(model.name)?.prompt, 1),
            model.load?.reduce_share == null ? "–" : percent(model.load.reduce_share),
          ])}
        />
      </Card>
    </>
  );
}

const WIDTH = 720;
const HEIGHT = 340;

/** The nodes on an ellipse, a line for each pair that reaches each other. */
function Topology(props: { members: Member[]; links: Link[]; me: string; models: ServedModel[] }) {
  const { members, links } = props;
  const place = (index: number): [number, number] => {
    if (members.length === 1) return [WIDTH / 2, HEIGHT / 2];
    const angle = (2 * Math.PI * index) / members.length - Math.PI / 2;
    return [WIDTH / 2 + 270 * Math.cos(angle), HEIGHT / 2 + 125 * Math.sin(angle)];
  };
  const lines = members.flatMap((from, a) =>
    members.slice(a + 1).map((to, offset) => {
      const b = a + 1 + offset;
      const broken = from.cut_off_from.includes(to.id) || to.cut_off_from.includes(from.id);
      const measured = links.find((link) => (link.from === from.short && link.to === to.short) || (link.from === to.short && link.to === from.short));
      return { from, to, a: place(a), b: place(b), broken, off: !from.up || !to.up, measured };
    }),
  );
  const words = lines.filter((line) => !line.off).map((line) => `${line.from.name} to ${line.to.name}: ${line.broken ? "cut off" : linkWords(line.measured)}`);
  const names = (member: Member) => props.models.filter((model) => model.ranks.some((rank) => rank.node === member.name)).map((model) => model.name.split("/").at(-1)!);
  return (
    <figure class="topology">
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`Topology. ${members.map((member) => `${member.name} is ${member.up ? "up" : "down"}`).join(", ")}. ${words.join(", ")}`}>
        {lines.map((line) => (
          <g key={`${line.from.id}${line.to.id}`}>
            <line x1={line.a[0]} y1={line.a[1]} x2={line.b[0]} y2={line.b[1]} class={line.off ? "link off" : line.broken ? "link broken" : "link"} />
            {!line.off && (
              <text x={(line.a[0] + line.b[0]) / 2} y={(line.a[1] + line.b[1]) / 2 - 5} class="linktext">
                {line.broken ? "cut off" : line.measured ? linkWords(line.measured) : ""}
              </text>
            )}
          </g>
        ))}
        {members.map((member, index) => {
          const [x, y] = place(index);
          const report = member.report;
          const used = report && report.memory_total > 0 ? 1 - report.memory_free / report.memory_total : 0;
          return (
            <g key={member.id} transform={`translate(${x - 85} ${y - 38})`} class={member.up ? "node" : "node down"}>
              <rect width="170" height="76" rx="10" />
              <text x="85" y="22" class="nodename">{member.name.slice(0, 20)}{member.short === props.me || member.id === props.me ? " (here)" : ""}</text>
              <text x="85" y="40" class="nodetext">{member.up ? (member.drained ? "up, drained" : "up") : "down"}{report && ` · ${bytes(report.memory_free)} free`}{report?.temperature_c != null && ` · ${report.temperature_c} °C`}</text>
              <rect x="15" y="48" width="140" height="6" rx="3" class="meter" />
              <rect x="15" y="48" width={140 * used} height="6" rx="3" class="meterused" />
              <text x="85" y="69" class="nodetext">{names(member).join(", ").slice(0, 26)}</text>
            </g>
          );
        })}
      </svg>
      <figcaption>
        {members.length > 1
          ? links.length > 0
            ? "Lines are links with measured latency and bandwidth; the bar in a node is memory in use."
            : "A line is a pair of nodes that reach each other; this version has not measured the links. The bar in a node is memory in use."
          : "The bar is memory in use."}
      </figcaption>
    </figure>
  );
}

function linkWords(link: Link | undefined): string {
  if (!link) return "reached, not measured";
  const parts = [];
  if (link.latency_us !== undefined) parts.push(`${number(link.latency_us)} µs`);
  if (link.bytes_s !== undefined) parts.push(`${number((link.bytes_s * 8) / 1e9, 1)} Gbit/s`);
  if (link.kind) parts.push(link.kind);
  return parts.join(", ");
}

/** What ends a node's part in the cluster. */
interface Asked {
  member: Member;
  what: "remove" | "stop" | "leave";
}

const ENDS = {
  remove: {
    verb: "Remove",
    yes: "Remove for good",
    ask: (name: string) => `Remove ${name} from the cluster? Its key is refused from then on.`,
    said: (name: string) => `${name} is removed.`,
  },
  stop: {
    verb: "Stop",
    yes: "Stop it",
    ask: (name: string) => `End the agent on ${name}? Its models move to other nodes, and this dashboard does not answer until somebody starts it there again.`,
    said: (name: string) => `${name} ends.`,
  },
  leave: {
    verb: "Leave",
    yes: "Leave for good",
    ask: (name: string) => `Take ${name} out of the cluster, and end its agent? It forgets the cluster and its own key.`,
    said: (name: string) => `${name} has left the cluster and ends.`,
  },
};

function Nodes(props: { status: Cluster; models: ServedModel[]; again: () => void }) {
  const { status, models } = props;
  const action = useAction();
  const [asked, setAsked] = useState<Asked | null>(null);
  const act = (path: string, body: unknown, said: string) =>
    action.run(async () => {
      await call("POST", path, body);
      props.again();
      return said;
    });
  const shareOf = (member: Member) => {
    const report = member.report;
    if (!report) return "–";
    const shards = models.flatMap((model) => (model.load?.shards ?? []).filter((shard) => shard.node === member.name));
    const weights = shards.reduce((sum, shard) => sum + shard.weight_bytes, 0);
    const cache = shards.reduce((sum, shard) => sum + shard.kv_bytes, 0);
    const other = Math.max(report.memory_total - report.memory_free - weights - cache, 0);
    return (
      <Shares
        label="Memory"
        total={report.memory_total}
        parts={[
          { name: "models", value: weights, text: bytes(weights), tone: 1 },
          { name: "KV cache", value: cache, text: bytes(cache), tone: 2 },
          { name: "other programs", value: other, text: bytes(other), tone: 0 },
          { name: "free", value: report.memory_free, text: bytes(report.memory_free), tone: 4 },
        ]}
      />
    );
  };
  return (
    <Card title="Nodes">
      <p class="legend" aria-hidden="true">
        <span class="tone1 key" /> models <span class="tone2 key" /> KV cache <span class="tone0 key" /> other programs <span class="tone4 key" /> free
      </p>
      <Table
        caption="Nodes of the cluster"
        head={["Node", "State", "Cores", "Memory", "Free", "Use of memory", "System", "Version", "Actions"]}
        numeric={[2, 3, 4]}
        empty="No node is known."
        rows={status.members.map((member) => [
          <>{member.name} <small class="hint">{member.short}{member.id === status.me ? ", here" : ""}</small></>,
          <span class={member.up ? "good" : "bad"}>{member.up ? (member.drained ? "up, drained" : "up") : "down"}</span>,
          number(member.report?.cores),
          bytes(member.report?.memory_total),
          bytes(member.report?.memory_free),
          shareOf(member),
          member.report?.system ?? "–",
          member.report?.version ?? "–",
          <div class="row">
            <Button
              label={`${member.drained ? "Resume" : "Drain"} ${member.name}`}
              why={!status.cluster ? "One server has nothing to move to." : null}
              onClick={() => act("/admin/cluster/drain", { node: member.id, drained: !member.drained }, member.drained ? `${member.name} gets work again.` : `${member.name} gets no new work.`)}
            >
              {member.drained ? "Resume" : "Drain"}
            </Button>
            <Button
              kind="danger"
              label={`Remove ${member.name}`}
              why={!status.cluster ? "One server is no cluster." : member.id === status.me ? "This node answers: remove it on another one, or let it leave." : null}
              onClick={() => setAsked({ member, what: "remove" })}
            >
              Remove
            </Button>
            {(["stop", "leave"] as const).map((what) => (
              <Button
                key={what}
                kind="danger"
                label={`${ENDS[what].verb} ${member.name}`}
                why={!status.cluster ? "One server ends by Ctrl-C." : member.id === status.me ? null : "Only on that node's own dashboard."}
                onClick={() => setAsked({ member, what })}
              >
                {ENDS[what].verb}
              </Button>
            ))}
          </div>,
        ])}
      />
      <Outcome action={action} />
      {asked && (
        <Confirm
          text={ENDS[asked.what].ask(asked.member.name)}
          yes={ENDS[asked.what].yes}
          onNo={() => setAsked(null)}
          onYes={() => {
            const { member, what } = asked;
            act(`/admin/cluster/${what}`, what === "remove" ? { node: member.id } : {}, ENDS[what].said(member.name));
            setAsked(null);
          }}
        />
      )}
    </Card>
  );
}

function Admission(props: { status: Cluster; again: () => void }) {
  const { status } = props;
  const [code, setCode] = useState("");
  const [hours, setHours] = useState("1");
  const [token, setToken] = useState<string | null>(null);
  const [action, making] = [useAction(), useAction()];
  const whyNoToken = Number(hours) > 0 ? (making.busy ? "It is being made." : null) : "Its hours must be a number above 0.";
  return (
    <Card title="Add a node">
      {status.code ? (
        <p>This node is in no cluster. To add it to one, type on one of its nodes: <code>thunder cluster approve {status.code}</code></p>
      ) : null}
      {status.newcomers.map((newcomer) => (
        <p key={newcomer.short}>{newcomer.name} ({newcomer.short}) is in sight and waits to be approved.</p>
      ))}
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          action.run(async () => {
            const done = await call<{ name: string }>("POST", "/admin/cluster/approve", { code });
            setCode("");
            props.again();
            return `${done.name} is a node of this cluster now.`;
          });
        }}
      >
        <Input label="Code that the new node shows" value={code} onInput={setCode} placeholder="K7-4F9Q-X2MC" />
        <Button submit kind="main" onClick={() => {}} why={code.trim() === "" ? "Type the code first." : action.busy ? "It is being approved." : null}>Approve</Button>
      </form>
      <Outcome action={action} />
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          if (whyNoToken) return;
          making.run(async () => setToken((await call<{ token: string }>("POST", "/admin/cluster/token", { life_s: Math.round(Number(hours) * 3600) })).token));
        }}
      >
        <Input label="Hours that a token can be used" type="number" min={0} step="any" value={hours} onInput={setHours} hint="One new node joins with it, without a person; this node has to be running then." />
        <Button submit onClick={() => {}} why={whyNoToken}>Make a token</Button>
      </form>
      <Outcome action={making} />
      {token && <Secret title="A token for one new node" note="Start the node with THUNDER_TOKEN, or thunder up --token. Whoever has it can join: pass it on in confidence." secret={token} onClose={() => setToken(null)} />}
    </Card>
  );
}

/** Lines of a node's log that are shown. */
const LOG_LINES = 100;

function Log(props: { members: Member[]; me: string }) {
  const [node, setNode] = useState(props.me);
  const log = usePolled<{ lines: { number: number; unix_s: number; text: string }[] }>(`/admin/cluster/logs?lines=${LOG_LINES}&node=${node}`, 3000);
  return (
    <Card title="What has happened">
      <Select label="Node" value={node} options={props.members.map((member) => [member.id, member.name])} onChange={setNode} />
      <Problem error={log.error} />
      <pre class="log" tabIndex={0} aria-label="Log of the node, the latest last">
        {(log.data?.lines ?? []).map((line) => `${time(line.unix_s)}  ${line.text}`).join("\n") || "Nothing has happened yet."}
      </pre>
    </Card>
  );
}
