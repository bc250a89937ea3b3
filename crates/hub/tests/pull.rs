//! Pulls from a server that imitates the hub, with and without faults.
#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod server;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant, SystemTime},
};

use server::{COMMIT, Fault, Server};
use thunder_hub::{
    HubError, Located, PullEvent, PullOptions, fetch_headers, is_damaged, locate_in, pull, verify,
};

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const NEEDED: [&str; 5] = ["config.json", "model.safetensors.index.json", "tokenizer.json", FIRST, SECOND];

struct Fixture {
    server: Server,
    cache: tempfile::TempDir,
    options: PullOptions,
}

impl Fixture {
    fn new() -> Self {
        let server = Server::with_model();
        let cache = tempfile::tempdir().unwrap();
        let options = PullOptions {
            endpoint: server.endpoint.clone(),
            token: None,
            cache: cache.path().to_owned(),
            jobs: 4,
            attempts: 4,
            first_wait: Duration::from_millis(5),
            stall: Duration::from_secs(10),
            peers: Vec::new(),
            offline: false,
            refresh: false,
            commit: None,
        };
        Self { server, cache, options }
    }

    fn pull(&self) -> Result<Located, HubError> {
        pull("org/name", "main", &self.options, &|_| {})
    }

    fn error(&self) -> String {
        self.pull().expect_err("the pull fails").to_string()
    }

    fn repo(&self) -> PathBuf {
        self.cache.path().join("models--org--name")
    }

    fn part(&self, file: &str) -> PathBuf {
        self.repo().join("blobs").join(format!("{}.thunder.incomplete", self.server.etag(file)))
    }

    fn check_files(&self, folder: &Path) {
        for name in NEEDED {
            assert!(fs::read(folder.join(name)).unwrap() == self.server.content(name), "{name} is right");
        }
    }

    /// The ranges that were requested of a file's content.
    fn ranges(&self, file: &str) -> Vec<Option<String>> {
        let path = format!("GET /stored/{file}");
        self.server
            .seen()
            .into_iter()
            .filter(|seen| seen.line.starts_with(&path))
            .map(|seen| seen.range)
            .collect()
    }
}

#[test]
fn a_pages_address_is_a_name() {
    let fixture = Fixture::new();
    let located = pull("https://huggingface.co/org/name/", "main", &fixture.options, &|_| {}).unwrap();
    assert_eq!(located.repo.as_deref(), Some("org/name"));
    fixture.check_files(&located.folder);
}

#[test]
fn a_pull_fills_the_cache_in_huggingface_hubs_layout() {
    let fixture = Fixture::new();
    let events = Mutex::new(Vec::new());
    let located = pull("org/name", "main", &fixture.options, &|event| {
        events.lock().unwrap().push(format!("{event:?}"));
    })
    .unwrap();
    assert_eq!(located.folder, fixture.repo().join("snapshots").join(COMMIT));
    fixture.check_files(&located.folder);
    assert!(!located.folder.join("README.md").exists() && !located.folder.join("pytorch_model.bin").exists());
    assert_eq!(fs::read_to_string(fixture.repo().join("refs/main")).unwrap(), COMMIT);
    let target = fs::read_link(located.folder.join(FIRST)).unwrap();
    assert_eq!(target, Path::new("../../blobs").join(fixture.server.etag(FIRST)));
    assert_eq!(fs::read_dir(fixture.repo().join("blobs")).unwrap().count(), NEEDED.len(), "no part is left");
    assert_eq!(locate_in("org/name", fixture.cache.path()).unwrap(), located);
    assert_eq!(locate_in(format!("org/name@{COMMIT}"), fixture.cache.path()).unwrap(), located);

    let events = events.into_inner().unwrap();
    let bytes: usize = NEEDED.iter().map(|name| fixture.server.content(name).len()).sum();
    assert_eq!(events[0], format!("Start {{ files: 5, bytes: {bytes}, present: 0 }}"));
    assert!(events.contains(&format!("Bytes {{ file: {FIRST:?}, done: 1500000, total: 1500000 }}")));
    assert_eq!(events.iter().filter(|event| event.starts_with("Done")).count(), NEEDED.len());
}

#[test]
fn a_quantization_is_pulled_alone() {
    let mut fixture = Fixture::new();
    let files = ["n-Q4_K_M.gguf", "n-Q8_0-00001-of-00002.gguf", "n-Q8_0-00002-of-00002.gguf"];
    for (index, file) in files.into_iter().enumerate() {
        fixture.server.add(file, vec![index as u8; 100_000 + index], true);
    }
    let pull = |fixture: &Fixture, name: &str| pull(name, "main", &fixture.options, &|_| {});
    let located = pull(&fixture, "org/name:q8_0").unwrap();
    let snapshot = fixture.repo().join("snapshots").join(COMMIT);
    assert_eq!(located.folder, snapshot.join(files[1]));
    assert_eq!(located.repo.as_deref(), Some("org/name:q8_0"));
    assert!(snapshot.join(files[2]).exists(), "all parts are there");
    assert!(!snapshot.join(files[0]).exists() && !snapshot.join(FIRST).exists(), "nothing else is");
    assert_eq!(locate_in("org/name:q8_0", fixture.cache.path()).unwrap(), located);

    let other = pull(&fixture, "org/name:Q4_K_M").unwrap();
    assert_eq!(fs::read(&other.folder).unwrap(), fixture.server.content(files[0]));
    let requests = fixture.server.seen().len();
    fixture.options.offline = true;
    assert_eq!(pull(&fixture, "org/name:Q8_0").unwrap().folder, located.folder);
    assert_eq!(fixture.server.seen().len(), requests, "both are complete");
    fixture.options.offline = false;
    let error = pull(&fixture, "org/name:Q2_K").unwrap_err().to_string();
    assert!(error.contains("no GGUF file of Q2_K") && error.contains("it has Q4_K_M, Q8_0"), "{error}");
}

#[test]
fn a_second_pull_does_not_use_the_network() {
    let mut fixture = Fixture::new();
    let first = fixture.pull().unwrap();
    let requests = fixture.server.seen().len();
    assert_eq!(fixture.pull().unwrap(), first);
    assert_eq!(fixture.server.seen().len(), requests);

    fixture.options.refresh = true;
    assert_eq!(fixture.pull().unwrap(), first);
    assert!(fixture.server.seen().len() > requests, "a refresh asks the hub");
    assert_eq!(fixture.ranges(FIRST).len(), 1, "a refresh downloads nothing again");

    fixture.options.offline = true;
    assert!(matches!(fixture.pull(), Err(HubError::OfflineUpdate { .. })), "it cannot be asked");
    fixture.options.offline = false;

    fixture.options.refresh = false;
    fs::remove_file(fs::canonicalize(first.folder.join(SECOND)).unwrap()).unwrap();
    let error = locate_in("org/name", fixture.cache.path()).unwrap_err().to_string();
    assert!(error.contains(SECOND) && error.contains("thunder model pull org/name"), "{error}");
    fixture.options.offline = true;
    assert!(matches!(fixture.pull(), Err(HubError::Offline { .. })));
    fixture.options.offline = false;
    fixture.pull().unwrap();
    fixture.check_files(&first.folder);
    assert_eq!((fixture.ranges(FIRST).len(), fixture.ranges(SECOND).len()), (1, 2), "only what was missing");
}

#[test]
fn what_is_damaged_or_short_is_downloaded_again_and_nothing_else() {
    let fixture = Fixture::new();
    let located = fixture.pull().unwrap();
    let is_damaged = || is_damaged(&located, fixture.cache.path()).unwrap();
    let blob = |file: &str| fs::canonicalize(located.folder.join(file)).unwrap();
    let mut bytes = fixture.server.content(FIRST);
    bytes[777_777] ^= 1;
    fs::write(blob(FIRST), bytes).unwrap();
    assert!(!is_damaged(), "nobody has looked");
    assert_eq!(verify(&located.folder, &|_| {}).unwrap().damaged, [located.folder.join(FIRST)]);
    assert!(is_damaged());
    assert_eq!(fixture.pull().unwrap(), located);
    fixture.check_files(&located.folder);
    assert!(!is_damaged());
    // A wrong length is found without a check.
    fs::write(blob(SECOND), "short").unwrap();
    assert!(is_damaged());
    fixture.pull().unwrap();
    fixture.check_files(&located.folder);
    assert!(!is_damaged());
    assert_eq!((fixture.ranges(FIRST).len(), fixture.ranges(SECOND).len()), (2, 2));
}

#[test]
fn headers_are_fetched_without_the_weights() {
    let fixture = Fixture::new();
    // A header of 100,000 bytes does not come with the first request.
    for (file, header, weights) in [(FIRST, 100_000, 2_000_000), (SECOND, 1000, 0)] {
        let mut content = (header as u64).to_le_bytes().to_vec();
        content.resize(8 + header, b' ');
        content.resize(8 + header + weights, 7);
        fixture.server.add(file, content, true);
    }
    let into = tempfile::tempdir().unwrap();
    let fetch = || {
        let fetched = fetch_headers("org/name", "main", &fixture.options, into.path());
        fetched.map(|located| (located.commit.as_deref() == Some(COMMIT)).then_some(located.folder).unwrap())
    };
    let folder = fetch().unwrap();
    for name in ["config.json", "model.safetensors.index.json", SECOND] {
        assert!(fs::read(folder.join(name)).unwrap() == fixture.server.content(name), "{name} is right");
    }
    let (first, whole) = (fs::read(folder.join(FIRST)).unwrap(), fixture.server.content(FIRST));
    assert_eq!((first.len(), &first[..100_008]), (whole.len(), &whole[..100_008]));
    assert!(first[100_008..].iter().all(|byte| *byte == 0), "the weights are not fetched");
    assert!(!folder.join("tokenizer.json").exists(), "a plan needs no tokenizer");
    let ranges = [Some("bytes=0-65535".to_owned()), Some("bytes=0-100007".to_owned())];
    assert_eq!(fixture.ranges(FIRST), ranges);
    assert_eq!(fetch().unwrap(), folder);
    assert_eq!(fixture.ranges(FIRST).len(), 2, "they are there already");
    // Headers of earlier commits are deleted, except two, and so are the folders of killed calls.
    let of_repo = folder.parent().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    let hours = |count: u64| SystemTime::now() - Duration::from_secs(3600 * count);
    for (name, age) in [("a", 9), ("b", 2), ("c", 3), ("d", 8), ("e.new-7-0", 4), ("f.new-8-0", 0)] {
        fs::create_dir(of_repo.join(name)).unwrap();
        fs::File::open(of_repo.join(name)).unwrap().set_modified(hours(age)).unwrap();
    }
    assert_eq!(fetch().unwrap(), folder);
    let left = fs::read_dir(of_repo).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut left: Vec<String> = left.filter(|name| of_repo.join(name) != folder).collect();
    left.sort();
    assert_eq!(left, ["b", "c", "f.new-8-0"]);
    assert!(locate_in("org/name", fixture.cache.path()).is_err(), "the cache is left alone");
    fixture.server.close(404, "RepoNotFound");
    assert!(matches!(fetch(), Err(HubError::RepoNotFound { .. })));
}

#[test]
fn the_token_goes_to_the_hub_only() {
    let mut fixture = Fixture::new();
    fixture.server.require_token("hf_secret");
    let error = fixture.error();
    assert!(error.contains("org/name is gated") && error.contains("HF_TOKEN"), "{error}");
    assert!(error.contains(&format!("{}/org/name", fixture.server.endpoint)), "{error}");
    fixture.options.token = Some("hf_secret".into());
    fixture.pull().unwrap();
    let seen = fixture.server.seen();
    assert!(seen.iter().filter(|seen| seen.host == "cdn").count() >= 2);
    assert!(seen.iter().all(|seen| seen.host == "hub" || seen.authorization.is_none()), "{seen:#?}");
}

#[test]
fn a_download_resumes_where_the_connection_broke() {
    let fixture = Fixture::new();
    fixture.server.fault(FIRST, Fault::Drop(700_000));
    fixture.server.fault(FIRST, Fault::Drop(300_000));
    let located = fixture.pull().unwrap();
    fixture.check_files(&located.folder);
    let ranges = fixture.ranges(FIRST);
    assert_eq!(ranges, [None, Some("bytes=700000-".into()), Some("bytes=1000000-".into())]);
}

#[test]
fn a_pull_resumes_an_earlier_failed_pull() {
    let mut fixture = Fixture::new();
    fixture.options.attempts = 1;
    fixture.server.fault(SECOND, Fault::Drop(400_000));
    let error = fixture.error();
    assert!(
        error.contains(SECOND) && error.contains("400000 of 900001") && error.contains("pull again"),
        "{error}"
    );
    assert_eq!(fs::metadata(fixture.part(SECOND)).unwrap().len(), 400_000);
    assert!(matches!(locate_in("org/name", fixture.cache.path()), Err(HubError::NotFound { .. })));
    let located = fixture.pull().unwrap();
    fixture.check_files(&located.folder);
    assert_eq!(fixture.ranges(SECOND).last().unwrap().as_deref(), Some("bytes=400000-"));
}

#[test]
fn without_range_support_a_download_starts_over() {
    let fixture = Fixture::new();
    fixture.server.fault(FIRST, Fault::Drop(700_000));
    fixture.server.fault(FIRST, Fault::IgnoreRange);
    fixture.check_files(&fixture.pull().unwrap().folder);
}

#[test]
fn a_wrong_range_is_refused() {
    let fixture = Fixture::new();
    fixture.server.fault(FIRST, Fault::Drop(700_000));
    fixture.server.fault(FIRST, Fault::WrongRange);
    let error = fixture.error();
    assert!(error.contains(FIRST) && error.contains("asked for bytes from 700000"), "{error}");
}

#[test]
fn a_part_longer_than_the_file_is_discarded() {
    let fixture = Fixture::new();
    fs::create_dir_all(fixture.repo().join("blobs")).unwrap();
    fs::write(fixture.part(FIRST), vec![7; 2_000_000]).unwrap();
    fixture.check_files(&fixture.pull().unwrap().folder);
}

#[test]
fn a_wrong_checksum_deletes_the_part() {
    for file in [FIRST, "config.json"] {
        let fixture = Fixture::new();
        fixture.server.fault(file, Fault::Garble);
        match fixture.pull().unwrap_err() {
            HubError::Checksum { file: named, expected, actual, .. } => {
                assert_eq!((named.as_str(), &expected), (file, &fixture.server.etag(file)));
                assert_ne!(expected, actual);
            }
            other => panic!("{other}"),
        }
        assert!(!fixture.part(file).exists());
        fixture.check_files(&fixture.pull().unwrap().folder);
    }
}

#[test]
fn a_part_damaged_on_disk_is_detected() {
    let fixture = Fixture::new();
    fs::create_dir_all(fixture.repo().join("blobs")).unwrap();
    fs::write(fixture.part(FIRST), vec![0; 1000]).unwrap();
    assert!(matches!(fixture.pull(), Err(HubError::Checksum { .. })));
    assert!(!fixture.part(FIRST).exists());
    fixture.check_files(&fixture.pull().unwrap().folder);
}

#[test]
fn transient_server_errors_are_retried() {
    let fixture = Fixture::new();
    fixture.server.fault("list", Fault::Status(500, ""));
    fixture.server.fault(FIRST, Fault::Status(503, ""));
    fixture.server.fault(FIRST, Fault::Status(429, ""));
    fixture.server.fault("config.json", Fault::Status(500, ""));
    let retries = Mutex::new(Vec::new());
    pull("org/name", "main", &fixture.options, &|event| {
        if let PullEvent::Retry { file, reason, .. } = event {
            retries.lock().unwrap().push(format!("{file}: {reason}"));
        }
    })
    .unwrap();
    let retries = retries.into_inner().unwrap();
    assert_eq!(retries.len(), 4, "{retries:?}");
    assert!(retries[0].starts_with("list of files: HTTP status 500"), "{retries:?}");
}

#[test]
fn repeated_server_errors_end_the_pull() {
    let fixture = Fixture::new();
    for _ in 0..4 {
        fixture.server.fault("list", Fault::Status(502, ""));
    }
    let error = fixture.error();
    assert!(error.contains("HTTP status 502") && error.contains("after 4 attempts"), "{error}");
}

#[test]
fn a_stalled_connection_is_dropped_and_retried() {
    let mut fixture = Fixture::new();
    fixture.options.stall = Duration::from_millis(300);
    fixture.server.fault(FIRST, Fault::Stall(500_000, Duration::from_secs(20)));
    let started = Instant::now();
    fixture.check_files(&fixture.pull().unwrap().folder);
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(fixture.ranges(FIRST).last().unwrap().as_deref(), Some("bytes=500000-"));
}

#[test]
fn an_endpoint_that_cannot_be_reached_is_an_error_at_once() {
    let mut fixture = Fixture::new();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    fixture.options.first_wait = Duration::from_secs(60);
    for endpoint in [format!("http://127.0.0.1:{port}"), "http://no-such-host.invalid".into()] {
        fixture.options.endpoint = endpoint.clone();
        let error = fixture.error();
        assert!(error.contains(&format!("cannot reach {endpoint} to pull org/name")), "{error}");
        assert!(error.contains("network") && !error.contains("continues"), "nothing has come: {error}");
    }
}

#[test]
fn a_server_that_does_not_speak_tls_is_a_clear_error() {
    let mut fixture = Fixture::new();
    fixture.options.endpoint = fixture.server.endpoint.replace("http://", "https://");
    fixture.options.attempts = 1;
    let error = fixture.error();
    assert!(error.contains("org/name: list of files"), "{error}");
    assert!(
        fixture.server.seen().iter().all(|seen| !seen.line.starts_with("GET")),
        "no request is sent in plain text"
    );
}

#[test]
fn refusals_say_what_to_do() {
    let cases = [
        (404, "RepoNotFound", "org/name was not found", "check the name"),
        (404, "", "org/name was not found", "check the name"),
        (401, "", "org/name was not found", "HF_TOKEN"),
        (404, "RevisionNotFound", "no revision \"main\"", "branches and tags"),
        (403, "GatedRepo", "org/name is gated", "accept its licence"),
        (403, "", "access to list of files was refused (HTTP 403)", "HF_TOKEN"),
    ];
    for (status, code, what, remedy) in cases {
        let fixture = Fixture::new();
        fixture.server.close(status, code);
        let error = fixture.error();
        assert!(error.contains(what) && error.contains(remedy), "{status} {code}: {error}");
    }
    let mut fixture = Fixture::new();
    fixture.options.token = Some("hf_wrong".into());
    fixture.server.close(401, "");
    let error = fixture.error();
    assert!(error.contains("HTTP 401") && error.contains("must be valid"), "{error}");
    let fixture = Fixture::new();
    fixture.server.fault(FIRST, Fault::Status(404, "EntryNotFound"));
    let error = fixture.error();
    assert!(error.contains(&format!("lists {FIRST}")), "{error}");
}

#[test]
fn file_names_that_escape_the_folder_are_refused() {
    for name in ["../../escape.json", "/etc/escape.json", "a/../../escape.json", "..\\escape.json"] {
        let fixture = Fixture::new();
        fixture.server.add(name, b"x".to_vec(), false);
        match fixture.pull().unwrap_err() {
            HubError::UnsafeName { file, .. } => assert_eq!(file, name),
            other => panic!("{other}"),
        }
        assert!(!fixture.repo().join("blobs").exists(), "nothing was downloaded");
    }
}

#[test]
fn a_full_disk_is_detected_before_the_download() {
    let fixture = Fixture::new();
    fixture.server.report_size(FIRST, 1 << 60);
    let error = fixture.error();
    assert!(error.contains("needs 11529") && error.contains("HF_HUB_CACHE"), "{error}");
    assert!(fixture.ranges(FIRST).is_empty());
}

#[test]
fn at_most_the_allowed_number_of_files_download_at_once() {
    for (jobs, least) in [(4, 2), (1, 1)] {
        let mut fixture = Fixture::new();
        fixture.options.jobs = jobs;
        for file in [FIRST, SECOND] {
            fixture.server.fault(file, Fault::Delay(Duration::from_millis(400)));
        }
        fixture.pull().unwrap();
        let most = fixture.server.most_at_once();
        assert!((least..=jobs).contains(&most), "{most} at once of {jobs}");
    }
}

#[test]
fn two_pulls_of_one_repository_exclude_each_other() {
    let fixture = Fixture::new();
    fixture.server.fault(FIRST, Fault::Delay(Duration::from_secs(3)));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| fixture.pull());
        while fixture.server.seen().is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = fixture.error();
        assert!(error.contains("another pull of org/name is running"), "{error}");
        first.join().unwrap().unwrap();
    });
    fixture.check_files(&fixture.pull().unwrap().folder);
}

#[test]
fn bad_names_are_refused_before_a_request() {
    let fixture = Fixture::new();
    for name in ["../name", "a/b/c", "org/na me", ""] {
        let error = pull(name, "main", &fixture.options, &|_| {}).unwrap_err();
        assert!(matches!(error, HubError::BadRepoName { .. }), "{error}");
    }
    assert!(matches!(pull("org/name", "../x", &fixture.options, &|_| {}), Err(HubError::BadRepoName { .. })));
    assert!(fixture.server.seen().is_empty());
}
