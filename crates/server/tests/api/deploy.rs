//! The files in deploy/, Containerfile and compose.yaml, as far as they can be tested without
//! containers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use axum::body::Body;
use axum::http::Request;
use serde_json::Value;
use thunder_server::{ServerConfig, router};

use crate::support::{hello, scripted, send};

/// Labels that Prometheus and its histograms add.
const ADDED_LABELS: [&str; 3] = ["instance", "job", "le"];
/// Labels that only some metrics have, once something was counted.
const LATER_LABELS: [&str; 1] = ["limit"];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The contents of /metrics: the kind of each metric family, and the labels of its samples.
struct Known {
    kinds: BTreeMap<String, String>,
    labels: BTreeMap<String, BTreeSet<String>>,
}

async fn known() -> Known {
    let app = router(scripted(hello), ServerConfig::default());
    let text = send(app, Request::get("/metrics").body(Body::empty()).unwrap()).await.text;
    // A test of the crate `node` checks that a node reports these.
    let of_node = std::fs::read_to_string(repository().join("deploy/prometheus/node-metrics.txt")).unwrap();
    let mut known = Known { kinds: BTreeMap::new(), labels: BTreeMap::new() };
    for line in text.lines().chain(of_node.lines()) {
        if let Some(("TYPE", rest)) = line.strip_prefix("# ").and_then(|line| line.split_once(' ')) {
            let (name, kind) = rest.split_once(' ').unwrap();
            known.kinds.insert(name.to_owned(), kind.to_owned());
        } else if let Some((name, rest)) = line.split_once('{') {
            let labels = rest.split('}').next().unwrap().split(',');
            let labels = labels.filter_map(|label| Some(label.split_once('=')?.0.to_owned()));
            known.labels.entry(name.to_owned()).or_default().extend(labels);
        }
    }
    known
}

/// A metric as an expression uses it.
#[derive(Debug, PartialEq, Eq)]
struct Selector {
    name: String,
    labels: Vec<String>,
    /// The function right around it, if it takes a range.
    over: Option<String>,
}

fn is_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || letter == ':'
}

/// The metrics of an expression, and the labels of its `by (…)`.
fn parse(expression: &str) -> (Vec<Selector>, Vec<String>) {
    let (mut selectors, mut groups, mut open) = (Vec::new(), Vec::new(), Vec::new());
    let mut rest = expression;
    let mut word = String::new();
    while let Some(first) = rest.chars().next() {
        if !is_name(first) {
            match first {
                '(' => open.push(std::mem::take(&mut word)),
                ')' => drop(open.pop().unwrap_or_else(|| panic!("\")\" without \"(\": {expression}"))),
                _ => {}
            }
            if !first.is_whitespace() {
                word.clear();
            }
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let end = rest.find(|letter| !is_name(letter)).unwrap_or(rest.len());
        word = rest[..end].to_owned();
        rest = &rest[end..];
        if word == "by" {
            let list = rest.trim_start().strip_prefix('(').expect("by (…)");
            let (list, after) = list.split_once(')').expect("by (…)");
            groups.extend(list.split(',').map(|label| label.trim().to_owned()));
            rest = after;
        } else if word.contains(':') || word == "up" {
            let mut labels = Vec::new();
            if let Some(inside) = rest.strip_prefix('{') {
                let (inside, after) = inside.split_once('}').expect("{…}");
                labels = inside
                    .split(',')
                    .map(|one| one.split(['=', '!']).next().unwrap().trim().to_owned())
                    .collect();
                rest = after;
            }
            let over = rest.strip_prefix('[').map(|inside| {
                rest = inside.split_once(']').expect("[…]").1;
                open.last().cloned().unwrap_or_default()
            });
            selectors.push(Selector { name: std::mem::take(&mut word), labels, over });
        }
    }
    assert!(open.is_empty(), "\"(\" without \")\": {expression}");
    (selectors, groups)
}

/// The fault of an expression, if any.
fn complaints(expression: &str, known: &Known) -> Vec<String> {
    let (selectors, groups) = parse(expression);
    let mut wrong = Vec::new();
    if selectors.is_empty() {
        wrong.push("no metric".to_owned());
    }
    for Selector { name, labels, over } in &selectors {
        if name == "up" {
            continue;
        }
        let family = ["_bucket", "_total"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        let Some(kind) = known.kinds.get(family) else {
            wrong.push(format!("there is no {family}"));
            continue;
        };
        let right = match (kind.as_str(), over.as_deref()) {
            ("counter", Some("rate" | "increase")) => name.ends_with("_total"),
            ("histogram", Some("rate")) => {
                name.ends_with("_bucket") && expression.contains("histogram_quantile(")
            }
            ("gauge", None) => name == family,
            ("gauge", Some(over)) => name == family && over.ends_with("_over_time"),
            _ => false,
        };
        if !right {
            wrong.push(format!("{name} is of a {kind}, but used in {over:?}"));
        }
        let has = known.labels.get(name);
        for label in labels.iter().chain(&groups) {
            let is_later = LATER_LABELS.contains(&label.as_str()) && groups.contains(label);
            let is_known = ADDED_LABELS.contains(&label.as_str()) || is_later;
            // Without a sample the labels are not known.
            if !is_known && has.is_some_and(|has| !has.contains(label)) {
                wrong.push(format!("{name} has no label {label}, but {has:?}"));
            }
        }
    }
    wrong
}

fn expressions_of(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
            fields.values().for_each(|value| expressions_of(value, found));
        }
        Value::Array(list) => list.iter().for_each(|value| expressions_of(value, found)),
        _ => {}
    }
}

/// The expressions of the alerts, in one line or in an indented block.
fn alert_expressions(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(value) = line.trim_start().strip_prefix("expr: ") else { continue };
        if value != "|" {
            found.push(value.to_owned());
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let mut block = String::new();
        while let Some(next) = lines.next_if(|next| next.len() - next.trim_start().len() > indent) {
            block += next.trim_start();
            block.push(' ');
        }
        found.push(block);
    }
    found
}

#[tokio::test]
async fn every_expression_fits_the_metrics() {
    let known = known().await;
    let read = |path: &str| std::fs::read_to_string(repository().join(path)).unwrap();
    let mut expressions = alert_expressions(&read("deploy/prometheus/thunder.rules.yml"));
    let alerts = expressions.len();
    assert!(alerts >= 8, "{expressions:?}");
    expressions_of(&serde_json::from_str(&read("deploy/grafana/thunder.json")).unwrap(), &mut expressions);
    assert!(expressions.len() >= alerts + 15, "{}", expressions.len());
    for expression in &expressions {
        assert_eq!(complaints(expression, &known), [] as [String; 0], "{expression}");
    }
    // What the check is for.
    for (wrong, words) in [
        ("rate(vllm:generation_tokens[5m])", "is of a counter"),
        ("vllm:generation_tokens_total", "is of a counter"),
        ("rate(vllm:num_requests_running[5m])", "is of a gauge"),
        ("sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m]))", "is of a histogram"),
        ("vllm:gpu_cache_usage_perc", "there is no"),
        ("sum by (team) (vllm:num_requests_running)", "no label team"),
        ("vllm:num_requests_running{modelname=\"a\"}", "no label modelname"),
        ("1 + 1", "no metric"),
    ] {
        let found = complaints(wrong, &known).join("; ");
        assert!(found.contains(words), "{wrong}: {found}");
    }
}

/// An instruction of a Containerfile and the rest of its line, continued lines joined.
fn instructions(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let joined = lines.fold(String::new(), |text, line| match line.strip_suffix('\\') {
        Some(part) => text + part,
        None => text + line + "\n",
    });
    let split = joined.lines().filter_map(|line| line.split_once(' '));
    split.map(|(name, rest)| (name.to_owned(), rest.trim().to_owned())).collect()
}

#[test]
fn the_image_is_built_of_what_is_there() {
    let text = std::fs::read_to_string(repository().join("Containerfile")).unwrap();
    let instructions = instructions(&text);
    let of = |name: &str| -> Vec<&str> {
        instructions.iter().filter(|(one, _)| one == name).map(|(_, rest)| rest.as_str()).collect()
    };
    let stages: Vec<&str> = of("FROM").iter().filter_map(|from| Some(from.split_once(" AS ")?.1)).collect();
    let built = of("RUN").into_iter().find(|run| run.contains("cargo build")).expect("it is built");
    let manifest = std::fs::read_to_string(repository().join("crates/thunder/Cargo.toml")).unwrap();
    assert!(built.contains("--package thunder --bin thunder") && manifest.contains("name = \"thunder\""));
    let workdir = of("WORKDIR")[0];
    let mut programs = Vec::new();
    for copy in of("COPY") {
        let (from, paths) = match copy.strip_prefix("--from=") {
            Some(rest) => rest.split_once(' ').map(|(stage, paths)| (Some(stage), paths)).unwrap(),
            None => (None, copy),
        };
        let (source, target) = paths.split_once(' ').unwrap();
        match from {
            Some(stage) => {
                assert!(stages.contains(&stage), "{copy}");
                let inside = source.strip_prefix(workdir).expect("what the build made");
                assert!(built.contains(inside.trim_start_matches('/')), "{copy}");
                programs.push(Path::new(target).file_name().unwrap().to_str().unwrap());
            }
            None => assert!(repository().join(source).exists(), "{copy}"),
        }
    }
    let entry: Vec<String> = serde_json::from_str(of("ENTRYPOINT")[0]).unwrap();
    assert_eq!(entry, programs, "the image starts what was copied");
    let toolchain = std::fs::read_to_string(repository().join("Cargo.toml")).unwrap();
    let version = toolchain.lines().find_map(|line| line.strip_prefix("rust-version = ")).unwrap();
    let version = version.trim_matches('"').split('.').take(2).collect::<Vec<_>>().join(".");
    assert!(of("FROM")[0].contains(&format!("rust:{version}")), "{:?}: Rust {version}", of("FROM"));
    // Tools of the health check are installed.
    let installed = of("RUN").into_iter().filter(|run| run.contains("apt-get install")).collect::<String>();
    assert!(of("HEALTHCHECK")[0].contains("curl") && installed.contains(" curl"));
    assert!(of("HEALTHCHECK")[0].contains("/health/live"));
}

#[test]
fn images_and_the_repository_leave_out_the_key_of_prometheus() {
    let read = |path: &str| std::fs::read_to_string(repository().join(path)).unwrap();
    // Docker reads one file, Podman both.
    assert_eq!(read(".dockerignore"), read(".containerignore"));
    let lines = |path: &str| read(path).lines().map(str::to_owned).collect::<Vec<_>>();
    assert!(lines(".containerignore").contains(&"deploy/prometheus/key".to_owned()));
    assert!(lines(".gitignore").contains(&"/deploy/prometheus/key".to_owned()));
}

#[test]
fn compose_mounts_what_is_there() {
    let text = std::fs::read_to_string(repository().join("compose.yaml")).unwrap();
    let (services, declared) = text.split_once("\nvolumes:\n").expect("its volumes");
    let declared: BTreeSet<&str> = declared.lines().map(|line| line.trim().trim_end_matches(':')).collect();
    let mut mounts = 0;
    for line in services.lines().filter_map(|line| line.trim().strip_prefix("- ")) {
        let (source, target) = line.split_once(':').expect("a mount");
        assert!(target.starts_with('/'), "{line}");
        match source.strip_prefix("./") {
            Some(path) => assert!(repository().join(path).exists(), "{line}"),
            None => assert!(declared.contains(source), "{line}"),
        }
        mounts += 1;
    }
    assert!(mounts >= 6, "{mounts}");
    let file = services.lines().find_map(|line| line.trim().strip_prefix("dockerfile: ")).unwrap();
    assert!(repository().join(file).exists());
    // Prometheus scrapes the service by its name and port, with the key from the instructions in
    // compose.yaml.
    let scrape = std::fs::read_to_string(repository().join("deploy/prometheus/prometheus.yml")).unwrap();
    assert!(services.contains("\n  thunder:\n") && scrape.contains("\"thunder:8000\""), "{scrape}");
    assert!(services.contains("\"8000:8000\"") && services.contains("deploy/prometheus/key"));
    let rules = scrape.split_once("rule_files:\n").unwrap().1.lines().next().unwrap();
    let rules = rules.trim().trim_start_matches("- ");
    assert!(repository().join("deploy/prometheus").join(rules).exists(), "{rules}");
    // Grafana reads dashboards from the folder where compose.yaml mounts ours, and uses the data
    // source that ours names.
    let provider = repository().join("deploy/grafana/provisioning/dashboards/thunder.yaml");
    let provider = std::fs::read_to_string(provider).unwrap();
    let folder = provider.lines().find_map(|line| line.trim().strip_prefix("path: ")).unwrap();
    assert!(services.contains(&format!(":{folder}/thunder.json")), "{folder}");
    let source = repository().join("deploy/grafana/provisioning/datasources/prometheus.yaml");
    let source = std::fs::read_to_string(source).unwrap();
    let kind = source.lines().find_map(|line| line.trim().strip_prefix("type: ")).unwrap();
    let dashboard = std::fs::read_to_string(repository().join("deploy/grafana/thunder.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let chosen = variables.iter().find(|variable| variable["type"] == "datasource").unwrap();
    assert_eq!((&chosen["name"], chosen["query"].as_str()), (&"datasource".into(), Some(kind)));
}
