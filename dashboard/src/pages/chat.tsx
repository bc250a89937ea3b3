import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, events, send, usePolled } from "../api";
import type { Chat, Message, Parameters } from "../chats";
import { PLAIN, allChats, forgetChat, keepChat, newChat, requestOf } from "../chats";
import { number, seconds } from "../format";
import { Button, Confirm, Field, Input, Problem, Select } from "../parts";
import { Prose } from "../prose";

interface Models {
  data: { id: string; context_length?: number }[];
}

export function ChatPage() {
  const [chats, setChats] = useState<Chat[]>(allChats);
  const [chat, setChat] = useState<Chat>(() => chats[0] ?? newChat());
  const [draft, setDraft] = useState("");
  const [deleting, setDeleting] = useState<Chat | null>(null);
  const [full, setFull] = useState<string | null>(null);
  const [said, setSaid] = useState("");
  const [streaming, setStreaming] = useState(false);
  const abort = useRef<AbortController | null>(null);
  const end = useRef<HTMLDivElement>(null);
  const input = useRef<HTMLTextAreaElement>(null);
  const models = usePolled<Models>("/v1/models", 10_000);
  const names = models.data?.data.map((model) => model.id) ?? [];

  useEffect(() => () => abort.current?.abort(), []);
  useEffect(() => {
    const near = window.innerHeight + window.scrollY > document.body.scrollHeight - 250;
    if (near) end.current?.scrollIntoView({ block: "end" });
  }, [chat.messages]);

  const keep = (next: Chat) => {
    setFull(keepChat(next));
    setChats((before) => (next.messages.length === 0 ? before : [next, ...before.filter((other) => other.id !== next.id)]));
  };
  const change = (parameters: Partial<Parameters>) => {
    const next = { ...chat, parameters: { ...chat.parameters, ...parameters } };
    setChat(next);
    keep(next);
  };
  const open = (next: Chat) => {
    abort.current?.abort();
    setChat(next);
    setSaid("");
    input.current?.focus();
  };

  const answer = async (asked: Chat) => {
    const control = new AbortController();
    abort.current = control;
    setStreaming(true);
    setSaid("The model answers.");
    const message: Message = { role: "assistant", text: "" };
    let last = asked;
    let painted = false;
    const show = () => {
      last = { ...asked, changed: Date.now(), messages: [...asked.messages, { ...message }] };
      if (abort.current === control) setChat(last);
      painted = false;
    };
    show();
    try {
      await stream(asked, message, control.signal, () => {
        if (!painted) requestAnimationFrame(show);
        painted = true;
      });
      setSaid("The answer is complete.");
    } catch (error) {
      if (control.signal.aborted) {
        message.note = "Stopped.";
        setSaid("Stopped.");
      } else {
        message.failed = true;
        message.note = error instanceof ApiError ? error.message : `The connection was lost in the middle of the answer: ${(error as Error).message}`;
        setSaid("The answer failed.");
      }
    }
    show();
    keep(last);
    if (abort.current === control) {
      abort.current = null;
      setStreaming(false);
    }
  };

  const ask = () => {
    const text = draft.trim();
    if (!text || streaming) return;
    const title = chat.messages.length === 0 ? text.split("\n")[0]!.slice(0, 60) : chat.title;
    const next = { ...chat, title, changed: Date.now(), messages: [...chat.messages, { role: "user" as const, text }] };
    setDraft("");
    setChat(next);
    keep(next);
    void answer(next);
  };
  const again = () => {
    const place = chat.messages.findLastIndex((message) => message.role === "user");
    if (place >= 0) void answer({ ...chat, messages: chat.messages.slice(0, place + 1) });
  };

  const whyNot = streaming
    ? "An answer is on its way."
    : models.error
      ? models.error.message
      : models.data && names.length === 0
        ? "No model is loaded: load one on the page Models."
        : draft.trim() === ""
          ? "Write something first."
          : null;
  const lastMessage = chat.messages.at(-1);
  return (
    <div class="chat">
      <aside aria-label="Conversations">
        <Button onClick={() => open(newChat(chat.parameters))} kind="main">New conversation</Button>
        <ul class="chats">
          {chats.map((other) => (
            <li key={other.id}>
              <button type="button" class="link" aria-current={other.id === chat.id ? "true" : undefined} onClick={() => open(other)}>
                {other.title}
              </button>
              <button type="button" class="small" aria-label={`Delete “${other.title}”`} onClick={() => setDeleting(other)}>×</button>
            </li>
          ))}
        </ul>
        <p class="hint">Conversations are kept in this browser only.</p>
      </aside>
      <div class="talk">
        <h1>{chat.title}</h1>
        <Settings parameters={chat.parameters} names={names} onChange={change} />
        <Problem error={models.error} />
        {full && <p class="error" role="alert">{full}</p>}
        <div class="messages" role="log" aria-label="Messages" aria-busy={streaming} aria-live="off">
          {chat.messages.map((message, index) => (
            <Bubble key={index} message={message} live={streaming && index === chat.messages.length - 1} />
          ))}
        </div>
        <p class="visually-hidden" role="status">{said}</p>
        <form
          class="ask"
          onSubmit={(event) => {
            event.preventDefault();
            if (!whyNot) ask();
          }}
        >
          <Field label="Message" hint="Enter sends, Shift and Enter begin a new line.">
            {(id, hint) => (
              <textarea
                id={id}
                ref={input}
                rows={3}
                value={draft}
                aria-describedby={hint}
                onInput={(event) => setDraft(event.currentTarget.value)}
                onKeyDown={(event) => {
                  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
                    event.preventDefault();
                    if (!whyNot) ask();
                  }
                }}
              />
            )}
          </Field>
          <div class="row">
            {streaming ? (
              <Button kind="danger" onClick={() => abort.current?.abort()}>Stop</Button>
            ) : (
              <Button kind="main" onClick={ask} why={whyNot}>Send</Button>
            )}
            <Button onClick={again} why={streaming ? "An answer is on its way." : lastMessage ? null : "There is no answer yet."}>
              Regenerate
            </Button>
          </div>
        </form>
        <div ref={end} />
      </div>
      {deleting && (
        <Confirm
          text={`Delete “${deleting.title}”?`}
          yes="Delete"
          onNo={() => setDeleting(null)}
          onYes={() => {
            forgetChat(deleting.id);
            const rest = chats.filter((other) => other.id !== deleting.id);
            setChats(rest);
            if (deleting.id === chat.id) open(rest[0] ?? newChat(chat.parameters));
            setDeleting(null);
          }}
        />
      )}
    </div>
  );
}

/** Reads an answer into `message`. Throws if it does not come to its end. */
async function stream(chat: Chat, message: Message, signal: AbortSignal, changed: () => void): Promise<void> {
  const began = performance.now();
  let first = 0;
  let thoughtUntil = 0;
  let reason = "";
  let usage: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } } | null = null;
  const response = await send("POST", "/v1/chat/completions", requestOf(chat), signal);
  let complete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.code ?? null, chunk.error.message);
    if (chunk.usage) usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    const { content, reasoning_content: thinking } = choice.delta ?? {};
    if ((content || thinking) && !first) first = performance.now();
    if (thinking) {
      message.thinking = (message.thinking ?? "") + thinking;
      thoughtUntil = performance.now();
    }
    if (content) message.text += content;
    if (message.thinking) message.thoughtFor = ((message.text ? thoughtUntil : performance.now()) - first) / 1000;
    if (choice.finish_reason) reason = choice.finish_reason;
    changed();
  }
  // A stream without its end mark was cut off, whatever it says.
  if (!complete) throw new ApiError(0, "cut_off", "The answer was cut off: the server or a node was lost. Regenerate asks again.");
  const took = (performance.now() - first) / 1000;
  const notes = [];
  if (usage) {
    notes.push(`${number(usage.prompt_tokens)} prompt tokens`, `${number(usage.completion_tokens)} tokens`);
    if (usage.completion_tokens > 1 && took > 0) notes.push(`${number((usage.completion_tokens - 1) / took, 1)} tokens/s`);
  }
  if (first) notes.push(`first after ${seconds((first - began) / 1000)}`);
  if (reason === "length") notes.push("ended by the length limit");
  message.note = notes.join(" · ");
}

function Bubble(props: { message: Message; live: boolean }) {
  const { message, live } = props;
  return (
    <article class={`bubble ${message.role}`} aria-label={message.role === "user" ? "You" : "Model"}>
      {message.thinking && (
        <details>
          <summary>
            {live && !message.text ? "Thinking" : "Thought"} {message.thoughtFor !== undefined && `for ${seconds(message.thoughtFor)}`}
          </summary>
          <Prose text={message.thinking} />
        </details>
      )}
      {message.role === "user" ? <p class="asked">{message.text}</p> : <Prose text={message.text} />}
      {live && !message.text && !message.thinking && <p class="hint">Reading the prompt …</p>}
      {message.note && <p class={message.failed ? "error" : "hint"}>{message.note}</p>}
    </article>
  );
}

function Settings(props: { parameters: Parameters; names: string[]; onChange: (change: Partial<Parameters>) => void }) {
  const { parameters, names, onChange } = props;
  const known = names.includes(parameters.model) || parameters.model === "" ? names : [parameters.model, ...names];
  const options: [string, string][] = known.map((name) => [name, names.includes(name) ? name : `${name} (not loaded)`]);
  return (
    <details class="settings">
      <summary>Model and parameters</summary>
      <div class="grid">
        <Select
          label="Model"
          value={parameters.model || names[0] || ""}
          options={options.length > 0 ? options : [["", "none is loaded"]]}
          onChange={(model) => onChange({ model })}
        />
        <Select
          label="Thinking"
          value={parameters.thinking}
          options={[["", "as the model does"], ["on", "on"], ["off", "off"]]}
          onChange={(thinking) => onChange({ thinking: thinking as Parameters["thinking"] })}
          hint="For models that can do both."
        />
        <Input label="Temperature" type="number" min={0} max={2} step="any" value={parameters.temperature} placeholder="the model's own" onInput={(temperature) => onChange({ temperature })} />
        <Input label="Top p" type="number" min={0} max={1} step="any" value={parameters.topP} placeholder="the model's own" onInput={(topP) => onChange({ topP })} />
        <Input label="Most tokens" type="number" min={1} step={1} value={parameters.maxTokens} placeholder="until it ends" onInput={(maxTokens) => onChange({ maxTokens })} />
        <Input label="Seed" type="number" step={1} value={parameters.seed} placeholder="random" onInput={(seed) => onChange({ seed })} />
      </div>
      <Field label="System prompt">
        {(id) => <textarea id={id} rows={3} value={parameters.system} onInput={(event) => onChange({ system: event.currentTarget.value })} />}
      </Field>
      <Button onClick={() => onChange({ ...PLAIN, model: parameters.model })}>Reset</Button>
    </details>
  );
}
