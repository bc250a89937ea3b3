//! The thunder command.

mod bench;
mod builtin;
mod chat;
mod cluster_command;
mod completions;
mod demo;
mod doctor;
mod engine_args;
mod interrupt;
mod key_args;
mod launch_command;
mod log;
mod mlx_launch;
mod model_arg;
mod model_command;
mod plan;
mod plot;
mod progress;
mod prompt;
mod report;
mod run;
mod serve;
mod service;
mod session;
mod stats;
mod table;
mod up;
mod wrap;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs one LLM on several machines together: shards the model over ranks, and serves it with an
/// OpenAI-compatible API
///
/// Start with `thunder demo`. A MODEL is `builtin`, a folder in Hugging Face or MLX format, or the
/// name of a model in the local Hugging Face cache (`thunder model pull ORG/NAME` downloads one to
/// it).
#[derive(Parser)]
#[command(name = "thunder", version, max_term_width = 100)]
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
    Up(up::UpCommand),
    Cluster(cluster_command::ClusterCommand),
    Service(service::ServiceCommand),
    Devices(stats::DevicesCommand),
    Stats(stats::StatsCommand),
    Launch(launch_command::LaunchCommand),
    Doctor(doctor::DoctorCommand),
    Completions(completions::CompletionsCommand),
}

/// Ends the process quietly when println or eprintln panics because its reader has closed the pipe,
/// as in `thunder demo 2>&1 | head`. The other ranks notice and end too.
fn end_quietly_on_a_closed_pipe() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        if text.starts_with("failed printing to std") && text.contains("Broken pipe") {
            std::process::exit(0);
        }
        report(panic);
    }));
}

fn main() -> ExitCode {
    completions::answer_shell::<Cli>();
    let command = Cli::parse().command;
    if matches!(command, Command::Plan(_) | Command::Doctor(_) | Command::Model(_) | Command::Completions(_))
    {
        // SIGPIPE ends `thunder plan | head` quietly. Commands with ranks must not die of it: their
        // sockets report errors.
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
        Command::Up(command) => command.run(),
        Command::Completions(command) => command.run(),
        Command::Service(command) => command.run(),
        Command::Devices(command) => command.run(),
        Command::Stats(command) => command.run(),
        Command::Cluster(command) => {
            return command.run().unwrap_or_else(|error| {
                eprintln!("error: {}", report::line(&error));
                ExitCode::FAILURE
            });
        }
        // The launcher's exit status is that of the first failing rank.
        Command::Launch(command) => {
            return command.run().unwrap_or_else(|error| {
                eprintln!("error: {}", report::line(&error));
                ExitCode::FAILURE
            });
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", report::line(&error));
            ExitCode::FAILURE
        }
    }
}
