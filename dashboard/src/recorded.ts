// Files for the planner: requests that were recorded, and step times that were measured.
import { bytes } from "./format";

/** Larger files are not read into the page's memory. A usage report of the most requests takes 10 MB. */
const MOST_BYTES = 64 << 20;
/** What the planner reads of a request. The rest of a report would be too long for a body. */
const READ = ["time", "at_s", "duration_s", "key_id", "prompt_tokens", "cached_tokens", "completion_tokens"];

/** The text of a file with its name. */
export interface Recorded {
  name: string;
  lines: string;
  /** Lines that are not empty. The planner says how many of them are requests. */
  lines_read: number;
}

async function textOf(file: File): Promise<string> {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${bytes(file.size)}, but at most ${bytes(MOST_BYTES)} are read: take a busy hour.`);
  return file.text();
}

/** Requests of `thunder usage --requests --format jsonl`, in the same lines, so that an error names the file's line. */
export async function readTrace(file: File): Promise<Recorded> {
  const lines = (await textOf(file)).split("\n").map(shortened);
  return { name: file.name, lines: lines.join("\n"), lines_read: lines.filter((line) => line.trim() !== "").length };
}

/** What `thunder bench report` printed. */
export async function readMeasured(file: File): Promise<{ name: string; value: unknown }> {
  const text = await textOf(file);
  try {
    return { name: file.name, value: JSON.parse(text) };
  } catch {
    throw new Error(`${file.name} is no JSON: choose what "thunder bench report MODEL" printed.`);
  }
}

/** A line with only what the planner reads. One that is no request stays, so that the server says what is wrong with it. */
function shortened(line: string): string {
  try {
    const request = JSON.parse(line);
    return JSON.stringify(Object.fromEntries(READ.filter((field) => field in request).map((field) => [field, request[field]])));
  } catch {
    return line;
  }
}
