// A small OpenID Connect provider on this machine, with one person and RS256 tokens.
import { createHash, generateKeyPairSync, randomBytes, sign } from "node:crypto";
import { createServer } from "node:http";

const { publicKey, privateKey } = generateKeyPairSync("rsa", { modulusLength: 2048 });
const part = (value) => Buffer.from(JSON.stringify(value)).toString("base64url");

/** Starts it. `person` has the fields of its tokens; it knows one client, with a secret. */
export async function provider(person, client = { id: "thunder", secret: "client's secret" }) {
  const codes = new Map();
  let issuer = "";
  const json = (response, value, status = 200) => {
    response.writeHead(status, { "content-type": "application/json" });
    response.end(JSON.stringify(value));
  };
  const body = async (request) => {
    let text = "";
    for await (const piece of request) text += piece;
    return new URLSearchParams(text);
  };
  const server = createServer(async (request, response) => {
    const url = new URL(request.url, issuer);
    switch (url.pathname) {
      case "/.well-known/openid-configuration":
        return json(response, {
          issuer, authorization_endpoint: `${issuer}/authorize`, token_endpoint: `${issuer}/token`, jwks_uri: `${issuer}/keys`,
          token_endpoint_auth_methods_supported: ["client_secret_post"],
        });
      case "/keys":
        return json(response, { keys: [{ ...publicKey.export({ format: "jwk" }), kid: "k1", use: "sig" }] });
      case "/authorize": {
        // The page on which a person says who they are.
        response.writeHead(200, { "content-type": "text/html" });
        const fields = [...url.searchParams].map(([name, value]) => `<input type="hidden" name="${name}" value="${value}">`).join("");
        return response.end(`<!doctype html><title>Provider</title><form method="post" action="/chosen">${fields}<button>Continue as ${person.name}</button></form>`);
      }
      case "/chosen": {
        const asked = Object.fromEntries(await body(request));
        const code = randomBytes(16).toString("hex");
        codes.set(code, asked);
        response.writeHead(303, { location: `${asked.redirect_uri}?code=${code}&state=${encodeURIComponent(asked.state)}` });
        return response.end();
      }
      case "/token": {
        const form = await body(request);
        const asked = codes.get(form.get("code"));
        codes.delete(form.get("code"));
        if (form.get("client_id") !== client.id || form.get("client_secret") !== client.secret) return json(response, { error: "invalid_client" }, 401);
        const challenge = createHash("sha256").update(form.get("code_verifier") ?? "").digest("base64url");
        if (!asked || asked.code_challenge !== challenge || asked.redirect_uri !== form.get("redirect_uri")) return json(response, { error: "invalid_grant" }, 400);
        const now = Math.floor(Date.now() / 1000);
        const claims = { iss: issuer, aud: client.id, nonce: asked.nonce, iat: now, exp: now + 300, ...person };
        const signed = `${part({ alg: "RS256", kid: "k1" })}.${part(claims)}`;
        return json(response, { token_type: "Bearer", id_token: `${signed}.${sign("sha256", Buffer.from(signed), privateKey).toString("base64url")}` });
      }
      default:
        return json(response, { error: "not_found" }, 404);
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  issuer = `http://127.0.0.1:${server.address().port}`;
  return { issuer, client, close: () => server.close() };
}
