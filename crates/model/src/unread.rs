//! Tensors that the files have and the config does not ask for.

use std::collections::{BTreeMap, BTreeSet};

use crate::folder::ModelFolder;

/// Tensors of older files that are computed from the config instead of being read.
const COMPUTED: [&str; 2] = ["rotary_emb.inv_freq", "embeddings.position_ids"];
/// Parts of checkpoints that no model here uses and that this list excludes: encoders of images and
/// sound, layers that predict further tokens, and parts for the training of encoders. Each entry is
/// a part of a name.
const OTHER_PARTS: [&str; 16] = [
    "mtp",
    "mtp_layers",
    "mtp_block",
    "visual",
    // From DeepSeek V4.1, whose router has a correction for images.
    "vision",
    "aligner",
    "bias_vl",
    "vision_tower",
    "vision_model",
    "embed_vision",
    "multi_modal_projector",
    "mm_projector",
    "audio_tower",
    "embed_audio",
    "pooler",
    "cls",
];
/// Groups of tensors that are named; the rest is counted.
const MOST_GROUPS: usize = 4;

/// A message about the tensors that no rank reads; `None` if all are read. Complete after
/// [`shard_footprints`](crate::model::shard_footprints) has described all ranks of a plan.
pub fn unread_tensors(folder: &ModelFolder) -> Option<String> {
    describe(&folder.weights.unread(), folder.spec.layers.len(), folder.spec.further)
}

fn describe(names: &[String], layers: usize, ahead: usize) -> Option<String> {
    // Only the first layer that predicts further tokens is used. These layers have copies of the
    // embedding and of the output head.
    let is_ahead = |name: &str| layer(name).is_some_and(|layer| (layers..layers + ahead).contains(&layer));
    let is_known = |name: &&str| {
        COMPUTED.iter().any(|end| name.ends_with(end))
            || is_ahead(name)
            || name.split('.').any(|part| OTHER_PARTS.contains(&part))
    };
    let names: Vec<&str> = names.iter().map(String::as_str).filter(|name| !is_known(name)).collect();
    let count = names.len();
    let further: BTreeSet<usize> =
        names.iter().filter_map(|name| layer(name)).filter(|layer| *layer >= layers).collect();
    let mut groups: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in names.into_iter().filter(|name| layer(name).is_none_or(|layer| layer < layers)) {
        groups.entry(name.split('.').next().unwrap_or(name)).or_default().push(name);
    }
    let mut parts = Vec::new();
    if let (Some(first), Some(last)) = (further.first(), further.last()) {
        let which =
            if first == last { format!("layer {first}") } else { format!("layers {first} to {last}") };
        parts.push(format!("{which} (config.json has {layers} layers)"));
    }
    let left = groups.len().saturating_sub(MOST_GROUPS);
    parts.extend(groups.into_iter().take(MOST_GROUPS).map(|(group, names)| match names[..] {
        [name] => name.to_owned(),
        [first, ..] => format!("{} of {group}, such as {first}", names.len()),
        [] => group.to_owned(),
    }));
    if left > 0 {
        parts.push(format!("and {left} groups more"));
    }
    let subject = if count == 1 {
        "1 tensor in the model's files is".into()
    } else {
        format!("{count} tensors in the model's files are")
    };
    (count > 0).then(|| format!("{subject} not used: {}", parts.join("; ")))
}

/// The layer of a tensor, by its name.
fn layer(name: &str) -> Option<usize> {
    let (_, rest) = name.split_once("layers.")?;
    rest.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_groups_are_named() {
        let names = |names: &[&str]| names.iter().map(|&name| name.into()).collect::<Vec<String>>();
        let told = |of: &[&str]| describe(&names(of), 2, 0);
        assert_eq!(told(&["model.layers.0.self_attn.rotary_emb.inv_freq"]), None);
        assert_eq!(told(&["model.visual.blocks.0.norm1.weight", "mtp.layers.0.mlp.gate.weight"]), None);
        assert_eq!(
            told(&["lm_head.weight"]).as_deref(),
            Some("1 tensor in the model's files is not used: lm_head.weight")
        );
        let ahead = ["model.layers.2.eh_proj.weight", "model.layers.2.shared_head.head.weight"];
        assert_eq!(describe(&names(&ahead), 2, 1), None);
        assert!(describe(&names(&["model.layers.3.a"]), 2, 1).is_some(), "one such layer is expected");
        let text = told(&["model.layers.2.a", "model.layers.3.a", "sonar.x", "sonar.y", "z"]);
        assert_eq!(
            text.as_deref(),
            Some(
                "5 tensors in the model's files are not used: layers 2 to 3 (config.json has 2 layers); 2 of sonar, such as \
                 sonar.x; z"
            )
        );
    }
}
