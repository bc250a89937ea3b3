//! Frequencies of rotary position embedding, and how checkpoints stretch them to longer contexts.

use std::collections::BTreeMap;
use std::f64::consts::PI;

use serde::Deserialize;
use serde_json::Value;
use thunder_compute::Rope;

use crate::error::ModelError;

/// `rope_scaling` of config.json, or `rope_parameters` as transformers 5 writes it.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct RopeParameters {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    old_type: Option<String>,
    pub rope_theta: Option<f64>,
    pub partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    attention_factor: Option<f64>,
    /// Whether YaRN's ramp begins and ends at whole dimensions.
    truncate: Option<bool>,
    /// Hunyuan: stretches the base.
    alpha: Option<f64>,
    llama_4_scaling_beta: Option<f32>,
    /// Phi's divisors of the frequencies, for contexts up to the original length and beyond.
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    /// Objects in here are sets of layer types.
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

/// Contexts of a model, in tokens.
#[derive(Clone, Copy)]
pub(super) struct Lengths {
    /// The longest.
    pub context: usize,
    /// The one before it was stretched, if the config has it outside of its rotary parameters.
    pub original: Option<usize>,
}

impl RopeParameters {
    /// The set of a layer type, where types have sets of their own.
    pub fn of_layers(&self, kind: &str) -> Result<Option<Self>, String> {
        let set = self.rest.get(kind).filter(|value| value.is_object());
        let read = |set| Self::deserialize(set).map_err(|error| format!("rope_parameters.{kind}: {error}"));
        set.map(read).transpose()
    }

    /// Beta and original context of temperature tuning.
    pub fn temperature(&self, context: usize) -> Option<(f32, usize)> {
        let original = self.original_max_position_embeddings.unwrap_or(context);
        self.llama_4_scaling_beta.map(|beta| (beta, original))
    }

    /// Factor of cosine and sine, if the config has one.
    pub const fn attention_factor(&self) -> Option<f64> {
        self.attention_factor
    }

    /// The factor by which latent attention sharpens queries and keys each: YaRN's with
    /// `mscale_all_dim`.
    pub fn latent_mscale(&self) -> f64 {
        match (self.rope_type.as_deref().or(self.old_type.as_deref()), self.mscale_all_dim, self.factor) {
            (Some("yarn" | "deepseek_yarn"), Some(all), Some(factor)) if all != 0.0 => mscale(factor, all),
            _ => 1.0,
        }
    }

    /// Refuses numbers that would make frequencies or scores of NaN.
    fn check(&self) -> Result<(), ModelError> {
        let original = self.original_max_position_embeddings.map(|tokens| tokens as f64);
        let beta = self.llama_4_scaling_beta.map(f64::from);
        let refused = |field, value: f64, supported: &str| {
            let (value, supported) = (value.to_string(), supported.to_owned());
            Err(ModelError::Unsupported { field, value, supported })
        };
        for (field, value, least) in [
            ("rope_scaling.factor", self.factor, f64::MIN_POSITIVE),
            ("rope_scaling.original_max_position_embeddings", original, 1.0),
            ("rope_scaling.low_freq_factor", self.low_freq_factor, f64::MIN_POSITIVE),
            ("rope_scaling.high_freq_factor", self.high_freq_factor, f64::MIN_POSITIVE),
            ("rope_scaling.beta_fast", self.beta_fast, f64::MIN_POSITIVE),
            ("rope_scaling.beta_slow", self.beta_slow, f64::MIN_POSITIVE),
            ("rope_scaling.attention_factor", self.attention_factor, f64::MIN_POSITIVE),
            ("rope_scaling.alpha", self.alpha, f64::MIN_POSITIVE),
            ("rope_scaling.mscale", self.mscale, 0.0),
            ("rope_scaling.mscale_all_dim", self.mscale_all_dim, 0.0),
            ("rope_scaling.llama_4_scaling_beta", beta, 0.0),
        ] {
            if let Some(value) = value.filter(|value| !(least..1e9).contains(value)) {
                let above = if least == 0.0 { "a number of at least 0" } else { "a number above 0" };
                return refused(field, value, &format!("{above} and below 1e9 is"));
            }
        }
        match (self.low_freq_factor, self.high_freq_factor) {
            (Some(low), Some(high)) if low >= high => refused(
                "rope_scaling.low_freq_factor",
                low,
                &format!("one below high_freq_factor, {high}, is"),
            ),
            _ => Ok(()),
        }
    }
}

/// YaRN's growth of attention.
fn mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// The rotation of the first `dims` dimensions of a head.
pub(super) fn rope(
    theta: f64,
    dims: usize,
    scaling: Option<&RopeParameters>,
    lengths: Lengths,
) -> Result<Rope, ModelError> {
    if let Some((name, _)) = scaling.and_then(|s| s.rest.iter().find(|(_, value)| value.is_object())) {
        return Err(ModelError::Unsupported {
            field: "rope_parameters",
            value: format!("a set for {name:?}"),
            supported: "one set for all layers is".into(),
        });
    }
    if dims < 2 || !dims.is_multiple_of(2) {
        return Err(ModelError::Unsupported {
            field: "head_dim",
            value: dims.to_string(),
            supported: "an even number of rotated dimensions is".into(),
        });
    }
    scaling.map_or(Ok(()), RopeParameters::check)?;
    let plain: Vec<f64> = (0..dims / 2).map(|i| theta.powf(-2.0 * i as f64 / dims as f64)).collect();
    let kind = scaling.and_then(|s| s.rope_type.as_deref().or(s.old_type.as_deref())).unwrap_or("default");
    let factor = || {
        let factor = scaling.and_then(|s| s.factor);
        factor.ok_or_else(|| ModelError::Unsupported {
            field: "rope_scaling.factor",
            value: "missing".into(),
            supported: format!("{kind:?} scaling needs one"),
        })
    };
    let (frequencies, amplitude) = match (kind, scaling) {
        // Positions of text are the same in all sections of Qwen2-VL's `mrope`.
        ("default" | "mrope", _) | (_, None) => (plain, 1.0),
        ("linear", _) => {
            let factor = factor()?;
            (plain.iter().map(|f| f / factor).collect(), 1.0)
        }
        ("llama3", Some(s)) => (llama3(&plain, factor()?, s), 1.0),
        ("yarn" | "deepseek_yarn", Some(s)) => yarn(&plain, theta, dims, factor()?, s, lengths.context),
        // The first pairs of the whole head rotate, with their frequencies among all pairs.
        ("proportional", Some(s)) => {
            let rotated = (s.partial_rotary_factor.unwrap_or(1.0) * dims as f64) as usize / 2;
            let factor = s.factor.unwrap_or(1.0);
            let frequency = |(i, f): (usize, &f64)| if i < rotated { f / factor } else { 0.0 };
            (plain.iter().enumerate().map(frequency).collect(), 1.0)
        }
        // A fixed stretch of the base, whatever the context: `alpha^(d / (d - 2))`.
        ("dynamic" | "ntk_alpha", Some(RopeParameters { alpha: Some(alpha), .. })) if dims > 2 => {
            let theta = theta * alpha.powf(dims as f64 / (dims as f64 - 2.0));
            ((0..dims / 2).map(|i| theta.powf(-2.0 * i as f64 / dims as f64)).collect(), 1.0)
        }
        ("longrope" | "su", Some(s)) => longrope(&plain, s, lengths)?,
        (other, _) => {
            return Err(ModelError::Unsupported {
                field: "rope_scaling.rope_type",
                value: format!("{other:?}"),
                supported:
                    "default, linear, llama3, yarn, longrope, proportional, and dynamic with an alpha are"
                        .into(),
            });
        }
    };
    Ok(Rope {
        inverse_frequencies: frequencies.into_iter().map(|f| f as f32).collect(),
        amplitude: amplitude as f32,
        interleaved: false,
    })
}

/// Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between
/// interpolated.
fn llama3(plain: &[f64], factor: f64, s: &RopeParameters) -> Vec<f64> {
    let original = s.original_max_position_embeddings.unwrap_or(8192) as f64;
    let (low, high) = (s.low_freq_factor.unwrap_or(1.0), s.high_freq_factor.unwrap_or(4.0));
    plain
        .iter()
        .map(|&f| {
            let turns = original * f / (2.0 * PI);
            let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            f * (smooth + (1.0 - smooth) / factor)
        })
        .collect()
}

/// Phi-3's stretching (arXiv 2402.13753): a divisor for each frequency, and attention that grows
/// with the context.
///
/// Files have divisors for short and for long contexts. A context that grows cannot change them,
/// because its keys are rotated already. So a model has those that its longest context needs, as
/// MLX-LM and vLLM do; transformers changes them with each prompt's length.
fn longrope(plain: &[f64], s: &RopeParameters, lengths: Lengths) -> Result<(Vec<f64>, f64), ModelError> {
    let Lengths { context, original } = lengths;
    let original = s.original_max_position_embeddings.or(original).unwrap_or(context);
    let (field, divisors) = match context > original {
        true => ("rope_scaling.long_factor", &s.long_factor),
        false => ("rope_scaling.short_factor", &s.short_factor),
    };
    let found = divisors.as_deref().unwrap_or_default();
    if found.len() != plain.len() || !found.iter().all(|divisor| (1e-9..1e9).contains(divisor)) {
        return Err(ModelError::Unsupported {
            field,
            value: format!("a list of {} numbers", found.len()),
            supported: format!("{} positive numbers, one for each frequency, are", plain.len()),
        });
    }
    let frequencies = plain.iter().zip(found).map(|(frequency, divisor)| frequency / divisor).collect();
    let growth = context as f64 / original as f64;
    let amplitude = s.attention_factor.unwrap_or_else(|| match growth > 1.0 && original > 1 {
        true => (1.0 + growth.ln() / (original as f64).ln()).sqrt(),
        false => 1.0,
    });
    Ok((frequencies, amplitude))
}

/// YaRN (arXiv 2309.00071): dimensions with few turns within the original context are stretched,
/// those with many turns kept, with a ramp between. Attention grows by `0.1 ln(factor) + 1`.
fn yarn(
    plain: &[f64],
    theta: f64,
    dims: usize,
    factor: f64,
    s: &RopeParameters,
    context: usize,
) -> (Vec<f64>, f64) {
    let original = s.original_max_position_embeddings.unwrap_or(context) as f64;
    let dimension = |turns: f64| dims as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (low, high) = (dimension(s.beta_fast.unwrap_or(32.0)), dimension(s.beta_slow.unwrap_or(1.0)));
    let (low, high) = if s.truncate.unwrap_or(true) { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
    let width = if low == high { 0.001 } else { high - low };
    let frequencies = plain
        .iter()
        .enumerate()
        .map(|(i, &f)| {
            let stretched = ((i as f64 - low) / width).clamp(0.0, 1.0);
            f * (1.0 - stretched) + f / factor * stretched
        })
        .collect();
    let amplitude = s.attention_factor.unwrap_or_else(|| {
        // As in transformers, an mscale_all_dim of zero counts as absent.
        match (s.mscale, s.mscale_all_dim.filter(|&all| all != 0.0)) {
            (Some(m), Some(all)) => mscale(factor, m) / mscale(factor, all),
            _ => mscale(factor, 1.0),
        }
    });
    (frequencies, amplitude)
}
