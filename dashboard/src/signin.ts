// Signing in at a provider: to its page and back, with a key in the end.
import { call, saveKey } from "./api";

/** What this tab has begun. Another tab's, or another site's, is not taken. */
const BEGUN = "thunder.signin";

/** The provider where people sign in; null if this server has none. */
export async function offeredSignIn(): Promise<string | null> {
  try {
    const { sign_in } = await call<{ sign_in: { issuer: string } | null }>("GET", "/auth");
    return sign_in?.issuer ?? null;
  } catch {
    return null;
  }
}

/** Leaves for the provider's page. */
export async function beginSignIn(): Promise<void> {
  const { url, state } = await call<{ url: string; state: string }>("POST", "/auth/begin", { redirect: `${location.origin}/` });
  sessionStorage.setItem(BEGUN, JSON.stringify({ state, hash: location.hash }));
  location.assign(url);
}

/** Takes what the provider has sent back in the page's address, if it has. Returns what went wrong. */
export async function endSignIn(): Promise<string | null> {
  const query = new URLSearchParams(location.search);
  const state = query.get("state");
  if (state === null) return null;
  const begun = JSON.parse(sessionStorage.getItem(BEGUN) ?? "null") as { state: string; hash: string } | null;
  sessionStorage.removeItem(BEGUN);
  // What came with the address works once, and must not be kept in the browser's history.
  history.replaceState(null, "", `/${begun?.hash ?? ""}`);
  if (begun === null || begun.state !== state) return "This sign-in was not begun in this tab: sign in again.";
  const code = query.get("code");
  if (code === null) return `The provider says: ${query.get("error_description") ?? query.get("error") ?? "no"}`;
  try {
    const { secret } = await call<{ secret: string }>("POST", "/auth/finish", { state, code });
    saveKey(secret, false);
    return null;
  } catch (error) {
    return (error as Error).message;
  }
}
