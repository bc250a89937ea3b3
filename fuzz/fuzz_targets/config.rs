//! A config.json: the architecture that it describes, its quantization, and plans of shards.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use thunder_model::weights::Quantization;
use thunder_model::{Parallelism, ShardPlan, arch};

fuzz_target!(|bytes: &[u8]| {
    let Ok(config) = serde_json::from_slice(bytes) else { return };
    let path = Path::new("config.json");
    drop(Quantization::read(&config, path));
    let Ok(spec) = arch::spec(&config, path) else { return };
    for mode in [Parallelism::Tensor, Parallelism::Pipeline] {
        drop(ShardPlan::new(&spec, mode, &[1.0, 2.0, 1.0]));
    }
});
