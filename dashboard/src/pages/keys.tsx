import { useState } from "preact/hooks";
import { call, usePolled } from "../api";
import { number, time } from "../format";
import { Button, Card, Confirm, Dialog, Input, Outcome, Problem, Select, Table, useAction } from "../parts";

interface Limits {
  requests_per_minute?: number | null;
  tokens_per_minute?: number | null;
  parallel_requests?: number | null;
  tokens_per_day?: number | null;
  tokens_per_month?: number | null;
  cost_per_month?: number | null;
}

interface Key {
  id: string;
  name: string;
  owner: string | null;
  team: string | null;
  role: "user" | "admin";
  created: string;
  expires: string | null;
  last_used: string | null;
  state: "active" | "rotating" | "expired" | "revoked";
  models: string[];
  limits: Limits;
  secret_begins: string;
}

const LIMITS: [keyof Limits, string][] = [
  ["requests_per_minute", "Requests a minute"],
  ["tokens_per_minute", "Tokens a minute"],
  ["parallel_requests", "Parallel requests"],
  ["tokens_per_day", "Tokens a day"],
  ["tokens_per_month", "Tokens a month"],
  ["cost_per_month", "Cost a month"],
];
const MISSING = "This server keeps no keys: it was started without a store, or is of an older version. Its keys, if any, are those of --api-key.";

export function KeysPage() {
  const keys = usePolled<{ keys: Key[] }>("/admin/keys", 5000);
  const me = usePolled<{ role: string; key: { id: string } | null }>("/admin/me", 30_000);
  const action = useAction();
  const [secret, setSecret] = useState<{ name: string; secret: string } | null>(null);
  const [asked, setAsked] = useState<{ key: Key; what: "rotate" | "revoke" } | null>(null);
  const notAdmin = me.data && me.data.role !== "admin" ? "Only an admin's key may change keys." : null;
  const act = (key: Key, what: "rotate" | "revoke") =>
    action.run(async () => {
      const body = what === "rotate" ? { grace_s: 86_400 } : undefined;
      const done = await call<{ secret?: string }>("POST", `/admin/keys/${encodeURIComponent(key.id)}/${what}`, body);
      if (done.secret) setSecret({ name: key.name, secret: done.secret });
      keys.again();
      return what === "revoke" ? `${key.name} is revoked.` : `${key.name} has a new secret; the old one works for another day.`;
    });
  return (
    <>
      <h1>Keys</h1>
      <Problem error={keys.error} missing={MISSING} />
      {notAdmin && <p class="note">{notAdmin}</p>}
      <Create why={keys.error ? "Keys cannot be made here: see above." : notAdmin} made={(name, text) => { setSecret({ name, secret: text }); keys.again(); }} />
      <Outcome action={action} />
      <Card title="All keys">
        <Table
          caption="API keys"
          head={["Name", "Secret", "Owner", "Team", "Role", "State", "Models", "Limits", "Last used", "Expires", "Actions"]}
          empty="There are no keys yet."
          rows={(keys.data?.keys ?? []).map((key) => {
            const over = key.state === "revoked" || key.state === "expired" ? `It is ${key.state}.` : null;
            return [
              key.name,
              <code>{key.secret_begins}…</code>,
              key.owner ?? "–",
              key.team ?? "–",
              key.role,
              key.state,
              key.models.join(", "),
              LIMITS.filter(([name]) => key.limits[name] != null).map(([name, text]) => `${text}: ${number(key.limits[name])}`).join("; ") || "–",
              time(key.last_used),
              time(key.expires),
              <div class="row">
                <Button label={`Rotate ${key.name}`} why={over ?? notAdmin} onClick={() => setAsked({ key, what: "rotate" })}>Rotate</Button>
                <Button kind="danger" label={`Revoke ${key.name}`} why={over ?? notAdmin} onClick={() => setAsked({ key, what: "revoke" })}>Revoke</Button>
              </div>,
            ];
          })}
        />
      </Card>
      {asked && (
        <Confirm
          text={asked.what === "revoke" ? `Revoke ${asked.key.name}? It stops working at once, for good.` : `Give ${asked.key.name} a new secret? The old one works for another day.`}
          yes={asked.what === "revoke" ? "Revoke" : "Rotate"}
          onNo={() => setAsked(null)}
          onYes={() => {
            act(asked.key, asked.what);
            setAsked(null);
          }}
        />
      )}
      {secret && (
        <Dialog title={`The secret of ${secret.name}`} onClose={() => setSecret(null)}>
          <p>It is shown now and never again. Only its hash is kept.</p>
          <pre tabIndex={0} class="secret">{secret.secret}</pre>
          <div class="row">
            <Button onClick={() => void navigator.clipboard?.writeText(secret.secret)} why={navigator.clipboard ? null : "The browser allows copying over https and on this machine only: select the text."}>Copy</Button>
            <Button kind="main" onClick={() => setSecret(null)}>I have kept it</Button>
          </div>
        </Dialog>
      )}
    </>
  );
}

function Create(props: { why: string | null | false; made: (name: string, secret: string) => void }) {
  const empty = { name: "", owner: "", team: "", role: "user", models: "", expires: "" };
  const [fields, setFields] = useState(empty);
  const [limits, setLimits] = useState<Record<string, string>>({});
  const action = useAction();
  const set = (name: keyof typeof empty) => (value: string) => setFields({ ...fields, [name]: value });
  const why = props.why || (fields.name.trim() === "" ? "Name the key first." : action.busy ? "The key is being made." : null);
  return (
    <Card title="New key">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (why) return;
          action.run(async () => {
            const body: Record<string, unknown> = { name: fields.name.trim(), role: fields.role };
            if (fields.owner.trim()) body["owner"] = fields.owner.trim();
            if (fields.team.trim()) body["team"] = fields.team.trim();
            if (fields.models.trim()) body["models"] = fields.models.split(",").map((model) => model.trim()).filter(Boolean);
            if (fields.expires) body["expires"] = `${fields.expires}T23:59:59Z`;
            const set = Object.entries(limits).filter(([, value]) => value.trim() !== "");
            if (set.length > 0) body["limits"] = Object.fromEntries(set.map(([name, value]) => [name, Number(value)]));
            const made = await call<{ key: Key; secret: string }>("POST", "/admin/keys", body);
            setFields(empty);
            setLimits({});
            props.made(made.key.name, made.secret);
            return `${made.key.name} is made.`;
          });
        }}
      >
        <div class="grid">
          <Input label="Name" value={fields.name} onInput={set("name")} />
          <Input label="Owner" value={fields.owner} onInput={set("owner")} placeholder="ann@example.org" />
          <Input label="Team" value={fields.team} onInput={set("team")} />
          <Select label="Role" value={fields.role} options={[["user", "user"], ["admin", "admin"]]} onChange={set("role")} />
          <Input label="Models" value={fields.models} onInput={set("models")} hint="Names with commas; empty: all." />
          <Input label="Expires" type="date" value={fields.expires} onInput={set("expires")} />
        </div>
        <details>
          <summary>Limits</summary>
          <div class="grid">
            {LIMITS.map(([name, text]) => (
              <Input key={name} label={text} type="number" min={0} step="any" value={limits[name] ?? ""} placeholder="no limit" onInput={(value) => setLimits({ ...limits, [name]: value })} />
            ))}
          </div>
        </details>
        <Button submit kind="main" onClick={() => {}} why={why}>Create</Button>
      </form>
      <Outcome action={action} />
    </Card>
  );
}
