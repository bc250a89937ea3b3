// Conversations, kept in this browser only.

export interface Message {
  role: "user" | "assistant";
  text: string;
  thinking?: string;
  /** Seconds that the model thought. */
  thoughtFor?: number;
  /** What the server said of the answer, or of its failure. */
  note?: string;
  failed?: boolean;
}

export interface Parameters {
  model: string;
  system: string;
  temperature: string;
  topP: string;
  maxTokens: string;
  seed: string;
  thinking: "" | "on" | "off";
}

export interface Chat {
  id: string;
  title: string;
  changed: number;
  parameters: Parameters;
  messages: Message[];
}

const PREFIX = "thunder.chat.";
export const PLAIN: Parameters = { model: "", system: "", temperature: "", topP: "", maxTokens: "", seed: "", thinking: "" };

export function newChat(parameters: Parameters = PLAIN): Chat {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "New conversation", changed: Date.now(), parameters: { ...parameters }, messages: [] };
}

/** All conversations, the latest first. Damaged ones are passed over, and stay where they are. */
export function allChats(): Chat[] {
  const chats: Chat[] = [];
  for (let index = 0; index < localStorage.length; index++) {
    const name = localStorage.key(index)!;
    if (!name.startsWith(PREFIX)) continue;
    try {
      const chat = JSON.parse(localStorage.getItem(name)!) as Chat;
      if (Array.isArray(chat.messages) && typeof chat.changed === "number") chats.push({ ...chat, parameters: { ...PLAIN, ...chat.parameters } });
    } catch {
      // Not ours, or from another version.
    }
  }
  return chats.sort((a, b) => b.changed - a.changed);
}

/** Keeps a conversation. Returns why it could not be kept, if so. */
export function keepChat(chat: Chat): string | null {
  if (chat.messages.length === 0) return null;
  try {
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
    return null;
  } catch {
    return "The browser's memory for this page is full: this conversation is not kept. Delete old ones.";
  }
}

export function forgetChat(id: string): void {
  localStorage.removeItem(PREFIX + id);
}

/** The request for the next answer, as `POST /v1/chat/completions` takes it. */
export function requestOf(chat: Chat): Record<string, unknown> {
  const { parameters } = chat;
  const messages: { role: string; content: string }[] = [];
  if (parameters.system.trim()) messages.push({ role: "system", content: parameters.system });
  for (const message of chat.messages) {
    // A failed answer was never said.
    if (!message.failed && (message.text || message.role === "user")) messages.push({ role: message.role, content: message.text });
  }
  const body: Record<string, unknown> = {
    model: parameters.model || "default",
    messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  const fields: [string, string][] = [
    ["temperature", parameters.temperature],
    ["top_p", parameters.topP],
    ["max_tokens", parameters.maxTokens],
    ["seed", parameters.seed],
  ];
  for (const [name, value] of fields) if (value.trim() !== "") body[name] = Number(value);
  if (parameters.thinking) {
    const on = parameters.thinking === "on";
    body["chat_template_kwargs"] = { enable_thinking: on, thinking: on };
  }
  return body;
}
