use super::*;

const DAY_MS: u64 = crate::time::DAY_MS;
const NOW: Time = Time(1_795_608_000_000);

fn kept(id: &str, time: Time, question: &str) -> KeptPrompt {
    let text = |role: &str, text: &str| KeptText { role: role.into(), choice: None, text: text.into() };
    KeptPrompt {
        id: id.into(),
        time,
        key: Some("ci".into()),
        key_id: Some("k_1".into()),
        owner: None,
        team: Some("lab".into()),
        model: "org/model".into(),
        api: "/v1/chat/completions".into(),
        outcome: Outcome::Stop,
        prompt: vec![text("user", question)],
        answer: vec![text("assistant", "the answer to ann@example.org")],
        is_cut: false,
        redacted: 0,
    }
}

fn everything() -> KeepPolicy {
    KeepPolicy { all: true, ..KeepPolicy::default() }
}

fn open(folder: &Path, policy: KeepPolicy) -> Prompts {
    let prompts = Prompts::new(folder, policy.clone()).unwrap();
    prompts.prepare(&policy).unwrap();
    prompts
}

fn keep(prompts: &Prompts, one: KeptPrompt) {
    let keeping = prompts.keeps(None, &one.model).expect("the policy covers it");
    prompts.keep(&keeping, one);
}

/// Everything that is in a folder's files.
fn contents(folder: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => all.extend(contents(&path)),
            false => all.extend(std::fs::read(&path).unwrap()),
        }
    }
    all
}

fn holds(folder: &Path, text: &str) -> bool {
    contents(folder).windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn nothing_is_kept_unless_a_policy_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = open(folder.path(), KeepPolicy::default());
    assert!(prompts.keeps(None, "org/model").is_none());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "not even a key");
    assert_eq!(prompts.read(&Filter::default(), 10).unwrap(), []);
}

#[test]
fn a_policy_covers_its_keys_teams_and_models() {
    let key = |name: &str, lookup: &str, team: Option<&str>| {
        let new = crate::NewKey { name: name.into(), team: team.map(str::to_owned), ..Default::default() };
        crate::StoredKey::create(new, lookup, NOW).unwrap().0.key
    };
    let (ann, bob) = (key("ann", "abcdefgh", Some("lab")), key("bob", "ijklmnop", None));
    let policy = |keys: &[&str], teams: &[&str], models: &[&str]| {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        KeepPolicy { keys: list(keys), teams: list(teams), models: list(models), ..KeepPolicy::default() }
    };
    for (policy, expected) in [
        (policy(&[], &[], &[]), [false, false, false]),
        (policy(&["ann"], &[], &[]), [true, false, false]),
        (policy(&[&bob.id], &[], &[]), [false, true, false]),
        (policy(&[], &["lab"], &[]), [true, false, false]),
        (policy(&[], &[], &["model"]), [true, true, true]),
        (policy(&[], &[], &["org/model"]), [true, true, true]),
        (policy(&[], &[], &["other"]), [false, false, false]),
        (everything(), [true, true, true]),
    ] {
        let covered = [Some(&ann), Some(&bob), None].map(|key| policy.covers(key, "org/model"));
        assert_eq!(covered, expected, "{policy:?}");
        assert_eq!(policy.is_on(), policy != KeepPolicy::default());
    }
    assert_eq!(KeepPolicy { days: 0, ..everything() }.check().unwrap_err(), BadKeepPolicy::Days(0));
}

#[test]
fn what_is_kept_is_redacted_and_unreadable_without_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = open(folder.path(), everything());
    keep(&prompts, kept("a", NOW, "pay with 4111 1111 1111 1111, the secret plan"));
    let read = prompts.read(&Filter::default(), 10).unwrap();
    assert_eq!(read.len(), 1);
    assert_eq!(read[0].prompt[0].text, "pay with [card], the secret plan");
    assert_eq!((read[0].answer[0].text.as_str(), read[0].redacted), ("the answer to [email]", 2));
    for text in ["4111", "secret plan", "the answer", "ann@example", "org/model"] {
        assert!(!holds(folder.path(), text), "{text} is on the disk");
    }
    drop(prompts);
    // Another key, then none.
    let key = folder.path().join(KEY);
    let right = std::fs::read(&key).unwrap();
    std::fs::write(&key, "5e".repeat(32)).unwrap();
    let prompts = Prompts::new(folder.path(), everything()).unwrap();
    let refused = prompts.read(&Filter::default(), 10).unwrap_err().to_string();
    assert!(refused.contains("another key"), "{refused}");
    std::fs::remove_file(&key).unwrap();
    assert!(prompts.read(&Filter::default(), 10).is_err());
    let refused = prompts.prepare(&everything()).unwrap_err().to_string();
    assert!(refused.contains("texts that it encrypted"), "no new key over old texts: {refused}");
    // The key may lie elsewhere.
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::write(elsewhere.path().join("key"), right).unwrap();
    prompts.use_key(elsewhere.path().join("key"));
    assert_eq!(prompts.read(&Filter::default(), 10).unwrap(), read);
}

#[test]
fn texts_are_found_by_filter_newest_first_and_gone_after_their_days() {
    let folder = tempfile::tempdir().unwrap();
    let policy = KeepPolicy { days: 2, ..everything() };
    let prompts = open(folder.path(), policy);
    for day in 0..5u64 {
        for nth in 0..3 {
            let time = Time(NOW.0 - day * DAY_MS + nth);
            let mut one = kept(&format!("{day}-{nth}"), time, "hello");
            one.team = (nth == 1).then(|| "lab".to_owned());
            keep(&prompts, one);
        }
    }
    let ids = |filter: &Filter, limit| -> Vec<String> {
        prompts.read(filter, limit).unwrap().into_iter().map(|one| one.id).collect()
    };
    assert_eq!(ids(&Filter::default(), 4), ["0-2", "0-1", "0-0", "1-2"]);
    assert_eq!(ids(&Filter::default(), 100).len(), 15);
    let lab = Filter { team: Some("lab".into()), ..Filter::default() };
    assert_eq!(ids(&lab, 2), ["0-1", "1-1"]);
    let since = Filter { since: Some(Time(NOW.0 - DAY_MS + 1)), ..Filter::default() };
    assert_eq!(ids(&since, 100), ["0-2", "0-1", "0-0", "1-2", "1-1"]);
    assert_eq!(prompts.forget(NOW).unwrap(), 2);
    assert_eq!(ids(&Filter::default(), 100).len(), 9);
    assert_eq!(prompts.forget(Time(NOW.0 + 10 * DAY_MS)).unwrap(), 3);
    assert!(ids(&Filter::default(), 100).is_empty());
    assert_eq!(std::fs::read_dir(folder.path().join(FOLDER)).unwrap().count(), 0);
}

#[test]
fn a_torn_record_is_dropped_and_a_changed_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let reopened = || open(folder.path(), everything());
    keep(&reopened(), kept("a", NOW, "one"));
    let path = folder.path().join(FOLDER).join(format!("{}.sealed", NOW.date()));
    let whole = std::fs::read(&path).unwrap();
    let mut torn = whole.clone();
    torn.extend_from_slice(&whole[..whole.len() / 2]);
    std::fs::write(&path, torn).unwrap();
    keep(&reopened(), kept("b", NOW, "two"));
    let ids: Vec<String> =
        reopened().read(&Filter::default(), 10).unwrap().into_iter().map(|one| one.id).collect();
    assert_eq!(ids, ["b", "a"]);
    // The same record twice: its number is authenticated.
    std::fs::write(&path, [whole.clone(), whole.clone()].concat()).unwrap();
    let refused = reopened().read(&Filter::default(), 10).unwrap_err().to_string();
    assert!(refused.contains("record 1 was changed"), "{refused}");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    std::fs::write(&path, flipped).unwrap();
    assert!(reopened().read(&Filter::default(), 10).is_err());
}

#[test]
fn long_texts_are_cut_after_they_were_redacted() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = open(folder.path(), everything());
    let long = format!("{}é 4111111111111111", "x".repeat(MOST_BYTES - 3));
    keep(&prompts, kept("a", NOW, &long));
    let read = prompts.read(&Filter::default(), 1).unwrap().remove(0);
    assert!(read.is_cut && read.prompt[0].text.len() <= MOST_BYTES, "{}", read.prompt[0].text.len());
    assert!(!read.prompt[0].text.contains("411") && read.answer[0].text.is_empty());
}
