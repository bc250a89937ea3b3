//! Conversations with tools, and the forms in which chat templates expect them.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Map, Value, json};

use super::ChatTemplate;
use super::format::{AnswerFormat, CallSyntax};

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Its author.
    pub role: Role,
    /// Its text.
    pub content: String,
    /// The model's thinking before the text.
    pub reasoning: Option<String>,
    /// Calls that the model makes.
    pub calls: Vec<ToolCall>,
    /// For a tool's result, the call's id.
    pub call_id: Option<String>,
    /// The speaker's or the tool's name.
    pub name: Option<String>,
}

impl Message {
    /// A message of text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning: None, calls: Vec::new(), call_id: None, name: None }
    }
}

/// A call of a tool by the model.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// Unique in the conversation.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
}

/// A tool that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// Arguments must follow the schema.
    pub strict: bool,
}

/// The form in which a template expects the calls of an earlier message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallForm {
    /// Arguments are text; otherwise they are an object.
    arguments_as_text: bool,
    /// Ids must have nine letters or digits.
    short_ids: bool,
}

/// Length of an id that every template accepts.
const SHORT_ID_LETTERS: usize = 9;

/// The form in which a template expects calls, found by passing one to it; `None` if the template
/// does not show it.
pub(super) fn call_form(template: &ChatTemplate) -> Option<CallForm> {
    let short_ids = template.sources().iter().any(|source| source.contains("length != 9"));
    [false, true].into_iter().map(|arguments_as_text| CallForm { arguments_as_text, short_ids }).find(
        |form| {
            let call = ToolCall {
                id: "probe0001".into(),
                name: "probe_tool".into(),
                arguments: Map::from_iter([("probe_key".to_owned(), json!("probe_value"))]),
            };
            let said = Message { calls: vec![call], ..Message::new(Role::Assistant, "") };
            let result =
                Message { call_id: Some("probe0001".into()), ..Message::new(Role::Tool, "probe_result") };
            let messages = [Message::new(Role::User, "probe"), said, result];
            let tool = Tool {
                name: "probe_tool".into(),
                description: Some("probe".into()),
                parameters: json!({"type": "object", "properties": {"probe_key": {"type": "string"}}}),
                strict: false,
            };
            let messages: Vec<Value> =
                messages.iter().map(|message| template_message(message, *form)).collect();
            let tools = Map::from_iter([("tools".to_owned(), vec![template_tool(&tool)].into())]);
            let Ok(text) = template.render(&messages, &tools) else { return false };
            let shows = |word| text.contains(word);
            let is_quoted = shows("\\\"probe_key") || shows("'probe_key'");
            shows("probe_key") && shows("probe_value") && shows("probe_result") && !is_quoted
        },
    )
}

impl AnswerFormat {
    /// The messages and variables that a template gets for a conversation with tools.
    pub fn template_input(&self, messages: &[Message], tools: &[Tool]) -> (Vec<Value>, Map<String, Value>) {
        let mut variables = Map::new();
        let Some(form) = self.template_calls else {
            let mut described = self.without_tools(messages);
            if !tools.is_empty() {
                describe(&mut described, tools, &self.calls);
            }
            let plain = described.iter().map(|message| template_message(message, PLAIN)).collect();
            return (plain, variables);
        };
        if !tools.is_empty() {
            variables.insert("tools".into(), tools.iter().map(template_tool).collect());
        }
        (messages.iter().map(|message| template_message(message, form)).collect(), variables)
    }

    /// The messages with calls and results as text.
    fn without_tools(&self, messages: &[Message]) -> Vec<Message> {
        let mut plain: Vec<Message> = Vec::with_capacity(messages.len());
        for message in messages {
            let mut content = message.content.clone();
            for call in &message.calls {
                let object = json!({"name": call.name, "arguments": call.arguments});
                let before = if content.is_empty() { "" } else { "\n" };
                content.push_str(&format!("{before}<tool_call>\n{object}\n</tool_call>"));
            }
            if message.role != Role::Tool {
                let calls = Vec::new();
                plain.push(Message { content, calls, ..message.clone() });
                continue;
            }
            let result = format!("<tool_response>\n{content}\n</tool_response>");
            // Results of one turn are one message: templates may want roles in turn.
            match plain.last_mut() {
                Some(last) if last.role == Role::User && last.content.ends_with("</tool_response>") => {
                    last.content.push('\n');
                    last.content.push_str(&result);
                }
                _ => plain.push(Message::new(Role::User, result)),
            }
        }
        plain
    }
}

const PLAIN: CallForm = CallForm { arguments_as_text: false, short_ids: false };

/// Adds the tools to the system message.
fn describe(messages: &mut Vec<Message>, tools: &[Tool], calls: &CallSyntax) {
    debug_assert!(matches!(calls, CallSyntax::Json(_)), "described tools are called in JSON");
    let mut text = "You can call these tools:\n<tools>\n".to_owned();
    for tool in tools {
        text.push_str(&template_tool(tool)["function"].to_string());
        text.push('\n');
    }
    text.push_str(
        "</tools>\nTo call one, write its name and arguments as JSON:\n<tool_call>\n\
         {\"name\": \"NAME\", \"arguments\": {}}\n</tool_call>",
    );
    match messages.first_mut() {
        Some(first) if first.role == Role::System => {
            first.content.push_str("\n\n");
            first.content.push_str(&text);
        }
        _ => messages.insert(0, Message::new(Role::System, text)),
    }
}

fn template_tool(tool: &Tool) -> Value {
    let description = tool.description.as_deref().unwrap_or_default();
    let function = json!({"name": tool.name, "description": description, "parameters": tool.parameters});
    json!({"type": "function", "function": function})
}

fn template_message(message: &Message, form: CallForm) -> Value {
    let role = match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    let id = |id: &str| if form.short_ids { short_id(id) } else { id.to_owned() };
    let mut fields = Map::new();
    fields.insert("role".into(), role.into());
    fields.insert("content".into(), message.content.clone().into());
    if let Some(name) = &message.name {
        fields.insert("name".into(), name.clone().into());
    }
    if let Some(reasoning) = &message.reasoning {
        // Families call it by different names.
        fields.insert("reasoning_content".into(), reasoning.clone().into());
        fields.insert("thinking".into(), reasoning.clone().into());
    }
    if let Some(call_id) = &message.call_id {
        fields.insert("tool_call_id".into(), id(call_id).into());
    }
    if !message.calls.is_empty() {
        let call = |call: &ToolCall| {
            let arguments = Value::Object(call.arguments.clone());
            let arguments =
                if form.arguments_as_text { Value::String(arguments.to_string()) } else { arguments };
            let function = json!({"name": call.name, "arguments": arguments});
            json!({"id": id(&call.id), "type": "function", "function": function})
        };
        fields.insert("tool_calls".into(), message.calls.iter().map(call).collect());
    }
    Value::Object(fields)
}

/// The id itself if it is short, otherwise one derived from it.
fn short_id(id: &str) -> String {
    if id.len() == SHORT_ID_LETTERS && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    format!("{:09x}", hasher.finish())[..SHORT_ID_LETTERS].to_owned()
}
