use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _};
use serde_json::json;

use super::*;

/// A public RSA key, and two tokens signed with its private key (by Node.js 20).
const N: &str = "xT92xGhGX8Z4OhMOe1cSeqj5ksXfkZ2k9xTpwt0Hf4r4YP7_3QZTJWnOky4GgifBUZYmqDeIzFPkJez12kuv-TxUmr-2tbu1\
     ycQEtz3Mz8Je3mGRgg24HJtsTYeV5j2mbotGaDuWD1l_b6LHKmGhTnFSOt89A_gpQdaC6A71Uw3hZgXAZSEpwykl_o1WiZys\
     Nhi9ZPb4SwUlarEaEb92B3jXzOCOXKPtebKRSWi-0yq9mmjPEpLgalvNQUhKWhS_D6QD4v3ZQHeU9eF02uheuunV7rjTi2SM\
     9G3EV2oSxCPmPC3bB6AzSfsF1clDXDj78Xr9mlyIyUuC5CKHq-WbTQ";
const RS256: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6Im9uZSJ9.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUub3JnIiwic3ViIjoiMjQ\
     4Mjg5NzYxMDAxIiwiYXVkIjoidGh1bmRlciIsIm5vbmNlIjoibi0wUzZfV3pBMk1qIiwiZXhwIjoxODAwMDAwMzAwLCJpYXQ\
     iOjE4MDAwMDAwMDAsImVtYWlsIjoiYW5uQGV4YW1wbGUub3JnIiwiZW1haWxfdmVyaWZpZWQiOnRydWUsIm5hbWUiOiJBbm4\
     iLCJncm91cHMiOlsic3RhZmYiLCJsbG0tYWRtaW5zIl19.hf3YUYcKfsEvnrHeA9TWkWWWTBElVF2NihvajCdUAT5FK3UEQl\
     cMIceZ5PIBGnaoDDKnb3nLpqAiwKvJwlUT-kDzQAOO800MqNWpqyggO43ZpCJtVmZgCF7fM72SS3_k6nqXSU7bQaAYmEoiUt\
     rssYMFT638rd_AdCn485mRTiL4SnJgigndq1oNqBPOAOCT12GTa0fFnI9dHRo5dDOrZcjk_qA9qZJaSIuYHErOIGaxFAEApS\
     whtz89Y8RKB8aO_GC_77FTl7Y0qYtVyghVrWgdAA776PDnR9omsdeThcTb_Gmgw63K4nRnwnxmYeGWDFifbr-CSUtpS-yb_G\
     31fg";
const PS256: &str = "eyJhbGciOiJQUzI1NiIsImtpZCI6Im9uZSJ9.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUub3JnIiwic3ViIjoiMjQ\
     4Mjg5NzYxMDAxIiwiYXVkIjoidGh1bmRlciIsIm5vbmNlIjoibi0wUzZfV3pBMk1qIiwiZXhwIjoxODAwMDAwMzAwLCJpYXQ\
     iOjE4MDAwMDAwMDAsImVtYWlsIjoiYW5uQGV4YW1wbGUub3JnIiwiZW1haWxfdmVyaWZpZWQiOnRydWUsIm5hbWUiOiJBbm4\
     iLCJncm91cHMiOlsic3RhZmYiLCJsbG0tYWRtaW5zIl19.TrOEzIYb0SMOGhJjJh9GqeIkc6qYb4YJx7KpSsWJbP9N-bVJ42\
     C-Ue-86UqLkDgKyk86GNOfWYtI1Mfg6UxA9AqIQk43-dWjYpdG5g0tgQxqq2bFFFOye1mQZjnjUCxgCBL6BsKx3uLkoJQr4C\
     u8uLxsnzFvuh8HbbbdXaMxYB6nRmeS_V3zCdtTSHZlrX4bID_2fjZNp9UO4dUAgUIFyaxgO--cYdCQ-5pCCY2cR727ltH1qj\
     _-b0cPGXvgwl3LxFZIZMYsa5O4hEnCmsqwvRtyjrui0Ndb-ijZD_L5Nk5stsVtxejkfiOEvubal4LWGbBzUsoDaSxiJX0mBv\
     tlpg";
const NOW_S: u64 = 1_800_000_100;

fn expected() -> Expected<'static> {
    Expected {
        issuer: "https://login.example.org",
        client_id: "thunder",
        nonce: "n-0S6_WzA2Mj",
        now_s: NOW_S,
        groups_claim: "groups",
    }
}

fn key(value: Value) -> JsonKey {
    serde_json::from_value(value).expect("a key")
}

fn rsa() -> JsonKey {
    key(json!({"kty": "RSA", "kid": "one", "use": "sig", "alg": "RS256", "n": N, "e": "AQAB"}))
}

/// The contents of the fixed tokens.
fn claims() -> Value {
    json!({
        "iss": "https://login.example.org", "sub": "248289761001", "aud": "thunder", "nonce": "n-0S6_WzA2Mj",
        "exp": NOW_S + 200, "iat": NOW_S - 100, "email": "ann@example.org", "email_verified": true, "name": "Ann",
        "groups": ["staff", "llm-admins"],
    })
}

/// Signs tokens with a key on a curve.
struct Signer {
    pair: EcdsaKeyPair,
    random: SystemRandom,
}

impl Signer {
    fn new() -> Self {
        let random = SystemRandom::new();
        let kind = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let bytes = EcdsaKeyPair::generate_pkcs8(kind, &random).expect("a key");
        Self { pair: EcdsaKeyPair::from_pkcs8(kind, bytes.as_ref(), &random).expect("a key"), random }
    }

    fn key(&self) -> JsonKey {
        let point = self.pair.public_key().as_ref();
        let part = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        key(
            json!({"kty": "EC", "crv": "P-256", "kid": "two", "x": part(&point[1..33]), "y": part(&point[33..])}),
        )
    }

    fn token(&self, header: &Value, claims: &Value) -> String {
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(header), part(claims));
        let signature = self.pair.sign(&self.random, signed.as_bytes()).expect("a signature");
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    fn verify(&self, claims: &Value) -> Result<Person, BadToken> {
        verify(&self.token(&json!({"alg": "ES256", "kid": "two"}), claims), &[self.key()], &expected())
    }
}

#[test]
fn tokens_of_each_algorithm_say_who_it_is() {
    let ann = Person {
        subject: "248289761001".into(),
        email: Some("ann@example.org".into()),
        name: Some("Ann".into()),
        groups: vec!["staff".into(), "llm-admins".into()],
    };
    let signer = Signer::new();
    let keys = [signer.key(), rsa()];
    assert_eq!(verify(RS256, &keys, &expected()).as_ref(), Ok(&ann));
    assert_eq!(verify(PS256, &keys, &expected()).as_ref(), Ok(&ann));
    assert_eq!(signer.verify(&claims()).as_ref(), Ok(&ann));
    let bytes = Ed25519KeyPair::generate_pkcs8(&signer.random).expect("a key");
    let pair = Ed25519KeyPair::from_pkcs8(bytes.as_ref()).expect("a key");
    let x = URL_SAFE_NO_PAD.encode(pair.public_key().as_ref());
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", part(json!({"alg": "EdDSA"})), part(claims()));
    let token = format!("{signed}.{}", URL_SAFE_NO_PAD.encode(pair.sign(signed.as_bytes())));
    let keys = [rsa(), key(json!({"kty": "OKP", "crv": "Ed25519", "x": x}))];
    assert_eq!(verify(&token, &keys, &expected()).as_ref(), Ok(&ann));
}

#[test]
fn a_changed_token_and_one_of_another_key_are_refused() {
    let signer = Signer::new();
    let good = signer.token(&json!({"alg": "ES256", "kid": "two"}), &claims());
    let keys = [signer.key()];
    for at in (0..good.len()).step_by(3) {
        let mut changed = good.clone().into_bytes();
        changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
        let changed = String::from_utf8(changed).expect("text");
        assert!(verify(&changed, &keys, &expected()).is_err(), "{at}");
    }
    let mut other = Signer::new().key();
    other.kid = Some("two".into());
    assert_eq!(verify(&good, &[other], &expected()), Err(BadToken::Signature));
    assert_eq!(verify(&good, &[rsa()], &expected()), Err(BadToken::NoKey));
    let mut for_secrets = signer.key();
    for_secrets.purpose = Some("enc".into());
    assert_eq!(verify(&good, &[for_secrets], &expected()), Err(BadToken::NoKey));
}

#[test]
fn algorithms_that_prove_nothing_are_refused() {
    let signer = Signer::new();
    for name in ["none", "None", "HS256", "RS1", "", "ES512"] {
        let token = signer.token(&json!({"alg": name}), &claims());
        let refused = verify(&token, &[signer.key(), rsa()], &expected());
        assert_eq!(refused, Err(BadToken::Algorithm(name.into())), "{name}");
    }
    // A token for a key of one kind is not tried with another.
    let token = signer.token(&json!({"alg": "RS256", "kid": "two"}), &claims());
    assert_eq!(verify(&token, &[signer.key()], &expected()), Err(BadToken::NoKey));
    let critical = signer.token(&json!({"alg": "ES256", "crit": ["b64"], "b64": false}), &claims());
    assert!(matches!(verify(&critical, &[signer.key()], &expected()), Err(BadToken::Form(_))));
    for bad in ["", "a", "a.b", "a.b.c", "a.b.c.d", "...", "é.é.é"] {
        assert!(matches!(verify(bad, &[rsa()], &expected()), Err(BadToken::Form(_))), "{bad}");
    }
}

#[test]
fn a_token_for_others_of_another_sign_in_or_time_is_refused() {
    let signer = Signer::new();
    let with = |name: &str, value: Value| {
        let mut claims = claims();
        claims[name] = value;
        signer.verify(&claims).map(drop)
    };
    for (name, value, error) in [
        ("iss", json!("https://login.example.org/"), BadToken::Claim("iss")),
        ("iss", json!(null), BadToken::Claim("iss")),
        ("aud", json!("other"), BadToken::Claim("aud")),
        ("aud", json!([]), BadToken::Claim("aud")),
        ("aud", json!(["other", "thunder"]), BadToken::Claim("azp")),
        ("azp", json!("other"), BadToken::Claim("azp")),
        ("nonce", json!("n-1"), BadToken::Claim("nonce")),
        ("nonce", json!(null), BadToken::Claim("nonce")),
        ("exp", json!(NOW_S - SKEW_S), BadToken::Time),
        ("exp", json!("soon"), BadToken::Claim("exp")),
        ("exp", json!(null), BadToken::Claim("exp")),
        ("exp", json!(-1), BadToken::Claim("exp")),
        ("iat", json!(NOW_S + SKEW_S + 1), BadToken::Time),
        ("nbf", json!(NOW_S + SKEW_S + 1), BadToken::Time),
        ("sub", json!(""), BadToken::Claim("sub")),
        ("sub", json!("x".repeat(256)), BadToken::Claim("sub")),
    ] {
        assert_eq!(with(name, value.clone()), Err(error), "{name} {value}");
    }
    assert_eq!(with("aud", json!(["thunder"])), Ok(()));
    assert_eq!(with("exp", json!(NOW_S - SKEW_S + 1)), Ok(()));
    let mut for_both = claims();
    (for_both["aud"], for_both["azp"]) = (json!(["other", "thunder"]), json!("thunder"));
    assert!(signer.verify(&for_both).is_ok());
}

#[test]
fn an_address_that_is_not_verified_does_not_count() {
    let signer = Signer::new();
    let read = |name: &str, value: Value| {
        let mut claims = claims();
        claims[name] = value;
        signer.verify(&claims).expect("a person")
    };
    assert_eq!(read("email_verified", json!(false)).email, None);
    assert_eq!(read("email_verified", json!(null)).email.as_deref(), Some("ann@example.org"));
    assert_eq!(read("email", json!("a\u{1b}[31m@x")).email, None);
    assert_eq!(read("name", json!(["x"])).name, None);
    assert_eq!(read("groups", json!("one")).groups, ["one"]);
    assert_eq!(read("groups", json!({"a": 1})).groups, Vec::<String>::new());
}
