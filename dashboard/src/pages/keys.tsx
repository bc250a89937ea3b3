import { useState } from "preact/hooks";
import { call, usePolled } from "../api";
import { time } from "../format";
import { LimitFields, limitsOf, limitsText, typed, wrongLimit } from "../limits";
import type { Limits, TypedLimits } from "../limits";
import { Button, Card, Confirm, Dialog, Input, Outcome, Problem, SaveOrCancel, Secret, Select, Table, useAction } from "../parts";

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

const MISSING = "This server keeps no keys: it was started without a store, or is of an older version. Its keys, if any, are those of --api-key.";

export function KeysPage() {
  const keys = usePolled<{ keys: Key[] }>("/admin/keys", 5000);
  const me = usePolled<{ role: string; key: { id: string } | null }>("/admin/me", 30_000);
  const action = useAction();
  const [secret, setSecret] = useState<{ name: string; secret: string } | null>(null);
  const [asked, setAsked] = useState<{ key: Key; what: "rotate" | "revoke" } | null>(null);
  const [changed, setChanged] = useState<Key | null>(null);
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
              limitsText(key.limits),
              time(key.last_used),
              time(key.expires),
              <div class="row">
                <Button label={`Change ${key.name}`} why={key.state === "revoked" ? "It is revoked." : notAdmin} onClick={() => setChanged(key)}>Change</Button>
                <Button label={`Rotate ${key.name}`} why={over ?? notAdmin} onClick={() => setAsked({ key, what: "rotate" })}>Rotate</Button>
                <Button kind="danger" label={`Revoke ${key.name}`} why={key.state === "revoked" ? "It is revoked." : notAdmin} onClick={() => setAsked({ key, what: "revoke" })}>Revoke</Button>
              </div>,
            ];
          })}
        />
      </Card>
      {changed && <Change now={changed} onClose={() => setChanged(null)} onSet={keys.again} />}
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
        <Secret title={`The secret of ${secret.name}`} note="It is shown now and never again. Only its hash is kept." secret={secret.secret} onClose={() => setSecret(null)} />
      )}
    </>
  );
}

/** What is typed for a key. */
interface Fields {
  name: string;
  owner: string;
  team: string;
  role: string;
  models: string;
  expires: string;
  limits: TypedLimits;
}

const EMPTY: Fields = { name: "", owner: "", team: "", role: "user", models: "", expires: "", limits: {} };

function fieldsOf(key: Key): Fields {
  return {
    name: key.name,
    owner: key.owner ?? "",
    team: key.team ?? "",
    role: key.role,
    models: key.models.filter((model) => model !== "*").join(", "),
    expires: key.expires?.slice(0, 10) ?? "",
    limits: typed(key.limits),
  };
}

/** The fields that differ from `before`, as the server takes them. An emptied one is null. */
function difference(before: Fields, now: Fields): Record<string, unknown> {
  const models = now.models.split(",").map((model) => model.trim()).filter(Boolean);
  const all: [keyof Fields, unknown][] = [
    ["name", now.name.trim()],
    ["owner", now.owner.trim() || null],
    ["team", now.team.trim() || null],
    ["role", now.role],
    ["models", models.length > 0 ? models : null],
    ["expires", now.expires ? `${now.expires}T23:59:59Z` : null],
    ["limits", limitsOf(now.limits)],
  ];
  return Object.fromEntries(all.filter(([field]) => JSON.stringify(now[field]) !== JSON.stringify(before[field])));
}

function KeyFields(props: { fields: Fields; onChange: (fields: Fields) => void; limitsOpen: boolean }) {
  const { fields, onChange } = props;
  const set = (name: keyof Fields) => (value: string) => onChange({ ...fields, [name]: value });
  return (
    <>
      <div class="grid">
        <Input label="Name" value={fields.name} onInput={set("name")} />
        <Input label="Owner" value={fields.owner} onInput={set("owner")} placeholder="ann@example.org" />
        <Input label="Team" value={fields.team} onInput={set("team")} />
        <Select label="Role" value={fields.role} options={[["user", "user"], ["admin", "admin"]]} onChange={set("role")} />
        <Input label="Models" value={fields.models} onInput={set("models")} hint="Names with commas; empty: all." />
        <Input label="Expires" type="date" value={fields.expires} onInput={set("expires")} />
      </div>
      <details open={props.limitsOpen}>
        <summary>Limits</summary>
        <LimitFields fields={fields.limits} onChange={(limits) => onChange({ ...fields, limits })} />
      </details>
    </>
  );
}

function Create(props: { why: string | null | false; made: (name: string, secret: string) => void }) {
  const [fields, setFields] = useState(EMPTY);
  const action = useAction();
  const why = props.why || (fields.name.trim() === "" ? "Name the key first." : (wrongLimit(fields.limits) ?? (action.busy ? "The key is being made." : null)));
  return (
    <Card title="New key">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (why) return;
          action.run(async () => {
            const made = await call<{ key: Key; secret: string }>("POST", "/admin/keys", difference(EMPTY, fields));
            setFields(EMPTY);
            props.made(made.key.name, made.secret);
            return `${made.key.name} is made.`;
          });
        }}
      >
        <KeyFields fields={fields} onChange={setFields} limitsOpen={false} />
        <Button submit kind="main" onClick={() => {}} why={why}>Create</Button>
      </form>
      <Outcome action={action} />
    </Card>
  );
}

function Change(props: { now: Key; onClose: () => void; onSet: () => void }) {
  const { now } = props;
  const [fields, setFields] = useState(() => fieldsOf(now));
  const action = useAction();
  const changed = difference(fieldsOf(now), fields);
  const why =
    fields.name.trim() === "" ? "Name the key first." : Object.keys(changed).length === 0 ? "Nothing is changed yet." : (wrongLimit(fields.limits) ?? (action.busy ? "The key is being changed." : null));
  return (
    <Dialog title={`Change ${now.name}`} onClose={props.onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (why) return;
          action.run(async () => {
            await call("PATCH", `/admin/keys/${encodeURIComponent(now.id)}`, changed);
            props.onSet();
            props.onClose();
          });
        }}
      >
        <KeyFields fields={fields} onChange={setFields} limitsOpen />
        <Outcome action={action} />
        <SaveOrCancel why={why} onCancel={props.onClose} />
      </form>
    </Dialog>
  );
}
