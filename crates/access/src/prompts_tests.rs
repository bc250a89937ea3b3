use super::kept::MOST_BYTES;
use super::*;
use crate::usage::{Filter, Outcome};

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
        node: None,
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

/// At most `limit` prompts that fit.
fn read(prompts: &Prompts, filter: &Filter, limit: usize) -> Result<Vec<KeptPrompt>, AccessError> {
    let ask = PromptsAsk { filter: filter.clone(), before: None, limit };
    prompts.read(&ask).map(|page| page.prompts)
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
    assert_eq!(read(&prompts, &Filter::default(), 10).unwrap(), []);
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
    let found = read(&prompts, &Filter::default(), 10).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].prompt[0].text, "pay with [card], the secret plan");
    assert_eq!((found[0].answer[0].text.as_str(), found[0].redacted), ("the answer to [email]", 2));
    for text in ["4111", "secret plan", "the answer", "ann@example", "org/model"] {
        assert!(!holds(folder.path(), text), "{text} is on the disk");
    }
    drop(prompts);
    // Another key, then none.
    let key = folder.path().join(KEY);
    let right = std::fs::read(&key).unwrap();
    std::fs::write(&key, "5e".repeat(32)).unwrap();
    let prompts = Prompts::new(folder.path(), everything()).unwrap();
    let refused = read(&prompts, &Filter::default(), 10).unwrap_err().to_string();
    assert!(refused.contains("another key"), "{refused}");
    std::fs::remove_file(&key).unwrap();
    assert!(read(&prompts, &Filter::default(), 10).is_err());
    let refused = prompts.prepare(&everything()).unwrap_err().to_string();
    assert!(refused.contains("texts that it encrypted"), "no new key over old texts: {refused}");
    // The key may lie elsewhere.
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::write(elsewhere.path().join("key"), right).unwrap();
    prompts.use_key(elsewhere.path().join("key"));
    assert_eq!(read(&prompts, &Filter::default(), 10).unwrap(), found);
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
        read(&prompts, filter, limit).unwrap().into_iter().map(|one| one.id).collect()
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
        read(&reopened(), &Filter::default(), 10).unwrap().into_iter().map(|one| one.id).collect();
    assert_eq!(ids, ["b", "a"]);
    // The same record twice: its number is authenticated.
    std::fs::write(&path, [whole.clone(), whole.clone()].concat()).unwrap();
    let refused = read(&reopened(), &Filter::default(), 10).unwrap_err().to_string();
    assert!(refused.contains("record 1 was changed"), "{refused}");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    std::fs::write(&path, flipped).unwrap();
    assert!(read(&reopened(), &Filter::default(), 10).is_err());
}

#[test]
fn long_texts_are_cut_after_they_were_redacted() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = open(folder.path(), everything());
    let long = format!("{}é 4111111111111111", "x".repeat(MOST_BYTES - 3));
    keep(&prompts, kept("a", NOW, &long));
    let found = read(&prompts, &Filter::default(), 1).unwrap().remove(0);
    assert!(found.is_cut && found.prompt[0].text.len() <= MOST_BYTES, "{}", found.prompt[0].text.len());
    assert!(!found.prompt[0].text.contains("411") && found.answer[0].text.is_empty());
}

#[test]
fn pages_of_several_servers_are_one_list_without_holes() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let servers = [0, 1].map(|nth: usize| open(folders[nth].path(), everything()));
    // Two texts of each moment, one on each server or both on one; the last ones are of the day
    // before.
    for nth in 0..40u64 {
        let one = kept(&format!("{nth:02}"), Time(NOW.0 - if nth < 9 { DAY_MS } else { 0 } + nth / 2), "hi");
        keep(&servers[usize::from(nth % 3 == 0)], one);
    }
    for limit in [1, 3, 7, 40] {
        let (mut ids, mut before) = (Vec::new(), None);
        loop {
            let ask = PromptsAsk { filter: Filter::default(), before, limit };
            let page = KeptPage::merge(servers.iter().map(|one| one.read(&ask).unwrap()).collect(), limit);
            assert!(page.prompts.len() <= limit);
            ids.extend(page.prompts.iter().map(|one| one.id.clone()));
            let Some(next) = page.next() else { break };
            assert_eq!(next.to_string().parse(), Ok(next.clone()));
            before = Some(next);
        }
        let expected: Vec<String> = (0..40).rev().map(|nth| format!("{nth:02}")).collect();
        assert_eq!(ids, expected, "{limit} at a time");
    }
    for text in ["", "x/y", "2026-11-25T10:00:00Z"] {
        assert!(text.parse::<Place>().is_err(), "{text}");
    }
}

#[test]
fn a_page_of_long_texts_ends_early_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = open(folder.path(), everything());
    let count = MOST_READ_BYTES / MOST_BYTES + 3;
    for nth in 0..count {
        keep(&prompts, kept(&nth.to_string(), Time(NOW.0 + nth as u64), &"x".repeat(MOST_BYTES)));
    }
    let page = prompts.read(&PromptsAsk { filter: Filter::default(), before: None, limit: 1000 }).unwrap();
    assert!(page.has_more && page.prompts.len() == MOST_READ_BYTES / MOST_BYTES, "{}", page.prompts.len());
    assert_eq!(page.prompts[0].id, (count - 1).to_string());
}

#[test]
fn a_policy_of_another_version_keeps_nothing_and_removes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = open(folder.path(), KeepPolicy { days: 90, ..everything() });
    keep(&prompts, kept("a", Time(NOW.0 - 60 * DAY_MS), "old"));
    prompts.follow(KeepPolicy { patterns: vec!["(".into()], ..everything() });
    assert!(!prompts.policy().is_on() && prompts.keeps(None, "org/model").is_none());
    assert_eq!(prompts.forget(NOW).unwrap(), 0);
    assert_eq!(read(&prompts, &Filter::default(), 10).unwrap().len(), 1);
}

#[test]
fn parts_of_an_answer_become_whole_texts() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = open(folder.path(), everything());
    let mut gathering = Gathering::new(prompts.keeps(None, "m").unwrap());
    let part = |choice, role: &str, text: &str, begins| KeptPart {
        choice,
        role: role.into(),
        text: text.into(),
        begins,
    };
    for one in [
        part(0, "thinking", "hm", false),
        part(0, "assistant", "ann@", false),
        part(1, "assistant", "other", false),
        part(0, "assistant", "example.org", false),
        part(0, "call", "look", true),
        part(0, "call", "{\"a\":", false),
        part(0, "call", " 1}", false),
        part(0, "call", "look", true),
    ] {
        gathering.note(one);
    }
    let texts: Vec<_> =
        gathering.answer.iter().map(|one| (one.choice, one.role.as_str(), one.text.as_str())).collect();
    assert_eq!(
        texts,
        [
            (Some(0), "thinking", "hm"),
            (Some(0), "assistant", "ann@example.org"),
            (Some(1), "assistant", "other"),
            (Some(0), "call", "look {\"a\": 1}"),
            (Some(0), "call", "look"),
        ]
    );
}
