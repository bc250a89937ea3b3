//! Joining and the port, over real connections on loopback: with the right code or token, and as a
//! stranger with anything else.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use thunder_node::document::{Document, Member};
use thunder_node::gate;
use thunder_node::id::NodeId;
use thunder_node::identity::Identity;
use thunder_node::joining::client::{JoinError, join_with_token, knock, pair};
use thunder_node::joining::code::{Attempts, Code};
use thunder_node::joining::server::{JoinHost, serve};
use thunder_node::joining::token::{IssuedTokens, Token};
use thunder_node::tls::{Protocol, Tls, Trusted, server_name};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const HOUR: Duration = Duration::from_secs(3600);

/// A node with a port and without the rest of an agent.
const VERSION: &str = env!("CARGO_PKG_VERSION");

struct Node {
    id: NodeId,
    tls: Tls,
    trusted: Trusted,
    address: SocketAddr,
    host: Arc<Host>,
}

struct Host {
    id: NodeId,
    code: Code,
    attempts: Mutex<Attempts>,
    tokens: Mutex<IssuedTokens>,
    document: Mutex<Document>,
    knocks: Mutex<Vec<(NodeId, String, SocketAddr)>>,
    joined: Mutex<Option<NodeId>>,
}

impl Host {
    fn admit(&self, newcomer: NodeId, name: String) -> Result<Document, String> {
        let member = Member { name, ..Member::default() };
        let mut document = self.document.lock().unwrap();
        document.set_member(self.id, newcomer, member).map_err(|error| error.to_string())?;
        Ok(document.clone())
    }
}

impl JoinHost for Host {
    fn me(&self) -> NodeId {
        self.id
    }

    fn name(&self) -> String {
        "new".to_owned()
    }

    fn note_knock(&self, newcomer: NodeId, name: String, address: SocketAddr) -> Result<(), String> {
        self.knocks.lock().unwrap().push((newcomer, name, address));
        Ok(())
    }

    fn was_removed(&self, node: NodeId) -> bool {
        self.document.lock().unwrap().is_removed(&node)
    }

    fn redeem(
        &self,
        secret: &[u8],
        newcomer: NodeId,
        name: String,
        _: SocketAddr,
    ) -> Result<Document, String> {
        let redeemed = self.tokens.lock().unwrap().redeem(secret, newcomer, 1000);
        redeemed.map_err(|error| error.to_string())?;
        self.admit(newcomer, name)
    }

    fn attempt(&self) -> Result<Code, String> {
        // At once, however long the test takes: attempts come back with time.
        let may = self.attempts.lock().unwrap().take(Duration::ZERO);
        if may { Ok(self.code.clone()) } else { Err("too many attempts".to_owned()) }
    }

    fn welcome(&self, member: NodeId, _: Document) -> Result<(), String> {
        self.attempts.lock().unwrap().give_back();
        *self.joined.lock().unwrap() = Some(member);
        Ok(())
    }
}

impl Node {
    /// Starts a node. Members' connections are echoed.
    fn start() -> Self {
        let identity = Identity::generate().unwrap();
        let (id, trusted) = (identity.id(), Trusted::default());
        let tls = Tls::new(&identity, trusted.clone()).unwrap();
        let mut document = Document::default();
        let me = Member { name: "first".to_owned(), ..Member::default() };
        document.set_member(id, id, me).unwrap();
        let host = Arc::new(Host {
            id,
            code: Code::draw(&id).unwrap(),
            attempts: Mutex::default(),
            tokens: Mutex::default(),
            document: Mutex::new(document),
            knocks: Mutex::default(),
            joined: Mutex::default(),
        });
        let listener = gate::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let joining = host.clone();
        let join = move |connection| {
            let host = joining.clone();
            async move { serve(connection, &*host).await }
        };
        let mut members = gate::open(listener, &tls, join).unwrap();
        tokio::spawn(async move {
            while let Some(mut connection) = members.recv().await {
                tokio::spawn(async move {
                    let mut byte = [0];
                    while connection.stream.read_exact(&mut byte).await.is_ok() {
                        connection.stream.write_all(&byte).await.unwrap();
                        connection.stream.flush().await.unwrap();
                    }
                });
            }
        });
        Self { id, tls, trusted, address, host }
    }

    fn trust(&self, others: &[&Self]) {
        self.trusted.set(others.iter().map(|node| node.id).collect::<BTreeSet<_>>());
    }

    /// Whether `other` accepts this node as a member.
    async fn echo(&self, other: &Self) -> bool {
        self.echo_of(other.address, other.id).await
    }

    async fn echo_of(&self, address: SocketAddr, expected: NodeId) -> bool {
        let talk = async {
            let config = self.tls.client(Protocol::Peer, expected).unwrap();
            let stream = TcpStream::connect(address).await?;
            let mut stream = TlsConnector::from(config).connect(server_name(), stream).await?;
            stream.write_all(b"x").await?;
            let mut byte = [0];
            stream.read_exact(&mut byte).await?;
            Ok::<_, std::io::Error>(byte == *b"x")
        };
        tokio::time::timeout(Duration::from_secs(20), talk).await.unwrap().unwrap_or(false)
    }

    async fn pair_with(&self, code: &Code, newcomer: &Self) -> Result<(), JoinError> {
        let admit = |name| self.host.admit(newcomer.id, name);
        pair(&self.tls, (self.id, VERSION), code, newcomer.id, newcomer.address, admit).await
    }
}

#[tokio::test]
async fn a_code_makes_both_sides_sure_of_each_other() {
    let (member, new) = (Node::start(), Node::start());
    knock(&new.tls, member.address, "new".to_owned(), new.address.port()).await.unwrap();
    let knocked = member.host.knocks.lock().unwrap().clone();
    assert_eq!(knocked, [(new.id, "new".to_owned(), new.address)]);
    let typed: Code = new.host.code.to_string().to_ascii_lowercase().parse().unwrap();
    member.pair_with(&typed, &new).await.unwrap();
    assert!(member.host.document.lock().unwrap().member(&new.id).is_some());
    assert_eq!(*new.host.joined.lock().unwrap(), Some(member.id));
}

#[tokio::test]
async fn a_wrong_code_admits_nobody_and_attempts_are_limited() {
    let (member, new) = (Node::start(), Node::start());
    let wrong = Code::draw(&new.id).unwrap();
    for attempt in 0..7 {
        let error = member.pair_with(&wrong, &new).await.unwrap_err();
        match attempt {
            0..5 => assert!(matches!(error, JoinError::WrongCode { .. }), "{error}"),
            _ => assert!(error.to_string().contains("too many"), "{error}"),
        }
    }
    assert!(member.host.document.lock().unwrap().member(&new.id).is_none());
    assert_eq!(*new.host.joined.lock().unwrap(), None);
}

/// An attacker who poses as the new node to the member, and as a member to the new node.
#[tokio::test]
async fn somebody_in_the_middle_gets_neither_side() {
    let (member, new, evil) = (Node::start(), Node::start(), Node::start());
    // The member is led to the attacker's node, which does not know the code.
    let admit = |name| member.host.admit(evil.id, name);
    let led = pair(&member.tls, (member.id, VERSION), &new.host.code, evil.id, evil.address, admit).await;
    assert!(matches!(led, Err(JoinError::WrongCode { .. })), "{led:?}");
    // The member knows the new node's key, and reaches the attacker's port.
    let admit = |name| member.host.admit(new.id, name);
    let led = pair(&member.tls, (member.id, VERSION), &new.host.code, new.id, evil.address, admit).await;
    assert!(matches!(led, Err(JoinError::Connection { .. })), "{led:?}");
    // The attacker guesses the code with the new node.
    evil.pair_with(&Code::draw(&new.id).unwrap(), &new).await.unwrap_err();
    assert!(member.host.document.lock().unwrap().members().count() == 1);
    assert_eq!(*new.host.joined.lock().unwrap(), None);
}

#[tokio::test]
async fn a_token_lets_one_node_in_and_only_at_its_issuer() {
    let (member, new, late) = (Node::start(), Node::start(), Node::start());
    let issue = || member.host.tokens.lock().unwrap().issue(member.id, Vec::new(), 999, HOUR).unwrap();
    let token = issue();
    let joined = join_with_token(&new.tls, &token, member.address, "new".to_owned()).await.unwrap();
    assert!(joined.member(&new.id).is_some() && joined.member(&member.id).is_some());
    let refusal = |error: JoinError| error.to_string();
    let used = join_with_token(&late.tls, &token, member.address, "late".to_owned()).await;
    assert!(refusal(used.unwrap_err()).contains("used before"));
    let forged = Token { secret: [7; 16], ..token.clone() };
    let forged = join_with_token(&late.tls, &forged, member.address, "late".to_owned()).await;
    assert!(refusal(forged.unwrap_err()).contains("not issued"));
    // Another node, even a member, cannot get a token from its holder.
    let stolen = join_with_token(&late.tls, &issue(), new.address, "late".to_owned()).await;
    assert!(matches!(stolen, Err(JoinError::Connection { .. })), "{stolen:?}");
    // A removed node's key is not accepted again with its old token.
    member.host.document.lock().unwrap().remove_member(&new.id).unwrap();
    let again = join_with_token(&new.tls, &token, member.address, "new".to_owned()).await;
    assert!(refusal(again.unwrap_err()).contains("removed"));
    let nameless = join_with_token(&late.tls, &issue(), member.address, "\u{1b}[2J".to_owned()).await;
    assert!(refusal(nameless.unwrap_err()).contains("printable"));
}

#[tokio::test]
async fn only_members_keys_pass_and_a_removed_one_no_more() {
    let (member, peer, stranger) = (Node::start(), Node::start(), Node::start());
    member.trust(&[&peer]);
    assert!(peer.echo(&member).await);
    assert!(!stranger.echo(&member).await, "a stranger's key");
    assert!(!peer.echo_of(member.address, stranger.id).await, "the server's key is another one");
    member.trust(&[]);
    assert!(!peer.echo(&member).await, "a removed key, with the same client configuration");
}

#[tokio::test]
async fn strangers_bytes_are_refused_and_bounded() {
    let (member, peer) = (Node::start(), Node::start());
    member.trust(&[&peer]);
    let mut random = thunder_testing::Random::new(5);
    for length in [0usize, 1, 5, 100, 5000, 70_000] {
        let mut stream = TcpStream::connect(member.address).await.unwrap();
        // The node may have closed the connection before everything is written.
        let _ = stream.write_all(&random.bytes(length)).await;
        let _ = stream.shutdown().await;
        let mut rest = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut rest)).await;
        assert!(read.is_ok(), "{length} bytes keep a connection open");
    }
    // An unknown key, the right protocol, and a message that announces 4 GiB.
    let config = peer.tls.client_of_anyone().unwrap();
    let stream = TcpStream::connect(member.address).await.unwrap();
    let mut stream = TlsConnector::from(config).connect(server_name(), stream).await.unwrap();
    stream.write_all(&u32::MAX.to_le_bytes()).await.unwrap();
    let mut rest = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut rest)).await;
    assert!(read.is_ok() && rest.is_empty());
    assert!(peer.echo(&member).await);
}

#[tokio::test]
async fn a_thousand_half_open_connections_do_not_keep_a_member_out() {
    let (member, peer) = (Node::start(), Node::start());
    member.trust(&[&peer]);
    let began = Instant::now();
    assert!(peer.echo(&member).await);
    let alone = began.elapsed();
    let mut held = Vec::new();
    for index in 0..1000 {
        let mut stream = TcpStream::connect(member.address).await.unwrap();
        if index % 2 == 0 {
            // The beginning of a TLS record.
            let _ = stream.write_all(&[22, 3, 1, 2, 0, 1]).await;
        }
        held.push(stream);
        if index % 100 == 99 {
            let began = Instant::now();
            assert!(peer.echo(&member).await, "after {} strangers", index + 1);
            let among = began.elapsed();
            assert!(
                among < Duration::from_secs(1).max(alone * 20),
                "{alone:?} alone, {among:?} among strangers"
            );
        }
    }
    // The oldest were dropped, and the number of the rest is within the limit.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut open = 0;
    for stream in &mut held {
        let mut byte = [0];
        let read = tokio::time::timeout(Duration::from_millis(1), stream.read(&mut byte)).await;
        open += usize::from(read.is_err());
    }
    assert!((1..=256).contains(&open), "{open} connections are held");
}

#[tokio::test]
async fn a_members_recorded_connection_cannot_be_played_again() {
    let (member, peer) = (Node::start(), Node::start());
    member.trust(&[&peer]);
    // An eavesdropper records everything that the member sends.
    let between = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, target) = (between.local_addr().unwrap(), member.address);
    let recording = tokio::spawn(async move {
        let (near, _) = between.accept().await.unwrap();
        let (mut from, mut back) = near.into_split();
        let (mut replies, mut to) = TcpStream::connect(target).await.unwrap().into_split();
        tokio::spawn(async move { tokio::io::copy(&mut replies, &mut back).await });
        let (mut recorded, mut piece) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = from.read(&mut piece).await {
            recorded.extend_from_slice(&piece[..count]);
            to.write_all(&piece[..count]).await.unwrap();
        }
        recorded
    });
    assert!(peer.echo_of(address, member.id).await);
    let recorded = recording.await.unwrap();
    assert!(recorded.len() > 200, "a handshake and a byte");
    // An accepted connection would stay open. The first record is the hello, and the rest answers
    // the server's reply to it.
    let mut stream = TcpStream::connect(target).await.unwrap();
    let hello = 5 + usize::from(u16::from_be_bytes([recorded[3], recorded[4]]));
    stream.write_all(&recorded[..hello]).await.unwrap();
    assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0, "the server's part of the handshake");
    let _ = stream.write_all(&recorded[hello..]).await;
    let mut rest = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(3), stream.read_to_end(&mut rest)).await;
    assert!(read.is_ok(), "the connection is closed at once");
    assert!(peer.echo(&member).await, "and the member is not disturbed");
}
