//! POST /v1/rerank and /rerank, in the form that Cohere, Jina and vLLM share.
//!
//! A reranker that is an encoder scores the query with each document; the result is the sigmoid of
//! the score. A chat model is asked whether the document meets the query, in the words of
//! Qwen3-Reranker's model card; the result is the probability of "yes" against "no". Only
//! Qwen3-Reranker was trained for this question.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use serde_json::{Value, json};
use thunder_engine::{ModelKind, Output};
use thunder_model::chat::{Message, Role};

use crate::account::Account;
use crate::app::App;
use crate::error::ApiError;
use crate::generate::prepare::prepare;
use crate::generate::vectors::{self, Computed};
use crate::generate::{Generation, Input, Thinking};
use crate::request::fields::{Fields, invalid_value};
use crate::request::json as request_json;
use crate::request::options::Options;

/// Maximum documents of a request: Cohere's limit.
const MAX_DOCUMENTS: usize = 1000;
const SYSTEM: &str = "Judge whether the Document meets the requirements based on the Query and the Instruct \
                      provided. Note that the answer can only be \"yes\" or \"no\".";
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// A checked request.
struct Rerank {
    prompts: Vec<Vec<u32>>,
    adapter: Option<usize>,
    documents: Vec<String>,
    most: usize,
    returns_documents: bool,
}

/// Orders documents by how well they answer a query.
pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<(HeaderMap, Json<Value>), ApiError> {
    let mut account = Account::open(&app, &request)?;
    let body = app.receive(request).await?;
    let shared = app.clone();
    let work = move |bytes: &[u8]| read(bytes, &shared);
    let (Rerank { prompts, adapter, documents, most, returns_documents }, times) =
        app.admission.prepare(body, work).await?;
    account.note_preparation(&times);
    let is_reranker = app.engine.info().kind == ModelKind::Reranker;
    let output = if is_reranker { Output::Hidden } else { answers(&app)? };
    let names = ("documents", "rerank-");
    let wanted = (&output, adapter);
    let Computed { vectors, id, headers } = vectors::compute(&app, account, &prompts, wanted, names).await?;
    let score = |numbers: &Vec<f32>| {
        let logit = if is_reranker { numbers[0] } else { numbers[0] - numbers[1] };
        1.0 / (1.0 + (-f64::from(logit)).exp())
    };
    let mut ranked: Vec<(usize, f64)> = vectors.iter().map(score).enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    let result = |&(index, score): &(usize, f64)| {
        let mut result = json!({"index": index, "relevance_score": score});
        if returns_documents {
            result["document"] = json!({"text": documents[index]});
        }
        result
    };
    let results: Vec<Value> = ranked[..most].iter().map(result).collect();
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    let answer = Json(json!({
        "id": id, "model": app.model_name(adapter), "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }));
    Ok((headers, answer))
}

fn read(bytes: &[u8], app: &App) -> Result<Rerank, ApiError> {
    let mut fields = Fields::new(request_json::parse(bytes)?, "")?;
    let model = fields.string("model")?.ok_or_else(|| fields.missing("model"))?;
    let adapter = app.check_model(&model)?;
    let query = fields.string("query")?.ok_or_else(|| fields.missing("query"))?;
    let documents = documents(&mut fields)?;
    let most = fields.integer("top_n", 1, usize::MAX, "an integer of at least 1")?;
    let returns_documents = fields.boolean("return_documents")?.unwrap_or(false);
    let info = app.engine.info();
    if info.kind == ModelKind::Embedder {
        let remedy = "use /v1/embeddings, or serve a reranker such as bge-reranker-v2-m3";
        return Err(ApiError::wrong_kind(info, remedy));
    }
    let instruction = fields.string("instruction")?;
    if info.kind == ModelKind::Reranker && instruction.is_some() {
        let message = "this reranker was trained without instructions: leave the field out";
        return Err(ApiError::field("instruction", message).code("unsupported_parameter"));
    }
    let instruction = instruction.unwrap_or_else(|| INSTRUCTION.to_owned());
    fields.finish(&["max_tokens_per_doc", "max_chunks_per_doc", "rank_fields", "truncation", "priority"])?;
    let prompt = |document: &String| {
        if info.kind == ModelKind::Reranker {
            let prompt = info.pair_prompt(&query, document);
            return prompt.map_err(|error| ApiError::no_prompt(&error, "documents"));
        }
        let question = format!("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}");
        let messages = vec![Message::new(Role::System, SYSTEM), Message::new(Role::User, question)];
        let mut generation = Generation::new(Options::new(model.clone()), Input::Chat(messages), "documents");
        generation.thinking = Thinking { enabled: Some(false), effort: None };
        Ok(prepare(generation, &app.engine, &app.format)?.prompts.concat())
    };
    let prompts = documents.iter().map(prompt).collect::<Result<Vec<_>, ApiError>>()?;
    let most = most.map_or(documents.len(), |most| most.min(documents.len()));
    Ok(Rerank { prompts, adapter, documents, most, returns_documents })
}

fn documents(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let must_be = "a list of 1 to 1000 texts";
    let list = match fields.value("documents") {
        None => return Err(fields.missing("documents")),
        Some(Value::Array(list)) if (1..=MAX_DOCUMENTS).contains(&list.len()) => list,
        Some(other) => return Err(invalid_value("documents", &other, must_be)),
    };
    let text = |(index, item): (usize, Value)| match item {
        Value::String(text) => Ok(text),
        object @ Value::Object(_) => {
            let mut fields = Fields::new(object, format!("documents[{index}]"))?;
            let text = fields.string("text")?.ok_or_else(|| fields.missing("text"))?;
            fields.finish(&[])?;
            Ok(text)
        }
        other => {
            Err(invalid_value(&format!("documents[{index}]"), &other, "a text, or an object with `text`"))
        }
    };
    list.into_iter().enumerate().map(text).collect()
}

/// The first tokens of the two answers, in the order "yes", "no".
fn answers(app: &App) -> Result<Output, ApiError> {
    let first = |text| app.engine.info().tokenizer.encode(text, false).ok()?.first().copied();
    match (first("yes"), first("no")) {
        (Some(yes), Some(no)) if yes != no => Ok(Output::Likelihoods(vec![yes, no])),
        _ => Err(ApiError::invalid("this model's tokenizer does not tell \"yes\" and \"no\" apart")),
    }
}
