//! `thunder keys`: the keys of a server.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value, json};
use thunder_access::Time;

use crate::admin_client::{AdminArgs, encoded};
use crate::cluster_command::parse_time;
use crate::table;

/// Create, change, rotate and revoke the API keys of a server
///
/// Works on the running server, or on its store if no server runs. After the first key was created,
/// every request needs a key. `thunder limits` sets limits of teams and models.
#[derive(Args)]
pub struct KeysCommand {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    admin: AdminArgs,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Create a key and print its secret, which is shown only once
    Create {
        /// Name of the key, unique among the active keys
        #[arg(value_name = "NAME")]
        name: String,
        #[command(flatten)]
        fields: KeyFields,
    },
    /// List the keys
    List {
        /// Also list revoked and expired keys
        #[arg(long)]
        all: bool,
    },
    /// Show one key
    Show {
        /// Name or id of the key
        #[arg(value_name = "KEY")]
        key: String,
    },
    /// Change a key; properties that are not given stay
    #[command(mut_arg("role", |arg| arg.help("New permissions of the key")))]
    #[command(mut_arg("models", |arg| arg.help("Model that the key may use, in place of its models; may be repeated")))]
    #[command(mut_arg("expires", |arg| {
        arg.help("When the key expires: after a time such as 90d, or on a date such as 2027-01-31")
    }))]
    Change {
        /// Name or id of the key
        #[arg(value_name = "KEY")]
        key: String,
        /// New name
        #[arg(long, value_name = "NAME")]
        rename: Option<String>,
        /// Remove these properties, e.g. expires or tokens-per-day; separate several by commas
        #[arg(long, value_name = "NAME,…", value_enum, value_delimiter = ',')]
        clear: Vec<Clearable>,
        #[command(flatten)]
        fields: KeyFields,
    },
    /// Give a key a new secret and print it, once only
    Rotate {
        /// Name or id of the key
        #[arg(value_name = "KEY")]
        key: String,
        /// How long the former secret still works, e.g. 30m, 12h or 7d; 0s ends it at once
        /// [default: 0s]
        #[arg(long, value_name = "TIME", value_parser = parse_grace)]
        grace: Option<Duration>,
    },
    /// Revoke a key at once and permanently
    Revoke {
        /// Name or id of the key
        #[arg(value_name = "KEY")]
        key: String,
    },
}

/// A property that a key may be without.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Clearable {
    Owner,
    Team,
    Expires,
    Model,
    RequestsPerMinute,
    TokensPerMinute,
    ParallelRequests,
    TokensPerDay,
    TokensPerMonth,
    CostPerMonth,
}

impl Clearable {
    /// Its name in the API, and whether it is a limit.
    fn field(self) -> (&'static str, bool) {
        match self {
            Self::Owner => ("owner", false),
            Self::Team => ("team", false),
            Self::Expires => ("expires", false),
            Self::Model => ("models", false),
            Self::RequestsPerMinute => ("requests_per_minute", true),
            Self::TokensPerMinute => ("tokens_per_minute", true),
            Self::ParallelRequests => ("parallel_requests", true),
            Self::TokensPerDay => ("tokens_per_day", true),
            Self::TokensPerMonth => ("tokens_per_month", true),
            Self::CostPerMonth => ("cost_per_month", true),
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Use models, and see its own usage
    User,
    /// Also create keys, set limits and see everything
    Admin,
}

/// Properties of a key in addition to its name.
#[derive(Args)]
struct KeyFields {
    /// Person or service that the key is for
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// Team of the key; under load, teams share the engine
    #[arg(long, value_name = "NAME")]
    team: Option<String>,
    /// Permissions of the key [default: user]
    #[arg(long, value_enum)]
    role: Option<RoleArg>,
    /// When the key expires: after a time such as 90d, or on a date such as 2027-01-31 [default:
    /// never]
    #[arg(long, value_name = "TIME", value_parser = parse_end)]
    expires: Option<Time>,
    /// Model that the key may use; may be repeated [default: all]
    #[arg(long = "model", value_name = "MODEL")]
    models: Vec<String>,
    #[command(flatten)]
    limits: LimitArgs,
}

/// Limits of a key, a team or a model.
#[derive(Args)]
pub struct LimitArgs {
    /// Maximum requests that begin within any 60 s
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    requests_per_minute: Option<u64>,
    /// Maximum tokens of prompts and answers within any 60 s
    ///
    /// Until a request ends, its prompt and its max_tokens count.
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    tokens_per_minute: Option<u64>,
    /// Maximum parallel requests
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    parallel_requests: Option<u64>,
    /// Maximum tokens within a day (UTC)
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    tokens_per_day: Option<u64>,
    /// Maximum tokens within a month (UTC)
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    tokens_per_month: Option<u64>,
    /// Maximum cost within a month (UTC), in the currency of `thunder limits`
    #[arg(long, allow_negative_numbers = true, value_name = "AMOUNT")]
    cost_per_month: Option<f64>,
}

impl LimitArgs {
    /// The limits that are given, as JSON.
    pub fn given(&self) -> Map<String, Value> {
        let mut limits = Map::new();
        for (name, value) in [
            ("requests_per_minute", self.requests_per_minute),
            ("tokens_per_minute", self.tokens_per_minute),
            ("parallel_requests", self.parallel_requests),
            ("tokens_per_day", self.tokens_per_day),
            ("tokens_per_month", self.tokens_per_month),
        ] {
            if let Some(value) = value {
                limits.insert(name.into(), value.into());
            }
        }
        if let Some(cost) = self.cost_per_month {
            limits.insert("cost_per_month".into(), cost.into());
        }
        limits
    }
}

impl KeyFields {
    /// The fields that are given, as JSON.
    fn given(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                fields.insert(name.to_owned(), value);
            }
        };
        put("owner", self.owner.clone().map(Value::from));
        put("team", self.team.clone().map(Value::from));
        put(
            "role",
            self.role.map(|role| match role {
                RoleArg::User => json!("user"),
                RoleArg::Admin => json!("admin"),
            }),
        );
        put("expires", self.expires.map(|expires| json!(expires)));
        put("models", (!self.models.is_empty()).then(|| json!(self.models)));
        fields
    }
}

/// A time with a unit, or none at all.
fn parse_grace(text: &str) -> Result<Duration, String> {
    let is_none = ["0", "0s", "0m", "0h", "0d"].contains(&text);
    if is_none { Ok(Duration::ZERO) } else { parse_time(text) }
}

/// A moment: a date, or a time from now on.
fn parse_end(text: &str) -> Result<Time, String> {
    if let Ok(time) = text.parse::<Time>() {
        return Ok(time);
    }
    let from_now =
        parse_time(text).map_err(|_| "write a date like 2027-01-31, or a time like 90d or 12h".to_owned())?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let ms = u64::try_from((now + from_now).as_millis());
    ms.map(Time).map_err(|_| format!("{text} is too long"))
}

impl KeysCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let admin = &self.admin;
        let path = |key: &str| format!("/admin/keys/{}", encoded(key));
        match &self.action {
            Action::Create { name, fields } => {
                let mut body = fields.given();
                body.insert("name".into(), name.clone().into());
                body.insert("limits".into(), fields.limits.given().into());
                let made = admin.ask("POST", "/admin/keys", Some(&body.into()))?;
                if self.json {
                    self.show_secret(&self.with_warnings(made, &fields.models));
                } else {
                    // First the secret, which is shown only once; asking the server may take long.
                    self.show_secret(&made);
                    warn_of(&self.with_warnings(made, &fields.models));
                }
                if fields.limits.cost_per_month.is_some() {
                    warn_without_price(&admin.ask("GET", "/admin/limits", None)?);
                }
            }
            Action::List { all } => {
                let answer = admin.ask("GET", "/admin/keys", None)?;
                self.list(&answer, *all);
            }
            Action::Show { key } => self.show(&admin.ask("GET", &path(key), None)?),
            Action::Change { key, rename, clear, fields } => {
                let mut body = fields.given();
                if let Some(name) = rename {
                    body.insert("name".into(), name.clone().into());
                }
                let mut given = fields.limits.given();
                for property in clear {
                    match property.field() {
                        (name, true) => given.insert(name.into(), Value::Null),
                        (name, false) => body.insert(name.into(), Value::Null),
                    };
                }
                if !given.is_empty() {
                    // The server replaces all limits of a key at once.
                    let before = admin.ask("GET", &path(key), None)?;
                    let mut limits = before["key"]["limits"].as_object().cloned().unwrap_or_default();
                    limits.extend(given);
                    body.insert("limits".into(), limits.into());
                }
                let changed = admin.ask("PATCH", &path(key), Some(&body.into()))?;
                self.show(&self.with_warnings(changed, &fields.models));
            }
            Action::Rotate { key, grace } => {
                let body = json!({"grace_s": grace.map_or(0, |grace| grace.as_secs())});
                let answer = admin.ask("POST", &format!("{}/rotate", path(key)), Some(&body))?;
                self.show_secret(&answer);
                if answer["key"]["state"] == "expired" {
                    eprintln!("the key is expired: `thunder keys change {key} --expires 90d`");
                }
            }
            Action::Revoke { key } => {
                let answer = admin.ask("POST", &format!("{}/revoke", path(key)), None)?;
                match self.json {
                    true => println!("{answer}"),
                    false => println!("{} is revoked", text(&answer["key"]["name"])),
                }
                if answer["key"]["role"] == "admin" {
                    warn_without_admin(&admin.ask("GET", "/admin/keys", None)?);
                }
            }
        }
        Ok(())
    }

    /// An answer with a warning for each model that no server here serves. A store without a server
    /// knows no models, and a server that cannot be asked is no reason to fail.
    fn with_warnings(&self, mut answer: Value, models: &[String]) -> Value {
        if models.is_empty() || !self.admin.is_served().unwrap_or(false) {
            return answer;
        }
        if let Ok(served) = self.admin.ask("GET", "/admin/models", None) {
            let served = served["models"].as_array().into_iter().flatten().map(|model| text(&model["name"]));
            let warnings = unserved(models, &served.collect::<Vec<_>>());
            if !warnings.is_empty() {
                answer["warnings"] = warnings.into();
            }
        }
        answer
    }

    fn show_secret(&self, answer: &Value) {
        let is_rotated = matches!(self.action, Action::Rotate { .. });
        if self.json {
            println!("{answer}");
            return;
        }
        let key = &answer["key"];
        eprintln!("key {} ({}), shown this once:", text(&key["name"]), text(&key["id"]));
        // Alone on standard output, for `KEY=$(thunder keys create …)`.
        println!("{}", text(&answer["secret"]));
        match key["grace_until"].as_str() {
            Some(until) => eprintln!("the former secret works until {until}"),
            None if is_rotated => eprintln!("the former secret has ended"),
            None => {}
        }
    }

    fn show(&self, answer: &Value) {
        if self.json {
            println!("{answer}");
            return;
        }
        warn_of(answer);
        for (name, value) in answer["key"].as_object().into_iter().flatten() {
            let shown = match value {
                Value::Object(limits) => fields(limits),
                Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join(", "),
                other => text(other),
            };
            println!("{:<14} {}", name.replace('_', " "), if shown.is_empty() { "-" } else { &shown });
        }
    }

    fn list(&self, answer: &Value, all: bool) {
        let keys = answer["keys"].as_array().into_iter().flatten();
        let keys: Vec<&Value> = keys.filter(|key| all || works(key)).collect();
        if self.json {
            println!("{}", json!({"keys": keys}));
            return;
        }
        let mut shown = table::new(&["name", "id", "state", "role", "owner", "team", "expires", "last used"]);
        for key in keys {
            let day = |name: &str| text(&key[name]).chars().take(10).collect::<String>();
            let cell = |name: &str| text(&key[name]);
            shown.add_row([
                cell("name"),
                cell("id"),
                cell("state"),
                cell("role"),
                cell("owner"),
                cell("team"),
                day("expires"),
                cell("last_used").chars().take(16).collect(),
            ]);
        }
        println!("{shown}");
    }
}

/// What is odd about a key's models: a key names a model by its full name or its last part.
fn unserved(models: &[String], served: &[String]) -> Vec<String> {
    let is_served = |model: &String| {
        served.iter().any(|name| name == model || name.rsplit('/').next() == Some(model.as_str()))
    };
    let all = match served {
        [] => "none is loaded".to_owned(),
        names => format!("there are {}", names.join(", ")),
    };
    let wrong = models.iter().filter(|model| *model != "*" && !is_served(model));
    wrong.map(|model| format!("no model \"{model}\" is served here ({all}): check the name")).collect()
}

fn warn_of(answer: &Value) {
    for warning in answer["warnings"].as_array().into_iter().flatten() {
        eprintln!("warning: {}", text(warning));
    }
}

/// Only this machine's user may end the last admin key; the server refuses others.
fn warn_without_admin(answer: &Value) {
    let mut keys = answer["keys"].as_array().into_iter().flatten();
    if !keys.any(|key| key["role"] == "admin" && works(key)) {
        eprintln!(
            "no admin key is left: only commands on this machine administer it now; \
             `thunder keys create NAME --role admin` makes one"
        );
    }
}

/// A cost budget limits nothing while requests cost nothing.
fn warn_without_price(policy: &Value) {
    let mut models = policy["models"].as_object().into_iter().flatten();
    if models.all(|(_, model)| model["price"].is_null()) {
        eprintln!(
            "no model has a price, so the cost is always 0: `thunder limits model MODEL --price-input \
             AMOUNT --price-output AMOUNT` sets prices for a million tokens"
        );
    }
}

fn works(key: &Value) -> bool {
    matches!(text(&key["state"]).as_str(), "active" | "rotating")
}

/// The fields of an object that are set, in one line.
pub fn fields(object: &Map<String, Value>) -> String {
    let set = object.iter().filter(|(_, value)| !value.is_null());
    let words = set.map(|(name, value)| match value {
        Value::Object(inner) => format!("{name}=({})", fields(inner)),
        value => format!("{name}={}", text(value)),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// A value for people.
pub fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_that_are_not_served_are_named() {
        let [one, other] = ["org/model", "builtin"].map(str::to_owned);
        let all = [one.clone(), other.clone()];
        for known in ["org/model", "model", "builtin", "*"] {
            assert!(unserved(&[known.to_owned()], &all).is_empty(), "{known}");
        }
        let warnings = unserved(&["nosuch".to_owned(), one, "org/builtin".to_owned()], &all);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(
            warnings[0].contains("\"nosuch\"") && warnings[0].contains("org/model, builtin"),
            "{warnings:?}"
        );
        assert!(unserved(&[other], &[])[0].contains("none is loaded"));
    }

    #[test]
    fn a_grace_of_nothing_is_a_time() {
        assert_eq!(parse_grace("0s"), Ok(Duration::ZERO));
        assert_eq!(parse_grace("12h"), Ok(Duration::from_secs(43_200)));
        assert!(parse_grace("x").is_err() && parse_grace("-1s").is_err() && parse_grace("00").is_err());
    }
}
