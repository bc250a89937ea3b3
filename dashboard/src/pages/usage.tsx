import { useState } from "preact/hooks";
import { usePolled } from "../api";
import { money, number, seconds } from "../format";
import { Card, Figure, Input, Problem, Select, Table } from "../parts";

export interface Totals {
  requests: number;
  failed: number;
  cancelled: number;
  refused: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  cost: number;
  time_to_first_token_s: number;
  duration_s: number;
}

interface Used {
  scope: string;
  name: string;
  limit: string;
  allowed: number;
  used: number;
  left: number;
  resets_s: number | null;
}

interface Me {
  key: { name: string; team: string | null; expires: string | null } | null;
  role: "admin" | "user";
  currency: string | null;
  limits?: Used[];
  usage?: { today: Totals; month: Totals };
}

interface Report {
  by: string[];
  currency: string | null;
  rows: (Totals & Record<string, string | number | null>)[];
  total: Totals;
}

const BY: [string, string][] = [
  ["key", "key"],
  ["team", "team"],
  ["model", "model"],
  ["day", "day"],
  ["day,model", "day and model"],
  ["key,model", "key and model"],
  ["owner", "owner"],
  ["outcome", "outcome"],
  ["node", "node"],
];
const MISSING = "This server keeps no usage records: it was started without a store, or is of an older version.";

export function UsagePage() {
  const me = usePolled<Me>("/admin/me", 10_000);
  const [by, setBy] = useState("day");
  const [since, setSince] = useState(() => new Date(Date.now() - 29 * 86_400_000).toISOString().slice(0, 10));
  const report = usePolled<Report>(`/admin/usage?by=${encodeURIComponent(by)}&since=${encodeURIComponent(since)}`, 10_000);
  const currency = report.data?.currency ?? me.data?.currency ?? "";
  const admin = me.data?.role === "admin";
  return (
    <>
      <h1>{admin ? "Usage" : "My usage"}</h1>
      {me.data && <p class="note">{me.data.key ? `You are ${me.data.key.name}${me.data.key.team ? ` of team ${me.data.key.team}` : ""}.` : "The server has no keys: every request counts without a name."}</p>}
      {me.data?.usage && (
        <dl class="figures">
          {(["today", "month"] as const).map((span) => {
            const totals = me.data!.usage![span];
            const name = span === "today" ? "Today" : "This month";
            return <Figure key={span} name={name} value={number(totals.prompt_tokens + totals.completion_tokens)} unit={`tokens in ${number(totals.requests)} requests`} />;
          })}
        </dl>
      )}
      {me.data?.limits && me.data.limits.length > 0 && (
        <Card title="Limits">
          <Table
            caption="Limits that hold for this key"
            head={["Of", "Limit", "Allowed", "Used", "Left", "Until all is free again"]}
            numeric={[2, 3, 4, 5]}
            empty="No limits."
            rows={me.data.limits.map((limit) => [
              `${limit.scope} ${limit.name}`,
              limit.limit.replaceAll("_", " "),
              number(limit.allowed),
              number(limit.used),
              number(limit.left),
              seconds(limit.resets_s),
            ])}
          />
        </Card>
      )}
      <Card title="By time and name">
        <div class="grid">
          <Select label="By" value={by} options={BY} onChange={setBy} />
          <Input label="Since" type="date" value={since} onInput={(value) => value && setSince(value)} />
        </div>
        <Problem error={report.error} missing={MISSING} />
        {report.data && <Chart report={report.data} />}
        {report.data && (
          <Table
            caption="Usage"
            head={[...report.data.by, "Requests", "Failed", "Cancelled", "Refused", "Prompt tokens", "Cached", "Answer tokens", "First token", "Cost"]}
            numeric={[0, 1, 2, 3, 4, 5, 6, 7, 8].map((column) => column + report.data!.by.length)}
            empty="Nothing was used in this time."
            rows={[...report.data.rows.map((row) => [row, report.data!.by.map((name) => String(row[name] ?? "–"))] as const), [report.data.total, report.data.by.map((_, index) => (index === 0 ? "all" : ""))] as const].map(
              ([row, names]) => [
                ...names,
                number(row.requests),
                number(row.failed),
                number(row.cancelled),
                number(row.refused),
                number(row.prompt_tokens),
                number(row.cached_tokens),
                number(row.completion_tokens),
                seconds(row.time_to_first_token_s),
                money(row.cost, currency),
              ],
            )}
          />
        )}
      </Card>
    </>
  );
}

/** Bars of prompt and answer tokens, one for each row. The table below has the same numbers. */
function Chart(props: { report: Report }) {
  const rows = props.report.rows.slice(-60);
  if (rows.length === 0) return null;
  const most = Math.max(...rows.map((row) => row.prompt_tokens + row.completion_tokens), 1);
  const width = 700 / rows.length;
  return (
    <svg class="chart" viewBox="0 0 700 120" role="img" aria-label="Tokens of each row of the table below">
      {rows.map((row, index) => {
        const prompt = (110 * row.prompt_tokens) / most;
        const answer = (110 * row.completion_tokens) / most;
        return (
          <g key={index}>
            <title>{`${props.report.by.map((name) => row[name]).join(", ")}: ${number(row.prompt_tokens)} prompt and ${number(row.completion_tokens)} answer tokens`}</title>
            <rect x={index * width + 1} y={115 - prompt} width={Math.max(width - 2, 1)} height={prompt} class="tone1" />
            <rect x={index * width + 1} y={115 - prompt - answer} width={Math.max(width - 2, 1)} height={answer} class="tone2" />
          </g>
        );
      })}
    </svg>
  );
}
