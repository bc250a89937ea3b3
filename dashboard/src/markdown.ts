// Markdown to a tree. Text of a model is never HTML here: a tag in it stays text, because the tree has no node for HTML.

export type Inline =
  | { kind: "text"; text: string }
  | { kind: "code"; text: string }
  | { kind: "break" }
  | { kind: "strong" | "em" | "del"; of: Inline[] }
  | { kind: "link"; href: string; of: Inline[] };

export type Block =
  | { kind: "paragraph"; of: Inline[] }
  | { kind: "heading"; level: number; of: Inline[] }
  | { kind: "code"; language: string; text: string }
  | { kind: "quote"; of: Block[] }
  | { kind: "list"; start: number | null; items: Block[][] }
  | { kind: "table"; head: Inline[][]; rows: Inline[][][] }
  | { kind: "rule" };

/** Nesting of quotes and lists beyond this stays text: a model must not exhaust the stack. */
const DEEPEST = 8;
/** Longest text whose marks are looked for; the rest is plain. Bounds the time for hostile text. */
const LONGEST_INLINE = 20_000;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const ROW_MARKS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

export function parse(text: string): Block[] {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines: string[], depth: number): Block[] {
  const found: Block[] = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at]!;
    const fence = FENCE.exec(line);
    if (fence) {
      const mark = fence[1]!;
      const end = lines.findIndex((other, index) => index > at && other.trim().startsWith(mark) && other.trim().replaceAll(mark[0]!, "") === "");
      const last = end < 0 ? lines.length : end;
      found.push({ kind: "code", language: fence[2]!, text: lines.slice(at + 1, last).join("\n") });
      at = last + 1;
    } else if (line.trim() === "") {
      at += 1;
    } else if (/^ {0,3}#{1,6}\s/.test(line)) {
      const level = line.trimStart().indexOf(" ");
      found.push({ kind: "heading", level, of: inline(line.trimStart().slice(level).trim().replace(/\s#+$/, "")) });
      at += 1;
    } else if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) {
      found.push({ kind: "rule" });
      at += 1;
    } else if (/^ {0,3}>/.test(line) && depth < DEEPEST) {
      const from = at;
      while (at < lines.length && /^ {0,3}>/.test(lines[at]!)) at += 1;
      found.push({ kind: "quote", of: blocks(lines.slice(from, at).map((quoted) => quoted.replace(/^ {0,3}> ?/, "")), depth + 1) });
    } else if (ITEM.test(line) && depth < DEEPEST) {
      at = list(lines, at, depth, found);
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1]!.includes("-") && ROW_MARKS.test(lines[at + 1]!)) {
      const from = at + 2;
      at = from;
      while (at < lines.length && lines[at]!.includes("|") && lines[at]!.trim() !== "") at += 1;
      const head = cells(line);
      const rows = lines.slice(from, at).map((row) => cells(row).slice(0, head.length));
      found.push({ kind: "table", head, rows });
    } else {
      const from = at;
      at += 1;
      while (at < lines.length && lines[at]!.trim() !== "" && !interrupts(lines[at]!)) at += 1;
      found.push({ kind: "paragraph", of: inline(lines.slice(from, at).join("\n")) });
    }
  }
  return found;
}

function interrupts(line: string): boolean {
  return FENCE.test(line) || /^ {0,3}(#{1,6}\s|>)/.test(line) || ITEM.test(line);
}

/** A list from line `at` on; returns the line after it. */
function list(lines: string[], at: number, depth: number, found: Block[]): number {
  const first = ITEM.exec(lines[at]!)!;
  const ordered = /\d/.test(first[2]!);
  const outer = first[1]!.length;
  const items: Block[][] = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]!);
    if (!item || item[1]!.length > outer + 3 || item[1]!.length < outer || /\d/.test(item[2]!) !== ordered) break;
    const inner = item[0].length;
    const own = [lines[at]!.slice(inner)];
    at += 1;
    while (at < lines.length) {
      const line = lines[at]!;
      const indent = line.length - line.trimStart().length;
      if (line.trim() === "") {
        const next = lines[at + 1];
        if (next === undefined || next.length - next.trimStart().length <= outer) break;
      } else if (indent <= outer && (ITEM.test(line) || lines[at - 1]!.trim() === "" || interrupts(line))) {
        break;
      }
      own.push(line.slice(Math.min(indent, inner)));
      at += 1;
    }
    items.push(blocks(own, depth + 1));
    let next = at;
    while (next < lines.length && lines[next]!.trim() === "") next += 1;
    if (next < lines.length && ITEM.test(lines[next]!)) at = next;
  }
  found.push({ kind: "list", start: ordered ? parseInt(first[2]!, 10) : null, items });
  return at;
}

function cells(row: string): Inline[][] {
  const text = row.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => inline(cell.trim().replaceAll("\\|", "|")));
}

/** Only addresses that a click may follow. */
export function safeLink(href: string): string | null {
  return /^(https?:\/\/|mailto:)[^\s]+$/i.test(href) ? href : null;
}

const MARKS: [RegExp, (match: RegExpExecArray, depth: number) => Inline | null][] = [
  [/^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, (match) => ({ kind: "code", text: match[2]!.replaceAll("\n", " ") })],
  [/^\\([\\`*_{}[\]()#+\-.!|~>$])/, (match) => ({ kind: "text", text: match[1]! })],
  // An image is a link: loading it would tell its server that the answer was read.
  [/^!?\[([^\]\n]*)\]\(<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"\n]*")?\)/, (match, depth) => link(match[2]!, match[1]!, depth)],
  [/^<(https?:\/\/[^\s<>]+)>/, (match, depth) => link(match[1]!, match[1]!, depth)],
  [/^https?:\/\/[^\s<>"'`)\]]*[^\s<>"'`)\].,;:!?*_]/, (match) => ({ kind: "link", href: match[0], of: [{ kind: "text", text: match[0] }] })],
  [/^(\*\*|__)(?=\S)([\s\S]*?\S)\1/, (match, depth) => ({ kind: "strong", of: inline(match[2]!, depth + 1) })],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (match, depth) => ({ kind: "del", of: inline(match[1]!, depth + 1) })],
  [/^(\*|_)(?=\S)((?:(?!\1)[\s\S])*?\S)\1(?!\w)/, (match, depth) => ({ kind: "em", of: inline(match[2]!, depth + 1) })],
  [/^(?: {2,}|\\)\n/, () => ({ kind: "break" })],
];

function link(href: string, text: string, depth: number): Inline | null {
  const safe = safeLink(href);
  return safe ? { kind: "link", href: safe, of: depth < DEEPEST ? inline(text || href, DEEPEST) : [{ kind: "text", text }] } : null;
}

export function inline(text: string, depth = 0): Inline[] {
  const found: Inline[] = [];
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) found.push({ kind: "text", text: plain });
    plain = "";
  };
  const end = depth >= DEEPEST ? 0 : Math.min(text.length, LONGEST_INLINE);
  while (at < end) {
    const char = text[at]!;
    const inWord = at > 0 && /\w/.test(text[at - 1]!);
    let matched = false;
    if (/[`\\![<h*_~ ]/.test(char) && !(inWord && (char === "_" || char === "h"))) {
      const rest = text.slice(at, at + 2000);
      for (const [mark, make] of MARKS) {
        const match = mark.exec(rest);
        const made = match && make(match, depth);
        if (!match || !made) continue;
        flush();
        found.push(made);
        at += match[0].length;
        matched = true;
        break;
      }
    }
    if (!matched) {
      plain += char;
      at += 1;
    }
  }
  plain += text.slice(at);
  flush();
  return found;
}

/** Pieces of code by what they are, for colours. One lexer for all languages: colours are a help, not a claim. */
export function lex(code: string): { tone: "comment" | "string" | "number" | "word" | null; text: string }[] {
  const token =
    /(\/\/[^\n]*|\/\*[\s\S]*?\*\/|#(?![\w-]*[;{]|!\[)[^\n]*|--\s[^\n]*)|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|\b(\d[\w.]*)\b|\b(abstract|and|as|async|await|bool|break|case|catch|class|const|continue|def|default|del|do|elif|else|enum|except|export|extends|false|finally|fn|for|from|func|function|if|impl|import|in|int|interface|is|lambda|let|loop|match|mod|mut|new|nil|None|not|null|or|package|pass|pub|raise|return|select|Self|self|static|str|struct|super|switch|this|throw|trait|True|true|False|try|type|use|var|void|where|while|with|yield|SELECT|FROM|WHERE|JOIN|GROUP|ORDER|BY|INSERT|UPDATE|DELETE|CREATE|TABLE)\b/g;
  const found: ReturnType<typeof lex> = [];
  let at = 0;
  for (const match of code.slice(0, LONGEST_INLINE).matchAll(token)) {
    if (match.index > at) found.push({ tone: null, text: code.slice(at, match.index) });
    const tone = match[1] !== undefined ? "comment" : match[2] !== undefined ? "string" : match[3] !== undefined ? "number" : "word";
    found.push({ tone, text: match[0] });
    at = match.index + match[0].length;
  }
  if (at < code.length) found.push({ tone: null, text: code.slice(at) });
  return found;
}
