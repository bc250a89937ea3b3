// Limits of a key, a team or a model: how they are shown and typed.
import { number } from "./format";
import { Input } from "./parts";

export interface Limits {
  requests_per_minute?: number | null;
  tokens_per_minute?: number | null;
  parallel_requests?: number | null;
  tokens_per_day?: number | null;
  tokens_per_month?: number | null;
  cost_per_month?: number | null;
}

const KINDS: [keyof Limits, string][] = [
  ["requests_per_minute", "Requests a minute"],
  ["tokens_per_minute", "Tokens a minute"],
  ["parallel_requests", "Parallel requests"],
  ["tokens_per_day", "Tokens a day"],
  ["tokens_per_month", "Tokens a month"],
  ["cost_per_month", "Cost a month"],
];

/** What is typed into the fields; an absent or empty one is no limit. */
export type TypedLimits = { [kind in keyof Limits]?: string };

export function typed(limits: Limits): TypedLimits {
  const set = KINDS.filter(([kind]) => limits[kind] != null);
  return Object.fromEntries(set.map(([kind]) => [kind, String(limits[kind])]));
}

/** What is wrong with a limit that was typed, with its name. */
export function wrongLimit(fields: TypedLimits): string | null {
  for (const [kind, text] of KINDS) {
    const value = (fields[kind] ?? "").trim();
    if (value === "") continue;
    const isRight = Number(value) > 0 && (kind === "cost_per_month" || Number.isInteger(Number(value)));
    if (!isRight) return `${text} is ${value}, but must be ${kind === "cost_per_month" ? "a number" : "a whole number"} above 0.`;
  }
  return null;
}

/** The limits as the server takes them, of fields in which nothing is wrong. */
export function limitsOf(fields: TypedLimits): Limits {
  const set = Object.entries(fields).filter(([, value]) => value.trim() !== "");
  return Object.fromEntries(set.map(([kind, value]) => [kind, Number(value)]));
}

/** The limits in words. */
export function limitsText(limits: Limits): string {
  const set = KINDS.filter(([kind]) => limits[kind] != null);
  return set.map(([kind, text]) => `${text}: ${number(limits[kind], kind === "cost_per_month" ? 2 : 0)}`).join("; ") || "–";
}

export function LimitFields(props: { fields: TypedLimits; onChange: (fields: TypedLimits) => void }) {
  return (
    <div class="grid">
      {KINDS.map(([kind, text]) => (
        <Input
          key={kind}
          label={text}
          type="number"
          min={0}
          step="any"
          value={props.fields[kind] ?? ""}
          placeholder="no limit"
          onInput={(value) => props.onChange({ ...props.fields, [kind]: value })}
        />
      ))}
    </div>
  );
}
