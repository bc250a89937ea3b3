//! The thunder command.

mod admin;
mod admin_client;
mod audit_command;
mod backup_command;
mod bench;
mod builtin;
mod capacity;
mod chat;
mod cluster_command;
mod completions;
mod config_command;
mod current_thread;
mod demo;
mod desk;
mod devices;
mod doctor;
#[cfg(test)]
mod documents_tests;
mod engine_args;
mod interrupt;
mod key_args;
mod keys_command;
mod launch_command;
mod limit_args;
mod limits_command;
mod log;
mod log_rotation;
mod mac_command;
mod man;
mod mlx_launch;
mod model_arg;
mod model_command;
mod node_list;
mod plan;
mod plot;
mod progress;
mod prompt;
mod reload;
mod report;
mod run;
mod serve;
mod service_command;
mod session;
mod signin;
mod stats;
mod store_args;
mod support_command;
mod table;
mod up;
mod usage_command;
mod wrap;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs one LLM on several machines together: shards the model over ranks, and serves it through an
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
    Capacity(capacity::CapacityCommand),
    Bench(bench::BenchCommand),
    Model(model_command::ModelCommand),
    Up(up::UpCommand),
    Cluster(cluster_command::ClusterCommand),
    Config(config_command::ConfigCommand),
    Keys(keys_command::KeysCommand),
    Limits(limits_command::LimitsCommand),
    Usage(usage_command::UsageCommand),
    Audit(audit_command::AuditCommand),
    Backup(backup_command::BackupCommand),
    Restore(backup_command::RestoreCommand),
    Service(service_command::ServiceCommand),
    Support(support_command::SupportCommand),
    Stats(stats::StatsCommand),
    Launch(launch_command::LaunchCommand),
    Devices(devices::DevicesCommand),
    Mac(mac_command::MacCommand),
    Doctor(doctor::DoctorCommand),
    Completions(completions::CompletionsCommand),
    Man(man::ManCommand),
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
        match log::is_json() {
            true => log::tell_panic(panic),
            false => report(panic),
        }
    }));
}

/// The description of the command line, for the dashboard's settings.
pub(crate) fn command_line() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// An error of the command line, with what to write where a number has a unit or is none.
pub(crate) fn with_remedy(mut error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    if std::error::Error::source(&error).is_some_and(|why| why.is::<std::num::ParseIntError>()) {
        let remedy = "write a whole number, without a unit: --help says what it counts".into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![remedy]));
    }
    error
}

fn main() -> ExitCode {
    completions::answer_shell::<Cli>();
    let arguments = match config_command::expand(std::env::args_os().collect()) {
        Ok(arguments) => arguments,
        Err(error) => {
            log::fail(&error);
            return ExitCode::FAILURE;
        }
    };
    let command = match Cli::try_parse_from(arguments).map_err(with_remedy) {
        Ok(cli) => cli.command,
        Err(wrong) if wrong.use_stderr() && log::is_json() => {
            log::fail(&anyhow::anyhow!("{}", wrong.to_string().trim_start_matches("error: ").trim_end()));
            return ExitCode::from(2);
        }
        Err(wrong) => wrong.exit(),
    };
    if matches!(
        command,
        Command::Plan(_)
            | Command::Devices(_)
            | Command::Capacity(_)
            | Command::Doctor(_)
            | Command::Model(_)
            | Command::Completions(_)
    ) {
        // SIGPIPE ends `thunder plan | head` quietly. It must not kill commands with ranks, whose
        // sockets report errors.
        sigpipe::reset();
    }
    end_quietly_on_a_closed_pipe();
    // An agent is none, its ranks are processes of their own.
    log::start(!matches!(command, Command::Up(_)));
    log_rotation::start();
    let outcome = match command {
        Command::Demo(command) => command.run(),
        Command::Run(command) => command.run(),
        Command::Chat(command) => command.run(),
        Command::Serve(command) => command.run(),
        Command::Plan(command) => command.run(),
        Command::Capacity(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Model(command) => command.run(),
        Command::Devices(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::Up(command) => command.run(),
        Command::Config(command) => command.run(),
        Command::Keys(command) => command.run(),
        Command::Limits(command) => command.run(),
        Command::Usage(command) => command.run(),
        Command::Audit(command) => command.run(),
        Command::Backup(command) => command.run(),
        Command::Restore(command) => command.run(),
        Command::Service(command) => command.run(),
        Command::Support(command) => command.run(),
        Command::Completions(command) => command.run(),
        Command::Man(command) => command.run::<Cli>(),
        Command::Mac(command) => {
            return command.run().unwrap_or_else(|error| {
                log::fail(&error);
                ExitCode::FAILURE
            });
        }
        Command::Stats(command) => command.run(),
        Command::Cluster(command) => {
            return command.run().unwrap_or_else(|error| {
                log::fail(&error);
                ExitCode::FAILURE
            });
        }
        // The launcher's exit status is that of the first failing rank.
        Command::Launch(command) => {
            return command.run().unwrap_or_else(|error| {
                log::fail(&error);
                ExitCode::FAILURE
            });
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::fail(&error);
            ExitCode::FAILURE
        }
    }
}
