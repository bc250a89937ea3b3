//! `thunder demo`.

use std::io::IsTerminal;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::bail;
use clap::Args;
use serde_json::json;
use thunder_cluster::local::CHILD;
use thunder_collectives::Config;
use thunder_model::ModelFolder;
use thunder_server::ServerConfig;
use tokio::sync::watch;

use crate::engine_args::{EngineArgs, LayoutArgs};
use crate::prompt::{self, Answer};
use crate::session::{self, Session};
use crate::{builtin, plan, serve};

/// Answer a question with the built-in model on 1 rank and on 2 ranks, and compare the speed
///
/// Each rank has one thread, so that ranks represent machines of equal speed. --ranks and --threads
/// change the two numbers.
#[derive(Args)]
pub struct DemoCommand {
    /// Question to ask instead of the demo's question
    #[arg(long, value_name = "TEXT")]
    question: Option<String>,
    /// Serve the sharded model with an OpenAI-compatible API afterwards
    #[arg(long)]
    serve: bool,
    /// Port for --serve
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    port: u16,
    /// Print one JSON object instead of text
    #[arg(long, conflicts_with = "serve")]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The question for one rank, and the one for several.
const QUESTIONS: [&str; 2] =
    ["How does Thunderhead make a model faster with every machine?", "What happens when a machine dies?"];
/// Number of times to ask a question. The first run warms up; the best of the others counts.
const TIMES: usize = 6;

/// The best answer of a number of ranks.
struct DemoResult {
    ranks: usize,
    question: String,
    answer: Answer,
    tokens_per_s: f64,
    /// Share of rank 0's time spent in all-reduces.
    reduce_share: f64,
}

impl DemoCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        // A rank that this demo started.
        let is_follower = std::env::var_os(CHILD).is_some();
        if !is_follower && Config::from_env()?.is_some() {
            bail!(
                "the demo starts its own ranks: run it without thunder launch, and without THUNDER_RANK or MLX_RANK in the \
                 environment"
            );
        }
        let ranks = self.engine.layout.ranks().max(2) as u16;
        let layout = LayoutArgs { ranks: Some(ranks), ..self.engine.layout.clone() };
        let sharded = EngineArgs { layout, ..self.engine.clone() };
        if is_follower {
            return session::open(builtin::NAME.as_ref(), &sharded).map(drop);
        }
        // Equal threads per rank, so that the comparison is of one machine with several.
        let threads = self.engine.threads.unwrap_or(1);
        let sharded = EngineArgs { threads: Some(threads), ..sharded };
        let layout = LayoutArgs { ranks: Some(1), split: Vec::new(), ..self.engine.layout.clone() };
        let single = EngineArgs { layout, threads: Some(threads), ..self.engine.clone() };
        let folder = session::open_folder(builtin::NAME.as_ref())?;
        sharded.layout.shard_plan(&folder, usize::from(ranks))?;
        // A used port is reported before anything is shown.
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let mut listener = if self.serve { Some(serve::listen(address)?) } else { None };
        let mut results = Vec::new();
        for (args, question) in [(single, QUESTIONS[0]), (sharded, QUESTIONS[1])] {
            let question = self.question.as_deref().unwrap_or(question);
            let ranks = args.layout.ranks();
            if !self.json {
                println!("── {ranks} rank{} {}", if ranks == 1 { "" } else { "s" }, "─".repeat(60));
            }
            let Some(session) = session::open(builtin::NAME.as_ref(), &args)? else { return Ok(()) };
            results.push(self.ask(&session, &folder, ranks, question)?);
            if let Some(listener) = listener.take_if(|_| ranks > 1) {
                self.conclude(&results);
                return serve::serve(session, listener, watch::channel(ServerConfig::default()).1, None);
            }
            session.close()?;
        }
        self.conclude(&results);
        Ok(())
    }

    fn ask(
        &self,
        session: &Session,
        folder: &ModelFolder,
        ranks: usize,
        question: &str,
    ) -> anyhow::Result<DemoResult> {
        let engine = &session.head.engine;
        if !self.json {
            plan::print(folder, &session.head.plan, &session.head.footprints);
            println!("\n> {question}");
        }
        let tokens = prompt::tokens(engine, &[prompt::message("user", question)])?;
        let request = thunder_engine::Request {
            prompt: tokens,
            sampling: engine.info().default_sampling.clone(),
            max_tokens: Some(256),
            stop: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            ..thunder_engine::Request::default()
        };
        let mut best: Option<DemoResult> = None;
        for time in 0..TIMES {
            let before = engine.counters().times();
            let show = |text: &str| if self.json || time > 0 { Ok(()) } else { prompt::print_now(text) };
            let answer = prompt::read(engine.submit(request.clone())?, || false, show)?;
            let tokens_per_s = prompt::decode_rate(&answer.usage);
            if time > 0 && best.as_ref().is_none_or(|best| tokens_per_s > best.tokens_per_s) {
                let reduce_share = engine.counters().reduce_share_since(before);
                let question = question.to_owned();
                best = Some(DemoResult { ranks, question, answer, tokens_per_s, reduce_share });
            }
        }
        let Some(best) = best else { unreachable!("every question is asked more than once") };
        if !self.json {
            let ms = best.answer.usage.time_to_first_token.as_secs_f64() * 1e3;
            let over =
                if ranks > 1 { format!("over {}", session.head.transport) } else { "alone".to_owned() };
            println!("\n\n{:.0} tokens/s, first token after {ms:.1} ms, {over}", best.tokens_per_s);
            println!("all-reduces took {:.0} % of the time\n", best.reduce_share * 100.0);
        }
        Ok(best)
    }

    fn conclude(&self, results: &[DemoResult]) {
        let speedup = match results {
            [one, more] => more.tokens_per_s / one.tokens_per_s,
            _ => 1.0,
        };
        if self.json {
            let rows: Vec<_> = results
                .iter()
                .map(|result| {
                    json!({
                        "ranks": result.ranks,
                        "question": result.question,
                        "answer": result.answer.text,
                        "tokens_per_s": result.tokens_per_s,
                        "time_to_first_token_s": result.answer.usage.time_to_first_token.as_secs_f64(),
                        "reduce_share": result.reduce_share,
                    })
                })
                .collect();
            println!("{}", json!({ "outcomes": rows, "speedup": speedup }));
            return;
        }
        let bold = |text: String| {
            if std::io::stdout().is_terminal() { format!("\x1b[1m{text}\x1b[0m") } else { text }
        };
        let ranks = results.last().map_or(2, |result| result.ranks);
        println!("{}", bold(format!("{ranks} ranks decode {speedup:.2} times as fast as one.")));
        println!(
            "This model is small (13 MB), so messages between ranks take much of the time. Large models gain more:\n  \
             thunder model synth --arch llama-1b --bits 4 /tmp/llama-1b    write a model with random weights\n  \
             thunder bench decode /tmp/llama-1b --ranks 2 --threads 1      measure it on two ranks\n\
             Next:\n  \
             thunder chat                                                  talk with the built-in model\n  \
             thunder model pull ORG/NAME                                   download another model\n  \
             thunder serve ORG/NAME --ranks 2                              serve it with an OpenAI-compatible API\n  \
             thunder plan ORG/NAME --ranks 3                               show how it would be split"
        );
    }
}
