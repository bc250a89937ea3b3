//! What a rank's disk keeps, and how it handles files that differ from what it wrote.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use super::*;

const BYTES: usize = 1000;
const FILE_BYTES: u64 = (BYTES + file::HEAD_BYTES) as u64;

fn spec(folder: &Path, files: u64) -> DiskSpec {
    DiskSpec {
        folder: folder.to_owned(),
        limit_bytes: files * FILE_BYTES,
        identity: String::new(),
        block_bytes: BYTES,
        cleans: true,
    }
}

fn open(folder: &Path, files: u64) -> DiskCache {
    DiskCache::open(&spec(folder, files), 0, 1).unwrap()
}

fn block(number: u8) -> Transfer {
    let depth = u32::from(number);
    Transfer {
        part: Part::Block,
        place: 0,
        name: BlockName([number; 32]),
        depth,
        used: 100 + u64::from(number),
    }
}

fn bytes(number: u8) -> Vec<u8> {
    (0..BYTES).map(|index| (index as u8).wrapping_mul(number)).collect()
}

/// Stores blocks and waits until they are written.
fn store(mut cache: DiskCache, blocks: &[Transfer]) {
    for block in blocks {
        let stored: Result<(), ()> = cache.store(block, |out| {
            out.extend(bytes(block.name.0[0]));
            Ok(())
        });
        stored.unwrap();
    }
}

/// The blocks numbered below `count` that are read as they were written.
fn found(cache: &mut DiskCache, count: u8) -> Vec<u8> {
    let is_found = |number: &u8| match cache.load(&block(*number)) {
        Some(read) => {
            assert_eq!(read, bytes(*number), "a block with other bytes");
            true
        }
        None => false,
    };
    (0..count).filter(is_found).collect()
}

fn file_of(folder: &Path, number: u8) -> PathBuf {
    let key = FileKey { name: BlockName([number; 32]), part: Part::Block };
    folder.join("rank-0").join(folder::file_name(&key, u32::from(number)))
}

#[test]
fn blocks_are_read_after_a_restart_as_they_were_written() {
    let folder = tempfile::tempdir().unwrap();
    store(open(folder.path(), 10), &[block(1), block(2), Transfer { part: Part::State, ..block(2) }]);
    let mut cache = open(folder.path(), 10);
    assert_eq!(found(&mut cache, 4), [1, 2]);
    assert!(cache.load(&Transfer { part: Part::State, ..block(2) }).is_some());
    assert!(cache.load(&Transfer { part: Part::State, ..block(1) }).is_none());
    assert_eq!(cache.list().counters().bytes.load(Ordering::Relaxed), 3 * FILE_BYTES);
}

#[test]
fn the_longest_unused_blocks_make_room_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    store(open(folder.path(), 4), &[block(1), block(2), block(3)]);
    // Recorded as a use: block 1 is used again, and nothing is written.
    let again = Transfer { used: 1000, place: NOWHERE, ..block(1) };
    let mut cache = open(folder.path(), 4);
    cache.store(&again, |_| Err("it is on disk")).unwrap();
    store(cache, &[]);
    store(open(folder.path(), 4), &[block(4), block(5)]);
    assert_eq!(found(&mut open(folder.path(), 4), 9), [1, 3, 4, 5]);
    // A smaller limit applies at once.
    assert_eq!(found(&mut open(folder.path(), 2), 9), [1, 5]);
    assert_eq!(fs::read_dir(folder.path().join("rank-0")).unwrap().count(), 2 + 1, "and the lock");
}

#[test]
fn files_that_are_not_as_they_were_written_are_removed_and_never_used() {
    type Spoil = fn(&Path);
    let spoils: &[(&str, Spoil)] = &[
        ("a byte changed", |file| {
            let mut all = fs::read(file).unwrap();
            all[file::HEAD_BYTES + 500] ^= 1;
            fs::write(file, all).unwrap();
        }),
        ("a byte of the head changed", |file| {
            let mut all = fs::read(file).unwrap();
            all[58] ^= 1;
            fs::write(file, all).unwrap();
        }),
        ("cut", |file| fs::write(file, &fs::read(file).unwrap()[..700]).unwrap()),
        ("cut within the head", |file| fs::write(file, &fs::read(file).unwrap()[..40]).unwrap()),
        ("empty", |file| fs::write(file, []).unwrap()),
        ("longer", |file| fs::write(file, [fs::read(file).unwrap(), vec![0; 5]].concat()).unwrap()),
        ("zeros, as after a power cut", |file| fs::write(file, vec![0; FILE_BYTES as usize]).unwrap()),
        ("something else", |file| fs::write(file, "x".repeat(FILE_BYTES as usize)).unwrap()),
        ("another block's", |file| {
            fs::copy(file_of(file.parent().unwrap().parent().unwrap(), 2), file).unwrap();
        }),
    ];
    for (what, spoil) in spoils {
        let folder = tempfile::tempdir().unwrap();
        store(open(folder.path(), 10), &[block(1), block(2)]);
        let file = file_of(folder.path(), 1);
        spoil(&file);
        let mut cache = open(folder.path(), 10);
        assert_eq!(found(&mut cache, 3), [2], "{what}");
        let damaged = cache.list().counters().damaged.load(Ordering::Relaxed);
        assert!(damaged == 1 && !file.exists(), "{what}: {damaged} told of");
        // It is written again.
        store(cache, &[block(1)]);
        assert_eq!(found(&mut open(folder.path(), 10), 3), [1, 2], "{what}");
    }
}

#[test]
fn another_ranks_file_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    store(open(folder.path(), 10), &[block(1)]);
    fs::rename(folder.path().join("rank-0"), folder.path().join("rank-1")).unwrap();
    let mut cache = DiskCache::open(&spec(folder.path(), 10), 1, 2).unwrap();
    assert!(found(&mut cache, 3).is_empty());
}

#[test]
fn files_that_vanish_are_missed_quietly_and_strangers_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    store(open(folder.path(), 10), &[block(1), block(2)]);
    let note = folder.path().join("rank-0/notes.txt");
    fs::write(&note, "mine").unwrap();
    fs::write(folder.path().join("rank-0/half.part"), "half").unwrap();
    let mut cache = open(folder.path(), 10);
    fs::remove_file(file_of(folder.path(), 1)).unwrap();
    assert_eq!(found(&mut cache, 3), [2]);
    assert_eq!(cache.list().counters().damaged.load(Ordering::Relaxed), 0);
    assert!(note.exists() && !folder.path().join("rank-0/half.part").exists());
}

#[test]
fn a_folder_has_one_server() {
    let folder = tempfile::tempdir().unwrap();
    let first = open(folder.path(), 10);
    let error = DiskCache::open(&spec(folder.path(), 10), 0, 1).unwrap_err().to_string();
    assert!(error.contains("another thunder uses it"), "{error}");
    drop(first);
    open(folder.path(), 10);
}

#[test]
fn what_ranks_that_are_no_more_have_left_is_removed_unless_it_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    for rank in [1, 2] {
        store(DiskCache::open(&spec(folder.path(), 10), rank, 3).unwrap(), &[block(1)]);
    }
    let used = DiskCache::open(&spec(folder.path(), 10), 2, 3).unwrap();
    open(folder.path(), 10);
    let files = |rank: usize| fs::read_dir(folder.path().join(format!("rank-{rank}"))).unwrap().count();
    assert_eq!([files(1), files(2)], [1, 2], "the locks, and a block in use");
    drop(used);
}

#[test]
fn a_block_larger_than_the_limit_removes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    store(open(folder.path(), 1), &[block(1)]);
    let mut cache = open(folder.path(), 1);
    let stored: Result<(), ()> = cache.store(&block(2), |out| {
        out.resize(BYTES + 1, 0);
        Ok(())
    });
    stored.unwrap();
    let list = cache.list();
    drop(cache);
    assert_eq!(list.counters().dropped.load(Ordering::Relaxed), 1);
    assert_eq!(found(&mut open(folder.path(), 1), 3), [1]);
}

#[cfg(unix)]
#[test]
fn a_disk_that_takes_nothing_more_ends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut cache = open(folder.path(), 10);
    // A file in place of the folder: not even root can write there.
    let place = folder.path().join("rank-0");
    fs::remove_dir_all(&place).unwrap();
    fs::write(&place, "a file").unwrap();
    for number in [1, 2] {
        let stored: Result<(), ()> = cache.store(&block(number), |out| {
            out.extend(bytes(number));
            Ok(())
        });
        stored.unwrap();
    }
    let list = cache.list();
    assert!(cache.load(&block(1)).is_none());
    drop(cache);
    assert_eq!(list.counters().dropped.load(Ordering::Relaxed), 2);
}

#[test]
fn names_depend_on_all_that_comes_before_and_on_who_computed_it() {
    let tokens: Vec<u32> = (0..100).collect();
    let names = Names::new(&[1; 64], &[[5; 32]]);
    let all = names.of(&tokens, 0);
    assert_eq!(all.len(), 3, "whole blocks");
    assert_eq!(names.of(&tokens[..64], 0), all[..2]);
    let mut changed = tokens.clone();
    changed[40] = 7;
    let others = names.of(&changed, 0);
    assert!(others[0] == all[0] && others[1] != all[1] && others[2] != all[2]);
    for other in [names.of(&tokens, 1), Names::new(&[2; 64], &[]).of(&tokens, 0)] {
        assert!(other.iter().zip(&all).all(|(other, name)| other != name));
    }
    assert!(names.of(&tokens, 2).is_empty(), "there is no such adapter");
}
