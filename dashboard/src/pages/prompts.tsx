import { useEffect, useState } from "preact/hooks";
import { call, usePolled } from "../api";
import { number, time } from "../format";
import { Button, Card, Confirm, Figure, Input, Outcome, Problem, Select, useAction } from "../parts";

interface Policy {
  all: boolean;
  keys: string[];
  teams: string[];
  models: string[];
  redact: string[];
  patterns: string[];
  days: number;
}

interface PolicyAnswer {
  policy: Policy;
  /** Requests whose texts could not be kept. */
  lost: number;
  /** Nodes that do not answer, and why. */
  missing: string[];
}

interface KeptText {
  role: string;
  choice?: number;
  text: string;
}

interface Kept {
  id: string;
  time: string;
  key: string | null;
  team: string | null;
  model: string;
  api: string;
  outcome: string;
  node?: string;
  prompt: KeptText[];
  answer: KeptText[];
  is_cut: boolean;
  redacted: number;
}

interface Page {
  prompts: Kept[];
  next: string | null;
  missing: string[];
}

const KINDS: [string, string][] = [
  ["email", "E-mail addresses"],
  ["card", "Card numbers"],
  ["token", "Tokens and keys of services"],
  ["iban", "Account numbers (IBAN)"],
];
const MISSING = "This server keeps no prompts: it was started without a store, or is of an older version.";
const names = (text: string, by: string) => text.split(by).map((name) => name.trim()).filter(Boolean);

function isOn(policy: Policy): boolean {
  return policy.all || policy.keys.length + policy.teams.length + policy.models.length > 0;
}

export function PromptsPage() {
  const policy = usePolled<PolicyAnswer>("/admin/prompts/policy", 30_000);
  const why = policy.error ? "See above." : policy.data ? null : "The policy is asked for.";
  return (
    <>
      <h1>Kept prompts</h1>
      <Problem error={policy.error} missing={MISSING} />
      <p class="note">
        Nobody's prompts and answers are kept unless the policy says so. They are redacted, then encrypted on the disk of the node that answered. Every
        change of the policy and every reading is in the audit log.
      </p>
      {policy.data && (
        <dl class="figures">
          <Figure name="Kept now" value={policy.data.policy.all ? "everybody's" : isOn(policy.data.policy) ? "some" : "nobody's"} />
          <Figure name="For" value={number(policy.data.policy.days)} unit="days" />
          <Figure name="Could not be kept" value={number(policy.data.lost)} />
        </dl>
      )}
      {policy.data && <Missing nodes={policy.data.missing} />}
      {/* Anew for each policy that comes: what another administrator has set is what is changed. */}
      <PolicyForm key={JSON.stringify(policy.data?.policy)} now={policy.data?.policy ?? null} why={why} onSet={policy.again} />
      <Reading why={why} />
    </>
  );
}

function Missing(props: { nodes: string[] }) {
  return (
    <>
      {props.nodes.map((node) => (
        <p class="error" role="alert" key={node}>
          Without what one node keeps: {node}
        </p>
      ))}
    </>
  );
}

function PolicyForm(props: { now: Policy | null; why: string | null; onSet: () => void }) {
  const { now } = props;
  const [whose, setWhose] = useState(!now || !isOn(now) ? "none" : now.all ? "all" : "some");
  const [keys, setKeys] = useState(now?.keys.join(", ") ?? "");
  const [teams, setTeams] = useState(now?.teams.join(", ") ?? "");
  const [models, setModels] = useState(now?.models.join(", ") ?? "");
  const [redact, setRedact] = useState(now?.redact ?? []);
  const [patterns, setPatterns] = useState(now?.patterns.join("\n") ?? "");
  const [days, setDays] = useState(String(now?.days ?? 30));
  const [asked, setAsked] = useState<object | null>(null);
  const action = useAction();
  const some = whose === "some";
  const nobody = some && !(keys + teams + models).trim();
  const why = props.why ?? (nobody ? "Name a key, a team or a model." : action.busy ? "The policy is being set." : null);
  const set = (policy: object) =>
    action.run(async () => {
      await call("PUT", "/admin/prompts/policy", policy);
      props.onSet();
      return "The policy holds for requests that begin from now on.";
    });
  return (
    <Card title="Policy">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (why) return;
          const list = (text: string) => (some ? names(text, ",") : []);
          const policy = {
            all: whose === "all",
            keys: list(keys),
            teams: list(teams),
            models: list(models),
            redact,
            patterns: names(patterns, "\n"),
            days: Number(days),
          };
          if (whose === "none") set(policy);
          else setAsked(policy);
        }}
      >
        <div class="grid">
          <Select
            label="Keep prompts and answers of"
            value={whose}
            options={[["none", "nobody"], ["some", "those named here"], ["all", "everybody"]]}
            onChange={setWhose}
          />
          <Input label="Days" type="number" min={1} max={3650} step={1} value={days} onInput={setDays} hint="Then they are removed." />
          {some && <Input label="Keys" value={keys} onInput={setKeys} hint="Names or ids, with commas." />}
          {some && <Input label="Teams" value={teams} onInput={setTeams} hint="Names with commas." />}
          {some && <Input label="Models" value={models} onInput={setModels} hint="Names with commas." />}
        </div>
        <fieldset>
          <legend>Replaced before anything is written</legend>
          {KINDS.map(([kind, text]) => (
            <label class="check" key={kind}>
              <input
                type="checkbox"
                checked={redact.includes(kind)}
                onChange={(event) => setRedact(event.currentTarget.checked ? [...redact, kind] : redact.filter((one) => one !== kind))}
              />
              {text}
            </label>
          ))}
          <label class="field">
            Further patterns, a regular expression in each line
            <textarea rows={2} value={patterns} onInput={(event) => setPatterns(event.currentTarget.value)} spellcheck={false} />
          </label>
        </fieldset>
        <Button submit kind="main" onClick={() => {}} why={why}>
          Set the policy
        </Button>
      </form>
      <Outcome action={action} />
      {asked && (
        <Confirm
          text={`Keep prompts and answers of ${whose === "all" ? "everybody" : "those named"} for ${days} days? Tell the people whose texts these are.`}
          yes="Keep them"
          onNo={() => setAsked(null)}
          onYes={() => {
            set(asked);
            setAsked(null);
          }}
        />
      )}
    </Card>
  );
}

function Reading(props: { why: string | null }) {
  const [filter, setFilter] = useState({ key: "", team: "", model: "", since: "" });
  const [pages, setPages] = useState<Page[]>([]);
  const action = useAction();
  const why = props.why ?? (action.busy ? "The prompts are being read." : null);
  const field = (name: keyof typeof filter) => (value: string) => setFilter({ ...filter, [name]: value });
  // Another filter is another list: its first page has to be asked for.
  useEffect(() => setPages([]), [filter]);
  const read = (before: string | null) =>
    action.run(async () => {
      const query = new URLSearchParams({ limit: "20" });
      for (const [name, value] of Object.entries(filter)) if (value.trim()) query.set(name, value.trim());
      if (before) query.set("before", before);
      const page = await call<Page>("GET", `/admin/prompts?${query}`);
      setPages(before ? [...pages, page] : [page]);
      return `${page.prompts.length} prompts are read, which is noted in the audit log.`;
    });
  const last = pages.at(-1);
  return (
    <Card title="Read kept prompts">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (!why) read(null);
        }}
      >
        <div class="grid">
          <Input label="Key" value={filter.key} onInput={field("key")} />
          <Input label="Team" value={filter.team} onInput={field("team")} />
          <Input label="Model" value={filter.model} onInput={field("model")} />
          <Input label="Since" type="date" value={filter.since} onInput={field("since")} />
        </div>
        <Button submit kind="main" onClick={() => {}} why={why}>
          Read
        </Button>
      </form>
      <Outcome action={action} />
      {last && <Missing nodes={last.missing} />}
      {last && pages[0]!.prompts.length === 0 && <p class="empty">No kept prompt fits.</p>}
      {pages.flatMap((page) => page.prompts).map((kept) => (
        <KeptPrompt key={`${kept.time}${kept.id}${kept.node}`} kept={kept} />
      ))}
      {last?.next && (
        <Button onClick={() => read(last.next)} why={why}>
          Read older ones
        </Button>
      )}
    </Card>
  );
}

function KeptPrompt(props: { kept: Kept }) {
  const { kept } = props;
  const of = [time(kept.time), kept.key ?? "no key", kept.team, kept.model, kept.outcome, kept.node && `on ${kept.node}`];
  return (
    <details class="model">
      <summary>{of.filter(Boolean).join(" · ")}</summary>
      <p class="empty">
        {kept.api}, {kept.id}
        {kept.redacted > 0 && `, ${number(kept.redacted)} replaced`}
        {kept.is_cut && ", too long, cut off"}
      </p>
      {[...kept.prompt, ...kept.answer].map((said, index) => (
        <div key={index} class={said.role === "user" || said.role === "prompt" ? "bubble user" : "bubble"}>
          <p>
            <small>{said.role}</small>
          </p>
          <p class="asked">{said.text}</p>
        </div>
      ))}
    </details>
  );
}
