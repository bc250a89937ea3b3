import { useEffect, useState } from "preact/hooks";
import { ApiError, call } from "../api";
import { number, time } from "../format";
import { Button, Card, Input, Problem, Table, useAction } from "../parts";

interface Entry {
  number: number;
  node?: string;
  time: string;
  actor: string;
  remote: string | null;
  action: string;
  subject: string | null;
  details: Record<string, unknown>;
}

interface Page {
  entries: Entry[];
  next: number | null;
  missing: string[];
}

interface Checked {
  intact: boolean;
  entries?: number;
  head?: string;
  first_bad?: number;
  why?: string;
  others: { node: string; entries: number; head: string }[];
  others_wrong: string[];
}

const MISSING = "This server keeps no audit log: it was started without a store, or is of an older version.";

export function AuditPage() {
  const [filter, setFilter] = useState({ action: "", since: "", until: "" });
  const [pages, setPages] = useState<Page[]>([]);
  const [error, setError] = useState<ApiError | null>(null);
  const action = useAction();
  const field = (name: keyof typeof filter) => (value: string) => setFilter({ ...filter, [name]: value });
  const why = action.busy ? "The log is being read." : null;
  const read = (before: number | null) =>
    action.run(async () => {
      const query = new URLSearchParams({ limit: "50" });
      for (const [name, value] of Object.entries(filter)) if (value.trim()) query.set(name, value.trim());
      if (before !== null) query.set("before", String(before));
      try {
        const page = await call<Page>("GET", `/admin/audit?${query}`);
        setPages(before === null ? [page] : [...pages, page]);
        setError(null);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        setError(error);
      }
    });
  useEffect(() => read(null), []);
  const last = pages.at(-1);
  return (
    <>
      <h1>Audit log</h1>
      <Problem error={error} missing={MISSING} />
      <p class="note">Who has changed keys, limits, models and nodes, from where, and who has read kept prompts. An entry holds the hash of the one before, so that a changed one shows.</p>
      <Card title="Entries">
        <form
          onSubmit={(event) => {
            event.preventDefault();
            if (!why) read(null);
          }}
        >
          <div class="grid">
            <Input label="Act" value={filter.action} onInput={field("action")} placeholder="key.create" hint="As the table names it; empty: all." />
            <Input label="Since" type="date" value={filter.since} onInput={field("since")} />
            <Input label="Before" type="date" value={filter.until} onInput={field("until")} />
          </div>
          <Button submit kind="main" onClick={() => {}} why={why}>Show</Button>
        </form>
        {last?.missing.map((node) => <p class="error" role="alert" key={node}>Without what one node keeps: {node}</p>)}
        {last && (
          <Table
            caption="Audit log, the latest first"
            head={["Time", "Who", "From", "Act", "Of", "Node", "More"]}
            empty="No entry fits."
            rows={pages.flatMap((page) => page.entries).map((entry) => [
              time(entry.time),
              entry.actor,
              entry.remote ?? "here",
              entry.action,
              entry.subject ?? "–",
              entry.node ?? "–",
              <code>{more(entry.details)}</code>,
            ])}
          />
        )}
        {last && last.next !== null && <Button onClick={() => read(last.next)} why={why}>Show older ones</Button>}
      </Card>
      <Chain why={error ? "See above." : null} />
    </>
  );
}

/** What an entry says besides, without what is empty. */
function more(details: Record<string, unknown>): string {
  const text = (value: unknown) => (typeof value === "string" ? value : JSON.stringify(value, (_, inner) => inner ?? undefined));
  const said = Object.entries(details).filter(([, value]) => ![undefined, "{}", "[]"].includes(text(value)));
  return said.map(([name, value]) => `${name}: ${text(value)}`).join("; ");
}

function Chain(props: { why: string | null }) {
  const [checked, setChecked] = useState<Checked | null>(null);
  const action = useAction();
  const check = () => action.run(async () => setChecked(await call<Checked>("GET", "/admin/audit/verify")));
  const intact = checked ? [...(checked.intact ? [{ node: "this server", entries: checked.entries ?? 0, head: checked.head ?? "" }] : []), ...checked.others] : [];
  return (
    <Card title="Whether it was changed">
      <Button onClick={check} why={props.why ?? (action.busy ? "The hashes are being computed." : null)}>Check the log</Button>
      <div aria-live="polite">
        {action.error && <p class="error">{action.error}</p>}
        {checked && !checked.intact && <p class="error">The audit log was changed: entry {checked.first_bad}: {checked.why}</p>}
        {checked?.others_wrong.map((wrong) => <p class="error" key={wrong}>Another node's log: {wrong}</p>)}
        {intact.map(({ node, entries, head }) => (
          <p class="done" key={node}>
            {node}: {number(entries)} entries are intact. Keep the last one's hash elsewhere: <code>{head}</code>
          </p>
        ))}
      </div>
    </Card>
  );
}
