//! Parts of a model: what one rank reads, and no more.
#![allow(clippy::unwrap_used, reason = "a panic fails the test")]
#![cfg(unix)]

mod machine;
mod server;

use std::{
    fs,
    io::Read as _,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    sync::Mutex,
};

use machine::{FIRST, machines_with_large, options};
use server::{COMMIT, Server};
use thunder_hub::{
    HubError, PullEvent, PullOptions, WantedFile, cached_models, locate_in, part_in, pull, pull_part, remove,
    verify,
};
use thunder_parts::{Ranges, Record, Run};

/// A header, rows of a matrix, and a matrix.
fn wanted(rows: u64) -> WantedFile {
    let rows = Run { first: 10_000_000, len: 3000, stride: 10_000, count: rows };
    let runs = vec![Run::of(0..1000), rows, Run::of(40_000_000..45_000_000)];
    WantedFile { path: Path::new("/headers").join(FIRST), runs }
}

fn bytes_of(wanted: &WantedFile) -> u64 {
    wanted.runs.iter().map(Run::bytes).sum()
}

/// Fetches a part; returns its folder, the bytes that were to come, and who has sent some.
fn part(options: &PullOptions, wanted: &WantedFile) -> Result<(PathBuf, u64, Vec<String>), HubError> {
    let (total, from) = (Mutex::new(0), Mutex::new(Vec::new()));
    let folder =
        pull_part("org/name", "main", options, std::slice::from_ref(wanted), &|event| match event {
            PullEvent::Start { bytes, .. } => *total.lock().unwrap() = bytes,
            PullEvent::Source { from: name, .. }
                if !from.lock().unwrap().iter().any(|known| known == name) =>
            {
                from.lock().unwrap().push(name.to_owned());
            }
            _ => {}
        })?;
    Ok((folder, total.into_inner().unwrap(), from.into_inner().unwrap()))
}

/// Checks that the part's file has these bytes of the whole, and nothing else.
fn check(server: &Server, folder: &Path, wanted: &WantedFile) {
    let (whole, path) = (server.content(FIRST), folder.join(FIRST));
    let file = fs::File::open(&path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), whole.len() as u64);
    for range in wanted.runs.iter().flat_map(|run| run.ranges()) {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact_at(&mut bytes, range.start).unwrap();
        assert!(bytes == whole[range.start as usize..range.end as usize], "{range:?}");
    }
    let present = Record::of(&path).unwrap().unwrap().present();
    assert_eq!(present.minus(&Ranges::of(&wanted.runs)), Ranges::default());
    let on_disk = file.metadata().unwrap().blocks() * 512;
    // The rows lie in two pages, and pages are stored whole.
    assert!(on_disk < whole.len() as u64 / 2, "{on_disk} bytes on the disk");
    for name in ["config.json", "tokenizer.json", "model.safetensors.index.json"] {
        assert!(fs::read(folder.join(name)).unwrap() == server.content(name), "{name} is whole");
    }
}

#[test]
fn only_the_bytes_of_a_rank_come_and_later_ones_what_they_lack() {
    let (server, [bee, cat]) = machines_with_large(["bee", "cat"]);
    let (cache, requests) = (tempfile::tempdir().unwrap(), server.seen().len());
    let options = options(&server, cache.path(), &[&bee, &cat]);
    let rows = wanted(1000);
    let (folder, bytes, from) = part(&options, &rows).unwrap();
    check(&server, &folder, &rows);
    let small = bytes - bytes_of(&rows);
    // Nothing is said of the second weight file.
    assert!((905_000..906_000).contains(&small), "{bytes} bytes came");
    assert_eq!((from.len(), server.seen().len()), (2, requests), "{from:?}, and the hub is not asked");
    assert!(matches!(locate_in("org/name", cache.path()), Err(HubError::NotFound { .. })));
    let found = part_in("org/name", cache.path()).unwrap();
    assert_eq!((&found.path, found.commit.as_str(), found.present), (&folder, COMMIT, bytes));
    assert!(found.total > 50_000_000);
    assert_eq!(part_in(&format!("org/name@{COMMIT}"), cache.path()).as_ref(), Some(&found));
    assert_eq!(part(&options, &rows).unwrap().1, 0, "all is there");
    let more = wanted(1500);
    assert_eq!(part(&options, &more).unwrap().1, 500 * 3000);
    check(&server, &folder, &more);
    let listed = cached_models(cache.path()).unwrap();
    assert_eq!((listed[0].bytes, listed[0].part_of), (bytes + 1_500_000, Some(found.total)));
    let removed = remove("org/name", cache.path()).unwrap();
    assert!(removed > bytes && removed < 25_000_000, "{removed} bytes became free");
    assert_eq!(cached_models(cache.path()).unwrap(), []);
}

#[test]
fn a_pull_makes_a_part_whole_and_finds_what_is_wrong_in_it() {
    let (server, [bee]) = machines_with_large(["bee"]);
    for is_wrong in [false, true] {
        let cache = tempfile::tempdir().unwrap();
        let options = options(&server, cache.path(), &[&bee]);
        let (folder, ..) = part(&options, &wanted(1000)).unwrap();
        if is_wrong {
            let file = fs::OpenOptions::new().write(true).open(folder.join(FIRST)).unwrap();
            file.write_all_at(b"wrong", 41_000_000).unwrap();
        }
        let fetched = Mutex::new(0);
        let located = pull("org/name", "main", &options, &|event| {
            if let PullEvent::Bytes { file: FIRST, done, .. } = event {
                let mut fetched = fetched.lock().unwrap();
                *fetched = done.max(*fetched);
            }
        });
        assert!(fs::read(located.unwrap().folder.join(FIRST)).unwrap() == server.content(FIRST));
        let all = server.content(FIRST).len() as u64;
        let expected = if is_wrong { all } else { all - bytes_of(&wanted(1000)) };
        assert_eq!(fetched.into_inner().unwrap(), expected, "wrong: {is_wrong}");
        assert_eq!(part_in("org/name", cache.path()), None);
        let blobs = fs::read_dir(cache.path().join("models--org--name/blobs")).unwrap();
        let names: Vec<_> = blobs.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(names.iter().all(|name| !name.contains('.')), "{names:?}");
    }
}

#[test]
fn a_check_finds_a_damaged_piece_which_comes_again_and_is_not_sent() {
    let (server, [bee]) = machines_with_large(["bee"]);
    let cache = tempfile::tempdir().unwrap();
    let options = options(&server, cache.path(), &[&bee]);
    let (folder, ..) = part(&options, &wanted(1000)).unwrap();
    let found = verify(&folder, &|_| {}).unwrap();
    assert_eq!((found.right, found.damaged.len()), (5, 0));
    assert!(found.bytes > bytes_of(&wanted(1000)));
    let file = fs::OpenOptions::new().write(true).open(folder.join(FIRST)).unwrap();
    file.write_all_at(b"wrong", 41_000_000).unwrap();
    assert_eq!(verify(&folder, &|_| {}).unwrap().damaged, [folder.join(FIRST)]);
    let again = part(&options, &wanted(1000)).unwrap().1;
    assert!(again > 1_000_000 && again <= 4 << 20, "{again} bytes come again");
    check(&server, &folder, &wanted(1000));
    // A whole file that a check has found damaged is no source of parts.
    let blob = bee.blob(FIRST);
    let mut bytes = fs::read(&blob).unwrap();
    bytes[41_000_000] ^= 1;
    fs::write(&blob, bytes).unwrap();
    verify(&locate_in("org/name", bee.cache.path()).unwrap().folder, &|_| {}).unwrap();
    let other = tempfile::tempdir().unwrap();
    let (folder, ..) =
        part(&PullOptions { cache: other.path().to_owned(), ..options }, &wanted(1000)).unwrap();
    check(&server, &folder, &wanted(1000));
}

#[test]
fn what_has_come_stays_when_all_sources_fail() {
    let (server, [bee]) = machines_with_large(["bee"]);
    let cache = tempfile::tempdir().unwrap();
    let options = PullOptions { offline: true, ..options(&server, cache.path(), &[&bee]) };
    let most = WantedFile { runs: vec![Run::of(0..48_000_000)], ..wanted(1) };
    bee.dies_after(46_000_000);
    assert!(part(&options, &most).is_err());
    bee.dies_after(usize::MAX);
    let (folder, rest, _) = part(&options, &most).unwrap();
    assert!(rest < 40_000_000, "{rest} bytes were left");
    let mut there = vec![0; 48_000_000];
    fs::File::open(folder.join(FIRST)).unwrap().read_exact(&mut there).unwrap();
    assert!(there == server.content(FIRST)[..48_000_000]);
}

#[test]
fn ranges_come_from_the_hub_if_no_machine_has_the_model() {
    let (server, [bee]) = machines_with_large(["bee"]);
    let cache = tempfile::tempdir().unwrap();
    let requests = server.seen().len();
    let (folder, bytes, _) = part(&options(&server, cache.path(), &[]), &wanted(1000)).unwrap();
    check(&server, &folder, &wanted(1000));
    assert!(bytes < 9_000_000);
    let seen = server.seen();
    let ranges: Vec<_> = seen[requests..].iter().filter_map(|seen| seen.range.clone()).collect();
    // Near rows are read together, matrices apart.
    assert!(ranges.contains(&"bytes=0-999".to_owned()) && ranges.len() < 40, "{ranges:?}");
    let mut first = Vec::new();
    fs::File::open(folder.join(FIRST)).unwrap().take(2000).read_to_end(&mut first).unwrap();
    assert!(first[1000..].iter().all(|byte| *byte == 0));
    drop(bee);
}
