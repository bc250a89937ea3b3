use serde_json::json;

use super::*;
use crate::audit::Actor;
use crate::key::{KeyChange, NewKey};
use crate::limits::{LimitKind, Limits, ModelPolicy, Price};
use crate::store::AuditFilter;
use crate::usage::By;
use crate::{Restored, restore, time::DAY_MS};

const MODEL: &str = "org/model";

fn now() -> Now {
    Now { steady_ms: 1000, time: "2026-11-23T08:30:00Z".parse().unwrap() }
}

fn open(folder: &Path) -> Access {
    // The thread that removes old records reads the machine's clock.
    let retention = Retention { records_days: u32::MAX, sums_days: u32::MAX };
    Access::open_at(folder, retention, None, now()).unwrap()
}

fn new(name: &str) -> NewKey {
    NewKey { name: name.into(), ..NewKey::default() }
}

fn record(outcome: Outcome, prompt_tokens: u64, completion_tokens: u64) -> UsageRecord {
    UsageRecord {
        outcome,
        prompt_tokens,
        completion_tokens,
        cached_tokens: 0,
        cost_nanos: 0,
        time: now().time,
        key: None,
        key_id: None,
        team: None,
        ..crate::journal::tests::record(0)
    }
}

fn ask(prompt_tokens: u64, answer_tokens: u64) -> Ask {
    Ask { prompt_tokens, answer_tokens: Some(answer_tokens), answers: 1, ..Ask::default() }
}

#[test]
fn a_keys_life() {
    let folder = tempfile::tempdir().unwrap();
    let (actor, time) = (Actor::local(), now().time);
    let access = open(folder.path());
    assert!(!access.has_keys());
    let (key, secret) = access.create_key(new("ci"), &actor, time).unwrap();
    let opens =
        |access: &Access, secret: &str, at: Time| access.authenticate(secret, at).map(|caller| caller.role());
    assert_eq!(opens(&access, &secret, time), Ok(Role::User));
    for wrong in
        ["", "th-", &secret[..secret.len() - 1], &secret.replace("th-", "th_"), &format!("{secret}x")]
    {
        assert_eq!(opens(&access, wrong, time), Err(AuthError::Unknown), "{wrong}");
    }
    assert!(matches!(access.create_key(new("ci"), &actor, time), Err(AccessError::KeyExists(_))));
    // Only one process at a time can open the folder.
    assert!(matches!(Access::open(folder.path(), Retention::default(), None), Err(AccessError::InUse(_))));
    let (_, second) = access.rotate_key("ci", 60, &actor, time).unwrap();
    // Without a grace time, the former secret ends at once.
    let brief = access.create_key(new("brief"), &actor, time).unwrap().1;
    let (key_of_brief, next) = access.rotate_key("brief", 0, &actor, time).unwrap();
    assert_eq!((opens(&access, &brief, time), key_of_brief.grace_until), (Err(AuthError::Unknown), None));
    assert!(opens(&access, &next, time).is_ok());
    access.revoke_key("brief", &actor, time).unwrap();
    let later = Time(time.0 + 60_000);
    assert!(opens(&access, &secret, time).is_ok() && opens(&access, &second, time).is_ok());
    assert_eq!(opens(&access, &secret, later), Err(AuthError::Unknown));
    let change: KeyChange = serde_json::from_value(json!({"expires": "2026-11-24"})).unwrap();
    access.change_key(&key.id, change.clone(), &actor, time).unwrap();
    // What changes nothing is no act: neither the same again, nor a change of nothing.
    access.change_key(&key.id, change, &actor, time).unwrap();
    access.change_key(&key.id, KeyChange::default(), &actor, time).unwrap();
    let expired = opens(&access, &second, Time(time.0 + DAY_MS)).unwrap_err();
    assert!(matches!(expired, AuthError::Expired { .. }));
    drop(access);
    let access = open(folder.path());
    assert!(access.has_keys() && opens(&access, &second, time).is_ok());
    access.revoke_key("ci", &actor, time).unwrap();
    assert!(matches!(opens(&access, &second, time), Err(AuthError::Revoked { .. })));
    // The name can be used again, the key cannot.
    assert!(matches!(access.rotate_key(&key.id, 0, &actor, time), Err(AccessError::Revoked(_))));
    access.create_key(new("ci"), &actor, time).unwrap();
    assert!(access.has_keys() && access.key("ci", time).unwrap().id != key.id);
    let actions: Vec<String> = access
        .audit(&AuditFilter::default(), None, 100)
        .unwrap()
        .iter()
        .map(|(_, sealed)| serde_json::from_str::<crate::Entry>(&sealed.text).unwrap().action)
        .collect();
    let all =
        ["key.create", "key.revoke", "key.update", "key.revoke", "key.rotate", "key.create", "key.rotate"];
    assert_eq!(actions, [&all[..], &["key.create"]].concat());
    assert_eq!(access.verify_audit().unwrap().entries, 8);
    // Administrators see no secret and no hash of a secret.
    let shown = format!("{:?} {:?}", access.keys(), access.audit(&AuditFilter::default(), None, 100));
    assert!(![&secret, &second].iter().any(|secret| shown.contains(&secret["th-".len() + 9..])));
}

#[test]
fn the_last_admin_key_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (access, time) = (open(folder.path()), now().time);
    let admin = |name: &str| NewKey { role: Role::Admin, ..new(name) };
    access.create_key(admin("ann"), &Actor::local(), time).unwrap();
    let remote = Actor { name: "key k_1 (ann)".into(), remote: Some("10.0.0.5".into()) };
    assert!(matches!(access.revoke_key("ann", &remote, time), Err(AccessError::LastAdmin(_))));
    let demote = || serde_json::from_value::<KeyChange>(json!({"role": "user"})).unwrap();
    assert!(matches!(access.change_key("ann", demote(), &remote, time), Err(AccessError::LastAdmin(_))));
    access.create_key(admin("bob"), &remote, time).unwrap();
    access.change_key("ann", demote(), &remote, time).unwrap();
    assert!(matches!(access.revoke_key("bob", &remote, time), Err(AccessError::LastAdmin(_))));
    access.revoke_key("bob", &Actor::local(), time).unwrap();
}

#[test]
fn usage_is_summed_priced_and_there_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let access = open(folder.path());
    let price = Price { input: 1.0, cached: None, output: 10.0 };
    let mut policy = Policy { currency: Some("EUR".into()), ..Policy::default() };
    policy.models.insert("model".into(), ModelPolicy { price: Some(price), ..ModelPolicy::default() });
    let read = access.policy().version();
    access.set_policy(policy.clone(), Some(&read), &Actor::local(), now().time).unwrap();
    // Another administrator has read them before this change.
    let other = Policy { currency: Some("USD".into()), ..policy.clone() };
    let late = access.set_policy(other, Some(&read), &Actor::local(), now().time);
    assert!(matches!(late, Err(AccessError::PolicyChanged)), "{late:?}");
    assert_eq!(*access.policy(), policy);
    // Limits that allow the same are no act: neither the same again, nor a team without settings.
    let acts = |access: &Access| access.audit(&AuditFilter::default(), None, 100).unwrap().len();
    let before = acts(&access);
    let mut same = policy.clone();
    same.teams.insert("empty".into(), Default::default());
    for unchanged in [policy.clone(), same] {
        access.set_policy(unchanged, None, &Actor::local(), now().time).unwrap();
    }
    assert_eq!(acts(&access), before);
    let lab = NewKey {
        team: Some("lab".into()),
        limits: Limits { tokens_per_day: Some(1000), ..Limits::default() },
        ..new("ci")
    };
    let (_, secret) = access.create_key(lab, &Actor::local(), now().time).unwrap();
    let caller = access.authenticate(&secret, now().time).unwrap();
    for _ in 0..3 {
        let reservation = access.begin(&caller, MODEL, &ask(100, 50), now()).unwrap();
        access.finish(&caller, Some(reservation), record(Outcome::Stop, 100, 20), now()).wait();
    }
    access.finish(&caller, None, UsageRecord { status: 429, ..record(Outcome::Refused, 0, 0) }, now()).wait();
    let check = |access: &Access| {
        let groups = access.sums(&Filter::default(), &[By::Team, By::Day]).unwrap();
        let totals = groups[&vec![Some("lab".to_owned()), Some("2026-11-23".to_owned())]].totals();
        assert_eq!(
            (totals.requests, totals.refused, totals.prompt_tokens, totals.completion_tokens),
            (3, 1, 300, 60)
        );
        // 100 × 1 + 20 × 10 per million, three times.
        assert!((totals.cost - 0.0009).abs() < 1e-12);
        let records =
            access.records(&Filter { key: Some("ci".into()), ..Filter::default() }, None, 3).unwrap();
        assert_eq!(records.iter().map(|record| record.number).collect::<Vec<_>>(), [4, 3, 2]);
        let standing = &access.standings(&caller, None, now())[0];
        assert_eq!((standing.limit, standing.used, standing.left), (LimitKind::TokensPerDay, 360.0, 640.0));
    };
    check(&access);
    drop(access);
    check(&open(folder.path()));
}

#[test]
fn a_backup_restores_everything_and_damage_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let access = open(&folder.path().join("a"));
    let (key, secret) = access.create_key(new("ci"), &Actor::local(), now().time).unwrap();
    let caller = access.authenticate(&secret, now().time).unwrap();
    (0..50).for_each(|_| access.finish(&caller, None, record(Outcome::Length, 7, 3), now()).wait());
    std::fs::write(folder.path().join("a/config.toml"), "port = 1").unwrap();
    let file = folder.path().join("backup");
    let report = access.backup(&file, now().time).unwrap();
    assert_eq!((report.keys, report.records, report.audit, report.files), (1, 50, 1, 1));
    let to = folder.path().join("b");
    // A configuration that the operator wrote there is not silently lost.
    std::fs::create_dir(&to).unwrap();
    std::fs::write(to.join("config.toml"), "port = 2").unwrap();
    let refused = restore(&file, &to, false).unwrap_err().to_string();
    assert!(refused.contains("differ from the backup's (config.toml)"), "{refused}");
    let left: Vec<_> = std::fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["config.toml"], "nothing was begun");
    let replaced = vec!["config.toml".to_owned()];
    assert_eq!(restore(&file, &to, true).unwrap(), Restored { report, replaced });
    let restored = open(&to);
    assert_eq!(restored.keys(), [key]);
    assert!(restored.authenticate(&secret, now().time).is_ok());
    assert_eq!(
        restored.sums(&Filter::default(), &[By::Key]).unwrap(),
        access.sums(&Filter::default(), &[By::Key]).unwrap()
    );
    assert_eq!(restored.verify_audit().unwrap().head, access.verify_audit().unwrap().head);
    assert_eq!(std::fs::read_to_string(to.join("config.toml")).unwrap(), "port = 1");
    // A new record does not take an old number.
    restored.finish(&caller, None, record(Outcome::Stop, 1, 1), now()).wait();
    assert_eq!(restored.records(&Filter::default(), None, 1).unwrap()[0].number, 51);
    assert!(matches!(restore(&file, &to, true), Err(AccessError::System { .. })), "over a store");
    let whole = std::fs::read(&file).unwrap();
    let damaged = folder.path().join("damaged");
    for (cut, flip) in
        [(whole.len() - 40, false), (whole.len() / 2, false), (whole.len() / 2, true), (0, false)]
    {
        let mut bytes = whole.clone();
        if flip {
            bytes[cut] ^= 1
        } else {
            bytes.truncate(cut)
        }
        std::fs::write(&damaged, bytes).unwrap();
        let refused = restore(&damaged, &folder.path().join("c"), false);
        assert!(matches!(refused, Err(AccessError::BadBackup { .. })), "{cut} {refused:?}");
    }
    assert!(!folder.path().join("c").exists());
    // A file with the same content is not a difference.
    std::fs::create_dir(folder.path().join("d")).unwrap();
    std::fs::write(folder.path().join("d/config.toml"), "port = 1").unwrap();
    let same = restore(&file, &folder.path().join("d"), false).unwrap();
    assert_eq!(same, Restored { report, replaced: Vec::new() });
}

#[test]
fn old_usage_is_forgotten_and_sums_stay() {
    let folder = tempfile::tempdir().unwrap();
    let access = open(folder.path());
    let old = UsageRecord { time: Time(now().time.0 - 40 * DAY_MS), ..record(Outcome::Stop, 10, 10) };
    access.finish(&Caller::Open, None, old, now()).wait();
    access.finish(&Caller::Open, None, record(Outcome::Stop, 10, 10), now()).wait();
    access.move_records().unwrap();
    let before = |days: u64| Time(now().time.0 - days * DAY_MS);
    assert_eq!(access.0.store.forget(before(30), before(1100)).unwrap(), 1);
    assert_eq!(access.records(&Filter::default(), None, 9).unwrap().len(), 1);
    assert_eq!(access.sums(&Filter::default(), &[]).unwrap()[&vec![]].totals().requests, 2);
    access.0.store.forget(before(30), before(35)).unwrap();
    assert_eq!(access.sums(&Filter::default(), &[]).unwrap()[&vec![]].totals().requests, 1);
}

#[test]
fn each_reading_of_kept_prompts_is_in_the_audit_log() {
    let folder = tempfile::tempdir().unwrap();
    let access = open(folder.path());
    assert!(access.keeps(&Caller::Open, "org/model").is_none(), "nothing is kept by default");
    let policy = crate::KeepPolicy { all: true, ..Default::default() };
    access.set_keep_policy(policy.clone(), &Actor::local(), now().time).unwrap();
    let keeping = access.keeps(&Caller::Open, "org/model").unwrap();
    let text = |text: &str| vec![crate::KeptText { role: "user".into(), choice: None, text: text.into() }];
    let UsageRecord { time, key, key_id, owner, team, model, api, outcome, .. } = record(Outcome::Stop, 1, 1);
    let (prompt, answer) = (text("a question"), text("an answer"));
    let kept = crate::KeptPrompt {
        id: "chatcmpl-7".into(),
        time,
        key,
        key_id,
        owner,
        team,
        model,
        api,
        outcome,
        node: None,
        prompt,
        answer,
        is_cut: false,
        redacted: 0,
    };
    access.keep(&keeping, kept.clone());
    let reader = Actor { name: "key k_1 (boss)".into(), remote: Some("10.0.0.9".into()) };
    let ask = crate::PromptsAsk { filter: Filter::default(), before: None, limit: 10 };
    let (page, missing) = access.kept_prompts(&ask, &reader, now().time).unwrap();
    assert_eq!((page.prompts, page.has_more, missing), (vec![kept], false, Vec::new()));
    let entries = access.audit(&AuditFilter::default(), None, 10).unwrap();
    let entry: serde_json::Value = serde_json::from_str(&entries[0].1.text).unwrap();
    assert_eq!((&entry["action"], &entry["actor"]), (&"prompts.read".into(), &"key k_1 (boss)".into()));
    assert_eq!(entry["details"]["found"], 1);
    assert_eq!(entry["details"]["ids"][0], "chatcmpl-7");
    let entry: serde_json::Value = serde_json::from_str(&entries[1].1.text).unwrap();
    assert_eq!(entry["action"], "prompts.policy");
    access.verify_audit().unwrap();
    // The policy outlives the server.
    drop(access);
    assert_eq!(open(folder.path()).keep_policy(), policy);
}

#[test]
fn a_spent_budget_is_refused_in_its_currency() {
    let folder = tempfile::tempdir().unwrap();
    let access = open(folder.path());
    let price = Price { input: 1.0, cached: None, output: 10.0 };
    let mut policy = Policy { currency: Some("GBP".into()), ..Policy::default() };
    policy.models.insert("model".into(), ModelPolicy { price: Some(price), ..ModelPolicy::default() });
    access.set_policy(policy.clone(), None, &Actor::local(), now().time).unwrap();
    let limits = Limits { cost_per_month: Some(0.0001), parallel_requests: Some(1), ..Limits::default() };
    let (_, secret) = access.create_key(NewKey { limits, ..new("ci") }, &Actor::local(), now().time).unwrap();
    let caller = access.authenticate(&secret, now().time).unwrap();
    let refused = access.begin(&caller, MODEL, &ask(100, 50), now()).unwrap_err().to_string();
    assert!(
        refused.contains("0.0001 GBP cost a month") && refused.contains("may cost (0.0006 GBP)"),
        "{refused}"
    );
    policy.currency = None;
    access.set_policy(policy, None, &Actor::local(), now().time).unwrap();
    let refused = access.begin(&caller, MODEL, &ask(100, 50), now()).unwrap_err().to_string();
    assert!(refused.contains("0.0001 cost a month"), "{refused}");
    // No other limit is money.
    let _held = access.begin(&caller, MODEL, &ask(1, 1), now()).unwrap();
    let refused = access.begin(&caller, MODEL, &ask(1, 1), now()).unwrap_err().to_string();
    assert!(refused.contains("limit of 1 requests at a time"), "{refused}");
}
