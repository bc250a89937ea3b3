import { useEffect, useId, useState } from "preact/hooks";
import { call, usePolled } from "../api";
import { LimitFields, limitsOf, limitsText, typed, wrongLimit } from "../limits";
import type { Limits } from "../limits";
import { Button, Card, Confirm, Dialog, Input, Outcome, Problem, SaveOrCancel, Table, useAction } from "../parts";

interface Price {
  input: number;
  cached?: number | null;
  output: number;
}

interface Team {
  weight: number;
  limits: Limits;
}

interface Model {
  limits: Limits;
  price: Price | null;
}

interface Policy {
  /** Names what was read: limits that somebody else has changed since then are not replaced. */
  version: string;
  currency: string | null;
  default: Limits;
  teams: Record<string, Team>;
  models: Record<string, Model>;
}

/** What a dialog changes. Without a name, the administrator types one. */
type Edited = { kind: "default" } | { kind: "team" | "model"; name: string | null };

const MISSING = "This server keeps no limits: it was started without a store, or is of an older version.";

/** Changes one thing of the limits as this administrator has seen them. The server refuses it if others have changed them. */
async function change(seen: Policy, edit: (policy: Policy) => void): Promise<void> {
  const policy = structuredClone(seen);
  edit(policy);
  await call("PUT", "/admin/limits", policy);
}

export function LimitsPage() {
  const policy = usePolled<Policy>("/admin/limits", 10_000);
  const [edited, setEdited] = useState<Edited | null>(null);
  const [removed, setRemoved] = useState<{ kind: "team" | "model"; name: string } | null>(null);
  const action = useAction();
  const now = policy.data;
  const remove = (seen: Policy, kind: "team" | "model", name: string) =>
    action.run(async () => {
      await change(seen, (policy) => void delete (kind === "team" ? policy.teams : policy.models)[name]);
      policy.again();
      return `${name} has no settings of its own any more.`;
    });
  const tools = (kind: "team" | "model", name: string) => (
    <div class="row">
      <Button label={`Change ${name}`} onClick={() => setEdited({ kind, name })}>Change</Button>
      <Button kind="danger" label={`Remove ${name}`} onClick={() => setRemoved({ kind, name })}>Remove</Button>
    </div>
  );
  return (
    <>
      <h1>Limits and prices</h1>
      <Problem error={policy.error} missing={MISSING} />
      <p class="note">
        They hold from the next request on. A request must fit the limits of its key, its team and its model. Limits of one key are set on the page{" "}
        <a href="#/keys">Keys</a>.
      </p>
      <Outcome action={action} />
      {now && (
        <>
          <Card title="Each key without its own" tools={<Button label="Change what each key has" onClick={() => setEdited({ kind: "default" })}>Change</Button>}>
            <p>{limitsText(now.default)}</p>
          </Card>
          <Card title="Teams" tools={<Button onClick={() => setEdited({ kind: "team", name: null })}>Set a team's limits</Button>}>
            <Table
              caption="All keys of a team together; under load, teams get the engine in proportion to their shares"
              head={["Team", "Share", "Limits", "Actions"]}
              numeric={[1]}
              empty="No team has limits. Each has a share of 1."
              rows={Object.entries(now.teams).map(([name, team]) => [name, String(team.weight), limitsText(team.limits), tools("team", name)])}
            />
          </Card>
          <Card title="Models" tools={<Button onClick={() => setEdited({ kind: "model", name: null })}>Set a model's limits or price</Button>}>
            <Table
              caption={`All keys together; prices of a million tokens, in ${now.currency ?? "a currency that is not named"}`}
              head={["Model", "Prompts", "From the cache", "Answers", "Limits", "Actions"]}
              numeric={[1, 2, 3]}
              empty="No model has limits or a price."
              rows={Object.entries(now.models).map(([name, { price, limits }]) => [
                name,
                amount(price?.input),
                amount(price ? (price.cached ?? price.input) : null),
                amount(price?.output),
                limitsText(limits),
                tools("model", name),
              ])}
            />
          </Card>
          <Currency seen={now} onSet={policy.again} />
        </>
      )}
      {edited && now && <Edit edited={edited} now={now} onClose={() => setEdited(null)} onSet={policy.again} />}
      {removed && now && (
        <Confirm
          text={`Remove the settings of ${removed.name}?`}
          yes="Remove"
          onNo={() => setRemoved(null)}
          onYes={() => {
            remove(now, removed.kind, removed.name);
            setRemoved(null);
          }}
        />
      )}
    </>
  );
}

function amount(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : String(value);
}

function Edit(props: { edited: Edited; now: Policy; onClose: () => void; onSet: () => void }) {
  const { edited } = props;
  // What the fields began with, while the page goes on to ask.
  const [now] = useState(props.now);
  const given = edited.kind === "default" ? null : edited.name;
  const [name, setName] = useState(given ?? "");
  const before = (name: string) => ({ team: now.teams[name], model: now.models[name] });
  const [limits, setLimits] = useState(typed((edited.kind === "default" ? now.default : before(name)[edited.kind]?.limits) ?? {}));
  const [weight, setWeight] = useState(String(before(name).team?.weight ?? 1));
  const price = before(name).model?.price;
  const [prices, setPrices] = useState({ input: text(price?.input), cached: text(price?.cached), output: text(price?.output) });
  const action = useAction();
  const names = useNames(given === null && edited.kind);
  const list = useId();
  const whyNot = () => {
    if (edited.kind !== "default" && name.trim() === "") return `Name the ${edited.kind} first.`;
    if (edited.kind !== "default" && given === null && before(name.trim())[edited.kind]) return `${name.trim()} has settings already: change those.`;
    const isPart = !prices.input.trim() !== !prices.output.trim() || (prices.cached.trim() && !prices.input.trim());
    if (edited.kind === "model" && isPart) return "A price needs an amount for prompts and one for answers.";
    return wrongLimit(limits) ?? (action.busy ? "It is being set." : null);
  };
  const why = whyNot();
  const set = () =>
    action.run(async () => {
      const set = limitsOf(limits);
      const number = (value: string) => (value.trim() === "" ? null : Number(value));
      await change(now, (policy) => {
        if (edited.kind === "default") policy.default = set;
        else if (edited.kind === "team") policy.teams[name.trim()] = { weight: Number(weight), limits: set };
        else {
          const [input, output] = [number(prices.input), number(prices.output)];
          const price = input === null || output === null ? null : { input, cached: number(prices.cached), output };
          policy.models[name.trim()] = { limits: set, price };
        }
      });
      props.onSet();
      props.onClose();
    });
  // Others' changes, if it was refused for them.
  useEffect(() => void (action.error && props.onSet()), [action.error]);
  const title = edited.kind === "default" ? "Limits of each key without its own" : given ? `Settings of ${given}` : `Settings of a ${edited.kind}`;
  return (
    <Dialog title={title} onClose={props.onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (!why) set();
        }}
      >
        {edited.kind !== "default" && given === null && (
          <>
            <datalist id={list}>
              {names.map((known) => <option value={known} key={known} />)}
            </datalist>
            <Input label={edited.kind === "team" ? "Team" : "Model"} list={list} value={name} onInput={setName} hint={edited.kind === "model" ? "Its full name or the last part of it." : undefined} />
          </>
        )}
        {edited.kind === "team" && <Input label="Share under load" type="number" min={0} step="any" value={weight} onInput={setWeight} hint="In proportion to other teams', which have 1." />}
        {edited.kind === "model" && (
          <div class="grid">
            <Input label="Price of 1M tokens of prompts" type="number" min={0} step="any" value={prices.input} onInput={(input) => setPrices({ ...prices, input })} />
            <Input label="Of these from the cache" type="number" min={0} step="any" value={prices.cached} onInput={(cached) => setPrices({ ...prices, cached })} placeholder="the same" />
            <Input label="Price of 1M tokens of answers" type="number" min={0} step="any" value={prices.output} onInput={(output) => setPrices({ ...prices, output })} />
          </div>
        )}
        <LimitFields fields={limits} onChange={setLimits} />
        <Outcome action={action} />
        <SaveOrCancel why={why} onCancel={props.onClose} />
      </form>
    </Dialog>
  );
}

function text(value: number | null | undefined): string {
  return value === null || value === undefined ? "" : String(value);
}

/** Names to choose from: teams that keys have, or models that are served. */
function useNames(kind: Edited["kind"] | false): string[] {
  const keys = usePolled<{ keys: { team: string | null }[] }>(kind === "team" ? "/admin/keys" : null, 0);
  const models = usePolled<{ models: { name: string }[] }>(kind === "model" ? "/admin/models" : null, 0);
  const teams = (keys.data?.keys ?? []).flatMap((key) => key.team ?? []);
  const names = (models.data?.models ?? []).map((model) => model.name);
  return [...new Set([...teams, ...names])].sort();
}

function Currency(props: { seen: Policy; onSet: () => void }) {
  const now = props.seen.currency ?? "";
  const [code, setCode] = useState(now);
  const action = useAction();
  useEffect(() => setCode(now), [now]);
  const why = code.trim() === now ? "It is this one already." : code.trim() === "" ? "Type three capital letters." : action.busy ? "It is being set." : null;
  return (
    <Card title="Currency">
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          if (why) return;
          action.run(async () => {
            await change(props.seen, (policy) => void (policy.currency = code.trim()));
            props.onSet();
            return `Prices and budgets are in ${code.trim()}.`;
          });
        }}
      >
        <Input label="Currency" value={code} onInput={setCode} placeholder="EUR" hint="Of all prices and budgets: three capital letters." />
        <Button submit kind="main" onClick={() => {}} why={why}>Set</Button>
      </form>
      <Outcome action={action} />
    </Card>
  );
}
