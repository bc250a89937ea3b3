#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::document::Member;

fn node(number: u8) -> NodeId {
    NodeId([number; 32])
}

const MS: Duration = Duration::from_millis(1);

fn cluster(members: u8) -> Document {
    let mut document = Document::default();
    for number in 1..=members {
        let member = Member { name: number.to_string(), ..Member::default() };
        document.set_member(node(1), node(number), member).unwrap();
    }
    document
}

fn start(me: u8, boot: u64, document: &Document) -> Membership {
    Membership::new(node(me), boot, document.clone(), Timing::default())
}

fn drain(node: &mut Membership) -> Vec<Output> {
    std::iter::from_fn(|| node.poll()).collect()
}

fn events(node: &mut Membership) -> Vec<Event> {
    let event = |output| if let Output::Event(event) = output { Some(event) } else { None };
    drain(node).into_iter().filter_map(event).collect()
}

fn heartbeat(of: &Membership) -> Message {
    of.heartbeat()
}

#[test]
fn a_peer_is_up_when_heard_and_down_when_silent() {
    let document = cluster(2);
    let (mut one, two) = (start(1, 1, &document), start(2, 1, &document));
    one.connected(node(2));
    assert_eq!(events(&mut one), [], "a connection alone proves nothing about the agent");
    one.receive(node(2), heartbeat(&two), 100 * MS);
    assert_eq!(events(&mut one), [Event::Up(node(2))]);
    one.tick(1599 * MS);
    assert_eq!(events(&mut one), []);
    one.tick(1600 * MS);
    assert_eq!(events(&mut one), [Event::Down(node(2))]);
    one.tick(1700 * MS);
    assert_eq!(events(&mut one), [], "each loss is told once");
}

#[test]
fn a_node_that_was_held_up_itself_calls_no_peer_silent_for_that() {
    let document = cluster(2);
    let (mut one, two) = (start(1, 1, &document), start(2, 1, &document));
    one.connected(node(2));
    one.receive(node(2), heartbeat(&two), 100 * MS);
    events(&mut one);
    one.held_up(2000 * MS, 2200 * MS);
    one.tick(2200 * MS);
    assert_eq!(events(&mut one), []);
    one.tick(3599 * MS);
    assert_eq!(events(&mut one), []);
    one.tick(3600 * MS);
    assert_eq!(events(&mut one), [Event::Down(node(2))], "silence from then on counts");
    one.receive(node(2), heartbeat(&two), 4000 * MS);
    one.disconnected(node(2), 4000 * MS);
    events(&mut one);
    one.held_up(600 * MS, 4600 * MS);
    one.tick(5099 * MS);
    assert_eq!(events(&mut one), []);
    one.tick(5100 * MS);
    assert_eq!(events(&mut one), [Event::Down(node(2))], "and so does a lost connection");
}

#[test]
fn a_lost_connection_shortens_the_wait_and_a_new_one_ends_it() {
    let document = cluster(2);
    let (mut one, two) = (start(1, 1, &document), start(2, 1, &document));
    one.connected(node(2));
    one.receive(node(2), heartbeat(&two), Duration::ZERO);
    events(&mut one);
    one.disconnected(node(2), 100 * MS);
    one.connected(node(2));
    one.tick(700 * MS);
    assert_eq!(events(&mut one), []);
    one.disconnected(node(2), 800 * MS);
    one.tick(1299 * MS);
    assert_eq!(events(&mut one), []);
    one.tick(1300 * MS);
    assert_eq!(events(&mut one), [Event::Down(node(2))]);
}

#[test]
fn a_restart_without_a_pause_is_noticed() {
    let document = cluster(2);
    let mut one = start(1, 1, &document);
    one.receive(node(2), heartbeat(&start(2, 1, &document)), Duration::ZERO);
    one.receive(node(2), heartbeat(&start(2, 2, &document)), 10 * MS);
    assert_eq!(events(&mut one), [Event::Up(node(2)), Event::Restarted(node(2))]);
}

#[test]
fn strangers_and_removed_members_change_nothing() {
    let document = cluster(2);
    let mut one = start(1, 1, &document);
    let mut evil = document.clone();
    evil.remove_member(&node(1)).unwrap();
    one.receive(node(9), Message::Document(Arc::new(evil.clone())), Duration::ZERO);
    assert_eq!(**one.document(), document);
    one.receive(node(2), heartbeat(&start(2, 1, &document)), Duration::ZERO);
    one.change(|document| document.remove_member(&node(2))).unwrap();
    let told = |output: &Output| matches!(output, Output::Send(to, Message::Document(_)) if *to == node(2));
    assert!(drain(&mut one).iter().any(told), "a removed member is told");
    one.receive(node(2), Message::Document(Arc::new(evil)), Duration::ZERO);
    assert!(one.document().member(&node(1)).is_some());
    assert!(drain(&mut one).is_empty());
}

#[test]
fn a_change_is_on_the_disk_before_anybody_hears_of_it() {
    let document = cluster(2);
    let mut one = start(1, 1, &document);
    one.receive(node(2), heartbeat(&start(2, 1, &document)), Duration::ZERO);
    drain(&mut one);
    let change = one.change(|document| document.set_setting(node(1), "a", Some("b".into()))).unwrap();
    let outputs = drain(&mut one);
    let place = |wanted: fn(&Output) -> bool| outputs.iter().position(wanted).unwrap();
    let persisted = place(|output| matches!(output, Output::Persist(_)));
    assert!(persisted < place(|output| matches!(output, Output::Send(_, Message::Document(_)))));
    one.receive(node(2), Message::Held(document.digest()), Duration::ZERO);
    assert_eq!(events(&mut one), [], "the document before the change does not count");
    one.receive(node(2), Message::Held(one.document().digest()), Duration::ZERO);
    assert_eq!(events(&mut one), [Event::Spread(change)]);
}

#[test]
fn what_is_said_to_be_held_was_persisted_before() {
    let mut theirs = cluster(2);
    let mut one = start(1, 1, &theirs);
    theirs.set_setting(node(2), "a", Some("b".into())).unwrap();
    one.receive(node(2), Message::Document(Arc::new(theirs)), Duration::ZERO);
    let outputs = drain(&mut one);
    let place = |wanted: fn(&Output) -> bool| outputs.iter().position(wanted).unwrap();
    let persisted = place(|output| matches!(output, Output::Persist(_)));
    assert!(persisted < place(|output| matches!(output, Output::Send(_, Message::Held(_)))));
}

#[test]
fn a_node_that_learns_of_its_removal_falls_silent() {
    let document = cluster(3);
    let mut one = start(1, 1, &document);
    let mut without = document.clone();
    without.remove_member(&node(1)).unwrap();
    one.receive(node(2), Message::Document(Arc::new(without)), Duration::ZERO);
    drain(&mut one);
    one.tick(10_000 * MS);
    assert!(drain(&mut one).is_empty());
    assert!(one.document().is_removed(&node(1)));
}
