//! A rank reads only the bytes that `shard_ranges` lists: with garbage everywhere else its results
//! are the same, for every architecture and format.

use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use thunder_compute::{Activations, Overlap};
use thunder_model::model::{FileRanges, check_present, shard_ranges};
use thunder_model::{ModelError, ModelFolder, Parallelism, ShardPlan};
use thunder_parts::{Piece, Ranges, Record, Run};

use crate::common::{Golden, golden, sharded_logits, sharded_logits_of};

const ARITHMETIC: (Activations, Overlap) = (Activations::Int16, Overlap::Never);

fn fixtures(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(folder);
    let mut found: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

/// Models and their logits.
fn cases() -> Vec<(PathBuf, Vec<Golden>)> {
    let folders = fixtures("cases").into_iter().map(|case| {
        let golden = golden(&case.join("golden.safetensors"), "logits");
        (case, golden)
    });
    let of_gguf = fixtures("gguf/cases").into_iter().filter_map(|file| {
        let name = file.to_str()?.strip_suffix(".gguf")?;
        let logits = PathBuf::from(name.trim_end_matches("-00001-of-00002").to_owned() + ".safetensors");
        (!name.ends_with("-00002-of-00002") && logits.exists()).then(|| (file, golden(&logits, "logits")))
    });
    let all: Vec<_> = folders.chain(of_gguf).collect();
    assert!(all.len() > 200, "{} fixtures", all.len());
    all
}

/// A copy of a model in which weight files have only these bytes, and `other` everywhere else.
fn copy(model: &Path, ranges: &[FileRanges], other: u8, has_record: bool) -> (TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let folder = if model.is_dir() { model } else { model.parent().unwrap() };
    if model.is_dir() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            symlink(&path, place.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    for FileRanges { path, size, runs, .. } in ranges {
        let whole = fs::read(path).unwrap();
        assert_eq!(whole.len() as u64, *size);
        let copied = place.path().join(path.file_name().unwrap());
        let _ = fs::remove_file(&copied);
        fs::write(&copied, vec![other; whole.len()]).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&copied).unwrap();
        for range in runs.iter().flat_map(|run| run.ranges()) {
            file.write_all_at(&whole[range.start as usize..range.end as usize], range.start).unwrap();
        }
        if has_record {
            Record { pieces: vec![Piece { digest: None, runs: runs.clone() }] }.write(&copied).unwrap();
        }
    }
    let copied =
        if model.is_dir() { place.path().into() } else { place.path().join(model.file_name().unwrap()) };
    (place, copied)
}

/// Only the part of each file before its tensors.
fn headers(model: &Path) -> Vec<FileRanges> {
    let folder = ModelFolder::open(model).unwrap();
    let solo = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let header = |file: FileRanges| {
        let first = file.runs.iter().filter(|run| run.first == 0).map(|run| Run::of(0..run.len)).next();
        FileRanges { runs: first.into_iter().collect(), ..file }
    };
    shard_ranges(&folder, &solo, 0).unwrap().into_iter().map(header).collect()
}

#[test]
fn every_rank_reads_only_its_ranges_and_these_follow_from_headers() {
    let splits: [&[f64]; 4] = [&[2.0, 1.0], &[1.0, 0.2, 2.0], &[1.0; 4], &[1.0; 2]];
    let (mut read, mut whole) = (0, 0);
    for (index, (model, golden)) in cases().iter().enumerate() {
        let folder = ModelFolder::open(model).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, splits[index % 4]).unwrap();
        let (_place, bare) = copy(model, &headers(model), 0, true);
        let parts: Vec<_> = (0..plan.ranks())
            .map(|rank| {
                let ranges = shard_ranges(&ModelFolder::open(model).unwrap(), &plan, rank).unwrap();
                let of_headers = ModelFolder::open(&bare).unwrap();
                let plan = ShardPlan::new(&of_headers.spec, Parallelism::Tensor, splits[index % 4]).unwrap();
                let from_headers = shard_ranges(&of_headers, &plan, rank).unwrap();
                for (from, ranges) in from_headers.iter().zip(&ranges) {
                    assert_eq!(from.runs, ranges.runs, "{} of {}", from.path.display(), model.display());
                    assert!(from.lacking > 0 && ranges.lacking == 0);
                }
                read += ranges.iter().map(|file| Ranges::of(&file.runs).bytes()).sum::<u64>();
                whole += ranges.iter().map(|file| file.size).sum::<u64>();
                let (place, copied) = copy(model, &ranges, 0xff, false);
                (place, ModelFolder::open(&copied).unwrap())
            })
            .collect();
        let ours = sharded_logits_of(golden, &|rank| &parts[rank].1, &plan, ARITHMETIC, 45);
        assert!(
            ours == sharded_logits(golden, &folder, &plan, ARITHMETIC, 45),
            "{} reads more than its ranges",
            model.display()
        );
    }
    println!("{read} of {whole} bytes");
    assert!(read < whole * 3 / 4);
}

#[test]
fn a_rank_finds_what_is_not_there() {
    let model = fixtures("cases").into_iter().find(|case| case.ends_with("qwen3-4bit-g64")).unwrap();
    let folder = ModelFolder::open(&model).unwrap();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0]).unwrap();
    let ranges = shard_ranges(&folder, &plan, 1).unwrap();
    let (_place, copied) = copy(&model, &ranges, 0, true);
    let part = ModelFolder::open(&copied).unwrap();
    // As a rank does, which reads the plans of the others too.
    thunder_model::model::shard_footprints(&part, &plan, thunder_compute::KvFormat::F16).unwrap();
    check_present(&part, &plan, 1).unwrap();
    for (plan, rank) in [(plan, 0), (ShardPlan::new(&part.spec, Parallelism::Tensor, &[1.0]).unwrap(), 0)] {
        let error = check_present(&part, &plan, rank).unwrap_err();
        assert!(matches!(error, ModelError::Part { lacking: Some(bytes), .. } if bytes > 1000), "{error}");
    }
    check_present(&folder, &ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap(), 0).unwrap();
}
