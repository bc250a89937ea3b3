import { usePolled } from "../api";
import { number, seconds, time } from "../format";
import { Card, Figure, Problem, Shares, Table } from "../parts";

export interface RequestRow {
  id: string;
  model: string;
  path: string;
  began: number;
  state: "waiting" | "prefill" | "decode" | "stop" | "length" | "failed" | "cancelled";
  prompt_tokens: number;
  cached_tokens: number | null;
  tokens: number | null;
  /** Seconds so far, or in all. */
  prepare_s: number;
  queue_s: number | null;
  prefill_s: number | null;
  decode_s: number | null;
  total_s: number;
  error: string | null;
}

const LIVE = new Set(["waiting", "prefill", "decode"]);
const STATES: Record<RequestRow["state"], string> = {
  waiting: "waits for its first token",
  prefill: "reads its prompt",
  decode: "answers",
  stop: "complete",
  length: "complete, by length",
  failed: "failed",
  cancelled: "client left",
};

export function RequestsPage() {
  const polled = usePolled<{ requests: RequestRow[]; kept: number }>("/admin/requests", 1000);
  const rows = polled.data?.requests ?? [];
  const live = rows.filter((row) => LIVE.has(row.state));
  const recent = rows.filter((row) => !LIVE.has(row.state));
  const answered = recent.filter((row) => row.state === "stop" || row.state === "length");
  const first = answered.map((row) => row.prepare_s + (row.queue_s ?? 0) + (row.prefill_s ?? 0)).sort((a, b) => a - b);
  const at = (share: number) => (first.length === 0 ? null : first[Math.min(first.length - 1, Math.floor(share * first.length))]!);
  return (
    <>
      <h1>Requests</h1>
      <Problem error={polled.error} missing="This server does not tell its requests: it is of an older version." />
      <dl class="figures">
        <Figure name="Under way" value={number(live.length)} />
        <Figure name="Kept here" value={number(recent.length)} unit={`of the last ${polled.data?.kept ?? "–"}`} />
        <Figure name="First token, median" value={seconds(at(0.5))} />
        <Figure name="First token, 95 %" value={seconds(at(0.95))} />
        <Figure name="Failed" value={number(recent.filter((row) => row.state === "failed").length)} />
      </dl>
      <Card title="Under way">
        <RequestTable caption="Requests under way" rows={live} empty="No request is under way." />
      </Card>
      <Card title="Recent">
        <p class="legend" aria-hidden="true">
          <span class="tone0 key" /> prepare <span class="tone3 key" /> queue <span class="tone1 key" /> prefill <span class="tone2 key" /> decode
        </p>
        <RequestTable caption="Recent requests, the latest first" rows={recent} empty="No request has ended since the server started." />
      </Card>
    </>
  );
}

function RequestTable(props: { caption: string; rows: RequestRow[]; empty: string }) {
  return (
    <Table
      caption={props.caption}
      head={["Began", "Model", "Endpoint", "State", "Prompt", "Cached", "Tokens", "First token", "Tokens/s", "Total", "Where the time went"]}
      numeric={[4, 5, 6, 7, 8, 9]}
      empty={props.empty}
      rows={props.rows.map((row) => [
        time(row.began),
        row.model,
        row.path,
        row.error ? <span class="error" title={row.error}>{STATES[row.state]}: {row.error}</span> : STATES[row.state],
        number(row.prompt_tokens),
        number(row.cached_tokens),
        number(row.tokens),
        seconds(row.prefill_s === null ? null : row.prepare_s + (row.queue_s ?? 0) + row.prefill_s),
        row.tokens && row.decode_s ? number((row.tokens - 1) / row.decode_s, 1) : "–",
        seconds(row.total_s),
        <Shares
          label="Time"
          total={row.total_s}
          parts={[
            { name: "prepare", value: row.prepare_s, text: seconds(row.prepare_s), tone: 0 },
            { name: "queue", value: row.queue_s ?? 0, text: seconds(row.queue_s), tone: 3 },
            { name: "prefill", value: row.prefill_s ?? 0, text: seconds(row.prefill_s), tone: 1 },
            { name: "decode", value: row.decode_s ?? 0, text: seconds(row.decode_s), tone: 2 },
          ]}
        />,
      ])}
    />
  );
}
