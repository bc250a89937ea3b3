import { useEffect, useState } from "preact/hooks";
import { call, usePolled } from "../api";
import { bytes, money, number, percent, seconds } from "../format";
import { Button, Card, Figure, FileInput, Input, Outcome, Problem, Select, Table, useAction } from "../parts";
import { readMeasured, readTrace } from "../recorded";
import type { Recorded } from "../recorded";

interface Machine {
  name: string;
  title: string;
  memory_bytes: number;
  memory_bytes_s: number;
  busy_watts: number;
  source: string;
}

interface Known {
  machines: Machine[];
  links: { name: string; title: string; latency_us: number; bytes_s: number; source: string }[];
  models: string[];
}

interface Layout {
  layout: string;
  fits: boolean;
  why: string | null;
  weight_bytes: number;
  kv_tokens: number;
  decode_tokens_s: number;
  prompt_tokens_s: number;
}

interface Simulated {
  requests: number;
  first_token_p50_s: number;
  first_token_p95_s: number;
  tokens_s_p5: number;
  tokens_s_p50: number;
  throughput_tokens_s: number;
  busy: number;
  running_mean: number;
  waiting_most: number;
  preemptions: number;
  meets_goal: boolean;
}

interface Answer {
  layouts: Layout[];
  chosen: string | null;
  why: string | null;
  load: { requests_s: number; simulated: Simulated } | null;
  most_users: number | null;
  most_at_once: number | null;
  /** Of a trace: its requests. */
  requests: number | null;
  /** Of a trace: how many times as often its requests may come. */
  most_times: number | null;
  energy: {
    idle_watts: number;
    busy_watts: number;
    mean_watts: number;
    kwh_month: number;
    kwh_user_month: number;
    joules_token: number | null;
  } | null;
  money: {
    currency: string;
    amortisation_month: number;
    energy_kwh_month: number;
    energy_month: number;
    other_month: number;
    total_month: number;
    user_month: number;
    api_user_month: number | null;
  } | null;
  assumptions: string[];
}

const START = {
  model: "qwen3-30b-a3b",
  bits: "4",
  machine: "m3-ultra-512",
  count: "2",
  link: "thunderbolt5-rdma",
  layout: "",
  batch: "16",
  context: "32768",
  step: "",
  users: "50",
  requests: "40",
  hours: "8",
  peak: "3",
  prompt: "1500",
  cached: "50",
  answer: "400",
  first: "3",
  speed: "15",
  currency: "GBP",
  price: "",
  years: "3",
  kwh: "0.27",
  other: "0",
  apiIn: "",
  apiOut: "",
};
type Fields = typeof START;

export function PlannerPage() {
  const known = usePolled<Known>("/admin/planner", 0);
  const [fields, setFields] = useState<Fields>(START);
  const [trace, setTrace] = useState<Recorded | null>(null);
  const [measured, setMeasured] = useState<{ name: string; value: unknown } | null>(null);
  const [result, setResult] = useState<{ answer: Answer; who: string } | null>(null);
  const [action, reading] = [useAction(), useAction()];
  const set = (name: keyof Fields) => (value: string) => setFields({ ...fields, [name]: value });
  const field = (name: keyof Fields, label: string, hint?: string) => (
    <Input label={label} type={name === "currency" || name === "layout" ? "text" : "number"} min={0} step="any" value={fields[name]} onInput={set(name)} hint={hint} />
  );
  useEffect(() => {
    const first = known.data?.models[0];
    if (known.data && first && !known.data.models.includes(fields.model)) setFields({ ...fields, model: first });
  }, [known.data]);
  const machine = known.data?.machines.find((other) => other.name === fields.machine);
  const plan = () =>
    action.run(async () => {
      const value = (name: keyof Fields) => (fields[name].trim() === "" ? undefined : Number(fields[name]));
      const asked = {
        model: fields.model,
        bits: value("bits"),
        machines: [{ machine: fields.machine, count: value("count") }],
        link: fields.link,
        layout: fields.layout.trim() || undefined,
        max_batch: value("batch"),
        context: value("context"),
        step_time_s: value("step"),
        users: value("users"),
        requests_per_user_day: value("requests"),
        active_hours: value("hours"),
        peak: value("peak"),
        prompt_tokens: value("prompt"),
        cached_share: (value("cached") ?? 0) / 100,
        answer_tokens: value("answer"),
        goal: { first_token_s: value("first"), tokens_s: value("speed") },
        money: {
          currency: fields.currency,
          machine_price: value("price"),
          years: value("years"),
          kwh_price: value("kwh"),
          other_month: value("other"),
          api_input: value("apiIn"),
          api_output: value("apiOut"),
        },
        trace: trace?.lines,
        measured: measured?.value,
      };
      const answer = await call<Answer>("POST", "/admin/planner", asked);
      const taken = answer.requests ?? trace?.lines_read ?? 0;
      // Lines of refused requests ask for nothing.
      const left = (trace?.lines_read ?? 0) - taken;
      const without = left > 0 ? `, without ${number(left)} refused or empty,` : "";
      setResult({ answer, who: trace ? `The ${number(taken)} requests of ${trace.name}${without}` : `${fields.users} users` });
    });
  const take = <T,>(file: File | null, read: (file: File) => Promise<T>, set: (value: T | null) => void) =>
    reading.run(async () => {
      set(null);
      if (file) set(await read(file));
    });
  return (
    <>
      <h1>Planner</h1>
      <p>What a model needs, how many people machines can serve, and what it costs. The engine's own scheduler is driven through the load; nothing is started.</p>
      <Problem error={known.error} missing="This server has no planner: use `thunder capacity`." />
      {known.data && (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            if (!action.busy) plan();
          }}
        >
          <Card title="Model and machines">
            {measured && <p class="note">The model, how it is laid out and how long its steps take are those of {measured.name}. The machines below are for prices and watts.</p>}
            <div class="grid">
              {!measured && (
                <>
                  <Select label="Model" value={fields.model} options={known.data.models.map((name) => [name, name])} onChange={set("model")} />
                  <Select label="Weights" value={fields.bits} options={[["4", "4 bits"], ["8", "8 bits"], ["16", "bf16"]]} onChange={set("bits")} />
                </>
              )}
              <Select label="Machine" value={fields.machine} options={known.data.machines.map((other) => [other.name, other.title])} onChange={set("machine")} hint={machine && `${bytes(machine.memory_bytes)}, ${number(machine.memory_bytes_s / 1e9)} GB/s. Source: ${machine.source}`} />
              {field("count", "Number of machines")}
              {!measured && <Select label="Joined by" value={fields.link} options={known.data.links.map((link) => [link.name, link.title])} onChange={set("link")} />}
            </div>
            {!measured && (
              <details>
                <summary>How it is served</summary>
                <div class="grid">
                  {field("layout", "Layout", "As the answer's table names it; empty: the one that serves these users best.")}
                  {field("batch", "Requests that decode together")}
                  {field("context", "Most tokens of prompt and answer")}
                  {field("step", "Longest step while answers wait, s", "Empty: as thunder serve.")}
                </div>
              </details>
            )}
            <FileInput label="Measured step times" accept=".json,application/json" chosen={measured?.name ?? null} hint="Of machines that you have, in place of the table's: what “thunder bench report MODEL” printed." onFile={(file) => take(file, readMeasured, setMeasured)} />
          </Card>
          <Card title="People">
            <FileInput label="Recorded requests" accept=".jsonl,.json,.txt" chosen={trace?.name ?? null} hint="In place of guesses: what “thunder usage --requests --format jsonl” printed, at most 20 000 requests. Large ones take half a minute." onFile={(file) => take(file, readTrace, setTrace)} />
            <Outcome action={reading} />
            {trace && <p class="note">The {number(trace.lines_read)} lines of {trace.name} say when requests come and how long they are. Users divide the costs.</p>}
            <div class="grid">
              {field("users", "Users")}
              {!trace && (
                <>
                  {field("requests", "Requests a user a day")}
                  {field("hours", "Hours in which they come")}
                  {field("peak", "Busiest time, as a multiple of the mean")}
                  {field("prompt", "Tokens of a prompt")}
                  {field("cached", "Of these known from before, %", "A conversation's earlier turns.")}
                  {field("answer", "Tokens of an answer")}
                </>
              )}
              {field("first", "Goal: first token within, s", "For 95 of 100 requests.")}
              {field("speed", "Goal: tokens a second for each user")}
            </div>
          </Card>
          <Card title="Money">
            <div class="grid">
              {field("currency", "Currency")}
              {field("price", "Price of a machine", "Without it, there are no costs, only power and energy.")}
              {field("years", "Years of use")}
              {field("kwh", "Price of a kWh")}
              {field("other", "Other costs a month", "Room, support, spare parts.")}
              {field("apiIn", "API price of 1M prompt tokens")}
              {field("apiOut", "API price of 1M answer tokens")}
            </div>
          </Card>
          <Button submit kind="main" onClick={() => {}} why={action.busy ? "The load is being simulated." : null}>Plan</Button>
          <Outcome action={action} />
        </form>
      )}
      {result && <Result {...result} />}
    </>
  );
}

function most(answer: Answer): string {
  if (answer.most_times !== null) return `The same requests may come ${number(answer.most_times, 1)} times as often.`;
  return answer.most_users === null ? "" : `These machines serve up to about ${number(answer.most_users)} users like these.`;
}

function Result(props: { answer: Answer; who: string }) {
  const { answer, who } = props;
  const run = answer.load?.simulated;
  return (
    <div aria-live="polite">
      <Card title="Answer">
        {answer.why && <p class="error">{answer.why}</p>}
        {run && (
          <>
            <p class={run.meets_goal ? "done" : "error"}>
              {who} {run.meets_goal ? "get" : "do not get"} what was promised{answer.chosen && ` on the layout “${answer.chosen}”`}. {most(answer)}
            </p>
            <dl class="figures">
              <Figure name="First token, 95 %" value={seconds(run.first_token_p95_s)} unit={`median ${seconds(run.first_token_p50_s)}`} />
              <Figure name="Speed of an answer" value={number(run.tokens_s_p50, 1)} unit={`tokens/s; slowest 5 %: ${number(run.tokens_s_p5, 1)}`} />
              <Figure name="Throughput" value={number(run.throughput_tokens_s, 1)} unit="tokens/s at the busiest time" />
              <Figure name="Busy" value={percent(run.busy)} />
              {answer.most_at_once !== null && <Figure name="At once" value={number(answer.most_at_once)} unit="requests within the goal" />}
            </dl>
          </>
        )}
        {answer.layouts.length > 0 && (
          <Table
            caption="Layouts"
            head={["Layout", "Fits", "Weights", "KV cache, tokens", "Tokens/s of one", "Prompt tokens/s"]}
            numeric={[2, 3, 4, 5]}
            empty="No layout."
            rows={answer.layouts.map((layout) => [
              layout.layout === answer.chosen ? <strong>{layout.layout} (chosen)</strong> : layout.layout,
              layout.fits ? "yes" : `no: ${layout.why}`,
              bytes(layout.weight_bytes),
              number(layout.kv_tokens),
              number(layout.decode_tokens_s, 1),
              number(layout.prompt_tokens_s),
            ])}
          />
        )}
      </Card>
      {answer.energy && (
        <Card title="Power and energy">
          <dl class="figures">
            <Figure name="Power, mean" value={number(answer.energy.mean_watts)} unit={`W; ${number(answer.energy.idle_watts)} idle, ${number(answer.energy.busy_watts)} busy`} />
            <Figure name="Energy a month" value={number(answer.energy.kwh_month)} unit={`kWh; ${number(answer.energy.kwh_user_month, 1)} a user`} />
            {answer.energy.joules_token !== null && <Figure name="An answer's token" value={number(answer.energy.joules_token, 2)} unit="J above idle" />}
          </dl>
        </Card>
      )}
      {answer.money && (
        <Card title="Costs">
          <Table
            caption="Costs a month"
            head={["What", "A month"]}
            numeric={[1]}
            empty=""
            rows={[
              ["Machines", money(answer.money.amortisation_month, answer.money.currency)],
              [`Energy, ${number(answer.money.energy_kwh_month)} kWh`, money(answer.money.energy_month, answer.money.currency)],
              ["Other", money(answer.money.other_month, answer.money.currency)],
              ["All", money(answer.money.total_month, answer.money.currency)],
              [<strong>A user</strong>, <strong>{money(answer.money.user_month, answer.money.currency)}</strong>],
              ["The same by the API's prices, a user", money(answer.money.api_user_month, answer.money.currency)],
            ]}
          />
        </Card>
      )}
      <Card title="What was assumed">
        <ul>{answer.assumptions.map((text) => <li key={text}>{text}</li>)}</ul>
      </Card>
    </div>
  );
}
