import { render } from "preact";
import type { ComponentType } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { saveKey, savedKey, whenKeyIsMissing } from "./api";
import { Button, Dialog, Input, Outcome, useAction } from "./parts";
import { AuditPage } from "./pages/audit";
import { ChatPage } from "./pages/chat";
import { ClusterPage } from "./pages/cluster";
import { KeysPage } from "./pages/keys";
import { LimitsPage } from "./pages/limits";
import { ModelsPage } from "./pages/models";
import { PlannerPage } from "./pages/planner";
import { PromptsPage } from "./pages/prompts";
import { RequestsPage } from "./pages/requests";
import { SettingsPage } from "./pages/settings";
import { UsagePage } from "./pages/usage";
import { beginSignIn, endSignIn, offeredSignIn } from "./signin";
import { applyTheme } from "./theme";

const PAGES: [string, string, ComponentType][] = [
  ["chat", "Chat", ChatPage],
  ["models", "Models", ModelsPage],
  ["cluster", "Cluster", ClusterPage],
  ["requests", "Requests", RequestsPage],
  ["usage", "Usage", UsagePage],
  ["keys", "Keys", KeysPage],
  ["limits", "Limits", LimitsPage],
  ["audit", "Audit", AuditPage],
  ["prompts", "Prompts", PromptsPage],
  ["planner", "Planner", PlannerPage],
  ["settings", "Settings", SettingsPage],
];

function pageNow(): string {
  const name = location.hash.replace(/^#\/?/, "").split("?")[0]!;
  return PAGES.some(([known]) => known === name) ? name : "chat";
}

function App(props: { problem: string | null }) {
  const [page, setPage] = useState(pageNow);
  const [missing, setMissing] = useState<string | null>(props.problem);
  // A new key makes every page ask again.
  const [keys, setKeys] = useState(0);
  const main = useRef<HTMLElement>(null);
  useEffect(() => {
    // What is shown stays: it may say why a sign-in has failed.
    whenKeyIsMissing((message) => setMissing((shown) => shown ?? message));
    const moved = () => {
      setPage(pageNow());
      main.current?.focus();
      window.scrollTo(0, 0);
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const [, title, Page] = PAGES.find(([name]) => name === page)!;
  useEffect(() => {
    document.title = `${title} · Thunderhead`;
  }, [title]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); main.current?.focus(); }}>
        Skip to the page
      </a>
      <nav aria-label="Pages">
        <span class="brand">Thunderhead</span>
        <ul>
          {PAGES.map(([name, text]) => (
            <li key={name}>
              <a href={`#/${name}`} aria-current={name === page ? "page" : undefined}>{text}</a>
            </li>
          ))}
        </ul>
      </nav>
      <main id="main" tabIndex={-1} ref={main} key={`${page}${keys}`}>
        <Page />
      </main>
      {missing && <KeyDialog message={missing} onDone={(saved) => { setMissing(null); if (saved) setKeys(keys + 1); }} />}
    </>
  );
}

function KeyDialog(props: { message: string; onDone: (saved: boolean) => void }) {
  const [key, setKey] = useState(savedKey());
  const [forGood, setForGood] = useState(false);
  const [provider, setProvider] = useState<string | null>(null);
  const leaving = useAction();
  useEffect(() => void offeredSignIn().then(setProvider), []);
  return (
    <Dialog title={provider ? "Sign in, or use an API key" : "The server needs an API key"} onClose={() => props.onDone(false)}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (key.trim() === "") return;
          saveKey(key.trim(), forGood);
          props.onDone(true);
        }}
      >
        <p>{props.message}</p>
        {provider && (
          <div class="row">
            <Button kind="main" onClick={() => leaving.run(beginSignIn)} why={leaving.busy && "The provider is asked."}>
              Sign in at {new URL(provider).host}
            </Button>
          </div>
        )}
        <Outcome action={leaving} />
        <Input label="API key" type="password" value={key} onInput={setKey} />
        <label class="check">
          <input type="checkbox" checked={forGood} onChange={(event) => setForGood(event.currentTarget.checked)} />
          Keep it in this browser after the tab is closed
        </label>
        <div class="row">
          <Button submit kind={provider ? "plain" : "main"} onClick={() => {}} why={key.trim() === "" ? "Type the key first." : null}>Use this key</Button>
          <Button onClick={() => props.onDone(false)}>Not now</Button>
        </div>
      </form>
    </Dialog>
  );
}

applyTheme();
endSignIn().then((problem) => {
  const place = document.getElementById("app")!;
  place.replaceChildren();
  render(<App problem={problem} />, place);
});
