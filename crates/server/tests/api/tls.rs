//! HTTPS, renewed certificates, and the socket for local commands, over real sockets.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use thunder_access::{Access, Actor, NewKey, Now, Retention};
use thunder_server::{Certificate, ServerConfig, TlsError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use crate::lifecycle::start;
use crate::support::{hello, scripted};

const GET: &[u8] = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// The response to a client that trusts only the certificate in `trusted`.
async fn ask(address: SocketAddr, trusted: &Path) -> std::io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(trusted).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    stream.write_all(GET).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn https_is_served_and_a_renewed_certificate_is_picked_up() {
    let folder = tempfile::tempdir().unwrap();
    let certificate = Certificate::self_signed(folder.path(), &["box.example".into()]).unwrap();
    let (path, key) = (certificate.path().to_owned(), folder.path().join("tls-key.pem"));
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    // The second start has the same one.
    let again = Certificate::self_signed(folder.path(), &["box.example".into()]).unwrap();
    assert_eq!(again.fingerprint(), certificate.fingerprint());
    assert_eq!(certificate.fingerprint().len(), 32 * 3 - 1);
    let config = ServerConfig { certificate: Some(certificate.clone()), ..ServerConfig::default() };
    let server = start(scripted(hello), config).await;
    assert!(ask(server.address, &path).await.unwrap().starts_with("HTTP/1.1 200"));
    // A client that speaks no TLS gets no answer, and delays no other client.
    let mut plain = TcpStream::connect(server.address).await.unwrap();
    plain.write_all(GET).await.unwrap();
    let mut nothing = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(8), plain.read_to_end(&mut nothing)).await.unwrap();
    assert!(!nothing.starts_with(b"HTTP"));
    // A key that does not belong to the certificate changes nothing; then both files are replaced.
    let other = tempfile::tempdir().unwrap();
    let renewed = Certificate::self_signed(other.path(), &[]).unwrap();
    assert!(matches!(
        Certificate::open(&path, &other.path().join("tls-key.pem")),
        Err(TlsError::Mismatch { .. })
    ));
    let old = folder.path().join("old.pem");
    fs::copy(&path, &old).unwrap();
    fs::copy(other.path().join("tls-key.pem"), &key).unwrap();
    fs::copy(renewed.path(), &path).unwrap();
    let began = Instant::now();
    while ask(server.address, renewed.path()).await.is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "the renewed certificate is not served");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(ask(server.address, &old).await.is_err(), "the old one is not trusted any more");
}

#[test]
fn certificates_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.pem");
    let open = || Certificate::open(&file, &file).unwrap_err().to_string();
    assert!(open().contains("x.pem"));
    fs::write(&file, "-----BEGIN NONSENSE-----").unwrap();
    assert!(open().contains("x.pem"));
}

#[tokio::test]
async fn the_local_socket_needs_no_key_and_is_the_users_own() {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path(), Retention::default(), None).unwrap();
    let new = NewKey { name: "a".into(), ..NewKey::default() };
    access.create_key(new, &Actor::local(), Now::read().time).unwrap();
    let socket = folder.path().join("admin.sock");
    // The socket of a killed server is replaced.
    fs::write(&socket, "").unwrap();
    let config =
        ServerConfig { access: Some(access), local_socket: Some(socket.clone()), ..ServerConfig::default() };
    let server = start(scripted(hello), config).await;
    let ask = async |mut stream: Box<dyn Stream>| {
        stream.write_all(b"GET /admin/me HTTP/1.0\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head[9..12].to_owned(), serde_json::from_str::<Value>(body).unwrap())
    };
    let (status, me) = ask(Box::new(TcpStream::connect(server.address).await.unwrap())).await;
    assert_eq!((status.as_str(), &me["error"]["code"]), ("401", &"invalid_api_key".into()));
    let (status, me) = ask(Box::new(UnixStream::connect(&socket).await.unwrap())).await;
    assert_eq!((status.as_str(), &me["role"]), ("200", &"admin".into()));
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
}

/// A client that uses all connections must not prevent the operator from revoking a key.
#[tokio::test]
async fn the_local_socket_answers_when_all_connections_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("admin.sock");
    let config =
        ServerConfig { max_connections: 1, local_socket: Some(socket.clone()), ..ServerConfig::default() };
    let server = start(scripted(hello), config).await;
    let mut taken = TcpStream::connect(server.address).await.unwrap();
    taken.write_all(b"GET /").await.unwrap();
    let ask = async |mut stream: Box<dyn Stream>| {
        // A connection that is refused may be closed before it has sent this.
        let _ = stream.write_all(b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n").await;
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
        String::from_utf8_lossy(&status[9..]).into_owned()
    };
    assert_eq!(ask(Box::new(TcpStream::connect(server.address).await.unwrap())).await, "503");
    assert_eq!(ask(Box::new(UnixStream::connect(&socket).await.unwrap())).await, "200");
}

trait Stream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin> Stream for T {}
