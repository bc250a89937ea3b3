// Numbers for people.

/** Bytes with a binary unit, as the command line writes them. */
export function bytes(count: number | null | undefined): string {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit + 1 < units.length) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

/** Seconds, with the unit that leaves few digits. */
export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

/** A number with at most three digits after the point, and spaces between thousands. */
export function number(value: number | null | undefined, digits = 0): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en-GB", { maximumFractionDigits: digits, minimumFractionDigits: digits }).replaceAll(",", " ");
}

/** Date and time in this browser's zone, from seconds since 1970 or RFC 3339. */
export function time(value: number | string | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const date = typeof value === "number" ? new Date(value * 1000) : new Date(value);
  return Number.isNaN(date.getTime()) ? String(value) : date.toLocaleString("sv-SE");
}

/** A share of 0 to 1. */
export function percent(share: number): string {
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}

/** Money with its currency's letters. */
export function money(value: number | null | undefined, currency: string): string {
  return value === null || value === undefined ? "–" : `${currency} ${number(value, Math.abs(value) < 1 ? 4 : 2)}`;
}
