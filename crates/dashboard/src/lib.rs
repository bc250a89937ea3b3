//! The dashboard's files, with the headers for sending them.
//!
//! The files are built from the folder `dashboard` of the repository and are part of the program,
//! so the pages work without the internet. This crate opens no socket: a server calls [`page`] for
//! the response to a path, and forwards requests that it does not know to an [`Extension`].
//!
//! ```
//! let page = thunder_dashboard::page("/app.js", "gzip, br", "").expect("a file of the dashboard");
//! assert_eq!(page.status, 200);
//! let etag = page.headers.iter().find(|(name, _)| *name == "etag").expect("every file has one");
//! let again = thunder_dashboard::page("/app.js", "gzip, br", &etag.1).expect("the same file");
//! assert_eq!((again.status, again.body.len()), (304, 0));
//! ```

mod extension;

use std::io::Write;
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

pub use extension::{Act, Answer, Ask, Extension};

/// The pages' Content-Security-Policy: load from this server only, no inline scripts, no frames.
/// Scripts set styles, not text.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

/// A file of the dashboard.
struct File {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

const FILES: [File; 4] = [
    File {
        path: "/",
        kind: "text/html; charset=utf-8",
        bytes: include_bytes!("../../../dashboard/dist/index.html"),
    },
    File {
        path: "/app.js",
        kind: "text/javascript; charset=utf-8",
        bytes: include_bytes!("../../../dashboard/dist/app.js"),
    },
    File {
        path: "/app.css",
        kind: "text/css; charset=utf-8",
        bytes: include_bytes!("../../../dashboard/dist/app.css"),
    },
    File {
        path: "/icon.svg",
        kind: "image/svg+xml",
        bytes: include_bytes!("../../../dashboard/dist/icon.svg"),
    },
];

/// A file's compressed form and its tag, made at the first request for a page.
struct Prepared {
    tag: String,
    zipped: Vec<u8>,
}

static PREPARED: LazyLock<Vec<Prepared>> = LazyLock::new(|| FILES.iter().map(prepare).collect());

fn prepare(file: &File) -> Prepared {
    let digest = Sha256::digest(file.bytes);
    let tag = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    // Writing to memory does not fail. If it did, the file would be sent uncompressed.
    let written = encoder.write_all(file.bytes).and_then(|()| encoder.finish());
    Prepared { tag, zipped: written.unwrap_or_default() }
}

/// The response to a request for a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// 200, or 304 if the browser has it.
    pub status: u16,
    /// Names in lower case. Without `content-length`.
    pub headers: Vec<(&'static str, String)>,
    /// The body; for HEAD, a server leaves it out.
    pub body: &'static [u8],
}

/// The paths of all files.
pub fn paths() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|file| file.path)
}

/// The response to GET and HEAD of `path`, for the request's `accept-encoding` and `if-none-match`,
/// which are empty if missing. `None` if the dashboard has no such file.
pub fn page(path: &str, accept_encoding: &str, if_none_match: &str) -> Option<Page> {
    let index = FILES.iter().position(|file| file.path == path)?;
    let (file, prepared) = (&FILES[index], &PREPARED[index]);
    let zipped = takes_gzip(accept_encoding) && !prepared.zipped.is_empty();
    let tag = format!("\"{}{}\"", prepared.tag, if zipped { "-gz" } else { "" });
    let known = if_none_match.split(',').any(|given| given.trim().trim_start_matches("W/") == tag);
    let mut headers = vec![
        ("content-type", file.kind.to_owned()),
        ("etag", tag),
        // Checked again each time, so that an update of the program takes effect at once.
        ("cache-control", "no-cache".to_owned()),
        ("vary", "accept-encoding".to_owned()),
        ("content-security-policy", POLICY.to_owned()),
        ("x-content-type-options", "nosniff".to_owned()),
        ("referrer-policy", "no-referrer".to_owned()),
        ("cross-origin-opener-policy", "same-origin".to_owned()),
        ("cross-origin-resource-policy", "same-origin".to_owned()),
    ];
    if zipped {
        headers.push(("content-encoding", "gzip".to_owned()));
    }
    let whole = if zipped { &prepared.zipped[..] } else { file.bytes };
    let (status, body) = if known { (304, &[][..]) } else { (200, whole) };
    Some(Page { status, headers, body })
}

/// Whether the client accepts gzip: by name or by `*`, and not with a quality of 0.
fn takes_gzip(accept_encoding: &str) -> bool {
    let quality = |wanted: &str| {
        accept_encoding.split(',').find_map(|item| {
            let mut parts = item.split(';').map(str::trim);
            let is_it = parts.next().is_some_and(|name| name.eq_ignore_ascii_case(wanted));
            let given = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok());
            is_it.then(|| given.unwrap_or(1.0))
        })
    };
    quality("gzip").or_else(|| quality("*")).is_some_and(|quality| quality > 0.0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};

    use super::*;

    #[test]
    fn all_files_are_there_typed_and_small() {
        let sizes: usize = FILES.iter().map(|file| file.bytes.len()).sum();
        assert!((10_000..300_000).contains(&sizes), "{sizes} bytes: the first page has a budget of 300 KB");
        let page = page("/", "", "").expect("the first page");
        let html = String::from_utf8_lossy(page.body);
        // A policy without 'unsafe-inline' would block them.
        assert!(
            !html.contains("<style") && !html.contains("<script>") && !html.contains(" style="),
            "{html}"
        );
        for file in &FILES {
            let text = String::from_utf8_lossy(file.bytes);
            // SVG's namespace names are not addresses that the browser requests.
            let text = text.replace("http://www.w3.org/", "");
            assert!(!text.contains("src=\"http") && !text.contains("url(http"), "{}", file.path);
        }
        assert!(super::page("/../Cargo.toml", "", "").is_none() && super::page("", "", "").is_none());
    }

    /// The files of a folder of the dashboard's sources, by their paths below `root`.
    fn files(root: &Path, folder: &str, found: &mut BTreeMap<String, PathBuf>) {
        for entry in std::fs::read_dir(root.join(folder)).expect("a folder").flatten() {
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            let name = name.trim_start_matches("./").to_owned();
            if entry.path().is_dir() {
                files(root, &name, found);
            } else {
                found.insert(name, entry.path());
            }
        }
    }

    /// Like `dashboard/build`, which uses sha256sum.
    fn hash_of(files: &BTreeMap<String, PathBuf>) -> String {
        let hex =
            |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let line = |(name, path): (&String, &PathBuf)| {
            format!("{}  {name}\n", hex(&std::fs::read(path).expect("a file")))
        };
        hex(files.iter().map(line).collect::<String>().as_bytes())
    }

    #[test]
    fn the_built_files_are_those_of_the_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dashboard");
        let mut sources = BTreeMap::new();
        files(&root, "src", &mut sources);
        for name in ["build", "package.json", "package-lock.json", "tsconfig.json"] {
            sources.insert(name.to_owned(), root.join(name));
        }
        let mut built = BTreeMap::new();
        files(&root.join("dist"), ".", &mut built);
        let noted = built.remove("hashes.txt").expect("dashboard/build writes it");
        let noted = std::fs::read_to_string(noted).expect("text");
        let now = format!("sources {}\nfiles {}\n", hash_of(&sources), hash_of(&built));
        assert_eq!(noted, now, "dashboard/dist is not what dashboard/src gives: run dashboard/build");
    }

    #[test]
    fn gzip_is_sent_to_those_who_take_it() {
        for (accept, zipped) in [
            ("", false),
            ("gzip", true),
            ("GZIP;q=0.5, br", true),
            ("gzip;q=0", false),
            ("gzip;q=0, *", false),
            ("*", true),
            ("br, deflate", false),
            (";;;,,q=", false),
        ] {
            let page = page("/app.js", accept, "").expect("a file");
            let encoded = page.headers.iter().any(|(name, _)| *name == "content-encoding");
            assert_eq!(encoded, zipped, "{accept}");
            assert_eq!(page.body.starts_with(&[0x1f, 0x8b]), zipped, "{accept}");
        }
        let (zipped, plain) = (page("/app.js", "gzip", ""), page("/app.js", "", ""));
        let (zipped, plain) = (zipped.expect("a file"), plain.expect("a file"));
        assert!(zipped.body.len() * 2 < plain.body.len());
        // A cache must not return one form for the other.
        assert_ne!(zipped.headers[1], plain.headers[1]);
    }
}
