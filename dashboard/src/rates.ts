// Rates from counters that are asked for again and again.
import { useEffect, useRef, useState } from "preact/hooks";
import type { ServedModel } from "./shapes";

export interface Rate {
  /** Tokens a second, over about three seconds. */
  generated: number;
  prompt: number;
  /** Tokens a second of the last minute, a value for each poll. */
  history: number[];
}

/** Seconds over which a rate is taken. */
const SPAN_S = 3;
const KEPT = 60;

/** The rates of each model, from its counters at the times that they were read. */
export function useRates(models: ServedModel[] | undefined, at: number): Map<string, Rate> {
  const seen = useRef(new Map<string, { at: number; generated: number; prompt: number }[]>());
  const [rates, set] = useState(new Map<string, Rate>());
  useEffect(() => {
    if (!models || at === 0) return;
    set((before) => {
      const next = new Map<string, Rate>();
      for (const model of models) {
        if (!model.load) continue;
        const now = { at: at / 1000, generated: model.load.generated_tokens, prompt: model.load.prompt_tokens };
        let samples = seen.current.get(model.name) ?? [];
        // Counters of a new group begin at 0.
        if (samples.length > 0 && samples.at(-1)!.generated > now.generated) samples = [];
        samples = [...samples, now].filter((sample) => now.at - sample.at <= SPAN_S + 1);
        seen.current.set(model.name, samples);
        const first = samples[0]!;
        const span = now.at - first.at;
        const of = (field: "generated" | "prompt") => (span > 0.2 ? (now[field] - first[field]) / span : 0);
        const history = [...(before.get(model.name)?.history ?? []), of("generated")].slice(-KEPT);
        next.set(model.name, { generated: of("generated"), prompt: of("prompt"), history });
      }
      return next;
    });
  }, [at]);
  return rates;
}
