//! Prompts are read from disk after a restart, on any ranks and with every kind of cache. No answer
//! changes, whatever happens to the files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use crate::common::{LAYOUTS, read_with_usage, with_engine_of_all};
use thunder_engine::{DiskSpec, Engine, Limits, Request, Sampling};
use thunder_model::{ModelFolder, Parallelism};
use thunder_testing::{Random, is_long};

/// Maximum context of the fixtures.
const CONTEXT: usize = 256;
/// Tokens of the first prompt's blocks that can be shared.
const SHARED: usize = 192;

/// Folders with each kind of cache: heads, latent, states together with heads, together with
/// latent, and alone.
fn models() -> Vec<PathBuf> {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases");
    let names = [
        "deepseek_v3-4bit-g32",
        "qwen3_next-4bit",
        "kimi_linear-4bit",
        "nemotron_h-4bit",
        "lfm2-4bit",
        // Caches with a vector for several tokens.
        "transformers-deepseek_v4",
        "transformers-glm5_next",
    ];
    let golden = names.map(|name| cases.join(name));
    std::iter::once(thunder_testing::builtin_model()).chain(golden).collect()
}

/// A cache of this size that is read one block at a time.
fn spec(folder: &Path, limit_bytes: u64) -> DiskSpec {
    DiskSpec {
        folder: folder.to_owned(),
        limit_bytes,
        identity: "a test".to_owned(),
        block_bytes: 1 << 30,
        cleans: false,
    }
}

fn limits(model: &Path, kv_blocks: usize) -> Limits {
    let has_states = ["next", "linear", "nemotron", "deepseek_v4"]
        .iter()
        .any(|name| model.to_string_lossy().contains(name));
    let snapshots = has_states.then_some(4);
    Limits { sequences: 4, rows: 64, kv_blocks, prefix_cache: true, snapshots, ..Limits::default() }
}

/// Two prompts with the same beginning, and one with another.
fn prompts() -> Vec<Vec<u32>> {
    let mut random = Random::new(5);
    let mut tokens =
        |count: usize| -> Vec<u32> { (0..count).map(|_| 3 + random.below(150) as u32).collect() };
    let (first, second, other) = (tokens(200), tokens(36), tokens(70));
    vec![first.clone(), [&first[..170], &second[..]].concat(), other]
}

fn request(prompt: &[u32], seed: u64) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: Sampling { temperature: (seed % 2) as f32, seed: Some(seed), ..Sampling::default() },
        max_tokens: Some(12),
        ignore_eos: true,
        ..Request::default()
    }
}

/// The answer to each prompt, one after the other, and the number of cached prompt tokens.
fn answers(engine: &Engine) -> Vec<(String, usize)> {
    let one = |(seed, prompt): (usize, Vec<u32>)| {
        let stream = engine.submit(request(&prompt, seed as u64)).unwrap();
        let (text, usage) = read_with_usage(stream).unwrap();
        (text, usage.cached_tokens)
    };
    prompts().into_iter().enumerate().map(one).collect()
}

struct Run {
    texts: Vec<String>,
    cached: Vec<usize>,
    from_disk: u64,
}

fn run(model: &Path, layout: (usize, Parallelism), disk: Option<&DiskSpec>) -> Run {
    let mut run = Run { texts: Vec::new(), cached: Vec::new(), from_disk: 0 };
    let folder = ModelFolder::open(model).unwrap();
    with_engine_of_all(folder, (None, disk), layout, limits(model, 40), CONTEXT, |engine| {
        (run.texts, run.cached) = answers(&engine).into_iter().unzip();
        run.from_disk = engine.counters().disk_tokens.load(Ordering::Relaxed);
    });
    run
}

/// The files of a rank's blocks.
fn files(folder: &Path, rank: usize) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.join(format!("rank-{rank}"))).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some());
    files.sort();
    files
}

#[test]
fn a_restart_reads_what_was_computed_and_answers_the_same() {
    for model in models() {
        let layouts = if is_long() { &LAYOUTS[..] } else { &LAYOUTS[1..3] };
        for &layout in layouts {
            let what = format!("{} on {layout:?}", model.display());
            let folder = tempfile::tempdir().unwrap();
            let disk = spec(folder.path(), 1 << 30);
            let without = run(&model, layout, None);
            let first = run(&model, layout, Some(&disk));
            assert_eq!((&first.texts, first.from_disk), (&without.texts, 0), "{what}");
            let again = run(&model, layout, Some(&disk));
            assert_eq!(again.texts, without.texts, "{what}");
            assert_eq!(again.cached[..2], [SHARED; 2], "{what}");
            assert!(again.from_disk >= SHARED as u64 && again.cached[2] <= 64, "{what}: {}", again.from_disk);

            // A rank has lost its files, or they are damaged: all ranks compute, and this rank
            // writes its files again.
            let last = layout.0 - 1;
            files(folder.path(), last).iter().for_each(|file| fs::remove_file(file).unwrap());
            let lost = run(&model, layout, Some(&disk));
            assert_eq!((lost.texts, lost.from_disk), (without.texts.clone(), 0), "{what}");
            assert_eq!(run(&model, layout, Some(&disk)).cached[..2], [SHARED; 2], "{what}");
            for file in files(folder.path(), last) {
                let mut bytes = fs::read(&file).unwrap();
                let end = bytes.len() - 1;
                bytes[end] ^= 0x10;
                fs::write(&file, bytes).unwrap();
            }
            let damaged = run(&model, layout, Some(&disk));
            assert_eq!((damaged.texts, damaged.from_disk), (without.texts.clone(), 0), "{what}");
        }
    }
}

#[test]
fn counters_are_of_all_ranks() {
    let model = thunder_testing::builtin_model();
    for layout in [(1, Parallelism::Tensor), (2, Parallelism::Tensor), (3, Parallelism::Pipeline)] {
        let folder = tempfile::tempdir().unwrap();
        let disk = spec(folder.path(), 1 << 30);
        let served = ModelFolder::open(&model).unwrap();
        with_engine_of_all(served, (None, Some(&disk)), layout, limits(&model, 40), CONTEXT, |engine| {
            answers(&engine);
            let all = || (0..layout.0).flat_map(|rank| files(folder.path(), rank));
            // A file may have been renamed meanwhile.
            let bytes = || all().map(|file| fs::metadata(file).map_or(0, |data| data.len())).sum::<u64>();
            let counters = engine.counters();
            let (written, on_disk) = (&counters.disk_written, &counters.disk_bytes);
            let counted = || [written, on_disk].map(|count| count.load(Ordering::Relaxed));
            // A thread writes files, and ranks are queried every half second.
            let since = std::time::Instant::now();
            while counted() != [all().count() as u64, bytes()]
                || !(counted()[0] as usize).is_multiple_of(layout.0)
            {
                assert!(since.elapsed().as_secs() < 20, "{layout:?}: {:?} of {}", counted(), all().count());
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            assert!(counted()[0] as usize >= 5 * layout.0, "{layout:?}: {:?}", counted());
        });
    }
}

#[test]
fn blocks_of_other_ranks_models_and_programs_are_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let disk = spec(folder.path(), 1 << 30);
    let models = models();
    let alone = (1, Parallelism::Tensor);
    run(&models[0], alone, Some(&disk));
    assert!(run(&models[0], alone, Some(&disk)).from_disk > 0);
    assert_eq!(run(&models[0], (2, Parallelism::Tensor), Some(&disk)).from_disk, 0, "two ranks");
    assert_eq!(run(&models[1], alone, Some(&disk)).from_disk, 0, "another model");
    let other = DiskSpec { identity: "another program".to_owned(), ..disk.clone() };
    assert_eq!(run(&models[0], alone, Some(&other)).from_disk, 0, "another program");
    assert!(run(&models[0], alone, Some(&disk)).from_disk > 0, "what was there is still there");
}

#[test]
fn answers_under_load_do_not_depend_on_disk_and_memory() {
    let model = thunder_testing::builtin_model();
    for layout in LAYOUTS {
        let folder = tempfile::tempdir().unwrap();
        // Space for some blocks only, in memory and on disk.
        let disk = spec(folder.path(), 600 << 10);
        let mut texts: Vec<Vec<String>> = Vec::new();
        let mut read = 0;
        for disk in [None, Some(&disk), Some(&disk)] {
            let model = ModelFolder::open(&model).unwrap();
            with_engine_of_all(model, (None, disk), layout, limits(Path::new(""), 14), CONTEXT, |engine| {
                let mut of_run = Vec::new();
                for round in 0..3u64 {
                    let prompts = prompts().into_iter().chain(prompts().into_iter().rev());
                    let streams: Vec<_> = prompts
                        .zip(round..)
                        .map(|(prompt, seed)| engine.submit(request(&prompt, seed)).unwrap())
                        .collect();
                    of_run.extend(streams.into_iter().map(|stream| read_with_usage(stream).unwrap().0));
                }
                texts.push(of_run);
                read = engine.counters().disk_tokens.load(Ordering::Relaxed);
            });
        }
        assert!(texts[1] == texts[0] && texts[2] == texts[0], "{layout:?}");
        assert!(read > 0, "{layout:?}: nothing came from disk");
    }
}
