//! TLS 1.3 with raw Ed25519 keys (RFC 7250): there is no certificate authority, each side knows the
//! other by its key.
//!
//! Three protocols share a node's port. The client names one by ALPN: [`Protocol::Peer`] and
//! [`Protocol::Call`] are for members, whose keys the server checks within the handshake;
//! [`Protocol::Join`] accepts any key, and its few messages prove more.
//!
//! Sessions are never resumed: a ticket would outlive the removal of its node.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, CommonState, DigitallySignedStruct, DistinguishedName, Error,
    PeerMisbehaved, ServerConfig, SignatureScheme,
};

use crate::id::NodeId;
use crate::identity::Identity;

/// The bytes before an Ed25519 key in its SubjectPublicKeyInfo (RFC 8410).
const KEY_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
/// The name in a client's hello. Servers ignore it.
const SERVER_NAME: &str = "thunder";

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Heartbeats and documents between members.
    Peer,
    /// A member's call: one request and its reply.
    Call,
    /// A stranger that asks to join.
    Join,
}

impl Protocol {
    /// Every protocol.
    pub const ALL: [Self; 3] = [Self::Peer, Self::Call, Self::Join];

    /// Its name in ALPN.
    pub fn name(self) -> &'static [u8] {
        match self {
            Self::Peer => b"thunder-peer/1",
            Self::Call => b"thunder-call/1",
            Self::Join => b"thunder-join/1",
        }
    }
}

/// The keys that may currently use a node's members-only protocols. Shared by all its connections.
#[derive(Debug, Clone, Default)]
pub struct Trusted(Arc<RwLock<BTreeSet<NodeId>>>);

impl Trusted {
    /// Replaces the keys.
    pub fn set(&self, keys: BTreeSet<NodeId>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// Whether a key is trusted.
    pub fn contains(&self, id: &NodeId) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains(id)
    }
}

/// The keys that a side accepts.
#[derive(Debug, Clone)]
enum Accepts {
    Members(Trusted),
    Only(NodeId),
    Any,
}

/// A node's key, and its configuration for connections in both directions.
#[derive(Debug, Clone)]
pub struct Tls {
    key: Arc<CertifiedKey>,
    algorithms: WebPkiSupportedAlgorithms,
    trusted: Trusted,
}

impl Tls {
    /// With a node's key and the members that it trusts.
    ///
    /// # Errors
    /// If the cryptographic library refuses the key.
    pub fn new(identity: &Identity, trusted: Trusted) -> Result<Self, Error> {
        let private = PrivatePkcs8KeyDer::from(identity.pkcs8()).clone_key();
        let signer = provider::sign::any_eddsa_type(&private)?;
        let public = CertificateDer::from(encode_key(&identity.id()));
        let key = Arc::new(CertifiedKey::new(vec![public], signer));
        let algorithms = provider::default_provider().signature_verification_algorithms;
        Ok(Self { key, algorithms, trusted })
    }

    /// For a client of the node `peer`. No other node can answer.
    ///
    /// # Errors
    /// When TLS 1.3 is not available.
    pub fn client(&self, protocol: Protocol, peer: NodeId) -> Result<Arc<ClientConfig>, Error> {
        self.client_that(protocol, Accepts::Only(peer))
    }

    /// For a client that does not know which node it will reach. Only for [`Protocol::Join`].
    ///
    /// # Errors
    /// If TLS 1.3 is not available.
    pub fn client_of_anyone(&self) -> Result<Arc<ClientConfig>, Error> {
        self.client_that(Protocol::Join, Accepts::Any)
    }

    fn client_that(&self, protocol: Protocol, accepts: Accepts) -> Result<Arc<ClientConfig>, Error> {
        let verifier = Arc::new(KeyVerifier { accepts, algorithms: self.algorithms });
        let builder = ClientConfig::builder_with_provider(provider::default_provider().into());
        let mut config = builder
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(self.key.clone())));
        config.alpn_protocols = vec![protocol.name().to_vec()];
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// For the server of a protocol.
    ///
    /// # Errors
    /// When TLS 1.3 is not available.
    pub fn server(&self, protocol: Protocol) -> Result<Arc<ServerConfig>, Error> {
        let accepts = match protocol {
            Protocol::Peer | Protocol::Call => Accepts::Members(self.trusted.clone()),
            Protocol::Join => Accepts::Any,
        };
        let verifier = Arc::new(KeyVerifier { accepts, algorithms: self.algorithms });
        let builder = ServerConfig::builder_with_provider(provider::default_provider().into());
        let mut config = builder
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(self.key.clone())));
        config.alpn_protocols = vec![protocol.name().to_vec()];
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// Whether a key belongs to a member.
    pub fn trusts(&self, id: &NodeId) -> bool {
        self.trusted.contains(id)
    }
}

/// The name that clients send.
pub fn server_name() -> ServerName<'static> {
    // A constant that is a DNS name.
    ServerName::try_from(SERVER_NAME).unwrap_or(ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into()))
}

/// The other side's key, after the handshake.
pub fn peer_of(connection: &CommonState) -> Option<NodeId> {
    decode_key(connection.peer_certificates()?.first()?)
}

fn encode_key(id: &NodeId) -> Vec<u8> {
    [&KEY_PREFIX[..], &id.0].concat()
}

fn decode_key(info: &[u8]) -> Option<NodeId> {
    info.strip_prefix(&KEY_PREFIX).and_then(|key| key.try_into().ok()).map(NodeId)
}

/// Checks the other side's key. Its signature of the handshake, which the cryptographic library
/// verifies, proves that it holds the private key.
#[derive(Debug)]
struct KeyVerifier {
    accepts: Accepts,
    algorithms: WebPkiSupportedAlgorithms,
}

impl KeyVerifier {
    fn check(&self, key: &CertificateDer<'_>, others: &[CertificateDer<'_>]) -> Result<(), Error> {
        let id = decode_key(key).filter(|_| others.is_empty());
        let id = id.ok_or(Error::InvalidCertificate(CertificateError::BadEncoding))?;
        let accepted = match &self.accepts {
            Accepts::Any => true,
            Accepts::Only(expected) => id == *expected,
            Accepts::Members(trusted) => trusted.contains(&id),
        };
        let unknown = Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
        if accepted { Ok(()) } else { Err(unknown) }
    }

    fn check_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

/// TLS 1.2 is never offered, so no conforming peer signs for it.
fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into())
}

impl ServerCertVerifier for KeyVerifier {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(key, others).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for KeyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(key, others).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
