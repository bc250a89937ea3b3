//! The thunder command.

mod bench;
mod builtin;
mod chat;
mod demo;
mod doctor;
mod engine_args;
mod launch_command;
mod log;
mod model_command;
mod plan;
mod plot;
mod prompt;
mod run;
mod serve;
mod session;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Pools the machines on a desk into one LLM engine: shards a model over ranks, gets faster with each, and serves it behind
/// an OpenAI-compatible API.
///
/// Start with `thunder demo`. A MODEL is `builtin`, a folder in Hugging Face or MLX format, or the name of a model in the
/// local Hugging Face cache (`thunder model pull org/name` brings it there).
#[derive(Parser)]
#[command(name = "thunder", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::DemoCommand),
    Run(run::RunCommand),
    Chat(chat::ChatCommand),
    Serve(serve::ServeCommand),
    Plan(plan::PlanCommand),
    Bench(bench::BenchCommand),
    Model(model_command::ModelCommand),
    Launch(launch_command::LaunchCommand),
    Doctor(doctor::DoctorCommand),
}

/// `thunder demo | head`: println's panic is no fault to report. Ranks notice the end of this one and end too.
fn end_quietly_on_a_closed_pipe() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
            std::process::exit(0);
        }
        report(panic);
    }));
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if matches!(command, Command::Plan(_) | Command::Doctor(_) | Command::Model(_)) {
        // `thunder plan | head` ends quietly. Commands with ranks need the errors of their sockets.
        sigpipe::reset();
    }
    end_quietly_on_a_closed_pipe();
    log::start();
    let outcome = match command {
        Command::Demo(command) => command.run(),
        Command::Run(command) => command.run(),
        Command::Chat(command) => command.run(),
        Command::Serve(command) => command.run(),
        Command::Plan(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Model(command) => command.run(),
        Command::Doctor(command) => command.run(),
        // A launcher ends as its first failing rank did.
        Command::Launch(command) => {
            return command.run().unwrap_or_else(|error| {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            });
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
