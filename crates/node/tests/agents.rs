//! Whole agents on loopback, each with its own runtime. Dropping the runtime kills the agent.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thunder_hub::PullOptions;
use thunder_node::agent::control::{Reply, Request, ask};
use thunder_node::agent::{
    Agent, AgentOptions, ApiSettings, ModelAnswer, ModelAsk, Status, TaskState, TaskStatus, Work,
};
use thunder_node::document::OnLoss;
use thunder_node::identity::Identity;
use thunder_node::joining::token::Token;
use thunder_node::storage::DataFolder;
use thunder_node::tls::{self, Protocol, Tls, Trusted};
use thunder_node::wire;
use tokio::runtime::Runtime;

const LIMIT: Duration = Duration::from_secs(20);

struct Node {
    runtime: Option<Runtime>,
    agent: Agent,
    folder: TempDir,
    name: String,
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn options(data: &Path, name: &str, listen: SocketAddr, join: &[SocketAddr]) -> AgentOptions {
    AgentOptions {
        data: data.to_owned(),
        name: name.to_owned(),
        listen,
        join: join.iter().map(ToString::to_string).collect(),
        token: None,
        discover: false,
        api: None,
        api_settings: ApiSettings::default(),
        access: None,
        desk: None,
        local_socket: None,
        // It approves of all options, and ends at once as a rank.
        program: "/bin/true".into(),
        version: None,
        models: PullOptions { cache: data.join("models"), offline: true, ..PullOptions::from_env() },
    }
}

impl Node {
    fn start(name: &str, join: &[&Self]) -> Self {
        let join: Vec<_> = join.iter().map(|node| node.agent.address()).collect();
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), name, "127.0.0.1:0".parse().unwrap(), &join);
        Self::with(options, folder)
    }

    fn with(options: AgentOptions, folder: TempDir) -> Self {
        let (runtime, name) = (runtime(), options.name.clone());
        let agent = runtime.block_on(Agent::start(options)).unwrap();
        Self { runtime: Some(runtime), agent, folder, name }
    }

    /// Ends the agent like SIGKILL: no task runs any more, and sockets close.
    fn kill(&mut self) {
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(1));
    }

    /// Starts the agent again, at the same address and with the same folder.
    fn restart(mut self) -> Self {
        if self.runtime.is_some() {
            self.kill();
        }
        let address = self.agent.address();
        let Self { agent, folder, name, .. } = self;
        // The last clone holds the folder's lock.
        drop(agent);
        let options = options(folder.path(), &name, address, &[]);
        Self::with(options, folder)
    }

    fn ask(&self, request: Request) -> Result<Reply, String> {
        let asking = ask(self.folder.path(), &request);
        runtime().block_on(asking).map_err(|error| error.to_string())
    }

    fn approve(&self, newcomer: &Self) -> Result<Reply, String> {
        self.ask(Request::Approve(newcomer.agent.code().unwrap()))
    }

    fn status(&self) -> Status {
        self.agent.status()
    }

    /// Names of the members that answer, in order.
    fn up(&self) -> Vec<String> {
        let status = self.status();
        let mut names: Vec<_> =
            status.members.into_iter().filter(|member| member.up).map(|member| member.name).collect();
        names.sort();
        names
    }
}

/// Waits until `done`. Returns how long that took.
fn wait(what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    began.elapsed()
}

fn cluster(names: &[&str]) -> Vec<Node> {
    let first = Node::start(names[0], &[]);
    let mut nodes = vec![first];
    for name in &names[1..] {
        let new = Node::start(name, &[&nodes[0]]);
        wait("the knock", || !nodes[0].status().newcomers.is_empty());
        assert!(matches!(nodes[0].approve(&new).unwrap(), Reply::Approved(admitted) if admitted == *name));
        nodes.push(new);
        wait("all up", || nodes.iter().all(|node| node.up() == names[..nodes.len()]));
    }
    nodes
}

fn agree(nodes: &[Node]) -> bool {
    nodes.iter().all(|node| node.status().document == nodes[0].status().document)
}

#[test]
fn nodes_join_by_code_notice_a_death_within_2_s_and_take_it_back() {
    let mut nodes = cluster(&["a", "b", "c"]);
    wait("one document", || agree(&nodes));
    assert!(nodes.iter().all(|node| node.agent.code().is_none()));
    let kill = |nodes: &mut Vec<Node>| {
        let mut victim = nodes.remove(0);
        victim.kill();
        let noticed = wait("the death", || nodes.iter().all(|node| node.up() == ["b", "c"]));
        println!("a death was noticed after {noticed:?}");
        (victim, noticed)
    };
    let (mut victim, mut noticed) = kill(&mut nodes);
    // A busy machine may hold a node up, but not each time.
    for _ in 0..3 {
        if noticed < Duration::from_secs(2) {
            break;
        }
        nodes.insert(0, victim.restart());
        wait("a is back", || nodes.iter().all(|node| node.up() == ["a", "b", "c"]));
        (victim, noticed) = kill(&mut nodes);
    }
    assert!(noticed < Duration::from_secs(2), "{noticed:?}");
    // The first node is lost; any other can admit nodes and make changes.
    let new = Node::start("d", &[&nodes[1]]);
    wait("the knock", || !nodes[1].status().newcomers.is_empty());
    nodes[1].approve(&new).unwrap();
    nodes.push(new);
    wait("d is up", || nodes.iter().all(|node| node.up() == ["b", "c", "d"]));
    let back = victim.restart();
    nodes.push(back);
    let took = wait("a is back", || nodes.iter().all(|node| node.up() == ["a", "b", "c", "d"]));
    println!("a node that came back was taken after {took:?}");
    wait("one document", || agree(&nodes));
}

#[test]
fn keys_of_a_store_become_the_clusters_and_a_newcomer_drops_its_own() {
    use thunder_access::{Access, Actor, AuditFilter, KeepPolicy, NewKey, Now, Retention};
    let (stores, time) = ([tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()], Now::read().time);
    let make = |access: &Access, name: &str| {
        let new = NewKey { name: name.into(), ..NewKey::default() };
        access.create_key(new, &Actor::local(), time).unwrap().1
    };
    let open = |nth: usize| Access::open(stores[nth].path(), Retention::default(), None).unwrap();
    let start = |access: &Access, name: &str, join: &[SocketAddr]| {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), name, "127.0.0.1:0".parse().unwrap(), join);
        Node::with(AgentOptions { access: Some(access.clone()), ..options }, folder)
    };
    let opens = |access: &Access, secret: &str| access.authenticate(secret, time).is_ok();
    let (ant, bee) = (open(0), open(1));
    let (first, strange) = (make(&ant, "first"), make(&bee, "strange"));
    let keep = |access: &Access, teams: &[&str]| {
        let teams = teams.iter().map(|team| (*team).to_owned()).collect();
        let policy = KeepPolicy { teams, ..KeepPolicy::default() };
        access.set_keep_policy(policy.clone(), &Actor::local(), time).map(|()| policy)
    };
    let (own, _) = (keep(&ant, &["lab"]).unwrap(), keep(&bee, &["strange"]).unwrap());
    let mut nodes = vec![start(&ant, "a", &[])];
    assert!(opens(&ant, &first), "from its first moment");
    nodes.push(start(&bee, "b", &[nodes[0].agent.address()]));
    wait("the knock", || !nodes[0].status().newcomers.is_empty());
    nodes[0].approve(&nodes[1]).unwrap();
    wait("the cluster's keys", || opens(&bee, &first));
    assert!(!opens(&bee, &strange) && !opens(&ant, &strange));
    assert_eq!((ant.keep_policy(), bee.keep_policy()), (own.clone(), own));
    // The policy of kept prompts applies everywhere too.
    let other = keep(&bee, &["firm", "lab"]).unwrap();
    wait("the policy", || ant.keep_policy() == other);
    let of_policy = AuditFilter { action: Some("prompts.policy".into()), ..AuditFilter::default() };
    assert!(ant.audit(&of_policy, None, 1).unwrap()[0].1.text.contains(r#""lab""#));
    // A change on either node applies on the other, and a revoked key is refused here at once.
    let second = make(&bee, "second");
    wait("the second key", || opens(&ant, &second));
    ant.revoke_key("second", &Actor::local(), time).unwrap();
    assert!(!opens(&ant, &second));
    wait("the revoked key is refused", || !opens(&bee, &second));
    assert!(opens(&bee, &first));
}

#[test]
fn a_node_with_keys_never_opens_whatever_document_it_gets() {
    use thunder_access::{Access, Actor, NewKey, Now, Retention};
    let (store, time) = (tempfile::tempdir().unwrap(), Now::read().time);
    let access = Access::open(store.path(), Retention::default(), None).unwrap();
    let new = NewKey { name: "own".into(), ..NewKey::default() };
    let secret = access.create_key(new, &Actor::local(), time).unwrap().1;
    let opens = |access: &Access| access.authenticate(&secret, time).is_ok();
    let start = |access: &Access, name: &str, join: &[SocketAddr]| {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), name, "127.0.0.1:0".parse().unwrap(), join);
        Node::with(AgentOptions { access: Some(access.clone()), ..options }, folder)
    };
    // Its keys become the cluster's.
    let mut first = start(&access, "a", &[]);
    wait("the store is the cluster's", || access.is_shared().unwrap());
    first.kill();
    drop((first, access));
    // The document is lost, or the store was restored.
    let access = Access::open(store.path(), Retention::default(), None).unwrap();
    assert!(access.is_shared().unwrap());
    let second = start(&access, "b", &[]);
    assert!(access.has_keys() && opens(&access));
    wait("its keys are on the disk", || access.shared().keys.len() == 1);
    drop((second, access));
    let access = Access::open(store.path(), Retention::default(), None).unwrap();
    assert!(opens(&access), "the store keeps them");
    // It joins a cluster without keys, which gets them.
    let empty = tempfile::tempdir().unwrap();
    let open = Access::open(empty.path(), Retention::default(), None).unwrap();
    let host = start(&open, "c", &[]);
    assert!(!open.has_keys());
    let joined = start(&access, "d", &[host.agent.address()]);
    wait("the knock", || !host.status().newcomers.is_empty());
    host.approve(&joined).unwrap();
    wait("the cluster has the key", || opens(&open));
    assert!(opens(&access) && open.has_keys());
}

#[test]
fn a_removed_node_is_told_and_refused_and_joins_again_with_a_new_key() {
    let mut nodes = cluster(&["a", "b", "c"]);
    assert!(matches!(
        nodes[1].ask(Request::Remove("c".into())).unwrap(),
        Reply::Changed { spread: true, .. }
    ));
    wait("a has heard", || nodes[..2].iter().all(|node| node.status().members.len() == 2));
    let removed = nodes.pop().unwrap();
    wait("c is told", || removed.status().removed);
    let removed = removed.restart();
    // It may have been killed before it wrote that down, and is told again.
    wait("c knows it", || removed.status().removed);
    assert!(removed.agent.code().is_none());
    let refused = removed.ask(Request::Approve("K7-4F9Q-X2MC".into())).unwrap_err();
    assert!(refused.contains("this node was removed"), "{refused}");
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(nodes[0].up(), ["a", "b"]);
    let error = nodes[0].ask(Request::Remove("c".into())).unwrap_err();
    assert!(error.contains("no member is named c"), "{error}");
    let old = removed.agent.id();
    assert!(matches!(removed.ask(Request::Leave).unwrap(), Reply::Done));
    let again = removed.restart();
    assert_ne!(again.agent.id(), old);
    assert!(again.agent.code().is_some());
}

#[test]
fn a_node_that_was_off_when_it_was_removed_is_told() {
    let mut nodes = cluster(&["a", "b", "c"]);
    let mut removed = nodes.pop().unwrap();
    removed.kill();
    nodes[0].ask(Request::Remove("c".into())).unwrap();
    wait("b has heard", || nodes[1].status().members.len() == 2);
    let removed = removed.restart();
    assert!(!removed.status().removed);
    wait("c is told", || removed.status().removed);
    assert!(removed.agent.code().is_none());
    assert_eq!(nodes[0].up(), ["a", "b"]);
}

#[test]
fn a_token_admits_one_node_without_a_person() {
    let first = Node::start("a", &[]);
    let Reply::Token(text) = first.ask(Request::Token(60)).unwrap() else { panic!("no token") };
    let token: Token = text.parse().unwrap();
    let start = |name: &str| {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), name, "127.0.0.1:0".parse().unwrap(), &[]);
        Node::with(AgentOptions { token: Some(token.clone()), ..options }, folder)
    };
    let second = start("b");
    wait("b is up", || first.up() == ["a", "b"] && second.up() == ["a", "b"]);
    let third = start("c");
    wait("the third node gives up", || *third.agent.ending().borrow());
    let why = third.agent.failure().unwrap();
    assert!(why.contains("not joined") && why.contains("used before"), "{why}");
    assert_eq!(third.up(), ["c"]);
    let forged = Token { secret: [7; 16], ..token.clone() };
    let folder = tempfile::tempdir().unwrap();
    let options_of_stranger = options(folder.path(), "x", "127.0.0.1:0".parse().unwrap(), &[]);
    let stranger = Node::with(AgentOptions { token: Some(forged), ..options_of_stranger }, folder);
    wait("the stranger gives up", || *stranger.agent.ending().borrow());
    assert!(stranger.agent.failure().unwrap().contains("has not issued the token, or it has expired"));
    // A member does not need its token again.
    let second = second.restart();
    wait("b is back", || first.up() == ["a", "b"]);
    assert_eq!(second.agent.failure(), None);
    // The issuer remembers across a restart that the token was used.
    let first = first.restart();
    let fourth = start("d");
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((first.status().members.len(), fourth.up().len()), (2, 1));
    let error = first.ask(Request::Token(100 * 24 * 3600)).unwrap_err();
    assert!(error.contains("30 days"), "{error}");
}

#[test]
fn a_leaving_node_is_gone_everywhere() {
    let mut nodes = cluster(&["a", "b"]);
    let leaving = nodes.remove(0);
    assert!(matches!(leaving.ask(Request::Leave).unwrap(), Reply::Done));
    wait("b has heard", || nodes[0].status().members.len() == 1);
    assert!(nodes[0].agent.code().is_some(), "a cluster of one may join another");
    let again = leaving.restart();
    assert_eq!(again.status().members.len(), 1);
}

#[test]
fn wrong_codes_and_names_are_refused_in_words() {
    let (first, second) = (Node::start("a", &[]), Node::start("b", &[]));
    let refused = |request| first.ask(request).unwrap_err();
    assert!(refused(Request::Approve("hello".into())).contains("like K7"));
    assert!(refused(Request::Approve(first.agent.code().unwrap())).contains("own code"));
    assert!(refused(Request::Approve(second.agent.code().unwrap())).contains("--join"));
    assert!(refused(Request::Remove("x".into())).contains("no member"));
    assert!(refused(Request::Remove("a".into())).contains("leave"));
    let newcomer = Node::start("c", &[&first]);
    wait("the knock", || !first.status().newcomers.is_empty());
    let mut wrong = newcomer.agent.code().unwrap();
    let last = if wrong.pop() == Some('0') { '1' } else { '0' };
    wrong.push(last);
    assert!(refused(Request::Approve(wrong)).contains("does not show this code"));
    let code = newcomer.agent.code().unwrap();
    first.ask(Request::Approve(code.clone())).unwrap();
    let again = refused(Request::Approve(code));
    assert!(again.contains("c has this code and is a node of this cluster already"), "{again}");
    assert!(matches!(
        first.ask(Request::Drain { node: "a".into(), drained: true }),
        Ok(Reply::Changed { .. })
    ));
    assert!(first.status().members[0].drained);
}

#[test]
fn a_link_that_fails_while_it_is_measured_leaves_the_others_measured() {
    let mut nodes = cluster(&["a", "b", "c"]);
    let folder = nodes[0].folder.path().to_owned();
    let asking = std::thread::spawn(move || {
        runtime().block_on(ask(&folder, &Request::MeasureLinks)).map_err(|error| error.to_string())
    });
    // Three rounds of one pair each, and c is in two of them: at least one is not over.
    std::thread::sleep(Duration::from_millis(500));
    nodes[2].kill();
    let why = asking.join().unwrap().unwrap_err();
    assert!(why.contains('c') && !why.contains("within"), "{why}");
    let [a, b] = [0, 1].map(|node: usize| nodes[node].agent.id().short());
    // The links arrive with the answer, including those that b has measured.
    let links = nodes[0].status().links;
    for (from, to) in [(&a, &b), (&b, &a)] {
        // Only a person's request opens several connections.
        let is_there =
            links.iter().any(|link| (&link.from, &link.to) == (from, to) && link.several_bytes_s.is_some());
        assert!(is_there, "{from} to {to}: {links:?}");
    }
}

/// A node's reply to a call of the holder of `identity`; `None` if there is no reply.
fn call_as(identity: &Identity, node: &Node, call: &str) -> Option<serde_json::Value> {
    let tls = Tls::new(identity, Trusted::default()).unwrap();
    let config = tls.client(Protocol::Call, node.agent.id()).unwrap();
    runtime().block_on(async {
        let stream = tokio::net::TcpStream::connect(node.agent.address()).await.unwrap();
        // In TLS 1.3 the client is finished before the server has checked its key.
        let connecting = tokio_rustls::TlsConnector::from(config).connect(tls::server_name(), stream);
        let mut stream = connecting.await.ok()?;
        wire::send(&mut stream, &call).await.ok()?;
        let reply = wire::receive(&mut stream, wire::LONGEST_FRAME_BYTES);
        tokio::time::timeout(LIMIT, reply).await.unwrap().ok()
    })
}

#[test]
fn only_members_are_told_of_a_machines_ports_and_cables() {
    let nodes = cluster(&["a", "b"]);
    let look = |node: Option<&str>| nodes[0].ask(Request::Look { node: node.map(str::to_owned) });
    for node in [None, Some("a"), Some("b")] {
        let Reply::Looked(text) = look(node).unwrap() else { panic!("no answer") };
        assert!(text.starts_with("@@ system 0\n") && text.ends_with("@@ end 0\n"), "{text}");
    }
    assert!(look(Some("c")).unwrap_err().contains("no member is named c"));
    let stranger = Identity::generate().unwrap();
    assert_eq!(call_as(&stranger, &nodes[1], "Look"), None, "a stranger's key");
    let member = Identity::load_or_create(&DataFolder::open(&copy_of_key(&nodes[0])).unwrap()).unwrap();
    assert_eq!(member.id(), nodes[0].agent.id());
    let told = call_as(&member, &nodes[1], "Look").unwrap();
    assert!(told["Looked"].as_str().unwrap().contains("@@ end 0"), "a member's key: {told}");
    // A removed member is a stranger.
    nodes[1].ask(Request::Remove("a".into())).unwrap();
    wait("a is removed", || nodes[1].status().members.len() == 1);
    assert_eq!(call_as(&member, &nodes[1], "Look"), None, "a removed member's key");
}

/// A folder with only a node's key, because the node holds its own folder's lock.
fn copy_of_key(node: &Node) -> std::path::PathBuf {
    let copy = node.folder.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::copy(node.folder.path().join("node.key"), copy.join("node.key")).unwrap();
    copy
}

#[test]
fn a_thousand_strangers_do_not_disturb_a_cluster() {
    let nodes = cluster(&["a", "b"]);
    let address = nodes[0].agent.address();
    let mut changes = nodes[1].agent.changes();
    let mut held = Vec::new();
    for _ in 0..1000 {
        held.push(TcpStream::connect(address).unwrap());
    }
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        assert!(nodes.iter().all(|node| node.up() == ["a", "b"]));
        std::thread::sleep(Duration::from_millis(20));
    }
    // Reports of free memory may change, but no node went down.
    changes.mark_unchanged();
    // A node can still join.
    let new = Node::start("c", &[&nodes[0]]);
    wait("the knock", || !nodes[0].status().newcomers.is_empty());
    nodes[0].approve(&new).unwrap();
    wait("c is up", || nodes[1].up() == ["a", "b", "c"]);
}

/// An agent that reports another version.
fn of_version(name: &str, version: &str, join: &[&Node]) -> Node {
    let join: Vec<_> = join.iter().map(|node| node.agent.address()).collect();
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path(), name, "127.0.0.1:0".parse().unwrap(), &join);
    Node::with(AgentOptions { version: Some(version.to_owned()), ..options }, folder)
}

#[test]
fn neighbouring_versions_form_a_cluster_and_others_are_refused_in_words() {
    let first = of_version("a", "0.3.0", &[]);
    let second = of_version("b", "0.4.2", &[&first]);
    wait("the knock", || !first.status().newcomers.is_empty());
    first.approve(&second).unwrap();
    wait("both up", || first.up() == ["a", "b"] && second.up() == ["a", "b"]);
    let report = first.status().members.iter().find(|member| member.name == "b").unwrap().report.clone();
    assert_eq!(report.unwrap().version, "0.4.2");
    // Two minor versions apart: a knock, a token and a code are all refused.
    let Reply::Token(token) = first.ask(Request::Token(60)).unwrap() else { panic!("no token") };
    let token: Token = token.parse().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut late = options(folder.path(), "c", "127.0.0.1:0".parse().unwrap(), &[first.agent.address()]);
    late.version = Some("0.5.0".to_owned());
    late.token = Some(token.clone());
    let late = Node::with(late, folder);
    wait("the refusal", || late.agent.failure().is_some());
    assert_eq!((late.up(), first.status().members.len()), (vec!["c".to_owned()], 2));
    assert!(late.agent.failure().unwrap().contains("do not work together"));
    assert!(first.status().newcomers.is_empty(), "a node that cannot join is not offered");
    // The refusal did not use up the token.
    let folder = tempfile::tempdir().unwrap();
    let mut good = options(folder.path(), "d", "127.0.0.1:0".parse().unwrap(), &[]);
    (good.version, good.token) = (Some("0.3.7".to_owned()), Some(token));
    let good = Node::with(good, folder);
    wait("d is up", || first.up() == ["a", "b", "d"]);
    drop(good);
    // A member that was updated too far is refused with both versions named, and is accepted again
    // when its version fits.
    let update = |node: Node, version: &str| {
        let (address, Node { mut runtime, agent, folder, name }) = (node.agent.address(), node);
        runtime.take().unwrap().shutdown_timeout(Duration::from_secs(1));
        drop(agent);
        let options = options(folder.path(), &name, address, &[]);
        Node::with(AgentOptions { version: Some(version.to_owned()), ..options }, folder)
    };
    let second = update(second, "0.9.0");
    let refused = |node: &Node, of: &str| {
        let members = node.status().members;
        members.into_iter().find(|member| member.name == of).unwrap().refused
    };
    wait("b is refused", || refused(&first, "b").as_deref() == Some("0.9.0") && first.up() == ["a"]);
    wait("both refuse", || refused(&second, "a").as_deref() == Some("0.3.0"));
    let Reply::Logs(lines) = first.ask(Request::Logs { node: None, lines: 50, after: 0 }).unwrap() else {
        panic!("no logs")
    };
    let said = "version 0.9.0 and version 0.3.0 do not work together";
    assert!(lines.iter().any(|line| line.text.contains(said)), "{lines:?}");
    let second = update(second, "0.2.5");
    wait("b is back", || first.up() == ["a", "b"] && second.up().contains(&"a".to_owned()));
    wait("one document", || first.status().document == second.status().document);
}

/// CPU time of this process.
#[cfg(target_os = "linux")]
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

#[cfg(target_os = "linux")]
#[test]
fn an_idle_cluster_takes_little_of_a_core() {
    let nodes = cluster(&["a", "b", "c"]);
    std::thread::sleep(Duration::from_millis(500));
    let share = || {
        let (began, before) = (Instant::now(), processor_time());
        std::thread::sleep(Duration::from_secs(4));
        let share = (processor_time() - before).as_secs_f64() / began.elapsed().as_secs_f64();
        let each = share / nodes.len() as f64;
        println!("an idle node of three takes {:.2} % of a core", each * 100.0);
        each
    };
    // Links are measured at first, and time that a virtual machine's host takes counts too.
    let shares: Vec<f64> = (0..4).map(|_| share()).take_while(|share| *share >= 0.02).collect();
    assert!(shares.len() < 4, "{shares:?}");
}

/// A model in a node's cache, with a file of random bytes, as `thunder model pull` leaves it.
fn put_model(node: &Node, repo: &str, bytes: usize) -> Vec<u8> {
    put_commit(&node.folder.path().join("models"), repo, "0123456789abcdef0123456789abcdef01234567", bytes)
}

/// The same in any cache, as a commit.
fn put_commit(cache: &Path, repo: &str, commit: &str, bytes: usize) -> Vec<u8> {
    let mut weights = thunder_testing::Random::new(5).bytes(bytes);
    // The length of a header.
    weights[..8].copy_from_slice(&100_u64.to_le_bytes());
    let folder = cache.join(format!("models--{}", repo.replace('/', "--")));
    let snapshot = folder.join("snapshots").join(commit);
    for name in ["blobs", "refs"] {
        std::fs::create_dir_all(folder.join(name)).unwrap();
    }
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(folder.join("refs/main"), commit).unwrap();
    for (name, content) in [("config.json", &b"{}"[..]), ("model.safetensors", &weights[..])] {
        let hash = ring::digest::digest(&ring::digest::SHA256, content);
        let etag: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        std::fs::write(folder.join("blobs").join(&etag), content).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{etag}"), snapshot.join(name)).unwrap();
    }
    weights
}

fn weights_of(node: &Node, repo: &str) -> Option<Vec<u8>> {
    let located = thunder_hub::locate_in(repo, &node.folder.path().join("models")).ok()?;
    std::fs::read(located.folder.join("model.safetensors")).ok()
}

/// Runs a job with a model on nodes. Returns the task after it has ended.
fn do_task(node: &Node, nodes: &[&str], work: Work, model: &str) -> TaskStatus {
    let nodes = nodes.iter().map(|name| (*name).to_owned()).collect();
    let ask =
        ModelAsk::Begin { work, model: model.to_owned(), revision: "main".into(), commit: None, part: None };
    let Ok(Reply::Begun(id)) = node.ask(Request::Models { nodes, ask }) else { panic!("it begins") };
    let mut ended = None;
    wait("the task", || {
        ended = node.status().tasks.into_iter().find(|task| task.id == id && task.is_over());
        ended.is_some()
    });
    ended.unwrap()
}

#[test]
fn a_model_of_one_node_reaches_all_and_what_is_damaged_is_found() {
    let nodes = cluster(&["a", "b", "c"]);
    let weights = put_model(&nodes[0], "org/name", 5_000_000);
    // Requested on a node that is not involved.
    let task = do_task(&nodes[2], &[], Work::Pull, "org/name");
    assert_eq!(task.failures(), Vec::<String>::new());
    assert_eq!(task.nodes.len(), 3);
    for node in &nodes {
        assert!(weights_of(node, "org/name") == Some(weights.clone()), "{}", node.name);
    }
    let sent: u64 = nodes.iter().map(|node| node.status().sent_bytes).sum();
    assert!(sent >= 2 * 5_000_000, "{sent}");
    let Ok(Reply::Models(lists)) = nodes[1].ask(Request::Models { nodes: Vec::new(), ask: ModelAsk::List })
    else {
        panic!("a list")
    };
    assert!(
        lists.iter().all(|(_, list)| matches!(list, Ok(ModelAnswer::Models(models)) if models.len() == 1))
    );
    // A byte changes on a disk.
    let located = thunder_hub::locate_in("org/name", &nodes[1].folder.path().join("models")).unwrap();
    let blob = std::fs::canonicalize(located.folder.join("model.safetensors")).unwrap();
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[4_000_000] ^= 4;
    std::fs::write(&blob, bytes).unwrap();
    let verified = do_task(&nodes[0], &[], Work::Verify, "org/name");
    let failures = verified.failures();
    assert!(failures.len() == 1 && failures[0].starts_with("b: damaged"), "{failures:?}");
    assert!(failures[0].contains("`thunder model pull org/name --nodes b`"), "{failures:?}");
    let mended = do_task(&nodes[0], &[], Work::Pull, "org/name");
    for node in &mended.nodes {
        let says = if node.node == "b" { "its damaged files came again" } else { "it is there already" };
        assert_eq!(node.state, TaskState::Done(says.into()), "{mended:?}");
    }
    assert!(weights_of(&nodes[1], "org/name") == Some(weights.clone()));
    let remove = Request::Models { nodes: vec!["b".into()], ask: ModelAsk::Remove("org/name".into()) };
    assert!(matches!(&nodes[0].ask(remove).unwrap(), Reply::Models(done) if done[0].1.is_ok()));
    assert_eq!(weights_of(&nodes[1], "org/name"), None);
    assert_eq!(do_task(&nodes[0], &["b"], Work::Pull, "org/name").failures(), Vec::<String>::new());
    assert!(weights_of(&nodes[1], "org/name") == Some(weights));
    let none = do_task(&nodes[0], &["b", "c"], Work::Pull, "org/none").failures();
    assert!(none.len() == 2 && none[0].contains("org/none"), "{none:?}");
}

/// A hub with the models of a cache. Returns its address, and counts the requests for a list.
fn hub(cache: &Path) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, lists) =
        (format!("http://{}", listener.local_addr().unwrap()), Arc::new(AtomicUsize::new(0)));
    let (cache, counted) = (cache.to_owned(), lists.clone());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut begin = [0; 16];
            let length = stream.peek(&mut begin).unwrap_or(0);
            counted
                .fetch_add(usize::from(begin[..length].starts_with(b"GET /api/models/")), Ordering::Relaxed);
            let cache = cache.clone();
            std::thread::spawn(move || thunder_hub::serve(&mut stream, &cache, &()));
        }
    });
    (address, lists)
}

#[test]
fn an_update_asks_the_hub_once_and_others_take_what_it_has_from_the_node_that_did() {
    let (cache, newer) = (tempfile::tempdir().unwrap(), "fedcba9876543210fedcba9876543210fedcba98");
    let content = put_commit(cache.path(), "Org/Tiny-4bit", newer, 3_000_000);
    let (address, lists) = hub(cache.path());
    let start = |name: &str, endpoint: &str, join: &[SocketAddr]| {
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(folder.path(), name, "127.0.0.1:0".parse().unwrap(), join);
        options.models.offline = false;
        endpoint.clone_into(&mut options.models.endpoint);
        Node::with(options, folder)
    };
    // Only the first node reaches the hub.
    let mut nodes = vec![start("a", &address, &[])];
    nodes.push(start("b", "http://127.0.0.1:1", &[nodes[0].agent.address()]));
    wait("the knock", || !nodes[0].status().newcomers.is_empty());
    nodes[0].approve(&nodes[1]).unwrap();
    wait("both", || nodes.iter().all(|node| node.up() == ["a", "b"]));
    let older: Vec<_> = nodes.iter().map(|node| put_model(node, "Org/Tiny-4bit", 1000)).collect();
    assert_ne!(older[0], content);
    let alone = do_task(&nodes[1], &["b"], Work::Update, "Org/Tiny-4bit").failures();
    assert!(alone.len() == 1 && alone[0].contains("cannot reach http://127.0.0.1:1"), "{alone:?}");
    let task = do_task(&nodes[1], &["a", "b"], Work::Update, "Org/Tiny-4bit");
    assert_eq!(task.failures(), Vec::<String>::new());
    assert!(nodes.iter().all(|node| weights_of(node, "Org/Tiny-4bit") == Some(content.clone())));
    assert_eq!(lists.load(Ordering::Relaxed), 1);
    // The log keeps names as they were written.
    let Ok(Reply::Logs(lines)) = nodes[0].ask(Request::Logs { node: None, lines: 100, after: 0 }) else {
        panic!("a log")
    };
    assert!(lines.iter().any(|line| line.text == "update of Org/Tiny-4bit begins"), "{lines:?}");
}

#[test]
fn headers_of_a_model_that_a_node_lacks_come_from_one_that_has_it() {
    let nodes = cluster(&["a", "b"]);
    let weights = put_model(&nodes[1], "org/name", 5_000_000);
    let headers = |name: &str| nodes[0].ask(Request::Headers(name.into()));
    let Ok(Reply::Headers(folder)) = headers("org/name") else { panic!("{:?}", headers("org/name")) };
    assert_eq!(std::fs::read(folder.join("config.json")).unwrap(), b"{}");
    let found = std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(found.len() == weights.len() && found[..1000] == weights[..1000] && found != weights);
    assert_eq!(weights_of(&nodes[0], "org/name"), None, "the model itself is not pulled");
    assert!(headers("org/none").unwrap_err().contains("org/none"));
}

#[test]
fn files_of_a_model_that_is_served_are_not_removed() {
    let nodes = cluster(&["a", "b"]);
    for node in &nodes {
        put_model(node, "org/name", 1000);
        put_model(node, "org/draft", 1000);
    }
    let load = Request::Load {
        model: "org/name".into(),
        nodes: vec!["a".into()],
        count: None,
        arguments: vec!["--draft".into(), "org/draft".into()],
        weights: Vec::new(),
        layouts: Vec::new(),
        replicas: 1,
        idle_unload_s: None,
        on_loss: OnLoss::Replace,
    };
    nodes[0].ask(load).unwrap();
    wait("it is placed", || {
        nodes.iter().all(|node| node.status().models.iter().any(|it| !it.ranks.is_empty()))
    });
    let remove = |model: &str| match nodes[0]
        .ask(Request::Models { nodes: Vec::new(), ask: ModelAsk::Remove(model.into()) })
    {
        Ok(Reply::Models(answers)) => answers,
        other => panic!("{other:?}"),
    };
    for model in ["org/name", "org/draft"] {
        let answers = remove(model);
        let refused = answers[0].1.as_ref().unwrap_err();
        assert!(refused.contains("`thunder model unload org/name`"), "{refused}");
        assert!(answers[1].1.is_ok(), "b does not serve it: {answers:?}");
    }
    nodes[0].ask(Request::Unload("org/name".into())).unwrap();
    assert!(remove("org/name")[0].1.is_ok());
}

#[test]
fn more_nodes_than_there_are_cannot_be_asked_for() {
    let nodes = cluster(&["a", "b"]);
    put_model(&nodes[0], "org/name", 1000);
    let load = |count, replicas, named: &[&str]| {
        nodes[0].ask(Request::Load {
            model: "org/name".into(),
            nodes: named.iter().map(|name| (*name).to_owned()).collect(),
            count,
            arguments: Vec::new(),
            weights: Vec::new(),
            layouts: Vec::new(),
            replicas,
            idle_unload_s: None,
            on_loss: OnLoss::Wait,
        })
    };
    let why = load(Some(9), 1, &[]).unwrap_err();
    assert!(why.contains("9 nodes are asked for, and 2 may run the model"), "{why}");
    let why = load(Some(2), 2, &[]).unwrap_err();
    assert!(why.contains("2 nodes for each of 2 replicas are asked for, and 2 may"), "{why}");
    assert!(load(Some(2), 1, &["a"]).unwrap_err().contains("1 may run"));
    load(Some(2), 1, &[]).unwrap();
    // Every node knows the policy after a loss.
    let waits = |node: &Node| node.status().models.first().is_some_and(|it| it.on_loss == OnLoss::Wait);
    wait("all know it", || nodes.iter().all(waits));
}

#[test]
fn a_removed_node_gets_no_weights() {
    let nodes = cluster(&["a", "b"]);
    put_model(&nodes[0], "org/name", 1000);
    assert_eq!(do_task(&nodes[1], &["b"], Work::Pull, "org/name").failures(), Vec::<String>::new());
    nodes[0].ask(Request::Remove("b".into())).unwrap();
    wait("b is removed", || nodes[1].status().removed);
    std::fs::remove_dir_all(nodes[1].folder.path().join("models")).unwrap();
    let failures = do_task(&nodes[1], &[], Work::Pull, "org/name").failures();
    assert!(weights_of(&nodes[1], "org/name").is_none(), "{failures:?}");
}
