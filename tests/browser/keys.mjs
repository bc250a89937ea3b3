// Answers of /admin/me, /admin/keys and /admin/usage as the gateway gives them, for the pages Keys and Usage.
// They stand in for a gateway in the browser only: the program under test has no part of this.
const totals = (requests) => ({
  requests, failed: 0, cancelled: 0, prompt_tokens: 900 * requests, cached_tokens: 300 * requests, completion_tokens: 120 * requests,
  cost: 0.01 * requests, time_to_first_token_s: 0.31, duration_s: 2.1,
});

/** Makes the pages of a context see a gateway with keys. Returns what it was asked to change. */
export async function withKeys(context, role = "admin") {
  const asked = [];
  const keys = [];
  const made = (body) => ({
    id: `k_${keys.length}`, name: body.name, owner: body.owner ?? null, team: body.team ?? null, role: body.role ?? "user",
    created: "2026-11-23T09:00:00Z", expires: body.expires ?? null, last_used: null, revoked: null, state: "active", grace_until: null,
    models: body.models ?? ["*"], limits: body.limits ?? {}, secret_begins: `th-${keys.length}`,
  });
  const reply = (route, json, status = 200) => route.fulfill({ status, contentType: "application/json", body: JSON.stringify(json) });
  await context.route(/\/admin\/me$/, (route) =>
    reply(route, {
      key: role === "admin" ? null : { name: "ci", team: "research", expires: null }, role, currency: "EUR",
      limits: [{ scope: "key", name: "ci", limit: "requests_per_minute", allowed: 60, used: 12, left: 48, resets_s: 31.5 }],
      usage: { today: totals(3), month: totals(40) },
    }));
  await context.route(/\/admin\/usage\?/, (route) => {
    const by = new URL(route.request().url()).searchParams.get("by").split(",");
    const rows = ["2026-11-22", "2026-11-23"].map((day, index) => ({ ...Object.fromEntries(by.map((name) => [name, name === "day" ? day : `${name} ${index}`])), ...totals(index + 1) }));
    return reply(route, { since: "2026-11-01T00:00:00Z", until: "2026-11-24T00:00:00Z", by, currency: "EUR", rows, total: totals(3) });
  });
  await context.route(/\/admin\/keys/, (route) => {
    const request = route.request();
    if (role !== "admin") return reply(route, { error: { message: "only an admin's key may see keys", code: "admin_key_required" } }, 403);
    if (request.method() === "GET") return reply(route, { keys });
    const [, , , id, act] = new URL(request.url()).pathname.split("/");
    const body = request.postDataJSON?.() ?? null;
    asked.push([act ?? "create", body]);
    if (!act) {
      keys.unshift(made(body));
      return reply(route, { key: keys[0], secret: "th-0-very-secret" }, 201);
    }
    const key = keys.find((other) => other.id === id);
    if (act === "revoke") key.state = "revoked";
    return reply(route, { key, ...(act === "rotate" ? { secret: "th-0-another" } : {}) });
  });
  return asked;
}
