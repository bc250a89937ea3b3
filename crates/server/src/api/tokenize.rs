//! POST /tokenize and /detokenize, in the form that vLLM and llama.cpp share.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::{Extension, Json};
use serde_json::{Value, json};
use thunder_access::Caller;

use crate::app::App;
use crate::error::ApiError;
use crate::generate::prepare::prepare;
use crate::generate::{Generation, Input, Prompt};
use crate::request::fields::{Fields, invalid_value};
use crate::request::options::Options;
use crate::request::{json as request_json, messages, tools};

/// The tokens of a text (`prompt` or `content`), or of `messages` with the chat template.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let body = app.receive(request).await?;
    let shared = app.clone();
    let work = move |bytes: &[u8]| {
        let mut fields = Fields::new(request_json::parse(bytes)?, "")?;
        let model = fields.string("model")?.unwrap_or_else(|| "default".to_owned());
        shared.check_model_for(&caller, &model)?;
        let older = fields.string("content")?;
        let text = fields.string("prompt")?.or(older);
        let input = match text {
            Some(text) => Input::Prompts(vec![Prompt::Text(text)]),
            None => Input::Chat(messages::take(&mut fields)?),
        };
        let mut generation = Generation::new(Options::new(model), input, "prompt");
        generation.tools = tools::take(&mut fields)?;
        fields.finish(&["add_special_tokens", "return_token_strs"])?;
        let prepared = prepare(generation, &shared.engine, &shared.format)?;
        Ok(prepared.prompts.concat())
    };
    let (tokens, _) = app.admission.prepare(body, work).await?;
    let most = app.engine.info().context_length;
    Ok(Json(json!({"tokens": tokens, "count": tokens.len(), "max_model_len": most})))
}

/// The text of tokens.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let body = app.receive(request).await?;
    let shared = app.clone();
    let work = move |bytes: &[u8]| {
        let mut fields = Fields::new(request_json::parse(bytes)?, "")?;
        let model = fields.string("model")?.unwrap_or_else(|| "default".to_owned());
        shared.check_model_for(&caller, &model)?;
        let tokens = fields.value("tokens").ok_or_else(|| fields.missing("tokens"))?;
        fields.finish(&[])?;
        let most = shared.engine.info().vocab_size as u64;
        let id = |value: &Value| value.as_u64().filter(|id| *id < most).map(|id| id as u32);
        let ids: Option<Vec<u32>> = tokens.as_array().and_then(|list| list.iter().map(id).collect());
        let ids = ids.ok_or_else(|| {
            invalid_value("tokens", &tokens, "a list of token ids below the vocabulary size")
        })?;
        Ok(shared.engine.info().tokenizer.decode(&ids, false))
    };
    let (text, _) = app.admission.prepare(body, work).await?;
    Ok(Json(json!({"prompt": text, "content": text})))
}
