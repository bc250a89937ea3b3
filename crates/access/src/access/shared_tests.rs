//! Two servers: one asks the other.

use super::*;
use crate::access::Retention;
use crate::audit::Actor;
use crate::key::NewKey;
use crate::usage::Outcome;

/// Two servers: one asks the other as its only peer.
#[derive(Debug)]
struct Other(Option<Access>);

impl Peers for Other {
    fn put_key(&self, _key: &StoredKey) -> Result<(), String> {
        self.0.as_ref().map(drop).ok_or_else(|| "nobody is there".to_owned())
    }

    fn put_policy(&self, _policy: &Policy) -> Result<(), String> {
        Ok(())
    }

    fn put_keep_policy(&self, _policy: &KeepPolicy) -> Result<(), String> {
        Ok(())
    }

    fn look(&self, wanted: &Wanted) -> Vec<(String, Result<Found, String>)> {
        let found = self.0.as_ref().map(|other| other.look(wanted).map_err(|error| error.to_string()));
        vec![("bee".into(), found.unwrap_or_else(|| Err("bee cannot be reached".into())))]
    }

    fn standings(&self, _limited: &[Limited]) -> Option<Vec<Standing>> {
        None
    }
}

fn open(folder: &tempfile::TempDir) -> Access {
    // The records' times are fixed, so the records must never expire.
    let retention = Retention { records_days: u32::MAX, sums_days: u32::MAX };
    Access::open(folder.path(), retention, None).unwrap()
}

/// A record of a request that ended at this time.
fn finish(access: &Access, second: u64) {
    let mut record = crate::journal::tests::record(0);
    record.time = Time(1_795_392_000_000 + second * 1000);
    access.finish(&super::super::Caller::Open, None, record, Now::read()).wait();
    // In the store with its number.
    access.move_records().unwrap();
}

#[test]
fn lists_of_two_servers_are_one_list_whatever_the_page() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (ant, bee) = (open(&folders[0]), open(&folders[1]));
    ant.share("ant", Arc::new(Other(Some(bee.clone()))));
    bee.share("bee", Arc::new(Other(None)));
    for second in 0..30 {
        // Every third record is on the other server; two records of one moment are on both.
        if second % 3 != 0 {
            finish(&ant, second);
        }
        if second % 3 == 0 || second == 10 {
            finish(&bee, second);
        }
    }
    let filter = Filter::default();
    let (whole, missing) = ant.all_records(&filter, None, 1000).unwrap();
    assert_eq!((whole.len(), missing), (31, Vec::new()));
    let times: Vec<Time> = whole.iter().map(|record| record.time).collect();
    assert!(times.is_sorted_by(|a, b| a >= b), "{times:?}");
    for page in [1, 4, 31] {
        let (mut paged, mut before) = (Vec::new(), None);
        loop {
            let (records, _) = ant.all_records(&filter, before, page).unwrap();
            let Some(last) = records.last() else { break };
            before = Some(last.number);
            paged.extend(records);
            assert!(paged.len() <= whole.len(), "a page is given twice");
        }
        // Two records of one moment on two servers may have the same number, so a page may lack one
        // of them.
        assert!(paged.len() >= whole.len() - 1, "{page}: {} of {}", paged.len(), whole.len());
    }
    let (sums, _) = ant.all_sums(&filter, &[By::Model]).unwrap();
    assert_eq!(sums.values().map(|sums| sums.totals().requests).sum::<u64>(), 31);
    let failed = Filter { outcome: Some(Outcome::Failed), ..Filter::default() };
    assert!(ant.all_records(&failed, None, 10).unwrap().0.is_empty());
}

#[test]
fn a_server_that_does_not_answer_is_named_and_takes_no_change() {
    let folder = tempfile::tempdir().unwrap();
    let access = open(&folder);
    access.share("ant", Arc::new(Other(None)));
    finish(&access, 1);
    let (records, missing) = access.all_records(&Filter::default(), None, 10).unwrap();
    assert_eq!((records.len(), missing), (1, vec!["bee cannot be reached".to_owned()]));
    let new = NewKey { name: "ci".into(), ..NewKey::default() };
    let refused = access.create_key(new, &Actor::local(), Time(1000)).unwrap_err();
    assert!(refused.to_string().contains("nobody is there"), "{refused}");
    assert!(!access.has_keys(), "a key that others do not know is none");
}

#[test]
fn prompts_of_two_servers_are_read_at_either_and_both_note_it() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (ant, bee) = (open(&folders[0]), open(&folders[1]));
    ant.share("ant", Arc::new(Other(Some(bee.clone()))));
    bee.share("bee", Arc::new(Other(None)));
    let now = Now::read().time;
    let policy = KeepPolicy { all: true, ..KeepPolicy::default() };
    ant.set_keep_policy(policy.clone(), &Actor::local(), now).unwrap();
    bee.adopt(Shared { keep: policy, ..Shared::default() });
    bee.keep_shared().unwrap();
    for (access, id) in [(&ant, "a"), (&bee, "b")] {
        let mut record = crate::journal::tests::record(0);
        record.id = id.into();
        let keeping = access.keeps(&super::super::Caller::Open, &record.model).unwrap();
        let mut gathering = crate::Gathering::new(keeping);
        gathering.note_prompt(Vec::new());
        gathering.keep(access, &record, None);
    }
    let reader = Actor { name: "key k_1 (boss)".into(), remote: None };
    let ask = PromptsAsk { filter: Filter::default(), before: None, limit: 10 };
    let (page, missing) = ant.kept_prompts(&ask, &reader, now).unwrap();
    let found: Vec<_> =
        page.prompts.iter().map(|kept| (kept.id.as_str(), kept.node.as_deref().unwrap())).collect();
    assert_eq!((found, missing), (vec![("b", "bee"), ("a", "ant")], Vec::new()));
    let readings = |access: &Access| {
        let filter = AuditFilter { action: Some("prompts.read".into()), ..AuditFilter::default() };
        access.audit(&filter, None, 10).unwrap().into_iter().map(|(_, entry)| entry.text).collect::<Vec<_>>()
    };
    let (own, theirs) = (readings(&ant), readings(&bee));
    assert!(own.len() == 1 && own[0].contains(r#"["b","a"]"#), "{own:?}");
    assert!(theirs.len() == 1 && theirs[0].contains(r#"["b"]"#), "{theirs:?}");
    assert!(theirs[0].contains("(boss)") && theirs[0].contains(r#""at":"ant""#), "{theirs:?}");
    // A server that does not answer is named, and its texts are missing.
    let (page, missing) = bee.kept_prompts(&ask, &reader, now).unwrap();
    assert_eq!((page.prompts.len(), missing), (1, vec!["bee cannot be reached".to_owned()]));
    assert_eq!(bee.all_prompts_lost(), (0, vec!["bee cannot be reached".to_owned()]));
    assert_eq!(ant.all_prompts_lost(), (0, Vec::new()));
    // At its next start, the server follows the cluster's policy.
    drop((ant, bee));
    assert!(open(&folders[1]).keep_policy().all);
}

#[test]
fn keys_of_the_cluster_replace_the_servers_own_for_good() {
    let folder = tempfile::tempdir().unwrap();
    let new = |name: &str| NewKey { name: name.into(), ..NewKey::default() };
    let (own, shared, secret) = {
        let access = open(&folder);
        let (_, own) = access.create_key(new("own"), &Actor::local(), Time(1000)).unwrap();
        let (stored, secret) = StoredKey::create(new("shared"), "abcdefgh", Time(1000)).unwrap();
        assert!(!access.is_shared().unwrap());
        access.adopt(Shared { keys: vec![stored.clone()], ..Shared::default() });
        assert!(access.authenticate(&secret, Time(2000)).is_ok());
        assert!(access.authenticate(&own, Time(2000)).is_err());
        access.keep_shared().unwrap();
        (own, stored, secret)
    };
    let again = open(&folder);
    assert!(again.is_shared().unwrap() && again.authenticate(&secret, Time(2000)).is_ok());
    assert!(again.authenticate(&own, Time(2000)).is_err());
    assert_eq!(again.keys(), [shared.key]);
}
