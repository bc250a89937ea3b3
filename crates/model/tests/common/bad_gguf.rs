//! Reads bad GGUF files, and compares errors with what they must say.

use std::error::Error;

use thunder_compute::KvFormat;
use thunder_model::model::shard_footprints;
use thunder_model::{ModelFolder, Parallelism, ShardPlan};
use thunder_testing::allocations::{self, CountingAllocator};
use thunder_testing::gguf::Gguf;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// More than any table of a test's files may take: they have a few KiB.
const MOST_BYTES: usize = 8 << 20;

/// What is wrong, the file, and what the error must contain.
pub type Case = (&'static str, fn() -> Gguf, &'static [&'static str]);

/// Reads everything that is read before weights are packed.
pub fn read(file: &Gguf) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, file.bytes())?;
    let read = || -> Result<(), Box<dyn Error>> {
        let folder = ModelFolder::open(&path)?;
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0, 1.0])?;
        shard_footprints(&folder, &plan, KvFormat::F16)?;
        Ok(())
    };
    let result = read();
    let largest = allocations::largest_bytes();
    assert!(largest < MOST_BYTES, "{largest} bytes were allocated");
    result
}

/// Fails unless each file gives its error.
pub fn check(cases: &[Case]) {
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
