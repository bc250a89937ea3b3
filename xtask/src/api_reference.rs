//! `cargo xtask api-reference`: generates docs/api-reference.md from the OpenAPI document of the
//! server.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Context;
use serde_json::Value;

use crate::repository;

#[derive(clap::Args)]
pub struct Args {
    /// Only check that the page is current
    #[arg(long)]
    check: bool,
}

/// The parts of the page in order: title, introduction, and prefixes of its paths.
const PARTS: [(&str, &str, &[&str]); 7] = [
    ("Health", "Without a key.", &["/health", "/openapi.json"]),
    ("Signing in", "Without a key; see [sign-in](access.md#sign-in).", &["/auth"]),
    ("OpenAI and Anthropic", "Point a client to `http://HOST:PORT/v1`.", &["/v1/"]),
    ("Ollama", "Point a client to `http://HOST:PORT`.", &["/api/"]),
    ("Tokens, ranking, metrics", "", &["/tokenize", "/detokenize", "/rerank", "/metrics"]),
    (
        "Keys, limits, usage, audit",
        "On servers with a store, and on every node of a cluster; see [access](access.md).",
        &["/admin/me", "/admin/usage", "/admin/keys", "/admin/limits", "/admin/audit", "/admin/backup"],
    ),
    ("Cluster, models, requests", "Endpoints for the [dashboard](dashboard.md).", &["/admin/"]),
];
const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];

pub fn run(args: &Args) -> anyhow::Result<()> {
    let (file, text) = (file(), page()?);
    let shown = file.display();
    if args.check {
        let found = std::fs::read_to_string(&file).with_context(|| format!("cannot read {shown}"))?;
        anyhow::ensure!(found == text, "{shown} is not current: run `cargo xtask api-reference`");
        return Ok(());
    }
    std::fs::write(&file, text).with_context(|| format!("cannot write {shown}"))?;
    println!("{shown}");
    Ok(())
}

fn file() -> PathBuf {
    repository().join("docs/api-reference.md")
}

/// The page's text.
fn page() -> anyhow::Result<String> {
    let source = repository().join("crates/server/src/api/openapi.json");
    let text =
        std::fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
    let document: Value = serde_json::from_str(&text).context("the OpenAPI document is not JSON")?;
    let paths = document["paths"].as_object().context("the OpenAPI document has no paths")?;
    let mut page = format!(
        "# API reference\n\nGenerated from `/openapi.json` by `cargo xtask api-reference`. {}\n\n\
         Send a key as `Authorization: Bearer KEY` or `x-api-key: KEY`. An error has a status of 400 or more,\n\
         in the form of the API in use; in OpenAI's form `error.code` is for programs, and `error.param` names the field or the limit.\n",
        document["info"]["description"].as_str().unwrap_or_default()
    );
    let mut written = 0;
    let mut taken: Vec<&str> = Vec::new();
    for (title, words, begins) in PARTS {
        let _ = write!(page, "\n## {title}\n");
        if !words.is_empty() {
            let _ = write!(page, "\n{words}\n");
        }
        for (path, operations) in paths {
            let fits = begins.iter().any(|begin| path.starts_with(begin));
            if !fits || taken.contains(&path.as_str()) {
                continue;
            }
            taken.push(path);
            for method in METHODS {
                if let Some(operation) = operations.get(method) {
                    write_operation(&mut page, method, path, operation);
                    written += 1;
                }
            }
        }
    }
    write_forms(&mut page, &document["components"]["schemas"]);
    let all = paths.values().filter_map(Value::as_object).map(serde_json::Map::len).sum::<usize>();
    anyhow::ensure!(written == all, "{written} of {all} operations are in a part of the page: extend PARTS");
    Ok(page)
}

fn write_operation(page: &mut String, method: &str, path: &str, operation: &Value) {
    let _ = write!(page, "\n### {} {path}\n\n", method.to_uppercase());
    let role = match operation["x-role"].as_str() {
        Some("admin") => " For admin keys.",
        _ => "",
    };
    let place = if operation["x-node"] == true { " On a node of a cluster." } else { "" };
    let _ = writeln!(page, "{}.{role}{place}", operation["summary"].as_str().unwrap_or_default());
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let rows: Vec<[String; 3]> = parameters
        .map(|parameter| {
            let name = parameter["name"].as_str().unwrap_or_default();
            let place = parameter["in"].as_str().unwrap_or_default();
            [format!("`{name}` ({place})"), described(parameter), code(&parameter["example"])]
        })
        .collect();
    write_table(page, "parameter", &rows);
    let body = &operation["requestBody"]["content"]["application/json"];
    write_fields(page, &body["schema"]);
    if !body["example"].is_null() {
        let _ = write!(page, "\n```json\n{}\n```\n", body["example"]);
    }
    for (name, example) in body["examples"].as_object().into_iter().flatten() {
        let _ = write!(page, "\nExample: {name}\n\n```json\n{}\n```\n", example["value"]);
    }
}

/// The forms that fields of several endpoints share.
fn write_forms(page: &mut String, forms: &Value) {
    let _ = write!(page, "\n## Forms\n\nThe forms that the tables above name.\n");
    for (name, form) in forms.as_object().into_iter().flatten() {
        let _ = write!(page, "\n### {name}\n");
        let description = form["description"].as_str().unwrap_or_default();
        match form["properties"].as_object() {
            None => {
                let _ = write!(page, "\n{}.\n", described(form));
            }
            Some(_) if description.is_empty() => {}
            Some(_) => {
                let _ = write!(page, "\n{description}.\n");
            }
        }
        write_fields(page, form);
    }
}

fn write_fields(page: &mut String, schema: &Value) {
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let fields = schema["properties"].as_object().into_iter().flatten();
    let rows: Vec<[String; 3]> = fields
        .map(|(name, field)| {
            let needed = if required.contains(&name.as_str()) { ", required" } else { "" };
            [format!("`{name}`{needed}"), described(field), code(&field["example"])]
        })
        .collect();
    write_table(page, "field", &rows);
}

/// The name of a schema's type, with links to the forms.
fn kind(schema: &Value) -> Option<String> {
    let several = |schemas: &Vec<Value>| {
        let kinds: Vec<String> = schemas.iter().filter_map(kind).collect();
        (!kinds.is_empty()).then(|| kinds.join(" or "))
    };
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return Some(format!("[{name}](#{})", name.to_lowercase()));
    }
    if !schema["const"].is_null() {
        return Some(format!("only {}", code(&schema["const"])));
    }
    if let Some(schemas) = schema["oneOf"].as_array().or(schema["allOf"].as_array()) {
        return several(schemas);
    }
    match (schema["type"].as_str()?, schema["properties"].as_object()) {
        ("array", _) => match kind(&schema["items"]) {
            Some(items) => Some(format!("array of {items}")),
            None => Some("array".to_owned()),
        },
        ("object", Some(fields)) => {
            let fields: Vec<String> = fields
                .iter()
                .map(|(name, field)| match kind(field) {
                    Some(kind) => format!("`{name}`: {kind}"),
                    None => format!("`{name}`"),
                })
                .collect();
            Some(format!("object ({})", fields.join(", ")))
        }
        (_, None) if schema["enum"].is_array() => {
            let values: Vec<String> = schema["enum"].as_array().into_iter().flatten().map(code).collect();
            Some(values.join(", "))
        }
        (kind, _) => Some(kind.to_owned()),
    }
}

/// What a parameter or field may be.
fn described(field: &Value) -> String {
    let schema = if field["schema"].is_object() { &field["schema"] } else { field };
    let mut parts = Vec::new();
    parts.extend(kind(schema));
    match (schema["minimum"].as_f64(), schema["maximum"].as_f64()) {
        (Some(least), Some(most)) => parts.push(format!("{least} to {most}")),
        (Some(least), None) => parts.push(format!("at least {least}")),
        (None, Some(most)) => parts.push(format!("at most {most}")),
        (None, None) => {}
    }
    parts.extend(field["description"].as_str().map(str::to_owned));
    cell(&parts.join("; "))
}

fn code(value: &Value) -> String {
    if value.is_null() { String::new() } else { format!("`{}`", cell(&value.to_string())) }
}

/// Escapes text for a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn write_table(page: &mut String, what: &str, rows: &[[String; 3]]) {
    if rows.is_empty() {
        return;
    }
    let _ = write!(page, "\n| {what} | description | example |\n|---|---|---|\n");
    for [name, meaning, example] in rows {
        let _ = writeln!(page, "| {name} | {meaning} | {example} |");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_current() {
        run(&Args { check: true }).expect("a current page");
    }
}
