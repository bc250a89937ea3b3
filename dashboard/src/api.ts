// Calls of the server that this page came from. Nothing else is ever contacted.
import { useEffect, useRef, useState } from "preact/hooks";

const KEY = "thunder.key";

/** An error as the APIs write it. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string | null,
    message: string,
  ) {
    super(message);
  }
}

let onMissingKey: (message: string) => void = () => {};

/** Sets what happens when the server asks for a key. */
export function whenKeyIsMissing(then: (message: string) => void): void {
  onMissingKey = then;
}

/** The key that this browser keeps, if any. */
export function savedKey(): string {
  return localStorage.getItem(KEY) ?? sessionStorage.getItem(KEY) ?? "";
}

/** Keeps a key: until the tab is closed, or for good. An empty key forgets it. */
export function saveKey(key: string, forGood: boolean): void {
  localStorage.removeItem(KEY);
  sessionStorage.removeItem(KEY);
  if (key) (forGood ? localStorage : sessionStorage).setItem(KEY, key);
}

/** Sends a request with the key. The caller reads the response. */
export async function send(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = {};
  const key = savedKey();
  if (key) headers["authorization"] = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The server does not answer. It is tried again.");
  }
  if (response.ok) return response;
  const error = await readError(response);
  if (error.status === 401) onMissingKey(error.message);
  throw error;
}

async function readError(response: Response): Promise<ApiError> {
  const text = await response.text().catch(() => "");
  try {
    const error = JSON.parse(text).error;
    const message = typeof error === "string" ? error : error.message;
    return new ApiError(response.status, error.code ?? null, message);
  } catch {
    return new ApiError(response.status, null, text.slice(0, 300) || `status ${response.status}`);
  }
}

/** Sends a request and reads its JSON. */
export async function call<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  const response = await send(method, path, body, signal);
  return (await response.json()) as T;
}

/** What a page has of something that is asked for again and again. */
export interface Polled<T> {
  data: T | null;
  error: ApiError | null;
  /** When `data` came, in milliseconds. */
  at: number;
  again: () => void;
}

/** Asks for a path now and every `everyMs` while the page is visible. Keeps the last answer over errors. */
export function usePolled<T>(path: string | null, everyMs: number): Polled<T> {
  const [state, set] = useState<{ data: T | null; error: ApiError | null; at: number }>({ data: null, error: null, at: 0 });
  const now = useRef<() => void>(() => {});
  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    let timer = 0;
    let running = false;
    const ask = async () => {
      clearTimeout(timer);
      if (running) return;
      running = true;
      let wait = everyMs;
      try {
        const data = await call<T>("GET", path, undefined, AbortSignal.any([abort.signal, AbortSignal.timeout(15_000)]));
        set({ data, error: null, at: performance.now() });
      } catch (error) {
        if (abort.signal.aborted) return;
        const known = error instanceof ApiError ? error : new ApiError(0, "timeout", "The server took more than 15 s to answer.");
        set((before) => ({ ...before, error: known }));
        // What is not there will not be there in a second.
        if (known.status === 404 || known.status === 403) wait = Math.max(everyMs, 30_000);
      } finally {
        running = false;
      }
      if (everyMs > 0 && !abort.signal.aborted) timer = window.setTimeout(() => !document.hidden && ask(), wait);
    };
    const shown = () => !document.hidden && ask();
    now.current = ask;
    ask();
    document.addEventListener("visibilitychange", shown);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [path, everyMs]);
  return { ...state, again: () => now.current() };
}

/** Yields the `data:` fields of an event stream. Ends with the stream. */
export async function* events(response: Response): AsyncGenerator<string> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop()!;
      for (const line of lines) {
        const text = line.endsWith("\r") ? line.slice(0, -1) : line;
        if (text.startsWith("data:")) yield text.slice(5).trimStart();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
