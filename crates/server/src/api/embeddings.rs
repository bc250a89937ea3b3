//! Embeddings: POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings.
//!
//! A text's embedding has length 1. For encoders, the folder's files define it. For decoders, it is
//! the hidden state of the text's last token after the last norm, as for Qwen3-Embedding.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use thunder_engine::{ModelInfo, ModelKind, Output, PromptError};
use thunder_model::Pooling;

use crate::account::Account;
use crate::app::App;
use crate::error::ApiError;
use crate::generate::Prompt;
use crate::generate::vectors::{self, Computed};
use crate::request::fields::{Fields, invalid_value};
use crate::request::options::{Options, keep_alive};
use crate::request::{json as request_json, prompts};

/// Maximum inputs of a request: OpenAI's limit.
const MAX_INPUTS: usize = 2048;

/// A response: headers and body.
type Answer = (HeaderMap, Json<Value>);

/// Texts to embed.
struct Inputs {
    prompts: Vec<Vec<u32>>,
    field: &'static str,
    /// Numbers to keep of each embedding.
    dimensions: Option<usize>,
    as_base64: bool,
}

/// What was computed.
struct Embedded {
    adapter: Option<usize>,
    vectors: Vec<Vec<f32>>,
    as_base64: bool,
    tokens: usize,
    headers: HeaderMap,
}

/// POST /v1/embeddings.
pub(crate) async fn openai(State(app): State<Arc<App>>, request: Request) -> Result<Answer, ApiError> {
    let embedded = embed(&app, request, |mut fields, info| {
        let field = "input";
        let inputs = prompts::take(&mut fields, field)?;
        let dimensions = dimensions(&mut fields)?;
        let as_base64 = match fields.value("encoding_format") {
            None => false,
            Some(Value::String(format)) if format == "float" => false,
            Some(Value::String(format)) if format == "base64" => true,
            Some(other) => return Err(invalid_value("encoding_format", &other, "\"float\" or \"base64\"")),
        };
        fields.string("user")?;
        fields.finish(&["input_type", "truncate"])?;
        let prompts = encode(inputs, info, field, false)?;
        Ok(Inputs { prompts, field, dimensions, as_base64 })
    })
    .await?;
    let shown = |vector: &Vec<f32>| match embedded.as_base64 {
        true => {
            json!(BASE64_STANDARD.encode(vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()))
        }
        false => json!(vector),
    };
    let object = |(index, vector)| json!({"object": "embedding", "index": index, "embedding": shown(vector)});
    let data: Vec<Value> = embedded.vectors.iter().enumerate().map(object).collect();
    let answer = Json(json!({
        "object": "list", "data": data, "model": app.model_name(embedded.adapter),
        "usage": {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens},
    }));
    Ok((embedded.headers, answer))
}

/// POST /api/embed.
pub(crate) async fn ollama(State(app): State<Arc<App>>, request: Request) -> Result<Answer, ApiError> {
    let began = Instant::now();
    let embedded = embed(&app, request, |mut fields, info| {
        let field = "input";
        let inputs = prompts::take(&mut fields, field)?;
        let cuts = fields.boolean("truncate")?.unwrap_or(true);
        let dimensions = dimensions(&mut fields)?;
        finish_ollama(fields)?;
        Ok(Inputs { prompts: encode(inputs, info, field, cuts)?, field, dimensions, as_base64: false })
    })
    .await?;
    let answer = Json(json!({
        "model": app.model_name(embedded.adapter), "embeddings": embedded.vectors,
        "total_duration": began.elapsed().as_nanos() as u64, "load_duration": 0,
        "prompt_eval_count": embedded.tokens,
    }));
    Ok((embedded.headers, answer))
}

/// POST /api/embeddings, which Ollama's older clients use: one text.
pub(crate) async fn ollama_one(State(app): State<Arc<App>>, request: Request) -> Result<Answer, ApiError> {
    let mut embedded = embed(&app, request, |mut fields, info| {
        let field = "prompt";
        let text = fields.string(field)?.ok_or_else(|| fields.missing(field))?;
        finish_ollama(fields)?;
        let prompts = encode(vec![Prompt::Text(text)], info, field, true)?;
        Ok(Inputs { prompts, field, dimensions: None, as_base64: false })
    })
    .await?;
    let answer = Json(json!({"embedding": embedded.vectors.pop()}));
    Ok((embedded.headers, answer))
}

/// Refuses the remaining fields of an Ollama request. The server's command decides how a model is
/// loaded.
fn finish_ollama(mut fields: Fields) -> Result<(), ApiError> {
    keep_alive(&mut fields)?;
    if let Some(options) = fields.nested("options")? {
        // Sampling options have no effect on vectors, but Ollama accepts them here too.
        super::ollama_options::take(options, &mut Options::new(String::new()))?;
    }
    fields.finish(&[])
}

async fn embed(
    app: &Arc<App>,
    request: Request,
    read: impl FnOnce(Fields, &ModelInfo) -> Result<Inputs, ApiError> + Send + 'static,
) -> Result<Embedded, ApiError> {
    let mut account = Account::open(app, &request)?;
    let body = app.receive(request).await?;
    let shared = app.clone();
    let work = move |bytes: &[u8]| {
        let info = shared.engine.info();
        check_kind(info)?;
        let mut fields = Fields::new(request_json::parse(bytes)?, "")?;
        let model = fields.string("model")?.ok_or_else(|| fields.missing("model"))?;
        let adapter = shared.check_model(model.strip_suffix(":latest").unwrap_or(&model))?;
        Ok((read(fields, info)?, adapter))
    };
    let ((inputs, adapter), times) = app.admission.prepare(body, work).await?;
    account.note_preparation(&times);
    let Inputs { prompts, field, dimensions, as_base64 } = inputs;
    let names = (field, "embd-");
    let wanted = (&Output::Hidden, adapter);
    let Computed { mut vectors, headers, .. } =
        vectors::compute(app, account, &prompts, wanted, names).await?;
    for vector in &mut vectors {
        cut(vector, dimensions)?;
    }
    Ok(Embedded { vectors, adapter, as_base64, tokens: prompts.iter().map(Vec::len).sum(), headers })
}

fn check_kind(info: &ModelInfo) -> Result<(), ApiError> {
    match (info.kind, &info.pooling) {
        (ModelKind::Reranker, _) => {
            let remedy = "use /v1/rerank, or serve a model for embeddings";
            Err(ApiError::wrong_kind(info, remedy))
        }
        (ModelKind::Embedder, _) | (ModelKind::Decoder, Pooling::LastToken) => Ok(()),
        (ModelKind::Decoder, pooling) => {
            let message = format!(
                "this model's embeddings are made by the pooling \"{pooling}\" (1_Pooling/config.json), but of a decoder \
                 this server only takes the last token's: use a model such as Qwen3-Embedding"
            );
            Err(ApiError::invalid(message).code("unsupported_model"))
        }
    }
}

fn dimensions(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    fields.integer("dimensions", 1, usize::MAX, "an integer of at least 1")
}

/// The tokens of the inputs. An input that does not fit is refused, or cut off with `cuts`.
fn encode(
    inputs: Vec<Prompt>,
    info: &ModelInfo,
    field: &'static str,
    cuts: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    if inputs.len() > MAX_INPUTS {
        let message = format!(
            "`{field}` has {} texts, but {MAX_INPUTS} are the most: send several requests",
            inputs.len()
        );
        return Err(ApiError::field(field, message).code("invalid_value"));
    }
    let tokens = |input| {
        let mut ids = match input {
            Prompt::Ids(ids) => ids,
            // The tokenizer's final tokens stay at the end of every text.
            Prompt::Text(text) if cuts && info.kind != ModelKind::Decoder => {
                info.cut_prompt(&text).map_err(|error| ApiError::no_prompt(&error, field))?
            }
            Prompt::Text(text) => match info.text_prompt(&text) {
                Err(PromptError::TooLong { most_bytes, .. }) if cuts => {
                    info.text_prompt(&text[..text.floor_char_boundary(most_bytes)])
                }
                encoded => encoded,
            }
            .map_err(|error| ApiError::no_prompt(&error, field))?,
        };
        if cuts {
            // A decoder's prompt leaves room for a token.
            let room = usize::from(info.kind == ModelKind::Decoder);
            ids.truncate(info.context_length - room);
        }
        Ok(ids)
    };
    inputs.into_iter().map(tokens).collect()
}

/// Keeps the first `dimensions` numbers, and gives the vector length 1.
fn cut(vector: &mut Vec<f32>, dimensions: Option<usize>) -> Result<(), ApiError> {
    if let Some(wanted) = dimensions {
        if wanted > vector.len() {
            let message =
                format!("`dimensions` is {wanted}, but the model's embeddings have {}", vector.len());
            return Err(ApiError::field("dimensions", message).code("invalid_value"));
        }
        vector.truncate(wanted);
    }
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_vectors_have_length_one_again() {
        let mut vector = vec![3.0, 4.0, 12.0];
        cut(&mut vector, Some(2)).unwrap();
        assert_eq!(vector, [0.6, 0.8]);
        assert!(cut(&mut vector, Some(3)).is_err());
        let mut zero = vec![0.0; 2];
        cut(&mut zero, None).unwrap();
        assert_eq!(zero, [0.0; 2]);
    }
}
