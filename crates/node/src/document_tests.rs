#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::*;

fn node(number: u8) -> NodeId {
    NodeId([number; 32])
}

fn member(name: &str) -> Member {
    Member { name: name.to_owned(), ..Member::default() }
}

/// A change, by the node with the first number.
#[derive(Debug, Clone)]
enum Change {
    Member(u8, u8),
    Remove(u8),
    Model(u8, u8, bool),
    Placement(u8, u8, u64),
    Setting(u8, u8, u8),
}

fn apply(document: &mut Document, change: &Change) {
    // Refused changes (of a removed member) leave the document unchanged.
    let _ = match change.clone() {
        Change::Member(author, id) => {
            document.set_member(node(author), node(id), member(&author.to_string()))
        }
        Change::Remove(id) => document.remove_member(&node(id)),
        Change::Model(author, name, present) => {
            let wish = present.then(|| ModelWish {
                model: name.to_string(),
                nodes: vec![node(author)],
                count: None,
                ..ModelWish::default()
            });
            document.set_model(node(author), &name.to_string(), wish)
        }
        Change::Placement(author, name, generation) => {
            let placement = Placement::on(vec![node(author)], generation);
            document.set_placement(node(author), &name.to_string(), Some(placement))
        }
        Change::Setting(author, name, value) => {
            document.set_setting(node(author), &name.to_string(), Some(value.to_string()))
        }
    };
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        (0u8..3, 0u8..4).prop_map(|(author, id)| Change::Member(author, id)),
        (0u8..4).prop_map(Change::Remove),
        (0u8..3, 0u8..3, any::<bool>()).prop_map(|(author, name, there)| Change::Model(author, name, there)),
        (0u8..3, 0u8..3, 0u64..3).prop_map(|(author, name, number)| Change::Placement(author, name, number)),
        (0u8..3, 0u8..3, 0u8..3).prop_map(|(author, name, value)| Change::Setting(author, name, value)),
    ];
    prop::collection::vec(change, 0..12)
}

fn document(changes: &[Change]) -> Document {
    let mut document = Document::default();
    changes.iter().for_each(|change| apply(&mut document, change));
    document
}

fn merged(one: &Document, two: &Document) -> Document {
    let mut both = one.clone();
    both.merge(two);
    both
}

proptest! {
    /// The three laws that make all nodes end with the same document.
    #[test]
    fn merging_does_not_depend_on_order_or_repetition(a in changes(), b in changes(), c in changes()) {
        let (a, b, c) = (document(&a), document(&b), document(&c));
        prop_assert_eq!(merged(&a, &b), merged(&b, &a));
        prop_assert_eq!(merged(&merged(&a, &b), &c), merged(&a, &merged(&b, &c)));
        prop_assert_eq!(merged(&a, &a), a.clone());
        let both = merged(&a, &b);
        prop_assert!(both.includes(&a) && both.includes(&b));
        prop_assert_eq!(merged(&a, &b).digest(), merged(&b, &a).digest());
    }

    #[test]
    fn merge_says_whether_it_changed_anything(a in changes(), b in changes()) {
        let (a, b) = (document(&a), document(&b));
        let mut both = a.clone();
        prop_assert_eq!(both.merge(&b), both != a);
        prop_assert_eq!(a.digest() == both.digest(), a == both);
    }

    #[test]
    fn a_removed_key_stays_removed(a in changes(), b in changes(), id in 0u8..4) {
        let mut removed = document(&a);
        let _ = removed.set_member(node(9), node(id), member("x"));
        let _ = removed.remove_member(&node(id));
        let mut both = merged(&removed, &document(&b));
        prop_assert!(both.is_removed(&node(id)) && both.member(&node(id)).is_none());
        prop_assert_eq!(
            both.set_member(node(9), node(id), member("x")),
            Err(DocumentError::Removed(node(id)))
        );
    }

    #[test]
    fn a_document_is_the_same_after_its_json(a in changes()) {
        let document = document(&a);
        let json = serde_json::to_vec(&document).unwrap();
        prop_assert_eq!(serde_json::from_slice::<Document>(&json).unwrap(), document);
    }
}

#[test]
fn a_later_write_wins_on_every_node() {
    let mut one = Document::default();
    one.set_setting(node(2), "a", Some("first".into())).unwrap();
    let mut two = one.clone();
    // The author with the smaller key writes later and wins, because it has seen the other's write.
    two.set_setting(node(1), "a", Some("second".into())).unwrap();
    assert!(one.merge(&two) && !two.merge(&one));
    assert_eq!(one.setting("a"), Some("second"));
    two.set_setting(node(1), "a", None).unwrap();
    one.merge(&two);
    assert_eq!(one.setting("a"), None);
}

#[test]
fn limits_are_named() {
    let mut document = Document::default();
    for number in 0..MOST_MEMBERS {
        document.set_member(node(0), NodeId([number as u8; 32]), member("x")).unwrap();
    }
    let error = document.set_member(node(0), node(200), member("x")).unwrap_err().to_string();
    assert!(error.contains("64 members"), "{error}");
    // A full cluster can change its members, and can add new ones after others were removed.
    document.set_member(node(0), node(1), member("y")).unwrap();
    document.remove_member(&node(1)).unwrap();
    document.set_member(node(0), node(200), member("x")).unwrap();
    let error = document.set_setting(node(0), "a", Some("x".repeat(5000))).unwrap_err().to_string();
    assert!(error.contains("5000"), "{error}");
    let long = ModelWish {
        model: "x".repeat(5000),
        nodes: Vec::new(),
        count: None,
        arguments: Vec::new(),
        ..ModelWish::default()
    };
    assert!(document.set_model(node(0), "m", Some(long)).is_err());
}

#[test]
fn fields_of_a_newer_version_are_kept_and_passed_on() {
    let me = node(1);
    let mut document = Document::default();
    document.set_member(me, me, Member::default()).unwrap();
    document.set_model(me, "m", Some(ModelWish { model: "m".into(), ..ModelWish::default() })).unwrap();
    document.set_placement(me, "m", Some(Placement::on(vec![me], 1))).unwrap();
    // As a newer version would write it.
    let mut json = serde_json::to_value(&document).unwrap();
    json["models"]["m"]["value"]["colour"] = serde_json::json!({ "z": [1, 2.5], "a": null });
    json["placements"]["m"]["value"]["mood"] = "calm".into();
    json["members"][me.to_string()]["member"]["value"]["badge"] = 7.into();
    let newer: Document = serde_json::from_value(json.clone()).unwrap();
    assert_eq!(serde_json::to_value(&newer).unwrap(), json);
    let bytes = serde_json::to_vec(&json).unwrap();
    let again: Document = serde_json::from_slice(&bytes).unwrap();
    assert_eq!((again.digest(), &again), (newer.digest(), &newer));
    // The later write has these fields, and they count in a merge.
    assert!(document.merge(&newer) && document == newer);
}
