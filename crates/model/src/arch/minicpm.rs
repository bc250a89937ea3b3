//! MiniCPM in config.json: factors of embeddings, layers and logits under their own names.

use serde::Deserialize;
use serde_json::Value;

/// Fields of published files.
#[derive(Debug, Deserialize)]
struct Published {
    hidden_size: f64,
    num_hidden_layers: f64,
    /// Embeddings are multiplied with it.
    scale_emb: Option<f64>,
    /// What layers add is multiplied with this, and divided by the root of the number of layers.
    scale_depth: Option<f64>,
    /// Logits are multiplied with it, divided by `hidden_size`.
    dim_model_base: Option<f64>,
}

/// The config with Granite's names of the factors. MLX-LM does not divide the logits of tied
/// models; the original and transformers do.
pub(super) fn in_common_names(mut text: Value) -> Result<Value, String> {
    let published = Published::deserialize(&text).map_err(|error| error.to_string())?;
    let Some(fields) = text.as_object_mut() else { return Err("it is no object".into()) };
    let factors = [
        ("embedding_multiplier", published.scale_emb),
        (
            "residual_multiplier",
            published.scale_depth.map(|scale| scale / published.num_hidden_layers.sqrt()),
        ),
        ("logits_scaling", published.dim_model_base.map(|base| published.hidden_size / base)),
    ];
    for (field, factor) in factors {
        if let Some(factor) = factor {
            if !(factor.is_finite() && factor > 0.0) {
                let names = "scale_emb, scale_depth, dim_model_base and the sizes";
                return Err(format!("{field} comes to {factor}: {names} must be above 0"));
            }
            fields.insert(field.into(), factor.into());
        }
    }
    Ok(text)
}
