// What several pages are made of.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import type { ApiError } from "./api";

/** A button. With `why` it is off, and says why. It stays in the order of Tab, so that everybody can read the reason. */
export function Button(props: {
  children: ComponentChildren;
  onClick: () => void;
  why?: string | null | false;
  kind?: "plain" | "main" | "danger";
  label?: string;
  submit?: boolean;
}) {
  const id = useId();
  const off = Boolean(props.why);
  return (
    <span class="button">
      <button
        type={props.submit ? "submit" : "button"}
        class={props.kind ?? "plain"}
        aria-label={props.label}
        aria-disabled={off ? "true" : undefined}
        aria-describedby={off ? id : undefined}
        onClick={(event) => {
          if (off) event.preventDefault();
          else if (!props.submit) props.onClick();
        }}
      >
        {props.children}
      </button>
      {off && (
        <span class="why" id={id}>
          {props.why}
        </span>
      )}
    </span>
  );
}

/** A labelled field of a form. */
export function Field(props: { label: string; hint?: string; children: (id: string, hintId?: string) => ComponentChildren }) {
  const id = useId();
  const hintId = `${id}h`;
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      {props.children(id, props.hint ? hintId : undefined)}
      {props.hint && (
        <small class="hint" id={hintId}>
          {props.hint}
        </small>
      )}
    </div>
  );
}

/** A text or number input with a label. */
export function Input(props: {
  label: string;
  value: string;
  onInput: (value: string) => void;
  hint?: string;
  type?: "text" | "number" | "password" | "date";
  list?: string;
  placeholder?: string;
  required?: boolean;
  min?: number;
  max?: number;
  step?: number | "any";
}) {
  const { label, hint, onInput, ...rest } = props;
  const attributes: object = { ...rest, type: props.type ?? "text" };
  return (
    <Field label={label} hint={hint}>
      {(id, hintId) => (
        <input
          {...attributes}
          id={id}
          autocomplete="off"
          aria-describedby={hintId}
          onInput={(event) => onInput(event.currentTarget.value)}
        />
      )}
    </Field>
  );
}

/** A choice of one file. Once there is one, a button takes it back. */
export function FileInput(props: { label: string; hint: string; accept: string; chosen: string | null; onFile: (file: File | null) => void }) {
  // A file is taken back by a new control.
  const [round, setRound] = useState(0);
  return (
    <div class="row file">
      <Field label={props.label} hint={props.hint}>
        {(id, hintId) => (
          <input
            key={round}
            id={id}
            type="file"
            accept={props.accept}
            aria-describedby={hintId}
            onChange={(event) => props.onFile(event.currentTarget.files?.[0] ?? null)}
          />
        )}
      </Field>
      {props.chosen && (
        <Button
          onClick={() => {
            setRound(round + 1);
            props.onFile(null);
          }}
        >
          Without {props.chosen}
        </Button>
      )}
    </div>
  );
}

/** A choice from a list, with a label. */
export function Select(props: { label: string; value: string; options: [string, string][]; onChange: (value: string) => void; hint?: string }) {
  return (
    <Field label={props.label} hint={props.hint}>
      {(id, hintId) => (
        <select id={id} aria-describedby={hintId} value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)}>
          {props.options.map(([value, text]) => (
            <option value={value} key={value} selected={value === props.value}>
              {text}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}

/** A table with a caption. Long tables scroll in their own box, which the keyboard reaches. */
export function Table(props: { caption: string; head: string[]; rows: ComponentChildren[][]; empty: string; numeric?: number[] }) {
  const numeric = new Set(props.numeric ?? []);
  const side = (column: number) => (numeric.has(column) ? "number" : undefined);
  return (
    <div class="scroll" role="region" aria-label={props.caption} tabIndex={0}>
      <table>
        <caption>{props.caption}</caption>
        <thead>
          <tr>
            {props.head.map((text, column) => (
              <th scope="col" class={side(column)} key={text}>
                {text}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.rows.map((row, index) => (
            <tr key={index}>
              {row.map((cell, column) => (
                <td class={side(column)} key={column}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
          {props.rows.length === 0 && (
            <tr>
              <td colSpan={props.head.length} class="empty">
                {props.empty}
              </td>
            </tr>
          )}
        </tbody>
      </table>
    </div>
  );
}

/** An error in place of, or above, what could not be had. */
export function Problem(props: { error: ApiError | null; missing?: string }) {
  if (!props.error) return null;
  const text = props.error.status === 404 && props.missing ? props.missing : props.error.message;
  return (
    <p class={props.error.status === 404 ? "note" : "error"} role="alert">
      {text}
    </p>
  );
}

/** A part of a page with its heading. */
export function Card(props: { title: string; children: ComponentChildren; tools?: ComponentChildren }) {
  const id = useId();
  return (
    <section class="card" aria-labelledby={id}>
      <header>
        <h2 id={id}>{props.title}</h2>
        {props.tools}
      </header>
      {props.children}
    </section>
  );
}

/** A number with its name. */
export function Figure(props: { name: string; value: string; unit?: string }) {
  return (
    <div class="figure">
      <dt>{props.name}</dt>
      <dd>
        {props.value} {props.unit && <small>{props.unit}</small>}
      </dd>
    </div>
  );
}

/** Parts of a whole, as a bar with a legend in words. */
export function Shares(props: { label: string; parts: { name: string; value: number; text: string; tone: number }[]; total: number }) {
  const total = Math.max(props.total, props.parts.reduce((sum, part) => sum + part.value, 0), 1e-12);
  const words = props.parts.map((part) => `${part.name} ${part.text}`).join(", ");
  return (
    <div class="shares" role="img" aria-label={`${props.label}: ${words}`} title={words}>
      {props.parts.map((part) => (
        <span class={`tone${part.tone}`} key={part.name} style={{ width: `${(100 * Math.max(part.value, 0)) / total}%` }} />
      ))}
    </div>
  );
}

/** Asks before something that cannot be undone. */
export function Confirm(props: { text: string; yes: string; onYes: () => void; onNo: () => void }) {
  return (
    <Dialog title={props.text} onClose={props.onNo}>
      <div class="row">
        <Button kind="danger" onClick={props.onYes}>
          {props.yes}
        </Button>
        <Button onClick={props.onNo}>Cancel</Button>
      </div>
    </Dialog>
  );
}

/** The end of a dialog's form. */
export function SaveOrCancel(props: { why: string | null; onCancel: () => void }) {
  return (
    <div class="row">
      <Button submit kind="main" onClick={() => {}} why={props.why}>Save</Button>
      <Button onClick={props.onCancel}>Cancel</Button>
    </div>
  );
}

/** A dialog with a secret that is shown once. */
export function Secret(props: { title: string; note: string; secret: string; onClose: () => void }) {
  const { secret } = props;
  return (
    <Dialog title={props.title} onClose={props.onClose}>
      <p>{props.note}</p>
      <pre tabIndex={0} class="secret">{secret}</pre>
      <div class="row">
        <Button onClick={() => void navigator.clipboard?.writeText(secret)} why={navigator.clipboard ? null : "The browser allows copying over https and on this machine only: select the text."}>Copy</Button>
        <Button kind="main" onClick={props.onClose}>I have kept it</Button>
      </div>
    </Dialog>
  );
}

/** A modal dialog. Escape closes it. */
export function Dialog(props: { title: string; children: ComponentChildren; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => {
    dialog.current?.showModal();
    return () => dialog.current?.close();
  }, []);
  return (
    <dialog
      ref={dialog}
      aria-labelledby={id}
      onCancel={(event) => {
        event.preventDefault();
        props.onClose();
      }}
    >
      <h2 id={id}>{props.title}</h2>
      {props.children}
    </dialog>
  );
}

/** Runs an action, and keeps whether it runs and what went wrong. */
export function useAction(): { busy: boolean; error: string | null; done: string | null; run: (work: () => Promise<string | void>) => void } {
  const [state, set] = useState<{ busy: boolean; error: string | null; done: string | null }>({ busy: false, error: null, done: null });
  return {
    ...state,
    run: (work) => {
      set({ busy: true, error: null, done: null });
      work().then(
        (done) => set({ busy: false, error: null, done: done ?? null }),
        (error: Error) => set({ busy: false, error: error.message, done: null }),
      );
    },
  };
}

/** What an action said, read out by screen readers. */
export function Outcome(props: { action: { error: string | null; done: string | null } }) {
  return (
    <div aria-live="polite">
      {props.action.error && <p class="error">{props.action.error}</p>}
      {props.action.done && <p class="done">{props.action.done}</p>}
    </div>
  );
}
