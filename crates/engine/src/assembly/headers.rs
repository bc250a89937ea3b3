//! What a model's headers tell before anything is loaded.

use thunder_model::ModelFolder;
use thunder_model::model::{FileRanges, shard_ranges};

use super::device::DeviceChoice;
use super::error::AssemblyError;
use super::spec::{EngineSpec, SpecError};

/// The bytes of each weight file that a rank of a group reads, from the files' headers alone.
/// Includes a layer for drafts, which the group may not use.
///
/// # Errors
/// If the model cannot be read or split, or its ranks read other files too.
pub fn rank_ranges(engine: &EngineSpec, rank: usize, ranks: usize) -> Result<Vec<FileRanges>, AssemblyError> {
    let mut folder = ModelFolder::open(&engine.model)?;
    if !engine.speculation {
        folder.spec.ahead = None;
    }
    let plan = engine.shard_plan(&folder, ranks)?;
    Ok(shard_ranges(&folder, &plan, rank)?)
}

/// Checks an engine's spec against its model, from the headers alone.
///
/// # Errors
/// If the spec is wrong, or the model cannot be read.
pub fn check(engine: &EngineSpec) -> Result<(), AssemblyError> {
    engine.validate()?;
    open_checked(&mut engine.clone())?;
    Ok(())
}

/// Opens the model, fits the spec to its kind, and returns it with the tokens of one request.
pub(super) fn open_checked(engine: &mut EngineSpec) -> Result<(ModelFolder, usize), AssemblyError> {
    let mut folder = ModelFolder::open(&engine.model)?;
    if folder.spec.encoder.is_some() {
        prepare_for_encoder(engine)?;
    }
    if engine.draft.is_some() || !engine.speculation {
        folder.spec.ahead = None;
    }
    for adapter in &engine.adapters {
        folder.add_adapter(&adapter.name, &adapter.path)?;
    }
    let context = engine.context_tokens(folder.spec.context)?;
    Ok((folder, context))
}

/// Disables what is useless for an encoder, which computes texts as a whole and has no answers.
fn prepare_for_encoder(engine: &mut EngineSpec) -> Result<(), SpecError> {
    if engine.draft.is_some() {
        return Err(SpecError::DraftOfEncoder { model: engine.name.clone() });
    }
    (engine.speculation, engine.prefix_cache, engine.disk_cache) = (false, false, None);
    // GPUs do not support attention to later tokens yet.
    if engine.device == DeviceChoice::Auto {
        engine.device = DeviceChoice::Cpu;
    }
    Ok(())
}
