//! Configs of all golden models with random damage: each is read or refused, without a panic, an
//! endless loop or exhausted memory.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::Value;

use super::spec;
use crate::plan::{Parallelism, ShardPlan};
use crate::weights::Quantization;

/// All config.json below `tests/golden`.
fn configs() -> &'static [Value] {
    static CONFIGS: OnceLock<Vec<Value>> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        let mut folders = vec![PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")];
        let mut paths = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                match path.is_dir() {
                    true => folders.push(path),
                    false if path.ends_with("config.json") => paths.push(path),
                    false => {}
                }
            }
        }
        paths.sort();
        let read = |path: &PathBuf| std::fs::read(path).expect("a file");
        let configs: Vec<Value> =
            paths.iter().map(|path| serde_json::from_slice(&read(path)).expect("JSON")).collect();
        assert!(configs.len() > 100, "{} golden configs", configs.len());
        configs
    })
}

/// Where values are, as JSON pointers.
fn places(value: &Value, at: &str, to: &mut Vec<String>) {
    let mut inner = |key: &str, value: &Value| {
        to.push(format!("{at}/{key}"));
        places(value, &format!("{at}/{key}"), to);
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| inner(key, value)),
        Value::Array(list) => list.iter().enumerate().for_each(|(i, value)| inner(&i.to_string(), value)),
        _ => {}
    }
}

#[derive(Debug, Clone)]
enum Damage {
    Remove,
    Set(Value),
    /// The value of another place, perhaps of another config.
    Copy(Index, Index),
    /// A number next to the present one, or a multiple of it.
    Number(i64, i64),
}

fn damage() -> impl Strategy<Value = Damage> {
    let number = prop_oneof![0..600i64, any::<i64>(), (0..63u32).prop_map(|bits| 1 << bits), -1..=1i64];
    let float = prop_oneof![any::<f64>(), Just(0.0), Just(-1.0), Just(1e300), Just(1e-300)];
    let value = prop_oneof![
        4 => number.prop_map(Value::from),
        2 => float.prop_map(Value::from),
        1 => any::<bool>().prop_map(Value::from),
        1 => Just(Value::Null),
        1 => prop::sample::select(vec!["", "full_attention", "sigmoid", "silu", "llama"]).prop_map(Value::from),
        1 => prop::collection::vec(0..300i64, 0..6).prop_map(Value::from),
        1 => Just(serde_json::json!({})),
    ];
    prop_oneof![
        1 => Just(Damage::Remove),
        4 => value.prop_map(Damage::Set),
        3 => (any::<Index>(), any::<Index>()).prop_map(|(config, place)| Damage::Copy(config, place)),
        3 => (0..5i64, -3..4i64).prop_map(|(times, more)| Damage::Number(times, more)),
    ]
}

fn apply(config: &mut Value, at: &Index, damage: Damage) {
    let mut all = Vec::new();
    places(config, "", &mut all);
    let Some(place) = (!all.is_empty()).then(|| at.get(&all)) else { return };
    let Some(value) = config.pointer_mut(place) else { return };
    match damage {
        Damage::Remove => *value = Value::Null,
        Damage::Set(new) => *value = new,
        Damage::Number(times, more) => {
            if let Some(number) = value.as_i64() {
                *value = number.wrapping_mul(times).wrapping_add(more).into();
            }
        }
        Damage::Copy(other, from) => {
            let (other, mut all) = (other.get(configs()), Vec::new());
            places(other, "", &mut all);
            let from: &String = from.get(&all);
            *value = other.pointer(from).cloned().unwrap_or(Value::Null);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: thunder_testing::runs(20_000, 1_000_000) as u32,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_configs_never_panic(
        which in any::<Index>(), damages in prop::collection::vec((any::<Index>(), damage()), 1..5),
    ) {
        let mut config = which.get(configs()).clone();
        for (at, damage) in damages {
            apply(&mut config, &at, damage);
        }
        let path = Path::new("config.json");
        drop(Quantization::read(&config, path));
        if let Ok(spec) = spec(&config, path) {
            for mode in [Parallelism::Tensor, Parallelism::Pipeline] {
                drop(ShardPlan::new(&spec, mode, &[1.0, 2.0, 1.0]));
            }
        }
    }
}
