//! Before they load anything, ranks check that they were started with the same models and options;
//! otherwise they would compute nonsense.

use sha2::{Digest, Sha256};
use thunder_collectives::{CommError, Group};
use thunder_model::{ModelFolder, ModelSpec};

use crate::error::EngineError;

/// Maximum length of the settings that a rank reads from another one.
const LONGEST_LIST_BYTES: u32 = 64 << 10;

/// A setting that must be the same on all ranks, for example `--kv` and `int8`. Neither text
/// contains a tab or a newline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The name that users know.
    pub name: String,
    /// Its value on this rank.
    pub value: String,
}

/// The model as a setting: its config and its files, wherever they are stored.
pub(crate) fn model_setting(folder: &ModelFolder) -> Setting {
    let mut hash = Sha256::new();
    // Ranks agree separately on whether to use the layer for drafts.
    let spec = ModelSpec { ahead: None, ..folder.spec.clone() };
    hash.update(format!("{spec:?}"));
    hash.update(folder.weights.fingerprint());
    let checksum: String = hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    let layers = folder.spec.layers.len();
    Setting {
        name: "the model's files".to_owned(),
        value: format!("{} with {layers} layers, checksum {checksum}", folder.spec.family),
    }
}

/// The adapters as a setting: names and files, in their order.
pub(crate) fn adapters_setting(folder: &ModelFolder) -> Setting {
    let mut hash = Sha256::new();
    for adapter in &folder.adapters {
        hash.update(adapter.fingerprint());
    }
    let names: Vec<String> = folder.adapters.iter().map(|adapter| format!("{:?}", adapter.name)).collect();
    let checksum: String = hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    let value = match names.is_empty() {
        true => "none".to_owned(),
        false => format!("{}, checksum {checksum}", names.join(", ")),
    };
    Setting { name: "--lora".to_owned(), value }
}

/// Compares the settings of all ranks. All ranks call this together.
///
/// # Errors
/// Names the first setting that differs, or a rank that was lost.
pub(crate) fn check_same(world: &mut Group, settings: &[Setting]) -> Result<(), EngineError> {
    if world.size() == 1 {
        return Ok(());
    }
    let own = to_text(settings);
    let digest: [u8; 32] = Sha256::digest(&own).into();
    let mut all = vec![0u8; digest.len() * world.size()];
    world.all_gather(&digest, &mut all, &vec![digest.len(); world.size()])?;
    // Every rank has the same digests, so all take the same branch.
    let Some(rank) = all.chunks(digest.len()).position(|other| *other != all[..digest.len()]) else {
        return Ok(());
    };
    let texts = gather_texts(world, &own)?;
    let (setting, first, other) = first_difference(&from_text(&texts[0]), &from_text(&texts[rank]));
    Err(EngineError::Mismatch { rank, setting, first, other })
}

fn to_text(settings: &[Setting]) -> String {
    settings.iter().map(|setting| format!("{}\t{}\n", setting.name, setting.value)).collect()
}

fn from_text(text: &str) -> Vec<(&str, &str)> {
    text.lines().filter_map(|line| line.split_once('\t')).collect()
}

/// The texts of all ranks.
fn gather_texts(world: &mut Group, own: &str) -> Result<Vec<String>, CommError> {
    let mut lengths = vec![0u32; world.size()];
    world.all_gather(&[own.len() as u32], &mut lengths, &vec![1; world.size()])?;
    // Every rank sees the same lengths, so none waits for a message that another does not send.
    if lengths.iter().any(|length| *length > LONGEST_LIST_BYTES) {
        return Ok(vec![String::new(); world.size()]);
    }
    let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
    let mut all = vec![0u8; counts.iter().sum()];
    world.all_gather(own.as_bytes(), &mut all, &counts)?;
    let mut rest = &all[..];
    let cut = |count: &usize| {
        let (text, after) = rest.split_at(*count);
        rest = after;
        String::from_utf8_lossy(text).into_owned()
    };
    Ok(counts.iter().map(cut).collect())
}

/// Name and both values of the first setting that differs or that one side lacks.
fn first_difference(first: &[(&str, &str)], other: &[(&str, &str)]) -> (String, String, String) {
    let value = |list: &[(&str, &str)], name: &str| {
        let found = list.iter().find(|(known, _)| *known == name);
        found.map_or_else(|| "not known".to_owned(), |(_, value)| (*value).to_owned())
    };
    let names = first.iter().chain(other).map(|(name, _)| *name);
    let mut all = names.map(|name| (name.to_owned(), value(first, name), value(other, name)));
    let unknown = || "not known".to_owned();
    all.find(|(_, first, other)| first != other)
        .unwrap_or_else(|| ("a setting of another version of thunder".to_owned(), unknown(), unknown()))
}

#[cfg(test)]
mod tests {
    use thunder_collectives::{TransportChoice, local};

    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Vec<Setting> {
        let setting = |(name, value): &(&str, &str)| Setting { name: (*name).into(), value: (*value).into() };
        pairs.iter().map(setting).collect()
    }

    /// Each of three ranks' results if the last one has other settings.
    fn compare(common: &[(&str, &str)], last: &[(&str, &str)]) -> Vec<Result<(), String>> {
        local::run(3, TransportChoice::Shm, |mut group| {
            let own = settings(if group.rank() == 2 { last } else { common });
            let checked = check_same(&mut group, &own).map_err(|error| error.to_string());
            group.barrier().expect("all ranks are there");
            checked
        })
        .expect("a group")
    }

    #[test]
    fn the_setting_that_differs_is_named_with_both_values() {
        let common = [("--kv", "f16"), ("--split", "3,1"), ("--max-batch", "16")];
        assert_eq!(compare(&common, &common), [Ok(()), Ok(()), Ok(())]);
        let last = [("--kv", "f16"), ("--split", "2,1"), ("--max-batch", "8")];
        for said in compare(&common, &last) {
            let error = said.expect_err("rank 2 differs");
            assert!(error.contains("--split is 2,1 on rank 2, but 3,1 on rank 0"), "{error}");
        }
    }

    #[test]
    fn a_setting_that_only_one_version_knows_is_named() {
        let common = [("--kv", "f16")];
        let error = compare(&common, &[("--kv", "f16"), ("--new", "1")]).remove(0).expect_err("differs");
        assert!(error.contains("--new is 1 on rank 2, but not known on rank 0"), "{error}");
    }

    #[test]
    fn a_list_that_is_too_long_is_refused_by_all() {
        let long = "x".repeat(LONGEST_LIST_BYTES as usize);
        for said in compare(&[("--kv", "f16")], &[("--kv", &long)]) {
            let error = said.expect_err("rank 2 differs");
            assert!(error.contains("another version"), "{error}");
        }
    }
}
