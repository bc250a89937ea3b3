import { useState } from "preact/hooks";
import { call, saveKey, savedKey, usePolled } from "../api";
import { allChats, forgetChat } from "../chats";
import { Button, Card, Confirm, Outcome, Problem, Select, Table, useAction } from "../parts";
import type { Theme } from "../theme";
import { applyTheme, savedTheme } from "../theme";

interface Settings {
  version: string;
  command: string;
  options: { name: string; value: string; meaning: string }[];
}

interface Reloaded {
  applied: string[];
  restart: string[];
}

function told({ applied, restart }: Reloaded): string {
  const now = applied.length > 0 ? `In force now: ${applied.join(", ")}.` : "No setting has changed at once.";
  return restart.length > 0 ? `${now} After a restart: ${restart.join(", ")}.` : now;
}

export function SettingsPage() {
  const settings = usePolled<Settings>("/admin/settings", 0);
  const [theme, setTheme] = useState<Theme>(savedTheme());
  const [clearing, setClearing] = useState(false);
  const [, redraw] = useState(0);
  const action = useAction();
  const reload = () =>
    action.run(async () => {
      const said = told(await call<Reloaded>("POST", "/admin/config/reload", {}));
      settings.again();
      return said;
    });
  const chats = allChats();
  return (
    <>
      <h1>Settings</h1>
      <Card title="This browser">
        <Select
          label="Colours"
          value={theme}
          options={[["", "as the system"], ["light", "light"], ["dark", "dark"]]}
          onChange={(value) => {
            setTheme(value as Theme);
            applyTheme(value as Theme);
          }}
        />
        <div class="row">
          <Button onClick={() => { saveKey("", false); redraw(Date.now()); }} why={savedKey() ? null : "No key is kept in this browser."}>Forget the API key</Button>
          <Button kind="danger" onClick={() => setClearing(true)} why={chats.length > 0 ? null : "There are no conversations."}>Delete all conversations</Button>
        </div>
        {clearing && (
          <Confirm
            text={`Delete ${chats.length} conversation(s) from this browser?`}
            yes="Delete"
            onNo={() => setClearing(false)}
            onYes={() => {
              chats.forEach((chat) => forgetChat(chat.id));
              setClearing(false);
            }}
          />
        )}
      </Card>
      <Card title="The server">
        <Problem error={settings.error} missing="This server does not tell its settings." />
        {settings.data && (
          <>
            <p>thunder {settings.data.version}, started as <code>{settings.data.command}</code></p>
            <p class="hint">Options of the command line, and settings of the configuration file (thunder config init writes one).</p>
            <div class="row">
              <Button onClick={reload} why={action.busy ? "The server reads its settings." : null}>Read the settings again</Button>
            </div>
            <Outcome action={action} />
            <Table
              caption="Options in force"
              head={["Option", "Value", "What it does"]}
              empty="No options."
              rows={settings.data.options.map((option) => [<code>{option.name}</code>, option.value, option.meaning])}
            />
          </>
        )}
      </Card>
    </>
  );
}
