//! Reads bad GGUF files, and compares errors with what they must say.

use std::error::Error;
use std::path::Path;

use proptest::prelude::*;
use thunder_compute::KvFormat;
use thunder_model::model::shard_footprints;
use thunder_model::{ModelFolder, Parallelism, ShardPlan};
use thunder_testing::allocations;
use thunder_testing::gguf::Gguf;

/// More than any table of a test's files may take: they have a few KiB.
const MOST_BYTES: usize = 8 << 20;

/// What is wrong, the file, and what the error must contain.
pub type Case<T = Gguf> = (&'static str, fn() -> T, &'static [&'static str]);

/// Opens a file and reads what planning needs.
pub fn open(path: &Path) -> Result<ModelFolder, Box<dyn Error>> {
    let folder = ModelFolder::open(path)?;
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0])?;
    shard_footprints(&folder, &plan, KvFormat::F16)?;
    Ok(folder)
}

/// Writes a file, and reads it without large allocations.
pub fn read_with(
    bytes: &[u8],
    read: impl FnOnce(&Path) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes)?;
    let result = read(&path);
    let largest = allocations::largest_bytes();
    assert!(largest < MOST_BYTES, "{largest} bytes were allocated for a file of {}", bytes.len());
    result
}

/// Reads everything that is read before weights are packed, except the tokenizer and the template.
pub fn read(file: &Gguf) -> Result<(), Box<dyn Error>> {
    read_with(&file.bytes(), |path| open(path).map(drop))
}

/// Fails unless each file gives its error.
pub fn check(cases: &[Case]) {
    check_with(cases.iter(), read);
}

/// [`check`], for files that are read in this way.
pub fn check_with<'a, T: 'a>(
    cases: impl Iterator<Item = &'a Case<T>>,
    read: impl Fn(&T) -> Result<(), Box<dyn Error>>,
) {
    let mut wrong = Vec::new();
    for (what, file, expected) in cases {
        let message = match read(&file()) {
            Ok(()) => "no error".to_owned(),
            Err(error) => error.to_string(),
        };
        if let Some(missing) = expected.iter().find(|part| !message.contains(*part)) {
            wrong.push(format!("{what}: {message:?} does not contain {missing:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Random metadata of a file: keys with a value's kind and bytes, and keys with a whole number.
pub type Damage = (Vec<(&'static str, u32, Vec<u8>)>, Vec<(&'static str, u32)>);

/// Damage to these keys. Small numbers are as likely as large ones.
pub fn damage(keys: &'static [&'static str]) -> impl Strategy<Value = Damage> {
    let key = || prop::sample::select(keys);
    let value = (key(), 0u32..14, prop::collection::vec(any::<u8>(), 0..40));
    let number = (key(), any::<u32>(), 0u32..32).prop_map(|(key, number, bits)| (key, number >> bits));
    (prop::collection::vec(value, 0..4), prop::collection::vec(number, 0..4))
}

/// Reads the file with this metadata. The result does not matter: there must be one, without a
/// panic, an endless loop or exhausted memory.
pub fn read_damaged(mut file: Gguf, architecture: &str, (values, numbers): Damage) {
    for (key, kind, bytes) in values {
        file = file.value(&format!("{architecture}.{key}"), kind, &bytes);
    }
    for (key, number) in numbers {
        file = file.number(&format!("{architecture}.{key}"), number);
    }
    drop(read(&file));
}

/// How often random metadata is tried.
pub fn tries() -> ProptestConfig {
    let cases = thunder_testing::runs(300, 200_000) as u32;
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}
