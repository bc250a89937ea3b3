//! The certificate for HTTPS: the operator's own, or one made at the first start. Renewed files
//! take effect while the server runs.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use sha2::{Digest, Sha256};
use tokio_rustls::TlsAcceptor;

/// Interval between checks of the files.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Days for which our own certificates are valid; Apple's systems refuse more than 825.
const VALID_DAYS: i64 = 397;
/// Age at which our own certificate is renewed.
const RENEW_AFTER: Duration = Duration::from_secs(330 * 24 * 3600);

/// Why HTTPS cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read or written.
    #[error("cannot {what} {path}: {why}")]
    File {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The key does not belong to the certificate.
    #[error("{key} is not the key of the certificate {certificate}: give the two files that belong together")]
    Mismatch {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
    },
    /// No certificate could be made.
    #[error("cannot make a certificate for {names}: {why}")]
    Make {
        /// The names in it.
        names: String,
        /// What is wrong.
        why: String,
    },
}

/// A certificate and its key, from two files in PEM format. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Certificate(Arc<Files>);

#[derive(Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    current: RwLock<Arc<CertifiedKey>>,
    /// A task looks for renewed files.
    is_watched: AtomicBool,
}

impl Certificate {
    /// Reads the operator's files: the certificate with the chain to its authority, and its key.
    ///
    /// # Errors
    /// When a file cannot be read, or the key is another certificate's.
    pub fn open(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let current = RwLock::new(Arc::new(read(certificate, key)?));
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        Ok(Self(Arc::new(Files { certificate, key, current, is_watched: AtomicBool::new(false) })))
    }

    /// The certificate in a data folder. If it is missing or old, it is made for these names and
    /// this machine.
    ///
    /// # Errors
    /// When it cannot be made, or the folder cannot be written.
    pub fn self_signed(folder: &Path, names: &[String]) -> Result<Self, TlsError> {
        let (certificate, key) = (folder.join("tls-cert.pem"), folder.join("tls-key.pem"));
        let age = modified(&certificate).and_then(|at| SystemTime::now().duration_since(at).ok());
        if age.is_none_or(|age| age > RENEW_AFTER) || !key.exists() {
            make(&certificate, &key, names)?;
        }
        Self::open(&certificate, &key)
    }

    /// File of the certificate, for clients to trust.
    pub fn path(&self) -> &Path {
        &self.0.certificate
    }

    /// SHA-256 of the certificate, as browsers show it.
    pub fn fingerprint(&self) -> String {
        let current = self.0.current.read().unwrap_or_else(PoisonError::into_inner).clone();
        let digest = Sha256::digest(current.cert.first().map(AsRef::as_ref).unwrap_or_default());
        digest.iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(":")
    }

    /// Makes handshakes with the current certificate.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.tls())
    }

    /// TLS settings with the certificate that is current at each handshake. Call it within a tokio
    /// runtime, on which a task checks for renewed files.
    pub fn tls(&self) -> Arc<rustls::ServerConfig> {
        if !self.0.is_watched.swap(true, Ordering::Relaxed) {
            tokio::spawn(watch(Arc::downgrade(&self.0)));
        }
        let mut config = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("ring has TLS 1.3")
            .with_no_client_auth()
            .with_cert_resolver(self.0.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Arc::new(config)
    }
}

impl ResolvesServerCert for Files {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Reads the files again after they have changed. If they do not belong together, this is logged,
/// and the server continues with the previous ones.
async fn watch(files: std::sync::Weak<Files>) {
    let mut seen = files.upgrade().map(|files| files.times());
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(files) = files.upgrade() else { return };
        let times = files.times();
        if seen == Some(times) {
            continue;
        }
        seen = Some(times);
        match read(&files.certificate, &files.key) {
            Ok(renewed) => {
                *files.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(renewed);
                tracing::info!(certificate = %files.certificate.display(), "the certificate was renewed");
            }
            Err(error) => tracing::error!("the certificate stays as it was: {error}"),
        }
    }
}

impl Files {
    fn times(&self) -> [Option<SystemTime>; 2] {
        [modified(&self.certificate), modified(&self.key)]
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

fn read(certificate: &Path, key: &Path) -> Result<CertifiedKey, TlsError> {
    let failed = |what, path: &Path, why: &dyn std::fmt::Display| TlsError::File {
        what,
        path: path.to_owned(),
        why: why.to_string(),
    };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| failed("read the certificate in", certificate, &error))?;
    if chain.is_empty() {
        return Err(failed("read the certificate in", certificate, &"it has none in PEM format"));
    }
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| failed("read the key in", key, &error))?;
    let signing = ring::sign::any_supported_type(&secret);
    let signing = signing.map_err(|error| failed("use the key in", key, &error))?;
    let both = CertifiedKey::new(chain, signing);
    match both.keys_match() {
        Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::KeyMismatch)) => {
            Err(TlsError::Mismatch { certificate: certificate.to_owned(), key: key.to_owned() })
        }
        _ => Ok(both),
    }
}

/// Makes a certificate for this machine and these names. Its key never leaves the folder.
fn make(certificate: &Path, key: &Path, names: &[String]) -> Result<(), TlsError> {
    let mut all = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    all.extend(names.iter().filter(|name| !all.contains(name)).cloned().collect::<Vec<_>>());
    let failed = |why: &dyn std::fmt::Display| TlsError::Make { names: all.join(", "), why: why.to_string() };
    let mut params = rcgen::CertificateParams::new(all.clone()).map_err(|error| failed(&error))?;
    params.distinguished_name.push(rcgen::DnType::CommonName, "Thunderhead");
    params.extended_key_usages.push(rcgen::ExtendedKeyUsagePurpose::ServerAuth);
    let today = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date();
    let day = |days: i64| {
        let date = today.saturating_add(jiff::Span::new().days(days));
        rcgen::date_time_ymd(i32::from(date.year()), date.month().unsigned_abs(), date.day().unsigned_abs())
    };
    (params.not_before, params.not_after) = (day(-1), day(VALID_DAYS));
    let pair = rcgen::KeyPair::generate().map_err(|error| failed(&error))?;
    let made = params.self_signed(&pair).map_err(|error| failed(&error))?;
    write(key, &pair.serialize_pem(), 0o600)?;
    write(certificate, &made.pem(), 0o644)
}

/// Replaces a file: a reader sees the old content or the new one.
fn write(path: &Path, content: &str, mode: u32) -> Result<(), TlsError> {
    let partial = path.with_extension("partial");
    let written = File::options().write(true).create(true).truncate(true).mode(mode).open(&partial);
    let written = written.and_then(|mut file| file.write_all(content.as_bytes()));
    written.and_then(|()| fs::rename(&partial, path)).map_err(|why| TlsError::File {
        what: "write",
        path: path.to_owned(),
        why: why.to_string(),
    })
}
