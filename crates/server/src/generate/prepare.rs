//! From a checked request to the engine's requests: template, tokens, grammar, parser.

use std::sync::Arc;

use serde_json::{Map, Value};
use thunder_engine::{Constraint, Engine, Grammar, Request, json_form};
use thunder_model::chat::{AnswerFormat, AnswerParser, CallRule, Opening, Otherwise, Tool, ToolSchemas};

use super::relay::Relay;
use super::{Generation, Input, Prompt, Thinking, ToolChoice, ToolUse};
use crate::admission::run_long;
use crate::error::ApiError;
use crate::request::options::Options;

/// A request that the engine can take.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub options: Options,
    pub prompts: Vec<Vec<u32>>,
    pub prompt_field: &'static str,
    pub logprobs: Option<usize>,
    pub parsing: Parsing,
    /// A node relays the answer.
    pub relay: Option<Relay>,
    pub constraint: Option<Constraint>,
    /// Tokens of the predicted answer.
    predicted: Vec<u32>,
    marks: Vec<u32>,
}

/// How answers are split into parts.
#[derive(Debug, Clone)]
pub(crate) struct Parsing {
    /// `None`: the text is passed on.
    format: Option<Arc<AnswerFormat>>,
    schemas: Option<Arc<ToolSchemas>>,
    opening: Opening,
    /// Only the first call counts.
    pub one_call: bool,
    /// The grammar forces the answer to consist of calls.
    calls_only: bool,
}

impl Parsing {
    pub fn parser(&self) -> Option<AnswerParser> {
        let format = self.format.clone()?;
        let parser = AnswerParser::new(format, self.schemas.clone(), self.opening);
        Some(if self.calls_only { parser.calls_only() } else { parser })
    }
}

impl Prepared {
    /// The engine's requests: for each prompt, as many as there are completions of it.
    pub fn requests(&self) -> impl Iterator<Item = Request> {
        let requests = self.prompts.iter().flat_map(move |prompt| {
            (0..self.options.n).map(move |nth| {
                let request = self.options.request(prompt.clone(), nth, self.logprobs);
                Request {
                    marks: self.marks.clone(),
                    constraint: self.constraint.clone(),
                    predicted: self.predicted.clone(),
                    ..request
                }
            })
        });
        requests.enumerate().map(|(choice, request)| match &self.relay {
            Some(relay) => relay.request(choice, request),
            None => request,
        })
    }
}

/// Prepares a request. Uses processor time.
pub(crate) fn prepare(
    generation: Generation,
    engine: &Engine,
    format: &Arc<AnswerFormat>,
) -> Result<Prepared, ApiError> {
    let Generation {
        options,
        input,
        mut tools,
        thinking,
        template_kwargs,
        grammar,
        logprobs,
        predicted,
        prompt_field,
    } = generation;
    if let Some(error) = ApiError::no_text(engine.info()) {
        return Err(error);
    }
    tools.check()?;
    if logprobs.is_some() && tools.are_demanded() {
        let message = "`logprobs` are those of an answer's text, and with this `tool_choice` the answer is \
                       calls without text: remove one of the two";
        return Err(ApiError::field("logprobs", message).code("invalid_value"));
    }
    if tools.choice == ToolChoice::None {
        tools.tools.clear();
    }
    let has_tools = !tools.tools.is_empty();
    let texts = Texts { input, tools: &tools, thinking, template_kwargs, prompt_field };
    let (prompts, chat_opening) = texts.prompts(engine, format)?;
    let (opening, is_chat) = (chat_opening.unwrap_or(Opening::Fresh), chat_opening.is_some());
    let constraint = constraint(engine, format, &tools, grammar, opening, is_chat)?;
    let is_parsed = is_chat && AnswerParser::is_needed(format, has_tools);
    let schemas = ToolSchemas::new(tools.tools.iter().map(|tool| (tool.name.as_str(), &tool.parameters)));
    let marks = if is_parsed { format.special_tokens(&engine.info().tokenizer) } else { Vec::new() };
    let parsing = Parsing {
        format: is_parsed.then(|| format.clone()),
        schemas: has_tools.then(|| Arc::new(schemas)),
        opening,
        one_call: !tools.parallel,
        calls_only: tools.are_demanded(),
    };
    let predicted = predicted_tokens(predicted.as_deref(), engine)?;
    Ok(Prepared {
        options,
        prompts,
        prompt_field,
        logprobs,
        parsing,
        relay: None,
        constraint,
        predicted,
        marks,
    })
}

/// The tokens of a prediction, as many as an answer can have.
fn predicted_tokens(text: Option<&str>, engine: &Engine) -> Result<Vec<u32>, ApiError> {
    let Some(text) = text else { return Ok(Vec::new()) };
    let wrong = |error: &dyn std::fmt::Display| {
        ApiError::field("prediction.content", format!("`prediction.content` has no tokens: {error}"))
    };
    let mut ids = engine.info().tokenizer.encode(text, false).map_err(|error| wrong(&error))?;
    ids.truncate(engine.info().context_length);
    Ok(ids)
}

/// The tokens of a request's prompts. Compiles no grammar: nothing is generated.
pub(crate) fn prompt_tokens(
    generation: Generation,
    engine: &Engine,
    format: &AnswerFormat,
) -> Result<usize, ApiError> {
    let Generation { input, mut tools, thinking, template_kwargs, prompt_field, .. } = generation;
    tools.check()?;
    if tools.choice == ToolChoice::None {
        tools.tools.clear();
    }
    let texts = Texts { input, tools: &tools, thinking, template_kwargs, prompt_field };
    let (prompts, _) = texts.prompts(engine, format)?;
    Ok(prompts.iter().map(Vec::len).sum())
}

/// The parts of prompts.
struct Texts<'a> {
    input: Input,
    tools: &'a ToolUse,
    thinking: Thinking,
    template_kwargs: Map<String, Value>,
    prompt_field: &'static str,
}

impl Texts<'_> {
    /// The prompts' tokens, and for a conversation the beginning of the answer.
    fn prompts(
        self,
        engine: &Engine,
        format: &AnswerFormat,
    ) -> Result<(Vec<Vec<u32>>, Option<Opening>), ApiError> {
        let Self { input, tools, thinking, template_kwargs, prompt_field } = self;
        let messages = match input {
            Input::Prompts(prompts) => {
                let ids = prompts.into_iter().map(|prompt| match prompt {
                    Prompt::Ids(ids) => Ok(ids),
                    Prompt::Text(text) => engine
                        .info()
                        .text_prompt(&text)
                        .map_err(|error| ApiError::no_prompt(&error, prompt_field)),
                });
                return Ok((ids.collect::<Result<_, _>>()?, None));
            }
            Input::Chat(messages) => messages,
        };
        let (messages, mut variables) = format.template_input(&messages, &tools.tools);
        thinking.add_to(&mut variables);
        variables.extend(template_kwargs);
        let prompt = engine.info().conversation_prompt(&messages, &variables);
        let prompt = prompt.map_err(|error| ApiError::no_prompt(&error, prompt_field))?;
        let opening = format.opening(&prompt.tail);
        Ok((vec![prompt.ids], Some(opening)))
    }
}
impl ToolUse {
    /// Checks the choice against the tools.
    fn check(&self) -> Result<(), ApiError> {
        match &self.choice {
            ToolChoice::Required if self.tools.is_empty() => {
                Err(ApiError::field("tool_choice", "`tool_choice` demands a call, but `tools` has none"))
            }
            ToolChoice::Named(name) if !self.tools.iter().any(|tool| tool.name == *name) => {
                let message = format!("`tool_choice` names the tool \"{name}\", which `tools` does not have");
                Err(ApiError::field("tool_choice", message))
            }
            _ => Ok(()),
        }
    }

    /// The answer consists only of calls.
    fn are_demanded(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// The tools that may be called, if this needs a grammar, and the form of other answers. `body`
    /// is the format of an answer without calls, if there is one.
    fn rule<'a>(&self, body: Option<&'a str>) -> Option<(Vec<&Tool>, CallRule<'a>)> {
        let all: Vec<&Tool> = self.tools.iter().collect();
        let otherwise = body.map_or(Otherwise::Text, Otherwise::Body);
        match &self.choice {
            ToolChoice::None => None,
            ToolChoice::Required => {
                Some((all, CallRule { several: self.parallel, otherwise: Otherwise::Nothing }))
            }
            ToolChoice::Named(name) => {
                let named = all.into_iter().filter(|tool| tool.name == *name).collect();
                Some((named, CallRule { several: false, otherwise: Otherwise::Nothing }))
            }
            ToolChoice::Auto if !all.is_empty() && (body.is_some() || all.iter().any(|tool| tool.strict)) => {
                Some((all, CallRule { several: self.parallel, otherwise }))
            }
            ToolChoice::Auto => None,
        }
    }
}

/// The grammar of the answer. `form` is the format that the request wants, and its field.
fn constraint(
    engine: &Engine,
    format: &AnswerFormat,
    tools: &ToolUse,
    form: Option<(&'static str, Grammar)>,
    opening: Opening,
    is_chat: bool,
) -> Result<Option<Constraint>, ApiError> {
    let tokenizer = &engine.info().tokenizer;
    let body = form.as_ref().map(|(_, grammar)| body(grammar));
    let (field, grammar) = match (tools.rule(body.as_deref()), form) {
        (Some((called, rule)), form) => {
            let lark = format.call_grammar(tokenizer, &called, rule, opening, &json_form());
            (form.map_or("tools", |(field, _)| field), Grammar::Lark(lark))
        }
        (None, None) => return Ok(None),
        (None, Some((field, grammar))) => {
            let whole = body.filter(|_| is_chat);
            let whole = whole.and_then(|body| format.after_thinking(tokenizer, opening, &body));
            (field, whole.map_or(grammar, Grammar::Lark))
        }
    };
    let compiled = run_long(|| engine.compile(&grammar));
    let wrong = |error| {
        ApiError::field(field, format!("`{field}` cannot be followed: {error}")).code("invalid_value")
    };
    compiled.map(Some).map_err(wrong)
}

/// A grammar as the right side of a rule in Lark.
fn body(grammar: &Grammar) -> String {
    match grammar {
        Grammar::JsonSchema(schema) => {
            let mut schema = schema.clone();
            if let Some(fields) = schema.as_object_mut() {
                fields.insert("x-guidance".into(), json_form());
            }
            format!("%json {schema}")
        }
        Grammar::Regex(regex) => format!("/{}/", with_escaped_slashes(regex)),
        Grammar::Lark(lark) => format!("%lark {{\n{lark}\n}}"),
    }
}

/// A regular expression between slashes. Slashes inside it are escaped if they are not yet.
fn with_escaped_slashes(regex: &str) -> String {
    let (mut out, mut is_escaped) = (String::with_capacity(regex.len()), false);
    for c in regex.chars() {
        if c == '/' && !is_escaped {
            out.push('\\');
        }
        out.push(c);
        is_escaped = c == '\\' && !is_escaped;
    }
    out
}

impl Thinking {
    /// Sets what the families' templates call it.
    fn add_to(&self, variables: &mut serde_json::Map<String, Value>) {
        if let Some(enabled) = self.enabled {
            for name in ["enable_thinking", "thinking"] {
                variables.insert(name.into(), enabled.into());
            }
        }
        if let Some(effort) = &self.effort {
            variables.insert("reasoning_effort".into(), effort.clone().into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::with_escaped_slashes;

    #[test]
    fn slashes_of_an_expression_are_escaped_once() {
        for (given, expected) in [("a/b", r"a\/b"), (r"a\/b", r"a\/b"), (r"\\/", r"\\\/"), ("", "")] {
            assert_eq!(with_escaped_slashes(given), expected);
        }
    }
}
