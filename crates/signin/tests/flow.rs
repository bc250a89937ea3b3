//! Sign-ins with a small provider on this machine.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use thunder_signin::{BadToken, Options, SignIn, SignInError};

const REDIRECT: &str = "https://models.example.org/";

/// The state and behaviour of a provider.
struct Inner {
    pair: EcdsaKeyPair,
    random: SystemRandom,
    /// Fields of the discovery document that replace the right ones.
    document: Value,
    /// Fields of the token that replace the right ones.
    claims: Value,
    /// Codes, with the query of their sign-in.
    codes: BTreeMap<String, BTreeMap<String, String>>,
    /// Requests for keys.
    keys_asked: usize,
}

/// A provider. Each connection has one request.
#[derive(Clone)]
struct Provider {
    address: String,
    inner: Arc<Mutex<Inner>>,
}

fn pair(random: &SystemRandom) -> EcdsaKeyPair {
    let kind = &ECDSA_P256_SHA256_FIXED_SIGNING;
    let bytes = EcdsaKeyPair::generate_pkcs8(kind, random).unwrap();
    EcdsaKeyPair::from_pkcs8(kind, bytes.as_ref(), random).unwrap()
}

/// The fields of a query or a form.
fn fields(text: &str) -> BTreeMap<String, String> {
    let decode = |text: &str| {
        let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
        while let Some((first, after)) = rest.split_first() {
            let digits =
                after.get(..2).filter(|_| *first == b'%').map(|two| std::str::from_utf8(two).unwrap());
            bytes.push(digits.map_or(*first, |digits| u8::from_str_radix(digits, 16).unwrap()));
            rest = if digits.is_some() { &after[2..] } else { after };
        }
        String::from_utf8(bytes).unwrap()
    };
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (decode(name), decode(value))).collect()
}

impl Provider {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let random = SystemRandom::new();
        let inner = Inner {
            pair: pair(&random),
            random,
            document: json!({}),
            claims: json!({}),
            codes: BTreeMap::new(),
            keys_asked: 0,
        };
        let provider = Self { address, inner: Arc::new(Mutex::new(inner)) };
        let serving = provider.clone();
        std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| serving.answer(stream)));
        provider
    }

    fn options(&self) -> Options {
        Options {
            issuer: self.address.clone(),
            client_id: "thunder".into(),
            client_secret: Some("s3cret/+".into()),
            scopes: "email profile".into(),
            groups_claim: "groups".into(),
            certificates: None,
        }
    }

    fn sign_in(&self) -> SignIn {
        SignIn::new(self.options()).unwrap()
    }

    /// Plays the browser and the person. Returns the code with which the provider sends the browser
    /// back.
    fn visit(&self, url: &str) -> (String, String) {
        let query = fields(url.strip_prefix(&format!("{}/authorize?x=1&", self.address)).unwrap());
        assert_eq!((query["response_type"].as_str(), query["client_id"].as_str()), ("code", "thunder"));
        assert_eq!(
            (query["scope"].as_str(), query["redirect_uri"].as_str()),
            ("openid email profile", REDIRECT)
        );
        let mut inner = self.inner.lock().unwrap();
        let (code, state) = (format!("code {}", inner.codes.len()), query["state"].clone());
        inner.codes.insert(code.clone(), query);
        (code, state)
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (mut first, mut headers) = (String::new(), BTreeMap::new());
        reader.read_line(&mut first).unwrap();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let mut body = vec![0; headers.get("content-length").map_or(0, |length| length.parse().unwrap())];
        reader.read_exact(&mut body).unwrap();
        let path = first.split(' ').nth(1).unwrap_or_default();
        let (status, answer) = match path {
            "/.well-known/openid-configuration" => (200, self.document()),
            "/keys" => (200, self.keys()),
            "/token" => self.token(&headers, &fields(std::str::from_utf8(&body).unwrap())),
            _ => (404, json!({})),
        };
        let text = answer.to_string();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            text.len()
        );
        drop(stream.write_all((head + &text).as_bytes()));
    }

    fn document(&self) -> Value {
        let at = |path: &str| format!("{}{path}", self.address);
        let mut document = json!({
            "issuer": self.address, "authorization_endpoint": at("/authorize?x=1"), "token_endpoint": at("/token"),
            "jwks_uri": at("/keys"),
        });
        let inner = self.inner.lock().unwrap();
        inner.document.as_object().unwrap().iter().for_each(|(name, value)| document[name] = value.clone());
        document
    }

    fn keys(&self) -> Value {
        let mut inner = self.inner.lock().unwrap();
        inner.keys_asked += 1;
        let point = inner.pair.public_key().as_ref();
        let part = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        json!({"keys": [
            {"kty": "a kind of the future", "kid": 7},
            {"kty": "EC", "crv": "P-256", "use": "sig", "x": part(&point[1..33]), "y": part(&point[33..])},
        ]})
    }

    fn token(&self, headers: &BTreeMap<String, String>, form: &BTreeMap<String, String>) -> (u16, Value) {
        let mut inner = self.inner.lock().unwrap();
        let basic = STANDARD.encode("thunder:s3cret%2F%2B");
        if headers.get("authorization") != Some(&format!("Basic {basic}"))
            || form.contains_key("client_secret")
        {
            return (401, json!({"error": "invalid_client"}));
        }
        // A code works once, and only with the data of its own sign-in.
        let Some(query) = form.get("code").and_then(|code| inner.codes.remove(code)) else {
            return (400, json!({"error": "invalid_grant"}));
        };
        let challenge = URL_SAFE_NO_PAD.encode(Sha256::digest(form["code_verifier"].as_bytes()));
        if query["code_challenge"] != challenge
            || query["code_challenge_method"] != "S256"
            || form["redirect_uri"] != query["redirect_uri"]
            || form["grant_type"] != "authorization_code"
        {
            return (400, json!({"error": "invalid_grant"}));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let mut claims = json!({
            "iss": self.address, "sub": "7", "aud": "thunder", "nonce": query["nonce"], "iat": now, "exp": now + 300,
            "email": "ann@example.org", "groups": ["staff"],
        });
        inner.claims.as_object().unwrap().iter().for_each(|(name, value)| claims[name] = value.clone());
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(&json!({"alg": "ES256"})), part(&claims));
        let signature = inner.pair.sign(&inner.random, signed.as_bytes()).unwrap();
        (
            200,
            json!({"id_token": format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)), "token_type": "Bearer"}),
        )
    }
}

#[test]
fn a_person_signs_in_and_a_code_works_once() {
    let provider = Provider::start();
    let sign_in = provider.sign_in();
    for round in 0..2 {
        let begun = sign_in.begin(REDIRECT).unwrap();
        let (code, state) = provider.visit(&begun.url);
        assert_eq!(state, begun.state);
        let person = sign_in.finish(&state, &code).unwrap();
        assert_eq!((person.subject.as_str(), person.email.as_deref()), ("7", Some("ann@example.org")));
        assert_eq!(person.groups, ["staff"]);
        let again = sign_in.finish(&state, &code).unwrap_err();
        assert!(again.to_string().contains("status 400 invalid_grant"), "{round}: {again}");
    }
    assert_eq!(provider.inner.lock().unwrap().keys_asked, 1, "what the provider says is kept");
}

#[test]
fn what_belongs_to_another_sign_in_is_refused() {
    let provider = Provider::start();
    let sign_in = provider.sign_in();
    let (first, second) = (sign_in.begin(REDIRECT).unwrap(), sign_in.begin(REDIRECT).unwrap());
    let (code, _) = provider.visit(&first.url);
    // The provider compares the code with the data of its own sign-in (PKCE).
    assert!(matches!(sign_in.finish(&second.state, &code), Err(SignInError::Provider { .. })));
    // A state of another process, or an invalid one.
    let other = provider.sign_in().begin(REDIRECT).unwrap();
    let (code, _) = provider.visit(&first.url);
    assert_eq!(sign_in.finish(&other.state, &code), Err(SignInError::State));
    assert_eq!(sign_in.finish("", &code), Err(SignInError::State));
    assert_eq!(sign_in.finish(&first.state, ""), Err(SignInError::State));
    // A token that the provider gave for another sign-in.
    provider.inner.lock().unwrap().claims = json!({"nonce": "another"});
    assert_eq!(sign_in.finish(&first.state, &code), Err(SignInError::Token(BadToken::Claim("nonce"))));
}

#[test]
fn a_new_key_of_the_provider_is_asked_for_once() {
    let provider = Provider::start();
    let sign_in = provider.sign_in();
    sign_in.begin(REDIRECT).unwrap();
    {
        let mut inner = provider.inner.lock().unwrap();
        inner.pair = pair(&SystemRandom::new());
    }
    let begun = sign_in.begin(REDIRECT).unwrap();
    let (code, state) = provider.visit(&begun.url);
    assert!(sign_in.finish(&state, &code).is_ok());
    assert_eq!(provider.inner.lock().unwrap().keys_asked, 2);
}

#[test]
fn a_provider_that_is_not_what_it_should_be_is_named() {
    let provider = Provider::start();
    let begin = |document: Value| {
        provider.inner.lock().unwrap().document = document;
        provider.sign_in().begin(REDIRECT).map(drop)
    };
    let error = begin(json!({"issuer": "https://evil.example"})).unwrap_err().to_string();
    assert!(error.contains("calls itself \"https://evil.example\""), "{error}");
    for name in ["authorization_endpoint", "token_endpoint", "jwks_uri"] {
        let refused = begin(json!({ name: "http://evil.example/" }));
        assert!(matches!(refused, Err(SignInError::Address { .. })), "{name}");
    }
    assert!(matches!(begin(json!({"jwks_uri": 7})), Err(SignInError::Provider { .. })));
    assert_eq!(begin(json!({})), Ok(()));
    let refused = provider.sign_in().begin("http://models.example.org/");
    assert!(matches!(refused, Err(SignInError::Address { .. })));
    let wrong = Options { client_secret: Some("wrong".into()), ..provider.options() };
    let sign_in = SignIn::new(wrong).unwrap();
    let (code, state) = provider.visit(&sign_in.begin(REDIRECT).unwrap().url);
    let error = sign_in.finish(&state, &code).unwrap_err().to_string();
    assert!(error.contains("status 401 invalid_client") && !error.contains("wrong\""), "{error}");
    assert!(!format!("{sign_in:?}").contains("wrong"), "{sign_in:?}");
    let nobody = Options { issuer: "http://127.0.0.1:1".into(), ..provider.options() };
    let nobody = SignIn::new(nobody).unwrap();
    assert!(matches!(nobody.reach(), Err(SignInError::Provider { .. })));
    assert!(matches!(nobody.begin(REDIRECT), Err(SignInError::Provider { .. })));
    assert_eq!(provider.sign_in().reach(), Ok(()));
    let insecure = Options { issuer: "http://login.example.org".into(), ..provider.options() };
    assert!(matches!(SignIn::new(insecure), Err(SignInError::Address { .. })));
    let missing = Options { certificates: Some("/none".into()), ..provider.options() };
    assert!(matches!(SignIn::new(missing), Err(SignInError::Certificates { .. })));
}
